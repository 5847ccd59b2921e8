"""What the collectives of one step move, from the config alone: calls and bytes by name, summed over all ranks.

The names and the count of bytes are those of `parallel.mesh.Traffic`: what each rank sends in a ring, so of n ranks

    all_gather, reduce_scatter, all_to_all     (n - 1) / n of the whole
    all_reduce                                 2 (n - 1) / n
    reduce to an owner, broadcast from it      (n - 1) / n on average (`parallel.data`)
    send                                       all of it

Each function is one part of a step and reads like it: forward, then backward, in the dtypes that travel (sums over
ranks are wide, 4 bytes or 8). All of it follows from the config but one thing: which experts the tokens choose. For
that stands the expectation of even routing, or the rows that did cross; experts are computed at their homes
(``parallel.experts.dispatcher=all_to_all``), for what copies a balanced plan sends depends on the routing alone.

Shapes: T tokens of a cp slice, D model, L latent, H heads of a tp rank, K key, V value, E experts, C choices.
"""

import math
from collections import Counter, defaultdict
from typing import NamedTuple

from launch.plan.step import Held, StepPlan
from parallel.mesh import Axis


class Predicted(NamedTuple):
    """What collectives of one name will move: calls and bytes sent."""

    calls: int
    sent: float


class _Ledger:
    """Adds up what ``ranks`` ranks that do the same call and send."""

    def __init__(self) -> None:
        self.ranks = 1
        self.calls: Counter[str] = Counter()
        self.sent: defaultdict[str, float] = defaultdict(float)

    def add(self, axis: Axis, kind: str, sent: float, *, times: int = 1) -> None:
        """``times`` calls of ``sent`` bytes each, on each of the ranks; an axis of size 1 makes none."""
        if axis.size > 1 and times:
            self.calls[f"{axis.name} {kind}"] += times * self.ranks
            self.sent[f"{axis.name} {kind}"] += times * self.ranks * sent

    def gather(self, axis: Axis, whole: int, *, times: int = 1) -> None:
        """An all-gather of ``whole`` bytes."""
        self.add(axis, "all_gather", whole * (axis.size - 1) // axis.size, times=times)

    def scatter(self, axis: Axis, whole: int, *, times: int = 1) -> None:
        """A reduce-scatter of ``whole`` bytes."""
        self.add(axis, "reduce_scatter", whole * (axis.size - 1) // axis.size, times=times)

    def swap(self, axis: Axis, whole: float, *, times: int = 1) -> None:
        """An all-to-all in which each rank has ``whole`` bytes, evenly for all ranks."""
        self.add(axis, "all_to_all", whole * (axis.size - 1) / axis.size, times=times)


def step_traffic(plan: StepPlan, *, crossing_rows: float | None = None) -> dict[str, Predicted]:
    """Calls and bytes by name of one training step, over all ranks.

    Args:
        crossing_rows: how many (token, choice) rows of the step, over all expert layers, have their expert on another
            ep rank. None: what even routing makes of it.
    """
    ledger = _Ledger()
    for stage in range(plan.parallel.pp):
        # All ranks of a stage do the same.
        ranks, held = plan.world_size // plan.parallel.pp, plan.stages[stage]
        ledger.ranks = ranks * plan.microbatches
        for layer in held.layers:
            _layer_traffic(ledger, plan, held, layer)
        _ends_traffic(ledger, plan, held)
        _hop_traffic(ledger, plan, held)
        ledger.ranks = ranks
        _update_traffic(ledger, plan, held)
    if crossing_rows is not None and plan.parallel.ep > 1:
        width = plan.model.moe.latent_dim or plan.model.hidden_dim
        ledger.sent["ep all_to_all"] = _exchanges(plan) * crossing_rows * width * plan.narrow
    return {name: Predicted(calls, ledger.sent[name]) for name, calls in sorted(ledger.calls.items())}


def _forwards(plan: StepPlan) -> int:
    """How often a layer goes forward."""
    return 2 if plan.recompute == "full" else 1


def _exchanges(plan: StepPlan) -> int:
    """Times that a routed row travels: there and back, forward and backward."""
    return 2 * _forwards(plan) + 2


def _layer_traffic(ledger: _Ledger, plan: StepPlan, held: Held, layer: int) -> None:
    """One layer, one microbatch."""
    width, moe = plan.model.hidden_dim, plan.model.is_moe(layer)
    _region(ledger, plan, held, width)
    if plan.model.mixers[layer] == "K":
        _kda(ledger, plan, held)
    else:
        _mla(ledger, plan, held)
    if not moe or plan.model.moe.shared_experts:
        _region(ledger, plan, held, width)
    if moe:
        _experts(ledger, plan, held)


def _region(ledger: _Ledger, plan: StepPlan, held: Held, width: int) -> None:
    """Into a tensor-parallel region and out of it."""
    tp, again = held.mesh.tp, _forwards(plan)
    tokens = plan.tokens * width
    ledger.gather(tp, tokens * plan.narrow, times=again)
    ledger.scatter(tp, tokens * plan.wide, times=again)
    ledger.gather(tp, tokens * plan.narrow)
    ledger.scatter(tp, tokens * plan.wide)


def _kda(ledger: _Ledger, plan: StepPlan, held: Held) -> None:
    """The halo of the convolutions, and states from slice to slice."""
    cp, kda, again = held.mesh.cp, plan.model.kda, _forwards(plan)
    heads = kda.heads // held.mesh.tp.size
    halo = cp.size * min(kda.conv_size - 1, plan.tokens) * 3 * heads * kda.head_dim
    ledger.gather(cp, halo * plan.narrow, times=again)
    ledger.scatter(cp, halo * plan.wide)
    state = cp.size * heads * kda.head_dim**2 * plan.wide
    ledger.gather(cp, 2 * state, times=again)
    ledger.gather(cp, state)


def _mla(ledger: _Ledger, plan: StepPlan, held: Held) -> None:
    """The latent and shared key gathered; queries and outputs between tokens and heads."""
    cp, mla, again = held.mesh.cp, plan.model.mla, _forwards(plan)
    latent = cp.size * plan.tokens * (mla.kv_rank + mla.rope_dim)
    ledger.gather(cp, latent * plan.narrow, times=again)
    ledger.scatter(cp, latent * plan.wide)
    heads = mla.heads // held.mesh.tp.size
    if heads % cp.size == 0:
        for width in (mla.nope_dim + mla.rope_dim, mla.value_dim):
            ledger.swap(cp, plan.tokens * heads * width * plan.narrow, times=again + 1)


def _experts(ledger: _Ledger, plan: StepPlan, held: Held) -> None:
    """Counts and rows over ep; under tp the latent, the experts' numbers and their weights enter first."""
    tp, ep, moe = held.mesh.tp, held.mesh.ep, plan.model.moe
    width = moe.latent_dim or plan.model.hidden_dim
    _region(ledger, plan, held, width)
    routed = plan.tokens * moe.top_k
    ledger.gather(tp, routed * 8)
    ledger.gather(tp, routed * plan.wide, times=_forwards(plan))
    ledger.scatter(tp, routed * plan.wide)
    ledger.gather(ep, ep.size * moe.experts * 8)
    ledger.swap(ep, routed * width * plan.narrow, times=_exchanges(plan))


def _ends_traffic(ledger: _Ledger, plan: StepPlan, held: Held) -> None:
    """The embedding and the loss, where this rank holds them; one microbatch."""
    tp, tokens = held.mesh.tp, plan.tokens * plan.model.hidden_dim
    if held.first:
        ledger.scatter(tp, tokens * plan.wide)
        ledger.gather(tp, tokens * plan.narrow)
    if held.last:
        ledger.gather(tp, tokens * plan.narrow)
        ledger.scatter(tp, tokens * plan.wide)
        for start in range(0, plan.tokens, plan.loss_chunk):
            # Of each token the log-normaliser and the target's logit.
            ledger.gather(tp, tp.size * min(plan.loss_chunk, plan.tokens - start) * 2 * plan.wide)


def _hop_traffic(ledger: _Ledger, plan: StepPlan, held: Held) -> None:
    """The residual state to the next stages and its gradient back; one microbatch."""
    layout, pp = plan.layout, held.mesh.pp
    one = plan.tokens // held.mesh.tp.size * plan.model.hidden_dim * plan.narrow
    for stage in layout.stages_of(pp.rank):
        for hop in (stage, stage - 1):
            if 0 <= hop < layout.last and layout.is_hop(hop):
                ledger.add(pp, "send", layout.slices(hop) * one)


def _update_traffic(ledger: _Ledger, plan: StepPlan, held: Held) -> None:
    """Gradients to owners, the norm, whole matrices for Muon and back, parameters from owners."""
    mesh = held.mesh
    reductions = plan.microbatches if plan.parallel.zero == 2 else 1
    for bucket in held.buckets.buckets:
        name = bucket.slots[0].name
        axis = held.axis(name)
        share = bucket.numel * (axis.size - 1) / axis.size
        ledger.add(axis, "reduce", share * plan.wide, times=reductions)
        ledger.add(axis, "broadcast", share * held.dtypes[name].itemsize)
    _combine(ledger, mesh.world, 8)  # the gradients' squares, fp64
    if plan.model.tie_embeddings and held.first != held.last:
        # The owners of each slice of the embedding add up what its two uses made.
        slices = mesh.replicas.size // held.axis(held.head).size
        whole = math.prod(held.shapes[held.head]) * plan.wide
        ledger.ranks = 1
        ledger.add(mesh.ends, "all_reduce", whole, times=slices)
        ledger.ranks = mesh.replicas.size
    _statistics_traffic(ledger, plan, held)
    _matrix_traffic(ledger, plan, held)


def _statistics_traffic(ledger: _Ledger, plan: StepPlan, held: Held) -> None:
    """Labels, loss, experts' loads and histograms, attention logits."""
    mesh, moe = held.mesh, plan.model.moe
    experts = [layer for layer in held.layers if plan.model.is_moe(layer)]
    bins = moe.histogram_bins if moe.balancing == "quantile" else 0
    heads = plan.model.mla.heads if plan.optim.qk_clip > 0 else 0
    attention = [layer for layer in held.layers if layer in plan.model.mla_layers]
    _combine(ledger, mesh.dp, 8)
    _combine(ledger, mesh.dense, 8)
    _combine(ledger, mesh.pp, 8)
    _combine(ledger, mesh.replicas, len(experts) * moe.experts * 8)
    _combine(ledger, mesh.replicas, len(experts) * moe.experts * bins * 4)
    _combine(ledger, mesh.replicas, len(attention) * heads * 4)
    _combine(ledger, mesh.pp, len(plan.model.moe_layers) * moe.experts * 8)
    _combine(ledger, mesh.pp, 4)


def _combine(ledger: _Ledger, axis: Axis, whole: int) -> None:
    """An all-reduce of ``whole`` bytes; of nothing, none."""
    ledger.add(axis, "all_reduce", 2 * whole * (axis.size - 1) // axis.size, times=whole > 0)


def _matrix_traffic(ledger: _Ledger, plan: StepPlan, held: Held) -> None:
    """Which matrices cut over tp have a gradient; then each to one rank, which orthogonalises it, and back:
    `optim.muon`, `optim.exchange`."""
    tp, stage = held.mesh.tp, held.mesh.replicas
    ledger.ranks = 1
    for rank in range(stage.size):
        owned = held.muon(held.buckets.owned_by(rank), cut=True)
        _combine(ledger, tp, sum(group.blocks[0][0] for group in owned.values()))
    whole = sum(
        math.prod(group.shape) / held.axis(name).size for name, group in held.muon(held.groups, cut=True).items()
    )
    rounds = sum(len(held.rounds(plan, owned=held.buckets.owned_by(rank))) for rank in range(stage.size))
    for width in (plan.wide, plan.orthogonal):
        # All ranks together send what all of them hold, but for what is at home already.
        sent = whole * stage.size * width * (tp.size - 1) / tp.size
        ledger.add(tp, "all_to_all", sent / max(rounds, 1), times=rounds)
