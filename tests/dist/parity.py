"""A mesh against one rank, for tests: `train.proof.parity` over a `RankPool`.

with RankPool(4) as pool:
    check_parity(run_on_mesh(pool, case, ParallelConfig(dp=4, ep=2)), run_alone(case))
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from data.loader import DataPosition
from parallel.config import ParallelConfig
from parallel.mesh import Mesh, make_mesh
from parallel.sharding import TensorSlice
from tests.dist.ranks import RankPool
from train.checkpoint import CheckpointStore
from train.checkpoint.contents import Progress, checkpoint_tensors, resume
from train.proof.parity import Case, CaseRig, Outcome, build, compare, held, join, merge, train, train_alone, train_on_mesh

__all__ = ["Case", "Outcome", "check_parity", "gather", "load_rank", "run_alone", "run_on_mesh", "save_rank"]


def gather(ranks: Sequence[Mapping[str, TensorSlice]]) -> dict[str, Tensor]:
    """Whole tensors from all ranks' slices, which must cover them; copies must be equal to the bit."""
    joined = join(ranks)
    assert not joined.faults, "\n".join(joined.faults)
    return joined.whole


def run_alone(case: Case) -> Outcome[Tensor]:
    """The case on one rank."""
    return train_alone(case)


def run_on_mesh(pool: RankPool, case: Case, config: ParallelConfig) -> Outcome[Tensor]:
    """The case on the ranks of ``pool``; losses, norms, loads and copies must agree on all of them."""
    outcome = merge(pool.run(train_on_mesh, case, config))
    assert not outcome.faults, "\n".join(outcome.faults)
    return outcome


def check_parity(found: Outcome[Tensor], expected: Outcome[Tensor], *, tolerance: float = 1e-10) -> None:
    """Losses, norms, loads, every first value, gradient, step, weight, bias and state equal, relative to a norm."""
    failures = compare(found, expected).failures(tolerance)
    assert not failures, "\n".join(failures)


def _store(root: Path, mesh: Mesh) -> CheckpointStore:
    world = mesh.world
    return CheckpointStore(root, rank=world.rank, ranks=world.size, group=world.group, asynchronous=False)


def _build(case: Case, config: ParallelConfig) -> CaseRig:
    return build(case, make_mesh(config, dist.get_world_size() if dist.is_initialized() else 1), config)


def save_rank(case: Case, config: ParallelConfig, root: Path) -> dict[str, TensorSlice]:
    """Train the case, save it under ``root``; what was held then."""
    rig = _build(case, config)
    outcome = train(case, rig)
    tensors = checkpoint_tensors(rig.model, dp=rig.dp, optimizer=rig.optimizer, mesh=rig.mesh)
    progress = Progress(DataPosition(0, (0,)), step=len(case.steps))
    _store(root, rig.mesh).save(len(case.steps), tensors=tensors, state=progress.to_state())
    return outcome.saved


def load_rank(case: Case, config: ParallelConfig, root: Path) -> dict[str, TensorSlice]:
    """Load what is under ``root`` into a fresh rig; what is held then."""
    rig = _build(case, config)
    assert resume(_store(root, rig.mesh), rig.model, dp=rig.dp, optimizer=rig.optimizer, mesh=rig.mesh) is not None
    return held(rig)
