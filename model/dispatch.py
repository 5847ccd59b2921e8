"""Tokens to experts and back on one rank: rows sorted by expert and padded, then summed by token.

    tokens --sort by expert, pad--> rows by segment --grouped product--> rows --weighted sum by token--> tokens

Shapes: T tokens, L width, E experts, K choices, R rows (T * K), P padded rows, S segments.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.precision import compute_dtype
from model.router import Routing
from model.seams import ExpertWeights, Received

# Segments are padded with zero rows to a multiple of this. Matrix-product libraries compute the last few rows
# of a product in another order, so without it a token's expert output would depend, in its last bits, on how
# many other tokens (of other documents) chose the same expert.
SEGMENT_ALIGNMENT = 16


class LocalPlan(NamedTuple):
    """The token of each padded row, the padded row of each (token, choice), and where segments end (int32)."""

    source_P: Tensor
    slot_R: Tensor
    ends_S: Tensor


class LocalDispatch(NamedTuple):
    """Rows at hand, and where each (token, choice) stands among them: ``slot_TK`` int64."""

    received: Received
    slot_TK: Tensor


class LocalDispatcher:
    """`TokenDispatcher` on one rank: sort the (token, choice) rows by expert, and back.

    The number of rows depends on the routing, so the counts come to the host: one synchronisation a layer.
    """

    def dispatch(self, x_TL: Tensor, routing: Routing, weights: ExpertWeights) -> LocalDispatch:
        experts = weights.gate.shape[0]
        plan = routing.decisions.once(LocalPlan, lambda: self._plan(routing.expert_TK, experts=experts))
        slot_TK = plan.slot_R.view(routing.expert_TK.shape)
        rows_RL = _Expand.apply(x_TL, plan.source_P, slot_TK)
        return LocalDispatch(Received(rows_RL, plan.ends_S, weights), slot_TK)

    def _plan(self, expert_TK: Tensor, *, experts: int) -> LocalPlan:
        expert_R = expert_TK.flatten()
        count_E = torch.bincount(expert_R, minlength=experts)
        padded_E = (count_E + SEGMENT_ALIGNMENT - 1) // SEGMENT_ALIGNMENT * SEGMENT_ALIGNMENT
        ends_E = padded_E.cumsum(0)
        shift_E = (ends_E - padded_E) - (count_E.cumsum(0) - count_E)
        order_R = torch.argsort(expert_R, stable=True)
        slot_R = torch.empty_like(order_R)
        slot_R[order_R] = torch.arange(order_R.numel(), device=order_R.device) + shift_E[expert_R[order_R]]
        tokens, choices = expert_TK.shape
        # Padding slots read row ``tokens``, a row of zeros.
        source_P = torch.full((int(ends_E[-1]),), tokens, device=order_R.device)
        source_P[slot_R] = torch.arange(order_R.numel(), device=order_R.device) // choices
        return LocalPlan(source_P, slot_R, ends_E.to(torch.int32))

    def receive(self, handle: LocalDispatch) -> tuple[Received]:
        return (handle.received,)

    def combine(self, rows_RL: Tensor, routing: Routing, handle: LocalDispatch) -> Tensor:
        return combine_rows(rows_RL, routing.weight_TK, handle.slot_TK)


def combine_rows(rows_PL: Tensor, weight_TK: Tensor, slot_TK: Tensor) -> Tensor:
    """``sum_k weight[t, k] * rows[slot[t, k]]``, [T, L] in the rows' dtype, summed in fp32 in the order of k.

    Each row is read by at most one (token, choice).
    """
    return _Combine.apply(rows_PL, weight_TK, slot_TK)


class _Expand(torch.autograd.Function):
    """Row s is x[source_P[s]], or zeros where the source is T; backward sums a token's rows in choice order."""

    @staticmethod
    def forward(ctx: Any, x_TL: Tensor, source_P: Tensor, slot_TK: Tensor) -> Tensor:
        ctx.save_for_backward(slot_TK)
        return torch.cat([x_TL, x_TL.new_zeros(1, x_TL.shape[1])]).index_select(0, source_P)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PL: Tensor) -> tuple[Tensor, None, None]:
        (slot_TK,) = ctx.saved_tensors
        # One choice at a time, as in `_Combine`: gathering all of them at once took three times as long.
        grad_TL = grad_PL.new_zeros(slot_TK.shape[0], grad_PL.shape[1], dtype=compute_dtype(grad_PL.dtype))
        for slot_T in slot_TK.unbind(1):
            grad_TL += grad_PL.index_select(0, slot_T)
        return grad_TL.to(grad_PL.dtype), None, None


class _Combine(torch.autograd.Function):
    """One choice at a time, so that no [T, K, L] copy of the rows ever exists; backward likewise."""

    @staticmethod
    def forward(ctx: Any, rows_PL: Tensor, weight_TK: Tensor, slot_TK: Tensor) -> Tensor:
        ctx.save_for_backward(rows_PL, weight_TK, slot_TK)
        dtype = compute_dtype(rows_PL.dtype)
        out_TL = rows_PL.new_zeros(slot_TK.shape[0], rows_PL.shape[1], dtype=dtype)
        for slot_T, weight_T in zip(slot_TK.unbind(1), weight_TK.to(dtype).unbind(1)):
            out_TL.addcmul_(rows_PL.index_select(0, slot_T).to(dtype), weight_T.unsqueeze(1))
        return out_TL.to(rows_PL.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TL: Tensor) -> tuple[Tensor, Tensor, None]:
        rows_PL, weight_TK, slot_TK = ctx.saved_tensors
        dtype = compute_dtype(rows_PL.dtype)
        grad_TL = grad_TL.to(dtype)
        grad_PL = torch.zeros_like(rows_PL)
        grad_weight_TK = torch.empty_like(weight_TK)
        for k, (slot_T, weight_T) in enumerate(zip(slot_TK.unbind(1), weight_TK.to(dtype).unbind(1))):
            grad_PL.index_copy_(0, slot_T, (grad_TL * weight_T.unsqueeze(1)).to(rows_PL.dtype))
            grad_weight_TK[:, k] = torch.linalg.vecdot(rows_PL.index_select(0, slot_T).to(dtype), grad_TL)
        return grad_PL, grad_weight_TK, None
