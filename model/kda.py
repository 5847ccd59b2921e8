"""Kimi Delta Attention: linear attention with a delta rule and a decay per channel.

    q, k = L2Norm(SiLU(Conv(W x)))   v = SiLU(Conv(W_v x))   beta = sigmoid(W_beta x)
    S_t  = (I - beta k k^T) Diag(exp g) S_{t-1} + beta k v^T      o_t = S_t^T q_t / sqrt(K)
    y    = W_o [ sigmoid(W_g x) * RMSNorm_head(o) ]

Source: Kimi K3 technical report 2.1.1. Shapes: B batch, T tokens, D model, H heads, K head dim.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.config import KDAConfig
from model.documents import Documents
from model.kernels.causal_conv import causal_conv
from model.kernels.kda_chunk import kda_chunk
from model.kernels.kda_reference import kda_reference
from model.layers import Linear, RMSNorm, ShortConv
from model.params import ParamRole, declare
from model.precision import compute_dtype
from model.seams import ConvWeights, KDACache, KDACore


class DecayGate(nn.Module):
    """Log decay per head and channel: ``g = bound * sigmoid(exp(A_log) z)`` with z through a low rank.

    Without a bound (Kimi Linear) ``g = -exp(A_log) * softplus(z)``. Always in fp32: bf16 has nothing between
    0.9961 and 1, and a decay is applied thousands of times.
    """

    def __init__(self, dim: int, config: KDAConfig) -> None:
        super().__init__()
        self.lower_bound = config.gate_lower_bound
        width = config.heads * config.head_dim
        self.down = Linear(dim, config.head_dim)
        self.up = Linear(config.head_dim, width, role=ParamRole(kind="matrix", heads=config.heads))
        self.A_log = nn.Parameter(torch.empty(config.heads))
        self.dt_bias = nn.Parameter(torch.empty(width))
        declare(
            self,
            A_log=ParamRole(kind="vector", decay=False, keep_fp32=True, init="zeros"),
            dt_bias=ParamRole(kind="vector", decay=False, keep_fp32=True, init="dt_bias"),
        )
        self.squash: Callable[..., Tensor] = log_decay

    def forward(self, x_BTD: Tensor) -> Tensor:
        """[B, T, H, K] log decay, at most 0."""
        return self.squash(self.up(self.down(x_BTD)), self.A_log, self.dt_bias, self.lower_bound)


def log_decay(z: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """From `DecayGate`'s product [B, T, H * K] to the log decay [B, T, H, K]."""
    dtype = compute_dtype(z.dtype)
    z = z.to(dtype) + dt_bias.to(dtype)
    z = z.unflatten(-1, (A_log.numel(), -1))
    rate = A_log.to(dtype).exp().unsqueeze(-1)
    if lower_bound is None:
        return -rate * F.softplus(z)
    return lower_bound * torch.sigmoid(rate * z)


class OutputGate(nn.Module):
    """``sigmoid(W_g x)`` before the sigmoid: full rank (K3) or through a low rank (Kimi Linear)."""

    def __init__(self, dim: int, config: KDAConfig) -> None:
        super().__init__()
        width = config.heads * config.head_dim
        role = ParamRole(kind="matrix", heads=config.heads)
        self.down = None if config.full_rank_output_gate else Linear(dim, config.head_dim)
        self.up = Linear(dim if self.down is None else config.head_dim, width, role=role)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.up(x_BTD if self.down is None else self.down(x_BTD))


