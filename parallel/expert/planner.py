"""Who computes which (token, expert) rows: pure integers, a function of all ranks' counts alone.

    counts[R, E] -> load of each home -> load - target: donors and takers -> loans (expert, rank, rows)

    rank d computes    [ home experts, ascending | borrowed experts, ascending ]     segments
    expert e's rows    |- source 0 -|- source 1 -|- ... -|- source R-1 -|            in stable order of tokens
    go to              |---- rank 2 ----|------ rank 5, its home ------|- rank 7 -|  ascending ranks that compute it

Every rank knows every rank's counts, so all agree on the plan, and a receiver derives from it what each arriving
row is: ids are never sent. A plan stores only its segments; whatever a rank or a test wants to know follows from
them and the counts.

`plan` gives every rank the same number of rows and lends at most m experts to each. The fewest loans are a
fixed-charge transport problem (NP-hard), so two greedy answers are computed and the better one is taken; the rules,
ties included, are those of `planner_reference`, which is the law. Here they run on heaps, and the rest on prefix sums.

Shapes: R ranks, E experts, M home experts of a rank (E / R), S segments, P pieces, N rows.
"""

from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Loan = tuple[int, int, int]
"""(expert, borrowing rank, rows)."""


class Pieces(NamedTuple):
    """A rank's rows as runs, in sending order: by destination, there by segment. All int64 [P] on the host.

    start: place of the run's first row among this rank's rows in stable order of expert.
    rows: how many.
    rank: where they are computed.
    slot: place of the first one among that rank's rows, segments unpadded.
    """

    start: Tensor
    rows: Tensor
    rank: Tensor
    slot: Tensor


