"""What each rank holds, from the config alone: its place, its layers, its slices of parameters, its buckets.

The model is built on the meta device and cut by the same `ShardSpec` and bucket plan as in training, so what is planned
here is what will be there. No process group is needed: `mesh_at` says where any rank of any mesh stands.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from model.config import ModelConfig
from model.kimi import KimiModel
from model.params import ParamRole, named_roles
from model.precision import compute_dtype, set_precision
from parallel.buckets import BucketPlan, plan_buckets
from parallel.config import ParallelConfig
from parallel.grads import EMBEDDING
from parallel.mesh import Axis, Mesh, Traffic, axis_lines
from parallel.pipeline.layout import PipelineLayout, make_layout
from parallel.pipeline.stage import keep_part, parameter_stages
from parallel.rounds import Round, Shape, plan_rounds
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
    bucket_bytes: as in `parallel.data.DataParallel`; of a round of Muon's exchange likewise (`parallel.rounds`).
    per_head, output_per_head: whether Muon treats heads one by one, as in the optimizer's config; what it does not
        split so it needs whole.
    newton_schulz: dtype of Muon's results; None: that of sums.
    track_logits: whether attention logits are watched, as for QK-Clip.
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
    bucket_bytes: int = 32 * 2**20
    per_head: bool = True
    output_per_head: bool = False
    newton_schulz: torch.dtype | None = None
    track_logits: bool = True
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
        return (self.newton_schulz or self.dtype_of_sums).itemsize

    @cached_property
    def layout(self) -> PipelineLayout:
        """Layers of each pipeline rank."""
        return make_layout(self.parallel, self.model, length=self.length)


@dataclass(frozen=True)
class Held:
    """Parameters of one rank, by name in the order of the model.

    layers: indices of its layers.
    first, last: whether it embeds tokens, and whether it computes the loss.
    shapes, dtypes: of what it holds.
    specs: layout of each.
    roles: role of each.
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
    roles: dict[str, ParamRole]
    buckets: BucketPlan
    owned: tuple[str, ...]
    buffer_bytes: int

    @property
    def parameters(self) -> int:
        """Elements of parameters on this rank."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def is_cut(self, name: str, plan: StepPlan) -> bool:
        """Whether Muon orthogonalises matrices of which this rank holds only parts."""
        role, spec = self.roles[name], self.specs[name]
        split = role.heads > 1 and (plan.output_per_head if role.by_columns else plan.per_head)
        over_tp = self.mesh.tp.size > 1 and any(axis == "tp" for _, axis in spec.shards)
        return role.kind == "matrix" and over_tp and not split

    def whole_matrices(self, name: str) -> Shape:
        """(count, rows, columns) of a parameter's matrices, the tp ranks' parts put together."""
        cut = [dim for dim, axis in self.specs[name].shards if axis == "tp"]
        sizes = [size * (self.mesh.tp.size if dim in cut else 1) for dim, size in enumerate(self.shapes[name])]
        *leading, rows, columns = sizes
        return math.prod(leading), rows, columns

    def rounds(self, plan: StepPlan, *, owned: Iterable[str]) -> tuple[Round, ...]:
        """Rounds of Muon's exchange between tp ranks that own the parameters ``owned``."""
        matrices = {name: self.whole_matrices(name) for name in owned if self.is_cut(name, plan)}
        return plan_rounds(matrices, ranks=self.mesh.tp.size, round_bytes=plan.bucket_bytes)

    @property
    def head(self) -> str:
        """Name of the head's weight, which may be the embedding's."""
        return "head.weight" if "head.weight" in self.shapes else EMBEDDING

    def axis(self, name: str) -> Axis:
        """The ranks that hold copies of a parameter."""
        return axis_of(self.mesh, self.specs[name].copies)


def mesh_at(config: ParallelConfig, world_size: int, *, rank: int) -> Mesh:
    """Where ``rank`` stands, as `parallel.mesh.make_mesh` would say on that rank; nothing can be sent over it."""
    if world_size == 1:
        return Mesh()
    lines = axis_lines(
        world_size, pp=config.pp, dp=config.resolved_dp(world_size), cp=config.cp, tp=config.tp, ep=config.ep
    )
    traffic = Traffic()
    mine = {name: line for name, groups in lines.items() for line in groups if rank in line}
    return Mesh(
        **{name: Axis(name, None, line.index(rank), len(line), traffic) for name, line in mine.items() if len(line) > 1}
    )


def held_by(plan: StepPlan, *, rank: int, cost: Mapping[str, float] | None = None) -> Held:
    """What ``rank`` holds.

    Args:
        cost: work of updating each of its parameters, as given to `DataParallel`; decides who owns what. None counts
            elements.
    """
    mesh = mesh_at(plan.parallel, plan.world_size, rank=rank)
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
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    buckets = plan_buckets(
        sizes,
        ranks=mesh.replicas.size,
        bucket_bytes=plan.bucket_bytes,
        cost=sizes if cost is None else cost,
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
        roles=named_roles(model),
        buckets=buckets,
        owned=buckets.owned_by(mesh.replicas.rank),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
    )
