"""One payload per token and rank against one row per choice: the same results with fewer bytes."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from model.moe import expert_ffn
from model.router import Routing
from model.dispatch import LocalDispatcher
from model.seams import ExpertWeights, TokenDispatcher
from parallel.expert.deduplicate import DeduplicatingDispatcher
from parallel.expert.dispatch import AllToAllDispatcher
from parallel.expert.planner import plan, plan_home
from parallel.config import ParallelConfig
from parallel.expert.config import ExpertsConfig
from parallel.mesh import Axis, make_mesh
from tests.dist.parity import check_parity, run_alone, run_on_mesh
from tests.dist.ranks import RankPool
from tests.dist.test_balanced import skewed
from tests.dist.test_expert import inputs, make_case

PLANS = {"home": plan_home, "balanced": plan}
MESHES = {
    "dp4-ep4": ParallelConfig(dp=4, ep=4),
    "dp2-cp2-ep2": ParallelConfig(dp=2, cp=2, ep=2),
    "tp2-dp2-ep2": ParallelConfig(tp=2, dp=2, ep=2),
    "pp2-dp2-ep2": ParallelConfig(pp=2, dp=2, ep=2, schedule="zero_bubble"),
}


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def run(
    dispatcher: TokenDispatcher, x: Tensor, routing: Routing, weights: ExpertWeights, upstream: Tensor
) -> list[Tensor]:
    """Output and the gradients of x, the routing weights and the experts."""
    leaves = [x, routing.weight_TK, *weights]
    for leaf in leaves:
        leaf.requires_grad_()
    handle = dispatcher.dispatch(x, routing, weights)
    results = [expert_ffn(received, torch.mul) for received in dispatcher.receive(handle)]
    out = dispatcher.combine(torch.cat(results), routing, handle)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def run_rank(name: str, dtype: torch.dtype) -> list[Tensor]:
    axis = make_mesh(ParallelConfig(dp=4, ep=4), 4).ep
    x, chosen, weight, upstream, experts = inputs(dtype)
    own = ExpertWeights(*(w[2 * axis.rank : 2 * axis.rank + 2].clone() for w in experts))
    dispatcher = DeduplicatingDispatcher(axis, experts=8, make_plan=PLANS[name])
    routing = Routing(chosen[axis.rank], weight[axis.rank])
    return run(dispatcher, x[axis.rank], routing, own, upstream[axis.rank])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PLANS)
def test_it_equals_the_local_dispatcher(four: RankPool, name: str, dtype: torch.dtype) -> None:
    """One rank has no tokens, two experts no rows."""
    x, chosen, weight, upstream, experts = inputs(dtype)
    routing = Routing(torch.cat(chosen), torch.cat(weight))
    expected = run(LocalDispatcher(), torch.cat(x), routing, experts, torch.cat(upstream))
    ranks = four.run(run_rank, name, dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 0.02
    for position, value in enumerate(expected):
        found = torch.cat([rank[position] for rank in ranks]).double()
        assert (found - value.double()).norm() <= tolerance * value.double().norm(), position


def test_size_one_equals_the_local_dispatcher() -> None:
    results = []
    for dispatcher in (LocalDispatcher(), DeduplicatingDispatcher(Axis(name="ep"), experts=8)):
        x, chosen, weight, upstream, experts = inputs(torch.float64)
        routing = Routing(torch.cat(chosen), torch.cat(weight))
        results.append(run(dispatcher, torch.cat(x), routing, experts, torch.cat(upstream)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dispatcher", ["all_to_all", "balanced"])
@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_equals_one_rank(four: RankPool, name: str, dispatcher: str) -> None:
    case, config = make_case(skewed(), steps=1), MESHES[name]
    config.experts = ExpertsConfig(dispatcher=dispatcher, deduplicate=True)
    found = run_on_mesh(four, case, config)
    check_parity(found, run_alone(case))
    assert ("ep lend_weights" in found.traffic) == (dispatcher == "balanced")


def moved(axis: Axis, dispatcher: TokenDispatcher) -> int:
    """Bytes of tokens, ids and weights that this rank sends in one pass and back."""
    generator = torch.Generator().manual_seed(axis.rank)
    x = torch.randn(64, 256, generator=generator)
    chosen = torch.rand(64, 16, generator=generator).argsort(dim=1)[:, :6]
    weight = torch.rand(64, 6, generator=generator)
    weights = ExpertWeights(*(torch.randn(4, 256, 256, generator=generator) for _ in range(3)))
    before = axis.traffic.sent.get("ep all_to_all", 0)
    run(dispatcher, x, Routing(chosen, weight), weights, torch.randn(64, 256, generator=generator))
    return axis.traffic.sent["ep all_to_all"] - before


def bytes_rank() -> tuple[int, int]:
    axis = make_mesh(ParallelConfig(dp=4, ep=4), 4).ep
    plain, once = (kind(axis, experts=16) for kind in (AllToAllDispatcher, DeduplicatingDispatcher))
    return moved(axis, plain), moved(axis, once)


def test_fewer_bytes_move(four: RankPool) -> None:
    """6 of 16 experts over 4 ranks: a token meets 1 - C(12, 6) / C(16, 6) = 0.885 of the ranks, 3.54 of 6 rows."""
    plain, once = (sum(sent) for sent in zip(*four.run(bytes_rank)))
    ids_and_weights = 3 / 256 / 4
    assert once / plain == pytest.approx(3.54 / 6 + ids_and_weights, rel=0.05)
