"""Bucket plans: whole parameters, in the order of backward, owners with equal work."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from parallel.buckets import ALIGNMENT, BucketPlan, plan_buckets

DTYPES = [torch.bfloat16, torch.float32]


def plan(
    sizes: dict[str, int], *, ranks: int, bucket_bytes: int = 2**20, cost: dict[str, float] | None = None
) -> BucketPlan:
    dtypes = dict.fromkeys(sizes, torch.float32)
    return plan_buckets(sizes, ranks=ranks, bucket_bytes=bucket_bytes, cost=cost or sizes, dtypes=dtypes)


@given(
    sizes=st.lists(st.integers(1, 5000), max_size=30),
    low=st.lists(st.booleans(), min_size=30, max_size=30),
    ranks=st.integers(1, 9),
    bucket_bytes=st.integers(1, 20_000),
    num_parts=st.integers(1, 4),
)
def test_every_parameter_is_whole_in_one_bucket_of_its_dtype_and_part(
    sizes: list[int], low: list[bool], ranks: int, bucket_bytes: int, num_parts: int
) -> None:
    named = {f"p{i}": size for i, size in enumerate(sizes)}
    dtypes = {name: DTYPES[flag] for name, flag in zip(named, low, strict=False)}
    parts = {name: i % num_parts for i, name in enumerate(named)}
    result = plan_buckets(named, ranks=ranks, bucket_bytes=bucket_bytes, cost=named, dtypes=dtypes, parts=parts)
    seen: list[str] = []
    for bucket in result.buckets:
        assert 0 <= bucket.owner < ranks
        assert len({dtypes[slot.name] for slot in bucket.slots}) == 1
        assert {parts[slot.name] for slot in bucket.slots} == {bucket.part}
        end = 0
        for slot in bucket.slots:
            assert slot.offset % ALIGNMENT == 0
            assert end <= slot.offset < end + ALIGNMENT
            assert slot.numel == named[slot.name]
            end = slot.offset + slot.numel
            seen.append(slot.name)
        assert end <= bucket.numel < end + ALIGNMENT
        # Without its last parameter the bucket was not full.
        assert 4 * bucket.slots[-1].offset < bucket_bytes
    assert sorted(seen) == sorted(named)
    assert sorted(name for rank in range(ranks) for name in result.owned_by(rank)) == sorted(named)


def test_buckets_follow_backward() -> None:
    result = plan({"first": 1000, "second": 1000, "third": 1000}, ranks=1, bucket_bytes=4000)
    assert [[slot.name for slot in bucket.slots] for bucket in result.buckets] == [["third"], ["second"], ["first"]]


@pytest.mark.parametrize(("matrices", "ranks"), [(19, 8), (16, 8), (1, 8), (19, 4), (3, 4)])
def test_equal_matrices_spread_evenly(matrices: int, ranks: int) -> None:
    result = plan({str(i): 4096 for i in range(matrices)}, ranks=ranks)
    counts = [len(result.owned_by(rank)) for rank in range(ranks)]
    assert sum(counts) == matrices
    assert max(counts) - min(counts) <= 1


def test_owners_balance_cost_not_size() -> None:
    sizes = {"cheap1": 1000, "dear": 1000, "cheap2": 1000, "cheap3": 1000}
    result = plan(sizes, ranks=2, bucket_bytes=1, cost={"cheap1": 1, "dear": 3, "cheap2": 1, "cheap3": 1})
    assert result.owned_by(0) == ("dear",)
    assert set(result.owned_by(1)) == {"cheap1", "cheap2", "cheap3"}


def test_a_small_model_still_has_enough_buckets_to_balance() -> None:
    sizes = {str(i): 256 for i in range(64)}
    result = plan(sizes, ranks=4, bucket_bytes=2**30)
    assert len(result.buckets) == 32
    assert {len(result.owned_by(rank)) for rank in range(4)} == {16}


@pytest.mark.parametrize(("bucket_bytes", "buckets"), [(4 * 64, 4), (4 * 64 + 1, 2), (4 * 128, 2), (4 * 128 + 1, 1)])
def test_a_bucket_closes_when_it_is_exactly_full(bucket_bytes: int, buckets: int) -> None:
    """The fifth is large, so that the model's size asks for no smaller ones."""
    result = plan({"large": 64 * 100} | {str(i): 64 for i in range(4)}, ranks=1, bucket_bytes=bucket_bytes)
    assert len(result.buckets) == buckets + 1


def test_equal_work_goes_to_the_lowest_rank_first() -> None:
    result = plan({str(i): 64 for i in range(4)}, ranks=3, bucket_bytes=1)
    assert [bucket.owner for bucket in result.buckets] == [0, 1, 2, 0]


def test_experts_with_fewer_copies_are_owned_by_a_run_of_ranks() -> None:
    """Four ranks hold two copies in two parts: copy 0 on ranks 0 and 1, copy 1 on ranks 2 and 3."""
    sizes = {"a": 64, "b": 64, "all": 64}
    result = plan_buckets(
        sizes,
        ranks=4,
        bucket_bytes=1,
        cost={"a": 3, "b": 2, "all": 1},
        dtypes=dict.fromkeys(sizes, torch.float32),
        copies={"a": 2, "b": 2, "all": 4},
    )
    assert {b.slots[0].name: (b.copies, b.owner) for b in result.buckets} == {"all": (4, 2), "b": (2, 1), "a": (2, 0)}
    assert [result.owned_by(rank) for rank in range(4)] == [("a",), ("a",), ("all", "b"), ("b",)]


def test_a_pinned_parameter_has_its_own_bucket_and_the_first_rank() -> None:
    sizes = {"a": 64, "pinned": 64, "b": 64}
    result = plan_buckets(
        sizes,
        ranks=2,
        bucket_bytes=2**20,
        cost={"a": 9, "pinned": 1, "b": 9},
        dtypes=dict.fromkeys(sizes, torch.float32),
        pinned=["pinned"],
    )
    owners = {tuple(slot.name for slot in bucket.slots): bucket.owner for bucket in result.buckets}
    assert owners == {("b",): 1, ("a",): 0, ("pinned",): 0}


def test_no_parameters_make_no_bucket() -> None:
    assert plan({}, ranks=2).buckets == ()
