"""Speed and memory of KDA, forward and backward: the chunked form against the reference recurrence.

    python -m tests.bench.kda
    python -m tests.bench.kda --lengths 1024 4096 --heads 8 --head-dim 128 --gate -0.5

The chunked form runs twice: knowing the gate's bound, as in a K3 layer, and as "tree" without, as in Kimi Linear.
Times are medians over repeats that take turns (one of the reference, then some of every length of the chunked
form), since a shared machine drifts: read the ratios, not the times. Peak memory is the growth of the
resident set's high-water mark over one forward and backward, gradients included, in a fresh process each
(Linux: /proc/self).
"""

import argparse
import multiprocessing
import os
import statistics
import time
from collections import defaultdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from model.kernels.kda_chunk import kda_chunk
from model.kernels.kda_plan import CHUNK, SEGMENT_TOKENS, Plans
from model.kernels.kda_reference import kda_reference
from train.allocator import keep_freed_memory

KERNELS = "reference", "tree", "chunk"


def inputs(length: int, heads: int, head_dim: int, gate: float) -> list[Tensor]:
    """q, k, v, g, beta of one row in fp32; made in place, so that making them leaves no high-water mark."""
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(1, length, heads, head_dim) for _ in range(4))
    for x in (q, k):
        x.div_(x.norm(dim=-1, keepdim=True))
    g.sigmoid_().mul_(gate)
    return [x.requires_grad_() for x in (q, k, v, g, torch.rand(1, length, heads))]


def forward_backward(kernel: str, arguments: list[Tensor], gate: float, plans: Plans) -> float:
    """Seconds of one forward and backward; ``plans`` are those of all layers of a step."""
    start = time.perf_counter()
    if kernel == "reference":
        o, state = kda_reference(*arguments)
    else:
        o, state = kda_chunk(*arguments, gate_bound=gate if kernel == "chunk" else None, plans=plans)
    torch.autograd.grad((o, state), arguments, (torch.ones_like(o), torch.ones_like(state)))
    return time.perf_counter() - start


def high_water_mark() -> int:
    """Largest resident set of this process since the last reset, bytes."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def peak_memory(kernel: str, length: int, heads: int, head_dim: int, gate: float, threads: int) -> int:
    """Bytes that one forward and backward needs on top of its inputs. Call in a process of its own."""
    torch.set_num_threads(threads)
    forward_backward(kernel, inputs(64, heads, head_dim, gate), gate, Plans())
    arguments = inputs(length, heads, head_dim, gate)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the present resident set
    before = high_water_mark()
    forward_backward(kernel, arguments, gate, Plans())
    return high_water_mark() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384, 65536])
    parser.add_argument("--reference-up-to", type=int, default=4096, help="longest T for the reference")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--gate", type=float, default=-5.0, help="lower bound of the log decay")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = args.heads, args.head_dim, args.gate
    runs = [
        (kernel, length)
        for length in args.lengths
        for kernel in KERNELS
        if kernel != "reference" or length <= args.reference_up_to
    ]

    memory = {}
    for kernel, length in runs:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            memory[kernel, length] = pool.apply(peak_memory, (kernel, length, *shape, args.threads))

    keep_freed_memory()  # as in training
    seconds, plans = defaultdict(list), Plans()
    for _ in range(args.repeats):
        for kernel, length in runs:
            arguments = inputs(length, *shape)
            # Short runs are repeated to about the time of a long one, so that both see the same machine.
            for _ in range(max(1, 16384 // length) if kernel != "reference" else 1):
                seconds[kernel, length].append(forward_backward(kernel, arguments, args.gate, plans))
    median = {run: statistics.median(times) for run, times in seconds.items()}

    table = Table(
        title=f"KDA forward + backward, fp32, B=1, H={args.heads}, K=V={args.head_dim}, gate >= {args.gate}",
        caption=f"torch {torch.__version__}, {args.threads} threads, medians of {args.repeats} rounds, "
        f"chunk {CHUNK}, segment {SEGMENT_TOKENS} tokens",
    )
    for column in ("T", "kernel", "ms", "us / token", "times reference", "peak MiB", "KiB / token"):
        table.add_column(column, justify="left" if column == "kernel" else "right")
    for kernel, length in runs:
        reference = median.get(("reference", length))
        table.add_row(
            f"{length:,}",
            kernel,
            f"{median[kernel, length] * 1e3:,.1f}",
            f"{median[kernel, length] / length * 1e6:.2f}",
            f"{reference / median[kernel, length]:.1f}" if reference else "",
            f"{memory[kernel, length] / 2**20:,.0f}",
            f"{memory[kernel, length] / 2**10 / length:.2f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
