"""Who computes which (token, expert) rows: pure integers, a function of all ranks' counts alone.

Every rank knows every rank's counts, so all agree on the plan, and a receiver derives from it what each arriving
row is: ids are never sent.

Shapes: R ranks, E experts, S segments (the experts that a rank computes, in the order of its product), N arriving
rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ExpertPlan:
    """One rank's part in one exchange of rows; the way back uses it in reverse.

    send: rows to each rank.
    receive: rows from each rank.
    arrivals_RS: int64 on the host, rows that come from each rank for each segment; they arrive in this order.
    """

    send: tuple[int, ...]
    receive: tuple[int, ...]
    arrivals_RS: Tensor


def plan_home(counts_RE: Tensor, *, rank: int) -> ExpertPlan:
    """Every expert is computed at its home: expert e on rank ``e // (E / R)``.

    Args:
        counts_RE: int64 on the host, rows of each rank for each expert; R divides E.
        rank: whose part.
    """
    ranks, experts = counts_RE.shape
    counts = counts_RE.view(ranks, ranks, experts // ranks)
    return ExpertPlan(
        send=tuple(counts[rank].sum(dim=1).tolist()),
        receive=tuple(counts[:, rank].sum(dim=1).tolist()),
        arrivals_RS=counts[:, rank],
    )


def place_arrivals(arrivals_RS: Tensor, *, alignment: int) -> tuple[Tensor, Tensor]:
    """Where arriving rows stand for the grouped product: by segment, in a segment by rank and order of arrival.

    Args:
        arrivals_RS: `ExpertPlan.arrivals_RS`.
        alignment: segments are padded to a multiple of it.

    Returns:
        slot_N int64, the row of each arriving row, and ends_S int64, where each padded segment ends.
    """
    rows_S = arrivals_RS.sum(dim=0)
    padded_S = (rows_S + alignment - 1) // alignment * alignment
    ends_S = padded_S.cumsum(0)
    first_RS = (ends_S - padded_S) + arrivals_RS.cumsum(0) - arrivals_RS
    count = arrivals_RS.flatten()
    shift = first_RS.flatten() - (count.cumsum(0) - count)
    return torch.arange(int(count.sum())) + shift.repeat_interleave(count), ends_S
