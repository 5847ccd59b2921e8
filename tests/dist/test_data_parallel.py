"""Two and four data-parallel ranks against one process: gradients, norm, clip, weights, optimizer state.

Ranks of a group of two are the last two of four, so that group ranks and global ranks differ. Every rank
has its own number of microbatches and of tokens in them, and one expert has tokens on some ranks only.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from model.params import ParamRole, declare, initialize, named_roles
from optim.distributed import ShardedOptimizer
from optim.groups import OptimConfig, describe_groups
from optim.qk_clip import QKClipTarget
from parallel.data import DataParallel
from parallel.grads import GradientReport, finalize
from parallel.mesh import Axis, Mesh, ParallelConfig, build_mesh
from tests.dist.ranks import RankPool

REDUCE = dist.reduce
DIM, HEADS, EXPERTS, VOCAB = 8, 2, 4, 24
TARGET = QKClipTarget(query="query", key_value="key_value", heads=HEADS, nope=3, rope=2, value=4)


class Net(nn.Module):
    """An embedding, per-head matrices, experts chosen by token id, a plain matrix and vectors."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        shapes = {
            "embedding": (VOCAB, DIM),
            "query": (HEADS * 5, DIM),
            "key_value": (HEADS * 7, DIM),
            "output": (DIM, HEADS * 4),
            "experts": (EXPERTS, DIM, DIM),
            "rare": (DIM, DIM),
            "mix": (DIM, DIM),
            "norm": (DIM,),
        }
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.empty(shape, dtype=dtype)))
        matrix = ParamRole(kind="matrix")
        declare(
            self,
            embedding=ParamRole(kind="embedding"),
            query=ParamRole(kind="matrix", heads=HEADS),
            key_value=ParamRole(kind="matrix", heads=HEADS, sections=(3, 4)),
            output=ParamRole(kind="matrix", heads=HEADS, by_columns=True),
            experts=matrix,
            rare=matrix,
            mix=matrix,
            norm=ParamRole(kind="vector", decay=False, init="ones"),
        )
        initialize(self, seed=0, std=0.3)

    def forward(self, ids_T: Tensor) -> Tensor:
        """Sum over tokens of a loss that uses every parameter, but ``rare`` only for ids from 20."""
        x = self.embedding[ids_T] * self.norm
        x = x + torch.einsum("td,ted->te", x, self.experts[ids_T % EXPERTS])
        query = (x @ self.query.T).unflatten(1, (HEADS, 5))
        key_value = (x @ self.key_value.T).unflatten(1, (HEADS, 7))
        weight = torch.tanh((query[..., :3] * key_value[..., :3]).sum(-1, keepdim=True) + query[..., 3:].sum())
        x = x + (weight * key_value[..., 3:]).flatten(1) @ self.output.T
        if (ids_T >= 20).any():
            x = x + (ids_T >= 20).unsqueeze(1) * (x @ self.rare.T)
        return (x @ self.mix.T).square().sum()


@dataclass(frozen=True)
class Result:
    """What a run leaves behind on one rank."""

    reports: list[GradientReport]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    state: dict[str, Tensor]


def microbatches(step: int) -> list[list[Tensor]]:
    """Token ids of every (one of four ranks, microbatch) of a step: uneven in count and length."""
    generator = torch.Generator().manual_seed(step)
    lengths = [[1, 3], [16], [5, 2, 7], [9]]
    split = [[torch.randint(20, (n,), generator=generator) for n in row] for row in lengths]
    split[3][0][0] = 21  # `rare` is used on the last rank only
    return split


def shares(step: int, *, rank: int, size: int) -> list[Tensor]:
    """The microbatches of one of ``size`` ranks: those of 4 / size consecutive ranks of four."""
    width = 4 // size
    return [ids for row in microbatches(step)[rank * width : (rank + 1) * width] for ids in row]


