"""Pipeline schedules as data: what each rank does, in order. Pure; no torch.

An action is a kind, a virtual stage and a microbatch:

    F   forward
    B   backward; where weight gradients are split off, only what the stage before is waiting for
    W   the weight gradients that were split off, at any time after B

    gpipe        all forwards, then all backwards: memory for every microbatch at once
    1f1b         one forward, one backward in turn: rank r of P holds at most P - r microbatches
    interleaved  the same over several virtual stages a rank: the bubble shrinks by their number
    zero_bubble  B before F before W: weight gradients fill what the others leave idle

    2 ranks:   1f1b  F0 F1 .. B0 -- F2 .. B1 -- .. B2 --     zero_bubble  F0 F1 .. B0 F2 B1 W0 B2 W1 W2
                     .. F0 B0 -- F1 B1 -- F2 B2 -- .. ..                  .. F0 B0 F1 B1 F2 B2 W0 W1 W2

The first three are written down. The interleaved order needs a multiple of P microbatches; any other number takes the
order of the next multiple and leaves out the microbatches that do not exist. Leaving out work makes no rank wait for
anything new. ``zero_bubble``, and any placement that is not a loop, is what a simulated pipeline does when every free
rank takes the first of its preferred actions that is ready. Such a schedule cannot deadlock: it has been run once.

All ranks of a stage run the same list, so that the collectives inside a stage (experts, context, tensor) are entered in
one order.

Sources: GPipe, arXiv:1811.06965; 1F1B, arXiv:1806.03377; interleaving, arXiv:2104.04473; B and W, arXiv:2401.10241.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parallel.pipeline.layout import PipelineLayout


class Action(NamedTuple):
    """One piece of work: ``kind`` "F", "B" or "W", on a virtual stage and a microbatch."""

    kind: str
    stage: int
    microbatch: int


Schedule = tuple[tuple[Action, ...], ...]
"""Actions of each pipeline rank, in order."""

UNSPLIT_COSTS = {"F": 1, "B": 2}
SPLIT_COSTS = {"F": 1, "B": 1, "W": 1}
"""Time of each kind, the usual assumption: backward is one product for the input and one for the weight."""


def make_schedule(name: str, layout: PipelineLayout, *, microbatches: int) -> Schedule:
    """The schedule called ``name`` ("auto": 1f1b, interleaved with several stages a rank), for any number of
    microbatches from 1."""
    assert microbatches >= 1
    if name == "zero_bubble":
        return _run_greedily(layout, microbatches, costs=SPLIT_COSTS)
    if name == "gpipe":
        return _all_forwards_first(layout, microbatches)
    if layout.placement != "loop":
        return _run_greedily(layout, microbatches, costs=UNSPLIT_COSTS)
    return _one_forward_one_backward(layout, microbatches)


def forward_only(layout: PipelineLayout, *, microbatches: int) -> Schedule:
    """The order of an evaluation. Groups of as many microbatches as ranks pass all stages one after the other, so that
    a rank keeps the residual rows of few."""
    return tuple(tuple(_forwards(layout, rank, microbatches)) for rank in range(layout.ranks))


def splits_weights(schedule: Schedule) -> bool:
    """Whether weight gradients are actions of their own."""
    return any(action.kind == "W" for actions in schedule for action in actions)


def _forwards(layout: PipelineLayout, rank: int, microbatches: int) -> list[Action]:
    stages = layout.stages_of(rank)
    order = sorted((m // layout.ranks, s, m) for s in stages for m in range(microbatches))
    return [Action("F", stage, microbatch) for _, stage, microbatch in order]


def _backwards(layout: PipelineLayout, rank: int, microbatches: int) -> list[Action]:
    stages = layout.stages_of(rank)
    order = sorted((m // layout.ranks, -s, m) for s in stages for m in range(microbatches))
    return [Action("B", -negative, microbatch) for _, negative, microbatch in order]


def _all_forwards_first(layout: PipelineLayout, microbatches: int) -> Schedule:
    return tuple(
        (*_forwards(layout, rank, microbatches), *_backwards(layout, rank, microbatches))
        for rank in range(layout.ranks)
    )


def _one_forward_one_backward(layout: PipelineLayout, microbatches: int) -> Schedule:
    ranks, per_rank = layout.ranks, layout.stages // layout.ranks
    padded = -(-microbatches // ranks) * ranks
    lists = []
    for rank in range(ranks):
        forwards, backwards = _forwards(layout, rank, padded), _backwards(layout, rank, padded)
        ahead = ranks - rank - 1
        if per_rank > 1:
            # A microbatch comes back to the rank's first stage only after a whole group has passed the others.
            ahead = min(2 * ahead + (per_rank - 1) * ranks, len(forwards))
        actions = forwards[:ahead]
        for pair in zip(forwards[ahead:], backwards):
            actions += pair
        actions += backwards[len(forwards) - ahead :]
        lists.append(tuple(action for action in actions if action.microbatch < microbatches))
    return tuple(lists)


def _most_in_flight(layout: PipelineLayout, rank: int) -> int:
    """Microbatches that a rank may have begun and not taken back: enough to be busy until the first one comes back.

    ceil((stages - rank) / stages per rank), plus ranks // 2 when interleaved. A microbatch takes as long from the
    rank's first stage to the loss and back as the rank takes for its own share of so many microbatches. In a V the ways
    of the ranks differ most in length, and every rank may hold as many microbatches as there are stages.
    """
    per_rank = layout.stages // layout.ranks
    if layout.placement == "v":
        return 2 * layout.ranks
    return -(-(layout.stages - rank) // per_rank) + (layout.ranks // 2 if per_rank > 1 else 0)


def _run_greedily(layout: PipelineLayout, microbatches: int, *, costs: Mapping[str, int]) -> Schedule:
    """Every free rank takes, of the actions whose inputs are there, B before F before W; within a kind the oldest group
    of microbatches, of F the earliest stage, of B the latest.

    A rank begins no microbatch beyond `_most_in_flight`, nor while too many wait for their W. It always ends: nothing
    keeps a rank from the next action of the oldest microbatch that is not done.
    """
    stages = [layout.stages_of(rank) for rank in range(layout.ranks)]
    limits = [_most_in_flight(layout, rank) for rank in range(layout.ranks)]
    # The ranks near the loss are fed later, and fill that time with W: they need to have put off as many.
    waiting_limit = max(limits) + layout.ranks - 1
    done: dict[str, list[int]] = {kind: [0] * layout.stages for kind in costs}
    ends: dict[Action, int] = {}
    free = [0] * layout.ranks
    lists: list[list[Action]] = [[] for _ in range(layout.ranks)]

    def may_begin(rank: int) -> bool:
        begun, taken_back, finished = (done[kind][stages[rank][0]] for kind in ("F", "B", "W" if "W" in costs else "B"))
        return begun - taken_back < limits[rank] and begun - finished < waiting_limit

    def ready(rank: int, now: int) -> list[Action]:
        found = [Action(kind, s, done[kind][s]) for kind in costs for s in stages[rank] if done[kind][s] < microbatches]
        return [
            action
            for action in found
            if (action.kind != "F" or action.stage != stages[rank][0] or may_begin(rank))
            and all(ends.get(needed, now + 1) <= now for needed in needs(action, layout))
        ]

    now = 0
    while any(count < microbatches for counts in done.values() for count in counts):
        for rank in range(layout.ranks):
            actions = ready(rank, now) if free[rank] <= now else []
            if actions:
                action = min(actions, key=lambda a: _preference(a, layout.ranks))
                lists[rank].append(action)
                done[action.kind][action.stage] += 1
                free[rank] = ends[action] = now + costs[action.kind]
        now += 1
    return tuple(tuple(actions) for actions in lists)


def _preference(action: Action, ranks: int) -> tuple[int, int, int, int]:
    kind, stage, microbatch = action
    return "BFW".index(kind), microbatch // ranks, stage if kind == "F" else -stage, microbatch


def needs(action: Action, layout: PipelineLayout) -> list[Action]:
    """The actions, on any rank, that must have ended before ``action`` begins."""
    kind, stage, microbatch = action
    if kind == "W":
        return [Action("B", stage, microbatch)]
    if kind == "F":
        return [Action("F", stage - 1, microbatch)] if stage > 0 else []
    after = [Action("B", stage + 1, microbatch)] if stage < layout.last else []
    return [Action("F", stage, microbatch), *after]


def receiver(action: Action, layout: PipelineLayout) -> int | None:
    """The stage that waits for what ``action`` sends: a state onwards, gradients back."""
    kind, stage, _ = action
    if kind == "F" and stage < layout.last:
        return stage + 1
    return stage - 1 if kind == "B" and stage > 0 else None


def arrivals(schedule: Schedule, layout: PipelineLayout, *, rank: int) -> dict[int, list[Action]]:
    """What ``rank`` is sent, by source rank: the sending actions, in the order in which they are sent."""
    found: dict[int, list[Action]] = {}
    for source, actions in enumerate(schedule):
        for action in actions:
            stage = receiver(action, layout)
            if stage is not None and layout.rank_of(stage) == rank != source:
                found.setdefault(source, []).append(action)
    return found


@dataclass(frozen=True)
class Clock:
    """What a schedule takes by simulated time, without communication.

    total: end of the last action.
    busy: time that each rank works.
    held: most (stage, microbatch) pairs that each rank holds at once between forward and backward.
    """

    total: float
    busy: tuple[float, ...]
    held: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Idle time of the busiest rank as a fraction of its work: (P - 1) / M for GPipe and 1F1B, divided by the
        virtual stages when interleaved, a third of that when weight gradients fill the gaps."""
        return (self.total - max(self.busy)) / max(self.busy)


