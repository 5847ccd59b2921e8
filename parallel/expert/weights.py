"""Copies of hot experts, lent for one pass: weights go out, their gradients come home.

    forward    home weights --one row per loan--> borrowers        while tokens move and shared experts compute
    backward   home weights --again, same plan--> borrowers        while the results' gradients move
               home gradient <--fp32, added by borrowing rank--    before data parallel sees it

A borrowed expert is no parameter: it is in no optimizer, checkpoint or norm. Between forward and backward it is not
even in memory, for a pass of many layers would hold a second model: the product with borrowed weights keeps its rows
alone, and reads the weights `again` in backward (`model.products.Product`), when they have been fetched anew. Every
rank enters every exchange of a plan with loans, whether it lends or borrows or neither; a plan without loans moves
nothing, and all ranks know that.

A loan travels as one row: gate, up and down of an expert, flat and joined. A narrower format of weights needs another
packing here and nothing else.

Shapes: M home experts, B borrowed experts, W numbers of one expert.
"""

from typing import Any

import torch
from torch import Tensor

from model.seams import ExpertWeights
from parallel.collectives import Pending, all_to_all_start
from parallel.expert.planner import ExpertPart
from parallel.mesh import Axis


class Loan:
    """What one rank lends and borrows in one pass of one layer.

    Args:
        axis: expert-parallel ranks.
        part: this rank's part of the plan.
        weights: of its home experts; lent as they are whenever `start` is called.
    """

    def __init__(self, axis: Axis, part: ExpertPart, weights: ExpertWeights) -> None:
        self.axis, self.part, self.home = axis, part, weights
        first = axis.rank * weights.gate.shape[0]
        self.lent = [[expert - first for expert in experts] for experts in part.lent]
        self._send = [len(experts) for experts in part.lent]
        homes = torch.tensor(part.borrowed, dtype=torch.int64) // weights.gate.shape[0]
        self._receive = torch.bincount(homes, minlength=axis.size).tolist()
        self._pending: Pending | None = None
        self._pool: Tensor | None = None

    @torch.no_grad()
    def start(self) -> None:
        """Begin to exchange the weights. Collective."""
        lent = torch.tensor(
            [expert for experts in self.lent for expert in experts], dtype=torch.int64, device=self.home.gate.device
        )
        packed = torch.cat([weight.detach().index_select(0, lent).flatten(1) for weight in self.home], dim=1)
        self._pending = all_to_all_start(packed, self.axis, send=self._send, receive=self._receive, name="lend_weights")

    def borrowed(self) -> ExpertWeights:
        """The borrowed experts, ascending; waits for them."""
        return self._unpack(self._arrived())

    def release(self) -> None:
        """Forget the weights that were borrowed and those on their way."""
        if self._pending is not None:
            # On a rank that borrows nothing, nobody waited: what it lent may still be read.
            self._pending.wait()
        self._pending, self._pool = None, None

    @torch.no_grad()
    def return_gradients(self, gradients: ExpertWeights) -> ExpertWeights:
        """Send borrowed experts' gradients home, in fp32 at least. Collective.

        Args:
            gradients: of the borrowed experts, [B, ...] each.

        Returns:
            This rank's home experts' gradients from all borrowers, added in ascending order of their rank, [M, ...]
            each, in the weights' dtype.
        """
        wide = torch.promote_types(self.home.gate.dtype, torch.float32)
        packed = torch.cat([gradient.to(wide).flatten(1) for gradient in gradients], dim=1)
        back = all_to_all_start(
            packed, self.axis, send=self._receive, receive=self._send, name="return_gradients"
        ).wait()
        total = back.new_zeros(self.home.gate.shape[0], back.shape[1])
        for experts, rows in zip(self.lent, back.split(self._send)):
            # An expert is lent to a rank at most once, so no two rows of one addition meet.
            total.index_add_(0, torch.tensor(experts, dtype=torch.int64, device=back.device), rows)
        return ExpertWeights(*(part.to(self.home.gate.dtype) for part in self._unpack(total)))

    def _arrived(self) -> Tensor:
        """[B, W] borrowed weights, packed."""
        if self._pending is not None:
            self._pool, self._pending = self._pending.wait(), None
        assert self._pool is not None, "borrowed experts are used before they were lent for this pass"
        return self._pool

    def _unpack(self, packed: Tensor) -> ExpertWeights:
        sizes = [weight[0].numel() for weight in self.home]
        return ExpertWeights(
            *(part.unflatten(1, weight.shape[1:]) for part, weight in zip(packed.split(sizes, dim=1), self.home))
        )


def borrow(rows: Tensor, loan: Loan) -> tuple[Tensor, ExpertWeights]:
    """``rows`` on their way to the product, and the borrowed experts for it, whose gradients go home.

    The rows are there so that backward comes by here on every rank, whatever it borrows.
    """
    rows, *borrowed = _Borrow.apply(rows, *loan.home, loan)
    return rows, ExpertWeights(*borrowed)


def refetch(rows: Tensor, loan: Loan) -> Tensor:
    """``rows`` on their way from the product; on the way back, their gradients start the loan again."""
    return _Refetch.apply(rows, loan)


class _Borrow(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, gate: Tensor, up: Tensor, down: Tensor, loan: Loan
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.loan = loan
        return (rows.view_as(rows), *loan.borrowed())

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        loan = ctx.loan
        home = loan.return_gradients(ExpertWeights(*gradients))
        loan.release()
        return (grad_rows, *home, None)


class _Refetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, loan: Loan) -> Tensor:
        ctx.loan = loan
        loan.release()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.loan.start()
        return grad, None
