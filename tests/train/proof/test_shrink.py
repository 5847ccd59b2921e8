"""The likeness that certify runs: small, valid, and still the same model on the same kind of mesh."""

from dataclasses import replace
from pathlib import Path

import pytest

import configs
from configs.compose import compose_config
from configs.schema import validate
from data.loader import SourceConfig
from model.config import ModelConfig
from parallel.config import ParallelConfig
from parallel.pipeline.layout import make_layout
from train.config import RunConfig
from train.proof.shrink import (
    LENGTH,
    MAX_RANKS,
    changes,
    kept_layers,
    ranks_of,
    shrink,
    shrink_heads,
    shrink_layout,
    shrink_parallel,
)

MODELS = sorted(path.stem for path in (Path(configs.__file__).parent / "model").glob("*.yaml"))
MESHES = {
    "none": [],
    "dp": ["parallel.dp=8"],
    "cp": ["parallel.cp=8"],
    "ep": ["parallel.ep=8"],
    "ep-in-cp": ["parallel.cp=4", "parallel.ep=4", "parallel.dp=1"],
    "pp": ["parallel.pp=4"],
    "pp-uneven": ["parallel.pp=2", "parallel.layout=[1,{rest}]"],
    "pp-v": ["parallel.pp=2", "parallel.vpp=2", "parallel.placement=v", "parallel.dp=4"],
    "all-but-tp": ["parallel.cp=4", "parallel.ep=16", "parallel.dp=8", "parallel.pp=2"],
}


def checkable(config: RunConfig) -> RunConfig:
    """Without the default corpus, whose vocabulary no shrunk model could hold; certify reads no corpus."""
    return replace(config, data=replace(config.data, sources=[SourceConfig(path="unused")]))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_every_shipped_model_shrinks_to_a_valid_config(model: str, mesh: str) -> None:
    rest = compose_config([f"model={model}"]).model.num_layers - 1
    config = compose_config([f"model={model}", *(override.format(rest=rest) for override in MESHES[mesh])])
    small = shrink(config)
    assert make_layout(small.parallel, small.model, length=LENGTH).stages == small.parallel.pp * small.parallel.vpp
    assert validate(checkable(small), world_size=ranks_of(small.parallel)) == []
    assert 2 <= ranks_of(small.parallel) <= MAX_RANKS
    assert small.model.count_parameters()[0] < 100_000
    for axis in ("tp", "pp", "vpp", "ep", "cp"):
        assert getattr(small.parallel, axis) == min(2, getattr(config.parallel, axis))
    # What decides which code runs is what it was.
    was, now = config.model, small.model
    assert {(m, was.is_moe(i)) for i, m in enumerate(was.mixers)} == {
        (m, now.is_moe(i)) for i, m in enumerate(now.mixers)
    }
    assert (was.activation, was.mla.rotary, was.mla.output_gate, was.moe.balancing) == (
        now.activation,
        now.mla.rotary,
        now.mla.output_gate,
        now.moe.balancing,
    )
    for part, name in [
        (lambda m: m, "residual_block"),
        (lambda m: m, "padding_id"),
        (lambda m: m.mla, "q_rank"),
        (lambda m: m.moe, "latent_dim"),
        (lambda m: m.kda, "gate_lower_bound"),
    ]:
        assert (getattr(part(was), name) is None) == (getattr(part(now), name) is None), name


def test_what_is_shrunk_is_told_and_the_config_is_left_alone() -> None:
    config = compose_config(["model=kimi_k3", "parallel.cp=4"])
    before = repr(config)
    lines = changes(config, shrink(config))
    assert repr(config) == before
    assert {"model.layers: KKKM*23 M -> KKM", "parallel.cp: 4 -> 2", "model.moe.experts: 896 -> 8"} <= set(lines)
    assert "parallel.dp: 0 -> 2" in lines
    assert not any(line.startswith(("data.", "model.activation", "optim.lr")) for line in lines)


