"""The mesh of one process, and every contradiction of a parallel config."""

import pytest
from omegaconf import OmegaConf

from parallel.config import ParallelConfig
from parallel.mesh import Mesh, axis_lines, build_mesh


def test_one_process_needs_no_process_group() -> None:
    assert build_mesh(ParallelConfig()) == Mesh()


def test_config_errors() -> None:
    assert ParallelConfig().errors(world_size=8) == []
    assert ParallelConfig(dp=8).errors(world_size=8) == []
    assert ParallelConfig(tp=2, pp=4, vpp=2).errors(world_size=8) == []
    assert ParallelConfig(pp=4, vpp=2, placement="v", schedule="zero_bubble").errors(world_size=8) == []
    assert ParallelConfig(tp=2, cp=2, ep=4).errors(world_size=8) == []
    assert ParallelConfig(cp=2, ep=8).errors(world_size=8) == []
    (error,) = ParallelConfig(cp=2, ep=3).errors(world_size=8)
    assert error.startswith("parallel.ep=3: must divide dp x cp = 8")
    (error,) = ParallelConfig(cp=3).errors(world_size=8)
    assert error.endswith("3 x 1 = 6; launch 6, or let pp x cp x tp divide what is launched")
    (error,) = ParallelConfig(dp=4).errors(world_size=2)
    assert error.startswith("parallel.dp=4: contradicts the 2 launched rank(s)")
    assert error.endswith("launch 4, or set parallel.dp=0 to take every rank")
    (error,) = ParallelConfig(dp=-1).errors(world_size=2)
    assert error.startswith("parallel.dp=-1: must be at least 0")
    assert len(ParallelConfig(tp=0, pp=-1, dp=3).errors(world_size=1)) == 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ParallelConfig(vpp=2), "parallel.vpp=2: virtual stages need parallel.pp above 1"),
        (ParallelConfig(pp=2, placement="v"), "parallel.placement=v: contradicts parallel.vpp=1"),
        (ParallelConfig(pp=2, vpp=2, schedule="1f1b"), "parallel.schedule=1f1b: contradicts parallel.vpp=2"),
        (ParallelConfig(schedule="2f2b"), "parallel.schedule=2f2b: must be one of auto, gpipe"),
        (ParallelConfig(balance="fair"), "parallel.balance=fair: must be one of even, cost"),
        (ParallelConfig(placement="w"), "parallel.placement=w: must be one of loop, v"),
    ],
)
def test_pipeline_contradictions(config: ParallelConfig, message: str) -> None:
    (error,) = config.errors(world_size=8)
    assert error.startswith(message)


@pytest.mark.parametrize(("pp", "dp", "cp", "tp", "ep"), [(1, 8, 1, 1, 4), (2, 2, 2, 2, 4), (2, 1, 4, 1, 2)])
def test_every_axis_partitions_the_ranks_into_groups_of_its_size(pp: int, dp: int, cp: int, tp: int, ep: int) -> None:
    world = pp * dp * cp * tp
    lines = axis_lines(world, pp=pp, dp=dp, cp=cp, tp=tp, ep=ep)
    sizes = {"world": world, "pp": pp, "pp_back": pp, "dp": dp, "cp": cp, "tp": tp, "ep": ep}
    sizes |= {"replicas": dp * cp * tp, "dense": dp * cp, "expert_dp": dp * cp // ep}
    for name, size in sizes.items():
        assert {len(group) for group in lines[name]} == {size}
        assert sorted(rank for group in lines[name] for rank in group) == list(range(world))


def test_the_ends_of_every_pipeline_are_paired() -> None:
    assert axis_lines(6, pp=3, dp=2, cp=1, tp=1, ep=1)["ends"] == [[0, 4], [1, 5]]
    assert axis_lines(2, pp=1, dp=2, cp=1, tp=1, ep=1)["ends"] == [[0], [1]]


def test_experts_are_spread_over_neighbouring_dense_ranks() -> None:
    lines = axis_lines(8, pp=1, dp=4, cp=2, tp=1, ep=4)
    assert lines["ep"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert lines["expert_dp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert lines["cp"] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_build_refuses_a_contradiction() -> None:
    with pytest.raises(ValueError, match=r"parallel\.dp=2: contradicts the 1 launched"):
        build_mesh(ParallelConfig(dp=2))


def test_config_survives_omegaconf() -> None:
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ParallelConfig), {"dp": 2}))
    assert config == ParallelConfig(dp=2)
