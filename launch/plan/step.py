"""What each rank holds, from the config alone: its place, its layers, its slices of parameters, its buckets.

The model is built on the meta device and cut by the same `ShardSpec`, optimizer groups and bucket plan as in training,
so what is planned here is what will be there. No process group is needed: `mesh_at` says where any rank of any mesh
stands.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from model.config import ModelConfig
from model.kimi import KimiModel
from model.params import named_roles
from model.precision import compute_dtype, set_precision
from optim.exchange import rounds_of
from optim.groups import NS_DTYPES, Group, OptimConfig, make_groups
from optim.newton_schulz import default_dtype
from optim.rounds import Round
from parallel.buckets import BucketPlan, plan_buckets
from parallel.config import ParallelConfig
from parallel.grads import EMBEDDING
from parallel.mesh import Axis, Mesh, Traffic, axis_lines
from parallel.pipeline.layout import PipelineLayout, make_layout
from parallel.pipeline.stage import keep_part, parameter_stages
from parallel.sharding import ShardSpec, axis_of, parameter_specs


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One optimizer step: what is trained, over which ranks, on how many tokens.

    length: tokens of a sequence.
    rows: sequences of a microbatch.
    microbatches: of each data-parallel rank.
    dtype: of the matrices.
    loss_chunk: tokens whose logits exist at once.
    recompute: policy, as in `parallel.recompute.RecomputeConfig`.
    optim: the optimizer's config, which also says how large buckets are.
    device: "cpu" or an accelerator's name: how much Muon orthogonalises at once, and in which dtype.
    sends_linger: whether a pipeline's messages stay until the step ends, as with gloo, which does not tell when one
        has left.
    """

    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    world_size: int = 1
    length: int
    rows: int = 1
    microbatches: int = 1
    dtype: torch.dtype = torch.bfloat16
    loss_chunk: int = 1024
    recompute: str = "none"
    optim: OptimConfig = field(default_factory=OptimConfig)
    device: str = "cpu"
    sends_linger: bool = False

    @property
    def dp(self) -> int:
        """Data-parallel size."""
        return self.parallel.resolved_dp(self.world_size)

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on one cp rank."""
        return self.rows * self.length // self.parallel.cp

    @property
    def narrow(self) -> int:
        """Bytes of an element of ``dtype``."""
        return self.dtype.itemsize

    @property
    def dtype_of_sums(self) -> torch.dtype:
        """Of sums, norms, gates, states and gradients: fp32 at least."""
        return compute_dtype(self.dtype)

    @property
    def wide(self) -> int:
        """Bytes of an element of `dtype_of_sums`."""
        return self.dtype_of_sums.itemsize

    @property
    def orthogonal(self) -> int:
        """Bytes of an element of Muon's results."""
        # Where it lies decides; the meta device stands for any accelerator.
        like = torch.empty(0, dtype=self.dtype_of_sums, device="cpu" if self.device == "cpu" else "meta")
        return (NS_DTYPES[self.optim.ns_dtype] or default_dtype(like)).itemsize

    @cached_property
    def layout(self) -> PipelineLayout:
        """Layers of each pipeline rank."""
        return make_layout(self.parallel, self.model, length=self.length)

    @cached_property
    def stages(self) -> tuple["Held", ...]:
        """What the first rank of each pipeline rank's group holds."""
        ranks = self.world_size // self.parallel.pp
        return tuple(_first_of_stage(self, mesh_at(self, rank=stage * ranks)) for stage in range(self.parallel.pp))