@pytest.mark.parametrize(
    ("pattern", "dense", "at_least", "expected"),
    [
        ("KKKM*23 M", 1, 5, [0, 1, 2, 3, 4]),
        ("KKKM*23 M", 1, 1, [0, 1, 3]),
        ("KKKM*23 M", 1, 4, [0, 1, 2, 3]),
        ("KKKM*23 M", 0, 1, [0, 3]),
        ("M*61", 1, 1, [0, 1]),
        ("M*61", 1, 4, [0, 1, 2, 3]),
        ("KM", 1, 1, [0, 1]),
        ("KKKM", 4, 2, [0, 3]),
    ],
)
def test_layers_of_every_kind_are_kept_in_order(pattern: str, dense: int, at_least: int, expected: list[int]) -> None:
    assert kept_layers(ModelConfig(layers=pattern, dense_layers=dense), at_least=at_least) == expected


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ([], []),
        ([3, 1], [4, 1]),
        ([1, 2, 3, 2], [1, 1, 2, 1]),
        ([12] * 4 + [15] + [10] * 3, [1, 1, 2, 1]),
    ],
)
def test_an_explicit_cut_stays_uneven_where_it_was(layout: list[int], expected: list[int]) -> None:
    parallel = ParallelConfig(pp=2, vpp=max(1, len(expected) // 2))
    assert shrink_layout(layout, parallel=parallel, model=ModelConfig(layers="KKKMK")) == expected


@pytest.mark.parametrize("vpp", [1, 2])
def test_stages_meet_at_open_and_at_closed_blocks(vpp: int) -> None:
    small = shrink(compose_config(["model=kimi_k3", "parallel.pp=4", f"parallel.vpp={vpp}"]))
    layout = make_layout(small.parallel, small.model, length=LENGTH)
    assert len(set(layout.counts)) == 2, "an even cut hides the remainder"
    assert not all(layout.closes_prefix(stage) for stage in range(1, layout.stages))
    assert max(layout.slices(stage) for stage in range(layout.stages)) > 1


@pytest.mark.parametrize(
    ("heads", "was", "expected"),
    [
        (96, ParallelConfig(), 2),
        (1, ParallelConfig(), 1),
        (96, ParallelConfig(cp=4), 2),
        (3, ParallelConfig(cp=2), 3),  # cp does not divide them, and must not after shrinking
        (6, ParallelConfig(cp=4), 3),
        (1, ParallelConfig(cp=4), 1),
        (96, ParallelConfig(tp=8), 4),
        (8, ParallelConfig(tp=8), 2),
        (96, ParallelConfig(tp=8, cp=4), 4),
        (48, ParallelConfig(tp=8, cp=4), 6),
    ],
)
def test_heads_divide_as_before(heads: int, was: ParallelConfig, expected: int) -> None:
    small = shrink_parallel(was)
    assert shrink_heads(heads, was=was, parallel=small) == expected
    assert expected % small.tp == 0
    assert (expected // small.tp % small.cp == 0) == (heads // was.tp % was.cp == 0)


@pytest.mark.parametrize(
    ("was", "dp", "ranks"),
    [
        (ParallelConfig(), 2, 2),
        (ParallelConfig(dp=1), 1, 1),
        (ParallelConfig(dp=512), 2, 2),
        (ParallelConfig(tp=8, cp=4), 2, 8),
        (ParallelConfig(tp=8, cp=4, pp=16, dp=32), 1, 8),
        (ParallelConfig(tp=8, pp=16, ep=64), 2, 8),
    ],
)
def test_data_parallel_takes_two_ranks_where_there_is_room(was: ParallelConfig, dp: int, ranks: int) -> None:
    small = shrink_parallel(was)
    assert (small.dp, ranks_of(small)) == (dp, ranks)
    assert small.dp * small.cp % small.ep == 0
    assert LENGTH % (small.cp * small.tp) == 0


@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [
        (ParallelConfig(), 1),
        (ParallelConfig(ep=64), 64),
        (ParallelConfig(ep=64, cp=4, tp=8), 16 * 4 * 8),
        (ParallelConfig(ep=6, cp=4), 3 * 4),
        (ParallelConfig(ep=64, dp=32), 32),
        (ParallelConfig(ep=0, cp=0), 0),
    ],
)
def test_the_world_that_a_config_asks_for(parallel: ParallelConfig, ranks: int) -> None:
    assert ranks_of(parallel) == ranks
