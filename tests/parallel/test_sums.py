"""As `tests.model.test_sums`, for what moves between ranks."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from model.layers import Embedding
from parallel.expert.deduplicate import _add, _PayloadsToTokens, _TokensToPayloads
from parallel.expert.dispatch import Moves, _Expand
from parallel.mesh import Axis
from parallel.pipeline.boundary import BankRows
from parallel.tensor import Region, VocabEmbedding
from tests.model.test_sums import BF16, COUNT, exact, gradient, ones, skewed


def vocabulary(rank: int = 0) -> VocabEmbedding:
    """48 of 96 rows; no token is cut and nothing is sent."""
    region = Region(Axis())
    embedding = VocabEmbedding(Embedding(48, 8, padding_id=None).to(BF16), region)
    embedding.first = rank * 48
    with torch.no_grad():
        embedding.weight.fill_(1.0)
    return embedding


def vocabulary_parallel() -> Tensor:
    part = vocabulary()
    # Every second token is another rank's.
    ids = torch.tensor([5, 60]).repeat(COUNT).unsqueeze(0)
    return gradient(part(ids), part.weight)[5]


def expand() -> Tensor:
    x, order = ones(1, 2, grad=True), torch.arange(COUNT)
    return gradient(_Expand.apply(x, Moves(order, order)), x)


def deduplicated() -> Tensor:
    spans = [(i, i + 1) for i in range(COUNT)]
    return _add(ones(COUNT, 2), torch.zeros(COUNT, dtype=torch.int64), spans, 1)


def tokens_to_payloads() -> Tensor:
    x, spans = ones(1, 2, grad=True), [(i, i + 1) for i in range(COUNT)]
    return gradient(_TokensToPayloads.apply(x, torch.zeros(COUNT, dtype=torch.int64), spans), x)


def payloads_to_tokens() -> Tensor:
    spans = [(i, i + 1) for i in range(COUNT)]
    return _PayloadsToTokens.apply(ones(COUNT, 2), torch.zeros(COUNT, dtype=torch.int64), spans, 1)


def bank() -> Tensor:
    rows = BankRows("test")
    for _ in range(COUNT):
        rows.add_gradient(3, ones(2))
    total = rows.take_gradient(3)
    assert total.dtype == BF16
    return total


SUMS = [vocabulary_parallel, expand, deduplicated, tokens_to_payloads, payloads_to_tokens, bank]


@pytest.mark.parametrize("total", SUMS, ids=lambda total: total.__name__)
def test_four_thousand_ones(total: Callable[[], Tensor]) -> None:
    found = total().double()
    assert torch.equal(found, torch.full_like(found, COUNT))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_part_of_the_vocabulary_over_16k_tokens_is_rounded_once(rank: int) -> None:
    ids, part = skewed(2**14, 96), vocabulary(rank)
    grad = torch.rand(1, 2**14, 8, generator=torch.Generator().manual_seed(1)).to(BF16)
    (found,) = torch.autograd.grad(part(ids), part.weight, grad_outputs=grad)
    expected = exact(ids, grad, 96)[48 * rank : 48 * (rank + 1)]
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=0)


def test_one_gradient_of_a_bank_row_leaves_as_it_came() -> None:
    rows, value = BankRows("test"), ones(2)
    rows.add_gradient(0, value)
    assert rows.take_gradient(0) is value
    for dtype in (torch.float32, torch.float64):
        a, b = torch.rand(5, dtype=dtype), torch.rand(5, dtype=dtype)
        rows.add_gradient(0, a)
        rows.add_gradient(0, b)
        assert torch.equal(rows.take_gradient(0), a + b)
