"""The mesh of one process, and every contradiction of a parallel config."""

import pytest
from omegaconf import OmegaConf

from parallel.mesh import Mesh, ParallelConfig, build_mesh


def test_one_process_needs_no_process_group() -> None:
    assert build_mesh(ParallelConfig()) == Mesh(dp_group=None, dp_rank=0, dp_size=1)


def test_config_errors() -> None:
    assert ParallelConfig().errors(world_size=8) == []
    assert ParallelConfig(dp=8).errors(world_size=8) == []
    assert ParallelConfig(tp=2, ep=4).errors(world_size=8) == [
        "parallel.tp=2: only data parallel is available in this version; set parallel.tp=1",
        "parallel.ep=4: only data parallel is available in this version; set parallel.ep=1",
    ]
    (error,) = ParallelConfig(dp=4).errors(world_size=2)
    assert error.startswith("parallel.dp=4: contradicts the 2 launched rank(s)")
    (error,) = ParallelConfig(dp=-1).errors(world_size=2)
    assert error.startswith("parallel.dp=-1: must be at least 1")
    assert len(ParallelConfig(tp=0, pp=2, dp=3).errors(world_size=1)) == 3


def test_build_refuses_a_contradiction() -> None:
    with pytest.raises(ValueError, match=r"parallel\.dp=2: contradicts the 1 launched"):
        build_mesh(ParallelConfig(dp=2))


def test_config_survives_omegaconf() -> None:
    config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ParallelConfig), {"dp": 2}))
    assert config == ParallelConfig(dp=2)
