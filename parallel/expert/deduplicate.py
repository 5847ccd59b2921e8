"""One payload per token and rank: where a token has several experts on a rank, it travels there once.

    tokens --one row per (token, rank)--> payloads --expanded--> rows by segment -> grouped product
    tokens <--sum over ranks------------- payloads <--weighted sum of each payload's rows--'

Against one row per (token, choice) this saves what the experts of one token share: of K choices over R ranks about
R (1 - (1 - 1/R)^K) rows are left, 7 of 16 at R = 8, 14 of 16 at R = 64. The price: a receiver can no longer derive from
the counts what each row is, so each row's payload (int32) and routing weight (fp32) travel too, one more exchange of
sizes comes to the host, and a rank's part of a token's sum is rounded to the rows' dtype before it travels.

Shapes: as in `parallel.expert.dispatch`; U payloads.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.precision import compute_dtype
from model.router import Routing
from model.seams import ExpertWeights, Received
from parallel.collectives import all_to_all, all_to_all_plain
from parallel.expert.dispatch import AllToAllDispatcher, Planned, place_rows
from parallel.expert.weights import Loan, refetch

Spans = list[tuple[int, int]]
"""Runs of rows in each of which no index comes twice, so that adding one after the other has one order."""


class Payloads(NamedTuple):
    """What travels once.

    send, receive: payloads to and from each rank.
    token_U: token of each payload that leaves, ascending within a rank.
    leaving: where each rank's payloads stand among those that leave.
    payload_P: arriving payload of each padded row; their number where there is none.
    segments: the rows of each segment among the padded ones, without padding.
    """

    send: list[int]
    receive: list[int]
    token_U: Tensor
    leaving: Spans
    payload_P: Tensor
    segments: Spans


class Deduplicated(NamedTuple):
    """What `DeduplicatingDispatcher` remembers from `dispatch` to `combine`."""

    planned: Planned
    payloads: Payloads
    weights: ExpertWeights
    arrived_UL: Tensor
    weight_P: Tensor
    loan: Loan | None


class DeduplicatingDispatcher(AllToAllDispatcher):
    """`AllToAllDispatcher` whose tokens travel to a rank once, and come back from it as one sum."""

    def dispatch(self, x_TL: Tensor, routing: Routing, weights: ExpertWeights) -> Deduplicated:  # type: ignore[override]
        planned, loan = self.begin(routing, weights)
        tokens = x_TL.shape[0]
        payloads = routing.decisions.once(Payloads, lambda: self._payloads(planned, routing.expert_TK))
        leaving_UL = _TokensToPayloads.apply(x_TL, payloads.token_U, payloads.leaving)
        arrived_UL = all_to_all(leaving_UL, self.axis, send=payloads.send, receive=payloads.receive)
        weight_R1 = routing.weight_TK.view(tokens * routing.weight_TK.shape[1], 1).index_select(0, planned.sort.source)
        part = planned.part
        weight_N1 = all_to_all(weight_R1, self.axis, send=part.send, receive=part.receive)
        weight_P = place_rows(weight_N1, planned.place).squeeze(1)
        return Deduplicated(planned, payloads, weights, arrived_UL, weight_P, loan)

    def _payloads(self, planned: Planned, expert_TK: Tensor) -> Payloads:
        """Collective."""
        ranks, part, device = self.axis.size, planned.part, expert_TK.device
        tokens, choices = expert_TK.shape
        send_R = torch.tensor(part.send, device=device)
        to_R = torch.arange(ranks, device=device).repeat_interleave(send_R)
        token_R = planned.sort.source // max(1, choices)
        pair_U, place_R = torch.unique(to_R * max(1, tokens) + token_R, return_inverse=True)
        count = torch.bincount(pair_U // max(1, tokens), minlength=ranks)
        ones = [1] * ranks
        sizes = torch.stack([count, all_to_all_plain(count, self.axis, send=ones, receive=ones)])
        send, receive = sizes.tolist()
        first = count.cumsum(0) - count
        index_R = (place_R - first[to_R]).to(torch.int32)
        index_N = all_to_all_plain(index_R, self.axis, send=part.send, receive=part.receive)
        begin = torch.tensor(receive).cumsum(0) - torch.tensor(receive)
        payload_N = index_N.long() + begin.repeat_interleave(torch.tensor(part.receive)).to(device)
        ends = planned.ends_S.tolist()
        payload_P = torch.full((ends[-1],), sum(receive), device=device)
        payload_P[planned.place.target] = payload_N
        starts = [0, *ends[:-1]]
        rows = part.arrivals_RS.sum(dim=0).tolist()
        return Payloads(
            send,
            receive,
            token_U=pair_U % max(1, tokens),
            leaving=[(a, a + n) for a, n in zip(first.tolist(), send)],
            payload_P=payload_P,
            segments=[(a, a + n) for a, n in zip(starts, rows)],
        )

    def receive(self, handle: Deduplicated) -> tuple[Received, ...]:  # type: ignore[override]
        rows_PL = _PayloadsToRows.apply(handle.arrived_UL, handle.payloads.payload_P, handle.payloads.segments)
        return self.split(rows_PL, handle.planned, handle.weights, handle.loan)

    def combine(self, rows_RL: Tensor, routing: Routing, handle: Deduplicated) -> Tensor:  # type: ignore[override]
        """As `TokenDispatcher.combine`; ``rows_RL`` are the padded rows of `receive`, with results."""
        payloads = handle.payloads
        sums_UL = _RowsToPayloads.apply(
            rows_RL, handle.weight_P, payloads.payload_P, payloads.segments, sum(payloads.receive)
        )
        back_UL = all_to_all(sums_UL, self.axis, send=payloads.receive, receive=payloads.send)
        if handle.loan is not None:
            back_UL = refetch(back_UL, handle.loan)
        return _PayloadsToTokens.apply(back_UL, payloads.token_U, payloads.leaving, routing.expert_TK.shape[0])


def _add(rows: Tensor, index: Tensor, spans: Spans, size: int) -> Tensor:
    """[size, L] sums in fp32 at least: ``total[index[i]] += rows[i]``, one span after the other."""
    total = rows.new_zeros(size, rows.shape[1], dtype=compute_dtype(rows.dtype))
    for start, stop in spans:
        total.index_add_(0, index[start:stop], rows[start:stop].to(total.dtype))
    return total


def _look_up(rows: Tensor, index: Tensor) -> Tensor:
    """``rows[index]``; an index past the end reads zeros."""
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])]).index_select(0, index)


class _TokensToPayloads(torch.autograd.Function):
    """A row for each payload; backward sums a token's payloads in the order of their ranks."""

    @staticmethod
    def forward(ctx: Any, x_TL: Tensor, token_U: Tensor, leaving: Spans) -> Tensor:
        ctx.token_U, ctx.leaving, ctx.tokens = token_U, leaving, x_TL.shape[0]
        return x_TL.index_select(0, token_U)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_UL: Tensor) -> tuple[Tensor, None, None]:
        return _add(grad_UL, ctx.token_U, ctx.leaving, ctx.tokens).to(grad_UL.dtype), None, None


