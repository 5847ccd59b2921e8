"""The helper that all distributed tests stand on."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.dist.ranks import RankError, RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


def rank_and_sum(value: float) -> tuple[int, torch.Tensor]:
    x = torch.tensor([value])
    dist.all_reduce(x)
    return dist.get_rank(), x


def fail_on(rank: int) -> int:
    if dist.get_rank() == rank:
        raise ValueError("wrong on purpose")
    return dist.get_rank()


def test_results_come_in_rank_order(pool: RankPool) -> None:
    assert pool.run(rank_and_sum, 1.5) == [(0, torch.tensor([3.0])), (1, torch.tensor([3.0]))]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_is_raised_with_its_rank_and_cause(pool: RankPool, rank: int) -> None:
    with pytest.raises(RankError, match=f"rank {rank}:(?s:.*)wrong on purpose") as caught:
        pool.run(fail_on, rank)
    assert isinstance(caught.value.__cause__, ValueError)
    assert [r for r, _ in pool.run(rank_and_sum, 1.0)] == [0, 1]


def test_a_rank_left_alone_in_a_collective_does_not_hang_the_test() -> None:
    with RankPool(2, grace=2.0) as pool, pytest.raises(RankError, match="left alone"):
        pool.run(leave_rank_0_alone)


def leave_rank_0_alone() -> None:
    if dist.get_rank() == 1:
        raise ValueError("left alone")
    dist.all_reduce(torch.zeros(1))


def test_single_thread(pool: RankPool) -> None:
    assert pool.run(torch.get_num_threads) == [1, 1]
