"""ShardSpec: what part of a parameter a rank holds, and over which axes its gradient is summed.

Initialisation, gradient finalisation, the norm, the checkpoint and the dry run all read this one description, so
they cannot disagree about what is whole, what is a slice and what is a copy.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.mesh import Axis, Mesh


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """Layout of one parameter.

    shape: global shape.
    shards: (dim, axis name) pairs; the dim is cut into equal contiguous slices along the axis.
    owners: the axis over whose ranks the parameter is replicated and its gradient summed to an owner: "dense", or
        "expert_dp" for experts.
    partial: further axes over which each rank holds a part of the gradient of a replicated parameter ("tp" for
        norms and routers inside sequence-parallel regions).
    """

    shape: tuple[int, ...]
    shards: tuple[tuple[int, str], ...] = ()
    owners: str = "dense"
    partial: tuple[str, ...] = ()

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

    def counted_here(self, mesh: Mesh) -> bool:
        """Whether this rank's copy counts in sums over the mesh (a norm): copies along unsharded model axes
        count once, on rank 0 of that axis."""
        sharded = {name for _, name in self.shards}
        return all(axis_of(mesh, name).rank == 0 for name in ("tp",) if name not in sharded)


def axis_of(mesh: Mesh, name: str) -> Axis:
    """The axis called ``name``."""
    axis = getattr(mesh, name)
    assert isinstance(axis, Axis)
    return axis
