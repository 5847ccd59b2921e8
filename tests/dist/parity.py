"""A mesh against one rank: run the same steps on both, gather by `ShardSpec`, compare by name.

with RankPool(4) as pool:
    check_parity(run_on_mesh(pool, case, ParallelConfig(dp=4, ep=2)), run_alone(case))
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from data.loader import DataPosition, Microbatch
from model.config import ModelConfig
from model.kimi import KimiModel
from optim.distributed import ShardedOptimizer
from optim.groups import OptimConfig
from parallel.data import DataParallel
from parallel.mesh import Mesh, ParallelConfig, make_mesh
from parallel.sharding import TensorSlice, parameter_specs
from tests.dist.ranks import RankPool
from train.build import Progress, build_model, build_optimizer, checkpoint_tensors, resume
from train.checkpoint import CheckpointStore
from train.step import Stepper


@dataclass(frozen=True)
class Case:
    """What to train: a whole model's parameters and buffers by name, and each step's microbatches over all ranks.

    Data-parallel rank r of n takes microbatches r, r + n, ... of a step.
    """

    config: ModelConfig
    values: dict[str, Tensor]
    steps: tuple[tuple[Microbatch, ...], ...]
    optim: OptimConfig


@dataclass(frozen=True)
class Outcome:
    """What the steps left: per step loss, norm and load; the last step's gradients; all that a checkpoint holds."""

    losses: list[float]
    norms: list[float]
    loads: list[Tensor]
    gradients: dict[str, Tensor]
    saved: dict[str, Tensor]


@dataclass
class Rig:
    """The parts of a run that hold parameters."""

    mesh: Mesh
    model: KimiModel
    dp: DataParallel
    optimizer: ShardedOptimizer


def build(case: Case, mesh: Mesh) -> Rig:
    """The case's model on this rank of the mesh, in fp64."""
    model = build_model(case.config, seed=0, dtype=torch.float64, device=torch.device("cpu"), mesh=mesh)
    with torch.no_grad():
        for name, spec in parameter_specs(model, mesh=mesh).items():
            model.get_parameter(name).copy_(spec.take(case.values[name], mesh))
        for name, buffer in model.named_buffers():
            buffer.copy_(case.values[name])
    return Rig(mesh, model, *build_optimizer(model, case.optim, mesh=mesh))


def train(case: Case, rig: Rig) -> Outcome:
    """All steps of the case; tensors are this rank's, as `TensorSlice`."""
    mesh, gradients = rig.mesh, {}
    specs = parameter_specs(rig.model, mesh=mesh)
    update = rig.optimizer.step

    def record(owned: dict[str, Tensor], **options: object) -> None:
        gradients.update({name: specs[name].place(x.clone(), mesh) for name, x in owned.items()})
        update(owned, **options)

    rig.optimizer.step = record
    stepper = Stepper(rig.model, dp=rig.dp, optimizer=rig.optimizer, mesh=mesh, loss_chunk=16)
    results = [stepper.step(step[mesh.dp.rank :: mesh.dp.size], lr=0.01) for step in case.steps]
    assert not any(result.skipped for result in results)
    return Outcome(
        [result.loss for result in results],
        [result.grad_norm for result in results],
        [result.load for result in results],
        gradients,
        held(rig),
    )


def held(rig: Rig) -> dict[str, TensorSlice]:
    """What this rank would save, and every parameter that it holds, whoever owns it."""
    slices = checkpoint_tensors(rig.model, dp=rig.dp, optimizer=rig.optimizer, mesh=rig.mesh)
    for name, spec in parameter_specs(rig.model, mesh=rig.mesh).items():
        slices[f"model/{name}"] = spec.place(rig.model.get_parameter(name).detach(), rig.mesh)
    for name, buffer in rig.model.named_buffers():
        slices[f"model/{name}"] = TensorSlice.whole(buffer)
    return {
        name: TensorSlice(part.local.clone(), part.shape, part.offsets)
        for name, part in slices.items()
        if not name.startswith("rng/")
    }


