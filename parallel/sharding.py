"""ShardSpec: what part of a parameter a rank holds, and over which axes its gradient is summed.

Initialisation, gradient finalisation, the norm, the checkpoint and the dry run all read this one description, so
they cannot disagree about what is whole, what is a slice and what is a copy. `parallel.shard_table` has the rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from model.params import draw, named_roles
from parallel.mesh import Axis, Mesh
from parallel.shard_table import SHARD_TABLE, Layout


@dataclass(frozen=True)
class TensorSlice:
    """What one rank holds of a global tensor: the rectangle ``local`` at ``offsets`` in ``shape``."""

    local: Tensor
    shape: tuple[int, ...]
    offsets: tuple[int, ...]

    @classmethod
    def whole(cls, x: Tensor) -> "TensorSlice":
        """All of ``x``."""
        return cls(x, tuple(x.shape), (0,) * x.dim())


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """Layout of one parameter.

    shape: global shape.
    shards: (dim, axis name) pairs; the dim is cut into equal contiguous slices along the axis.
    """

    shape: tuple[int, ...]
    shards: tuple[tuple[int, str], ...] = ()

    @property
    def copies(self) -> str:
        """The axis whose ranks hold copies of this slice; its gradient is the sum over them, brought to one owner.

        "replicas" for a whole parameter (each tp rank's gradient is a part too: that of its tokens or heads),
        "dense" for one that is cut over tp, "expert_dp" for experts.
        """
        cut = {axis for _, axis in self.shards}
        return "expert_dp" if "ep" in cut else "dense" if "tp" in cut else "replicas"

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Shape of this rank's slice."""
        return tuple(part.stop - part.start for part in self.slices(mesh))

    def slices(self, mesh: Mesh) -> tuple[slice, ...]:
        """This rank's part of each dim of the global tensor."""
        parts = [slice(0, size) for size in self.shape]
        for dim, name in self.shards:
            axis = axis_of(mesh, name)
            whole = parts[dim]
            size, rest = divmod(whole.stop - whole.start, axis.size)
            assert rest == 0, f"dim {dim} of {self.shape} over {name}={axis.size}"
            parts[dim] = slice(whole.start + axis.rank * size, whole.start + (axis.rank + 1) * size)
        return tuple(parts)

    def take(self, whole: Tensor, mesh: Mesh) -> Tensor:
        """This rank's slice of the global tensor, a copy in its own storage."""
        assert tuple(whole.shape) == self.shape, (whole.shape, self.shape)
        return whole[self.slices(mesh)].clone(memory_format=torch.contiguous_format)

    def place(self, local: Tensor, mesh: Mesh) -> TensorSlice:
        """This rank's slice, with where it belongs."""
        parts = self.slices(mesh)
        assert tuple(local.shape) == self.local_shape(mesh), (local.shape, self, mesh)
        return TensorSlice(local, self.shape, tuple(part.start for part in parts))


def axis_of(mesh: Mesh, name: str) -> Axis:
    """The axis called ``name``."""
    axis = getattr(mesh, name)
    assert isinstance(axis, Axis)
    return axis


def parameter_specs(model: nn.Module, *, mesh: Mesh) -> dict[str, ShardSpec]:
    """Layout of every parameter of ``model``, in the order of ``named_parameters``.

    Args:
        model: its parameters are this rank's slices; any device.
        mesh: over which they are cut; ``Mesh()`` for a whole model.
    """
    layouts: dict[str, Layout] = {}
    for prefix, module in model.named_modules():
        for row in SHARD_TABLE:
            if isinstance(module, row.within):
                layouts |= {f"{prefix}.{name}" if prefix else name: row for name in row.names}
    return {name: _spec(layouts.get(name), tuple(param.shape), mesh) for name, param in model.named_parameters()}


def _spec(layout: Layout | None, local_shape: tuple[int, ...], mesh: Mesh) -> ShardSpec:
    if layout is None:
        return ShardSpec(shape=local_shape)
    shape = list(local_shape)
    for dim, axis in layout.shards:
        shape[dim] *= axis_of(mesh, axis).size
    return ShardSpec(shape=tuple(shape), shards=layout.shards)


def materialize(model: nn.Module, *, mesh: Mesh, seed: int, std: float) -> None:
    """Give a whole model on the meta device this rank's slices of its first weights, in place, on the CPU in fp32.

    They are slices of what `model.params.initialize` draws on one rank, whatever the mesh. Buffers become zeros.

    Args:
        model: built on the meta device, so that the whole model never exists: beside this rank's slices there is one
            whole matrix at most.
        mesh: this rank's place.
        seed, std: as for `model.params.initialize`.
    """
    roles = named_roles(model)
    specs = parameter_specs(model, mesh=Mesh())
    # By what stood there before: a tied parameter is drawn once, under its first name, and stays tied.
    made: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for local, before in list(module.named_parameters(recurse=False)):
            if before not in made:
                name = f"{prefix}.{local}" if prefix else local
                role, shape, part = roles[name], specs[name].shape, specs[name].slices(mesh)
                value = torch.empty(specs[name].local_shape(mesh), dtype=torch.float32)
                draw(value, role=role, name=name, shape=shape, part=part, seed=seed, std=std)
                made[before] = nn.Parameter(value)
            setattr(module, local, made[before])
        for local, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, local, torch.zeros_like(buffer, device="cpu"))
