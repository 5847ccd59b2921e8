"""How fast a run goes, and how near to what the hardware can do.

Utilisation is measured against a matrix-product rate taken at the start of the same run, on the same device
and threads, in the run's own dtype: so it is comparable between machines, and a formula that counts too
much shows as more than 100%.
"""

import statistics
import time

import torch

from parallel.collectives import combine_in_place
from parallel.mesh import Axis


def matmul_rate(device: torch.device, dtype: torch.dtype, *, size: int = 1024, repeats: int = 7) -> float:
    """Operations per second of a square matrix product, the median of a few.

    Args:
        device: where to measure.
        dtype: of both factors.
        size: side of the matrices; small enough to take about 0.1 s in all on a CPU.
        repeats: measurements, after one that warms up.
    """
    if device.type != "cpu":
        size *= 8
    x = torch.ones(size, size, device=device, dtype=dtype)
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        product = x @ x
        product[0, 0].item()
        times.append(time.perf_counter() - started)
    return 2 * size**3 / statistics.median(times[1:])


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
