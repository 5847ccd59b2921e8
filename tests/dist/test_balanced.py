"""Balanced expert parallel against one rank: the same model and gradients, equal rows on every rank, loans in use."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from model.kimi import KimiModel
from model.moe import MoE, expert_ffn
from model.router import Routing
from model.dispatch import LocalDispatcher
from model.seams import ExpertWeights
from parallel.collectives import Pending, all_to_all_start
from parallel.expert.dispatch import AllToAllDispatcher
from parallel.expert.planner import ExpertPlan, plan
from parallel.expert.weights import Loan
from parallel.config import ParallelConfig
from parallel.expert.config import ExpertsConfig
from parallel.mesh import Axis, make_mesh
from parallel.recompute import RecomputeConfig
from parallel.sharding import TensorSlice
from tests.dist.parity import Case, Outcome, check_parity, merge, run_alone, run_on_mesh, train_on_mesh
from tests.dist.ranks import PATIENCE, RankPool
from tests.dist.test_expert import OPTIM, TOKENS, inputs, make_case, microbatch, routed
from tests.model.tiny import tiny_config, tiny_model

pytestmark = pytest.mark.slow  # steps on many meshes

BALANCED = ExpertsConfig(dispatcher="balanced")


def on(**axes: int | str) -> ParallelConfig:
    return ParallelConfig(experts=BALANCED, **axes)


FOUR = {
    "dp4-ep4": on(dp=4, ep=4),
    "dp4-ep2": on(dp=4, ep=2),
    "dp4-ep4-zero2": on(dp=4, ep=4, zero=2),
    "cp2-dp2-ep4": on(cp=2, dp=2, ep=4),
    "tp2-dp2-ep2": on(tp=2, dp=2, ep=2),
    "pp2-dp2-ep2": on(pp=2, dp=2, ep=2),
    "pp2-dp2-ep2-zero_bubble": on(pp=2, dp=2, ep=2, schedule="zero_bubble", zero=2),
    "pp2-vpp2-dp2-ep2": on(pp=2, vpp=2, dp=2, ep=2),
}


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def skewed() -> KimiModel:
    """A tiny model whose routers all lean to the experts of one home."""
    model = tiny_model()
    with torch.no_grad():
        for layer in model.config.moe_layers:
            model.layers[layer].ffn.router.bias[2:4] += 0.7
    return model


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", FOUR)
def test_a_mesh_equals_one_rank(four: RankPool, name: str, steps: int) -> None:
    case = make_case(skewed(), steps=steps)
    found = run_on_mesh(four, case, FOUR[name])
    check_parity(found, run_alone(case), tolerance=1e-10 if steps == 1 else 1e-9)
    layers, passes = len(case.config.moe_layers), 2
    lent, returned = found.traffic["ep lend_weights"], found.traffic["ep return_gradients"]
    assert returned.sent > 0
    # Lent once forward and once backward; returned once. Gradients and weights are both fp64 here.
    assert (lent.calls, lent.sent) == (passes * returned.calls, passes * returned.sent)
    assert 0 < returned.calls <= layers * 4 * 4 * steps


@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize("name", ["dp4-ep4", "tp2-dp2-ep2", "pp2-dp2-ep2"])
def test_recomputed_passes_lend_by_the_saved_plan(four: RankPool, name: str, policy: str) -> None:
    case = dataclasses.replace(make_case(skewed(), steps=1), recompute=RecomputeConfig(policy=policy))
    found = run_on_mesh(four, case, FOUR[name])
    check_parity(found, run_alone(case))
    assert found.traffic["ep lend_weights"].sent > 0


@pytest.mark.parametrize("kind", ["one expert pair", "ties"])
@pytest.mark.parametrize("name", ["dp4-ep4", "cp2-dp2-ep4"])
def test_all_tokens_to_the_same_experts(four: RankPool, name: str, kind: str) -> None:
    """Three of four ranks have no row for any expert of their own."""
    case = make_case(routed(kind), steps=2)
    found = run_on_mesh(four, case, FOUR[name])
    check_parity(found, run_alone(case), tolerance=1e-9)
    assert found.traffic["ep lend_weights"].sent > 0


def train_recorded(case: Case, config: ParallelConfig) -> tuple[Outcome[TensorSlice], list[Tensor]]:
    """On a rank: the outcome, and what each pass's plan has every rank borrow."""
    borrowed = []

    def remember(counts: Tensor, *, above: float) -> ExpertPlan:
        made = plan(counts, above=above)
        borrowed.append(made.borrowed)
        return made

    with patch("parallel.expert.plan", remember):
        return train_on_mesh(case, config), borrowed


