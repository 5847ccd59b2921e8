"""Attention over depth with a backward of its own.

The sources are already alive (the bank and the prefix), so nothing but N numbers a token is saved; the norm
is folded into one number per source and token, so neither keys nor a stacked copy ever exist.

Shapes: N sources, M tokens (flat), D model.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.precision import compute_dtype


class _ResidualMix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_D: Tensor, norm_D: Tensor, eps: float, *sources: Tensor) -> Tensor:
        dtype = compute_dtype(sources[0].dtype)
        dim = query_D.numel()
        key_D = query_D.to(dtype) * norm_D.to(dtype)
        rows = [source.reshape(-1, dim) for source in sources]
        rstd_NM = torch.stack([_inverse_rms(row, eps) for row in rows])
        score_NM = torch.stack([row.to(dtype) @ key_D for row in rows]) * rstd_NM
        alpha_NM = score_NM.softmax(dim=0)
        mixed_MD = rows[0].to(dtype) * alpha_NM[0].unsqueeze(1)
        for row, alpha_M in zip(rows[1:], alpha_NM[1:]):
            mixed_MD.addcmul_(row.to(dtype), alpha_M.unsqueeze(1))
        ctx.save_for_backward(query_D, norm_D, rstd_NM, score_NM, alpha_NM, *sources)
        return mixed_MD.to(sources[0].dtype).view_as(sources[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query_D, norm_D, rstd_NM, score_NM, alpha_NM, *sources = ctx.saved_tensors
        dtype, dim = alpha_NM.dtype, query_D.numel()
        key_D = query_D.to(dtype) * norm_D.to(dtype)
        grad_MD = grad.reshape(-1, dim).to(dtype)
        rows = [source.reshape(-1, dim).to(dtype) for source in sources]
        grad_alpha_NM = torch.stack([torch.linalg.vecdot(grad_MD, row) for row in rows])
        centre_M = (alpha_NM * grad_alpha_NM).sum(dim=0)
        grad_score_NM = alpha_NM * (grad_alpha_NM - centre_M)
        # score = rstd (row . key) and d rstd / d row = -rstd^3 row / D
        along_key_NM = grad_score_NM * rstd_NM
        along_row_NM = -along_key_NM * score_NM * rstd_NM / dim
        grad_key_D = torch.stack([along_M @ row for along_M, row in zip(along_key_NM, rows)]).sum(dim=0)
        grad_sources = []
        for i, row in enumerate(rows):
            grad_row = grad_MD * alpha_NM[i].unsqueeze(1)
            grad_row.addcmul_(row, along_row_NM[i].unsqueeze(1))
            grad_row.addr_(along_key_NM[i], key_D)
            grad_sources.append(grad_row.to(sources[i].dtype).view_as(sources[i]))
        grad_query = (grad_key_D * norm_D.to(dtype)).to(query_D.dtype)
        grad_norm = (grad_key_D * query_D.to(dtype)).to(norm_D.dtype)
        return grad_query, grad_norm, None, *grad_sources


def _inverse_rms(row_MD: Tensor, eps: float) -> Tensor:
    mean_square = torch.linalg.vector_norm(row_MD, dim=1, dtype=compute_dtype(row_MD.dtype)).square()
    return torch.rsqrt(mean_square / row_MD.shape[1] + eps)


def residual_mix(sources: list[Tensor], query_D: Tensor, norm_D: Tensor, *, eps: float) -> Tensor:
    """As `residual_mix_reference`, output and gradients."""
    return _ResidualMix.apply(query_D, norm_D, eps, *sources)
