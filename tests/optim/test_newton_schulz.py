"""Newton-Schulz: what it computes, that it computes it per matrix, and that scale does not matter."""

import pytest
import torch
from torch import Tensor

from optim.newton_schulz import COEFFICIENTS, default_dtype, orthogonalize

SHAPES = [(8, 8), (4, 12), (12, 4), (1, 5), (5, 1)]


def by_singular_values(x: Tensor, *, steps: int) -> Tensor:
    """The same polynomial applied to singular values: no Gram matrix, no transposition."""
    a, b, c = COEFFICIENTS
    u, s, vh = torch.linalg.svd(x / x.norm(), full_matrices=False)
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u * s @ vh


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("steps", [1, 5])
def test_acts_on_singular_values(shape: tuple[int, int], steps: int) -> None:
    x = torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    got = orthogonalize(x, steps=steps)
    for matrix, result in zip(x, got, strict=True):
        torch.testing.assert_close(result, by_singular_values(matrix, steps=steps), rtol=1e-10, atol=1e-10)


def test_singular_values_end_near_one() -> None:
    x = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0))
    s = torch.linalg.svdvals(orthogonalize(x))
    assert s.max() < 1.25
    assert s.median() > 0.65


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batch_equals_loop(shape: tuple[int, int]) -> None:
    x = torch.randn(7, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    loop = torch.cat([orthogonalize(matrix) for matrix in x.split(1)])
    torch.testing.assert_close(orthogonalize(x), loop, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("exponent", [-120, -100, -40, -33, -20, 40, 120])
def test_a_power_of_two_changes_no_bit(exponent: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(2)).clamp(min=2e-2)
    scaled = x * 2.0**exponent
    assert torch.equal(orthogonalize(x, dtype=dtype), orthogonalize(scaled, dtype=dtype))


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-10, 1e-12, 1e-30, 1e30])
def test_norm_does_not_depend_on_scale(scale: float) -> None:
    x = torch.randn(1, 64, 64, generator=torch.Generator().manual_seed(3))
    norm, scaled = orthogonalize(x).norm().item(), orthogonalize(x * scale).norm().item()
    assert 6.0 < norm < 8.0
    assert scaled == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_zero_matrix_gives_zero_and_disturbs_no_other(dtype: torch.dtype) -> None:
    x = torch.randn(3, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    x[1] = 0
    got = orthogonalize(x, dtype=dtype)
    assert got[1].count_nonzero() == 0
    torch.testing.assert_close(got[[0, 2]], orthogonalize(x[[0, 2]], dtype=dtype))
    assert got[[0, 2]].norm() > 1


def test_default_dtype() -> None:
    assert default_dtype(torch.zeros(1)) == torch.float32
    assert default_dtype(torch.zeros(1, dtype=torch.bfloat16)) == torch.float32
    assert default_dtype(torch.zeros(1, dtype=torch.float64)) == torch.float64
    assert default_dtype(torch.zeros(1, device="meta")) == torch.bfloat16


def test_input_is_left_alone() -> None:
    x = torch.randn(2, 4, 3)
    before = x.clone()
    orthogonalize(x)
    assert torch.equal(x, before)
