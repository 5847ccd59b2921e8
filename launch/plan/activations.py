"""What a layer keeps between forward and backward, in bytes: each storage that its operations save, once.

    none        all of it
    selective   without what `parallel.recompute.REPEATED` makes again: norms, mixes, activations, gates, convolutions
    full        the layer's input and its decisions

The lists below follow the modules line by line. Two widths occur: `narrow`, the dtype of matrices, and `wide`, in which
norms, gates and states are computed. Where both are one (fp32, fp64), a cast makes no copy, and some entries fall away.
What torch saves inside a norm is what it saves on the CPU, where a norm is several operations; a fused kernel saves
one [T, D] less. Documents are taken to be rows: many short ones pad KDA's chunks further.

Shapes: T tokens of a cp slice, S = T / tp of them between tensor-parallel regions, D model, H heads of a tp rank, K key
and value of KDA, C = H K, Q query, V value, R latent rank, P shared key, I inner, L latent, E experts, N bank rows.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from launch.plan.step import StepPlan
from model.dispatch import SEGMENT_ALIGNMENT
from model.kernels.kda_plan import CHUNK

INDEX = 8
"""Bytes of an index (int64)."""


@dataclass(frozen=True)
class Kept:
    """Bytes that a module keeps without recomputation, and what is left of them with ``selective``."""

    none: float = 0
    selective: float = 0

    def __add__(self, other: "Kept") -> "Kept":
        return Kept(self.none + other.none, self.selective + other.selective)


def layer_bytes(plan: StepPlan, layer: int, *, policy: str | None = None, rows: float | None = None) -> float:
    """Bytes that one microbatch leaves in one layer for its backward; the bank rows that it reads are not its own.

    Args:
        policy: recomputation; None: the plan's.
        rows: (token, choice) rows that this rank's experts compute, padding included. None: `even_rows`.
    """
    policy = plan.recompute if policy is None else policy
    rows = even_rows(plan) if rows is None else rows
    cut = plan.tokens // plan.parallel.tp
    prefix = cut * plan.model.hidden_dim * plan.narrow
    moe = plan.model.is_moe(layer)
    if policy == "full":
        closes_inside = plan.model.residual_block is not None and (2 * layer + 1) % plan.model.residual_block == 0
        return prefix * (1 + closes_inside) + (_decisions(plan, rows) if moe else 0)
    kept = _sublayer(plan, 2 * layer) + (_kda(plan) if plan.model.mixers[layer] == "K" else _mla(plan))
    kept += _sublayer(plan, 2 * layer + 1) + (_experts(plan, rows) if moe else _ffn(plan, plan.model.dense_dim))
    return kept.none if policy == "none" else kept.selective


def index_bytes(plan: StepPlan, layers: Iterable[int]) -> float:
    """Where KDA's chunks are read from and written to: once for all ``layers`` that a microbatch goes through in a row,
    and held by their graph whatever is recomputed."""
    if all(plan.model.mixers[layer] != "K" for layer in layers):
        return 0
    return plan.tokens * plan.model.kda.heads // plan.parallel.tp * 2 * INDEX


def output_bytes(plan: StepPlan) -> float:
    """Bytes that the output mix and norm keep for the loss, with the hidden states that it reads."""
    sublayers = 2 * plan.model.num_layers
    cut = plan.tokens // plan.parallel.tp * plan.model.hidden_dim
    return _sublayer(plan, sublayers).none + cut * plan.narrow


def deferred_bytes(plan: StepPlan, layer: int, *, rows: float) -> float:
    """Bytes that one microbatch leaves in one layer between B and W: products' inputs and their results' gradients.

    Args:
        rows: as for `layer_bytes`.
    """
    kda, mla, moe, dim = plan.model.kda, plan.model.mla, plan.model.moe, plan.model.hidden_dim
    tp, tokens = plan.parallel.tp, plan.tokens
    if plan.model.mixers[layer] == "K":
        width = kda.heads * kda.head_dim // tp
        numbers: float = tokens * (2 * dim + 6 * width + 2 * kda.head_dim + kda.heads // tp)
        numbers += 0 if kda.full_rank_output_gate else tokens * 2 * kda.head_dim
    else:
        down, value = mla.q_rank or 0, mla.heads * mla.value_dim // tp
        query = mla.heads * (mla.nope_dim + mla.rope_dim) // tp
        numbers = tokens * (2 * dim + 2 * down + query + mla.kv_rank + mla.rope_dim + value * (1 + mla.output_gate))
        if plan.parallel.cp == 1:
            # Over cp the up-projection is that of some heads, made from the parameter: backward makes its gradient.
            numbers += tokens * (mla.kv_rank + mla.heads * (mla.nope_dim + mla.value_dim) // tp)
    if not plan.model.is_moe(layer):
        return (numbers + tokens * (2 * dim + 3 * plan.model.dense_dim // tp)) * plan.narrow
    latent, inner = moe.latent_dim or dim, moe.expert_dim // tp
    numbers += rows * (2 * latent + 3 * inner)
    if moe.shared_experts:
        numbers += tokens * (2 * dim + 3 * moe.shared_experts * inner)
    if moe.latent_dim is not None:
        numbers += tokens // tp * (dim * 2 + latent * 2)
    return numbers * plan.narrow


def even_rows(plan: StepPlan) -> float:
    """Rows that this rank's experts compute if all experts get as many; the last block of each is half full."""
    moe, ep = plan.model.moe, plan.parallel.ep
    return plan.tokens * moe.top_k + moe.experts / ep * SEGMENT_ALIGNMENT / 2


