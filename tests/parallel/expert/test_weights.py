"""A loan of one rank to itself: which weights go out in which order, and to whom their gradients come home."""

import pytest
import torch
from torch import Tensor

from model.seams import ExpertWeights
from parallel.expert.planner import ExpertPart, Pieces
from parallel.expert.weights import Loan, borrow, refetch
from parallel.mesh import Axis

HOME, LENT = 4, (0, 2)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights(number: int, *, seed: int, dtype: torch.dtype = torch.float32) -> ExpertWeights:
    shapes = ((3, 5), (3, 5), (5, 3))
    return ExpertWeights(*(random(number, *shape, seed=seed + i, dtype=dtype) for i, shape in enumerate(shapes)))


def loan(home: ExpertWeights) -> Loan:
    nothing = torch.zeros(0, dtype=torch.int64)
    pieces = Pieces(*([nothing] * len(Pieces._fields)))
    part = ExpertPart((0,), (0,), torch.zeros(1, 2 * HOME, dtype=torch.int64), pieces, LENT, (LENT,))
    return Loan(Axis(), part, home)


def test_borrowed_weights_are_the_lent_experts_as_they_are() -> None:
    home = weights(HOME, seed=0)
    lent = loan(home)
    lent.start()
    for got, whole in zip(lent.borrowed(), home, strict=True):
        assert torch.equal(got, whole[list(LENT)])
    lent.release()
    with pytest.raises(AssertionError, match="before they were lent"):
        lent.borrowed()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_gradients_come_home_to_the_experts_that_were_lent(dtype: torch.dtype) -> None:
    gradients = weights(len(LENT), seed=7, dtype=dtype)
    home = loan(weights(HOME, seed=0, dtype=dtype)).return_gradients(gradients)
    for got, given in zip(home, gradients, strict=True):
        assert got.dtype == dtype
        assert torch.equal(got[list(LENT)], given)
        assert not got[[1, 3]].any()


def test_a_pass_forgets_the_weights_and_backward_fetches_them_again() -> None:
    home = weights(HOME, seed=0)
    for weight in home:
        weight.requires_grad_()
    lent = loan(home)
    lent.start()
    rows = random(2, 5, seed=3).requires_grad_()
    on_their_way, borrowed = borrow(rows, lent)
    upstream = [torch.full_like(x, i + 1.0) for i, x in enumerate(borrowed)]
    total = refetch(on_their_way, lent).sum() + sum((x * u).sum() for x, u in zip(borrowed, upstream))
    with pytest.raises(AssertionError, match="before they were lent"):
        lent.borrowed()
    total.backward()
    assert torch.equal(rows.grad, torch.ones_like(rows))
    for weight, value in zip(home, (1.0, 2.0, 3.0)):
        assert weight.grad[:, 0, 0].tolist() == [value, 0.0, value, 0.0]
