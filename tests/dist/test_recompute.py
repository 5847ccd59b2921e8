"""Recomputation and offload on meshes: the same numbers to the bit, and the dispatcher's plan is made once."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from model.kimi import KimiModel
from parallel.config import ParallelConfig
from parallel.mesh import make_mesh
from parallel.recompute import RecomputeConfig, install_recompute
from parallel.sharding import TensorSlice
from tests.dist.parity import Case, Outcome, check_parity, run_alone
from tests.dist.ranks import RankPool
from tests.dist.test_expert import make_case, routed
from tests.model.tiny import tiny_model
from train.proof.parity import build, merge, train

MESHES = {
    "dp2": ParallelConfig(dp=2),
    "dp2-ep2": ParallelConfig(dp=2, ep=2),
    "cp2": ParallelConfig(cp=2),
    "cp2-ep2": ParallelConfig(cp=2, ep=2),
    "tp2": ParallelConfig(tp=2),
    "pp2-vpp2": ParallelConfig(pp=2, vpp=2),
    "pp2-zero_bubble": ParallelConfig(pp=2, schedule="zero_bubble"),
}
CHOICES = {
    "selective": RecomputeConfig("selective", offload=True),
    "full": RecomputeConfig("full", offload=True),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as two:
        yield two


def run_rank(case: Case, config: ParallelConfig, recompute: RecomputeConfig) -> Outcome[TensorSlice]:
    rig = build(case, make_mesh(config, dist.get_world_size()), config)
    install_recompute(rig.model, recompute, offload_bytes=64)
    return train(case, rig)


def run(pool: RankPool, case: Case, mesh: str, recompute: RecomputeConfig) -> Outcome[torch.Tensor]:
    outcome = merge(pool.run(run_rank, case, MESHES[mesh], recompute))
    assert outcome.faults == ()
    return outcome


def make(kind: str) -> KimiModel:
    return routed("ties") if kind == "ties" else tiny_model(kind)


@pytest.mark.parametrize(("mesh", "kind"), [*((mesh, "k3") for mesh in MESHES), ("dp2-ep2", "ties"), ("cp2-ep2", "k2")])
def test_every_number_is_that_of_the_same_mesh_without(pool: RankPool, mesh: str, kind: str) -> None:
    """Packed documents, several microbatches: losses, gradients, loads, biases, weights and state after a step."""
    case = make_case(make(kind), steps=1)
    plain = run(pool, case, mesh, RecomputeConfig())
    check_parity(plain, run_alone(case), tolerance=1e-9)
    layers, microbatches = len(case.config.moe_layers), len(case.steps[0])
    for name, recompute in CHOICES.items():
        found = run(pool, case, mesh, recompute)
        check_parity(found, plain, tolerance=0.0)
        assert found.losses == plain.losses
        if MESHES[mesh].ep == 1:
            continue
        # Over both ranks. Counts: one exchange for each layer and forward pass. Rows: there and back, forward and
        # backward, and with ``full`` there and back once more.
        passes = layers * microbatches * (2 if MESHES[mesh].cp > 1 else 1)
        assert found.traffic["ep all_gather"].calls == plain.traffic["ep all_gather"].calls == passes
        exchanges = 6 if recompute.policy == "full" else 4
        assert found.traffic["ep all_to_all"].calls == exchanges * passes, name
