"""Parity: the same steps on a mesh and on one rank, compared parameter by parameter.

    case --build--> rig --train--> outcome of a rank --merge--> outcome of the mesh --+
                                                                                     compare --> report
    case --build--> rig --train--> outcome of one rank -------------------------------+

A loss curve cannot prove a mesh: Adam and Muon hide a gradient that is twice too large. So the report compares what
no optimizer can hide: for every parameter its first value, its gradient, what the steps made of it and the
optimizer's state; besides them the losses, the gradient norm, the experts' loads and the router biases. In fp64 two
meshes differ by the order of sums alone, some 1e-14 where a mistake is 1e-3.

Whole tensors are put together from the ranks' slices by `ShardSpec`. Where several ranks hold a copy, the copies must
be equal to the bit: replicas that drift are a fault even where their average is right.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from data.loader import Microbatch
from model.config import ModelConfig
from model.kimi import KimiModel
from optim.distributed import STATE_KINDS
from optim.groups import OptimConfig
from parallel.config import ParallelConfig
from parallel.mesh import Mesh, Traffic, make_mesh
from parallel.recompute import RecomputeConfig
from parallel.sharding import TensorSlice, parameter_specs
from train.build import Rig, build_rig
from train.checkpoint.contents import checkpoint_tensors
from train.config import RunConfig
from train.phases import BatchConfig
from train.precision import DTYPES
from train.settings import RunSettings, TrainSettings
from train.step import Stepper, StepResult

SEED = 0
LEARNING_RATE = 0.01
LOSS_CHUNK = 16
PRECISIONS = {dtype: name for name, dtype in DTYPES.items()}

NOISE = 1e-6
"""A gradient is measured against itself, but at least against this share of the whole gradient: one that is zero but
for rounding (1e-16 of the whole) has no relative error to speak of."""

TINY = 1e-12
"""Least norm that any other difference is measured against."""


@dataclass(frozen=True)
class Case:
    """What to train: a whole model's parameters and buffers by name, and each step's microbatches over all ranks.

    Data-parallel rank r of n takes microbatches r, r + n, ... of a step. ``recompute`` holds on a mesh only: the
    reference keeps everything.
    """

    config: ModelConfig
    values: dict[str, Tensor]
    steps: tuple[tuple[Microbatch, ...], ...]
    optim: OptimConfig
    dtype: torch.dtype = torch.float64
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)


@dataclass(frozen=True)
class Moved:
    """What collectives of one name moved: calls and bytes sent."""

    calls: int
    sent: int


Part = TypeVar("Part", TensorSlice, Tensor)


@dataclass(frozen=True, kw_only=True)
class Outcome(Generic[Part]):
    """What the steps left: ``Outcome[TensorSlice]`` on one rank, ``Outcome[Tensor]`` of a whole mesh after `merge`.

    losses, norms, loads: of each step.
    gradients: of each step, before clipping, by parameter; on a rank those that it owns.
    updates: what all steps together added to each parameter.
    first: the parameters as the mesh initialises them, before the case's values take their place.
    saved: all that a checkpoint holds, and every parameter and buffer.
    traffic: what each collective moved, over all ranks once merged.
    faults: what is wrong whatever the reference says: a skipped step, ranks that disagree.
    """

    losses: list[float]
    norms: list[float]
    loads: list[Tensor]
    gradients: list[dict[str, Part]]
    updates: dict[str, Part]
    first: dict[str, Part]
    saved: dict[str, Part]
    traffic: dict[str, Moved]
    faults: tuple[str, ...]


@dataclass
class CaseRig(Rig):
    """A case's parts that hold parameters; ``first`` as in `Outcome`."""

    first: dict[str, TensorSlice]


def build(case: Case, mesh: Mesh, parallel: ParallelConfig | None = None) -> CaseRig:
    """The case's model on this rank of the mesh, on the CPU.

    Args:
        parallel: what ``mesh`` was made of, for what it says besides; None: the defaults.
    """
    config = RunConfig(
        run=RunSettings(seed=SEED),
        model=case.config,
        batch=BatchConfig(length=case.steps[0][0].input_ids.shape[1]),
        optim=case.optim,
        train=TrainSettings(precision=PRECISIONS[case.dtype], loss_chunk=LOSS_CHUNK),
        parallel=ParallelConfig() if parallel is None else parallel,
        recompute=case.recompute,
    )
    rig = build_rig(config, mesh=mesh, device=torch.device("cpu"))
    first = parameter_slices(rig.model, mesh=mesh)
    with torch.no_grad():
        for name, spec in parameter_specs(rig.model, mesh=mesh).items():
            rig.model.get_parameter(name).copy_(spec.take(case.values[name], mesh))
        for name, buffer in rig.model.named_buffers():
            buffer.copy_(case.values[name])
    return CaseRig(**vars(rig), first=first)


