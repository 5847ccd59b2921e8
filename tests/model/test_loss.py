"""Chunked cross-entropy against torch's, gradients included."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model.loss import IGNORE_INDEX, chunked_cross_entropy


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_sum_and_gradients_equal_torch(chunk: int) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3, 20, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(50, 16, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 50, (3, 20))
    labels[0, :5] = labels[2, 19] = IGNORE_INDEX
    loss = chunked_cross_entropy(hidden, weight, labels, chunk=chunk)
    found = torch.autograd.grad(loss * 0.3, [hidden, weight])
    expected_loss = F.cross_entropy(
        F.linear(hidden, weight).flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    expected = torch.autograd.grad(expected_loss * 0.3, [hidden, weight])
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


def test_no_labelled_token_is_zero_with_zero_gradients() -> None:
    hidden = torch.randn(6, 4, requires_grad=True)
    weight = torch.randn(9, 4, requires_grad=True)
    loss = chunked_cross_entropy(hidden, weight, torch.full((6,), IGNORE_INDEX))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert not hidden.grad.any()
    assert not weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e38], ids=str)
def test_what_an_unlabelled_token_holds_reaches_neither_loss_nor_gradient(poison: float, dtype: torch.dtype) -> None:
    """1e38 is finite, and in bf16 its logits are not."""

    def run(value: float) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(3)
        hidden, weight = (torch.randn(n, 4, generator=generator).to(dtype) for n in (9, 5))
        labels = torch.randint(0, 5, (9,), generator=generator)
        labels[[0, 4, 8]] = IGNORE_INDEX
        hidden[[0, 4]] = value
        hidden[8, 2] = value
        hidden.requires_grad_()
        weight.requires_grad_()
        loss = chunked_cross_entropy(hidden, weight, labels, chunk=4)
        (loss / 6).backward()
        return loss.detach(), hidden.grad, weight.grad

    for found, expected in zip(run(poison), run(0.5), strict=True):
        assert bool(expected.isfinite().all())
        assert torch.equal(found, expected)


def test_evaluation_computes_no_gradient() -> None:
    hidden, weight = torch.randn(8, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    with torch.no_grad():
        assert not chunked_cross_entropy(hidden, weight, torch.zeros(8, dtype=torch.int64)).requires_grad


def test_step_divided_by_the_global_count_does_not_depend_on_the_cut() -> None:
    """Losses {4} and {1, 1, 1} make 1.75, not the mean of means 2.5."""
    torch.manual_seed(1)
    hidden = torch.randn(139, 8, dtype=torch.float64)
    weight = torch.randn(20, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 20, (139,))
    (whole,) = torch.autograd.grad(chunked_cross_entropy(hidden, weight, labels) / 139, weight)
    parts = [
        torch.autograd.grad(chunked_cross_entropy(h, weight, y) / 139, weight)[0]
        for h, y in zip(hidden.split([1, 3, 128, 7]), labels.split([1, 3, 128, 7]))
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-11, atol=1e-13)
