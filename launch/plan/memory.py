"""Memory of one rank at the peak of a step, from the config alone.

    weights     whole buckets, alignment included           gradients   fp32 sums: ZeRO-1 all, ZeRO-2 the owned ones
    masters     of what it owns, where weights are narrow   optimizer   of what it owns: Muon one number, AdamW two
    activations of all microbatches between their forward and backward, as the schedule has them at most
    working     what one operation needs on top: the loss of a chunk of tokens with the head's gradient, or the backward
                of one layer, which makes again what was not kept
    update      the largest stack of matrices that the optimizer orthogonalises together, or the largest round of
                matrices cut over tp that it brings together for that, when activations are gone

The first four are exact. Activations are those of `launch.plan.activations`. Of the working memory the largest terms
are counted, so the sum is an estimate, a few percent off (`python -m tests.bench.parallel` measures it). Not counted
are the buffers of collectives other than the exchange, and what an allocator loses between blocks.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from launch.plan.activations import deferred_bytes, even_rows, index_bytes, layer_bytes, output_bytes
from launch.plan.step import Held, StepPlan, held_by
from model.kernels.situ_glu import SLICE
from model.layers import SUM_ELEMENTS
from optim.exchange import MatrixExchange
from optim.groups import Group
from optim.muon import MuonBatch, batch_elements, plan_batches
from optim.rounds import Round
from parallel.data import IN_FLIGHT
from parallel.grads import EMBEDDING
from parallel.pipeline.schedule import make_schedule, splits_weights


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
    stack: int
    exchange: int

    @property
    def update(self) -> int:
        """Most that the optimizer takes on top."""
        return max(self.stack, self.exchange)

    @property
    def static(self) -> int:
        """What is there between steps."""
        return self.weights + self.buffers + self.gradients + self.masters + self.optimizer

    @property
    def peak(self) -> float:
        """Most at any time."""
        return self.static + max(self.transient + self.activations + self.working, self.update)


def rank_memory(plan: StepPlan, *, rank: int, rows: float | None = None) -> Memory:
    """Memory of ``rank``; ``rows`` as for `memory_of`."""
    return memory_of(plan, held_by(plan, rank=rank), rows=rows)


def memory_of(plan: StepPlan, held: Held, *, rows: float | None = None) -> Memory:
    """Memory of the rank that holds ``held``.

    Args:
        rows: (token, choice) rows that the rank's experts compute in a layer and microbatch, padding included. None:
            even routing.
    """
    rows = even_rows(plan) if rows is None else rows
    owned = set(held.owned)
    mine = [bucket for bucket in held.buckets.buckets if owned.issuperset(slot.name for slot in bucket.slots)]
    others = [bucket for bucket in held.buckets.buckets if bucket not in mine]
    summed = held.buckets.buckets if plan.parallel.zero == 1 else mine
    transient = sum(sorted((bucket.numel for bucket in others), reverse=True)[: 1 + IN_FLIGHT])
    sizes = {name: math.prod(held.shapes[name]) * plan.wide for name in held.owned}
    return Memory(
        weights=sum(b.numel * held.dtypes[b.slots[0].name].itemsize for b in held.buckets.buckets),
        buffers=held.buffer_bytes,
        gradients=sum(bucket.numel for bucket in summed) * plan.wide,
        transient=transient * plan.wide if plan.parallel.zero == 2 else 0,
        masters=sum(size for name, size in sizes.items() if held.dtypes[name].itemsize < plan.wide),
        optimizer=sum(size * len(held.groups[name].moments) for name, size in sizes.items()),
        activations=_most_kept(plan, held, rows),
        working=max(_loss_work(plan, held), _layer_work(plan, held, rows), _embedding_work(plan, held)),
        stack=_most_stacked(plan, held.muon(held.owned, cut=False)),
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


def _embedding_work(plan: StepPlan, held: Held) -> float:
    """The embedding's gradient, and a slice of it in which a microbatch's tokens are summed."""
    if not held.first:
        return 0.0
    vocabulary, dim = held.shapes[EMBEDDING]
    columns = min(dim, max(1, SUM_ELEMENTS // vocabulary))
    # The gradient of the tokens that are looked up, and its columns in the dtype of sums.
    tokens = plan.tokens * (dim * plan.narrow + columns * plan.wide)
    return tokens + vocabulary * (dim * plan.narrow + columns * plan.wide)


def _round_work(plan: StepPlan, held: Held, portions: Round) -> int:
    """Most bytes at once of a round of Muon's exchange."""
    tp, w, s = held.mesh.tp, plan.wide, plan.orthogonal
    exchange = MatrixExchange(held.groups, tp, portions)
    parts = 0
    for portion in portions:
        _, rows, columns = held.groups[portion.name].blocks[0]
        parts += sum(portion.counts) * rows * columns // tp.size
    whole = sum(math.prod(group.shape) for group in exchange.share.values())
    gather, scatter = whole * w + max(parts, whole) * w, (2 * whole + parts) * s
    return max(gather, whole * (w + s) + _most_stacked(plan, exchange.share), scatter)


def _most_stacked(plan: StepPlan, groups: Mapping[str, Group]) -> int:
    """Most bytes that one of Muon's stacks takes, over those in which it orthogonalises whole matrices."""
    limit = batch_elements(torch.device(plan.device))
    batches = plan_batches(list(groups.values()), max_elements=limit)
    return max((_stack_work(plan, batch) for batch in batches), default=0)


def _stack_work(plan: StepPlan, batch: MuonBatch) -> int:
    w, s = plan.wide, plan.orthogonal
    count = sum(piece.stop - piece.start for piece in batch.pieces)
    numel, gram = count * batch.rows * batch.columns, count * min(batch.rows, batch.columns) ** 2
    copy = numel * w if len(batch.pieces) > 1 else 0
    # Scaled and then cast; later two iterates and two polynomials of the Gram matrix.
    return copy + max(numel * (w + (s if s < w else 0)), 2 * (numel + gram) * s)
