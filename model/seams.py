"""The seams at which `parallel/` enters the model: protocols, and the records that pass through them.

    seam             what passes                     cut over                        on one rank
    AttentionCore    latent in, attended values out  heads over tp, sequence over cp mla.LocalAttention
    KDACore          streams in, delta-rule out      heads over tp, sequence over cp kda.LocalKDA
    TokenDispatcher  tokens to experts and back      experts over ep                 dispatch.LocalDispatcher

A seam is wide enough to hold what must communicate: the attention core takes the small latent, not keys
and values, so that context parallelism gathers 576 numbers a token and not 24,576; the KDA core takes the
streams before their convolution, so that a halo can come from the rank before. The model calls the seam
and knows nothing else.

Shapes: B batch, T tokens, D model, H heads, K key, V value, N and P the parts of a query that meet the
latent's keys and the shared key, R latent rank; and for experts: T tokens flat, L width, E experts,
R rows, S segments.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from model.documents import Documents
from model.products import Product
from model.router import Routing
from model.stats import LayerStats


@dataclass
class MLACache:
    """Decoding state of an MLA layer: the normalised latent [B, T, R] and the shared key [B, T, P] so far."""

    latent_BTR: Tensor
    shared_key_BTP: Tensor


class AttentionKernel(NamedTuple):
    """The two products of attention.

    attend: as `torch.nn.functional.scaled_dot_product_attention`.
    multiply: as `torch.matmul`; of queries and keys, where logits themselves are wanted.
    """

    attend: Callable[..., Tensor]
    multiply: Callable[[Tensor, Tensor], Tensor]


class AttentionCore(Protocol):
    """Causal softmax attention from the compressed latent."""

    kernel: AttentionKernel

    def __call__(
        self,
        q_BTHQ: Tensor,
        latent_BTR: Tensor,
        shared_key_BTP: Tensor,
        up_weight: Tensor,
        *,
        product: Product,
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
            product: of the latent and (rows of) ``up_weight``.
            value_dim: V.
            documents: attention never crosses them.
            stats: takes the largest logit of each head, if asked for.
            cache: what came before; the new tokens are appended to it.
        """
        ...


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

    prepare: `model.kda.prepare_stream`, or what stands in for it.
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


class ExpertWeights(NamedTuple):
    """Weights of S experts: gate and up [S, inner, L], down [S, L, inner]."""

    gate: Tensor
    up: Tensor
    down: Tensor


class Received(NamedTuple):
    """What a rank computes: rows sorted by segment, int32 segment ends, one expert's weights per segment.

    again: the weights once more, for backward; None: backward may keep them.
    """

    rows_RL: Tensor
    segment_ends_S: Tensor
    weights: ExpertWeights
    again: Callable[[], ExpertWeights] | None = None


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
