"""The four seams at which `parallel/` enters the model, and what stands there on one rank.

    Linear           a matrix product                  column/row-parallel over tp
    AttentionCore    latent in, attended values out    heads over tp, sequence over cp
    KDACore          streams in, delta-rule out        heads over tp, sequence over cp
    TokenDispatcher  tokens to experts and back        experts over ep

A seam is wide enough to hold what must communicate: the attention core takes the small latent, not keys
and values, so that context parallelism gathers 576 numbers a token and not 24,576; the KDA core takes the
streams before their convolution, so that a halo can come from the rank before. The model calls the seam
and knows nothing else.

Shapes: B batch, T tokens, D model, H heads, K key, V value, N and P the parts of a query that meet the
latent's keys and the shared key, R latent rank; and for experts: T tokens flat, L width, E experts,
K choices, R rows, S segments.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from model.documents import Documents
from model.kernels.causal_conv import causal_conv
from model.kernels.kda_chunk import kda_chunk
from model.kernels.kda_reference import kda_reference
from model.params import ParamRole, declare
from model.precision import compute_dtype
from model.router import Routing
from model.stats import LayerStats


class Linear(nn.Module):
    """``x @ weight.T`` without bias; ``role`` says what the weight is to the optimizer."""

    def __init__(self, in_dim: int, out_dim: int, *, role: ParamRole | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim))
        declare(self, weight=role or ParamRole(kind="matrix"))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


@dataclass
class MLACache:
    """Decoding state of an MLA layer: the normalised latent [B, T, R] and the shared key [B, T, P] so far."""

    latent_BTR: Tensor
    shared_key_BTP: Tensor


class AttentionCore(Protocol):
    """Causal softmax attention from the compressed latent."""

    def __call__(
        self,
        q_BTHQ: Tensor,
        latent_BTR: Tensor,
        shared_key_BTP: Tensor,
        up_weight: Tensor,
        *,
        value_dim: int,
        documents: Documents,
        stats: LayerStats | None,
        cache: MLACache | None,
    ) -> Tensor:
        """Attended values [B, T, H, V].

        Args:
            q_BTHQ: queries, N + P wide.
            latent_BTR: normalised key/value latent.
            shared_key_BTP: key part shared by all heads.
            up_weight: [H * (N + V), R], per head the N key rows, then the V value rows.
            value_dim: V.
            documents: attention never crosses them.
            stats: takes the largest logit of each head, if asked for.
            cache: what came before; the new tokens are appended to it.
        """
        ...


class LocalAttention:
    """`AttentionCore` on one rank: keys and values from the latent, one causal product per document."""

    def __call__(
        self,
        q_BTHQ: Tensor,
        latent_BTR: Tensor,
        shared_key_BTP: Tensor,
        up_weight: Tensor,
        *,
        value_dim: int,
        documents: Documents,
        stats: LayerStats | None,
        cache: MLACache | None,
    ) -> Tensor:
        if cache is not None:
            cache.latent_BTR = torch.cat([cache.latent_BTR, latent_BTR], dim=1)
            cache.shared_key_BTP = torch.cat([cache.shared_key_BTP, shared_key_BTP], dim=1)
            return _attend_latent(q_BTHQ, cache, up_weight, value_dim=value_dim)
        heads, q_dim = q_BTHQ.shape[2:]
        kv = F.linear(latent_BTR, up_weight).unflatten(-1, (heads, -1))
        k_nope, v = kv.split([kv.shape[-1] - value_dim, value_dim], dim=-1)
        k_shared = shared_key_BTP.unsqueeze(2).expand(-1, -1, heads, -1)
        q, k, v = (x.transpose(1, 2) for x in (q_BTHQ, torch.cat([k_nope, k_shared], dim=-1), v))
        if v.device.type == "cpu":
            # The fused CPU kernel wants one head dim; without the padding it falls back to a ten times slower path.
            v = F.pad(v, (0, q_dim - value_dim)) if q_dim > value_dim else v
        scale = q_dim**-0.5
        outputs = []
        for start, stop in documents.spans():
            q_doc, k_doc, v_doc = (x[:, :, start:stop] for x in (q, k, v))
            outputs.append(F.scaled_dot_product_attention(q_doc, k_doc, v_doc, is_causal=True, scale=scale))
            if stats is not None and stats.max_logit_H is not None:
                track_max_logit(q_doc.detach(), k_doc.detach(), scale, stats.max_logit_H)
        o = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
        return o[..., :value_dim].transpose(1, 2)


def _attend_latent(q_BTHQ: Tensor, cache: MLACache, up_weight: Tensor, *, value_dim: int) -> Tensor:
    """Attention on the latent itself: the key up-projection moves into the query, the value one behind the sum.

    A decoded token then reads R + P numbers of each earlier token and never rebuilds their keys and values.
    """
    batch, length, heads, q_dim = q_BTHQ.shape
    dtype = compute_dtype(q_BTHQ.dtype)
    latent, shared_key = cache.latent_BTR.to(dtype), cache.shared_key_BTP.to(dtype)
    past = latent.shape[1] - length
    nope_dim = q_dim - shared_key.shape[-1]
    w_key, w_value = up_weight.to(dtype).unflatten(0, (heads, -1)).split([nope_dim, value_dim], dim=1)
    q_nope, q_rope = q_BTHQ.to(dtype).split([nope_dim, q_dim - nope_dim], dim=-1)
    q_latent = torch.einsum("bthn,hnr->bthr", q_nope, w_key)
    logits = torch.einsum("bthr,bsr->bhts", q_latent, latent) + torch.einsum("bthp,bsp->bhts", q_rope, shared_key)
    future = torch.ones(length, past + length, dtype=torch.bool, device=logits.device).triu(past + 1)
    weights = (logits * q_dim**-0.5).masked_fill(future, -torch.inf).softmax(dim=-1)
    attended = torch.einsum("bhts,bsr->bthr", weights, latent)
    return torch.einsum("bthr,hvr->bthv", attended, w_value).to(q_BTHQ.dtype)


@torch.no_grad()
def track_max_logit(q_BHTQ: Tensor, k_BHTQ: Tensor, scale: float, max_logit_H: Tensor, *, tile: int = 512) -> None:
    """Raise ``max_logit_H`` to the largest causal logit of each head; query tiles bound the memory."""
    length = q_BHTQ.shape[2]
    for start in range(0, length, tile):
        stop = min(start + tile, length)
        logits = (q_BHTQ[:, :, start:stop] @ k_BHTQ[:, :, :stop].transpose(2, 3)).float() * scale
        future = torch.ones(stop - start, stop, dtype=torch.bool, device=logits.device).triu(start + 1)
        largest_H = logits.masked_fill_(future, -torch.inf).amax(dim=(0, 2, 3))
        torch.maximum(max_logit_H, largest_H, out=max_logit_H)


class ConvWeights(NamedTuple):
    """Short-convolution filters [channels, width] of the three KDA streams."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass
