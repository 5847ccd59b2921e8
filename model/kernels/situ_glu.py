"""SiTU-GLU with a backward of its own: keeps only its two inputs, where autograd would keep seven tensors.

Works through slices that fit the cache, in place: on a CPU, the first touch of a fresh buffer and the way to memory
cost more than the arithmetic.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Elements worked on at once: three fp32 buffers of this size fit a second-level cache.
SLICE = 2**17


class _SituGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.betas = beta, linear_beta
        out = torch.empty_like(gate)
        for g, u, y in zip(*_slices(gate, up, out)):
            tanh_g, sigmoid, tanh_u = _factors(g, u, beta, linear_beta)
            y.copy_(tanh_g.mul_(sigmoid).mul_(tanh_u).mul_(beta * linear_beta))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gate, up = ctx.saved_tensors
        beta, linear_beta = ctx.betas
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        for g, u, dy, dg, du in zip(*_slices(gate, up, grad.contiguous(), grad_gate, grad_up)):
            tanh_g, sigmoid, tanh_u = _factors(g, u, beta, linear_beta)
            # d/dg [beta tanh(g / beta) s] = s (1 + tanh (beta (1 - s) - tanh))
            slope = sigmoid.neg().add_(1).mul_(beta).sub_(tanh_g).mul_(tanh_g).add_(1).mul_(sigmoid)
            dg.copy_(slope.mul_(tanh_u).mul_(dy).mul_(linear_beta))
            # d/du [linear_beta tanh(u / linear_beta)] = 1 - tanh^2
            du.copy_(tanh_u.square_().neg_().add_(1).mul_(tanh_g).mul_(sigmoid).mul_(dy).mul_(beta))
        return grad_gate, grad_up, None, None


def _slices(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Flat pieces of contiguous tensors of one shape; one piece on an accelerator, where launches are what costs."""
    size = SLICE if tensors[0].device.type == "cpu" else max(1, tensors[0].numel())
    return [tensor.view(-1).split(size) for tensor in tensors]


def _factors(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> tuple[Tensor, Tensor, Tensor]:
    """tanh(g / beta), sigmoid(g) and tanh(u / linear_beta) in fp32 (fp64 for fp64), each in a buffer of its own."""
    dtype = torch.promote_types(gate.dtype, torch.float32)
    gate, up = gate.to(dtype), up.to(dtype)
    return gate.div(beta).tanh_(), gate.sigmoid(), up.div(linear_beta).tanh_()


def situ_glu(gate: Tensor, up: Tensor, *, beta: float, linear_beta: float) -> Tensor:
    """As `situ_glu_reference`, output and gradients."""
    return _SituGLU.apply(gate, up, beta, linear_beta)
