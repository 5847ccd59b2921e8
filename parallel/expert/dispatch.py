"""Tokens to their experts' ranks and back: the token dispatcher over the ep axis, on plain collectives.

    tokens --sort by plan--> rows --all-to-all--> arrivals --by segment, padded--> grouped product
    tokens <--weighted sum-- rows <--all-to-all-- arrivals <-------------------------------'

One all-gather of counts per layer and pass, brought to the host, gives the plan and so every size: the one
synchronisation that an uneven exchange costs anyway. A pass that is repeated for its gradient keeps its plan
(`model.router.Decisions`). Backward retraces each step with the plan of forward. Every rank enters every collective,
whether it has rows or not. Routing weights are applied at the token's own rank, exactly as `LocalDispatcher` does, so
experts see unweighted rows and the router's gradient never travels.

Where a row is computed is the plan's affair: at its expert's home, or, balanced, on whichever rank has room, with a
copy of the expert's weights (`parallel.expert.weights`). Copies and tokens travel while the shared experts compute.

Shapes: T tokens, L width, E experts, K choices, R rows of this rank (T * K), N arriving rows, P padded rows, S
segments.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.dispatch import SEGMENT_ALIGNMENT, combine_rows
from model.router import Routing
from model.seams import ExpertWeights, Received
from parallel.collectives import Pending, all_to_all, all_to_all_plain, all_to_all_start, gather_plain
from parallel.expert.planner import ExpertPart, ExpertPlan, place_arrivals, plan_home, runs
from parallel.expert.stats import RowStats
from parallel.expert.weights import Loan, borrow, refetch
from parallel.mesh import Axis


class Moves(NamedTuple):
    """A map of rows both ways: ``target[i]`` is where row i goes, ``source[j]`` the row that lands on j.

    ``source`` may be longer: where nothing lands it holds ``len(target)``, and the row there is zero.
    """

    target: Tensor
    source: Tensor


class Planned(NamedTuple):
    """What follows from the routing alone.

    part: this rank's part of the plan.
    lends: whether any rank borrows anything.
    sort: (token, choice) rows to their order of leaving.
    place: arrivals to their padded places.
    ends_S: int32, where padded segments end.
    home_rows: padded rows of the segments of home experts, which come first.
    """

    part: ExpertPart
    lends: bool
    sort: Moves
    place: Moves
    ends_S: Tensor
    home_rows: int


class Dispatched(NamedTuple):
    """What `AllToAllDispatcher` remembers from `dispatch` to `combine`."""

    planned: Planned
    weights: ExpertWeights
    rows_RL: Tensor
    arriving: Pending
    loan: Loan | None


class AllToAllDispatcher:
    """`model.seams.TokenDispatcher` over ``axis``: this rank's experts are slice ``axis.rank`` of all.

    Args:
        axis: expert-parallel ranks; all of them must run the same layers the same number of times.
        experts: experts of the layer over all ranks; ``axis.size`` divides it.
        make_plan: from all ranks' counts, int64 [ranks, experts] on the host; the same on every rank.
    """

    def __init__(self, axis: Axis, *, experts: int, make_plan: Callable[[Tensor], ExpertPlan] = plan_home) -> None:
        assert experts % axis.size == 0, f"{experts} experts over {axis.name}={axis.size}"
        self.axis = axis
        self.experts = experts
        self.make_plan = make_plan

    def begin(self, routing: Routing, weights: ExpertWeights) -> tuple[Planned, Loan | None]:
        """The plan, and its loan under way. One order on all ranks: weights before tokens, which need them at once."""
        planned = routing.decisions.once(Planned, lambda: self._plan(routing, weights))
        if not planned.lends:
            return planned, None
        loan = Loan(self.axis, planned.part, weights)
        loan.start()
        return planned, loan

    def dispatch(self, x_TL: Tensor, routing: Routing, weights: ExpertWeights) -> Dispatched:
        planned, loan = self.begin(routing, weights)
        rows_RL = _Expand.apply(x_TL, planned.sort)
        part = planned.part
        arriving = all_to_all_start(rows_RL.detach(), self.axis, send=part.send, receive=part.receive)
        return Dispatched(planned, weights, rows_RL, arriving, loan)

    def _plan(self, routing: Routing, weights: ExpertWeights) -> Planned:
        expert_TK = routing.expert_TK
        expert_R = expert_TK.flatten()
        counts_1E = torch.bincount(expert_R, minlength=self.experts).unsqueeze(0)
        whole = self.make_plan(gather_plain(counts_1E, self.axis, dim=0).cpu())
        part = whole.part(self.axis.rank)
        # Stable: rows of one expert keep the order of their tokens.
        order_R = torch.argsort(expert_R, stable=True)
        leaving_R = runs(part.pieces.start, part.pieces.rows).to(order_R.device)
        order_R = order_R.index_select(0, leaving_R)
        slot_N, ends_S = place_arrivals(part.arrivals_RS, alignment=SEGMENT_ALIGNMENT)
        home, padded = self.experts // self.axis.size, int(ends_S[-1])
        if routing.record is not None:
            assert isinstance(routing.record, RowStats), "ForwardStats(dispatch=RowStats) makes the record"
            routing.record.add(whole, computed=slot_N.numel(), expert_bytes=sum(w[0].nbytes for w in weights))
        slot_N = slot_N.to(expert_TK.device)
        return Planned(
            part,
            lends=bool((whole.borrowed >= 0).any()),
            sort=Moves(_inverse(order_R, order_R.numel()), order_R),
            place=Moves(slot_N, _inverse(slot_N, padded)),
            ends_S=ends_S.to(torch.int32).to(expert_TK.device),
            home_rows=int(ends_S[home - 1]),
        )

    def receive(self, handle: Dispatched) -> tuple[Received, ...]:
        planned, loan = handle.planned, handle.loan
        arrived_NL = _Arrive.apply(handle.rows_RL, handle.arriving, self.axis, planned.part)
        return self.split(place_rows(arrived_NL, planned.place), planned, handle.weights, loan)

    def split(
        self, rows_PL: Tensor, planned: Planned, weights: ExpertWeights, loan: Loan | None
    ) -> tuple[Received, ...]:
        """Padded rows in parts: for this rank's own experts, and for those that it borrows; waits for the loan."""
        if loan is None:
            return (Received(rows_PL, planned.ends_S, weights),)
        rows_PL, borrowed = borrow(rows_PL, loan)
        home = weights.gate.shape[0]
        own_PL, guests_PL = rows_PL.split([planned.home_rows, rows_PL.shape[0] - planned.home_rows])
        own = Received(own_PL, planned.ends_S[:home], weights)
        if not planned.part.borrowed:
            return (own,)
        return own, Received(guests_PL, planned.ends_S[home:] - planned.home_rows, borrowed, loan.borrowed)

    def combine(self, rows_RL: Tensor, routing: Routing, handle: Dispatched) -> Tensor:
        """As `TokenDispatcher.combine`; ``rows_RL`` are the padded rows of `receive`, with results."""
        planned, part = handle.planned, handle.planned.part
        leaving_NL = _Take.apply(rows_RL, planned.place)
        back_RL = all_to_all(leaving_NL, self.axis, send=part.receive, receive=part.send)
        if handle.loan is not None:
            back_RL = refetch(back_RL, handle.loan)
        return combine_rows(back_RL, routing.weight_TK, planned.sort.target.view_as(routing.expert_TK))


