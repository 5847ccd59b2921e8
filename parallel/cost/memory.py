"""Memory of one rank at the peak of a step, from the config alone.

    weights     whole buckets, alignment included           gradients   fp32 sums: ZeRO-1 all, ZeRO-2 the owned ones
    masters     of what it owns, where weights are narrow   optimizer   of what it owns: Muon one number, AdamW two
    activations of all microbatches between their forward and backward, as the schedule has them at most
    working     what one operation needs on top: the loss of a chunk of tokens with the head's gradient, or the backward
                of one layer, which makes again what was not kept
    exchange    the largest round of matrices cut over tp that the optimizer brings together, when activations are gone

The first four are exact. Activations are those of `parallel.cost.activations`. Of the working memory the largest terms
are counted, so the sum is an estimate, a few percent off (`python -m tests.bench.parallel` measures it). Not counted
are the buffers of collectives other than the exchange, Muon's stacks of matrices that are not cut (`optim.muon` bounds
them), and what an allocator loses between blocks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from model.kernels.situ_glu import SLICE
from parallel.cost.activations import deferred_bytes, even_rows, index_bytes, layer_bytes, output_bytes
from parallel.cost.plan import Held, StepPlan, held_by
from parallel.data import IN_FLIGHT
from parallel.pipeline.schedule import make_schedule, splits_weights
from parallel.rounds import Round


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank. transient: of gradients that are on their way to their owners (ZeRO-2)."""

    weights: int
    buffers: int
    gradients: int
    transient: int
    masters: int
    optimizer: int
    activations: float
    working: float
    exchange: int

    @property
    def static(self) -> int:
        """What is there between steps."""
        return self.weights + self.buffers + self.gradients + self.masters + self.optimizer

    @property
    def peak(self) -> float:
        """Most at any time."""
        return self.static + max(self.transient + self.activations + self.working, self.exchange)


def rank_memory(
    plan: StepPlan, *, rank: int, cost: Mapping[str, float] | None = None, rows: float | None = None
) -> Memory:
    """Memory of ``rank``.

    Args:
        cost: work of updating each of its parameters, as in `parallel.cost.plan.held_by`; decides who owns what.
        rows: (token, choice) rows that the rank's experts compute in a layer and microbatch, padding included. None:
            even routing.
    """
    held = held_by(plan, rank=rank, cost=cost)
    rows = even_rows(plan) if rows is None else rows
    owned = set(held.owned)
    mine = [bucket for bucket in held.buckets.buckets if owned.issuperset(slot.name for slot in bucket.slots)]
    others = [bucket for bucket in held.buckets.buckets if bucket not in mine]
    summed = held.buckets.buckets if plan.parallel.zero == 1 else mine
    transient = sum(sorted((bucket.numel for bucket in others), reverse=True)[: 1 + IN_FLIGHT])
    narrow = [name for name in held.owned if held.dtypes[name].itemsize < plan.wide]
    return Memory(
        weights=sum(b.numel * held.dtypes[b.slots[0].name].itemsize for b in held.buckets.buckets),
        buffers=held.buffer_bytes,
        gradients=sum(bucket.numel for bucket in summed) * plan.wide,
        transient=transient * plan.wide if plan.parallel.zero == 2 else 0,
        masters=sum(math.prod(held.shapes[name]) for name in narrow) * plan.wide,
        optimizer=sum(
            math.prod(held.shapes[name]) * plan.wide * (1 if held.roles[name].kind == "matrix" else 2)
            for name in held.owned
        ),
        activations=_most_kept(plan, held, rows),
        working=max(_loss_work(plan, held), _layer_work(plan, held, rows)),
        exchange=max(
            (_round_work(plan, held, portions) for portions in held.rounds(plan, owned=held.owned)), default=0
        ),
    )


