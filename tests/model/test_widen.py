"""Products of bf16 in fp32: the same sums, rounded once, in every product of a model."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model.kimi import KimiModel
from model.mla import MLA
from model.params import initialize
from model.precision import set_precision
from model.products import DENSE, GROUPED, Product, wrap_products
from model.stats import ForwardStats
from model.widen import has_bf16_units, in_fp32, wants_fp32_products, widen, widened
from tests.model.tiny import tiny_config, tokens

CPU = torch.device("cpu")


def bf16(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def with_gradients(product: Product, x: Tensor, weight: Tensor, *ends: Tensor) -> list[Tensor]:
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = product(*leaves, *ends)
    return [y.detach(), *torch.autograd.grad(y, leaves, bf16(*y.shape, seed=2))]


def steps_apart(found: Tensor, expected: Tensor) -> float:
    """Largest distance in units of the last place of bf16 at the size of the largest value."""
    assert found.dtype == expected.dtype == torch.bfloat16
    scale = expected.double().abs().max() * 2**-8
    return float((found.double() - expected.double()).abs().max() / scale)


@pytest.mark.parametrize("kind", ["plain", "grouped"])
def test_a_widened_product_is_that_of_fp32_rounded(kind: str) -> None:
    x = bf16(48, 64, seed=0)
    if kind == "plain":
        product, operands = DENSE, (x, bf16(32, 64, seed=1))
    else:
        ends = torch.tensor([16, 16, 48], dtype=torch.int32)
        product, operands = GROUPED, (x, bf16(3, 32, 64, seed=1), ends)
    found = with_gradients(widened(product), *operands)
    wide = [operand.float() if operand.is_floating_point() else operand for operand in operands]
    leaves = [operand.requires_grad_() for operand in wide[:2]]
    y = product(*leaves, *wide[2:])
    expected = [y.detach(), *torch.autograd.grad(y, leaves, bf16(*y.shape, seed=2).float())]
    for name, one, other in zip(("product", "gradient of x", "gradient of weight"), found, expected, strict=True):
        assert torch.equal(one, other.bfloat16()), name
    # And so within a rounding of the device's own bf16 product.
    for one, other in zip(found, with_gradients(product, *operands), strict=True):
        assert steps_apart(one, other) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wider_operands_are_multiplied_as_they_are(dtype: torch.dtype) -> None:
    x, weight = torch.randn(5, 3, dtype=dtype), torch.randn(2, 3, dtype=dtype)
    assert torch.equal(widened(DENSE)(x, weight), F.linear(x, weight))


def narrow_model() -> KimiModel:
    model = KimiModel(tiny_config())
    initialize(model, seed=0, std=0.2)
    set_precision(model, torch.bfloat16)
    return model


def spied(seen: list[torch.dtype]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Wraps a function of tensors; notes the dtypes of what it is given."""

    def wrap(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*operands: Any, **options: Any) -> Tensor:
            seen.extend(x.dtype for x in operands if x.is_floating_point())
            return function(*operands, **options)

        return call

    return wrap


def test_no_product_of_a_widened_model_sees_bf16() -> None:
    """Forward, backward, attention and the logits that QK-Clip reads; what lies between stays bf16."""
    model, seen = narrow_model(), []
    spy = spied(seen)
    names = ("value", "input_gradient", "weight_gradient")
    wrap_products(model, lambda product: Product(*(spy(getattr(product, name)) for name in names)))
    for module in model.modules():
        if isinstance(module, MLA):
            module.core.kernel = type(module.core.kernel)(*map(spy, module.core.kernel))
    widen(model)
    stats = ForwardStats(model.config, device=CPU, max_logits=True)
    logits = model(tokens(1, 24), stats=stats)
    logits.float().square().sum().backward()
    assert logits.dtype == torch.bfloat16
    assert model.layers[0].mixer.q.weight.grad.dtype == torch.bfloat16
    assert set(seen) == {torch.float32}
    assert len(seen) > 100


def test_a_widened_model_is_near_the_narrow_one() -> None:
    models = narrow_model(), narrow_model()
    widen(models[1])
    plain, wide = (model(tokens(1, 24)).float() for model in models)
    exact = narrow_model().double()(tokens(1, 24))
    assert (wide - exact).norm() <= 1.2 * (plain - exact).norm()


def test_integers_and_options_are_handed_on() -> None:
    def multiply(x: Tensor, index: Tensor, *, scale: float) -> Tensor:
        assert (x.dtype, index.dtype) == (torch.float32, torch.int64)
        return x * index * scale

    found = in_fp32(multiply)(bf16(3, seed=0), torch.arange(3), scale=0.5)
    assert found.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("supported", "features", "units"),
    [
        (False, {"architecture": "x86_64", "avx2": True, "avx512_bf16": False, "amx_bf16": False}, False),
        (True, {"architecture": "x86_64", "avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, False),
        (True, {"architecture": "x86_64", "avx512_bf16": True, "amx_bf16": False}, True),
        (True, {"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": True}, True),
        (False, {"architecture": "x86_64", "avx512_bf16": True, "amx_bf16": True}, False),
        (True, {"architecture": "aarch64"}, True),
        (False, {"architecture": "aarch64"}, False),
        (True, {}, True),
    ],
    ids=["avx2", "avx512", "avx512-bf16", "amx", "switched-off", "arm-bf16", "arm", "unknown"],
)
def test_which_cpus_have_units(
    monkeypatch: pytest.MonkeyPatch, supported: bool, features: dict[str, object], units: bool
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    assert has_bf16_units(CPU) == units
    assert wants_fp32_products(torch.bfloat16, CPU) == (not units)
    assert not wants_fp32_products(torch.float32, CPU)
    assert has_bf16_units(torch.device("cuda"))
