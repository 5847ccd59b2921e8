"""Grouped linear map, the law: one matrix product per segment of rows."""

import torch
from torch import Tensor
from torch.nn import functional as F


def grouped_linear_reference(rows_RI: Tensor, weight_SOI: Tensor, segment_ends_S: Tensor) -> Tensor:
    """``rows[segment s] @ weight[s].T`` for every segment; empty segments give no rows and zero gradients.

    Args:
        rows_RI: rows sorted by segment.
        weight_SOI: one matrix per segment.
        segment_ends_S: int offsets, rising, the last one R.

    Returns:
        [R, O].
    """
    parts, start = [], 0
    for weight, end in zip(weight_SOI.unbind(), segment_ends_S.tolist()):
        parts.append(F.linear(rows_RI[start:end], weight))
        start = end
    return torch.cat(parts)