def train(
    group: ProcessGroup | None,
    *,
    steps: Sequence[int],
    dtype: torch.dtype,
    config: OptimConfig,
    resume: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None,
    poison: int | None = None,
) -> Result:
    """Train `Net` for ``steps``, as `train.step` does; rank ``poison`` has a NaN in its gradient."""
    net = Net(dtype)
    if resume is not None:
        net.load_state_dict(resume[0])
    params = dict(net.named_parameters())
    cost = {row.name: row.cost for row in describe_groups(net, config=config)}
    dp = DataParallel(params, group=group, bucket_bytes=1024, cost=cost)
    optimizer = ShardedOptimizer(params, roles=named_roles(net), config=config, dp=dp, qk_targets=[TARGET])
    if resume is not None:
        optimizer.load_state_dict({key: resume[1][key] for key in optimizer.state_names()})
    reports, gradients = [], {}
    for step in steps:
        tokens = sum(len(ids) for row in microbatches(step) for ids in row)
        dp.zero_gradients()
        *early, last = shares(step, rank=dp.rank, size=dp.size)
        for ids in early:
            (net(ids) / tokens).backward()
        with dp.last_microbatch():
            loss = net(last) / tokens
            (loss * (math.nan if poison == dp.rank else 1.0)).backward()
        dp.finish()
        gradients = {name: x.clone() for name, x in dp.owned_gradients().items()}
        reports.append(finalize(dp, clip_norm=config.clip_norm, world=Axis("world", dp.group, dp.rank, dp.size)))
        if reports[-1].finite:
            maxima = torch.tensor([[120.0, 90.0]])
            optimizer.step(dp.owned_gradients(), lr=0.02, clip=reports[-1].clip, max_logits=maxima)
    weights = {name: param.detach().clone() for name, param in params.items()}
    return Result(reports, gradients, weights, {key: x.clone() for key, x in optimizer.state_dict().items()})


def train_on_ranks(size: int, options: dict) -> Result | None:
    """`train` on the last ``size`` ranks of the world; None on the others."""
    members = list(range(dist.get_world_size() - size, dist.get_world_size()))
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    return train(group, **options)


def on_ranks(pool: RankPool, size: int, **options: object) -> list[Result]:
    return [result for result in pool.run(train_on_ranks, size, options) if result is not None]