def test_accumulation_over_microbatches_with_different_plans(four: RankPool) -> None:
    model = tiny_model()
    case = make_case(model, steps=1)
    microbatches = tuple(microbatch(seed, model.config.vocab_size) for seed in range(12))
    case = dataclasses.replace(case, steps=(microbatches,), optim=OPTIM)
    outcomes, plans = zip(*four.run(train_recorded, case, FOUR["dp4-ep4"]), strict=True)
    found = merge(outcomes)
    assert not found.faults
    check_parity(found, run_alone(case))
    layers, borrowed = len(case.config.moe_layers), torch.stack(plans[0])
    assert all(torch.equal(torch.stack(other), borrowed) for other in plans)
    assert len(borrowed) == 3 * layers
    for layer in range(layers):
        first, *others = borrowed[layer::layers]
        assert not all(torch.equal(first, other) for other in others), f"one plan for all microbatches of layer {layer}"
    assert (borrowed >= 0).any(dim=2).any(dim=0).all(), "a rank never borrows"


def test_one_home_expert_a_rank(four: RankPool) -> None:
    """Fewer home experts than ranks, and one borrowed slot each."""
    config = tiny_config()
    config.moe.experts = 4
    case = make_case(tiny_model(config), steps=2)
    outcomes, plans = zip(*four.run(train_recorded, case, FOUR["dp4-ep4"]), strict=True)
    check_parity(merge(outcomes), run_alone(case), tolerance=1e-9)
    assert all(borrowed.shape == (4, 1) for borrowed in plans[0])
    assert (torch.stack(plans[0]) >= 0).any(dim=2).any(dim=0).all(), "a rank never borrows"


@pytest.mark.parametrize("family", ["linear", "k2"])
def test_other_models(four: RankPool, family: str) -> None:
    case = make_case(tiny_model(family), steps=1)
    found = run_on_mesh(four, case, FOUR["dp4-ep4"])
    check_parity(found, run_alone(case))
    assert found.traffic["ep lend_weights"].sent > 0


def test_nothing_is_lent_below_the_threshold(four: RankPool) -> None:
    case = make_case(skewed(), steps=1)
    lenient = dataclasses.replace(FOUR["dp4-ep4"], experts=ExpertsConfig(dispatcher="balanced", balance_above=4.0))
    found = run_on_mesh(four, case, lenient)
    check_parity(found, run_alone(case))
    assert "ep lend_weights" not in found.traffic


def exchange_rank(dtype: torch.dtype) -> tuple[list[Tensor], int, int]:
    """Output and gradients of two layers in a row with one set of weights; computed rows; borrowed experts."""
    mesh = make_mesh(ParallelConfig(dp=4, ep=4), 4)
    rank = mesh.ep.rank
    x, chosen, weight, upstream, experts = inputs(dtype)
    own = ExpertWeights(*(w[2 * rank : 2 * rank + 2].clone() for w in experts))
    dispatcher = AllToAllDispatcher(mesh.ep, experts=8, make_plan=plan)
    found, planned = two_layers(dispatcher, x[rank], Routing(chosen[rank], weight[rank]), own, upstream[rank])
    return found, sum(planned.part.receive), len(planned.part.borrowed)