def gather(ranks: Sequence[dict[str, TensorSlice]]) -> dict[str, Tensor]:
    """Whole tensors from all ranks' slices, which must cover them; copies must be equal to the bit."""
    whole: dict[str, Tensor] = {}
    covered: dict[str, Tensor] = {}
    for part_of in ranks:
        for name, part in part_of.items():
            place = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.local.shape, strict=True))
            seen = covered.setdefault(name, torch.zeros(part.shape, dtype=torch.bool))
            total = whole.setdefault(name, torch.zeros(part.shape, dtype=part.local.dtype))
            assert not seen[place].any() or torch.equal(total[place], part.local), f"{name}: copies differ"
            total[place], seen[place] = part.local, True
    assert all(seen.all() for seen in covered.values())
    return whole


def _train_rank(case: Case, config: ParallelConfig) -> Outcome:
    return train(case, build(case, make_mesh(config, dist.get_world_size())))


def run_alone(case: Case) -> Outcome:
    """The case on one rank."""
    return _gathered([train(case, build(case, Mesh()))])


def run_on_mesh(pool: RankPool, case: Case, config: ParallelConfig) -> Outcome:
    """The case on the ranks of ``pool``; losses, norms and loads must agree on all of them."""
    return _gathered(pool.run(_train_rank, case, config))


def _gathered(ranks: Sequence[Outcome]) -> Outcome:
    first = ranks[0]
    for rank in ranks[1:]:
        assert (rank.losses, rank.norms) == (first.losses, first.norms)
        assert all(torch.equal(one, other) for one, other in zip(rank.loads, first.loads, strict=True))
    gradients = gather([rank.gradients for rank in ranks])
    return Outcome(first.losses, first.norms, first.loads, gradients, gather([rank.saved for rank in ranks]))


def check_parity(found: Outcome, expected: Outcome, *, tolerance: float = 1e-10) -> None:
    """Losses, norms, loads, every gradient, weight, bias and state equal; differences relative to a tensor's norm."""
    wrong = []
    for kind in ("losses", "norms"):
        for step, (one, other) in enumerate(zip(getattr(found, kind), getattr(expected, kind), strict=True)):
            if abs(one - other) > tolerance * abs(other):
                wrong.append(f"{kind} of step {step}: {one} and {other}")
    for one, other in zip(found.loads, expected.loads, strict=True):
        assert torch.equal(one, other), "loads differ"
    for kind in ("gradients", "saved"):
        ours, theirs = getattr(found, kind), getattr(expected, kind)
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            error = float((ours[name] - value).double().norm() / value.double().norm().clamp(min=1e-12))
            if not error <= tolerance:
                wrong.append(f"{kind} {name}: relative error {error:.2e}")
    assert not wrong, "\n".join(wrong)


def _store(root: Path, mesh: Mesh) -> CheckpointStore:
    world = mesh.world
    return CheckpointStore(root, rank=world.rank, ranks=world.size, group=world.group, asynchronous=False)


def save_rank(case: Case, config: ParallelConfig, root: Path) -> dict[str, TensorSlice]:
    """Train the case, save it under ``root``; what was held then."""
    rig = build(case, make_mesh(config, dist.get_world_size() if dist.is_initialized() else 1))
    outcome = train(case, rig)
    tensors = checkpoint_tensors(rig.model, dp=rig.dp, optimizer=rig.optimizer, mesh=rig.mesh)
    progress = Progress(DataPosition(0, (0,)), step=len(case.steps))
    _store(root, rig.mesh).save(len(case.steps), tensors=tensors, state=progress.to_state())
    return outcome.saved


def load_rank(case: Case, config: ParallelConfig, root: Path) -> dict[str, TensorSlice]:
    """Load what is under ``root`` into a fresh rig; what is held then."""
    rig = build(case, make_mesh(config, dist.get_world_size() if dist.is_initialized() else 1))
    assert resume(_store(root, rig.mesh), rig.model, dp=rig.dp, optimizer=rig.optimizer, mesh=rig.mesh) is not None
    return held(rig)
