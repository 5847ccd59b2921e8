"""SiTU-GLU, the law: ``[beta tanh(g / beta) sigmoid(g)] * [linear_beta tanh(u / linear_beta)]``."""

import torch
from torch import Tensor


def situ_glu_reference(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float) -> Tensor:
    """Bounded gated activation of Kimi K3 (technical report 2.3), fp32 inside, in gate's dtype outside.

    Args:
        gate, up: equal shapes, any float dtype.
        beta, linear_beta: bounds of the two factors; the result stays below their product.
    """
    dtype = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(dtype), up.to(dtype)
    gated = beta * torch.tanh(g / beta) * torch.sigmoid(g)
    return (gated * linear_beta * torch.tanh(u / linear_beta)).to(gate.dtype)
