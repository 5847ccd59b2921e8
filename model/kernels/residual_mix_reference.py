"""Attention over depth, the law: ``h = sum_i softmax_i(w . RMSNorm(v_i)) v_i``."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def residual_mix_reference(sources: Sequence[Tensor], query_D: Tensor, norm_D: Tensor, *, eps: float) -> Tensor:
    """Mix ``sources`` by a learned pseudo-query (Attention Residuals, arXiv:2603.15031).

    Args:
        sources: N tensors [..., D]: the bank rows, then the open prefix.
        query_D: pseudo-query w.
        norm_D: weight of the RMSNorm that keys pass through.
        eps: its epsilon.

    Returns:
        [..., D] in the sources' dtype; scores, softmax and sum in fp32 (fp64 for fp64 sources).
    """
    dtype = torch.promote_types(sources[0].dtype, torch.float32)
    v = torch.stack([source.to(dtype) for source in sources])
    keys = F.rms_norm(v, norm_D.shape, norm_D.to(dtype), eps)
    alpha = (keys @ query_D.to(dtype)).softmax(dim=0)
    return (alpha.unsqueeze(-1) * v).sum(dim=0).to(sources[0].dtype)
