"""The mesh: how many ranks lie along each axis, and which process group each axis talks over.

World ranks are laid out as [pp, dp, cp, tp], tp fastest, so that the axis that talks most sits on neighbouring
ranks. Three more axes say which ranks hold copies of a parameter, so over which its gradient is summed:

    stage       all dp x cp x tp ranks of a pipeline stage     parameters that no axis cuts
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

from dataclasses import dataclass, field
from datetime import timedelta
from typing import ClassVar

import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup

SCHEDULES = ("auto", "gpipe", "1f1b", "interleaved", "zero_bubble")
PLACEMENTS = ("loop", "v")
BALANCES = ("even", "cost")

# These have communicators of their own even where their ranks are those of another axis: their exchanges run in
# backward, between asynchronous gradient reductions, and need not come in one order with them.
_EXCHANGES_IN_BACKWARD = ("tp", "ep", "cp", "pp", "pp_back")


DISPATCHERS = ("all_to_all", "balanced")


@dataclass
class ExpertsConfig:
    """How expert-parallel ranks share the rows of a layer.

    dispatcher: "all_to_all" computes every expert at its home; "balanced" gives every rank the same number of rows,
        whatever the routing, by lending copies of hot experts for one pass.
    balance_above: balanced: act only where the busiest rank has more than this many times the mean; 1 is always.
    deduplicate: a token with several experts on a rank travels there once, and their sum comes back.
    """

    dispatcher: str = "all_to_all"
    balance_above: float = 1.0
    deduplicate: bool = False

    def errors(self) -> list[str]:
        """Every problem, one line each."""
        found = []
        if self.dispatcher not in DISPATCHERS:
            found.append(
                f"parallel.experts.dispatcher={self.dispatcher}: must be one of {', '.join(DISPATCHERS)}; with "
                "parallel.ep=1 nothing is exchanged"
            )
        if not self.balance_above >= 1:
            found.append(
                f"parallel.experts.balance_above={self.balance_above}: must be at least 1, the ratio of perfect "
                "balance; use 1 to balance always"
            )
        return found


@dataclass
class ParallelConfig:
    """Ranks along each axis; ``vpp`` is virtual stages per pipeline rank. ``dp`` 0 takes all ranks left."""

    AT_RESUME: ClassVar[str] = ""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    cp: int = 1
    dp: int = 0
    zero: int = 1
    """1: every rank sums all gradients of its step. 2: only those that it updates; each microbatch is reduced."""
    schedule: str = "auto"
    """Order of a pipeline's work: "gpipe", "1f1b", "interleaved" or "zero_bubble"; "auto" is 1f1b, interleaved where
    vpp is above 1."""
    placement: str = "loop"
    """Ranks of the virtual stages: "loop" 0 1 2 0 1 2, "v" 0 1 2 2 1 0."""
    balance: str = "even"
    """How layers are shared out where ``layout`` is empty: "even", the remainder to the first stages, or by "cost"."""
    layout: list[int] = field(default_factory=list)
    """Layers of each of the pp x vpp virtual stages."""
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)
    bank_cache: bool = True
    """Whether pipeline ranks keep residual rows over their virtual stages, so that no row comes to a rank twice."""

    def resolved_dp(self, world_size: int) -> int:
        """Data-parallel size: as given, or what the other axes leave of ``world_size``."""
        return self.dp or max(1, world_size // max(1, self.tp * self.pp * self.cp))

    def errors(self, world_size: int) -> list[str]:
        """Every contradiction, one line each: field, value, rule, remedy.

        Args:
            world_size: ranks that were launched.
        """
        found = []
        for name in ("tp", "pp", "vpp", "ep", "cp", "dp"):
            value, least = getattr(self, name), 0 if name == "dp" else 1
            if value < least:
                meaning = "takes the ranks that other axes leave" if name == "dp" else "cuts nothing"
                found.append(f"parallel.{name}={value}: must be at least {least}; use {least}, which {meaning}")
        if found:
            return found
        dp = self.resolved_dp(world_size)
        needed = self.pp * dp * self.cp * self.tp
        if needed != world_size:
            fits = world_size % (self.pp * self.cp * self.tp) == 0
            remedy = "set parallel.dp=0 to take every rank" if fits else "let pp x cp x tp divide what is launched"
            cuts = [f"parallel.{name}={getattr(self, name)}" for name in ("pp", "cp", "tp") if getattr(self, name) > 1]
            given = f"parallel.dp={dp}" if self.dp else ", ".join(cuts)
            found.append(
                f"{given}: contradicts the {world_size} launched rank(s), since pp x dp x cp x tp = "
                f"{self.pp} x {dp} x {self.cp} x {self.tp} = {needed}; launch {needed}, or {remedy}"
            )
        if (dp * self.cp) % self.ep:
            found.append(
                f"parallel.ep={self.ep}: must divide dp x cp = {dp * self.cp}, the ranks that experts are spread over; "
                "use a divisor of it"
            )
        if self.zero not in (1, 2):
            found.append(f"parallel.zero={self.zero}: must be 1 or 2; 1 moves less, 2 needs less memory for gradients")
        return found + self._pipeline_errors() + self.experts.errors()

    def _pipeline_errors(self) -> list[str]:
        found = []
        for name, known in (("schedule", SCHEDULES), ("placement", PLACEMENTS), ("balance", BALANCES)):
            if getattr(self, name) not in known:
                found.append(f"parallel.{name}={getattr(self, name)}: must be one of {', '.join(known)}")
        if self.vpp > 1 and self.pp == 1:
            found.append(f"parallel.vpp={self.vpp}: virtual stages need parallel.pp above 1; set parallel.vpp=1")
        if self.placement == "v" and self.vpp != 2:
            found.append(
                f"parallel.placement=v: contradicts parallel.vpp={self.vpp}, since a V passes every rank twice; set "
                "parallel.vpp=2 or parallel.placement=loop"
            )
        if self.schedule == "1f1b" and self.vpp > 1:
            found.append(
                f"parallel.schedule=1f1b: contradicts parallel.vpp={self.vpp}, since it runs one stage per rank; set "
                "parallel.schedule=interleaved or parallel.vpp=1"
            )
        return found


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
    """Where this process stands on every axis; see the module docstring for stage, dense, ep and expert_dp."""

    world: Axis = Axis()
    pp: Axis = Axis()
    pp_back: Axis = Axis()
    ends: Axis = Axis()
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
        "pp_back": np.moveaxis(ranks, 0, -1),
        "ends": np.moveaxis(ranks if pp == 1 else ranks[[0, -1]], 0, -1),
        "dp": np.moveaxis(ranks, 1, -1),
        "cp": np.moveaxis(ranks, 2, -1),
        "tp": ranks,
        "stage": ranks.reshape(pp, -1),
        "dense": np.moveaxis(dense, 1, -1),
        "ep": np.moveaxis(experts, 2, -1),
        "expert_dp": np.moveaxis(experts, 1, -1),
    }
    return {name: view.reshape(-1, view.shape[-1]).tolist() for name, view in views.items()}


def build_mesh(config: ParallelConfig, *, timeout: timedelta | None = None) -> Mesh:
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


def make_mesh(config: ParallelConfig, world_size: int, *, timeout: timedelta | None = None) -> Mesh:
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
