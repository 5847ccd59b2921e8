"""Grouped linear map in one call: `torch.nn.functional.grouped_mm` where its dtypes and strides allow."""

import torch
from torch import Tensor
from torch.nn import functional as F

from model.kernels.grouped_linear_reference import grouped_linear_reference


def grouped_linear(rows_RI: Tensor, weight_SOI: Tensor, segment_ends_S: Tensor) -> Tensor:
    """As `grouped_linear_reference`, outputs and gradients.

    Args:
        rows_RI: rows sorted by segment; every row lies in a segment.
        weight_SOI: one matrix per segment, same dtype.
        segment_ends_S: int32 offsets, rising, the last one R.
    """
    if not _fits(rows_RI, weight_SOI):
        return grouped_linear_reference(rows_RI, weight_SOI, segment_ends_S)
    return F.grouped_mm(rows_RI, weight_SOI.transpose(1, 2), offs=segment_ends_S)


def _fits(rows: Tensor, weight: Tensor) -> bool:
    """grouped_mm takes bf16 and fp32 and strides that are multiples of 16 bytes, also in its backward."""
    if rows.dtype not in (torch.bfloat16, torch.float32) or rows.shape[0] == 0:
        return False
    return all(size * rows.element_size() % 16 == 0 for size in weight.shape[1:])
