"""Expert parallel against one rank: several steps, hostile routings, the exchange itself.

Other axes beside it are in test_meshes.py, checkpoints across meshes in test_checkpoint_grid.py.
"""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from data.loader import Microbatch
from model.kimi import KimiModel
from model.loss import IGNORE_INDEX
from model.moe import expert_ffn
from model.router import Routing
from model.dispatch import LocalDispatcher
from model.seams import ExpertWeights
from optim.groups import OptimConfig
from parallel.expert.dispatch import AllToAllDispatcher
from parallel.config import ParallelConfig
from parallel.mesh import Axis, Mesh, make_mesh
from parallel.sharding import TensorSlice, parameter_specs
from tests.dist.parity import Case, check_parity, gather, run_alone, run_on_mesh
from tests.dist.ranks import RankPool
from tests.model.tiny import tiny_config, tiny_model
from train.build import build_model

OPTIM = OptimConfig(clip_norm=0.05, ns_dtype="fp64", bucket_mb=0.01)
MESHES = {
    "dp2-ep2": ParallelConfig(dp=2, ep=2),
    "dp4-ep2": ParallelConfig(dp=4, ep=2),
    "dp4-ep4": ParallelConfig(dp=4, ep=4),
}


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    with RankPool(2) as two, RankPool(4) as four:
        yield {2: two, 4: four}


def microbatch(seed: int, vocab: int) -> Microbatch:
    """Packed documents, with very different numbers of labels by seed."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, vocab, (1, 24), generator=generator)
    labels = torch.randint(1, vocab, (1, 24), generator=generator)
    labels[:, : (seed % 4) * 7] = IGNORE_INDEX
    bounds = torch.tensor([0, 5 + seed % 3, 16, 24], dtype=torch.int32)
    return Microbatch(input_ids=ids, labels=labels, cu_seqlens=bounds, sample_ids=torch.zeros(1, 3).long().numpy())


def make_case(model: KimiModel, *, steps: int) -> Case:
    values = {name: value.clone() for name, value in model.state_dict().items()}
    batches = tuple(tuple(microbatch(8 * s + i, model.config.vocab_size) for i in range(4)) for s in range(steps))
    return Case(model.config, values, batches, OPTIM)


def routed(kind: str) -> KimiModel:
    """A tiny model in which every token chooses the same experts: 0 and 1, or the lowest by exact ties."""
    model = tiny_model()
    with torch.no_grad():
        for layer in model.config.moe_layers:
            router = model.layers[layer].ffn.router
            router.bias.zero_()
            if kind == "ties":
                router.weight.zero_()
            else:
                router.bias[:2] = 10.0
    return model


def test_three_steps_equal_one_rank(pools: dict[int, RankPool]) -> None:
    case = make_case(tiny_model(), steps=3)
    alone = run_alone(case)
    assert all(norm > OPTIM.clip_norm for norm in alone.norms)
    check_parity(run_on_mesh(pools[4], case, MESHES["dp4-ep4"]), alone, tolerance=1e-9)


@pytest.mark.parametrize("family", ["linear", "k2"])
def test_other_models(pools: dict[int, RankPool], family: str) -> None:
    case = make_case(tiny_model(family), steps=1)
    check_parity(run_on_mesh(pools[4], case, MESHES["dp4-ep4"]), run_alone(case))


@pytest.mark.parametrize("kind", ["one expert pair", "ties"])
@pytest.mark.parametrize("name", MESHES)
def test_all_tokens_to_the_same_experts(pools: dict[int, RankPool], name: str, kind: str) -> None:
    case, mesh = make_case(routed(kind), steps=3), MESHES[name]
    alone = run_alone(dataclasses.replace(case, steps=case.steps[:1]))
    # The hostile routing really happened: two experts of each layer have every token.
    assert ((alone.loads[0] > 0).sum(dim=1) == 2).all()
    assert (alone.loads[0][:, :2] > 0).all()
    check_parity(run_on_mesh(pools[mesh.dp], case, mesh), run_alone(case), tolerance=1e-9)


def exchange(axis: Axis, x: Tensor, routing: Routing, weights: ExpertWeights, upstream: Tensor) -> list[Tensor]:
    """Output and the gradients of x, the routing weights and the experts of one dispatch, product and combine."""
    dispatcher = AllToAllDispatcher(axis, experts=8) if axis.name == "ep" else LocalDispatcher()
    leaves = [x, routing.weight_TK, *weights]
    for leaf in leaves:
        leaf.requires_grad_()
    handle = dispatcher.dispatch(x, routing, weights)
    (received,) = dispatcher.receive(handle)
    out = dispatcher.combine(expert_ffn(received, torch.mul), routing, handle)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


ONE = Axis(name="ep")
TOKENS = (5, 0, 17, 1)


def inputs(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor], ExpertWeights]:
    """x, experts, weights and upstream gradient of four ranks (one has no tokens), and all experts' weights."""
    g = torch.Generator().manual_seed(0)
    x = [torch.randn(n, 16, generator=g).to(dtype) for n in TOKENS]
    # Experts 4 and 5 (the home of rank 2 of four) get no token from anyone.
    used = torch.tensor([0, 1, 2, 3, 6, 7])
    chosen = [used[torch.rand(n, 6, generator=g).argsort(dim=1)[:, :3]] for n in TOKENS]
    weight = [torch.rand(n, 3, generator=g).to(torch.promote_types(dtype, torch.float32)) for n in TOKENS]
    upstream = [torch.randn(n, 16, generator=g).to(dtype) for n in TOKENS]
    experts = ExpertWeights(*(torch.randn(8, 16, 16, generator=g).to(dtype) for _ in range(3)))
    return x, chosen, weight, upstream, experts


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_size_one_is_the_local_dispatcher_to_the_bit(dtype: torch.dtype) -> None:
    results = []
    for axis in (Axis(), ONE):
        x, chosen, weight, upstream, experts = inputs(dtype)
        routing = Routing(torch.cat(chosen), torch.cat(weight))
        results.append(exchange(axis, torch.cat(x), routing, experts, torch.cat(upstream)))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def exchange_rank() -> list[Tensor]:
    mesh = make_mesh(ParallelConfig(dp=4, ep=4), 4)
    rank = mesh.ep.rank
    x, chosen, weight, upstream, experts = inputs(torch.float64)
    own = ExpertWeights(*(w[2 * rank : 2 * rank + 2].clone() for w in experts))
    return exchange(mesh.ep, x[rank], Routing(chosen[rank], weight[rank]), own, upstream[rank])


