"""Tokens to their experts' ranks and back: the token dispatcher over the ep axis, on plain collectives.

    tokens --sort by expert--> rows --all-to-all--> arrivals --by segment, padded--> grouped product
    tokens <--weighted sum--- rows <--all-to-all-- arrivals <-------------------------------'

One all-gather of counts per layer and pass, brought to the host, gives the plan and so every size: the one
synchronisation that an uneven exchange costs anyway. Backward retraces each step with the plan of forward. Every rank
enters every collective, whether it has rows or not. Routing weights are applied at the token's own rank, exactly as
`LocalDispatcher` does, so experts see unweighted rows and the router's gradient never travels.

Shapes: T tokens, L width, E experts, K choices, R rows of this rank (T * K), N arriving rows, S padded rows.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.kimi import KimiModel
from model.moe import MoE
from model.router import Routing
from model.seams import SEGMENT_ALIGNMENT, ExpertWeights, Received, combine_rows
from parallel.collectives import all_to_all, gather_plain
from parallel.expert.planner import ExpertPlan, place_arrivals, plan_home
from parallel.mesh import Axis


class Moves(NamedTuple):
    """A map of rows both ways: ``target[i]`` is where row i goes, ``source[j]`` the row that lands on j.

    ``source`` may be longer: where nothing lands it holds ``len(target)``, and the row there is zero.
    """

    target: Tensor
    source: Tensor


class Dispatched(NamedTuple):
    """What `AllToAllDispatcher` remembers from `dispatch` to `combine`."""

    received: Received
    plan: ExpertPlan
    sort: Moves
    place: Moves


class AllToAllDispatcher:
    """`model.seams.TokenDispatcher` over ``axis``: this rank's experts are slice ``axis.rank`` of all.

    Args:
        axis: expert-parallel ranks; all of them must run the same layers the same number of times.
        experts: experts of the layer over all ranks; ``axis.size`` divides it.
    """

    def __init__(self, axis: Axis, *, experts: int) -> None:
        assert experts % axis.size == 0, f"{experts} experts over {axis.name}={axis.size}"
        self.axis = axis
        self.experts = experts

    def dispatch(self, x_TL: Tensor, routing: Routing, weights: ExpertWeights) -> Dispatched:
        expert_R = routing.expert_TK.flatten()
        counts_1E = torch.bincount(expert_R, minlength=self.experts).unsqueeze(0)
        plan = plan_home(gather_plain(counts_1E, self.axis, dim=0).cpu(), rank=self.axis.rank)
        # Stable: rows of one expert keep the order of their tokens.
        order_R = torch.argsort(expert_R, stable=True)
        sort = Moves(_inverse(order_R, order_R.numel()), order_R)
        slot_N, ends_S = (x.to(x_TL.device) for x in place_arrivals(plan.arrivals_RS, alignment=SEGMENT_ALIGNMENT))
        place = Moves(slot_N, _inverse(slot_N, int(ends_S[-1])))
        rows_RL = _Expand.apply(x_TL, sort)
        arrived_NL = all_to_all(rows_RL, self.axis, send=plan.send, receive=plan.receive)
        rows_SL = _Place.apply(arrived_NL, place)
        return Dispatched(Received(rows_SL, ends_S.to(torch.int32), weights), plan, sort, place)

    def receive(self, handle: Dispatched) -> Received:
        return handle.received

    def combine(self, rows_RL: Tensor, routing: Routing, handle: Dispatched) -> Tensor:
        """As `TokenDispatcher.combine`; ``rows_RL`` are the padded rows of `receive`, with results."""
        leaving_NL = _Take.apply(rows_RL, handle.place)
        back_RL = all_to_all(leaving_NL, self.axis, send=handle.plan.receive, receive=handle.plan.send)
        return combine_rows(back_RL, routing.weight_TK, handle.sort.target.view_as(routing.expert_TK))


def use_expert_parallel(model: KimiModel, *, axis: Axis) -> None:
    """Put an `AllToAllDispatcher` into every expert layer of ``model``, whose experts are this rank's slice."""
    for layer in model.layers:
        if isinstance(layer.ffn, MoE):
            layer.ffn.dispatcher = AllToAllDispatcher(axis, experts=model.config.moe.experts)


def _inverse(target: Tensor, size: int) -> Tensor:
    """For each of ``size`` places the index of ``target`` that names it, or ``len(target)``."""
    source = torch.full((size,), target.numel(), device=target.device)
    source[target] = torch.arange(target.numel(), device=target.device)
    return source


def _spread(x: Tensor, moves: Moves) -> Tensor:
    """Rows moved to their targets, zeros elsewhere."""
    return torch.cat([x, x.new_zeros(1, x.shape[1])]).index_select(0, moves.source)


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
