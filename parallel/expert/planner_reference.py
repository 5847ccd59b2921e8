"""The law of the expert plan: the rules of `planner`, as plain loops over Python integers.

    allocate   who computes how many rows of each expert     fill, surplus, the better of both
    route      where each single row goes                    one by one

Ties go to the lowest rank or expert. ``counts[r][e]`` are the rows of source rank r for expert e; expert e's home is
rank ``e // (E / R)``. A loan list maps (expert, borrowing rank) to rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

Counts = Sequence[Sequence[int]]
Loans = dict[tuple[int, int], int]


class Route(NamedTuple):
    """Where one row goes: source rank, expert, number among the source's rows of that expert; rank and slot there."""

    source: int
    expert: int
    number: int
    rank: int
    slot: int


def targets(rows: int, ranks: int) -> list[int]:
    """Equal shares; the first ranks take the remainder."""
    return [rows // ranks + (rank < rows % ranks) for rank in range(ranks)]


def fill(totals: Sequence[int], ranks: int) -> Loans:
    """Each round, the rank with the largest surplus gives the rank with the largest deficit all that it lacks.

    Then each donor deals its quotas out of its experts: the largest quota from the largest remaining expert, repeated.
    """
    home = len(totals) // ranks
    balance = _balance(totals, ranks)
    quotas: list[dict[int, int]] = [{} for _ in range(ranks)]
    while max(balance) > 0:
        donor = balance.index(max(balance))
        taker = balance.index(min(balance))
        quotas[donor][taker] = -balance[taker]
        balance[donor] += balance[taker]
        balance[taker] = 0
    loans: Loans = {}
    for donor in range(ranks):
        experts = range(donor * home, (donor + 1) * home)
        loans |= _deal({expert: totals[expert] for expert in experts}, quotas[donor])
    return loans


def surplus(totals: Sequence[int], ranks: int) -> Loans | None:
    """Donors give their surplus and no more, of their largest experts; the largest piece to the largest deficit.

    None if a rank would need more than E / R experts.
    """
    home = len(totals) // ranks
    balance = _balance(totals, ranks)
    pieces = {}
    for rank in range(ranks):
        left = max(0, balance[rank])
        for expert in sorted(range(rank * home, (rank + 1) * home), key=lambda e: (-totals[e], e)):
            pieces[expert] = min(left, totals[expert])
            left -= pieces[expert]
    loans = _deal(pieces, {rank: -lack for rank, lack in enumerate(balance) if lack < 0})
    borrowed = [sum(rank == taker for _, taker in loans) for rank in range(ranks)]
    return loans if max(borrowed) <= home else None


def best_loans(totals: Sequence[int], ranks: int) -> Loans:
    """The answer with fewer loans; at a tie the one that moves fewer rows, which `surplus` always does."""
    filled, spared = fill(totals, ranks), surplus(totals, ranks)
    if spared is None:
        return filled
    return min(spared, filled, key=lambda loans: (len(loans), sum(loans.values())))


def allocate(counts: Counts) -> list[list[int]]:
    """``alloc[e][d]``, rows of expert e computed on rank d."""
    ranks, experts = len(counts), len(counts[0])
    home = experts // ranks
    totals = [sum(row[expert] for row in counts) for expert in range(experts)]
    alloc = [[0] * ranks for _ in range(experts)]
    for expert, total in enumerate(totals):
        alloc[expert][expert // home] = total
    for (expert, taker), rows in best_loans(totals, ranks).items():
        alloc[expert][expert // home] -= rows
        alloc[expert][taker] += rows
    return alloc


def segments(alloc: Sequence[Sequence[int]], rank: int) -> list[int]:
    """Experts that ``rank`` computes: its home experts, with or without rows, then the borrowed ones, ascending."""
    experts = len(alloc)
    home = experts // len(alloc[0])
    own = list(range(rank * home, (rank + 1) * home))
    return own + [expert for expert in range(experts) if alloc[expert][rank] and expert not in own]


def route(counts: Counts, alloc: Sequence[Sequence[int]]) -> list[Route]:
    """Every row by source, expert and number.

    Rows of an expert, counted over sources in order, fill the ranks that compute it in ascending order; a slot
    counts the rows of a rank segment by segment.
    """
    ranks, experts = len(counts), len(alloc)
    routes = []
    for source in range(ranks):
        for expert in range(experts):
            for number in range(counts[source][expert]):
                place = sum(counts[lower][expert] for lower in range(source)) + number
                rank = 0
                while place >= alloc[expert][rank]:
                    place -= alloc[expert][rank]
                    rank += 1
                order = segments(alloc, rank)
                before = sum(alloc[other][rank] for other in order[: order.index(expert)])
                routes.append(Route(source, expert, number, rank, before + place))
    return routes


def _balance(totals: Sequence[int], ranks: int) -> list[int]:
    home = len(totals) // ranks
    shares = targets(sum(totals), ranks)
    return [sum(totals[rank * home : (rank + 1) * home]) - shares[rank] for rank in range(ranks)]


def _deal(pieces: dict[int, int], wants: dict[int, int]) -> Loans:
    """The largest remaining piece meets the largest remaining want until nothing is wanted."""
    pieces, wants = dict(pieces), dict(wants)
    loans = {}
    while any(wants.values()):
        expert = min(pieces, key=lambda e: (-pieces[e], e))
        rank = min(wants, key=lambda r: (-wants[r], r))
        loans[expert, rank] = min(pieces[expert], wants[rank])
        pieces[expert] -= loans[expert, rank]
        wants[rank] -= loans[expert, rank]
    return loans