def simulate(schedule: Schedule, layout: PipelineLayout, *, costs: Mapping[str, float]) -> Clock:
    """Run a schedule by the clock: an action begins when its rank is free and what it needs has ended.

    Args:
        costs: time of each kind of action.

    Raises:
        AssertionError: a deadlock; names what each rank waits for.
    """
    ends: dict[Action, float] = {}
    position, free = [0] * len(schedule), [0.0] * len(schedule)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule):
            while position[rank] < len(actions):
                action = actions[position[rank]]
                needed = needs(action, layout)
                if any(other not in ends for other in needed):
                    break
                start = max([free[rank], *(ends[other] for other in needed)])
                free[rank] = ends[action] = start + costs[action.kind]
                position[rank] += 1
                moved = True
    waiting = {rank: actions[position[rank]] for rank, actions in enumerate(schedule) if position[rank] < len(actions)}
    assert not waiting, f"deadlock: ranks wait before {waiting}"
    busy = tuple(sum(costs[action.kind] for action in actions) for actions in schedule)
    return Clock(max(free), busy, tuple(_most_held(actions) for actions in schedule))


def _most_held(actions: Sequence[Action]) -> int:
    held = most = 0
    for action in actions:
        held += {"F": 1, "B": -1, "W": 0}[action.kind]
        most = max(most, held)
    return most


def check(schedule: Schedule, layout: PipelineLayout, *, microbatches: int, kinds: str) -> None:
    """Every action once, on the rank that holds its stage, after what it needs, and without deadlock.

    Args:
        kinds: "FB", "FBW", or "F" for an evaluation.

    Raises:
        AssertionError: what is wrong.
    """
    assert len(schedule) == layout.ranks, f"{len(schedule)} lists for {layout.ranks} ranks"
    for rank, actions in enumerate(schedule):
        expected = {Action(k, s, m) for k in kinds for s in layout.stages_of(rank) for m in range(microbatches)}
        twice = sorted({action for action in actions if actions.count(action) > 1})
        assert not twice, f"rank {rank} does {twice} twice"
        assert set(actions) == expected, f"rank {rank}: {sorted(expected ^ set(actions))} missing or not its own"
    simulate(schedule, layout, costs=dict.fromkeys(kinds, 1.0))