def place_rows(rows: Tensor, moves: Moves) -> Tensor:
    """Rows moved to their targets, zeros elsewhere."""
    return _Place.apply(rows, moves)


def _inverse(target: Tensor, size: int) -> Tensor:
    """For each of ``size`` places the index of ``target`` that names it, or ``len(target)``."""
    source = torch.full((size,), target.numel(), device=target.device)
    source[target] = torch.arange(target.numel(), device=target.device)
    return source


def _spread(x: Tensor, moves: Moves) -> Tensor:
    """Rows moved to their targets, zeros elsewhere."""
    return torch.cat([x, x.new_zeros(1, x.shape[1])]).index_select(0, moves.source)


class _Arrive(torch.autograd.Function):
    """The end of an exchange that is under way; backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, rows_RL: Tensor, arriving: Pending, axis: Axis, part: ExpertPart) -> Tensor:
        ctx.axis, ctx.part = axis, part
        return arriving.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NL: Tensor) -> tuple[Tensor, None, None, None]:
        part = ctx.part
        return all_to_all_plain(grad_NL, ctx.axis, send=part.receive, receive=part.send), None, None, None


class _Place(torch.autograd.Function):
    """Rows to their targets; backward takes them from there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, moves: Moves) -> Tensor:
        ctx.moves = moves
        return _spread(x, moves)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.moves.target), None


class _Take(torch.autograd.Function):
    """Rows from their targets, in their own order; backward puts them there, and zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, moves: Moves) -> Tensor:
        ctx.moves = moves
        return x.index_select(0, moves.target)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _spread(grad, ctx.moves), None


class _Expand(torch.autograd.Function):
    """A row for each (token, choice), sorted; backward sums a token's rows in the order of its choices."""

    @staticmethod
    def forward(ctx: Any, x_TL: Tensor, sort: Moves) -> Tensor:
        ctx.sort, ctx.tokens = sort, x_TL.shape[0]
        choices = sort.source.numel() // max(1, ctx.tokens)
        return x_TL.index_select(0, sort.source // max(1, choices))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RL: Tensor) -> tuple[Tensor, None]:
        choices = grad_RL.shape[0] // max(1, ctx.tokens)
        rows_TKL = grad_RL.index_select(0, ctx.sort.target).view(ctx.tokens, choices, grad_RL.shape[1])
        return rows_TKL.sum(dim=1), None
