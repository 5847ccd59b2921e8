"""The small parts that every layer is made of: products, normalisation, filters, gated feed-forward.

Shapes: B batch, T tokens, D model, C channels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from model.kernels.situ_glu import situ_glu
from model.params import ParamRole, declare
from model.precision import compute_dtype
from model.products import DENSE, Product


class Linear(nn.Module):
    """``x @ weight.T`` without bias; ``role`` says what the weight is to the optimizer."""

    def __init__(self, in_dim: int, out_dim: int, *, role: ParamRole | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim))
        declare(self, weight=role or ParamRole(kind="matrix"))
        self.product: Product = DENSE

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight)


class RMSNorm(nn.Module):
    """`rms_norm` with a weight of its own."""

    def __init__(self, dim: int, *, eps: float, keep_fp32: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))
        declare(self, weight=ParamRole(kind="vector", decay=False, keep_fp32=keep_fp32, init="ones"))
        self.normalize: Callable[..., Tensor] = rms_norm

    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x * rsqrt(mean(x^2) + eps) * weight`` over the last dim, computed in fp32, returned in x's dtype."""
    dtype = compute_dtype(x.dtype)
    return F.rms_norm(x.to(dtype), weight.shape, weight.to(dtype), eps).to(x.dtype)


class Embedding(nn.Module):
    """Token embedding: ids [B, T] int64 -> [B, T, D]. The row of ``padding_id`` takes no gradient."""

    def __init__(self, vocab_size: int, dim: int, *, padding_id: int | None = None) -> None:
        super().__init__()
        self.padding_id = padding_id
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))
        declare(self, weight=ParamRole(kind="embedding"))

    def forward(self, ids_BT: Tensor) -> Tensor:
        return look_up(ids_BT, self.weight, padding_row=self.padding_id)


def look_up(ids_BT: Tensor, weight_VD: Tensor, *, padding_row: int | None = None) -> Tensor:
    """Rows [B, T, D] of an embedding; each row's gradient is summed in fp32 and rounded once.

    Args:
        ids_BT: int64, rows of ``weight_VD``.
        padding_row: takes no gradient.
    """
    return _LookUp.apply(ids_BT, weight_VD, -1 if padding_row is None else padding_row)


SUM_ELEMENTS = 2**25
"""Elements of an embedding whose gradients are in fp32 at once: 128 MiB."""


class _LookUp(torch.autograd.Function):
    """torch's own backward adds token by token in the weight's dtype on CPUs: in bf16, 4,096 ones make 256."""

    @staticmethod
    def forward(ctx: Any, ids_BT: Tensor, weight_VD: Tensor, padding_row: int) -> Tensor:
        ctx.save_for_backward(ids_BT)
        ctx.shape, ctx.padding_row = weight_VD.shape, padding_row
        return F.embedding(ids_BT, weight_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[None, Tensor, None]:
        (ids_BT,) = ctx.saved_tensors
        rows, dim = ctx.shape
        total_VD = grad_BTD.new_empty(rows, dim)
        columns = max(1, SUM_ELEMENTS // rows)
        for start in range(0, dim, columns):
            part = grad_BTD[..., start : start + columns].to(compute_dtype(grad_BTD.dtype))
            total_VD[:, start : start + columns] = torch.ops.aten.embedding_dense_backward(
                part, ids_BT, rows, ctx.padding_row, False
            )
        return None, total_VD, None


class ShortConv(nn.Module):
    """Weights of a depthwise causal convolution, one filter per channel: [C, width], newest tap last."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, width))
        declare(self, weight=ParamRole(kind="vector", decay=False, keep_fp32=True, init="conv"))


class Activation:
    """The gated activation of a feed-forward: SiTU-GLU or SwiGLU, on (gate, up) of equal shape."""

    def __init__(self, name: str, *, beta: float, linear_beta: float) -> None:
        self.name, self.beta, self.linear_beta = name, beta, linear_beta

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.name == "situ":
            return situ_glu(gate, up, beta=self.beta, linear_beta=self.linear_beta)
        return F.silu(gate) * up


GatedActivation = Callable[[Tensor, Tensor], Tensor]
"""(gate, up) to their gated product: `Activation`, or what stands in for it."""


class GatedFFN(nn.Module):
    """``W_down act(W_gate x, W_up x)``: the dense feed-forward and the shared experts."""

    def __init__(self, dim: int, inner: int, *, activation: GatedActivation) -> None:
        super().__init__()
        self.gate = Linear(dim, inner)
        self.up = Linear(dim, inner)
        self.down = Linear(inner, dim)
        self.activation = activation

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(self.activation(self.gate(x_BTD), self.up(x_BTD)))