@dataclass(frozen=True)
class Held:
    """Parameters of one rank, by name in the order of the model.

    layers: indices of its layers.
    first, last: whether it embeds tokens, and whether it computes the loss.
    shapes, dtypes: of what it holds.
    specs: layout of each.
    groups: what the optimizer does to each.
    buckets: the plan of its stage.
    owned: names that it updates.
    buffer_bytes: router biases.
    """

    mesh: Mesh
    layers: tuple[int, ...]
    first: bool
    last: bool
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    specs: dict[str, ShardSpec]
    groups: dict[str, Group]
    buckets: BucketPlan
    owned: tuple[str, ...]
    buffer_bytes: int

    @property
    def parameters(self) -> int:
        """Elements of parameters on this rank."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def muon(self, names: Iterable[str], *, cut: bool) -> dict[str, Group]:
        """Of ``names``, the groups of matrices that tp cuts through, or those of matrices that are whole here."""
        groups = {name: self.groups[name] for name in names if self.groups[name].optimizer == "muon"}
        return {name: group for name, group in groups.items() if (group.cut is not None) == cut}

    def rounds(self, plan: StepPlan, *, owned: Iterable[str]) -> tuple[Round, ...]:
        """Rounds of Muon's exchange between tp ranks that own the parameters ``owned``."""
        groups = self.muon(owned, cut=True)
        return rounds_of(groups, ranks=self.mesh.tp.size, round_bytes=plan.optim.bucket_bytes)

    @property
    def head(self) -> str:
        """Name of the head's weight, which may be the embedding's."""
        return "head.weight" if "head.weight" in self.shapes else EMBEDDING

    def axis(self, name: str) -> Axis:
        """The ranks that hold copies of a parameter."""
        return axis_of(self.mesh, self.specs[name].copies)


def mesh_at(plan: StepPlan, *, rank: int) -> Mesh:
    """Where ``rank`` stands, as `parallel.mesh.make_mesh` would say on that rank; nothing can be sent over it."""
    if plan.world_size == 1:
        return Mesh()
    axes = plan.parallel
    lines = axis_lines(plan.world_size, pp=axes.pp, dp=plan.dp, cp=axes.cp, tp=axes.tp, ep=axes.ep)
    traffic = Traffic()
    mine = {name: line for name, groups in lines.items() for line in groups if rank in line}
    return Mesh(
        **{name: Axis(name, None, line.index(rank), len(line), traffic) for name, line in mine.items() if len(line) > 1}
    )


def held_by(plan: StepPlan, *, rank: int) -> Held:
    """What ``rank`` holds."""
    held = plan.stages[rank // (plan.world_size // plan.parallel.pp)]
    mesh = mesh_at(plan, rank=rank)
    return replace(held, mesh=mesh, owned=held.buckets.owned_by(mesh.replicas.rank))


def held_by_busiest(plan: StepPlan, *, stage: int) -> Held:
    """What the rank holds that owns most elements of optimizer state among those of one pipeline rank."""
    held, ranks = plan.stages[stage], plan.world_size // plan.parallel.pp

    def state(owner: int) -> int:
        return sum(math.prod(held.shapes[n]) * len(held.groups[n].moments) for n in held.buckets.owned_by(owner))

    return held_by(plan, rank=stage * ranks + max(range(ranks), key=state))


def _first_of_stage(plan: StepPlan, mesh: Mesh) -> Held:
    layout, stage = plan.layout, mesh.pp.rank
    with torch.device("meta"):
        model = KimiModel(plan.model)
    set_precision(model, plan.dtype)
    layers = layout.layers_of(stage)
    first, last = layout.rank_of(0) == stage, layout.rank_of(layout.last) == stage
    if layout.ranks > 1:
        keep_part(model, layers, first=first, last=last)
    specs = parameter_specs(model, mesh=Mesh())
    shapes = {name: spec.local_shape(mesh) for name, spec in specs.items()}
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    slices = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    groups = make_groups(slices, roles=named_roles(model), config=plan.optim, specs=specs)
    buckets = plan_buckets(
        {name: math.prod(shape) for name, shape in shapes.items()},
        ranks=mesh.replicas.size,
        bucket_bytes=plan.optim.bucket_bytes,
        cost={name: group.cost for name, group in groups.items()},
        dtypes=dtypes,
        copies={name: axis_of(mesh, spec.copies).size for name, spec in specs.items()},
        parts=parameter_stages(model, layout),
        pinned=(EMBEDDING,) if plan.model.tie_embeddings and first != last else (),
    )
    return Held(
        mesh=mesh,
        layers=layers,
        first=first,
        last=last,
        shapes=shapes,
        dtypes=dtypes,
        specs=specs,
        groups=groups,
        buckets=buckets,
        owned=buckets.owned_by(mesh.replicas.rank),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
    )