def parameter_slices(model: KimiModel, *, mesh: Mesh) -> dict[str, TensorSlice]:
    """A copy of every parameter that this rank holds, whoever owns it."""
    specs = parameter_specs(model, mesh=mesh)
    return {name: specs[name].place(x.detach().clone(), mesh) for name, x in model.named_parameters()}


def train(case: Case, rig: CaseRig) -> Outcome[TensorSlice]:
    """All steps of the case on this rank."""
    mesh = rig.mesh
    specs = parameter_specs(rig.model, mesh=mesh)
    before = parameter_slices(rig.model, mesh=mesh)
    gradients: list[dict[str, TensorSlice]] = []

    def record(owned: Mapping[str, Tensor]) -> None:
        gradients.append({name: specs[name].place(x.clone(), mesh) for name, x in owned.items()})

    stepper = Stepper(rig.pipeline, dp=rig.dp, optimizer=rig.optimizer, observe=record)
    results: list[StepResult] = []
    for step in case.steps:
        results.append(stepper.step(step[mesh.dp.rank :: mesh.dp.size], lr=LEARNING_RATE))
    after = parameter_slices(rig.model, mesh=mesh)
    return Outcome(
        losses=[result.loss for result in results],
        norms=[result.grad_norm for result in results],
        loads=[result.load for result in results],
        gradients=gradients,
        updates={
            name: TensorSlice(part.local - before[name].local, part.shape, part.offsets) for name, part in after.items()
        },
        first=rig.first,
        saved=held(rig),
        traffic=_moved(mesh.world.traffic),
        faults=tuple(f"step {i} was skipped: not finite" for i, result in enumerate(results) if result.skipped),
    )


def train_on_mesh(case: Case, config: ParallelConfig) -> Outcome[TensorSlice]:
    """Build and train the case on this rank of the default process group, if there is one. Collective."""
    mesh = make_mesh(config, dist.get_world_size() if dist.is_initialized() else 1)
    outcome = train(case, build(case, mesh, config))
    mesh.close()
    return outcome


def train_alone(case: Case) -> Outcome[Tensor]:
    """The reference: the case on one rank, in this process, with nothing recomputed."""
    case = replace(case, recompute=RecomputeConfig())
    return merge([train(case, build(case, Mesh()))])


def held(rig: Rig) -> dict[str, TensorSlice]:
    """What this rank would save, and every parameter and buffer that it holds, whoever owns it."""
    slices = checkpoint_tensors(rig.model, dp=rig.dp, optimizer=rig.optimizer, mesh=rig.mesh)
    slices |= {f"model/{name}": part for name, part in parameter_slices(rig.model, mesh=rig.mesh).items()}
    slices |= {f"model/{name}": TensorSlice.whole(buffer) for name, buffer in rig.model.named_buffers()}
    return {
        name: TensorSlice(part.local.clone(), part.shape, part.offsets)
        for name, part in slices.items()
        if not name.startswith("rng/")
    }


@dataclass(frozen=True)
class Joined:
    """Whole tensors put together from slices, and what was wrong with the slices."""

    whole: dict[str, Tensor] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def join(ranks: Sequence[Mapping[str, TensorSlice]]) -> Joined:
    """Whole tensors from all ranks' slices; copies that differ and gaps are faults."""
    joined = Joined()
    covered: dict[str, Tensor] = {}
    for part_of in ranks:
        for name, part in part_of.items():
            place = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.local.shape, strict=True))
            seen = covered.setdefault(name, torch.zeros(part.shape, dtype=torch.bool))
            whole = joined.whole.setdefault(name, torch.zeros(part.shape, dtype=part.local.dtype))
            again = seen[place]
            if again.any() and not torch.equal(whole[place][again], part.local[again]):
                joined.faults.append(f"{name}: copies differ between ranks")
            whole[place], seen[place] = part.local, True
    joined.faults.extend(f"{name}: no rank holds all of it" for name, seen in covered.items() if not seen.all())
    return joined


def merge(ranks: Sequence[Outcome[TensorSlice]]) -> Outcome[Tensor]:
    """One outcome from those of all ranks of a mesh."""
    lead = ranks[0]
    faults = [fault for rank in ranks for fault in rank.faults]
    for number, rank in enumerate(ranks):
        for kind in ("losses", "norms"):
            one, other = getattr(rank, kind), getattr(lead, kind)
            if not all(a == b for a, b in zip(one, other, strict=True)):
                faults.append(f"{kind}: rank {number} reports {one}, rank 0 {other}")
        if not all(torch.equal(a, b) for a, b in zip(rank.loads, lead.loads, strict=True)):
            faults.append(f"loads: rank {number} reports others than rank 0")
    steps = max(len(rank.gradients) for rank in ranks)
    parts = {
        "gradient": [join([rank.gradients[i] for rank in ranks if i < len(rank.gradients)]) for i in range(steps)],
        "update": [join([rank.updates for rank in ranks])],
        "first": [join([rank.first for rank in ranks])],
        "saved": [join([rank.saved for rank in ranks])],
    }
    for kind, joins in parts.items():
        faults += [f"{kind} {fault}" for joined in joins for fault in joined.faults]
    traffic: dict[str, Moved] = {}
    for rank in ranks:
        for name, moved in rank.traffic.items():
            total = traffic.get(name, Moved(0, 0))
            traffic[name] = Moved(total.calls + moved.calls, total.sent + moved.sent)
    return Outcome(
        losses=lead.losses,
        norms=lead.norms,
        loads=lead.loads,
        gradients=[joined.whole for joined in parts["gradient"]],
        updates=parts["update"][0].whole,
        first=parts["first"][0].whole,
        saved=parts["saved"][0].whole,
        traffic=traffic,
        faults=tuple(dict.fromkeys(faults)),
    )


