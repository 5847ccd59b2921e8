"""The exchanging dispatchers on one rank: what they compute is what the local one does, gradients included."""

import pytest
import torch
from torch import Tensor

from model.dispatch import LocalDispatcher
from model.moe import expert_ffn
from model.router import Routing
from model.seams import ExpertWeights, TokenDispatcher
from parallel.expert.deduplicate import DeduplicatingDispatcher
from parallel.expert.dispatch import AllToAllDispatcher
from parallel.expert.planner import plan, plan_home
from parallel.mesh import Axis

EXPERTS, WIDTH, INNER = 6, 5, 4
DISPATCHERS = {
    "home": AllToAllDispatcher(Axis(), experts=EXPERTS, make_plan=plan_home),
    "balanced": AllToAllDispatcher(Axis(), experts=EXPERTS, make_plan=plan),
    "deduplicated": DeduplicatingDispatcher(Axis(), experts=EXPERTS, make_plan=plan_home),
}


def run(dispatcher: TokenDispatcher, *, tokens: int, choices: int) -> list[Tensor]:
    """Output and the gradients of the tokens, the routing weights and the experts."""
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    # Expert 0 has no row.
    chosen = torch.rand(tokens, EXPERTS - 1, generator=generator).topk(choices, dim=1).indices + 1
    x, weight_TK, upstream = random(tokens, WIDTH), random(tokens, choices), random(tokens, WIDTH)
    experts = ExpertWeights(random(EXPERTS, INNER, WIDTH), random(EXPERTS, INNER, WIDTH), random(EXPERTS, WIDTH, INNER))
    leaves = [x, weight_TK, *experts]
    for leaf in leaves:
        leaf.requires_grad_()
    routing = Routing(chosen, weight_TK)
    handle = dispatcher.dispatch(x, routing, experts)
    rows = [expert_ffn(received, torch.mul) for received in dispatcher.receive(handle)]
    out = dispatcher.combine(torch.cat(rows), routing, handle)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize("choices", [1, 3, 5])
@pytest.mark.parametrize("tokens", [0, 1, 2, 40])
@pytest.mark.parametrize("name", DISPATCHERS)
def test_one_rank_equals_the_local_dispatcher(name: str, tokens: int, choices: int) -> None:
    expected = run(LocalDispatcher(), tokens=tokens, choices=choices)
    found = run(DISPATCHERS[name], tokens=tokens, choices=choices)
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
