"""The measured peak: right on a machine of known speed, and soon over on a slow one."""

import pytest
import torch
from torch import Tensor

from train.throughput import Throughput, matmul_rate

CPU = torch.device("cpu")


class Machine:
    """Products at ``rate`` operations per second, on a clock of its own."""

    def __init__(self, rate: float) -> None:
        self.rate, self.now = rate, 0.0
        self.sizes: list[int] = []

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        self.sizes.append(len(x))
        self.now += 2 * len(x) ** 3 / self.rate
        return torch.zeros(1, 1)

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("rate", "size"), [(2.4e12, 1024), (65e9, 1024), (20e9, 512), (0.7e9, 256), (1e6, 128)], ids="{:.0e}".format
)
def test_the_rate_is_found_in_bounded_time(rate: float, size: int) -> None:
    machine = Machine(rate)
    assert matmul_rate(CPU, torch.float32, multiply=machine.multiply, clock=machine.clock) == pytest.approx(rate)
    assert machine.sizes[-7:] == [size] * 7
    # Ten products of the smallest size cannot be had for less.
    assert machine.now <= max(1.2 * 0.5, 10 * 2 * 128**3 / rate)


def test_one_slow_product_is_not_the_rate() -> None:
    machine = Machine(65e9)

    def multiply(x: Tensor, y: Tensor) -> Tensor:
        if len(machine.sizes) % 5 == 0:
            machine.now += 1.0
        return machine.multiply(x, y)

    assert matmul_rate(CPU, torch.float32, multiply=multiply, clock=machine.clock) == pytest.approx(65e9)


def test_utilisation_is_of_the_peak() -> None:
    assert Throughput(flops_per_token=3e6, peak=6e9).measure(1000, 2.0) == (500.0, 0.25)
