"""The verdict on a gradient: norm, finiteness, clip."""

import math

import pytest
import torch
from torch import Tensor, nn

from parallel.data import DataParallel
from parallel.grads import GradientReport, finalize
from parallel.mesh import Axis


def with_gradients(gradients: dict[str, Tensor]) -> DataParallel:
    params = {name: nn.Parameter(torch.zeros_like(g)) for name, g in gradients.items()}
    dp = DataParallel(params, axis=Axis())
    for name, param in params.items():
        (param * gradients[name]).sum().backward()
    dp.finish()
    return dp


@pytest.mark.parametrize(
    ("clip_norm", "clip"), [(1.0, 0.2), (5.0, 1.0), (10.0, 1.0), (0.0, 1.0)], ids=["above", "at", "below", "off"]
)
def test_norm_and_clip(clip_norm: float, clip: float) -> None:
    dp = with_gradients({"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])})
    assert finalize(dp, clip_norm=clip_norm, world=Axis()) == GradientReport(norm=5.0, finite=True, clip=clip)
    assert dp.owned_gradients()["a"].tolist() == [3.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_is_seen(bad: float) -> None:
    report = finalize(
        with_gradients({"a": torch.ones(100), "b": torch.tensor([1.0, bad])}), clip_norm=1.0, world=Axis()
    )
    assert (report.finite, report.clip) == (False, 0.0)
    assert not math.isfinite(report.norm)


def test_large_finite_gradients_do_not_overflow() -> None:
    report = finalize(with_gradients({"a": torch.full((4,), 1e30)}), clip_norm=1.0, world=Axis())
    assert report.finite
    assert report.norm == pytest.approx(2e30, rel=1e-6)


@pytest.mark.parametrize(("clip_norm", "finite"), [(1.0, True), (0.0, False), (1e25, False)])
def test_a_square_that_overflows_is_not_finite(clip_norm: float, finite: bool) -> None:
    """AdamW's second moment would be infinite from then on."""
    report = finalize(with_gradients({"a": torch.full((4,), 1e30)}), clip_norm=clip_norm, world=Axis())
    assert (report.finite, report.clip > 0) == (finite, finite)
    assert report.norm == pytest.approx(2e30, rel=1e-6)
    large = torch.full((4,), 2.0**62)
    assert finalize(with_gradients({"a": large}), clip_norm=0.0, world=Axis()).finite
    assert (large * large).isfinite().all()


def test_many_small_squares_are_not_lost() -> None:
    gradient = torch.full((2**20 + 1,), 2.0**-13)
    gradient[0] = 1.0
    report = finalize(with_gradients({"a": gradient}), clip_norm=0.0, world=Axis())
    assert report.norm == pytest.approx(math.sqrt(1 + 2.0**-6), rel=1e-14)


def test_no_parameters() -> None:
    assert finalize(with_gradients({}), clip_norm=1.0, world=Axis()) == GradientReport(norm=0.0, finite=True, clip=1.0)
