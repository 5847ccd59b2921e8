"""Two and four data-parallel ranks against one process: gradients, norm, clip, weights, optimizer state.

Ranks of a group of two are the last two of four, so that group ranks and global ranks differ. Every rank has its own
number of tokens in its microbatches, and one expert has tokens on some ranks only. With ZeRO-1 every rank has its own
number of microbatches too; ZeRO-2, which reduces each, is given empty ones to make them equal.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from data.loader import Microbatch
from model.loss import IGNORE_INDEX
from model.params import ParamRole, declare, initialize, named_roles
from optim.distributed import ShardedOptimizer
from optim.groups import OptimConfig, describe_groups
from optim.qk_clip import QKClipTarget
from parallel.data import DataParallel
from parallel.grads import GradientReport, finalize
from parallel.config import ParallelConfig
from parallel.mesh import Axis, Mesh, build_mesh
from tests.dist.parity import Case, Outcome, check_parity, run_alone, run_on_mesh
from tests.dist.ranks import RankPool
from tests.model.tiny import tiny_model

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


def padded(step: int, *, rank: int, size: int) -> list[Tensor]:
    """`shares`, with empty microbatches in front so that all ranks have as many."""
    most = max(len(shares(step, rank=r, size=size)) for r in range(size))
    own = shares(step, rank=rank, size=size)
    return [torch.empty(0, dtype=torch.int64)] * (most - len(own)) + own


def train(
    axis: Axis,
    *,
    steps: Sequence[int],
    dtype: torch.dtype,
    config: OptimConfig,
    zero: int = 1,
    resume: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None,
    poison: int | None = None,
) -> Result:
    """Train `Net` for ``steps``, as `train.step` does; rank ``poison`` has a NaN in its gradient."""
    net = Net(dtype)
    if resume is not None:
        net.load_state_dict(resume[0])
    params = dict(net.named_parameters())
    cost = {row.name: row.cost for row in describe_groups(net, config=config)}
    dp = DataParallel(params, axis=axis, zero=zero, bucket_bytes=1024, cost=cost)
    optimizer = ShardedOptimizer(params, roles=named_roles(net), config=config, dp=dp, qk_targets=[TARGET])
    if resume is not None:
        optimizer.load_state_dict({key: resume[1][key] for key in optimizer.state_names()})
    reports, gradients = [], {}
    for step in steps:
        tokens = sum(len(ids) for row in microbatches(step) for ids in row)
        dp.zero_gradients()
        own = (shares if zero == 1 else padded)(step, rank=axis.rank, size=axis.size)
        for index, ids in enumerate(own):
            last = index == len(own) - 1
            with dp.backward(last=last):
                (net(ids) / tokens * (math.nan if last and poison == axis.rank else 1.0)).backward()
        dp.finish()
        gradients = {name: x.clone() for name, x in dp.owned_gradients().items()}
        reports.append(finalize(dp, clip_norm=config.clip_norm, world=axis))
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
    return train(Axis("dp", group, dist.get_rank(group), size), **options)


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


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_equal_one_process(pool: RankPool, size: int, zero: int) -> None:
    whole = train(Axis(), steps=range(3), **FP64)
    assert all(report.clip < 1 for report in whole.reports)
    results = on_ranks(pool, size, steps=range(3), zero=zero, **FP64)
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
        loaded = [train(Axis(), steps=[], resume=resume, **FP64)]
    else:
        loaded = on_ranks(pool, size, steps=[], resume=resume, **FP64)
    state = union([result.state for result in loaded])
    assert state.keys() == resume[1].keys()
    assert all(torch.equal(state[key], x) for key, x in resume[1].items())
    assert all(torch.equal(loaded[-1].weights[name], x) for name, x in resume[0].items())


def test_training_goes_on_at_another_size(pool: RankPool) -> None:
    straight = train(Axis(), steps=range(4), **FP64)
    saved = on_ranks(pool, 2, steps=range(2), **FP64)
    resume = (saved[0].weights, union([result.state for result in saved]))
    for resumed in (
        train(Axis(), steps=[2, 3], resume=resume, **FP64),
        *on_ranks(pool, 4, steps=[2, 3], resume=resume, **FP64),
    ):
        for name, weight in straight.weights.items():
            torch.testing.assert_close(resumed.weights[name], weight, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_resume_equals_straight_bitwise(pool: RankPool, dtype: torch.dtype, zero: int) -> None:
    options = {"dtype": dtype, "config": FP64["config"], "zero": zero}
    straight = on_ranks(pool, 2, steps=range(4), **options)
    half = on_ranks(pool, 2, steps=range(2), **options)
    resume = (half[0].weights, union([result.state for result in half]))
    resumed = on_ranks(pool, 2, steps=range(2, 4), resume=resume, **options)
    for one, other in zip(straight, resumed, strict=True):
        assert one.reports[2:] == other.reports
        assert one.state.keys() == other.state.keys()
        assert all(torch.equal(x, other.state[key]) for key, x in one.state.items())
        assert all(torch.equal(x, other.weights[name]) for name, x in one.weights.items())


@pytest.mark.parametrize("zero", [1, 2])
def test_bf16_weights_are_equal_on_all_ranks_with_fp32_state(pool: RankPool, zero: int) -> None:
    results = on_ranks(pool, 4, steps=range(3), dtype=torch.bfloat16, config=FP64["config"], zero=zero)
    masters = union([result.state for result in results])
    for result in results:
        for name, weight in result.weights.items():
            assert weight.dtype == torch.bfloat16
            assert masters[f"{name}/master"].dtype == torch.float32
            assert torch.equal(weight, masters[f"{name}/master"].bfloat16())
        assert all(x.dtype == torch.float32 for x in result.gradients.values())


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("poison", [0, 1])
def test_a_bad_gradient_on_one_rank_stops_all_and_changes_nothing(pool: RankPool, poison: int, zero: int) -> None:
    before = on_ranks(pool, 2, steps=[], **FP64)
    after = on_ranks(pool, 2, steps=[0], poison=poison, zero=zero, **FP64)
    for rank in range(2):
        assert [report.finite for report in after[rank].reports] == [False]
        for name, weight in before[rank].weights.items():
            assert torch.equal(after[rank].weights[name], weight)
        for key, x in before[rank].state.items():
            assert torch.equal(after[rank].state[key], x)


def world() -> Axis:
    return Axis("world", dist.group.WORLD, dist.get_rank(), dist.get_world_size())


def sum_of_matrices(count: int, zero: int) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    """Equal matrices, two microbatches; each rank's backward visits them in its own order, and skips one of its own."""
    rank = dist.get_rank()
    params = {f"m{i}": nn.Parameter(torch.zeros(6, 4)) for i in range(count)}
    dp = DataParallel(params, axis=world(), zero=zero, bucket_bytes=64)
    names = list(params)
    order = names[rank:] + names[:rank]
    for last in (False, True):
        with dp.backward(last=last):
            for name in order[1:]:
                (params[name] * (rank + 1) / 2).sum().backward()
    dp.finish()
    return dp.owned_names, {name: x.clone() for name, x in dp.owned_gradients().items()}


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("count", [19, 16, 3, 1])
def test_any_number_of_matrices_and_any_order_of_gradients(pool: RankPool, count: int, zero: int) -> None:
    results = pool.run(sum_of_matrices, count, zero)
    owned = [len(names) for names, _ in results]
    assert sum(owned) == count
    assert max(owned) - min(owned) <= 1
    names = [f"m{i}" for i in range(count)]
    everyone = 1 + 2 + 3 + 4.0
    for name, total in union([gradients for _, gradients in results]).items():
        skipped = sum(rank + 1 for rank in range(4) if (names[rank:] + names[:rank])[0] == name)
        assert torch.equal(total, torch.full((6, 4), everyone - skipped)), name


