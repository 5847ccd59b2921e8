"""The one autograd function of products: gradients of autograd's own to the bit, and what the record may change."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.documents import Documents
from model.kda import KDA
from model.kernels.grouped_linear import grouped_linear
from model.kernels.grouped_linear_reference import grouped_linear_reference
from model.products import DENSE, GROUPED, Product, wrap_products
from tests.model.tiny import tiny_model

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def gradients(multiply: Callable[..., Tensor], x: Tensor, weight: Tensor, *ends: Tensor) -> list[Tensor]:
    """The product, and its gradients in both operands, for a random gradient of it."""
    leaves = x.clone().requires_grad_(), nn.Parameter(weight.clone())
    y = multiply(*leaves, *ends)
    return [y.detach(), *torch.autograd.grad(y, leaves, random(*y.shape, dtype=y.dtype, seed=2))]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for name, one, other in zip(("product", "gradient of x", "gradient of weight"), found, expected, strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(40, 24), (2, 20, 24), (1, 1, 24), (0, 24)], ids=str)
def test_dense_is_linear_to_the_bit(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = random(*shape, dtype=dtype, seed=0), random(16, 24, dtype=dtype, seed=1)
    assert_same(gradients(DENSE, x, weight), gradients(F.linear, x, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(16, 24), (6, 10)], ids=["fits", "loop"])
@pytest.mark.parametrize("ends", [[16, 16, 32, 48], [0, 0, 0, 48], [48, 48, 48, 48], [0, 0, 0, 0]], ids=str)
def test_grouped_is_autograd_of_its_value_to_the_bit(
    ends: list[int], sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    inner, outer = sizes
    x, weight = random(ends[-1], inner, dtype=dtype, seed=0), random(4, outer, inner, dtype=dtype, seed=1)
    segment_ends = torch.tensor(ends, dtype=torch.int32)
    found = gradients(GROUPED, x, weight, segment_ends)
    assert_same(found, gradients(grouped_linear, x, weight, segment_ends))
    tolerance = 0.02 if dtype == torch.bfloat16 else 1e-4
    for one, other in zip(found, gradients(grouped_linear_reference, x, weight, segment_ends), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_only_what_is_wanted_is_kept_and_made() -> None:
    made: list[str] = []
    kept: list[Tensor] = []

    def named(name: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *operands: made.append(name) or function(*operands)

    watched = Product(*(named(name, getattr(DENSE, name)) for name in ("value", "input_gradient", "weight_gradient")))
    x, weight = random(4, 3, dtype=torch.float64, seed=0), random(2, 3, dtype=torch.float64, seed=1)
    for x_wanted, weight_wanted in ((True, False), (False, True), (True, True)):
        made.clear()
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
            y = watched(x.clone().requires_grad_(x_wanted), weight.clone().requires_grad_(weight_wanted))
        y.sum().backward()
        assert made == ["value", *["input_gradient"] * x_wanted, *["weight_gradient"] * weight_wanted]
        assert [saved.shape for saved in kept] == [*[x.shape] * weight_wanted, *[weight.shape] * x_wanted]


def test_backward_reads_a_weight_again_and_keeps_none() -> None:
    x, weight = random(4, 3, dtype=torch.float64, seed=0), random(2, 3, dtype=torch.float64, seed=1)
    expected = gradients(F.linear, x, weight)
    reads = 0

    def again() -> Tensor:
        nonlocal reads
        reads += 1
        return weight

    def lent(x: Tensor, held: Tensor) -> Tensor:
        y = DENSE(x, held, again=again)
        with torch.no_grad():
            # The memory is used for something else in the meantime.
            held.detach().fill_(torch.nan)
        return y

    assert_same(gradients(lent, x, weight), expected)
    assert reads == 1


def test_put_off_gradients_belong_to_parameters_that_backward_reaches() -> None:
    queue: list[tuple[Tensor, Callable[[], Tensor]]] = []
    later = replace(DENSE, put_off=lambda parameter, make: queue.append((parameter, make)))
    x = random(4, 3, dtype=torch.float64, seed=0)
    parameter = nn.Parameter(random(2, 3, dtype=torch.float64, seed=1))
    later(x.requires_grad_(), parameter).sum().backward()
    ((owner, make),) = queue
    assert owner is parameter
    assert parameter.grad is None
    assert torch.equal(make(), torch.ones(2, 4, dtype=x.dtype) @ x)
    queue.clear()
    # Made from the parameter, or behind inputs without a gradient: autograd needs the gradient now.
    later(x, 2 * parameter).sum().backward()
    later(x.detach(), parameter).sum().backward()
    assert queue == []
    torch.testing.assert_close(parameter.grad, 3 * torch.ones(2, 4, dtype=x.dtype) @ x.detach())


@pytest.mark.parametrize("family", ["k3", "linear"])
def test_every_matrix_of_the_model_meets_its_rows_in_a_product(family: str) -> None:
    """None is multiplied past its product: with all products made zero, nothing but the embedding is left."""
    model = tiny_model(family)

    def zero(product: Product) -> Product:
        return replace(product, value=lambda *operands: product.value(*operands) * 0)

    wrap_products(model, zero)
    owners = {
        name.rpartition(".")[0]
        for name, parameter in model.named_parameters()
        if parameter.dim() >= 2 and not name.startswith("embed") and "_conv" not in name
    }
    assert owners == {
        name for name, module in model.named_modules() if isinstance(getattr(module, "product", 0), Product)
    }
    ids = torch.arange(8).unsqueeze(0)
    documents = Documents.of(1, 8, None, ids.device)
    stream = model.embed(ids)
    for layer in model.layers:
        tracked = {} if isinstance(layer.mixer, KDA) else {"stats": None}
        assert not layer.mixer(stream, documents=documents, cache=None, **tracked).any()
        ffn = layer.ffn
        assert not (ffn(stream, stats=None) if hasattr(ffn, "router") else ffn(stream)).any()
    assert not model(ids).any()
