"""Experts against a dense loop; hostile routings; the dispatcher's inverse."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from model.config import MoEConfig
from model.dispatch import LocalDispatcher
from model.layers import Activation
from model.moe import MoE
from model.params import initialize
from model.router import Routing
from model.seams import ExpertWeights

ACTIVATION = Activation("situ", beta=4.0, linear_beta=25.0)


def make_moe(*, latent: int | None = 16, experts: int = 8, top_k: int = 3, dtype: torch.dtype = torch.float64) -> MoE:
    config = MoEConfig(experts=experts, top_k=top_k, expert_dim=24, latent_dim=latent, shared_experts=1)
    moe = MoE(32, config, activation=ACTIVATION, norm_eps=1e-5)
    initialize(moe, seed=0, std=0.3)
    return moe.to(dtype)


def dense_moe(moe: MoE, x: Tensor) -> Tensor:
    """Every expert on every token, weighted by its routing weight or zero."""
    flat = x.flatten(0, 1)
    routing = moe.router(flat, stats=None)
    experts = moe.router.weight.shape[0]
    weight = torch.zeros(flat.shape[0], experts, dtype=x.dtype).scatter(1, routing.expert_TK, routing.weight_TK)
    inner = flat if moe.down is None else moe.down(flat)
    outputs = []
    for e in range(experts):
        hidden = moe.activation(F.linear(inner, moe.experts.gate[e]), F.linear(inner, moe.experts.up[e]))
        outputs.append(F.linear(hidden, moe.experts.down[e]) * weight[:, e : e + 1])
    u = torch.stack(outputs).sum(dim=0)
    if moe.norm is not None:
        u = moe.norm(u)
    y = u if moe.up is None else moe.up(u)
    return moe.shared(x) + y.view_as(x)


def compare_with_dense(moe: MoE, x: Tensor, *, tolerance: float) -> None:
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    cotangent = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    results = []
    for run, value in zip((lambda v: moe(v, stats=None), lambda v: dense_moe(moe, v)), inputs):
        moe.zero_grad()
        y = run(value)
        (y * cotangent).sum().backward()
        results.append([y, value.grad, *(p.grad.clone() for p in moe.parameters())])
    names = ["output", "input", *(name for name, _ in moe.named_parameters())]
    for name, found, expected in zip(names, *results):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("latent", [16, None], ids=["latent", "full-width"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 1e-4)], ids=["fp64-loop", "fp32-grouped"]
)
def test_moe_equals_every_expert_on_every_token(latent: int | None, dtype: torch.dtype, tolerance: float) -> None:
    moe = make_moe(latent=latent, dtype=dtype)
    compare_with_dense(moe, torch.randn(2, 19, 32, dtype=dtype), tolerance=tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_all_tokens_to_the_same_experts_leaves_the_others_zero_gradients(dtype: torch.dtype) -> None:
    moe = make_moe(dtype=dtype)
    moe.router.bias[:3] = 100.0
    x = torch.randn(1, 40, 32, dtype=dtype)
    compare_with_dense(moe, x, tolerance=1e-11 if dtype == torch.float64 else 1e-4)
    for param in moe.experts.parameters():
        assert bool((param.grad[3:] == 0).all())
        assert bool((param.grad[:3] != 0).any())


def test_a_batch_of_no_tokens_gives_no_rows_and_zero_gradients() -> None:
    moe = make_moe()
    y = moe(torch.zeros(1, 0, 32, dtype=torch.float64, requires_grad=True), stats=None)
    y.sum().backward()
    assert y.shape == (1, 0, 32)
    assert all(p.grad is None or bool((p.grad == 0).all()) for p in moe.parameters())


def test_combine_after_dispatch_is_k_times_the_input_and_so_is_its_backward() -> None:
    x = torch.randn(23, 8, dtype=torch.float64, requires_grad=True)
    expert = torch.stack([torch.randperm(5)[:3] for _ in range(23)])
    routing = Routing(expert, torch.ones(23, 3, dtype=torch.float64))
    weights = ExpertWeights(*(torch.empty(5, 1, 1) for _ in range(3)))
    dispatcher = LocalDispatcher()
    handle = dispatcher.dispatch(x, routing, weights)
    y = dispatcher.combine(dispatcher.receive(handle)[0].rows_RL, routing, handle)
    torch.testing.assert_close(y, 3 * x)
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(x.grad, torch.full_like(x, 3.0))


def test_rows_of_a_segment_are_its_experts_tokens_in_order_then_zeros() -> None:
    x = torch.arange(1.0, 7.0).unsqueeze(1)
    expert = torch.tensor([[2], [0], [2], [0], [2], [2]])
    weights = ExpertWeights(*(torch.empty(3, 1, 1) for _ in range(3)))
    handle = LocalDispatcher().dispatch(x, Routing(expert, torch.ones(6, 1)), weights)
    assert handle.received.segment_ends_S.tolist() == [16, 16, 32]
    rows = handle.received.rows_RL.flatten().tolist()
    assert rows == [2.0, 4.0] + [0.0] * 14 + [1.0, 3.0, 5.0, 6.0] + [0.0] * 12
