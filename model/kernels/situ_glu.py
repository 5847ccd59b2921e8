"""SiTU-GLU with a backward of its own: keeps only its two inputs, where autograd would keep seven tensors."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.kernels.situ_glu_reference import situ_glu_reference


class _SituGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.betas = beta, linear_beta
        return situ_glu_reference(gate, up, beta=beta, linear_beta=linear_beta)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gate, up = ctx.saved_tensors
        beta, linear_beta = ctx.betas
        dtype = torch.promote_types(gate.dtype, torch.float32)
        tanh_g = torch.tanh(gate.to(dtype) / beta)
        sigmoid = torch.sigmoid(gate.to(dtype))
        tanh_u = torch.tanh(up.to(dtype) / linear_beta)
        grad = grad.to(dtype)
        # d/dg [beta tanh(g/beta) s] = s (1 - tanh^2) + beta tanh s (1 - s) = s (1 - tanh^2 + beta tanh (1 - s))
        slope = sigmoid * (1 - tanh_g.square() + beta * tanh_g * (1 - sigmoid))
        grad_gate = grad * slope * (linear_beta * tanh_u)
        grad_up = grad * (beta * tanh_g * sigmoid) * (1 - tanh_u.square())
        return grad_gate.to(gate.dtype), grad_up.to(up.dtype), None, None


def situ_glu(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float) -> Tensor:
    """As `situ_glu_reference`, output and gradients."""
    return _SituGLU.apply(gate, up, beta, linear_beta)
