"""Muon on matrices that tensor parallelism cuts: the whole matrix's update, whichever way it is cut and shared."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from model.params import ParamRole
from optim.distributed import ShardedOptimizer
from optim.exchange import make_exchanges
from optim.groups import Group, OptimConfig, make_group
from parallel.data import DataParallel
from parallel.config import ParallelConfig
from parallel.mesh import Axis, Mesh, make_mesh
from parallel.sharding import ShardSpec
from tests.bench.live import LiveMemory
from tests.dist.ranks import RankPool

MATRIX = ParamRole(kind="matrix")
HEADS = ParamRole(kind="matrix", heads=4)
OUTPUT = ParamRole(kind="matrix", heads=4, by_columns=True)
# Role, whole shape, dim that is cut.
PARAMETERS = {
    "gate": (MATRIX, (64, 24), 0),
    "down": (MATRIX, (24, 64), 1),
    "experts.up": (MATRIX, (5, 16, 20), 1),
    "experts.down": (MATRIX, (5, 20, 16), 2),
    "q": (HEADS, (16, 24), 0),
    "out": (OUTPUT, (24, 16), 1),
    "low rank": (MATRIX, (8, 24), None),
}
SPECS = {
    name: ShardSpec(shape=shape, shards=() if dim is None else ((dim, "tp"),))
    for name, (_, shape, dim) in PARAMETERS.items()
}
LR = 0.02


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


def random(seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=g, dtype=dtype) for name, (_, shape, _) in PARAMETERS.items()}


def cease(gradients: dict[str, Tensor]) -> None:
    """No gradient for some matrices, and none for the part of one rank of others."""
    gradients["down"].zero_()
    gradients["experts.up"][2] = 0
    gradients["experts.down"][0] = 0
    gradients["q"][4:8] = 0  # a head
    gradients["gate"][:16] = 0  # the first of four parts
    gradients["experts.up"][3, 4:8] = 0


def run_muon(mesh: Mesh, dtype: torch.dtype, config: OptimConfig, *, ceasing: bool = False) -> dict[str, Tensor]:
    """This rank's slices of the weights after three steps, and of the momenta if it owns them.

    Args:
        ceasing: as `cease`, after the first step.
    """
    values = random(0, dtype)
    params = {name: nn.Parameter(spec.take(values[name], mesh)) for name, spec in SPECS.items()}
    axes = {name: mesh.replicas if spec.copies == "replicas" else mesh.dense for name, spec in SPECS.items()}
    dp = DataParallel(params, axis=mesh.replicas, axes=axes)
    roles = {name: role for name, (role, _, _) in PARAMETERS.items()}
    optimizer = ShardedOptimizer(params, roles=roles, config=config, dp=dp, specs=SPECS, tp=mesh.tp)
    for step in range(3):
        gradients = random(step + 1, torch.promote_types(dtype, torch.float32))
        if ceasing and step > 0:
            cease(gradients)
        owned = {name: SPECS[name].take(x, mesh) for name, x in gradients.items() if name in dp.owned_names}
        optimizer.step(owned, lr=LR)
    return {name: param.detach() for name, param in params.items()} | optimizer.state_dict()


def muon_on_rank(dtype: torch.dtype, config: OptimConfig, ceasing: bool = False) -> dict[str, Tensor]:
    world = dist.get_world_size()
    return run_muon(make_mesh(ParallelConfig(tp=world), world), dtype, config, ceasing=ceasing)


@pytest.mark.parametrize(
    "options",
    [{}, {"nesterov": False}, {"per_head": False}, {"output_per_head": True}],
    ids=lambda options: next(iter(options), "default"),
)
def test_cut_matrices_are_updated_as_whole_ones(pool: RankPool, options: dict[str, bool]) -> None:
    config = OptimConfig(ns_dtype="fp64", **options)
    whole = run_muon(Mesh(), torch.float64, config)
    ranks = pool.run(muon_on_rank, torch.float64, config)
    for name, (_, _, dim) in PARAMETERS.items():
        for key in (name, f"{name}/momentum"):
            held = [rank[key] for rank in ranks if key in rank]
            found = held[0] if dim is None else torch.cat(held, dim=dim)
            torch.testing.assert_close(found, whole[key], rtol=1e-9, atol=1e-11, msg=key)


def test_matrices_without_a_gradient_rest_whether_cut_or_whole(pool: RankPool) -> None:
    config = OptimConfig(ns_dtype="fp64")
    whole = run_muon(Mesh(), torch.float64, config, ceasing=True)
    ranks = pool.run(muon_on_rank, torch.float64, config, True)
    for name, (_, _, dim) in PARAMETERS.items():
        held = [rank[name] for rank in ranks]
        found = held[0] if dim is None else torch.cat(held, dim=dim)
        torch.testing.assert_close(found, whole[name], rtol=1e-9, atol=1e-11, msg=name)
    # One step with a gradient and two without.
    first = random(1, torch.float64)
    for name, place in (("down", slice(None)), ("experts.up", 2), ("experts.down", 0), ("q", slice(4, 8))):
        weight = random(0, torch.float64)[name][place] * (1 - LR * 0.1) ** 3
        update = first_update(first[name][place]) * (1 - LR * 0.1) ** 2
        torch.testing.assert_close(whole[name][place], weight + update, rtol=1e-9, atol=1e-11)
    for name, place in (("gate", slice(0, 16)), ("experts.up", (3, slice(4, 8)))):
        # What had a gradient elsewhere moved on here too.
        weight = random(0, torch.float64)[name][place] * (1 - LR * 0.1) ** 3
        assert (whole[name][place] - weight).norm() > 2 * LR


@pytest.mark.parametrize("ns_dtype", ["fp32", "bf16"])
def test_bf16_parameters_with_fp32_masters(pool: RankPool, ns_dtype: str) -> None:
    config = OptimConfig(ns_dtype=ns_dtype)
    whole = run_muon(Mesh(), torch.bfloat16, config)
    ranks = pool.run(muon_on_rank, torch.bfloat16, config)
    for name, (_, shape, dim) in PARAMETERS.items():
        key = f"{name}/master"
        held = [rank[key] for rank in ranks if key in rank]
        found = held[0] if dim is None else torch.cat(held, dim=dim)
        # A few roundings of the direction, in units of the largest update.
        largest = 3 * LR * 0.2 * max(shape[-2:]) ** 0.5
        torch.testing.assert_close(found, whole[key], rtol=0, atol=largest * (2**-6 if ns_dtype == "bf16" else 2**-18))


def muon_with_rounds(dtype: torch.dtype, ns_dtype: str, bucket_mb: float) -> tuple[dict[str, Tensor], int]:
    """`run_muon` over tp=2, and the calls of the exchange."""
    mesh = make_mesh(ParallelConfig(tp=2), dist.get_world_size())
    state = run_muon(mesh, dtype, OptimConfig(ns_dtype=ns_dtype, bucket_mb=bucket_mb))
    return state, mesh.tp.traffic.calls["tp all_to_all"]


@pytest.mark.parametrize(("dtype", "ns_dtype"), [(torch.float32, "fp32"), (torch.bfloat16, "bf16")], ids=str)
def test_rounds_of_one_matrix_and_of_all_are_equal_to_the_bit(
    pool: RankPool, dtype: torch.dtype, ns_dtype: str
) -> None:
    single, together = (pool.run(muon_with_rounds, dtype, ns_dtype, bucket_mb) for bucket_mb in (1e-6, 32.0))
    for (one, calls), (all_, fewer) in zip(single, together, strict=True):
        assert calls > fewer == 2 * 3
        assert one.keys() == all_.keys()
        assert all(torch.equal(x, all_[key]) for key, x in one.items())


def test_orthogonalising_parts_would_be_far_off() -> None:
    """What the exchange is for: four parts on their own are another update (deepspeedai/DeepSpeed#8437)."""
    x = random(0, torch.float64)["gate"]
    whole = first_update(x)
    parts = torch.cat([first_update(part) for part in x.chunk(4)])
    assert (parts - whole).norm() / whole.norm() > 0.3


def first_update(gradient: Tensor) -> Tensor:
    """The first update that a matrix of zeros gets."""
    params = {"x": nn.Parameter(torch.zeros_like(gradient))}
    dp = DataParallel(params, axis=Axis())
    ShardedOptimizer(params, roles={"x": MATRIX}, config=OptimConfig(), dp=dp).step({"x": gradient.clone()}, lr=LR)
    return params["x"].detach()


def cut_groups(world: int) -> dict[str, Group]:
    """The groups of the headless matrices that are cut, on any rank of ``world``."""
    mesh = Mesh(tp=Axis("tp", None, 0, world))
    groups = {}
    for name, (role, shape, _) in PARAMETERS.items():
        param = torch.empty(SPECS[name].local_shape(mesh), device="meta")
        group = make_group(name, param=param, role=role, config=OptimConfig(output_per_head=True), spec=SPECS[name])
        assert (group.cut is not None) == (role is MATRIX and SPECS[name].shards != ())
        if group.cut is not None:
            assert group.blocks == (((shape[0] if len(shape) == 3 else 1), *shape[-2:]),)
            groups[name] = group
    return groups


def round_trip(round_bytes: int) -> tuple[list[dict[str, Tensor]], dict[str, int]]:
    """The whole matrices of this rank in each round, and what it sent; checks what comes back."""
    world = dist.get_world_size()
    mesh = make_mesh(ParallelConfig(tp=world), world)
    values, groups = random(0, torch.float32), cut_groups(world)
    mine = {name: SPECS[name].take(values[name], mesh) for name in groups}
    back = {name: torch.full_like(part, torch.nan) for name, part in mine.items()}
    rounds = []
    for exchange in make_exchanges(groups, mesh.tp, round_bytes=round_bytes):
        whole = exchange.gather(exchange.parts(mine))
        assert {name: x.shape for name, x in whole.items()} == {name: g.shape for name, g in exchange.share.items()}
        places = exchange.parts(back)
        for name, part in exchange.scatter({name: x.bfloat16() for name, x in whole.items()}).items():
            assert part.dtype == torch.bfloat16
            places[name].copy_(part)
        rounds.append(whole)
    for name, part in mine.items():
        assert torch.equal(back[name], part.bfloat16().float()), name
    return rounds, mesh.tp.traffic.sent


@pytest.mark.parametrize(("round_bytes", "rounds"), [(1, 3), (7424, 2), (2**20, 1)])
def test_whole_matrices_and_back(pool: RankPool, round_bytes: int, rounds: int) -> None:
    ranks = pool.run(round_trip, round_bytes)
    values, groups = random(0, torch.float32), cut_groups(4)
    of_rounds = list(zip(*(wholes for wholes, _ in ranks), strict=True))
    assert len(of_rounds) == rounds
    for name in groups:
        joined = torch.cat([whole[name] for of_ranks in of_rounds for whole in of_ranks if name in whole])
        assert torch.equal(joined, values[name].view(joined.shape)), name
    elements = sum(values[name].numel() for name in groups)
    # fp32 there, bf16 back; three quarters of every matrix travel.
    assert sum(sent["tp all_to_all"] for _, sent in ranks) == elements * 3 // 4 * (4 + 2)


def live_peak(matrices: int, bucket_mb: float) -> int:
    """Most bytes that a step takes on top of weights, state and gradients, all matrices of [64, 64] cut over tp."""
    world = dist.get_world_size()
    mesh = make_mesh(ParallelConfig(tp=world), world)
    spec = ShardSpec(shape=(matrices, 64, 64), shards=((1, "tp"),))
    params = {"experts": nn.Parameter(torch.zeros(spec.local_shape(mesh)))}
    dp = DataParallel(params, axis=mesh.dense)
    config = OptimConfig(bucket_mb=bucket_mb)
    optimizer = ShardedOptimizer(
        params, roles={"experts": MATRIX}, config=config, dp=dp, specs={"experts": spec}, tp=mesh.tp
    )
    gradients = {"experts": torch.randn(params["experts"].shape)}
    with LiveMemory([*params.values(), *optimizer.state_dict().values(), *gradients.values()]) as live:
        optimizer.step(gradients, lr=LR)
    return live.peak


def test_a_step_takes_the_memory_of_a_round(pool: RankPool) -> None:
    matrix = 4 * 64 * 64
    # Whole and orthogonal ones, two iterates, two Gram matrices; gloo may keep what travelled a moment longer.
    assert max(pool.run(live_peak, 64, 2 * matrix / 2**20)) < 2 * matrix * (6 + 2 + 0.1)
    assert min(pool.run(live_peak, 64, 32.0)) > 16 * matrix * 6
