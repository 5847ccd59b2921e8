"""The mesh: how many ranks lie along each axis, and which process group each axis talks over.

World ranks are laid out as [pp, dp, cp, tp], tp fastest, so that the axis that talks most sits on neighbouring
ranks. Three more axes say which ranks hold copies of a parameter, so over which its gradient is summed:

    stage       all dp x cp x tp ranks of a pipeline stage     parameters that no axis cuts
    dense       dp x cp, the ranks of equal tp rank            parameters cut over tp
    expert_dp   the ranks of equal tp and ep rank              experts; ep splits dense into runs of neighbours

    dense index   0 1 2 3 4 5 6 7        ep = 4:   ep group {0 1 2 3} {4 5 6 7}
                                                   expert_dp {0 4} {1 5} {2 6} {3 7}

One process needs no process group at all: its groups are None, and everything that takes an axis reads size 1 as
"alone". So a test, a debugger or a laptop run goes through the same code without a rendezvous.
"""

from dataclasses import dataclass, field

import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup

# Axes whose code has not landed yet; a config that asks for one is refused.
_UNAVAILABLE = ("tp", "pp", "vpp")


@dataclass
class ParallelConfig:
    """Ranks along each axis; ``vpp`` is virtual stages per pipeline rank. ``dp`` 0 takes all ranks left."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    cp: int = 1
    dp: int = 0

    def resolved_dp(self, world_size: int) -> int:
        """Data-parallel size: as given, or what the other axes leave of ``world_size``."""
        return self.dp or max(1, world_size // max(1, self.tp * self.pp * self.cp))

    def errors(self, world_size: int) -> list[str]:
        """Every contradiction, one line each: field, value, rule, remedy.

        Args:
            world_size: ranks that were launched.
        """
        found = [
            f"parallel.{axis}={getattr(self, axis)}: only dp, ep and cp are available in this version; "
            f"set parallel.{axis}=1"
            for axis in _UNAVAILABLE
            if getattr(self, axis) != 1
        ]
        if found:
            return found
        for name, value in vars(self).items():
            if value < (0 if name == "dp" else 1):
                found.append(f"parallel.{name}={value}: must be at least {0 if name == 'dp' else 1}")
        if found:
            return found
        dp = self.resolved_dp(world_size)
        needed = self.pp * dp * self.cp * self.tp
        if needed != world_size:
            found.append(
                f"parallel.dp={dp}: contradicts the {world_size} launched rank(s), since pp x dp x cp x tp = "
                f"{self.pp} x {dp} x {self.cp} x {self.tp} = {needed}; launch {needed}, or set parallel.dp=0 to take "
                "every rank"
            )
        if (dp * self.cp) % self.ep:
            found.append(
                f"parallel.ep={self.ep}: must divide dp x cp = {dp * self.cp}, the ranks that experts are spread over; "
                "use a divisor of it"
            )
        if self.vpp > 1 and self.pp == 1:
            found.append(f"parallel.vpp={self.vpp}: virtual stages need parallel.pp above 1; set parallel.vpp=1")
        return found


@dataclass
class Traffic:
    """What the collectives of one process have moved, by name ("tp all_gather"): calls and bytes sent.

    Bytes are those that this rank sends in a ring: (size - 1) / size of the whole for a gather, scatter or exchange,
    twice that for an all-reduce.
    """

    calls: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)

    def record(self, name: str, sent: int) -> None:
        """Count one call."""
        self.calls[name] = self.calls.get(name, 0) + 1
        self.sent[name] = self.sent.get(name, 0) + sent


@dataclass(frozen=True)
class Axis:
    """This process on one axis: its name, rank, size and group (None when alone), and where traffic is counted."""

    name: str = "alone"
    group: ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    traffic: Traffic = field(default_factory=Traffic, compare=False)


@dataclass(frozen=True)
class Mesh:
    """Where this process stands on every axis; see the module docstring for stage, dense, ep and expert_dp."""

    world: Axis = Axis()
    pp: Axis = Axis()
    dp: Axis = Axis()
    cp: Axis = Axis()
    tp: Axis = Axis()
    stage: Axis = Axis()
    dense: Axis = Axis()
    ep: Axis = Axis()
    expert_dp: Axis = Axis()


def axis_lines(world_size: int, *, pp: int, dp: int, cp: int, tp: int, ep: int) -> dict[str, list[list[int]]]:
    """World ranks of every group of every axis, in rank order inside the group. Pure."""
    ranks = np.arange(world_size).reshape(pp, dp, cp, tp)
    experts = ranks.reshape(pp, dp * cp // ep, ep, tp)
    dense = ranks.reshape(pp, dp * cp, tp)
    views = {
        "world": ranks.reshape(1, -1),
        "pp": np.moveaxis(ranks, 0, -1),
        "dp": np.moveaxis(ranks, 1, -1),
        "cp": np.moveaxis(ranks, 2, -1),
        "tp": ranks,
        "stage": ranks.reshape(pp, -1),
        "dense": np.moveaxis(dense, 1, -1),
        "ep": np.moveaxis(experts, 2, -1),
        "expert_dp": np.moveaxis(experts, 1, -1),
    }
    return {name: view.reshape(-1, view.shape[-1]).tolist() for name, view in views.items()}


def build_mesh(config: ParallelConfig) -> Mesh:
    """The mesh of this process, over the default process group if one is initialised. Collective.

    Raises:
        ValueError: ``config`` contradicts the world size.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    errors = config.errors(world_size)
    if errors:
        raise ValueError("; ".join(errors))
    return make_mesh(config, world_size)


def make_mesh(config: ParallelConfig, world_size: int) -> Mesh:
    """As `build_mesh`, for a config that has been checked. Groups of equal ranks are made once and shared."""
    if world_size == 1:
        return Mesh()
    me = dist.get_rank()
    lines = axis_lines(
        world_size, pp=config.pp, dp=config.resolved_dp(world_size), cp=config.cp, tp=config.tp, ep=config.ep
    )
    made: dict[tuple[int, ...], ProcessGroup | None] = {(False, *range(world_size)): dist.group.WORLD}
    axes = {}
    traffic = Traffic()
    for name, groups in lines.items():
        for members in groups:
            # Every rank makes every group, in one order: that is how new_group pairs them.
            if len(members) == 1:
                continue
            # ep has a communicator of its own: its exchanges run between asynchronous reductions of the others.
            key = (name == "ep", *members)
            if key not in made:
                made[key] = dist.new_group(members)
            if me in members:
                axes[name] = Axis(name, made[key], members.index(me), len(members), traffic)
    return Mesh(**axes)
