"""Data parallel on one process: plain accumulation, to the bit."""

import pytest
import torch
from torch import nn

from parallel.data import DataParallel
from parallel.mesh import Axis


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