def union(dicts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """All entries; where ranks share a key they must agree."""
    merged: dict[str, Tensor] = {}
    for entries in dicts:
        for key, x in entries.items():
            assert torch.equal(merged.setdefault(key, x), x), key
    return merged


FP64 = {"dtype": torch.float64, "config": OptimConfig(clip_norm=0.1)}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_equal_one_process(pool: RankPool, size: int) -> None:
    whole = train(None, steps=range(3), **FP64)
    assert all(report.clip < 1 for report in whole.reports)
    results = on_ranks(pool, size, steps=range(3), **FP64)
    assert len(results) == size
    for result in results:
        assert result.reports == results[0].reports
        norms = [report.norm for report in result.reports]
        assert norms == pytest.approx([report.norm for report in whole.reports], rel=1e-12)
        for name, weight in whole.weights.items():
            torch.testing.assert_close(result.weights[name], weight, rtol=1e-9, atol=1e-10)
            assert torch.equal(result.weights[name], results[0].weights[name])
    assert sum(len(result.gradients) for result in results) == len(whole.gradients)
    for name, gradient in union([result.gradients for result in results]).items():
        torch.testing.assert_close(gradient, whole.gradients[name], rtol=1e-9, atol=1e-10)
    state = union([result.state for result in results])
    assert state.keys() == whole.state.keys()
    for key, x in whole.state.items():
        torch.testing.assert_close(state[key], x, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_state_saved_on_two_ranks_loads_anywhere(pool: RankPool, size: int) -> None:
    saved = on_ranks(pool, 2, steps=range(2), **FP64)
    resume = (saved[0].weights, union([result.state for result in saved]))
    # No step: what is loaded is what was saved, to the bit.
    if size == 1:
        loaded = [train(None, steps=[], resume=resume, **FP64)]
    else:
        loaded = on_ranks(pool, size, steps=[], resume=resume, **FP64)
    state = union([result.state for result in loaded])
    assert state.keys() == resume[1].keys()
    assert all(torch.equal(state[key], x) for key, x in resume[1].items())
    assert all(torch.equal(loaded[-1].weights[name], x) for name, x in resume[0].items())


def test_training_goes_on_at_another_size(pool: RankPool) -> None:
    straight = train(None, steps=range(4), **FP64)
    saved = on_ranks(pool, 2, steps=range(2), **FP64)
    resume = (saved[0].weights, union([result.state for result in saved]))
    for resumed in (
        train(None, steps=[2, 3], resume=resume, **FP64),
        *on_ranks(pool, 4, steps=[2, 3], resume=resume, **FP64),
    ):
        for name, weight in straight.weights.items():
            torch.testing.assert_close(resumed.weights[name], weight, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_resume_equals_straight_bitwise(pool: RankPool, dtype: torch.dtype) -> None:
    options = {"dtype": dtype, "config": FP64["config"]}
    straight = on_ranks(pool, 2, steps=range(4), **options)
    half = on_ranks(pool, 2, steps=range(2), **options)
    resume = (half[0].weights, union([result.state for result in half]))
    resumed = on_ranks(pool, 2, steps=range(2, 4), resume=resume, **options)
    for one, other in zip(straight, resumed, strict=True):
        assert one.reports[2:] == other.reports
        assert one.state.keys() == other.state.keys()
        assert all(torch.equal(x, other.state[key]) for key, x in one.state.items())
        assert all(torch.equal(x, other.weights[name]) for name, x in one.weights.items())


def test_bf16_weights_are_equal_on_all_ranks_with_fp32_state(pool: RankPool) -> None:
    results = on_ranks(pool, 4, steps=range(3), dtype=torch.bfloat16, config=FP64["config"])
    masters = union([result.state for result in results])
    for result in results:
        for name, weight in result.weights.items():
            assert weight.dtype == torch.bfloat16
            assert masters[f"{name}/master"].dtype == torch.float32
            assert torch.equal(weight, masters[f"{name}/master"].bfloat16())
        assert all(x.dtype == torch.float32 for x in result.gradients.values())


@pytest.mark.parametrize("poison", [0, 1])
def test_a_bad_gradient_on_one_rank_stops_all_and_changes_nothing(pool: RankPool, poison: int) -> None:
    before = on_ranks(pool, 2, steps=[], **FP64)
    after = on_ranks(pool, 2, steps=[0], poison=poison, **FP64)
    for rank in range(2):
        assert [report.finite for report in after[rank].reports] == [False]
        for name, weight in before[rank].weights.items():
            assert torch.equal(after[rank].weights[name], weight)
        for key, x in before[rank].state.items():
            assert torch.equal(after[rank].state[key], x)


def sum_of_matrices(count: int) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    """Equal matrices; each rank's backward visits them in its own order, and skips one of its own."""
    rank = dist.get_rank()
    params = {f"m{i}": nn.Parameter(torch.zeros(6, 4)) for i in range(count)}
    dp = DataParallel(params, group=dist.group.WORLD, bucket_bytes=64)
    names = list(params)
    order = names[rank:] + names[:rank]
    with dp.last_microbatch():
        for name in order[1:]:
            (params[name] * (rank + 1)).sum().backward()
    dp.finish()
    return dp.owned_names, {name: x.clone() for name, x in dp.owned_gradients().items()}


@pytest.mark.parametrize("count", [19, 16, 3, 1])
def test_any_number_of_matrices_and_any_order_of_gradients(pool: RankPool, count: int) -> None:
    results = pool.run(sum_of_matrices, count)
    owned = [len(names) for names, _ in results]
    assert sum(owned) == count
    assert max(owned) - min(owned) <= 1
    names = [f"m{i}" for i in range(count)]
    everyone = 1 + 2 + 3 + 4.0
    for name, total in union([gradients for _, gradients in results]).items():
        skipped = sum(rank + 1 for rank in range(4) if (names[rank:] + names[:rank])[0] == name)
        assert torch.equal(total, torch.full((6, 4), everyone - skipped)), name


def record_reductions() -> tuple[list[int], list[int]]:
    """Elements of each reduction begun inside backward, and of all; "middle" gets no gradient."""
    params = {name: nn.Parameter(torch.ones(n)) for name, n in [("first", 64), ("middle", 128), ("last", 256)]}
    dp = DataParallel(params, group=dist.group.WORLD, bucket_bytes=4)
    begun: list[int] = []

    def reduce(x: Tensor, **options: object) -> dist.Work:
        assert x.dtype == torch.float32
        assert options["async_op"]
        begun.append(x.numel())
        return REDUCE(x, **options)

    with patch.object(dist, "reduce", reduce):
        with dp.last_microbatch():
            params["first"].sum().backward()
            params["last"].sum().backward()
        early = list(begun)
        dp.finish()
    return early, begun


def test_reduction_overlaps_backward_and_waits_for_predecessors(pool: RankPool) -> None:
    assert pool.run(record_reductions) == [([256], [256, 128, 64])] * 4


def exact_sum() -> dict[str, Tensor]:
    """A bf16 parameter whose gradient is 256 on rank 0, 1 or 1/4 elsewhere."""
    w = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    dp = DataParallel({"w": w}, group=dist.group.WORLD)
    (w * [256.0, 1.0, 1.0, 0.25][dist.get_rank()]).sum().backward()
    dp.finish()
    return {name: x.clone() for name, x in dp.owned_gradients().items()}


def test_reduction_is_fp32(pool: RankPool) -> None:
    assert union(pool.run(exact_sum))["w"].item() == 258.25


def mesh_here() -> tuple[int, int, bool]:
    mesh: Mesh = build_mesh(ParallelConfig(dp=4))
    return mesh.dp.rank, mesh.dp.size, mesh.dp.group is dist.group.WORLD


def test_mesh_is_the_default_group(pool: RankPool) -> None:
    assert pool.run(mesh_here) == [(rank, 4, True) for rank in range(4)]