class _PayloadsToTokens(torch.autograd.Function):
    """The adjoint of `_TokensToPayloads`."""

    @staticmethod
    def forward(ctx: Any, sums_UL: Tensor, token_U: Tensor, leaving: Spans, tokens: int) -> Tensor:
        ctx.token_U = token_U
        return _add(sums_UL, token_U, leaving, tokens).to(sums_UL.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TL: Tensor) -> tuple[Tensor, None, None, None]:
        return grad_TL.index_select(0, ctx.token_U), None, None, None


class _PayloadsToRows(torch.autograd.Function):
    """Each padded row from its payload; backward sums a payload's rows in the order of their segments."""

    @staticmethod
    def forward(ctx: Any, arrived_UL: Tensor, payload_P: Tensor, segments: Spans) -> Tensor:
        ctx.payload_P, ctx.segments, ctx.payloads = payload_P, segments, arrived_UL.shape[0]
        return _look_up(arrived_UL, payload_P)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PL: Tensor) -> tuple[Tensor, None, None]:
        return _add(grad_PL, ctx.payload_P, ctx.segments, ctx.payloads).to(grad_PL.dtype), None, None


class _RowsToPayloads(torch.autograd.Function):
    """Weighted sum of each payload's rows, in the order of their segments."""

    @staticmethod
    def forward(
        ctx: Any, rows_PL: Tensor, weight_P: Tensor, payload_P: Tensor, segments: Spans, payloads: int
    ) -> Tensor:
        ctx.save_for_backward(rows_PL, weight_P)
        ctx.payload_P = payload_P
        dtype = compute_dtype(rows_PL.dtype)
        weighted = rows_PL.to(dtype) * weight_P.to(dtype).unsqueeze(1)
        return _add(weighted, payload_P, segments, payloads).to(rows_PL.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_UL: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        rows_PL, weight_P = ctx.saved_tensors
        dtype = compute_dtype(rows_PL.dtype)
        grad_PL = _look_up(grad_UL, ctx.payload_P).to(dtype)
        grad_rows = (grad_PL * weight_P.to(dtype).unsqueeze(1)).to(rows_PL.dtype)
        grad_weight = torch.linalg.vecdot(rows_PL.to(dtype), grad_PL).to(weight_P.dtype)
        return grad_rows, grad_weight, None, None, None
