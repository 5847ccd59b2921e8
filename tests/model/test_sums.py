"""Sums over tokens, rows and choices of bf16 numbers: made in fp32, rounded once. In bf16, 4,096 ones make 256."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import model.layers
from model.dispatch import _Expand, combine_rows
from model.kernels.causal_conv import causal_conv
from model.kernels.grouped_linear import grouped_weight_gradient
from model.kernels.residual_mix import residual_mix
from model.layers import Embedding, Linear, RMSNorm, look_up

BF16 = torch.bfloat16
COUNT = 4096


def ones(*shape: int, grad: bool = False) -> Tensor:
    return torch.ones(*shape, dtype=BF16, requires_grad=grad)


def gradient(value: Tensor, of: Tensor) -> Tensor:
    """Of the sum of ``value``: a one for every element."""
    (found,) = torch.autograd.grad(value, of, grad_outputs=torch.ones_like(value))
    return found


def embedding() -> Tensor:
    weight = ones(3, 2, grad=True)
    return gradient(look_up(torch.ones(1, COUNT, dtype=torch.int64), weight), weight)[1]


def linear() -> Tensor:
    module = Linear(2, 2).to(BF16)
    return gradient(module(ones(1, COUNT, 2)), module.weight)


def norm() -> Tensor:
    module = RMSNorm(2, eps=0.0).to(BF16)
    with torch.no_grad():
        module.weight.fill_(1.0)
    return gradient(module(ones(1, COUNT, 2)), module.weight)


def convolution() -> Tensor:
    # An input so large that SiLU is the identity; the token before the first is none.
    weight = torch.full((2, 1), 64.0, requires_grad=True)
    position = torch.arange(COUNT).unsqueeze(0)
    return gradient(causal_conv(ones(1, COUNT, 2), weight, position_BT=position), weight)


def mix() -> Tensor:
    query, scale = torch.zeros(2, dtype=BF16, requires_grad=True), ones(2)
    # Both sources count half; the key's gradient is half of their difference, 2 - 0, along the gradient: 1 each.
    sources = [torch.tensor([1.0, 1.0], dtype=BF16).expand(COUNT, 2), torch.tensor([-1.0, -1.0], dtype=BF16)]
    rows = [sources[0].contiguous(), sources[1].expand(COUNT, 2).contiguous()]
    found = gradient(residual_mix(rows, query, scale, eps=0.0), query)
    return found / 2


def expand() -> Tensor:
    x = ones(1, 2, grad=True)
    slots = torch.arange(COUNT)
    return gradient(_Expand.apply(x, torch.zeros_like(slots), slots.unsqueeze(0)), x)


def combine() -> Tensor:
    return combine_rows(ones(COUNT, 2), torch.ones(1, COUNT), torch.arange(COUNT).unsqueeze(0))


def experts() -> Tensor:
    ends = torch.tensor([16, COUNT + 16], dtype=torch.int32)
    return grouped_weight_gradient(ones(COUNT + 16, 8), ones(COUNT + 16, 8), ends)[1]


SUMS = [embedding, linear, norm, convolution, mix, expand, combine, experts]


@pytest.mark.parametrize("total", SUMS, ids=lambda total: total.__name__)
def test_four_thousand_ones(total: Callable[[], Tensor]) -> None:
    found = total().double()
    assert torch.equal(found, torch.full_like(found, COUNT))


def skewed(tokens: int, vocab: int) -> Tensor:
    """Ids of which half are one and the same."""
    ids = torch.randint(vocab, (1, tokens), generator=torch.Generator().manual_seed(0))
    ids[:, ::2] = 5
    return ids


def exact(ids: Tensor, grad: Tensor, rows: int) -> Tensor:
    return torch.zeros(rows, grad.shape[-1], dtype=torch.float64).index_add_(0, ids.flatten(), grad[0].double())


@pytest.mark.parametrize("elements", [1, 96 * 3, 2**25], ids=["column", "three columns", "whole"])
def test_an_embedding_over_16k_tokens_is_rounded_once(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model.layers, "SUM_ELEMENTS", elements)
    ids = skewed(2**14, 96)
    grad = torch.rand(1, 2**14, 8, generator=torch.Generator().manual_seed(1)).to(BF16)
    module = Embedding(96, 8, padding_id=7).to(BF16)
    (found,) = torch.autograd.grad(module(ids), module.weight, grad_outputs=grad)
    expected = exact(ids, grad, 96)
    expected[7] = 0
    # Half of the distance between neighbouring numbers of 8 bits.
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=0)
    assert found[7].count_nonzero() == 0


@pytest.mark.parametrize("padding", [None, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_wide_embedding_is_torchs_to_the_bit(dtype: torch.dtype, padding: int | None) -> None:
    ids = skewed(2**14, 96)
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(1, 2**14, 8, generator=generator, dtype=dtype)
    weight = torch.randn(96, 8, generator=generator, dtype=dtype, requires_grad=True)
    ours, theirs = look_up(ids, weight, padding_row=padding), F.embedding(ids, weight, padding_idx=padding)
    assert torch.equal(ours, theirs)
    (found,) = torch.autograd.grad(ours, weight, grad_outputs=grad)
    (expected,) = torch.autograd.grad(theirs, weight, grad_outputs=grad)
    assert torch.equal(found, expected)


def test_expanded_rows_over_16k_tokens_are_rounded_once() -> None:
    tokens, choices = 2**14, 16
    slots = torch.randperm(tokens * choices, generator=torch.Generator().manual_seed(0))
    source = torch.empty_like(slots)
    source[slots] = torch.arange(tokens * choices) // choices
    grad = torch.rand(tokens * choices, 4, generator=torch.Generator().manual_seed(1)).to(BF16)
    x = ones(tokens, 4, grad=True)
    (found,) = torch.autograd.grad(_Expand.apply(x, source, slots.view(tokens, choices)), x, grad_outputs=grad)
    expected = grad.double()[slots].view(tokens, choices, 4).sum(dim=1)
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=0)
    rows, weight = grad, torch.rand(tokens, choices, generator=torch.Generator().manual_seed(2))
    combined = combine_rows(rows, weight, slots.view(tokens, choices))
    expected = (grad.double()[slots].view(tokens, choices, 4) * weight.double().unsqueeze(2)).sum(dim=1)
    torch.testing.assert_close(combined.double(), expected, rtol=2**-8 + 2**-20, atol=0)
