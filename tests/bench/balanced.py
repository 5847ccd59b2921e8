"""Balanced expert parallelism on gloo ranks: ``python -m tests.bench.balanced``.

    layer    one expert layer, forward and backward, under Zipf routing
    step     a whole training step, likewise
    even     the same layer on loads that need no balancing: what planning and lending cost there
    once     the same layer with one payload for each token and rank, on and off

Loads are forced (`train.forced_routing`), so every dispatcher gets the same ones, in turns within one run.

**What the numbers mean.** A rank is a process with one thread, and there are more of them than cores, so wall time is
the work of all ranks over the cores: balancing moves work and does not remove any, so it cannot shorten that here. A
process's CPU time is what its rank did, whoever ran beside it; waiting for others is not in it. Where every rank has a
device of its own all wait for the busiest in each layer, so there a layer takes what the busiest rank's CPU time is
here. In a step another rank is the busiest in each layer, and CPU time of the whole adds them up: max/mean is lower.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from model.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from model.kimi import KimiModel
from model.moe import MoE
from model.stats import ForwardStats
from parallel.config import ParallelConfig
from parallel.expert import install_experts
from parallel.expert.config import ExpertsConfig
from parallel.expert.stats import RowStats
from parallel.mesh import Mesh, make_mesh
from tests.bench.parallel import make_case
from tests.dist.ranks import RankPool
from train.balance import COLUMNS
from train.build import build_model
from train.forced_routing import ForcedRouting, parse_rule
from train.proof.parity import build
from train.step import Stepper

CPU = torch.device("cpu")
PLAIN, BALANCED, ABOVE = "all_to_all", "balanced", "balanced above 1.2"
DISPATCHERS = {
    PLAIN: ExpertsConfig(),
    BALANCED: ExpertsConfig(dispatcher="balanced"),
    ABOVE: ExpertsConfig(dispatcher="balanced", balance_above=1.2),
}
ONCE = "deduplicated"
ON_AND_OFF = {PLAIN: ExpertsConfig(), ONCE: ExpertsConfig(deduplicate=True)}
SMALL = ModelConfig(
    vocab_size=256,
    hidden_dim=256,
    layers="KMM",
    dense_dim=256,
    residual_block=2,
    kda=KDAConfig(heads=2, head_dim=32),
    mla=MLAConfig(heads=2, q_rank=32, kv_rank=32, nope_dim=32, rope_dim=16, value_dim=32),
    moe=MoEConfig(experts=64, top_k=4, expert_dim=256, latent_dim=256, shared_experts=1),
)

MICROBATCHES = 4
"""Of a step: more of them, and its update weighs less."""


@dataclass(frozen=True)
class Timing:
    """One dispatcher on one rank; a number for each repeat.

    cpu: seconds of this process.
    wall: seconds until all ranks are done.
    rows: what the first expert layer counted, the same each time.
    sent: bytes that this rank sent to others' experts and back.
    """

    cpu: list[float]
    wall: list[float]
    rows: list[RowStats]
    sent: list[int] = field(default_factory=list)


def time_layer(
    rule: str, tokens: int, repeats: int, dispatchers: dict[str, ExpertsConfig] = DISPATCHERS
) -> dict[str, Timing]:
    """The first expert layer on ``tokens`` tokens of this rank, forward and backward, by dispatcher."""
    mesh = make_mesh(ParallelConfig(ep=dist.get_world_size()), dist.get_world_size())
    model = build_model(SMALL, seed=0, dtype=torch.float32, device=CPU, mesh=mesh)
    layer = SMALL.moe_layers[0]
    moe = model.layers[layer].ffn
    assert isinstance(moe, MoE)
    x = torch.randn(1, tokens, SMALL.hidden_dim, generator=torch.Generator().manual_seed(mesh.world.rank))
    x.requires_grad_()

    def run() -> RowStats:
        stats = ForwardStats(SMALL, device=CPU, max_logits=False, dispatch=RowStats)
        moe(x, stats=stats.layer(layer)).sum().backward()
        model.zero_grad()
        record = stats.layer(layer).dispatch
        assert isinstance(record, RowStats)
        return record

    return in_turns(run, model, mesh, rule=rule, repeats=repeats, dispatchers=dispatchers)


def time_step(rule: str, tokens: int, repeats: int) -> dict[str, Timing]:
    """A training step of `MICROBATCHES` times ``tokens`` tokens on this rank, by dispatcher."""
    size = dist.get_world_size()
    config = ParallelConfig(dp=size, ep=size)
    case = make_case(SMALL, length=tokens, microbatches=MICROBATCHES, dp=size, dtype=torch.float32)
    rig = build(case, make_mesh(config, size), config)
    stepper = Stepper(rig.pipeline, dp=rig.dp, optimizer=rig.optimizer)

    def run() -> RowStats:
        result = stepper.step(case.steps[0][rig.mesh.dp.rank :: size], lr=1e-6)
        return RowStats(**dict(zip(COLUMNS, result.rows[0].tolist(), strict=True)))

    return in_turns(run, rig.model, rig.mesh, rule=rule, repeats=repeats, dispatchers=DISPATCHERS)


def in_turns(
    run: Callable[[], RowStats],
    model: KimiModel,
    mesh: Mesh,
    *,
    rule: str,
    repeats: int,
    dispatchers: dict[str, ExpertsConfig],
) -> dict[str, Timing]:
    """``run`` with each dispatcher in turn, after one warm-up each; the load differs by repeat alone."""
    parsed = parse_rule(rule)
    assert parsed is not None
    forced = ForcedRouting(parsed, seed=0, axis=mesh.replicas)
    forced.install(model)
    timings = {name: Timing([], [], []) for name in dispatchers}
    for repeat in range(-1, repeats):
        names = list(dispatchers)
        # Whoever comes first in a turn finds other caches than the rest.
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            install_experts(model, axis=mesh.ep, config=dispatchers[name])
            dist.barrier()
            sent = mesh.ep.traffic.sent.get("ep all_to_all", 0)
            cpu, wall = time.process_time(), time.perf_counter()
            with forced.during(max(repeat, 0)):
                rows = run()
            cpu = time.process_time() - cpu
            dist.barrier()
            if repeat >= 0:
                timings[name].cpu.append(cpu)
                timings[name].wall.append(time.perf_counter() - wall)
                timings[name].rows.append(rows)
                timings[name].sent.append(mesh.ep.traffic.sent["ep all_to_all"] - sent)
    return timings


def load_rows(ranks: list[dict[str, Timing]]) -> Iterator[list[str]]:
    """A table's row for each dispatcher, from all ranks' timings."""
    for name in DISPATCHERS:
        by_rank = [rank[name] for rank in ranks]
        repeats = range(len(by_rank[0].cpu))
        computed = [[rank.rows[i].computed for rank in by_rank] for i in repeats]
        # Of each repeat, then the median: another rank is the busiest under another load.
        busiest = statistics.median(max(rank.cpu[i] for rank in by_rank) for i in repeats)
        mean = statistics.median(statistics.fmean(rank.cpu[i] for rank in by_rank) for i in repeats)
        ratio = statistics.median(
            max(rank.cpu[i] for rank in by_rank) / statistics.fmean(rank.cpu[i] for rank in by_rank) for i in repeats
        )
        spread = max(max(rows) - min(rows) for rows in computed)
        yield [
            name,
            f"{statistics.median(max(rows) / statistics.fmean(rows) for rows in computed):.3f}",
            str(spread),
            f"{statistics.fmean(rows.borrowed for rows in by_rank[0].rows):.1f}",
            f"{statistics.fmean(rows.lent_bytes for rows in by_rank[0].rows) / 1e6:.1f}",
            f"{1e3 * busiest:.0f}",
            f"{1e3 * mean:.0f}",
            f"{ratio:.2f}",
            f"{1e3 * statistics.median(by_rank[0].wall):.0f}",
        ]


def load_table(title: str, measured: dict[int, list[dict[str, Timing]]]) -> Table:
    """One load at several numbers of ranks."""
    table = Table(title=title, title_justify="left")
    for column in (
        "ranks", "dispatcher", "rows max/mean", "max - min", "lent", "MB",
        "CPU ms, busiest", "mean", "max/mean", "wall ms",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column == "dispatcher" else "right")
    for size, ranks in measured.items():
        for index, row in enumerate(load_rows(ranks)):
            table.add_row("" if index else str(size), *row, end_section=index == len(DISPATCHERS) - 1)
    return table


def overhead_table(measured: dict[tuple[str, int], list[dict[str, Timing]]]) -> Table:
    """CPU time of all ranks against the plain dispatcher's in the same turn: median and quartiles over the turns."""
    title = "one expert layer that needs no balancing: CPU time of all ranks over all_to_all's"
    table = Table(title=title, title_justify="left", min_width=len(title))
    for column in ("load", "ranks", "dispatcher", "lent", "median", "quartiles"):
        table.add_column(column, justify="left" if column in ("load", "dispatcher") else "right")
    for (rule, size), ranks in measured.items():
        plain = [sum(turn) for turn in zip(*(rank[PLAIN].cpu for rank in ranks), strict=True)]
        for name in (BALANCED, ABOVE):
            total = [sum(turn) for turn in zip(*(rank[name].cpu for rank in ranks), strict=True)]
            ratios = [100 * (one / other - 1) for one, other in zip(total, plain, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            lent = statistics.fmean(rows.borrowed for rows in ranks[0][name].rows)
            table.add_row(rule, str(size), name, f"{lent:.1f}", f"{middle:+.1f}%", f"{low:+.1f} ... {high:+.1f}%")
    return table


def once_table(measured: dict[int, list[dict[str, Timing]]], *, choices: int) -> Table:
    """Bytes and CPU time of all ranks with one payload for each token and rank, over those with one row a choice."""
    title = "one expert layer, one payload for each token and rank: over all_to_all"
    table = Table(title=title, title_justify="left", min_width=len(title))
    for column in ("ranks", "bytes", "rows left, expected", "CPU, median", "quartiles"):
        table.add_column(column, justify="right")
    for size, ranks in measured.items():
        sent = {name: sum(sum(rank[name].sent) for rank in ranks) for name in (PLAIN, ONCE)}
        total = {name: [sum(t) for t in zip(*(rank[name].cpu for rank in ranks), strict=True)] for name in sent}
        ratios = [100 * (one / other - 1) for one, other in zip(total[ONCE], total[PLAIN], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        expected = size * (1 - (1 - 1 / size) ** choices) / choices
        cells = f"{sent[ONCE] / sent[PLAIN]:.2f}", f"{expected:.2f}", f"{middle:+.1f}%", f"{low:+.1f} ... {high:+.1f}%"
        table.add_row(str(size), *cells)
    return table


@contextmanager
def pools(sizes: list[int]) -> Iterator[dict[int, RankPool]]:
    """A pool of each size, one after the other closed at the end."""
    opened = {size: RankPool(size) for size in sizes}
    try:
        yield opened
    finally:
        for pool in opened.values():
            pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--exponent", type=float, default=1.2, help="s of the Zipf load")
    parser.add_argument("--tokens", type=int, default=512, help="of a rank in a microbatch")
    parser.add_argument("--repeats", type=int, default=9, help="turns of each table on a skewed load")
    parser.add_argument("--even-repeats", type=int, default=40, help="turns on loads that need no balancing")
    args = parser.parse_args()
    console = Console(width=120)
    zipf = f"zipf({args.exponent:g})"
    with pools(args.ranks) as opened:
        for what, measure in (("one expert layer, forward and backward", time_layer), ("training step", time_step)):
            ranks = {size: pool.run(measure, zipf, args.tokens, args.repeats) for size, pool in opened.items()}
            console.print(load_table(f"{what}, {zipf}, {args.tokens} tokens a rank", ranks))
        even = {
            (rule, size): pool.run(time_layer, rule, args.tokens, args.even_repeats)
            for rule in ("balanced", "zipf(0)")
            for size, pool in opened.items()
        }
        once = {
            size: pool.run(time_layer, "zipf(0)", args.tokens, args.even_repeats, ON_AND_OFF)
            for size, pool in opened.items()
        }
    console.print(overhead_table(even))
    console.print(once_table(once, choices=SMALL.moe.top_k))


if __name__ == "__main__":
    main()