def stage_bytes(plan: StepPlan, stage: int, *, rows: float) -> float:
    """Bytes that one microbatch leaves in a virtual stage between its forward and its backward."""
    layout, dim = plan.layout, plan.model.hidden_dim
    layers = layout.layers(stage)
    total = sum(layer_bytes(plan, layer, rows=rows) for layer in layers) + index_bytes(plan, layers)
    if stage == layout.last:
        total += output_bytes(plan)
    if stage > 0:
        # The rows that came with the prefix, and the copies that the receiving end keeps apart from its message.
        total += len(layout.arriving(stage)) * (plan.tokens // plan.parallel.tp) * dim * plan.narrow
    return total


def _most_kept(plan: StepPlan, held: Held, rows: float) -> float:
    """Most bytes of activations at once, by walking through the rank's actions."""
    layout, rank = plan.layout, held.mesh.pp.rank
    schedule = make_schedule(plan.parallel.schedule, layout, microbatches=plan.microbatches)
    split = splits_weights(schedule)
    message = plan.tokens // plan.parallel.tp * plan.model.hidden_dim * plan.narrow
    kept = {stage: stage_bytes(plan, stage, rows=rows) for stage in layout.stages_of(rank)}
    put_off = {
        stage: sum(deferred_bytes(plan, layer, rows=rows) for layer in layout.layers(stage)) if split else 0.0
        for stage in kept
    }
    now = most = 0.0
    losses = 0
    for kind, stage, _ in schedule[rank]:
        now += {"F": kept[stage], "B": put_off[stage] - kept[stage], "W": -put_off[stage]}[kind]
        losses += {"F": 1, "B": -1}.get(kind, 0) if stage == layout.last else 0
        # What one loss keeps is working memory; only gpipe has more of them at once.
        most = max(most, now + max(0, losses - 1) * _loss_gradients(plan, held))
        hop = {"F": stage, "B": stage - 1}.get(kind, -1)
        if plan.sends_linger and hop >= 0:
            now += layout.slices(hop) * message
    return most


def _loss_gradients(plan: StepPlan, held: Held) -> float:
    """What a loss keeps from its forward, which makes them, to its backward: gradients of head and hidden states."""
    if not held.last:
        return 0.0
    return math.prod(held.shapes[held.head]) * plan.wide + plan.tokens * plan.model.hidden_dim * plan.narrow


def _loss_work(plan: StepPlan, held: Held) -> float:
    """The head's gradient and one chunk's logits, or the scaling of that gradient: at the end of a forward pass."""
    if not held.last:
        return 0.0
    vocabulary, dim = held.shapes[held.head]
    s, w = plan.narrow, plan.wide
    weight, chunk = vocabulary * dim, min(plan.loss_chunk, plan.tokens)
    hidden = plan.tokens * dim * s * (1 if plan.parallel.tp == 1 else 2)
    # In the chunk's product for the head: the logits' gradient, in both dtypes, and the product before it is added.
    forward = chunk * vocabulary * (w + (s if s < w else 0)) + weight * (w + s)
    # Backward scales the gradient into a new tensor and casts it.
    backward = weight * (2 * w + (s if s < w else 0))
    return hidden + max(forward, backward + plan.tokens * dim * s)


def _layer_work(plan: StepPlan, held: Held, rows: float) -> float:
    """What the costliest layer makes again, and the gradients and temporaries of its widest feed-forward."""
    s, w = plan.narrow, plan.wide
    again = max(
        layer_bytes(plan, layer, policy="none", rows=rows) - layer_bytes(plan, layer, rows=rows)
        for layer in held.layers
    )
    dense, routed = plan.tokens * plan.model.dense_dim, rows * plan.model.moe.expert_dim
    inner = max(routed if plan.model.is_moe(layer) else dense for layer in held.layers) / plan.parallel.tp
    return again + 3 * inner * s + 4 * min(inner, SLICE) * w + 2 * plan.tokens * plan.model.hidden_dim * s


def _round_work(plan: StepPlan, held: Held, portions: Round) -> int:
    """Most bytes at once of a round of Muon's exchange, if equal matrices are orthogonalised in one product."""
    tp, w, s = held.mesh.tp, plan.wide, plan.orthogonal
    parts = 0
    pieces: dict[tuple[int, int], list[int]] = {}
    for portion in portions:
        _, *sides = held.whole_matrices(portion.name)
        parts += sum(portion.counts) * math.prod(sides) // tp.size
        if portion.counts[tp.rank]:
            pieces.setdefault((sides[0], sides[1]), []).append(portion.counts[tp.rank])
    stack = 0
    for (rows, columns), counts in pieces.items():
        numel, gram = sum(counts) * rows * columns, sum(counts) * min(rows, columns) ** 2
        copy = numel * w if len(counts) > 1 else 0
        # Scaled and then cast; later two iterates and two polynomials of the Gram matrix.
        stack = max(stack, copy + max(numel * (w + (s if s < w else 0)), 2 * (numel + gram) * s))
    whole = sum(sum(counts) * rows * columns for (rows, columns), counts in pieces.items())
    gather, scatter = whole * w + max(parts, whole) * w, (2 * whole + parts) * s
    return max(gather, whole * (w + s) + stack, scatter)