def two_layers(
    dispatcher: AllToAllDispatcher | LocalDispatcher,
    x: Tensor,
    routing: Routing,
    weights: ExpertWeights,
    upstream: Tensor,
) -> tuple[list[Tensor], object]:
    leaves = [x, routing.weight_TK, *weights]
    for leaf in leaves:
        leaf.requires_grad_()
    out, handle = x, None
    for _ in range(2):
        handle = dispatcher.dispatch(out, routing, weights)
        results = [expert_ffn(received, torch.mul) for received in dispatcher.receive(handle)]
        out = dispatcher.combine(torch.cat(results), routing, handle)
    gradients = torch.autograd.grad(out, leaves, upstream)
    return [out.detach(), *gradients], getattr(handle, "planned", None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_two_layers_in_a_row_with_equal_rows_on_every_rank(four: RankPool, dtype: torch.dtype) -> None:
    """One rank has no tokens, two experts no rows; both layers' loans go through the same memory."""
    x, chosen, weight, upstream, experts = inputs(dtype)
    routing = Routing(torch.cat(chosen), torch.cat(weight))
    expected, _ = two_layers(LocalDispatcher(), torch.cat(x), routing, experts, torch.cat(upstream))
    ranks = four.run(exchange_rank, dtype)
    rows = [rows for _, rows, _ in ranks]
    assert max(rows) - min(rows) <= 1
    assert sum(rows) == routing.expert_TK.numel()
    assert sum(borrowed for _, _, borrowed in ranks) > 0
    tolerance = 1e-12 if dtype == torch.float64 else 0.05
    for position, value in enumerate(expected):
        joined = torch.cat([found[position] for found, _, _ in ranks]).double()
        assert (joined - value.double()).norm() <= tolerance * value.double().norm(), position


def test_size_one_is_the_local_dispatcher_to_the_bit() -> None:
    results = []
    for dispatcher in (LocalDispatcher(), AllToAllDispatcher(Axis(name="ep"), experts=8, make_plan=plan)):
        x, chosen, weight, upstream, experts = inputs(torch.float32)
        routing = Routing(torch.cat(chosen), torch.cat(weight))
        results.append(two_layers(dispatcher, torch.cat(x), routing, experts, torch.cat(upstream))[0])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


CHOICES = {
    # Experts of the layer, tokens of each rank, and the experts that every token chooses from.
    "uneven": (8, TOKENS, [0, 1, 2, 3, 6, 7], 3),
    "hot rank": (8, (6, 6, 6, 6), [2, 3], 2),
    "one expert": (8, (7, 5, 0, 9), [6], 1),
    "one expert a rank": (4, TOKENS, [0, 1, 3], 2),
    "one rank with tokens": (8, (0, 0, 0, 9), [0, 1, 5], 2),
    "one row": (4, (0, 0, 1, 0), [3], 1),
}


def whole_numbers(kind: str) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """x, experts and upstream gradient of four ranks; sums of whole numbers are exact in every order."""
    _, tokens, experts, choices = CHOICES[kind]
    g = torch.Generator().manual_seed(0)
    pool = torch.tensor(experts)
    x, upstream = ([torch.randint(-9, 10, (n, 16), generator=g).double() for n in tokens] for _ in range(2))
    chosen = [pool[torch.rand(n, len(pool), generator=g).argsort(dim=1)[:, :choices]] for n in tokens]
    return x, chosen, upstream


def unit_rank(kind: str) -> tuple[list[Tensor], int, int]:
    """Output and the gradients of x and the weights, all one, without any expert; computed rows; borrowed experts."""
    mesh = make_mesh(ParallelConfig(dp=4, ep=4), 4)
    rank, experts = mesh.ep.rank, CHOICES[kind][0]
    x, chosen, upstream = (values[rank] for values in whole_numbers(kind))
    own = ExpertWeights(*(torch.randn(experts // 4, 16, 16).double().requires_grad_() for _ in range(3)))
    dispatcher = AllToAllDispatcher(mesh.ep, experts=experts, make_plan=plan)
    weight = torch.ones(chosen.shape, dtype=torch.float64).requires_grad_()
    routing = Routing(chosen, weight)
    handle = dispatcher.dispatch(x.requires_grad_(), routing, own)
    rows = torch.cat([part.rows_RL for part in dispatcher.receive(handle)])
    out = dispatcher.combine(rows, routing, handle)
    gradients = torch.autograd.grad(out, [x, weight], upstream)
    part = handle.planned.part
    return [out.detach(), *gradients], sum(part.receive), len(part.borrowed)


@pytest.mark.parametrize("kind", CHOICES)
def test_what_is_dispatched_comes_back_once_for_each_choice(four: RankPool, kind: str) -> None:
    """With unit weights combine(dispatch(x)) = K x, and the same backward; weights' gradients are where weights are."""
    choices = CHOICES[kind][3]
    x, chosen, upstream = whole_numbers(kind)
    ranks = four.run(unit_rank, kind)
    for rank, (found, _, _) in enumerate(ranks):
        out, x_gradient, weight_gradient = found
        assert torch.equal(out, choices * x[rank])
        assert torch.equal(x_gradient, choices * upstream[rank])
        assert torch.equal(weight_gradient, (x[rank] * upstream[rank]).sum(1, keepdim=True).expand(chosen[rank].shape))
    rows = [rows for _, rows, _ in ranks]
    assert max(rows) - min(rows) <= 1
    assert sum(rows) == sum(len(c) for c in chosen) * choices
    assert sum(borrowed for _, _, borrowed in ranks) > 0


LAYER_TOKENS = (5, 17, 0, 1)


def leaning_layer() -> MoE:
    """An expert layer whole, router, latent and shared expert included, that leans to the experts of rank 1 of 4."""
    model = skewed()
    return model.layers[model.config.moe_layers[0]].ffn


def layer_inputs() -> tuple[list[Tensor], list[Tensor]]:
    g = torch.Generator().manual_seed(1)
    x, upstream = ([torch.randn(1, n, 32, generator=g).double() for n in LAYER_TOKENS] for _ in range(2))
    return x, upstream


def layer_gradients(layer: MoE, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    out = layer(x.requires_grad_(), stats=None)
    leaves = {"x": x, **dict(layer.named_parameters())}
    return {"out": out.detach(), **dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), upstream)))}


def part_of_layer(axis: Axis, *, make_plan: Callable[[Tensor], ExpertPlan]) -> MoE:
    """`leaning_layer` with this rank's two experts."""
    layer = leaning_layer()
    for name in ExpertWeights._fields:
        whole = getattr(layer.experts, name).detach()
        setattr(layer.experts, name, nn.Parameter(whole[2 * axis.rank : 2 * axis.rank + 2].clone()))
    layer.dispatcher = AllToAllDispatcher(axis, experts=8, make_plan=make_plan)
    return layer


def layer_rank() -> tuple[dict[str, Tensor], ExpertPlan]:
    mesh = make_mesh(ParallelConfig(dp=4, ep=4), 4)
    plans = []

    def remember(counts: Tensor) -> ExpertPlan:
        plans.append(plan(counts))
        return plans[-1]

    layer = part_of_layer(mesh.ep, make_plan=remember)
    x, upstream = (values[mesh.ep.rank] for values in layer_inputs())
    return layer_gradients(layer, x, upstream), plans[0]


def test_a_whole_layer_with_a_rank_without_tokens(four: RankPool) -> None:
    x, upstream = layer_inputs()
    expected = layer_gradients(leaning_layer(), torch.cat(x, dim=1), torch.cat(upstream, dim=1))
    ranks, plans = zip(*four.run(layer_rank), strict=True)
    silent = LAYER_TOKENS.index(0)
    assert not plans[0].counts[silent].any()
    assert (plans[0].borrowed[silent] >= 0).any()
    for name, value in expected.items():
        parts = [rank[name] for rank in ranks]
        if name in ("x", "out"):
            joined = torch.cat(parts, dim=1)
        else:
            joined = torch.cat(parts) if name.startswith("experts.") else torch.stack(parts).sum(dim=0)
        torch.testing.assert_close(joined, value, rtol=1e-11, atol=1e-13, msg=name)


def kept_rank() -> tuple[int, list[int]]:
    """Bytes of weights that this rank lent or borrowed in a pass and its backward, and those still held: between the
    two, after them with the graph alive, and without it."""
    mesh = make_mesh(ParallelConfig(dp=4, ep=4), 4)
    layer = part_of_layer(mesh.ep, make_plan=plan)
    x, upstream = (values[mesh.ep.rank] for values in layer_inputs())
    moved: list[tuple[StorageWeakRef, int]] = []

    def watch(*args: Any, name: str, **kwargs: Any) -> Pending:
        pending = all_to_all_start(*args, name=name, **kwargs)
        if name == "lend_weights":
            storages = [tensor.untyped_storage() for tensor in (pending.out, pending.source)]
            moved.extend((StorageWeakRef(storage), storage.nbytes()) for storage in storages)
        return pending

    def held() -> int:
        # A thread of the process group may let go of what it sent a moment after the wait for it.
        deadline = time.monotonic() + PATIENCE / 2
        while (found := sum(size for storage, size in moved if not storage.expired())) and time.monotonic() < deadline:
            time.sleep(0.01)
        return found

    found = []
    with patch("parallel.expert.weights.all_to_all_start", watch):
        out = layer(x.requires_grad_(), stats=None)
        found.append(held())
        out.backward(upstream)
        found.append(held())
        del out
        found.append(held())
    return sum(size for _, size in moved), found


def test_no_weights_of_a_loan_are_kept_between_forward_and_backward_or_after(four: RankPool) -> None:
    for moved, held in four.run(kept_rank):
        assert moved > 0
        assert held == [0, 0, 0]


def return_rank(values: tuple[float, ...], dtype: torch.dtype) -> float:
    """Expert 0 is lent to ranks 1 to 3, and each returns a gradient of one number: their sum at home."""
    mesh = make_mesh(ParallelConfig(dp=4, ep=4), 4)
    counts = torch.zeros(4, 4, dtype=torch.int64)
    counts[:, 0] = 1
    home = ExpertWeights(*(torch.zeros(1, 1, 1, dtype=dtype) for _ in range(3)))
    loan = Loan(mesh.ep, plan(counts).part(mesh.ep.rank), home)
    own = torch.tensor(values[mesh.ep.rank - 1 : mesh.ep.rank], dtype=dtype).view(-1, 1, 1)
    return float(loan.return_gradients(ExpertWeights(own, own, own)).gate)


@pytest.mark.parametrize("values", list(itertools.permutations((1e8, 1.0, -1e8))), ids=str)
def test_returned_gradients_are_added_in_ascending_order_of_rank(four: RankPool, values: tuple[float, ...]) -> None:
    """In fp32 the order shows: 1e8 + 1 - 1e8 is 0, and 1e8 - 1e8 + 1 is 1."""
    one, two, three = torch.tensor(values)
    assert four.run(return_rank, values, torch.float32)[0] == one + two + three


def test_bf16_gradients_are_returned_and_added_in_fp32(four: RankPool) -> None:
    assert torch.tensor(256.0, dtype=torch.bfloat16) + 1 == 256
    assert four.run(return_rank, (256.0, 1.0, 1.0), torch.bfloat16)[0] == 258