class KDA(nn.Module):
    """The mixer of a "K" layer: [B, T, D] -> [B, T, D]."""

    def __init__(self, dim: int, config: KDAConfig, *, norm_eps: float) -> None:
        super().__init__()
        self.heads = config.heads
        width = config.heads * config.head_dim
        per_head = ParamRole(kind="matrix", heads=config.heads)
        self.q = Linear(dim, width, role=per_head)
        self.k = Linear(dim, width, role=per_head)
        self.v = Linear(dim, width, role=per_head)
        self.q_conv = ShortConv(width, config.conv_size)
        self.k_conv = ShortConv(width, config.conv_size)
        self.v_conv = ShortConv(width, config.conv_size)
        self.beta = Linear(dim, config.heads, role=ParamRole(kind="vector"))
        self.decay = DecayGate(dim, config)
        self.gate = OutputGate(dim, config)
        self.norm = RMSNorm(config.head_dim, eps=norm_eps, keep_fp32=True)
        self.out = Linear(width, dim, role=ParamRole(kind="matrix", heads=config.heads, by_columns=True))
        self.core: KDACore = LocalKDA()

    def forward(self, x_BTD: Tensor, *, documents: Documents, cache: KDACache | None) -> Tensor:
        streams = self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)
        filters = ConvWeights(self.q_conv.weight, self.k_conv.weight, self.v_conv.weight)
        beta_BTH = torch.sigmoid(self.beta(x_BTD).to(compute_dtype(x_BTD.dtype)))
        bound = self.decay.lower_bound
        o_BTHV = self.core(
            streams, filters, self.decay(x_BTD), beta_BTH, gate_bound=bound, documents=documents, cache=cache
        )
        gate_BTHV = self.gate(x_BTD).unflatten(-1, (self.heads, -1))
        return self.out((torch.sigmoid(gate_BTHV) * self.norm(o_BTHV)).flatten(2))

    def empty_cache(self, batch: int) -> KDACache:
        """State at the beginning of a document, for ``batch`` running documents."""
        weight = self.q_conv.weight
        channels, width = weight.shape
        head_dim = channels // self.heads
        tail = torch.zeros(batch, width - 1, channels, dtype=self.q.weight.dtype, device=weight.device)
        state = torch.zeros(
            batch, self.heads, head_dim, head_dim, dtype=compute_dtype(weight.dtype), device=weight.device
        )
        return KDACache((tail, tail, tail), state)


class LocalKDA:
    """`KDACore` on one rank."""

    def __init__(self) -> None:
        self.prepare: Callable[..., Tensor] = prepare_stream

    def __call__(
        self,
        streams: tuple[Tensor, Tensor, Tensor],
        filters: ConvWeights,
        g_BTHK: Tensor,
        beta_BTH: Tensor,
        *,
        gate_bound: float | None = None,
        documents: Documents,
        cache: KDACache | None,
    ) -> Tensor:
        heads = beta_BTH.shape[-1]
        position, tails = documents.position_BT, (None, None, None) if cache is None else cache.tails
        if cache is not None:
            # Decoding continues one document: no tap is ever out of reach, tails begin as zeros.
            position = position + cache.tails[0].shape[1]
        q, k, v = (
            self.prepare(x, weight, tail, position, heads, normalize)
            for x, weight, tail, normalize in zip(streams, filters, tails, NORMALIZED)
        )
        if cache is None:
            offsets, plans = documents.cu_seqlens, documents.kda_plans
            return kda_chunk(q, k, v, g_BTHK, beta_BTH, cu_seqlens=offsets, gate_bound=gate_bound, plans=plans)[0]
        # For a single token the recurrence itself is the fast form.
        kernel = kda_reference if q.shape[1] == 1 else partial(kda_chunk, plans=documents.kda_plans)
        o, cache.state_BHKV = kernel(q, k, v, g_BTHK, beta_BTH, initial_state=cache.state_BHKV)
        keep = cache.tails[0].shape[1]
        q_tail, k_tail, v_tail = (torch.cat([t, x], dim=1)[:, x.shape[1] :] for t, x in zip(cache.tails, streams))
        assert q_tail.shape[1] == keep
        cache.tails = (q_tail, k_tail, v_tail)
        return o


# Which of KDA's streams q, k, v are normalised.
NORMALIZED = True, True, False


def prepare_stream(
    x_BTC: Tensor, weight_CW: Tensor, tail: Tensor | None, position_BT: Tensor, heads: int, normalize: bool
) -> Tensor:
    """One KDA stream from its product to the recurrence: convolution, heads apart, and unit length for q and k.

    Returns [B, T, H, C / H]; arguments as for `causal_conv`.
    """
    x_BTHK = causal_conv(x_BTC, weight_CW, position_BT=position_BT, tail=tail).unflatten(-1, (heads, -1))
    return l2_normalize(x_BTHK) if normalize else x_BTHK


def l2_normalize(x: Tensor) -> Tensor:
    """``x * rsqrt(sum(x^2) + 1e-6)`` over the last dim, in fp32, returned in x's dtype (flash-linear-attention)."""
    wide = x.to(compute_dtype(x.dtype))
    return (wide * torch.rsqrt(wide.square().sum(dim=-1, keepdim=True) + 1e-6)).to(x.dtype)
