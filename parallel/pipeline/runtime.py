"""Runs a pipeline schedule on one rank: the same loop for training, evaluation and decoding, and for one stage or many.

    F   receive -> state of detached leaves -> layers -> send prefix and rows     keep leaves and outputs
    B   receive gradients -> backward from the outputs -> send the leaves' gradients
    W   make the weight gradients that B put off

Each virtual stage has a graph of its own, and autograd runs each by itself: a tensor that enters the stage is a
detached leaf, a tensor that the stage makes is an output. A row that only passes through a stage is neither. It stays
in the rank's `BankRows`: were it an output of a stage that did not make it, torch would go through one graph twice.

Without a pipeline the model is one stage on one rank: F and B of each microbatch in turn, nothing received or sent.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from model.attn_residual import ResidualState
from model.documents import Documents
from model.kimi import KimiModel, LayerCache
from model.stats import ForwardStats
from parallel.collectives import broadcast_in_place, combine_in_place
from parallel.context.layout import TokenSlice
from parallel.data import DataParallel
from parallel.mesh import Mesh
from parallel.pipeline.boundary import BankRows, Mail
from parallel.pipeline.deferred import Deferred, DeferredGradients
from parallel.pipeline.layout import PipelineLayout
from parallel.pipeline.schedule import Action, Schedule, forward_only, make_schedule
from parallel.pipeline.stage import held_layers
from parallel.tensor import head_loss


class _Pass(NamedTuple):
    """One stage's forward of one microbatch, until its backward.

    leaves: what entered: the prefix, then all rows; none on the first stage.
    outputs: where the graph ends, of what left: the prefix, then the rows closed here; or the loss. Edges and not
        tensors, because backward does not read the values.
    """

    leaves: list[Tensor]
    outputs: list[GradientEdge]


@dataclass(frozen=True)
class _Train:
    """Forward and backward.

    labels: labelled tokens of the step, at least 1; the loss is divided by them.
    stats: takes the counts of this rank's layers.
    """

    labels: int
    stats: ForwardStats | None


@dataclass(frozen=True)
class _Evaluate:
    """Forward to the loss."""


@dataclass
class _Decode:
    """Forward to the logits.

    caches: one per layer, brought up to date in place.
    logits: [B, 1, V] after the last token; set on the rank with the last stage.
    """

    caches: Sequence[LayerCache]
    logits: Tensor | None = None


_Purpose = _Train | _Evaluate | _Decode


@dataclass
class _Run:
    """The state of one run of a schedule.

    purpose: what it is for: whether a backward comes, and what the last stage makes of its hidden states.
    batches: each microbatch's tokens on this rank.
    total: fp64 sum of the losses that this rank computed.
    """

    purpose: _Purpose
    batches: Sequence[TokenSlice]
    mail: Mail
    total: Tensor
    rows: dict[tuple[int, int], BankRows] = field(default_factory=dict)
    passes: dict[tuple[int, int], _Pass] = field(default_factory=dict)
    deferred: dict[tuple[int, int], list[Deferred]] = field(default_factory=dict)


class Pipeline:
    """A model as a pipeline of virtual stages, of which this rank runs its own.

    Args:
        model: this rank's part of it (`parallel.pipeline.stage.keep_part`), ready to run on the mesh.
        mesh: this rank's place.
        layout: how the model is cut; None: it is whole.
        schedule: name of the order of work (`parallel.pipeline.schedule`).
        deferred: collects the weight gradients that the model's products put off, which is what "zero_bubble" runs on.
        loss_chunk: tokens whose logits exist at once.

    Attributes:
        sent: bytes that this rank has sent over each hop, by (stage, next stage).
    """

    def __init__(
        self,
        model: KimiModel,
        *,
        mesh: Mesh,
        layout: PipelineLayout | None = None,
        schedule: str = "auto",
        deferred: DeferredGradients | None = None,
        loss_chunk: int = 1024,
    ) -> None:
        layout = whole_layout(model) if layout is None else layout
        assert layout.ranks == mesh.pp.size, f"layout of {layout.ranks} ranks on pp={mesh.pp.size}"
        assert layout.layers_of(mesh.pp.rank) == held_layers(model), "the model is not this rank's part"
        self.model, self.mesh, self.layout, self.schedule = model, mesh, layout, schedule
        self.loss_chunk = loss_chunk
        self.sent: Counter[tuple[int, int]] = Counter()
        # What flows between layers has the dtype of their norms; some of the other parameters are wider.
        norm = model.get_parameter(f"layers.{layout.layers_of(mesh.pp.rank)[0]}.mixer_norm.weight")
        self.device, self.dtype = norm.device, norm.dtype
        self._schedules: dict[int, Schedule] = {}
        assert (deferred is not None) == (schedule == "zero_bubble"), schedule
        self.deferred = deferred

    @property
    def has_loss(self) -> bool:
        """Whether the last stage is on this rank."""
        return self.layout.rank_of(self.layout.last) == self.mesh.pp.rank

    def train(
        self, batches: Sequence[TokenSlice], *, labels: int, stats: ForwardStats | None, dp: DataParallel
    ) -> Tensor:
        """Forward and backward of all microbatches of a step; gradients go to ``dp``.

        Args:
            batches: at least one, this rank's slices; every rank of the pipeline calls with the same ones.
            labels: labelled tokens of the whole step.
            stats: takes the counts of this rank's layers.

        Returns:
            Sum of the losses of all labelled tokens, fp64, on ranks with the last stage; 0 on the others.
        """
        schedule = self._schedule_for(len(batches))
        run = self._begin(_Train(max(labels, 1), stats), batches, schedule)
        actions = schedule[self.mesh.pp.rank]
        # After these no gradient of their stage follows.
        last = {action.stage: action for action in actions if action.kind == ("B" if self.deferred is None else "W")}
        for action in actions:
            key = action.stage, action.microbatch
            if action.kind == "F":
                self._forward(action, run)
            elif action.kind == "W":
                with torch.no_grad(), dp.backward(part=action.stage, last=action == last[action.stage]):
                    for weight, make in run.deferred.pop(key):
                        dp.add_gradient(weight, make())
            elif self.deferred is not None:
                # Only with W the stage's gradients of this microbatch are complete.
                self._backward(action, run, nullcontext())
                run.deferred[key] = self.deferred.take()
            else:
                self._backward(action, run, dp.backward(part=action.stage, last=action == last[action.stage]))
        left = [*run.passes, *run.deferred, *run.rows]
        assert not left, f"left over from a step: {left}"
        run.mail.close()
        return run.total

    @torch.no_grad()
    def evaluate(self, batches: Sequence[TokenSlice]) -> Tensor:
        """Sum of the losses of all labelled tokens, as `train` returns it. Nothing is counted or kept."""
        if not batches:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return self._run_forward(_Evaluate(), batches).total

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """A sum of losses, or a count that goes with it, over all tokens of the mesh, the same on every rank.

        Args:
            x: over this rank's tokens, where it has the last stage; 0 elsewhere. All tp ranks have the same.
        """
        for axis in (self.mesh.dense, self.mesh.pp):
            combine_in_place(x, axis)
        return x

    @torch.no_grad()
    def decode(self, ids_BT: Tensor, caches: Sequence[LayerCache]) -> Tensor:
        """Logits [B, 1, V] after the last of the new tokens, on every rank.

        Args:
            ids_BT: continue what the caches have seen; equal on all ranks.
            caches: one per layer; those of other ranks' layers are not read.
        """
        batch, length = ids_BT.shape
        documents = Documents.of(batch, length, None, ids_BT.device)
        decode = _Decode(caches)
        self._run_forward(decode, [TokenSlice(ids_BT, ids_BT, documents)])
        logits = decode.logits
        if logits is None:
            logits = torch.empty(batch, 1, self.model.config.vocab_size, dtype=self.dtype, device=self.device)
        # From one rank to all: where copies differ by a rounding, ranks would sample, and stop, each for itself.
        source = self.layout.rank_of(self.layout.last) * self.mesh.replicas.size
        broadcast_in_place(logits, self.mesh.world, source=source)
        return logits

    def _schedule_for(self, microbatches: int) -> Schedule:
        if microbatches not in self._schedules:
            self._schedules[microbatches] = make_schedule(self.schedule, self.layout, microbatches=microbatches)
        return self._schedules[microbatches]

    def _run_forward(self, purpose: _Purpose, batches: Sequence[TokenSlice]) -> _Run:
        schedule = forward_only(self.layout, microbatches=len(batches))
        run = self._begin(purpose, batches, schedule)
        for action in schedule[self.mesh.pp.rank]:
            self._forward(action, run)
        assert not run.rows, "rows are left over from an evaluation"
        run.mail.close()
        return run

    def _begin(self, purpose: _Purpose, batches: Sequence[TokenSlice], schedule: Schedule) -> _Run:
        # Between layers tokens are cut over tp, but not in decoding.
        parts = 1 if isinstance(purpose, _Decode) else self.mesh.tp.size
        sizes = [batch.input_ids.shape for batch in batches]
        shapes = [(rows, tokens // parts, self.model.config.hidden_dim) for rows, tokens in sizes]
        mail = Mail(
            self.layout,
            schedule,
            mesh=self.mesh,
            shapes=shapes,
            dtype=self.dtype,
            device=self.device,
            sent=self.sent,
        )
        return _Run(purpose, batches, mail, torch.zeros((), dtype=torch.float64, device=self.device))

    def _rows(self, run: _Run, action: Action) -> BankRows:
        key = self.layout.holder(action.stage), action.microbatch
        if key not in run.rows:
            run.rows[key] = BankRows(f"pp rank {self.mesh.pp.rank}, microbatch {action.microbatch}")
        return run.rows[key]

    def _forward(self, action: Action, run: _Run) -> None:
        """One stage on one microbatch."""
        _, stage, microbatch = action
        layout, rows, batch = self.layout, self._rows(run, action), run.batches[microbatch]
        purpose, training = run.purpose, isinstance(run.purpose, _Train)
        leaves: list[Tensor] = []
        if stage == 0:
            state = self.model.begin(batch.input_ids)
        else:
            prefix, *arrived = run.mail.receive(Action("F", stage - 1, microbatch))
            for row, value in zip(layout.arriving(stage), arrived, strict=True):
                rows.put(row, value)
            entering = [prefix, *(rows.get(row) for row in range(layout.rows_before(stage)))]
            leaves = [x.detach().requires_grad_(training) for x in entering]
            state = ResidualState(leaves[0], tuple(leaves[1:]))
        layers = layout.layers(stage)
        # Without the index plans of other passes: they live no longer than this pass and its graph.
        documents = replace(batch.documents)
        state = self.model.run_layers(
            state,
            layers.start,
            layers.stop,
            documents=documents,
            stats=purpose.stats if isinstance(purpose, _Train) else None,
            caches=purpose.caches if isinstance(purpose, _Decode) else None,
        )
        outputs = self._finish(run, batch, state) if stage == layout.last else self._pass_on(run, action, state, rows)
        if training:
            run.passes[stage, microbatch] = _Pass(leaves, [get_gradient_edge(output) for output in outputs])
        if layout.is_last_of_holder(stage):
            rows.release()
            if not training:
                del run.rows[layout.holder(stage), microbatch]

    def _finish(self, run: _Run, batch: TokenSlice, state: ResidualState) -> list[Tensor]:
        """The end of the last stage: the loss, or in decoding the logits."""
        purpose, hidden = run.purpose, self.model.finish(state)
        if isinstance(purpose, _Decode):
            purpose.logits = self.model.head(hidden[:, -1:])
            return []
        head = self.model.head
        loss = head_loss(
            hidden, head.weight, batch.labels, axis=self.mesh.tp, chunk=self.loss_chunk, product=head.product
        )
        run.total += loss.detach().double()
        return [loss / purpose.labels] if isinstance(purpose, _Train) else []

    def _pass_on(self, run: _Run, action: Action, state: ResidualState, rows: BankRows) -> list[Tensor]:
        """The end of any other stage: keep the rows that it closed and send what the next one lacks."""
        layout, stage = self.layout, action.stage
        before, after = layout.rows_before(stage), layout.rows_after(stage)
        assert state.prefix is not None, "a layer ends with an open block"
        assert len(state.bank) == after, f"stage {stage} has {len(state.bank)} rows, not {after}"
        for row in range(before, after):
            rows.put(row, state.bank[row])
        run.mail.send(action, [state.prefix.detach(), *(rows.get(row) for row in layout.arriving(stage + 1))])
        # A prefix that was closed as it came is a row that this stage did not make.
        return [state.prefix, *state.bank[before + layout.closes_prefix(stage) :]]

    def _backward(self, action: Action, run: _Run, block: AbstractContextManager[None]) -> None:
        """Gradients of one stage and microbatch, inside ``block``; what entered gets its gradient sent back."""
        _, stage, microbatch = action
        layout, rows = self.layout, self._rows(run, action)
        leaves, outputs = run.passes.pop((stage, microbatch))
        before, inner = layout.rows_before(stage), stage < layout.last
        gradients: Iterable[Tensor | None] = [None]
        if inner:
            first, *returned = run.mail.receive(Action("B", stage + 1, microbatch))
            for row, gradient in zip(layout.arriving(stage + 1), returned, strict=True):
                rows.add_gradient(row, gradient)
            made = range(before + layout.closes_prefix(stage), layout.rows_after(stage))
            gradients = [first, *(rows.take_gradient(row) for row in made)]
        with block:
            torch.autograd.backward(outputs, list(gradients))
        if stage > 0:
            for row in range(before):
                rows.add_gradient(row, leaves[1 + row].grad)
            prefix = leaves[0].grad
            assert prefix is not None, f"stage {stage} has no gradient for its prefix"
            if inner and layout.closes_prefix(stage):
                prefix = prefix + rows.take_gradient(before)
            run.mail.send(action, [prefix, *(rows.take_gradient(row) for row in layout.arriving(stage))])
        if all(layout.holder(s) != layout.holder(stage) for s in range(stage)):
            assert rows.is_empty(), f"{rows.label}: left over after the last backward"
            del run.rows[layout.holder(stage), microbatch]


def whole_layout(model: KimiModel) -> PipelineLayout:
    """One stage with everything."""
    return PipelineLayout((model.config.num_layers,), block=model.config.residual_block)
