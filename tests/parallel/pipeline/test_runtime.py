"""The runtime with all virtual stages in one process: cuts, the bank's rows, and when gradients are final."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.kimi import KimiModel
from model.loss import chunked_cross_entropy
from parallel.context.layout import TokenSlice, slice_tokens
from parallel.data import DataParallel
from parallel.mesh import Axis, Mesh
from parallel.pipeline.boundary import BankRows
from parallel.pipeline.deferred import deferral
from parallel.pipeline.layout import PipelineLayout
from parallel.pipeline.runtime import Pipeline
from parallel.pipeline.schedule import Action
from parallel.pipeline.stage import parameter_stages
from tests.model.tiny import tiny_config, tiny_model, tokens

LENGTH = 16


def batches(count: int) -> list[TokenSlice]:
    ids = [tokens(1, LENGTH, seed=i) for i in range(count)]
    bounds = torch.tensor([0, 5, LENGTH])
    return [slice_tokens(x, x.roll(-1, 1), bounds, axis=Axis()) for x in ids]


def make_pipeline(model: KimiModel, layout: PipelineLayout, schedule: str) -> Pipeline:
    deferred = deferral(schedule)
    if deferred is not None:
        deferred.install(model)
    return Pipeline(model, mesh=Mesh(), layout=layout, schedule=schedule, deferred=deferred)


def gradients(family: str, layout: PipelineLayout | None, schedule: str, microbatches: int) -> dict[str, Tensor]:
    """Of a step; without a layout by autograd through the whole model."""
    model = tiny_model(family)
    if layout is None:
        for ids, labels, documents in batches(microbatches):
            hidden = model.hidden(ids, documents=documents)
            (chunked_cross_entropy(hidden, model.head.weight, labels) / 7).backward()
        return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    pipeline = make_pipeline(model, layout, schedule)
    parts = parameter_stages(model, layout)
    dp = DataParallel(dict(model.named_parameters()), axis=Axis(), parts=parts, bucket_bytes=4096)
    pipeline.train(batches(microbatches), labels=7, stats=None, dp=dp)
    dp.finish()
    return dp.owned_gradients()


PLAIN = {family: gradients(family, None, "", 3) for family in ("k3", "k3_full", "linear")}


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, ...]:
    """Five layers over one to five stages."""
    bounds = draw(st.sets(st.integers(1, 4)))
    edges = [0, *sorted(bounds), 5]
    return tuple(b - a for a, b in zip(edges, edges[1:]))


@given(st.sampled_from(sorted(PLAIN)), cuts(), st.booleans(), st.sampled_from(["gpipe", "interleaved", "zero_bubble"]))
@settings(deadline=None, max_examples=20)
def test_any_cut_gives_the_gradients_of_the_whole(
    family: str, counts: tuple[int, ...], cache: bool, schedule: str
) -> None:
    layout = PipelineLayout(counts, block=tiny_config(family).residual_block, cache=cache)
    found = gradients(family, layout, schedule, 3)
    for name, value in PLAIN[family].items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-13, msg=name)


class Recorder:
    """Stands in for `DataParallel`: what it is told, and in which order."""

    def __init__(self) -> None:
        self.blocks: list[tuple[int, bool]] = []
        self.open = False

    @contextmanager
    def backward(self, part: int, *, last: bool) -> Iterator[None]:
        self.blocks.append((part, last))
        self.open = True
        yield
        self.open = False

    def add_gradient(self, param: Tensor, gradient: Tensor) -> None:
        assert self.open
        assert gradient.shape == param.shape


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zero_bubble"])
def test_each_stage_is_told_when_its_gradients_are_final(schedule: str) -> None:
    """A block per stage and microbatch, the last of each stage marked, the last stage's before the first stage's."""
    layout, recorder = PipelineLayout((2, 2, 1), block=4), Recorder()
    pipeline = make_pipeline(tiny_model(), layout, schedule)
    pipeline.train(batches(4), labels=7, stats=None, dp=recorder)  # type: ignore[arg-type]
    assert sorted(part for part, _ in recorder.blocks) == sorted([0, 1, 2] * 4)
    for stage in range(3):
        assert [last for part, last in recorder.blocks if part == stage] == [False] * 3 + [True]
    finals = [part for part, last in recorder.blocks if last]
    assert finals == [2, 1, 0]


def watch(pipeline: Pipeline) -> list[tuple[Action, int, int]]:
    """After every forward: the action, microbatches that have a table, and rows that are kept in all of them."""
    seen = []
    forward = pipeline._forward

    def watched(action: Action, run: object) -> None:
        forward(action, run)  # type: ignore[arg-type]
        tables: list[BankRows] = list(run.rows.values())  # type: ignore[attr-defined]
        seen.append((action, len(tables), sum(len(table._rows) for table in tables)))

    pipeline._forward = watched  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("cache", [True, False])
def test_rows_are_let_go_after_their_last_use(cache: bool) -> None:
    layout = PipelineLayout((1, 1, 1, 1, 1), block=1, cache=cache)
    pipeline = Pipeline(tiny_model("k3_full"), mesh=Mesh(), layout=layout, schedule="gpipe")
    seen = watch(pipeline)
    pipeline.evaluate(batches(3))
    # One rank: one microbatch at a time passes all stages, and leaves nothing.
    assert max(tables for _, tables, _ in seen) == (1 if cache else 0)
    assert [rows for action, _, rows in seen if action.stage == layout.last] == [0, 0, 0]
    if cache:
        assert [rows for action, _, rows in seen if action.microbatch == 0] == [2, 4, 6, 8, 0]
    seen.clear()
    model = pipeline.model
    dp = DataParallel(dict(model.named_parameters()), axis=Axis(), parts=parameter_stages(model, layout))
    pipeline.train(batches(3), labels=7, stats=None, dp=dp)
    assert [rows for action, _, rows in seen if action.stage == layout.last][-1] == 0


def test_a_stage_keeps_no_output_for_backward() -> None:
    """Only where the graph ends: the state that left has been sent, and backward does not read it."""
    pipeline = Pipeline(tiny_model(), mesh=Mesh(), layout=PipelineLayout((2, 3), block=4), schedule="gpipe")
    kept = []
    backward = pipeline._backward

    def watched(action: Action, run: object, block: object) -> None:
        kept.extend(run.passes[action.stage, action.microbatch].outputs)  # type: ignore[attr-defined]
        backward(action, run, block)  # type: ignore[arg-type]

    pipeline._backward = watched  # type: ignore[method-assign]
    pipeline.train(batches(1), labels=7, stats=None, dp=Recorder())  # type: ignore[arg-type]
    assert kept
    assert not any(isinstance(output, Tensor) for output in kept)


def test_a_layout_that_is_not_the_models_is_refused() -> None:
    with pytest.raises(AssertionError, match="the model is not this rank's part"):
        Pipeline(tiny_model(), mesh=Mesh(), layout=PipelineLayout((2, 2), block=4))
    with pytest.raises(AssertionError, match="layout of 2 ranks on pp=1"):
        Pipeline(tiny_model(), mesh=Mesh(), layout=PipelineLayout((2, 3), ranks=2, block=4))


def test_index_plans_of_a_microbatch_do_not_outlive_its_passes() -> None:
    model = tiny_model()
    pipeline = Pipeline(model, mesh=Mesh())
    made = batches(3)
    pipeline.train(made, labels=7, stats=None, dp=DataParallel(dict(model.named_parameters()), axis=Axis()))
    pipeline.evaluate(made)
    assert [len(batch.documents.kda_plans) for batch in made] == [0, 0, 0]