@dataclass(frozen=True, eq=False)
class ExpertPart:
    """One rank's part in one exchange of rows; the way back uses it in reverse.

    send: rows to each rank.
    receive: rows from each rank.
    arrivals_RS: int64 on the host, rows that come from each rank for each segment; they arrive in this order.
    pieces: this rank's rows in the order in which they leave.
    borrowed: experts of the segments after the home ones, ascending; their weights come in this order by home.
    lent: for each rank the experts that it borrows from this one, ascending.
    """

    send: tuple[int, ...]
    receive: tuple[int, ...]
    arrivals_RS: Tensor
    pieces: Pieces
    borrowed: tuple[int, ...]
    lent: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class ExpertPlan:
    """Who computes what, for all ranks. All int64 on the host; expert e's home is rank ``e // M``.

    counts: [R, E], rows of each source rank for each expert.
    borrowed: [R, M], borrowed experts, ascending, then -1.
    rows: [R, 2M], rows of each segment: the home experts, then the borrowed ones.
    first: [R, 2M], how many rows of the segment's expert lower ranks compute.
    """

    counts: Tensor
    borrowed: Tensor
    rows: Tensor
    first: Tensor

    @cached_property
    def experts(self) -> Tensor:
        """[R, 2M], expert of each segment, -1 where unused."""
        ranks, home = self.borrowed.shape
        return torch.cat([torch.arange(ranks * home).view(ranks, home), self.borrowed], dim=1)

    @cached_property
    def alloc(self) -> Tensor:
        """[E, R], rows of each expert computed on each rank."""
        alloc = self.counts.new_zeros(self.counts.shape[1], self.counts.shape[0])
        rank, segment = torch.nonzero(self.experts >= 0, as_tuple=True)
        alloc[self.experts[rank, segment], rank] = self.rows[rank, segment]
        return alloc

    @cached_property
    def send(self) -> Tensor:
        """[R, R], rows from each source rank (first dim) to each computing rank."""
        counts, experts, first, rows = (x.numpy() for x in (self.counts, self.experts, self.first, self.rows))
        ranks, home = self.borrowed.shape
        whole = rows[:, :home] == counts.sum(axis=0).reshape(ranks, home)
        send = np.einsum("qrm,rm->qr", counts.reshape(ranks, ranks, home), whole.astype(np.int64))
        split = experts >= 0
        split[:, :home] &= ~whole
        # Some destinations at a time: fresh memory for all of them would cost more than the arithmetic.
        for begin in range(0, ranks, 64):
            some = slice(begin, begin + 64)
            mask = split[some]
            shares = _shares(counts, experts[some][mask], first[some][mask], rows[some][mask])
            ends = np.concatenate([[0], mask.sum(axis=1).cumsum()])
            before = np.pad(shares.cumsum(axis=1), ((0, 0), (1, 0)))
            send[:, some] += np.diff(before.take(ends, axis=1), axis=1)
        return torch.from_numpy(send)

    def part(self, rank: int) -> ExpertPart:
        """What ``rank`` has to do."""
        counts, rows, first, borrowed = (x.numpy() for x in (self.counts, self.rows, self.first, self.borrowed))
        ranks, home = borrowed.shape
        mine = np.count_nonzero(borrowed[rank] >= 0)
        experts, used = self.experts.numpy(), slice(home + mine)
        arrivals = _shares(counts, experts[rank, used], first[rank, used], rows[rank, used])
        # Rows [low, low + leaving) of each segment's expert are this rank's; unused segments have no rows.
        before = counts[:rank].sum(axis=0)
        low = np.maximum(before[experts], first)
        leaving = np.minimum((before + counts[rank])[experts], first + rows) - low
        to, segment = np.nonzero(leaving > 0)
        low, expert = low[to, segment], experts[to, segment]
        start = np.cumsum(counts[rank]) - counts[rank] - before
        slot = np.cumsum(rows, axis=1) - rows - first
        pieces = start[expert] + low, leaving[to, segment], to, slot[to, segment] + low
        lent = np.nonzero((borrowed >= 0) & (borrowed // home == rank))
        loans: list[list[int]] = [[] for _ in range(ranks)]
        for taker, lent_expert in zip(lent[0].tolist(), borrowed[lent].tolist()):
            loans[taker].append(lent_expert)
        return ExpertPart(
            send=tuple(np.maximum(leaving, 0).sum(axis=1).tolist()),
            receive=tuple(arrivals.sum(axis=1).tolist()),
            arrivals_RS=torch.from_numpy(arrivals),
            pieces=Pieces(*map(torch.from_numpy, pieces)),
            borrowed=tuple(borrowed[rank, :mine].tolist()),
            lent=tuple(map(tuple, loans)),
        )


def plan_home(counts: Tensor) -> ExpertPlan:
    """The plan without lending: every expert is computed at its home.

    Args:
        counts: int64 [R, E] on the host, rows of each rank for each expert; R divides E.
    """
    return _from_loans(counts, _checked(counts).sum(axis=0), [])


def plan(counts: Tensor, *, above: float = 1.0) -> ExpertPlan:
    """Every rank computes ``N // R`` rows, the first ``N % R`` ranks one more, with few loans.

    Args:
        counts: int64 [R, E] on the host, rows of each rank for each expert; R divides E.
        above: lend only if the largest load of a home exceeds ``above`` times the mean; 1 is always exact.
    """
    total_E = _checked(counts).sum(axis=0)
    ranks = counts.shape[0]
    by_home = total_E.reshape(ranks, -1)
    load_R = by_home.sum(axis=1)
    rows = int(load_R.sum())
    if int(load_R.max()) * ranks <= above * rows:
        return _from_loans(counts, total_E, [])
    balance_R = load_R - (rows // ranks + (np.arange(ranks) < rows % ranks))
    order = np.argsort(-by_home, axis=1, kind="stable")
    largest = np.take_along_axis(by_home, order, axis=1)
    experts = order + np.arange(0, total_E.size, by_home.shape[1])[:, None]
    fill, surplus = _fill(balance_R, largest, experts), _surplus(balance_R, largest, experts)
    fits = len(surplus) == 0 or np.bincount([rank for _, rank, _ in surplus]).max() <= by_home.shape[1]
    # Surplus moves as few rows as any plan can, so it wins a tie.
    return _from_loans(counts, total_E, surplus if fits and len(surplus) <= len(fill) else fill)


def place_arrivals(arrivals_RS: Tensor, *, alignment: int) -> tuple[Tensor, Tensor]:
    """Where arriving rows stand for the grouped product: by segment, in a segment by rank and order of arrival.

    Args:
        arrivals_RS: `ExpertPart.arrivals_RS`.
        alignment: segments are padded to a multiple of it.

    Returns:
        slot_N int64, the row of each arriving row, and ends_S int64, where each padded segment ends.
    """
    rows_S = arrivals_RS.sum(dim=0)
    padded_S = (rows_S + alignment - 1) // alignment * alignment
    ends_S = padded_S.cumsum(0)
    first_RS = (ends_S - padded_S) + arrivals_RS.cumsum(0) - arrivals_RS
    return runs(first_RS.flatten(), arrivals_RS.flatten()), ends_S


def runs(first_P: Tensor, rows_P: Tensor) -> Tensor:
    """``first, first + 1, ...`` for each run, one after the other; int64 [sum(rows_P)] on their device."""
    shift_P = first_P - (rows_P.cumsum(0) - rows_P)
    shift_N = shift_P.repeat_interleave(rows_P)
    return torch.arange(shift_N.numel(), device=shift_N.device) + shift_N


def _checked(counts: Tensor) -> Ints:
    assert counts.dtype == torch.int64, f"counts are {counts.dtype}"
    ranks, experts = counts.shape
    assert experts % ranks == 0, f"{experts} experts over {ranks} ranks"
    return counts.numpy()


def _fill(balance_R: Ints, largest: Ints, experts: Ints) -> list[Loan]:
    """The largest surplus fills the largest deficit whole, again and again: one donor for each taker.

    A donor may give more than its surplus and is then filled itself. So at most R - 1 rounds, and at most M loans a
    taker, because they come from one home.
    """
    donors, takers = _heaps(balance_R)
    quotas: dict[int, list[tuple[int, int]]] = {}
    while donors:
        want, taker = heappop(takers)
        surplus, donor = donors[0]
        quotas.setdefault(donor, []).append((want, taker))
        left = surplus - want
        if left < 0:
            heapreplace(donors, (left, donor))
        else:
            heappop(donors)
            if left > 0:
                heappush(takers, (-left, donor))
    homes = list(quotas)
    sizes, ids = (-largest[homes]).tolist(), experts[homes].tolist()
    return [
        loan for home, size, expert in zip(homes, sizes, ids) for loan in _match(list(zip(size, expert)), quotas[home])
    ]


def _surplus(balance_R: Ints, largest: Ints, experts: Ints) -> list[Loan]:
    """Donors give their surplus and no more, of their largest experts. A taker may need more than M loans."""
    before = np.cumsum(largest, axis=1) - largest
    given = np.minimum(np.maximum(balance_R, 0)[:, None] - before, largest)
    some = given > 0
    return _match(list(zip((-given[some]).tolist(), experts[some].tolist())), _heaps(balance_R)[1])


def _heaps(balance_R: Ints) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Donors and takers as heaps of (minus rows, rank): first the largest, of equals the lowest rank."""
    heaps = []
    for sizes in (-balance_R, balance_R):
        ranks = np.flatnonzero(sizes < 0)
        heaps.append(list(zip(sizes[ranks].tolist(), ranks.tolist())))
        heapify(heaps[-1])
    return heaps[0], heaps[1]


def _match(pieces: list[tuple[int, int]], wants: list[tuple[int, int]]) -> list[Loan]:
    """The largest piece meets the largest want until no want is left; each loan uses up one of the two.

    Args:
        pieces: (minus rows, expert); together at least the wants. Consumed.
        wants: (minus rows, rank). Consumed.
    """
    heapify(pieces)
    heapify(wants)
    loans = []
    while wants:
        piece, expert = pieces[0]
        want, rank = wants[0]
        if piece <= want:
            loans.append((expert, rank, -want))
            heappop(wants)
            if piece < want:
                heapreplace(pieces, (piece - want, expert))
            else:
                heappop(pieces)
        else:
            loans.append((expert, rank, -piece))
            heappop(pieces)
            heapreplace(wants, (want - piece, rank))
    return loans


def _from_loans(counts: Tensor, total_E: Ints, loans: list[Loan]) -> ExpertPlan:
    """Segments of all ranks, borrowed experts ascending."""
    ranks, experts = counts.shape
    home = experts // ranks
    borrowed = np.full((ranks, home), -1)
    rows, first = np.zeros((2, ranks, 2 * home), dtype=np.int64)
    kept_E, first_E = total_E.copy(), np.zeros_like(total_E)
    if loans:
        # By (rank, expert) for the segments. In this order the loans of one expert ascend by rank too.
        expert, rank, lent = np.array(sorted(loans, key=lambda loan: (loan[1], loan[0])), dtype=np.int64).T
        slot = np.arange(rank.size) - np.searchsorted(rank, rank)
        borrowed[rank, slot] = expert
        rows[rank, home + slot] = lent
        np.subtract.at(kept_E, expert, lent)
        lower = rank < expert // home
        np.add.at(first_E, expert[lower], lent[lower])
        order = np.argsort(expert, kind="stable")
        before = np.cumsum(lent[order]) - lent[order]
        before -= before[np.searchsorted(expert[order], expert[order])]
        first[rank[order], home + slot[order]] = before + np.where(lower, 0, kept_E[expert])[order]
    rows[:, :home] = kept_E.reshape(ranks, home)
    first[:, :home] = first_E.reshape(ranks, home)
    return ExpertPlan(counts, *map(torch.from_numpy, (borrowed, rows, first)))


def _shares(counts_RE: Ints, expert: Ints, first: Ints, rows: Ints) -> Ints:
    """[R, P], how many of rows ``[first, first + rows)`` of each expert come from each source rank."""
    ends = np.empty((counts_RE.shape[0] + 1, expert.size), dtype=np.int64)
    ends[0] = first
    np.cumsum(counts_RE.take(expert, axis=1), axis=0, out=ends[1:])
    return np.diff(ends.clip(first, first + rows, out=ends), axis=0)
