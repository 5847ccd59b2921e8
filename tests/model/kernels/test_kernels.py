"""Each fast form against its reference, outputs and gradients (KDA has a file of its own)."""

import pytest
import torch
from torch import Tensor

from model.kernels.causal_conv import causal_conv
from model.kernels.causal_conv_reference import causal_conv_reference
from model.kernels.grouped_linear import grouped_linear
from model.kernels.grouped_linear_reference import grouped_linear_reference
from model.kernels.residual_mix import residual_mix
from model.kernels.residual_mix_reference import residual_mix_reference
from model.kernels.situ_glu import situ_glu
from model.kernels.situ_glu_reference import situ_glu_reference

FP64 = torch.float64


def assert_same(fast, reference, inputs: list[Tensor], *, tolerance: float = 1e-11) -> None:
    results = []
    for function in (fast, reference):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        y = function(*leaves)
        cotangent = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(5))
        results.append([y, *torch.autograd.grad((y * cotangent).sum(), leaves)])
    torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = FP64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def test_situ_glu() -> None:
    assert_same(
        lambda g, u: situ_glu(g, u, beta=4.0, linear_beta=25.0),
        lambda g, u: situ_glu_reference(g, u, beta=4.0, linear_beta=25.0),
        [5 * randn(3, 40), 30 * randn(3, 40, seed=1)],
    )


def test_situ_glu_is_bounded_by_the_product_of_its_betas() -> None:
    y = situ_glu(torch.tensor([1e4, -1e4, 1e4]), torch.tensor([1e4, 1e4, -1e4]), beta=4.0, linear_beta=25.0)
    torch.testing.assert_close(y, torch.tensor([100.0, 0.0, -100.0]))


@pytest.mark.parametrize("sources", [1, 2, 9])
def test_residual_mix(sources: int) -> None:
    inputs = [randn(2, 7, 16, seed=i) for i in range(sources)]
    assert_same(
        lambda query, norm, *v: residual_mix(list(v), query, norm, eps=1e-5),
        lambda query, norm, *v: residual_mix_reference(v, query, norm, eps=1e-5),
        [randn(16, seed=50), randn(16, seed=51), *inputs],
    )


def test_residual_mix_of_bf16_sources_is_computed_in_fp32() -> None:
    sources = [randn(5, 32, seed=i).bfloat16() for i in range(4)]
    query, norm = randn(32, seed=9).bfloat16(), randn(32, seed=8).bfloat16()
    wide = residual_mix([x.double() for x in sources], query.double(), norm.double(), eps=1e-5)
    torch.testing.assert_close(residual_mix(sources, query, norm, eps=1e-5).double(), wide, rtol=2**-8, atol=1e-3)


def test_residual_mix_passes_gradcheck() -> None:
    query, norm, a, b = (randn(6, seed=1), randn(6, seed=2), randn(3, 6, seed=3), randn(3, 6, seed=4))
    inputs = [x.requires_grad_() for x in (query, norm, a, b)]
    assert torch.autograd.gradcheck(lambda q, n, x, y: residual_mix([x, y], q, n, eps=1e-5), inputs)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_causal_conv(width: int) -> None:
    position = torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
    assert_same(
        lambda x, w: causal_conv(x, w, position_BT=position),
        lambda x, w: causal_conv_reference(x, w, position_BT=position),
        [randn(2, 10, 6), randn(6, width, seed=1)],
    )


def test_causal_conv_with_a_tail_continues_the_sequence() -> None:
    x, weight = randn(2, 12, 6), randn(6, 4, seed=1)
    position = torch.arange(12).expand(2, 12)
    whole = causal_conv(x, weight, position_BT=position)
    rest = causal_conv(x[:, 5:], weight, position_BT=position[:, 5:], tail=x[:, 2:5])
    torch.testing.assert_close(rest, whole[:, 5:], rtol=1e-13, atol=1e-13)


def test_causal_conv_lets_no_nan_of_the_document_before_pass() -> None:
    x = randn(1, 6, 3)
    x[:, :2] = torch.nan
    y = causal_conv(x, randn(3, 4, seed=1), position_BT=torch.tensor([[0, 1, 0, 1, 2, 3]]))
    assert bool(torch.isfinite(y[:, 2:]).all())


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(FP64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)],
    ids=["fp64", "fp32", "bf16"],
)
@pytest.mark.parametrize("ends", [[16, 16, 48, 80], [0, 0, 0, 80], [80, 80, 80, 80]], ids=str)
def test_grouped_linear(dtype: torch.dtype, tolerance: float, ends: list[int]) -> None:
    offsets = torch.tensor(ends, dtype=torch.int32)
    assert_same(
        lambda rows, weight: grouped_linear(rows, weight, offsets),
        lambda rows, weight: grouped_linear_reference(rows, weight, offsets),
        [randn(80, 32, dtype=dtype), randn(4, 24, 32, seed=1, dtype=dtype)],
        tolerance=tolerance,
    )