class Reductions:
    """Elements of every reduction, in order."""

    def __init__(self) -> None:
        self.begun: list[int] = []

    def __call__(self, x: Tensor, **options: object) -> dist.Work:
        assert x.dtype == torch.float32
        assert options["async_op"]
        self.begun.append(x.numel())
        return REDUCE(x, **options)

    def take(self) -> list[int]:
        taken, self.begun = self.begun, []
        return taken


SIZES = {"first": 64, "middle": 128, "last": 256}


def record_reductions(zero: int) -> list[list[int]]:
    """Reductions begun inside the backward of each of two microbatches, and after; "middle" gets no gradient."""
    params = {name: nn.Parameter(torch.ones(n)) for name, n in SIZES.items()}
    dp = DataParallel(params, axis=world(), zero=zero, bucket_bytes=4)
    begun = []
    with patch.object(dist, "reduce", Reductions()) as reduce:
        for last in (False, True):
            with dp.backward(last=last):
                params["first"].sum().backward()
                params["last"].sum().backward()
                begun.append(reduce.take())
            begun.append(reduce.take())
        dp.finish()
        begun.append(reduce.take())
    return begun


def test_reduction_overlaps_backward_and_waits_for_predecessors(pool: RankPool) -> None:
    microbatch = [[256], [128, 64]]
    assert pool.run(record_reductions, 1) == [[[], [], *microbatch, []]] * 4
    assert pool.run(record_reductions, 2) == [[*microbatch, *microbatch, []]] * 4


