"""Bucket plans, and data parallel on one process: plain accumulation, to the bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from parallel.data import ALIGNMENT, BucketPlan, DataParallel, plan_buckets
from parallel.mesh import Axis

DTYPES = [torch.bfloat16, torch.float32]


def plan(
    sizes: dict[str, int], *, dp: int, bucket_bytes: int = 2**20, cost: dict[str, float] | None = None
) -> BucketPlan:
    dtypes = dict.fromkeys(sizes, torch.float32)
    return plan_buckets(sizes, dp=dp, bucket_bytes=bucket_bytes, cost=cost or sizes, dtypes=dtypes)


@given(
    sizes=st.lists(st.integers(1, 5000), max_size=30),
    low=st.lists(st.booleans(), min_size=30, max_size=30),
    dp=st.integers(1, 9),
    bucket_bytes=st.integers(1, 20_000),
    num_parts=st.integers(1, 4),
)
def test_every_parameter_is_whole_in_one_bucket_of_its_dtype_and_part(
    sizes: list[int], low: list[bool], dp: int, bucket_bytes: int, num_parts: int
) -> None:
    named = {f"p{i}": size for i, size in enumerate(sizes)}
    dtypes = {name: DTYPES[flag] for name, flag in zip(named, low, strict=False)}
    parts = {name: i % num_parts for i, name in enumerate(named)}
    result = plan_buckets(named, dp=dp, bucket_bytes=bucket_bytes, cost=named, dtypes=dtypes, parts=parts)
    seen: list[str] = []
    for bucket in result.buckets:
        assert 0 <= bucket.owner < dp
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
    assert sorted(name for rank in range(dp) for name in result.owned_by(rank)) == sorted(named)


def test_buckets_follow_backward() -> None:
    result = plan({"first": 1000, "second": 1000, "third": 1000}, dp=1, bucket_bytes=4000)
    assert [[slot.name for slot in bucket.slots] for bucket in result.buckets] == [["third"], ["second"], ["first"]]


@pytest.mark.parametrize(("matrices", "ranks"), [(19, 8), (16, 8), (1, 8), (19, 4), (3, 4)])
def test_equal_matrices_spread_evenly(matrices: int, ranks: int) -> None:
    result = plan({str(i): 4096 for i in range(matrices)}, dp=ranks)
    counts = [len(result.owned_by(rank)) for rank in range(ranks)]
    assert sum(counts) == matrices
    assert max(counts) - min(counts) <= 1


def test_owners_balance_cost_not_size() -> None:
    sizes = {"cheap1": 1000, "dear": 1000, "cheap2": 1000, "cheap3": 1000}
    result = plan(sizes, dp=2, bucket_bytes=1, cost={"cheap1": 1, "dear": 3, "cheap2": 1, "cheap3": 1})
    assert result.owned_by(0) == ("dear",)
    assert set(result.owned_by(1)) == {"cheap1", "cheap2", "cheap3"}


def test_a_small_model_still_has_enough_buckets_to_balance() -> None:
    sizes = {str(i): 256 for i in range(64)}
    result = plan(sizes, dp=4, bucket_bytes=2**30)
    assert len(result.buckets) == 32
    assert {len(result.owned_by(rank)) for rank in range(4)} == {16}


class Net(nn.Module):
    """Two matrices of different dtypes, a shared weight and one that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.low = nn.Parameter(torch.randn(5, 3, generator=generator).bfloat16())
        self.shared = nn.Parameter(torch.randn(3, 3, generator=generator))
        self.rare = nn.Parameter(torch.randn(3, generator=generator))

    def forward(self, x: torch.Tensor, *, use_rare: bool = True) -> torch.Tensor:
        y = (x.bfloat16() @ self.low).float() @ self.shared @ self.shared
        return ((y + self.rare) if use_rare else y).square().sum()


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 5, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("zero", [1, 2])
def test_one_process_is_plain_accumulation_bitwise(zero: int) -> None:
    net, plain = Net(), Net()
    params = dict(net.named_parameters())
    dp = DataParallel(params, axis=Axis(), zero=zero, bucket_bytes=1)
    for step in range(2):
        dp.zero_gradients()
        expected = {name: torch.zeros(param.shape) for name, param in plain.named_parameters()}
        for i, batch in enumerate(batches()):
            with dp.backward(last=i == 2):
                net(batch, use_rare=step == 0).backward()
            plain.zero_grad()
            plain(batch, use_rare=step == 0).backward()
            for name, param in plain.named_parameters():
                if param.grad is not None:
                    expected[name] += param.grad
        dp.finish()
        got = dp.owned_gradients()
        assert got.keys() == expected.keys()
        for name in expected:
            assert got[name].dtype == torch.float32
            assert torch.equal(got[name], expected[name]), name
        assert all(param.grad is None for param in params.values())


def test_parameters_keep_their_values_and_gain_aligned_shared_storage() -> None:
    net = Net()
    before = {name: param.detach().clone() for name, param in net.named_parameters()}
    DataParallel(dict(net.named_parameters()), axis=Axis(), bucket_bytes=2**20)
    for name, param in net.named_parameters():
        assert torch.equal(param, before[name])
        assert param.data_ptr() % 64 == 0
        assert param.is_contiguous()


def test_bf16_gradients_are_summed_in_fp32() -> None:
    w = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    dp = DataParallel({"w": w}, axis=Axis())
    for scale in [1.0] * 64 + [2.0**-8]:
        (w * scale).sum().backward()
    dp.finish()
    assert dp.owned_gradients()["w"].item() == 64 + 2.0**-8


def test_fp64_gradients_stay_fp64() -> None:
    w = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    dp = DataParallel({"w": w}, axis=Axis())
    (w * (1 + 2.0**-50)).sum().backward()
    dp.finish()
    assert dp.owned_gradients()["w"].item() == 1 + 2.0**-50


def test_a_gradient_after_its_reduction_is_refused() -> None:
    w = nn.Parameter(torch.ones(2))
    dp = DataParallel({"w": w}, axis=Axis())
    with dp.backward(last=True):
        w.sum().backward()
        with pytest.raises(AssertionError, match="w: a gradient arrived after its bucket was reduced"):
            w.sum().backward()


def test_tied_and_frozen_parameters_are_refused() -> None:
    w = nn.Parameter(torch.ones(2))
    with pytest.raises(AssertionError, match="two names"):
        DataParallel({"a": w, "b": w}, axis=Axis())
    with pytest.raises(AssertionError, match="frozen"):
        DataParallel({"a": nn.Parameter(torch.ones(2), requires_grad=False)}, axis=Axis())


def test_blocks_do_not_nest_and_nothing_follows_the_last() -> None:
    w = nn.Parameter(torch.ones(2))
    dp = DataParallel({"w": w}, axis=Axis())
    with dp.backward(last=True), pytest.raises(AssertionError, match="do not nest"), dp.backward(last=True):
        pass
    with pytest.raises(AssertionError, match="w: a gradient arrived after its bucket was reduced"):
        dp.add_gradient(w, torch.ones(2))
    dp.zero_gradients()
    dp.add_gradient(w, torch.ones(2))
    dp.finish()
    assert dp.owned_gradients()["w"].tolist() == [1, 1]


def test_a_block_that_fails_reduces_nothing() -> None:
    w = nn.Parameter(torch.ones(2))
    dp = DataParallel({"w": w}, axis=Axis())
    with pytest.raises(ValueError, match="broken"), dp.backward(last=True):
        raise ValueError("broken")
    w.sum().backward()
    dp.finish()
    assert dp.owned_gradients()["w"].tolist() == [1, 1]
