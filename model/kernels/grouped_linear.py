"""Grouped linear map in one call, and its gradients: `torch.nn.functional.grouped_mm` where dtypes and strides allow.

Shapes: R rows, S segments, I and O widths in and out.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from model.kernels.grouped_linear_reference import grouped_linear_reference


def grouped_linear(rows_RI: Tensor, weight_SOI: Tensor, segment_ends_S: Tensor) -> Tensor:
    """As `grouped_linear_reference`.

    Args:
        rows_RI: rows sorted by segment; every row lies in a segment.
        weight_SOI: one matrix per segment, same dtype.
        segment_ends_S: int32 offsets, rising, the last one R.
    """
    if not _fits(rows_RI, *weight_SOI.shape[1:]):
        return grouped_linear_reference(rows_RI, weight_SOI, segment_ends_S)
    return F.grouped_mm(rows_RI, weight_SOI.transpose(1, 2), offs=segment_ends_S)


def grouped_input_gradient(grad_RO: Tensor, weight_SOI: Tensor, segment_ends_S: Tensor) -> Tensor:
    """Gradient [R, I] of the rows of `grouped_linear`: ``grad[segment s] @ weight[s]``."""
    return grouped_linear(grad_RO.contiguous(), weight_SOI.transpose(1, 2), segment_ends_S)


def grouped_weight_gradient(grad_RO: Tensor, rows_RI: Tensor, segment_ends_S: Tensor) -> Tensor:
    """Gradient [S, O, I] of the weights of `grouped_linear`: ``grad[segment s].T @ rows[segment s]``."""
    grad_RO = grad_RO.contiguous()
    if _fits(rows_RI, grad_RO.shape[1], rows_RI.shape[1]):
        return F.grouped_mm(grad_RO.T, rows_RI, offs=segment_ends_S)
    ends = segment_ends_S.tolist()
    return torch.stack([grad_RO[a:b].T @ rows_RI[a:b] for a, b in zip([0, *ends[:-1]], ends)])


def _fits(rows: Tensor, *widths: int) -> bool:
    """grouped_mm takes bf16 and fp32 and strides that are multiples of 16 bytes, also in its backward."""
    if rows.dtype not in (torch.bfloat16, torch.float32) or rows.shape[0] == 0:
        return False
    return all(width * rows.element_size() % 16 == 0 for width in widths)
