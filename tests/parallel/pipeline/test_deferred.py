"""Weight gradients that are put off equal those of autograd, and are put off wherever they should be."""

import pytest
import torch
from torch import Tensor

from model.documents import Documents
from model.kernels.grouped_linear import grouped_linear, grouped_weight_gradient
from model.kimi import KimiModel
from model.layers import Linear
from model.loss import chunked_cross_entropy
from model.router import Router
from parallel.pipeline.deferred import DeferredGradients
from tests.model.tiny import FAMILIES, tiny_model, tokens


def backward(model: KimiModel) -> Tensor:
    ids = tokens(1, 24)
    hidden = model.hidden(ids, documents=Documents.of(1, 24, None, ids.device))
    loss = chunked_cross_entropy(hidden, model.head.weight, ids.roll(-1, 1))
    (loss / 24).backward()
    return loss.detach()


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_autograd(family: str) -> None:
    plain, split = tiny_model(family), tiny_model(family)
    queue = DeferredGradients()
    queue.install(split)
    assert torch.equal(backward(split), backward(plain))
    names = {id(param): name for name, param in split.named_parameters()}
    deferred = {names[id(weight)]: make() for weight, make in queue.take()}
    # The head's product is part of the loss.
    products = {f"{name}.weight" for name, module in split.named_modules() if isinstance(module, Linear | Router)}
    experts = {name for name, _ in split.named_parameters() if ".experts." in name}
    assert deferred.keys() == products - {"head.weight"} | experts
    for name, param in plain.named_parameters():
        other = split.get_parameter(name)
        assert (other.grad is None) == (name in deferred or param.grad is None), name
        if param.grad is None:
            continue  # the first mix reads one source as it is
        torch.testing.assert_close(deferred.get(name, other.grad), param.grad, rtol=1e-10, atol=1e-14, msg=name)
    assert queue.take() == []


def test_passes_without_gradients_put_nothing_off() -> None:
    model, queue = tiny_model(), DeferredGradients()
    queue.install(model)
    with torch.no_grad():
        model(tokens(1, 8))
    assert queue.take() == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ends", [[16, 16, 32, 48], [0, 0, 0, 48], [48, 48, 48, 48]], ids=str)
def test_grouped_weight_gradients(dtype: torch.dtype, ends: list[int]) -> None:
    g = torch.Generator().manual_seed(0)
    rows, grad = (torch.randn(48, width, generator=g).to(dtype) for width in (16, 24))
    weight = torch.randn(4, 24, 16, generator=g).to(dtype).requires_grad_()
    segment_ends = torch.tensor(ends, dtype=torch.int32)
    grouped_linear(rows, weight, segment_ends).backward(grad)
    found = grouped_weight_gradient(grad, rows, segment_ends)
    torch.testing.assert_close(found, weight.grad)


def test_no_rows_give_zero_gradients() -> None:
    found = grouped_weight_gradient(torch.empty(0, 24), torch.empty(0, 16), torch.zeros(4, dtype=torch.int32))
    assert torch.equal(found, torch.zeros(4, 24, 16))
