"""The small parts that every layer is made of: products, normalisation, filters, gated feed-forward.

Shapes: B batch, T tokens, D model, C channels.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
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
        return F.embedding(ids_BT, self.weight, padding_idx=self.padding_id)


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
