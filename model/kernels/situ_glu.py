"""SiTU-GLU with a backward of its own: keeps only its two inputs, where autograd would keep seven tensors.

Everything between is computed in place on three buffers: on a CPU the first touch of a fresh buffer costs more than
the arithmetic on it.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _SituGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.betas = beta, linear_beta
        tanh_g, sigmoid, tanh_u = _factors(gate, up, beta, linear_beta)
        return tanh_g.mul_(sigmoid).mul_(tanh_u).mul_(beta * linear_beta).to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gate, up = ctx.saved_tensors
        beta, linear_beta = ctx.betas
        tanh_g, sigmoid, tanh_u = _factors(gate, up, beta, linear_beta)
        grad = grad.to(tanh_g.dtype)
        # d/dg [beta tanh(g / beta) s] = s (1 + tanh (beta (1 - s) - tanh))
        slope = sigmoid.neg().add_(1).mul_(beta).sub_(tanh_g).mul_(tanh_g).add_(1).mul_(sigmoid)
        grad_gate = slope.mul_(tanh_u).mul_(grad).mul_(linear_beta)
        # d/du [linear_beta tanh(u / linear_beta)] = 1 - tanh^2
        grad_up = tanh_u.square_().neg_().add_(1).mul_(tanh_g).mul_(sigmoid).mul_(grad).mul_(beta)
        return grad_gate.to(gate.dtype), grad_up.to(up.dtype), None, None


def _factors(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """tanh(g / beta), sigmoid(g) and tanh(u / linear_beta) in fp32 (fp64 for fp64), each in a buffer of its own."""
    dtype = torch.promote_types(gate.dtype, torch.float32)
    gate, up = gate.to(dtype), up.to(dtype)
    return gate.div(beta).tanh_(), gate.sigmoid(), up.div(linear_beta).tanh_()


def situ_glu(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float) -> Tensor:
    """As `situ_glu_reference`, output and gradients."""
    return _SituGLU.apply(gate, up, beta, linear_beta)
