"""Where layers stand, what a hop carries, and how a cut is chosen: pure functions, checked against brute force."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import ModelConfig
from model.flops import forward_flops, layer_flops
from model.kimi import KimiModel
from parallel.config import ParallelConfig
from parallel.mesh import Axis, Mesh
from parallel.pipeline.layout import PipelineLayout, layout_errors, make_layout, split_by_cost, split_evenly
from parallel.pipeline.stage import held_layers, keep_part, parameter_stages, tied_to
from tests.model.tiny import tiny_config

KIMI_K3 = PipelineLayout(split_evenly(93, 32), ranks=8, block=24)


@st.composite
def layouts(draw: st.DrawFn) -> PipelineLayout:
    placement = draw(st.sampled_from(["loop", "v"]))
    ranks = draw(st.integers(1 if placement == "loop" else 2, 5))
    stages = ranks * (2 if placement == "v" else draw(st.integers(1, 3)))
    counts = draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages))
    block = draw(st.none() | st.integers(1, 9))
    return PipelineLayout(tuple(counts), ranks=ranks, placement=placement, block=block, cache=draw(st.booleans()))


def test_kimi_k3_over_8_ranks_with_4_stages_each() -> None:
    """93 layers, blocks of 12: 83 slices over all hops instead of 167, at most 3 in a hop instead of 9."""
    assert ModelConfig().residual_block == 24
    hops = range(KIMI_K3.last)
    sent = [KIMI_K3.slices(stage) for stage in hops]
    uncached = [dataclasses.replace(KIMI_K3, cache=False).slices(stage) for stage in hops]
    assert (len(sent), sum(sent), max(sent)) == (31, 83, 3)
    assert (sum(uncached), max(uncached)) == (167, 9)
    assert KIMI_K3.counts == (3,) * 29 + (2,) * 3


def test_placements() -> None:
    loop = PipelineLayout((1,) * 8, ranks=4)
    assert [loop.rank_of(stage) for stage in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    v = PipelineLayout((2, 1, 1, 1, 1, 1, 1, 1), ranks=4, placement="v")
    assert [v.rank_of(stage) for stage in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert (v.stages_of(0), v.layers_of(0), v.layers_of(3)) == ((0, 7), (0, 1, 8), (4, 5))
    assert [v.is_hop(stage) for stage in range(8)] == [True, True, True, False, True, True, True, False]


@given(layouts())
@settings(deadline=None)
def test_every_layer_stands_once_and_in_order(layout: PipelineLayout) -> None:
    by_stage = [layer for stage in range(layout.stages) for layer in layout.layers(stage)]
    assert by_stage == list(range(sum(layout.counts)))
    by_rank = [layer for rank in range(layout.ranks) for layer in layout.layers_of(rank)]
    assert sorted(by_rank) == by_stage


@given(layouts())
@settings(deadline=None)
def test_a_hop_carries_exactly_what_the_receiver_lacks(layout: PipelineLayout) -> None:
    """Against a simulation with sets: sublayers close rows one by one, holders remember what they have seen."""
    rows: set[int] = set()
    seen: dict[int, set[int]] = {}
    for stage in range(layout.stages):
        known = seen.setdefault(layout.holder(stage), set())
        assert layout.rows_before(stage) == len(rows)
        assert set(layout.arriving(stage)) == rows - known
        closes_first = False
        for sublayer in range(2 * layout.layers(stage).start, 2 * layout.layers(stage).stop):
            if layout.block is not None and sublayer % layout.block == 0:
                closes_first |= sublayer == 2 * layout.layers(stage).start
                rows.add(len(rows))
        assert layout.closes_prefix(stage) == (closes_first and stage > 0)
        assert layout.rows_after(stage) == len(rows)
        known |= rows
        later = range(stage + 1, layout.stages)
        assert layout.is_last_of_holder(stage) == (layout.holder(stage) not in map(layout.holder, later))


@given(layouts())
@settings(deadline=None)
def test_with_the_cache_no_row_comes_to_a_rank_twice(layout: PipelineLayout) -> None:
    cached = dataclasses.replace(layout, cache=True)
    for rank in range(layout.ranks):
        arrived = [row for stage in cached.stages_of(rank) for row in cached.arriving(stage)]
        assert len(arrived) == len(set(arrived))
    uncached = dataclasses.replace(layout, cache=False)
    hops = range(layout.stages)
    assert sum(map(cached.slices, hops)) <= sum(map(uncached.slices, hops))


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (30, 4, [8, 8, 7, 7]),
        (61, 4, [16, 15, 15, 15]),
        (9, 4, [3, 2, 2, 2]),
        (10, 3, [4, 3, 3]),
        (10, 4, [3, 3, 2, 2]),
        (3, 3, [1, 1, 1]),
    ],
)
def test_no_layer_vanishes_where_the_split_is_uneven(layers: int, stages: int, expected: list[int]) -> None:
    assert list(split_evenly(layers, stages)) == expected


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.integers(0, 20),
    st.data(),
)
@settings(deadline=None)
def test_a_split_by_cost_has_the_least_maximum(costs: list[int], head: int, data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))

    def worst(counts: tuple[int, ...]) -> int:
        bounds = [0, *itertools.accumulate(counts)]
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
        return max([*sums[:-1], sums[-1] + head])

    found = split_by_cost(costs, stages, head=head)
    assert (sum(found), len(found)) == (len(costs), stages)
    assert min(found) >= 1
    cuts = itertools.combinations(range(1, len(costs)), stages - 1)
    every = [tuple(b - a for a, b in itertools.pairwise((0, *cut, len(costs)))) for cut in cuts]
    assert worst(found) == min(map(worst, every))


def test_equal_costs_split_evenly() -> None:
    assert sorted(split_by_cost([1.0] * 93, 32)) == [2] * 3 + [3] * 29


def test_a_dear_head_takes_layers_from_the_last_stage() -> None:
    assert split_by_cost([1.0] * 14, 4, head=2.0) == (4, 4, 4, 2)


@pytest.mark.parametrize("family", ["k3", "k2"])
def test_layers_and_head_make_the_whole_cost(family: str) -> None:
    config = tiny_config(family)
    whole, layers = forward_flops(config, length=64), layer_flops(config, length=64)
    last_mix = 4 * config.hidden_dim * (1 + -(-2 * config.num_layers // config.residual_block)) if family == "k3" else 0
    assert sum(layers) + whole.head + last_mix == pytest.approx(whole.total, rel=1e-12)


def test_layouts_from_a_config() -> None:
    model = ModelConfig()
    assert make_layout(ParallelConfig(pp=8, vpp=4), model, length=8192) == KIMI_K3
    listed = ParallelConfig(pp=2, layout=[90, 3], bank_cache=False)
    assert make_layout(listed, model, length=8192) == PipelineLayout((90, 3), ranks=2, block=24, cache=False)
    by_cost = make_layout(ParallelConfig(pp=16, vpp=2, balance="cost"), model, length=8192)
    costs, head = layer_flops(model, length=8192), forward_flops(model, length=8192).head

    def worst(layout: PipelineLayout) -> float:
        sums = [sum(costs[i] for i in layout.layers(stage)) for stage in range(layout.stages)]
        return max([*sums[:-1], sums[-1] + head])

    assert worst(by_cost) < worst(make_layout(ParallelConfig(pp=16, vpp=2), model, length=8192))


@pytest.mark.parametrize(
    ("config", "layers", "message"),
    [
        (ParallelConfig(pp=4), 3, "parallel.pp x parallel.vpp=4 x 1: more virtual stages than the 3 layers"),
        (ParallelConfig(pp=4, vpp=2), 7, "parallel.pp x parallel.vpp=4 x 2: more virtual stages than the 7 layers"),
        (ParallelConfig(pp=2, layout=[3, 3]), 7, "parallel.layout=[3, 3]: sums to 6, must be the 7 layers"),
        (ParallelConfig(pp=2, layout=[7]), 7, "parallel.layout=[7]: has 1 entries for parallel.pp x parallel.vpp"),
        (ParallelConfig(pp=2, layout=[7, 0]), 7, "parallel.layout=[7, 0]: every virtual stage needs at least 1 layer"),
    ],
)
def test_a_cut_that_does_not_fit_is_one_line(config: ParallelConfig, layers: int, message: str) -> None:
    (error,) = layout_errors(config, layers=layers)
    assert error.startswith(message)
    assert "\n" not in error
    model = dataclasses.replace(tiny_config("k2"), layers=f"M*{layers}")
    with pytest.raises(ValueError, match=r"^parallel"):
        make_layout(config, model, length=8)


@pytest.mark.parametrize("placement", ["loop", "v"])
def test_parts_of_a_model_cover_it_under_its_own_names(placement: str) -> None:
    with torch.device("meta"):
        names = [name for name, _ in KimiModel(tiny_config()).named_parameters()]
    layout = PipelineLayout((1, 2, 1, 1), ranks=2, placement=placement, block=4)
    found: dict[str, int] = {}
    for rank in range(2):
        with torch.device("meta"):
            model = KimiModel(tiny_config())
        stages = layout.stages_of(rank)
        keep_part(model, layout.layers_of(rank), first=0 in stages, last=layout.last in stages)
        assert held_layers(model) == layout.layers_of(rank)
        held = parameter_stages(model, layout)
        assert not held.keys() & found.keys()
        found |= held
    assert sorted(found) == sorted(names)
    assert (found["embed.weight"], found["head.weight"], found["output_mix.query"]) == (0, 3, 3)
    assert {name.split(".")[1]: s for name, s in found.items() if name.startswith("layers")} == dict(
        zip("01234", [0, 1, 1, 2, 3])
    )


def test_a_stage_for_every_layer_fits() -> None:
    assert layout_errors(ParallelConfig(pp=3), layers=3) == []
    assert layout_errors(ParallelConfig(pp=3, layout=[1, 1, 1]), layers=3) == []


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "not tied"])
def test_a_tied_embedding_is_shared_by_the_two_ends_and_by_nobody_else(tied: bool) -> None:
    config = dataclasses.replace(tiny_config(), tie_embeddings=tied)
    layout = PipelineLayout((2, 3), ranks=2, block=4)
    for rank in range(2):
        with torch.device("meta"):
            model = KimiModel(config)
        ends = Axis("ends", None, rank, 2)
        assert tied_to(model, mesh=Mesh()) is None
        keep_part(model, layout.layers_of(rank), first=rank == 0, last=rank == 1)
        assert tied_to(model, mesh=Mesh(ends=ends)) is (ends if tied else None)
