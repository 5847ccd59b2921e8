"""How fast a run goes, and how near to what the hardware can do.

Utilisation is measured against a matrix-product rate taken at the start of the same run, on the same device
and threads, of products as the run makes them: so it is comparable between machines, and a formula that counts too
much shows as more than 100%.
"""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from parallel.collectives import combine_in_place
from parallel.mesh import Axis


def matmul_rate(
    device: torch.device,
    dtype: torch.dtype,
    *,
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
    seconds: float = 0.5,
    repeats: int = 7,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Operations per second of a square matrix product, the median of a few.

    The matrices grow to 1,024 (on accelerators 8,192) as long as all repeats at twice the size would take less than
    ``seconds``: so a slow device is measured on small ones, and the start of a run never waits for its peak.

    Args:
        device: where to measure.
        dtype: of both factors.
        multiply: makes the product.
        seconds: about what the measurement may take.
        repeats: measurements, after one that warms up.
        clock: seconds, rising.
    """
    largest = 1024 if device.type == "cpu" else 8192

    def one(size: int) -> float:
        x = torch.ones(size, size, device=device, dtype=dtype)
        started = clock()
        multiply(x, x)[0, 0].item()
        return clock() - started

    size = largest // 8
    one(size)
    while size < largest and 8 * (repeats + 1) * one(size) < seconds:
        size *= 2
    one(size)
    return 2 * size**3 / statistics.median(one(size) for _ in range(repeats))


class Throughput:
    """Turns step times into tokens per second and utilisation.

    Args:
        flops_per_token: model operations per trained token, forward and backward.
        peak: operations per second of all ranks together.
    """

    def __init__(self, *, flops_per_token: float, peak: float) -> None:
        self.flops_per_token, self.peak = flops_per_token, peak

    def measure(self, tokens: int, seconds: float) -> tuple[float, float]:
        """(tokens per second, utilisation in 0..1) of all ranks' tokens in a step."""
        rate = tokens / seconds
        return rate, rate * self.flops_per_token / self.peak


def total_rate(rate: float, *, axis: Axis) -> float:
    """Sum of ``rate``, in fp64, over the ranks of ``axis``."""
    total = torch.tensor(rate, dtype=torch.float64)
    combine_in_place(total, axis)
    return float(total)