def exact_sum(zero: int) -> dict[str, Tensor]:
    """A bf16 parameter whose gradient is 256 on rank 0, 1 or 1/4 elsewhere; its two halves are two microbatches."""
    w = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    dp = DataParallel({"w": w}, axis=world(), zero=zero)
    for last in (False, True):
        with dp.backward(last=last):
            (w * ([256.0, 1.0, 1.0, 0.25][dist.get_rank()] / 2)).sum().backward()
    dp.finish()
    return {name: x.clone() for name, x in dp.owned_gradients().items()}


@pytest.mark.parametrize("zero", [1, 2])
def test_reduction_is_fp32(pool: RankPool, zero: int) -> None:
    assert union(pool.run(exact_sum, zero))["w"].item() == 258.25


def interleaved_parts(zero: int) -> tuple[dict[str, Tensor], list[int]]:
    """Two virtual stages whose backwards alternate, as in a pipeline, with the weight gradients of one deferred."""
    params = {name: nn.Parameter(torch.zeros(n)) for name, n in SIZES.items()}
    parts = {"first": 0, "middle": 0, "last": 1}
    dp = DataParallel(params, axis=world(), parts=parts, zero=zero, bucket_bytes=2**20)
    scale = dist.get_rank() + 1.0
    with patch.object(dist, "reduce", Reductions()) as reduce:
        for part, microbatch in [(1, 0), (1, 1), (0, 0), (1, 2), (0, 1), (0, 2)]:
            # A gradient that comes before its microbatch's block waits in its bucket.
            if part == 0:
                (params["first"] * scale).sum().backward()
            with dp.backward(part, last=microbatch == 2):
                if part == 0:
                    dp.add_gradient(params["middle"], torch.full((128,), scale))
                else:
                    (params["last"] * scale).sum().backward()
        dp.finish()
        return {name: x.clone() for name, x in dp.owned_gradients().items()}, reduce.take()


@pytest.mark.parametrize("zero", [1, 2])
def test_parts_are_reduced_apart(pool: RankPool, zero: int) -> None:
    results = pool.run(interleaved_parts, zero)
    total = union([gradients for gradients, _ in results])
    assert {name: set(x.tolist()) for name, x in total.items()} == {name: {30.0} for name in SIZES}
    # `middle` and `first` lie in different buckets of part 0, because a small model is cut finer.
    one = {0: [128, 64], 1: [256]}
    order = [1, 0] if zero == 1 else [1, 1, 0, 1, 0, 0]
    assert [begun for _, begun in results] == [[n for part in order for n in one[part]]] * 4


def gradient_memory(zero: int) -> tuple[int, int, int, int]:
    """Bytes: owned, held after a step, most held in backward, largest bucket. 16 equal layers, 3 microbatches."""
    layers = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(16)))
    dp = DataParallel(dict(layers.named_parameters()), axis=world(), zero=zero, bucket_bytes=4 * 32 * 32)
    seen = []
    for param in layers.parameters():
        param.register_post_accumulate_grad_hook(lambda _: seen.append(dp.gradient_bytes()))
    dp.zero_gradients()
    for last in (False, False, True):
        with dp.backward(last=last):
            layers(torch.ones(3, 32)).sum().backward()
    dp.finish()
    owned = sum(4 * b.numel for b in dp.plan.buckets if b.owner == dist.get_rank())
    return owned, dp.gradient_bytes(), max(seen), max(4 * b.numel for b in dp.plan.buckets)


