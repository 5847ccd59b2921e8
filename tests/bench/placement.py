"""Where expert rows are computed under four rules, for the simulator: loads and copies of weights, nothing else.

    plain         every expert at its home
    balanced      `parallel.expert.planner.plan`
    least loaded  LLEP: arXiv 2601.17111, algorithms 2 and 3 (Nguyen et al., 2026)
    replicas      EPLB: the global policy of DeepSeek's expert-parallelism load balancer (its README; DeepSeek-V3
                  report, section 3.4)

The last two are written from those descriptions; where a description leaves a choice open, its docstring says which.

Shapes: R ranks, E experts, P slots of a rank.
"""

import math
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from parallel.expert.planner import plan

Ints = NDArray[np.int64]


class Outcome(NamedTuple):
    """One layer in one step: rows that each rank computes, copies of experts that it sends and gets. int64 [R]."""

    rows: Ints
    lent: Ints
    borrowed: Ints


def homes(experts: int, ranks: int) -> Ints:
    """int64 [E], home rank of each expert: in order, as evenly as they go."""
    return np.arange(experts) * ranks // experts


def plain(total_E: Ints, *, ranks: int) -> Outcome:
    rows = np.zeros(ranks, dtype=np.int64)
    np.add.at(rows, homes(total_E.size, ranks), total_E)
    return Outcome(rows, np.zeros_like(rows), np.zeros_like(rows))


def balanced(total_E: Ints, *, ranks: int, above: float = 1.0) -> Outcome:
    """The planner's answer, if the largest load exceeds ``above`` times the mean.

    Homes of fewer experts than others are filled up with experts without rows.
    """
    home = homes(total_E.size, ranks)
    size = int(np.bincount(home, minlength=ranks).max())
    # Loads do not depend on where rows come from: all come from rank 0.
    counts = np.zeros((ranks, ranks * size), dtype=np.int64)
    counts[0, home * size + np.arange(total_E.size) - np.searchsorted(home, home)] = total_E
    made = plan(torch.from_numpy(counts), above=above)
    borrowed = made.borrowed.numpy()
    return Outcome(
        rows=made.rows.sum(dim=1).numpy(),
        lent=np.bincount(borrowed[borrowed >= 0] // size, minlength=ranks),
        borrowed=np.count_nonzero(borrowed >= 0, axis=1),
    )


def least_loaded(
    total_E: Ints, *, ranks: int, capacity: float = 1.0, smallest: int = 1024, above: float = 1.3
) -> Outcome:
    """Experts, the largest first, stay at home up to a capacity; the rest goes to the rank with the least load.

    Args:
        total_E: rows of each expert.
        ranks: R.
        capacity: of a rank, in mean loads.
        smallest: rows that are worth a product of their own: a smaller rest stays at home, and a smaller room is
            not used unless nobody has more; then the least loaded rank takes the whole rest beyond its capacity.
        above: plain expert parallelism up to this max/mean of ranks' loads.

    The defaults are those of the published code's example; a rank's load counts its home experts still to come.
    """
    home = homes(total_E.size, ranks)
    start = plain(total_E, ranks=ranks)
    if start.rows.max() * ranks < above * total_E.sum():
        return start
    limit = math.ceil(capacity * float(total_E.sum()) / ranks)
    load, lent, borrowed = (x.copy() for x in start)
    for expert in np.argsort(-total_E, kind="stable").tolist():
        owner, rest = int(home[expert]), int(total_E[expert])
        over = min(rest, int(load[owner]) - limit)
        # Nothing to spill, or too little to be worth it while some of it stays.
        if over <= 0 or (over < rest and over < smallest):
            continue
        load[owner] -= over
        rest = over
        others = load.copy()
        others[owner] = np.iinfo(np.int64).max
        takers = set()
        while rest:
            taker = int(others.argmin())
            room = limit - int(others[taker])
            given = rest if room < min(rest, smallest) else min(rest, room)
            others[taker] += given
            load[taker] += given
            takers.add(taker)
            rest -= given
        lent[owner] += len(takers)
        borrowed[list(takers)] += 1
    return Outcome(load, lent, borrowed)


def replicate(total_E: Ints, *, ranks: int, slots: int) -> Ints:
    """int64 [R, P], which expert stands in each slot, for loads like ``total_E``.

    Every expert once; each further slot to the expert with the most rows a copy; then copies, the largest first, to
    the least loaded rank with a free slot. Ties go to the lowest expert and rank.
    """
    copies = np.ones_like(total_E)
    heap = [(-float(total), expert) for expert, total in enumerate(total_E.tolist())]
    heapify(heap)
    for _ in range(ranks * slots - total_E.size):
        expert = heap[0][1]
        copies[expert] += 1
        heapreplace(heap, (-total_E[expert] / copies[expert], expert))
    expert_C = np.repeat(np.arange(total_E.size), copies)
    weight_C = (total_E / copies)[expert_C]
    placed: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    for copy in np.argsort(-weight_C, kind="stable").tolist():
        load, rank = heappop(loads)
        placed[rank].append(int(expert_C[copy]))
        if len(placed[rank]) < slots:
            heappush(loads, (load + float(weight_C[copy]), rank))
    return np.array([sorted(experts) for experts in placed])


def with_replicas(total_E: Ints, placement_RP: Ints) -> Outcome:
    """An expert's rows are shared out evenly over its copies; the copy on the lowest rank is the one that trains.

    Copies of weights: each further copy gets them from, and returns its gradient to, the one that trains.
    """
    ranks, slots = placement_RP.shape
    # By expert, and there by rank: a copy's number among those of its expert.
    order = np.argsort(placement_RP.ravel(), kind="stable")
    expert_C, rank_C = placement_RP.ravel()[order], order // slots
    copies = np.bincount(expert_C, minlength=total_E.size)
    first_C = np.searchsorted(expert_C, expert_C)
    number_C = np.arange(expert_C.size) - first_C
    share_C = total_E[expert_C] // copies[expert_C] + (number_C < total_E[expert_C] % copies[expert_C])
    rows, lent, borrowed = np.zeros((3, ranks), dtype=np.int64)
    np.add.at(rows, rank_C, share_C)
    away = rank_C != rank_C[first_C]
    np.add.at(lent, rank_C[first_C][away], 1)
    np.add.at(borrowed, rank_C[away], 1)
    return Outcome(rows, lent, borrowed)


def moved_slots(before_RP: Ints, after_RP: Ints) -> int:
    """Experts that ranks must fetch when the placement changes."""
    return sum(len(set(new) - set(old)) for old, new in zip(before_RP.tolist(), after_RP.tolist()))
