"""The mesh: how many ranks lie along each axis, and which process group each axis talks over.

World ranks are laid out as [pp, dp, cp, tp], tp fastest, so that the axis that talks most sits on neighbouring
ranks. Three more axes say which ranks hold copies of a parameter, so over which its gradient is summed:

    replicas    all dp x cp x tp ranks of a pipeline stage     parameters that no axis cuts
    dense       dp x cp, the ranks of equal tp rank            parameters cut over tp
    expert_dp   the ranks of equal tp and ep rank              experts; ep splits dense into runs of neighbours

    dense index   0 1 2 3 4 5 6 7        ep = 4:   ep group {0 1 2 3} {4 5 6 7}
                                                   expert_dp {0 4} {1 5} {2 6} {3 7}

``ends`` pairs the first and the last rank of each line of ``pp``, which share a tied embedding; the others are alone.
``pp_back`` is the ranks of ``pp`` once more, for what goes to a lower rank: NCCL runs the messages between two ranks
one after the other, so that each direction needs a communicator of its own, or two ranks that send to each other first
would wait for ever.

One process needs no process group at all: its groups are None, and everything that takes an axis reads size 1 as
"alone". So a test, a debugger or a laptop run goes through the same code without a rendezvous.
"""

from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Protocol

import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup

# These have communicators of their own even where their ranks are those of another axis: their exchanges run in
# backward, between asynchronous gradient reductions, and need not come in one order with them.
_EXCHANGES_IN_BACKWARD = ("tp", "ep", "cp", "pp", "pp_back")


class AxisSizes(Protocol):
    """What a mesh needs to know: `parallel.config.ParallelConfig`."""

    pp: int
    cp: int
    tp: int
    ep: int

    def resolved_dp(self, world_size: int) -> int: ...

    def errors(self, world_size: int) -> list[str]: ...


@dataclass
class Traffic:
    """What the collectives of one process have moved, by name ("tp all_gather"): calls and bytes sent.

    Bytes are those that this rank sends in a ring: (size - 1) / size of the whole for a gather, scatter or exchange,
    twice that for an all-reduce; of a reduction to one owner and of a broadcast from it see `parallel.data`.
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
    """Where this process stands on every axis; see the module docstring for replicas, dense, ep and expert_dp."""

    world: Axis = Axis()
    pp: Axis = Axis()
    pp_back: Axis = Axis()
    ends: Axis = Axis()
    dp: Axis = Axis()
    cp: Axis = Axis()
    tp: Axis = Axis()
    replicas: Axis = Axis()
    dense: Axis = Axis()
    ep: Axis = Axis()
    expert_dp: Axis = Axis()

    def close(self) -> None:
        """Give back the process groups of all axes but the default one, where a process makes one mesh after another.

        Collective. A gloo group that nobody uses still has a thread that looks 100 times a second for messages.
        """
        if self.world.group is None:
            return
        # A rank that closes early would break what another still reads.
        dist.barrier(self.world.group)
        groups = {getattr(self, axis.name).group for axis in fields(self)} - {None, self.world.group}
        for group in groups:
            dist.destroy_process_group(group)


def axis_lines(world_size: int, *, pp: int, dp: int, cp: int, tp: int, ep: int) -> dict[str, list[list[int]]]:
    """World ranks of every group of every axis, in rank order inside the group. Pure."""
    ranks = np.arange(world_size).reshape(pp, dp, cp, tp)
    experts = ranks.reshape(pp, dp * cp // ep, ep, tp)
    dense = ranks.reshape(pp, dp * cp, tp)
    views = {
        "world": ranks.reshape(1, -1),
        "pp": np.moveaxis(ranks, 0, -1),
        "pp_back": np.moveaxis(ranks, 0, -1),
        "ends": np.moveaxis(ranks if pp == 1 else ranks[[0, -1]], 0, -1),
        "dp": np.moveaxis(ranks, 1, -1),
        "cp": np.moveaxis(ranks, 2, -1),
        "tp": ranks,
        "replicas": ranks.reshape(pp, -1),
        "dense": np.moveaxis(dense, 1, -1),
        "ep": np.moveaxis(experts, 2, -1),
        "expert_dp": np.moveaxis(experts, 1, -1),
    }
    return {name: view.reshape(-1, view.shape[-1]).tolist() for name, view in views.items()}


def build_mesh(config: AxisSizes, *, timeout: timedelta | None = None) -> Mesh:
    """The mesh of this process, over the default process group if one is initialised. Collective.

    Args:
        timeout: of every collective over one of its axes; None: torch's default, half an hour on gloo.

    Raises:
        ValueError: ``config`` contradicts the world size.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    errors = config.errors(world_size)
    if errors:
        raise ValueError("; ".join(errors))
    return make_mesh(config, world_size, timeout=timeout)


def make_mesh(config: AxisSizes, world_size: int, *, timeout: timedelta | None = None) -> Mesh:
    """As `build_mesh`, for a config that has been checked. Groups of equal ranks are made once and shared."""
    if world_size == 1:
        return Mesh()
    me = dist.get_rank()
    lines = axis_lines(
        world_size, pp=config.pp, dp=config.resolved_dp(world_size), cp=config.cp, tp=config.tp, ep=config.ep
    )
    made: dict[tuple[str, tuple[int, ...]], ProcessGroup | None] = {("", tuple(range(world_size))): dist.group.WORLD}
    axes = {}
    traffic = Traffic()
    for name, groups in lines.items():
        for members in groups:
            # Every rank makes every group, in one order: that is how new_group pairs them.
            if len(members) == 1:
                continue
            key = name if name in _EXCHANGES_IN_BACKWARD else "", tuple(members)
            if key not in made:
                made[key] = dist.new_group(members, timeout=timeout)
            if me in members:
                axes[name] = Axis(name, made[key], members.index(me), len(members), traffic)
    return Mesh(**axes)
