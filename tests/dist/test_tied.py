"""A tied embedding whose two uses lie on two pipeline ranks: one gradient, one norm, one matrix."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from model.kimi import KimiModel
from parallel.config import ParallelConfig
from parallel.mesh import make_mesh
from parallel.replicas import replica_faults
from tests.dist.parity import Case, check_parity, gather, load_rank, run_alone, run_on_mesh, save_rank
from tests.dist.ranks import RankPool
from tests.dist.test_expert import make_case
from tests.model.tiny import tiny_config, tiny_model
from train.proof.parity import build, train

pytestmark = pytest.mark.slow  # runs on many meshes

MESHES = {
    "dp2": ParallelConfig(dp=2),
    "tp2": ParallelConfig(tp=2),
    "pp2": ParallelConfig(pp=2),
    "pp2-vpp2": ParallelConfig(pp=2, vpp=2),
    "pp2-vpp2-v": ParallelConfig(pp=2, vpp=2, placement="v", schedule="zero_bubble"),
    "pp2-zero_bubble": ParallelConfig(pp=2, schedule="zero_bubble"),
    "pp4": ParallelConfig(pp=4),
    "pp2-dp2-zero2": ParallelConfig(pp=2, dp=2, zero=2),
    "pp2-tp2": ParallelConfig(pp=2, tp=2),
}


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    with RankPool(2) as two, RankPool(4) as four:
        yield {2: two, 4: four}


def pool_of(pools: dict[int, RankPool], config: ParallelConfig) -> RankPool:
    return pools[config.pp * config.tp * max(1, config.dp)]


def tied_model() -> KimiModel:
    config = tiny_config()
    config.tie_embeddings = True
    return tiny_model(config)


@pytest.fixture(scope="module")
def case() -> Case:
    return make_case(tied_model(), steps=2)


@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_equals_one_rank(pools: dict[int, RankPool], case: Case, name: str) -> None:
    alone = run_alone(case)
    assert "head.weight" not in alone.gradients[0]
    check_parity(run_on_mesh(pool_of(pools, MESHES[name]), case, MESHES[name]), alone, tolerance=1e-9)


@pytest.mark.parametrize("target", ["one", "pp2", "pp4", "pp2-tp2", "pp2-vpp2-v"])
def test_a_checkpoint_moves_between_meshes_to_the_bit(
    tmp_path: Path, pools: dict[int, RankPool], case: Case, target: str
) -> None:
    source = MESHES["pp2-tp2"]
    expected = gather(pool_of(pools, source).run(save_rank, case, source, tmp_path))
    if target == "one":
        found = gather([load_rank(case, ParallelConfig(), tmp_path)])
    else:
        found = gather(pool_of(pools, MESHES[target]).run(load_rank, case, MESHES[target], tmp_path))
    assert found.keys() | {"model/head.weight"} == expected.keys() | {"model/head.weight"}
    assert all(torch.equal(found[name], value) for name, value in expected.items() if name in found)


def drift(case: Case, config: ParallelConfig) -> list[str]:
    """What the replica hash says after one bit of the last rank's copy has flipped."""
    rig = build(case, make_mesh(config, dist.get_world_size()), config)
    train(case, rig)
    assert replica_faults(rig.model, mesh=rig.mesh) == []
    if rig.mesh.pp.rank == 1:
        bits: Tensor = rig.model.get_parameter("embed.weight").detach().view(torch.int64)
        bits[0, 0] ^= 1
    return replica_faults(rig.model, mesh=rig.mesh)


def test_a_drift_between_the_ends_is_named(pools: dict[int, RankPool], case: Case) -> None:
    for lines in pools[2].run(drift, case, MESHES["pp2"]):
        assert len(lines) == 1
        assert lines[0].startswith("embed.weight: world rank(s)")