def test_ranks_without_tokens_and_experts_without_rows(pools: dict[int, RankPool]) -> None:
    x, chosen, weight, upstream, experts = inputs(torch.float64)
    routing = Routing(torch.cat(chosen), torch.cat(weight))
    expected = exchange(Axis(), torch.cat(x), routing, experts, torch.cat(upstream))
    found = pools[4].run(exchange_rank)
    for position, value in enumerate(expected):
        torch.testing.assert_close(torch.cat([rank[position] for rank in found]), value, rtol=1e-12, atol=1e-12)
    assert all((gradient[4:6] == 0).all() for gradient in expected[3:])


def test_experts_that_do_not_divide_are_refused() -> None:
    config = tiny_model().config
    mesh = Mesh(ep=Axis("ep", None, 0, 3))
    with pytest.raises(ValueError, match=r"parallel.ep=3: must divide model.moe.experts=8"):
        build_model(config, seed=0, dtype=torch.float32, device=torch.device("cpu"), mesh=mesh)


def built_slices(config: ParallelConfig) -> dict[str, TensorSlice]:
    mesh = make_mesh(config, dist.get_world_size() if dist.is_initialized() else 1)
    model = build_model(tiny_config(), seed=3, dtype=torch.bfloat16, device=torch.device("cpu"), mesh=mesh)
    specs = parameter_specs(model, mesh=mesh)
    return {name: specs[name].place(param.detach(), mesh) for name, param in model.named_parameters()}


BUILT = MESHES | {"tp2": ParallelConfig(tp=2, dp=1), "tp2-dp2-ep2": ParallelConfig(tp=2, dp=2, ep=2)}


@pytest.mark.parametrize("name", BUILT)
def test_first_weights_are_those_of_one_rank(pools: dict[int, RankPool], name: str) -> None:
    config = BUILT[name]
    found = gather(pools[config.tp * config.dp].run(built_slices, config))
    expected = built_slices(ParallelConfig())
    assert found.keys() == expected.keys()
    for key, whole in expected.items():
        assert torch.equal(found[key], whole.local), key