class KDACache:
    """Decoding state of a KDA layer: the last inputs of each convolution [B, width - 1, C], and S [B, H, K, V]."""

    tails: tuple[Tensor, Tensor, Tensor]
    state_BHKV: Tensor


class KDACore(Protocol):
    """Short convolutions, normalisation and the gated delta rule.

    prepare: `prepare_stream`, or what stands in for it.
    """

    prepare: Callable[..., Tensor]

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
        """Outputs [B, T, H, V] of the recurrence.

        Args:
            streams: q, k and v before their convolution, [B, T, H * K] (v: H * V).
            filters: their convolution weights.
            g_BTHK: log decay, at most 0, fp32.
            beta_BTH: step sizes in (0, 1).
            gate_bound: bound below ``g``, if there is one; makes the kernel faster.
            documents: convolution and state stop at them.
            cache: what came before; brought up to date in place.
        """
        ...


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


class ExpertWeights(NamedTuple):
    """Weights of S experts: gate and up [S, inner, L], down [S, L, inner]."""

    gate: Tensor
    up: Tensor
    down: Tensor


GroupedProduct = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`model.kernels.grouped_linear`, or what stands in for it."""


class Received(NamedTuple):
    """What a rank computes: rows sorted by segment, int32 segment ends, one expert's weights per segment.

    product: of rows and these weights, where it is not the layer's own.
    """

    rows_RL: Tensor
    segment_ends_S: Tensor
    weights: ExpertWeights
    product: GroupedProduct | None = None


class TokenDispatcher(Protocol):
    """Brings tokens to experts and the results back.

    Three calls, so that a distributed form can start moving in `dispatch`, let the shared experts compute,
    and wait in `receive`. ``weights`` pass through it because a rank may compute with borrowed experts: a second
    part of what it received, after that for its own.
    """

    def dispatch(self, x_TL: Tensor, routing: Routing, weights: ExpertWeights) -> Any: ...

    def receive(self, handle: Any) -> tuple[Received, ...]: ...

    def combine(self, rows_RL: Tensor, routing: Routing, handle: Any) -> Tensor:
        """``sum_k weight[t, k] * row(t, k)``, [T, L] in the rows' dtype, summed in fp32."""
        ...


# Segments are padded with zero rows to a multiple of this. Matrix-product libraries compute the last few rows
# of a product in another order, so without it a token's expert output would depend, in its last bits, on how
# many other tokens (of other documents) chose the same expert.
SEGMENT_ALIGNMENT = 16


class LocalPlan(NamedTuple):
    """The token of each padded row, the padded row of each (token, choice), and where segments end (int32)."""

    source_S: Tensor
    slot_R: Tensor
    ends_S: Tensor


class LocalDispatch(NamedTuple):
    """Rows at hand, and where each (token, choice) stands among them: ``slot_TK`` int64."""

    received: Received
    slot_TK: Tensor