def _moved(traffic: Traffic) -> dict[str, Moved]:
    return {name: Moved(calls, traffic.sent[name]) for name, calls in traffic.calls.items()}


@dataclass(frozen=True)
class ParityReport:
    """How far a mesh is from one rank.

    An error is the norm of the difference over the norm of the reference.

    parameters: by name, errors of its "first" value; of its "gradient", the worst of all steps; of the "step", what all
        steps together added to it; of its "weight" after them; of its optimizer "state", the worst.
    others: errors of losses, norms, loads, router biases.
    faults: what is wrong without a number.
    """

    parameters: dict[str, dict[str, float]]
    others: dict[str, float]
    faults: tuple[str, ...]

    def failures(self, tolerance: float) -> list[str]:
        """What is not equal, one line each: faults, then errors above ``tolerance``, the worst first."""
        errors = dict(self.others)
        errors |= {f"{kind} of {name}": e for name, row in self.parameters.items() for kind, e in row.items()}
        wrong = sorted((name for name, e in errors.items() if e > tolerance), key=lambda name: -errors[name])
        return [*self.faults, *(f"{name}: error {errors[name]:.1e}" for name in wrong)]


def compare(found: Outcome[Tensor], expected: Outcome[Tensor]) -> ParityReport:
    """Everything of ``found`` against the reference ``expected``, both of the same case."""
    faults = list(found.faults)
    parameters: dict[str, dict[str, float]] = {name: {} for name in expected.updates}
    others: dict[str, float] = {}

    def note(name: str, kind: str, error: float) -> None:
        parameters[name][kind] = max(error, parameters[name].get(kind, 0.0))

    def pairs(kind: str, ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[tuple[str, Tensor, Tensor]]:
        faults.extend(f"{kind} of {name}: missing" for name in theirs if name not in ours)
        faults.extend(f"{kind} of {name}: not in the reference" for name in ours if name not in theirs)
        return [(name, ours[name], theirs[name]) for name in theirs if name in ours]

    for kind, one, other in (
        ("loss", _scalars(found.losses), _scalars(expected.losses)),
        ("gradient norm", _scalars(found.norms), _scalars(expected.norms)),
        ("expert loads", found.loads, expected.loads),
    ):
        for step, (x, y) in enumerate(zip(one, other, strict=True), 1):
            others[f"{kind} of step {step}"] = relative_error(x, y)
    if len(found.gradients) != len(expected.gradients):
        faults.append(f"{len(found.gradients)} updates, not {len(expected.gradients)}")
    for norm, ours, theirs in zip(expected.norms, found.gradients, expected.gradients):
        for name, x, y in pairs("gradient", ours, theirs):
            note(name, "gradient", relative_error(x, y, floor=NOISE * norm))
    for name, x, y in pairs("first value", found.first, expected.first):
        note(name, "first", relative_error(x, y))
    for name, x, y in pairs("step", found.updates, expected.updates):
        note(name, "step", relative_error(x, y))
    for key, x, y in pairs("saved", found.saved, expected.saved):
        name, _, kind = key.removeprefix("optim/").rpartition("/")
        if key.removeprefix("model/") in parameters:
            note(key.removeprefix("model/"), "weight", relative_error(x, y))
        elif kind in STATE_KINDS:
            note(name, "state", relative_error(x, y))
        else:
            others[key.removeprefix("model/")] = relative_error(x, y)
    return ParityReport(parameters, others, tuple(faults))


def relative_error(found: Tensor, expected: Tensor, *, floor: float = TINY) -> float:
    """Norm of the difference over the norm of ``expected``, that at least ``floor``; infinite where the shapes differ
    or a number is none."""
    if found.shape != expected.shape:
        return math.inf
    difference = (found.double() - expected.double()).norm()
    error = float(difference / expected.double().norm().clamp(min=max(floor, TINY)))
    return math.inf if math.isnan(error) else error


def _scalars(values: Sequence[float]) -> list[Tensor]:
    return list(torch.tensor(values, dtype=torch.float64).unbind())
