"""The mesh: how many ranks lie along each axis, and which process group each axis talks over.

One process needs no process group at all: its groups are None, and everything that takes a group reads
None as "alone". So a test, a debugger or a laptop run goes through the same code without a rendezvous.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

_MODEL_AXES = ("tp", "pp", "vpp", "ep", "cp")


@dataclass
class ParallelConfig:
    """Ranks along each axis; ``vpp`` is virtual stages per pipeline rank. ``dp`` 0 takes all ranks."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    cp: int = 1
    dp: int = 0

    def errors(self, world_size: int) -> list[str]:
        """Every contradiction, one line each: field, value, rule, remedy.

        Args:
            world_size: ranks that were launched.
        """
        found = [
            f"parallel.{axis}={getattr(self, axis)}: only data parallel is available in this version; "
            f"set parallel.{axis}=1"
            for axis in _MODEL_AXES
            if getattr(self, axis) != 1
        ]
        if self.dp < 0:
            found.append(f"parallel.dp={self.dp}: must be at least 1, or 0 to take every rank")
        elif self.dp not in (0, world_size):
            found.append(
                f"parallel.dp={self.dp}: contradicts the {world_size} launched rank(s); "
                f"launch {self.dp}, or set parallel.dp=0 to take every rank"
            )
        return found


@dataclass(frozen=True)
class Mesh:
    """Where this process stands. ``dp_group`` is None when it is alone on the data-parallel axis."""

    dp_group: ProcessGroup | None
    dp_rank: int
    dp_size: int


def build_mesh(config: ParallelConfig) -> Mesh:
    """The mesh of this process, over the default process group if one is initialised.

    Raises:
        ValueError: ``config`` contradicts the world size.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    errors = config.errors(world_size)
    if errors:
        raise ValueError("; ".join(errors))
    if world_size == 1:
        return Mesh(dp_group=None, dp_rank=0, dp_size=1)
    return Mesh(dp_group=dist.group.WORLD, dp_rank=dist.get_rank(), dp_size=world_size)