class LocalDispatcher:
    """`TokenDispatcher` on one rank: sort the (token, choice) rows by expert, and back.

    The number of rows depends on the routing, so the counts come to the host: one synchronisation a layer.
    """

    def dispatch(self, x_TL: Tensor, routing: Routing, weights: ExpertWeights) -> LocalDispatch:
        experts = weights.gate.shape[0]
        plan = routing.decisions.once(LocalPlan, lambda: self._plan(routing.expert_TK, experts=experts))
        slot_TK = plan.slot_R.view(routing.expert_TK.shape)
        rows_RL = _Expand.apply(x_TL, plan.source_S, slot_TK)
        return LocalDispatch(Received(rows_RL, plan.ends_S, weights), slot_TK)

    def _plan(self, expert_TK: Tensor, *, experts: int) -> LocalPlan:
        expert_R = expert_TK.flatten()
        count_E = torch.bincount(expert_R, minlength=experts)
        padded_E = (count_E + SEGMENT_ALIGNMENT - 1) // SEGMENT_ALIGNMENT * SEGMENT_ALIGNMENT
        ends_E = padded_E.cumsum(0)
        shift_E = (ends_E - padded_E) - (count_E.cumsum(0) - count_E)
        order_R = torch.argsort(expert_R, stable=True)
        slot_R = torch.empty_like(order_R)
        slot_R[order_R] = torch.arange(order_R.numel(), device=order_R.device) + shift_E[expert_R[order_R]]
        tokens, choices = expert_TK.shape
        # Padding slots read row ``tokens``, a row of zeros.
        source_S = torch.full((int(ends_E[-1]),), tokens, device=order_R.device)
        source_S[slot_R] = torch.arange(order_R.numel(), device=order_R.device) // choices
        return LocalPlan(source_S, slot_R, ends_E.to(torch.int32))

    def receive(self, handle: LocalDispatch) -> tuple[Received]:
        return (handle.received,)

    def combine(self, rows_RL: Tensor, routing: Routing, handle: LocalDispatch) -> Tensor:
        return combine_rows(rows_RL, routing.weight_TK, handle.slot_TK)


def combine_rows(rows_SL: Tensor, weight_TK: Tensor, slot_TK: Tensor) -> Tensor:
    """``sum_k weight[t, k] * rows[slot[t, k]]``, [T, L] in the rows' dtype, summed in fp32 in the order of k.

    Each row is read by at most one (token, choice).
    """
    return _Combine.apply(rows_SL, weight_TK, slot_TK)


class _Expand(torch.autograd.Function):
    """Row s is x[source_S[s]], or zeros where the source is T; backward sums a token's rows in choice order."""

    @staticmethod
    def forward(ctx: Any, x_TL: Tensor, source_S: Tensor, slot_TK: Tensor) -> Tensor:
        ctx.save_for_backward(slot_TK)
        return torch.cat([x_TL, x_TL.new_zeros(1, x_TL.shape[1])]).index_select(0, source_S)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SL: Tensor) -> tuple[Tensor, None, None]:
        (slot_TK,) = ctx.saved_tensors
        # One choice at a time, as in `_Combine`: gathering all of them at once took three times as long.
        grad_TL = grad_SL.new_zeros(slot_TK.shape[0], grad_SL.shape[1], dtype=compute_dtype(grad_SL.dtype))
        for slot_T in slot_TK.unbind(1):
            grad_TL += grad_SL.index_select(0, slot_T)
        return grad_TL.to(grad_SL.dtype), None, None


class _Combine(torch.autograd.Function):
    """One choice at a time, so that no [T, K, L] copy of the rows ever exists; backward likewise."""

    @staticmethod
    def forward(ctx: Any, rows_SL: Tensor, weight_TK: Tensor, slot_TK: Tensor) -> Tensor:
        ctx.save_for_backward(rows_SL, weight_TK, slot_TK)
        dtype = compute_dtype(rows_SL.dtype)
        out_TL = rows_SL.new_zeros(slot_TK.shape[0], rows_SL.shape[1], dtype=dtype)
        for slot_T, weight_T in zip(slot_TK.unbind(1), weight_TK.to(dtype).unbind(1)):
            out_TL.addcmul_(rows_SL.index_select(0, slot_T).to(dtype), weight_T.unsqueeze(1))
        return out_TL.to(rows_SL.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TL: Tensor) -> tuple[Tensor, Tensor, None]:
        rows_SL, weight_TK, slot_TK = ctx.saved_tensors
        dtype = compute_dtype(rows_SL.dtype)
        grad_TL = grad_TL.to(dtype)
        grad_SL = torch.zeros_like(rows_SL)
        grad_weight_TK = torch.empty_like(weight_TK)
        for k, (slot_T, weight_T) in enumerate(zip(slot_TK.unbind(1), weight_TK.to(dtype).unbind(1))):
            grad_SL.index_copy_(0, slot_T, (grad_TL * weight_T.unsqueeze(1)).to(rows_SL.dtype))
            grad_weight_TK[:, k] = torch.linalg.vecdot(rows_SL.index_select(0, slot_T).to(dtype), grad_TL)
        return grad_SL, grad_weight_TK, None
