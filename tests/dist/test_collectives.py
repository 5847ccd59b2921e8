"""Every collective against its meaning on whole tensors, and its backward as the adjoint: <C x, g> = <x, C^T g>."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast_in_place,
    gather_objects,
    reduce_scatter,
    reduce_start,
)
from parallel.mesh import Axis
from tests.dist.ranks import RankPool

SEND = [[1, 0, 2, 3], [0, 0, 0, 0], [4, 1, 0, 0], [2, 2, 2, 2]]
SIZE = 4


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(SIZE) as ranks:
        yield ranks


def data(rank: int, rows: int, seed: int) -> Tensor:
    return torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * seed + rank))


def apply(name: str, x: Tensor, axis: Axis) -> Tensor:
    receive = [row[axis.rank] for row in SEND]
    return {
        "all_gather": lambda: all_gather(x, axis, dim=1),
        "reduce_scatter": lambda: reduce_scatter(x, axis, dim=1),
        "all_reduce": lambda: all_reduce(x, axis),
        "all_to_all": lambda: all_to_all(x, axis, send=SEND[axis.rank], receive=receive),
    }[name]()


def rows_of(name: str, rank: int) -> int:
    return sum(SEND[rank]) if name == "all_to_all" else 8


def rank_call(name: str, same_g: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, int]]:
    rank = dist.get_rank()
    axis = Axis("tp", dist.group.WORLD, rank, SIZE)
    x = data(rank, rows_of(name, rank), 1).requires_grad_()
    y = apply(name, x, axis)
    g = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(0 if same_g else rank + 50))
    y.backward(g)
    return x.detach(), y.detach(), g, x.grad, axis.traffic.calls


def expected(name: str, xs: list[Tensor]) -> list[Tensor]:
    if name == "all_gather":
        return [torch.cat(xs, dim=1)] * SIZE
    if name == "reduce_scatter":
        return list(sum(xs).split(1, dim=1))
    if name == "all_reduce":
        return [sum(xs)] * SIZE
    parts = [x.split(send) for x, send in zip(xs, SEND)]
    return [torch.cat([parts[source][rank] for source in range(SIZE)]) for rank in range(SIZE)]


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_to_all", "all_reduce"])
def test_values_and_adjoints(pool: RankPool, name: str) -> None:
    same_g = name == "all_reduce"
    results = pool.run(rank_call, name, same_g)
    for (_, y, *_), value in zip(results, expected(name, [r[0] for r in results]), strict=True):
        torch.testing.assert_close(y, value, rtol=1e-14, atol=1e-14)
    forward = sum(float((y * g).sum()) for _, y, g, _, _ in results)
    backward = sum(float((x * dx).sum()) for x, _, _, dx, _ in results)
    # A replicated gradient is one tensor that every rank holds: it counts once.
    assert forward / (SIZE if same_g else 1) == pytest.approx(backward, rel=1e-12)
    assert all(calls and all(key.startswith("tp ") for key in calls) for *_, calls in results)


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce"])
def test_an_axis_of_one_is_the_identity_itself(name: str) -> None:
    x = data(0, 8, 1)
    assert apply(name, x, Axis()) is x


def move_whole(source: int) -> tuple[Tensor, Tensor, list[tuple[int, str]], dict[str, int]]:
    rank = dist.get_rank()
    axis = Axis("dp", dist.group.WORLD, rank, SIZE)
    sent, added = data(rank, 3, 1), data(rank, 3, 2)
    broadcast_in_place(sent, axis, source=source)
    reduce_start(added, axis, owner=source).wait()
    return sent, added, gather_objects((rank, "x" * rank), axis), axis.traffic.sent


@pytest.mark.parametrize("source", [0, 2, 3])
def test_to_one_owner_and_from_it(pool: RankPool, source: int) -> None:
    results = pool.run(move_whole, source)
    for sent, _, objects, _ in results:
        assert torch.equal(sent, data(source, 3, 1))
        assert objects == [(rank, "x" * rank) for rank in range(SIZE)]
    torch.testing.assert_close(results[source][1], sum(data(rank, 3, 2) for rank in range(SIZE)), rtol=1e-14, atol=0)
    size = 3 * 4 * 8
    assert [traffic["dp reduce"] for *_, traffic in results] == [size * (rank != source) for rank in range(SIZE)]
    last = (source - 1) % SIZE
    assert [traffic["dp broadcast"] for *_, traffic in results] == [size * (rank != last) for rank in range(SIZE)]
    assert all(traffic["dp all_gather_object"] > 0 for *_, traffic in results)


def test_alone_nothing_is_moved_or_counted() -> None:
    x, axis = data(0, 3, 1), Axis()
    broadcast_in_place(x, axis, source=0)
    assert torch.equal(x, data(0, 3, 1))
    assert gather_objects("value", axis) == ["value"]
    assert not axis.traffic.calls