def test_zero_2_holds_the_sums_of_owned_buckets_only(pool: RankPool) -> None:
    whole = 16 * 32 * 32 * 4
    assert pool.run(gradient_memory, 1) == [(whole // 4, whole, whole, 4096)] * 4
    for owned, after, most, largest in pool.run(gradient_memory, 2):
        assert owned == after == whole // 4
        # Beside them at least the one being filled; how many reductions run at once depends on the other ranks.
        assert owned + largest <= most <= whole


def slow_peer() -> tuple[float, int]:
    """Rank 3 begins its reductions late: the others go on, and hold what has not been sent."""
    params = {str(i): nn.Parameter(torch.zeros(64)) for i in range(16)}
    dp = DataParallel(params, axis=world(), zero=2, bucket_bytes=4)
    group = dist.group.WORLD
    with dp.backward(last=True):
        for index, param in enumerate(reversed(params.values())):
            param.sum().backward()
            if index == 11 and dist.get_rank() != 3:
                held = dp.gradient_bytes()
                dist.send(torch.ones(1), dst=3, group=group)
            if index == 0 and dist.get_rank() == 3:
                for peer in range(3):
                    dist.recv(torch.ones(1), src=peer, group=group)
                held = 0
    dp.finish()
    return sum(float(x.sum()) for x in dp.owned_gradients().values()), held


def test_no_rank_waits_inside_its_backward(pool: RankPool) -> None:
    """Rank 3 needs the others to have got past their twelfth bucket before it reduces its first two."""
    results = pool.run(slow_peer)
    assert sum(total for total, _ in results) == 16 * 64 * 4
    # Eleven reductions cannot have ended without rank 3, and a bucket is 256 bytes.
    assert all(held >= 11 * 256 for _, held in results[:3])


def traffic_of_a_step(zero: int) -> tuple[dict[str, int], dict[str, int], list[tuple[int, int]]]:
    """Calls, bytes, and (owner, gradient bytes) of each bucket; three microbatches, bf16 weights."""
    params = {name: nn.Parameter(torch.zeros(n, dtype=torch.bfloat16)) for name, n in SIZES.items()}
    axis = world()
    dp = DataParallel(params, axis=axis, zero=zero, bucket_bytes=4)
    for last in (False, False, True):
        with dp.backward(last=last):
            sum(param.sum() for param in params.values()).backward()
    dp.finish()
    dp.broadcast_parameters()
    return axis.traffic.calls, axis.traffic.sent, [(b.owner, 4 * b.numel) for b in dp.plan.buckets]


@pytest.mark.parametrize(("zero", "reductions"), [(1, 1), (2, 3)])
def test_traffic_is_that_of_a_ring(pool: RankPool, zero: int, reductions: int) -> None:
    for rank, (calls, sent, buckets) in enumerate(pool.run(traffic_of_a_step, zero)):
        assert calls == {"world reduce": 3 * reductions, "world broadcast": 3}
        assert sent["world reduce"] == reductions * sum(size for owner, size in buckets if owner != rank)
        assert sent["world broadcast"] == sum(size // 2 for owner, size in buckets if owner != (rank + 1) % 4)


OPTIM = OptimConfig(clip_norm=0.05, ns_dtype="fp64", bucket_mb=0.01)


def packed(seed: int) -> Microbatch:
    """24 tokens in three documents, with very different numbers of labels by seed."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(1, 96, (2, 1, 24), generator=generator)
    labels[:, : (seed % 4) * 7] = IGNORE_INDEX
    bounds = torch.tensor([0, 5 + seed % 3, 16, 24], dtype=torch.int32)
    return Microbatch(input_ids=ids, labels=labels, cu_seqlens=bounds, sample_ids=torch.zeros(1, 3).long().numpy())


def model_case() -> Case:
    """Two steps of eight microbatches; all tokens of the first expert layer go to two experts of one rank."""
    model = tiny_model()
    router = model.layers[model.config.moe_layers[0]].ffn.router
    router.bias.zero_()
    router.bias[:2] = 10.0
    values = {name: value.clone() for name, value in model.state_dict().items()}
    return Case(model.config, values, tuple(tuple(packed(8 * s + i) for i in range(8)) for s in range(2)), OPTIM)


@pytest.fixture(scope="module")
def alone() -> Outcome[Tensor]:
    """`model_case` on one rank."""
    return run_alone(model_case())


@pytest.mark.parametrize(
    "mesh",
    [ParallelConfig(dp=4), ParallelConfig(dp=4, ep=2), ParallelConfig(dp=2, cp=2, ep=4)],
    ids=["dp4", "dp4-ep2", "cp2-dp2-ep4"],
)
def test_a_model_with_zero_2_equals_zero_1_and_one_rank(
    pool: RankPool, alone: Outcome[Tensor], mesh: ParallelConfig
) -> None:
    case = model_case()
    assert all(norm > OPTIM.clip_norm for norm in alone.norms)
    one, two = (run_on_mesh(pool, case, dataclasses.replace(mesh, zero=zero)) for zero in (1, 2))
    check_parity(two, alone, tolerance=1e-9)
    check_parity(two, one, tolerance=1e-9)
    # It really is another way: each microbatch's gradients travel, the parameters as before.
    for name in ("replicas", "expert_dp"):
        if f"{name} reduce" in one.traffic:
            assert two.traffic[f"{name} reduce"].calls == 8 // mesh.dp * one.traffic[f"{name} reduce"].calls
            assert two.traffic[f"{name} broadcast"] == one.traffic[f"{name} broadcast"]


def mesh_here() -> tuple[int, int, bool]:
    mesh: Mesh = build_mesh(ParallelConfig(dp=4))
    return mesh.dp.rank, mesh.dp.size, mesh.dp.group is dist.group.WORLD


def test_mesh_is_the_default_group(pool: RankPool) -> None:
    assert pool.run(mesh_here) == [(rank, 4, True) for rank in range(4)]
