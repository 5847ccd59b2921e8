"""Whoever alters the model wraps what is there: every pair of wrappers, in both orders, is in effect with both."""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from model.kernels.grouped_linear_reference import grouped_linear_reference
from model.kimi import KimiModel
from model.layers import Linear
from model.moe import MoE
from model.products import Product, wrap_products
from model.router import Router
from model.widen import widen
from parallel.context.layout import slice_tokens
from parallel.mesh import Axis, Mesh
from parallel.pipeline.deferred import DeferredGradients
from parallel.pipeline.runtime import Pipeline
from parallel.recompute import RecomputeConfig, install_recompute
from tests.model.tiny import tiny_model, tokens
from train.forced_routing import ForcedRouting, OneExpert

IDS = tokens(2, 24)


def coarse(x: Tensor) -> Tensor:
    """A stand-in for a quantiser: 5 bits behind the binary point."""
    return (x * 32).round() / 32


def quantised(product: Product) -> Product:
    """``product`` of coarse operands, its gradients straight through."""
    return Product(
        lambda x, weight, *ends: product.value(coarse(x), coarse(weight), *ends),
        lambda grad, weight, *ends: product.input_gradient(grad, coarse(weight), *ends),
        lambda grad, x, *ends: product.weight_gradient(grad, coarse(x), *ends),
        product.put_off,
    )


def quantised_by_autograd(x: Tensor, weight: Tensor, *ends: Tensor, again: object = None) -> Tensor:
    """What `quantised` must be, out of plain operations."""
    x, weight = (value + (coarse(value) - value).detach() for value in (x, weight))
    return grouped_linear_reference(x, weight, *ends) if ends else F.linear(x, weight)


@dataclass
class Installed:
    """What the wrappers of one model noticed."""

    queue: DeferredGradients = field(default_factory=DeferredGradients)
    forced: ForcedRouting = field(default_factory=lambda: ForcedRouting(OneExpert(), seed=0, axis=Axis()))
    values: Counter[str] = field(default_factory=Counter)

    def observe(self, model: KimiModel) -> None:
        def count(product: Product) -> Product:
            def value(*operands: Tensor) -> Tensor:
                self.values["grouped" if len(operands) == 3 else "plain"] += 1
                return product.value(*operands)

            return replace(product, value=value)

        wrap_products(model, count)


WRAPPERS: dict[str, Callable[[Installed, KimiModel], None]] = {
    "quantise": lambda installed, model: wrap_products(model, quantised),
    "widen": lambda installed, model: widen(model),
    "selective": lambda installed, model: install_recompute(model, RecomputeConfig("selective")),
    "full": lambda installed, model: install_recompute(model, RecomputeConfig("full", offload=True), offload_bytes=64),
    "defer": lambda installed, model: installed.queue.install(model),
    "force": lambda installed, model: installed.forced.install(model),
    "observe": lambda installed, model: installed.observe(model),
}
PAIRS = [
    (one, other)
    for one, other in itertools.permutations(WRAPPERS, 2)
    # A recompute policy is one choice.
    if {one, other} != {"selective", "full"}
]


class Results(NamedTuple):
    """Logits, all gradients and where tokens went; whose gradient came later; bytes that the graph kept."""

    numbers: dict[str, Tensor]
    deferred: set[str]
    kept: int


def results(model: KimiModel, installed: Installed) -> Results:
    kept: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x
        return x

    experts = []

    def seen(module: nn.Module, args: Any, routing: Any) -> None:
        experts.append(routing.expert_TK)

    routers = [layer.ffn.router for layer in model.layers if isinstance(layer.ffn, MoE)]
    handles = [router.register_forward_hook(seen) for router in routers]
    with installed.forced.during(0), saved_tensors_hooks(keep, lambda x: x):
        hidden = model.hidden(IDS)
        logits = model.head(hidden)
    chosen = torch.stack(experts[: len(routers)])
    logits.square().sum().backward()
    for handle in handles:
        handle.remove()
    found = {"logits": logits.detach(), "experts": chosen}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    deferred = {names[id(weight)]: make() for weight, make in installed.queue.take()}
    at_once = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert not deferred.keys() & at_once.keys()
    size = sum(x.untyped_storage().nbytes() for x in kept.values())
    return Results(found | deferred | at_once, set(deferred), size)


def expected(wrappers: set[str], dtype: torch.dtype) -> dict[str, Tensor]:
    """What must come out, without any wrapper that is under test: plain callables in the products' places."""
    model = tiny_model(dtype=dtype)
    if "quantise" in wrappers:
        for module in model.modules():
            if hasattr(module, "product"):
                module.product = quantised_by_autograd
    installed = Installed()
    if "force" in wrappers:
        for layer in model.layers:
            if isinstance(layer.ffn, MoE):
                select = layer.ffn.router.select
                layer.ffn.router.select = lambda scores, bias, *, k, select=select: (
                    torch.arange(k).repeat(len(scores), 1),
                    select(scores, bias, k=k)[1],
                )
    return results(model, installed).numbers


@pytest.mark.parametrize("pair", PAIRS, ids="-then-".join)
def test_both_are_in_effect(pair: tuple[str, str]) -> None:
    model, installed = tiny_model(), Installed()
    for name in pair:
        WRAPPERS[name](installed, model)
    found, deferred, kept = results(model, installed)
    wanted = expected(set(pair), torch.float64)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=name)
    products = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, Linear | Router)}
    experts = {name for name, _ in model.named_parameters() if ".experts." in name}
    assert deferred == (products | experts if "defer" in pair else set())
    if "observe" in pair:
        passes = 2 if "full" in pair else 1
        assert installed.values["grouped"] == 3 * len(model.config.moe_layers) * passes
        assert installed.values["plain"] > 10
    if {"selective", "full"} & set(pair):
        assert kept < results(tiny_model(), Installed()).kept


def test_the_expected_numbers_differ_where_they_should() -> None:
    """Otherwise a wrapper without effect would pass above."""
    plain, coarse_, forced = (expected(wrappers, torch.float64) for wrappers in (set(), {"quantise"}, {"force"}))
    for name, value in plain.items():
        if value.is_floating_point() and value.any():
            assert not torch.allclose(value, coarse_[name], rtol=1e-4), name
    assert not torch.equal(plain["experts"], forced["experts"])


def test_the_loss_is_made_of_the_heads_product() -> None:
    """The pipeline's loss takes the head's weight, and its product with it: of zero logits every token costs log V."""
    model = tiny_model()
    inner = model.head.product
    model.head.product = replace(inner, value=lambda *operands: inner.value(*operands) * 0)
    batch = slice_tokens(IDS, IDS.roll(-1, 1), None, axis=Axis())
    loss = Pipeline(model, mesh=Mesh()).evaluate([batch])
    assert float(loss) == pytest.approx(IDS.numel() * math.log(model.config.vocab_size), rel=1e-12)


@pytest.mark.parametrize("name", WRAPPERS)
def test_no_method_is_overwritten(name: str) -> None:
    model = tiny_model()
    WRAPPERS[name](Installed(), model)
    assert overwritten(model) == []


def overwritten(model: KimiModel) -> list[str]:
    """Methods of the model's modules, and of their cores and dispatchers, that an instance's attribute hides."""
    return [
        f"{type(owner).__name__}.{attribute}"
        for module in model.modules()
        for owner in (module, getattr(module, "core", None), getattr(module, "dispatcher", None))
        if owner is not None
        for attribute in vars(owner)
        if callable(getattr(type(owner), attribute, None))
    ]