def _sublayer(plan: StepPlan, sublayer: int) -> Kept:
    """The prefix that a sublayer reads, its mix and its norm; not the norm's result, which the readers keep."""
    s, w, dim, block = plan.narrow, plan.wide, plan.model.hidden_dim, plan.model.residual_block
    cut = plan.tokens // plan.parallel.tp
    # The norm keeps its input, the inverse root mean square, and the input times that.
    norm = cut * (2 * dim + 1) * w + (dim * w if s < w else 0)
    prefix = cut * dim * s
    if block is None:
        return Kept(norm, prefix)
    if sublayer == 0:
        # One source: the mix is the prefix itself, and so is the norm's input where nothing is cast.
        return Kept(prefix + norm - (cut * dim * w if s == w else 0), prefix)
    sources = (sublayer - 1) // block + 2
    return Kept(prefix + cut * 3 * sources * w + norm, prefix)


def _kda(plan: StepPlan) -> Kept:
    s, w, kda = plan.narrow, plan.wide, plan.model.kda
    heads, key, cp = kda.heads // plan.parallel.tp, kda.head_dim, plan.parallel.cp
    width = heads * key
    chunk = min(CHUNK, 1 << max(plan.tokens // plan.rows - 1, 0).bit_length())
    # Scores, inverse, errors and the state at the start of each chunk; over cp the values are widened by the keys.
    values = key if cp == 1 else 2 * key
    kernel = heads * (3 * chunk + values + key * values / chunk) * w
    if cp > 1:
        # The widened values, the reads and the slice's own output.
        kernel += heads * (values + key + key) * w
    projected = heads * w + key * s + (0 if kda.full_rank_output_gate else key * s)
    gate_and_product = 2 * width * s
    convolutions = 3 * ((kda.conv_size + 1) * width * w + kda.conv_size - 1)
    unit_length = 2 * (width + heads) * w
    streams = 3 * width * s
    decay = 3 * width * w
    norm = (2 * width + heads) * w + width * s
    kept = kernel + projected + gate_and_product
    none = kept + plan.model.hidden_dim * s + convolutions + unit_length + streams + decay + norm
    selective = kept + streams + width * s + width * s
    rates = heads * w * (1 if kda.gate_lower_bound is not None else 2)
    return Kept(plan.tokens * none + rates, plan.tokens * selective)


def _mla(plan: StepPlan) -> Kept:
    s, w, mla, cp = plan.narrow, plan.wide, plan.model.mla, plan.parallel.cp
    heads, query = mla.heads // plan.parallel.tp, mla.nope_dim + mla.rope_dim
    down = mla.q_rank or 0
    latent = mla.kv_rank + mla.rope_dim
    # Query, key, value and output of one width, and the log-normaliser.
    attention = heads * (4 * query * s + w)
    if mla.rotary:
        attention += 2 * mla.rope_dim * w  # cosines and sines for queries and the key
    outputs = heads * mla.value_dim * s * (3 if mla.output_gate else 1)
    gathered = latent * cp * s if cp > 1 else 0
    query_norm = (2 * down + bool(down)) * w + down * s
    latent_norm = ((latent if s == w else mla.kv_rank) + mla.kv_rank + 1) * w + (mla.kv_rank * s if cp == 1 else 0)
    weights = (down + mla.kv_rank) * w if s < w else 0
    none = plan.model.hidden_dim * s + query_norm + latent_norm + attention + outputs + gathered
    selective = (down + latent) * s + attention + outputs + gathered
    return Kept(plan.tokens * none + weights, plan.tokens * selective)


def _ffn(plan: StepPlan, inner: int) -> Kept:
    """A gated feed-forward with its input."""
    s, own = plan.narrow, inner // plan.parallel.tp
    tensors = 3 if plan.model.activation == "situ" else 4
    none = plan.model.hidden_dim * s + tensors * own * s
    return Kept(plan.tokens * none, plan.tokens * 2 * own * s)


def _experts(plan: StepPlan, rows: float) -> Kept:
    s, w, moe, tp, ep = plan.narrow, plan.wide, plan.model.moe, plan.parallel.tp, plan.parallel.ep
    dim, latent, inner = plan.model.hidden_dim, moe.latent_dim or plan.model.hidden_dim, moe.expert_dim // tp
    cut, choices = plan.tokens // tp, moe.top_k
    router = moe.experts * w + choices * (INDEX + w) + (choices + 1) * w * moe.renormalize
    kept: float = cut * (router + (dim * w if s < w else 0)) + (moe.experts * dim * w if s < w else 0)
    # Rows in, gate and up; what comes out of the experts has left its padding behind where it travels.
    arrived = plan.tokens * choices if ep > 1 else rows
    kept += rows * (latent + 2 * inner) * s + arrived * latent * s + _indices(plan, rows)
    if tp > 1:
        kept += plan.tokens * choices * (INDEX + w)
    activation = rows * inner * s * (1 if plan.model.activation == "situ" else 2)
    total = Kept(kept + activation, kept)
    if moe.latent_dim is not None:
        normalized = cut * latent * s
        if moe.latent_norm:
            norm = cut * (2 * latent + 1) * w + (latent * w if s < w else 0)
            total += Kept(norm + normalized, normalized)
        else:
            total += Kept(normalized, normalized)
    shared = moe.shared_experts * moe.expert_dim
    if shared:
        total += _ffn(plan, shared)
    if not shared or tp > 1:
        total += Kept(cut * dim * s, 0)
    return total


def _indices(plan: StepPlan, rows: float) -> float:
    """Where rows come from and go to."""
    routed = plan.tokens * plan.model.moe.top_k
    # The ends of the segments; the experts' product in fp64 is a loop that keeps none.
    ends = plan.model.moe.experts // plan.parallel.ep * 4 if plan.dtype != torch.float64 else 0
    return (routed if plan.parallel.ep == 1 else 3 * routed + rows) * INDEX + ends


def _decisions(plan: StepPlan, rows: float) -> float:
    """The experts of each token and the dispatcher's plan, kept by a layer that is run again."""
    routed = plan.tokens * plan.model.moe.top_k
    sources = rows * INDEX if plan.parallel.ep == 1 else 0
    return routed / plan.parallel.tp * INDEX + _indices(plan, rows) + sources
