"""What balancing experts gives and costs, by arithmetic on loads:

    python -m tests.bench.experts                        # every synthetic load, R = 8 ... 512
    python -m tests.bench.experts --loads trace:FILE     # a recorded run (parallel.expert.trace)
    python -m tests.bench.experts --link 450             # ranks joined by NVLink
    python -m tests.bench.experts --planner              # how long planning takes here

A load is rows of each expert, step by step; `placement` says who computes them. Popularity drifts from step to step
(each expert's log popularity is an autoregressive walk), and a token chooses an expert at most once. Replicas are
placed anew every ``--period`` steps for the loads of the steps before; the first period only feeds them and is left
out for all rules.

Time of one expert layer, forward and backward, of one microbatch, nothing overlapped:

    products   18 L F operations a row (three matrices L x F; backward costs twice forward), slowest rank
    tokens     a row of L bf16 numbers there and back, in forward and in backward; slowest rank
    weights    lent: bf16 weights in forward and again in backward, an fp32 gradient back
               replicas: an fp32 gradient back and bf16 weights out, and bf16 weights of moved slots
               busiest rank, each direction of its link on its own

"if > 1.2" is balanced with a threshold (``--above``): plain up to that max/mean. "gain" is plain's total over the
rule's. Rows of an expert come evenly from all ranks. Launches, latency, memory and contention inside the network are
not modelled, and neither is what hides behind the shared experts. Loads are of seed 0, and the same for all rules.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from parallel.expert.planner import ExpertPlan, plan, plan_home
from parallel.expert.trace import load_trace
from tests.bench.placement import (
    Ints,
    Outcome,
    balanced,
    homes,
    least_loaded,
    moved_slots,
    plain,
    replicate,
    with_replicas,
)


@dataclass(frozen=True)
class Machine:
    """The layer and what runs it. Defaults: Kimi K3's experts, a 400 Gbit/s link a rank, 40% of 989 TFLOP/s."""

    experts: int = 896
    top_k: int = 16
    width: int = 3584
    inner: int = 3072
    tokens: int = 8192
    link: float = 50.0
    rate: float = 400.0

    @property
    def expert_numbers(self) -> int:
        return 3 * self.width * self.inner

    def products(self, rows: float) -> float:
        """Seconds."""
        return 6 * self.expert_numbers * rows / (self.rate * 1e12)

    def tokens_moved(self, rows: float, ranks: int) -> float:
        """Seconds for ``rows`` that go one way or the other, of which one in R stays."""
        return 4 * rows * (ranks - 1) / ranks * self.width * 2 / (self.link * 1e9)

    def weights(self, copies: float, *, numbers_bytes: int) -> float:
        """Seconds for whole experts of ``numbers_bytes`` a weight through one link."""
        return copies * self.expert_numbers * numbers_bytes / (self.link * 1e9)


@dataclass(frozen=True)
class Cost:
    """Means over steps: slowest rank over mean, copies of experts, the most through one rank, seconds."""

    imbalance: float
    worst: float
    copies: float
    busiest: float
    bytes: float
    products: float
    tokens: float
    weights: float

    @property
    def total(self) -> float:
        return self.products + self.tokens + self.weights


LENT_BYTES = 2 + 2 + 4
REPLICA_BYTES = 4 + 2


def cost_of(outcome: Outcome, machine: Machine, *, numbers_bytes: int, moved: int = 0) -> Cost:
    """Of one layer in one step.

    Args:
        outcome: who computes what.
        machine: the layer and the hardware.
        numbers_bytes: what one copy moves, bytes a weight.
        moved: experts fetched because replicas were placed anew, spread over the ranks; bf16.
    """
    ranks = outcome.rows.size
    mean, most = outcome.rows.sum() / ranks, int(outcome.rows.max())
    copies, busiest = int(outcome.borrowed.sum()), int(max(outcome.lent.max(), outcome.borrowed.max()))
    return Cost(
        imbalance=most / mean,
        worst=most / mean,
        copies=copies,
        busiest=busiest,
        bytes=machine.expert_numbers * (copies * numbers_bytes + moved * 2),
        products=machine.products(most),
        tokens=machine.tokens_moved(max(most, mean), ranks),
        weights=machine.weights(busiest, numbers_bytes=numbers_bytes) + machine.weights(moved / ranks, numbers_bytes=2),
    )


def mean_cost(costs: list[Cost]) -> Cost:
    means = Cost(*(statistics.fmean(getattr(cost, field.name) for cost in costs) for field in fields(Cost)))
    return replace(means, worst=max(cost.worst for cost in costs))


def by_replicas(steps: Ints, machine: Machine, *, ranks: int, period: int, spare: int) -> list[Cost]:
    """Costs of the steps after the first period, [steps, E], one layer."""
    slots = -(-steps.shape[1] // ranks) + spare
    costs: list[Cost] = []
    placement = None
    for step in range(period, len(steps)):
        moved = 0
        if step % period == 0:
            # Whole periods only, so that every placement is made from as many steps.
            found = replicate(steps[step - period : step].sum(axis=0), ranks=ranks, slots=slots)
            moved = 0 if placement is None else moved_slots(placement, found)
            placement = found
        assert placement is not None
        outcome = with_replicas(steps[step], placement)
        costs.append(cost_of(outcome, machine, numbers_bytes=REPLICA_BYTES, moved=moved))
    return costs


def each_step(rule: Callable[..., Outcome], steps: Ints, machine: Machine, *, ranks: int, period: int) -> list[Cost]:
    return [cost_of(rule(total, ranks=ranks), machine, numbers_bytes=LENT_BYTES) for total in steps[period:]]


def rules(
    layers: list[Ints], machine: Machine, *, ranks: int, period: int, spare: int, above: float
) -> Iterator[tuple[str, Cost]]:
    """(name, mean cost over layers and steps) of each rule, for one [steps, E] a layer."""
    for name, rule in (
        ("plain", plain),
        ("balanced", balanced),
        (f"if > {above:g}", partial(balanced, above=above)),
        ("least loaded", least_loaded),
    ):
        yield name, mean_cost([c for s in layers for c in each_step(rule, s, machine, ranks=ranks, period=period)])
    costs = [c for s in layers for c in by_replicas(s, machine, ranks=ranks, period=period, spare=spare)]
    yield "replicas", mean_cost(costs)


def draw(share_E: np.ndarray, rows: int, *, most: int, rng: np.random.Generator) -> Ints:
    """Rows of each expert, int64 [E], at most ``most`` of one."""
    counts = np.zeros(share_E.size, dtype=np.int64)
    left = rows
    while left:
        open_E = np.where(counts < most, share_E + 1e-12, 0.0)
        counts += rng.multinomial(left, open_E / open_E.sum())
        left = int(np.maximum(counts - most, 0).sum())
        counts = np.minimum(counts, most)
    return counts


def synthetic(kind: str, machine: Machine, *, ranks: int, steps: int, drift: float) -> Ints:
    """[steps, E] rows of one layer: a share for each expert, then a draw."""
    rng = np.random.default_rng(0)
    rows = ranks * machine.tokens * machine.top_k
    z = rng.normal(size=machine.experts)
    found = []
    for _ in range(steps):
        share = np.exp(SHAPES[kind](z))
        if kind == "bursts":
            share[rng.choice(machine.experts, 4, replace=False)] *= 30
        if kind == "empty rank":
            share[homes(machine.experts, ranks) == 0] = 0
        share /= share.sum()
        found.append(draw(share, rows, most=ranks * machine.tokens, rng=rng))
        z = np.sqrt(1 - drift) * z + np.sqrt(drift) * rng.normal(size=machine.experts)
    return np.stack(found)


def zipf(z: np.ndarray) -> np.ndarray:
    """Log popularity by place: 1 / (1 + number of more popular experts)."""
    return -np.log1p(np.argsort(np.argsort(-z)))


SHAPES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "even": np.zeros_like,
    "lognormal": lambda z: z,
    "zipf": zipf,
    "bursts": lambda z: 0.5 * z,
    "empty rank": lambda z: z,
}
"""Log popularity of experts from a standard normal each. "even" is a router that balances perfectly but for chance."""


def recorded(path: Path, *, steps: int) -> tuple[list[Ints], int]:
    """The last ``steps`` steps of each recorded layer that has rows in all of them, [steps, E] each, and top_k."""
    trace = load_trace(path)
    counts = trace.counts[-steps:]
    if len(counts) < 2:
        raise ValueError(f"trace {path}: {len(counts)} step(s); must be at least 2, one to place replicas by")
    return [layer for layer in counts.transpose(1, 0, 2) if (layer.sum(axis=1) > 0).all()], trace.top_k


def load_table(load: str, machine: Machine, args: argparse.Namespace) -> Table:
    """One load: every rule at every number of ranks."""
    table = Table(title=load, title_justify="left")
    for column in ("ranks", "rule"):
        table.add_column(column, no_wrap=True)
    for column in (
        "rows max/mean", "worst step", "copies", "most a rank", "GB", "products ms", "tokens ms", "weights ms",
        "total ms", "gain",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for ranks in args.ranks:
        if load.startswith("trace:"):
            layers, top_k = recorded(Path(load.removeprefix("trace:")), steps=args.steps)
            rows = round(statistics.fmean(float(layer.sum(axis=1).mean()) for layer in layers))
            used = replace(machine, experts=layers[0].shape[1], top_k=top_k, tokens=max(1, rows // top_k // ranks))
        else:
            used, layers = machine, [synthetic(load, machine, ranks=ranks, steps=args.steps, drift=args.drift)]
        if ranks > used.experts:
            continue
        period = min(args.period, len(layers[0]) // 2)
        first = None
        for name, cost in rules(layers, used, ranks=ranks, period=period, spare=args.spare, above=args.above):
            first = first or cost.total
            table.add_row(
                str(ranks) if name == "plain" else "",
                name,
                f"{cost.imbalance:.3f}",
                f"{cost.worst:.3f}",
                f"{cost.copies:.0f}",
                f"{cost.busiest:.1f}",
                f"{cost.bytes / 1e9:.1f}",
                *(f"{1e3 * seconds:.1f}" for seconds in (cost.products, cost.tokens, cost.weights, cost.total)),
                f"{first / cost.total:.2f}",
            )
    return table


def planner_table(machine: Machine, *, repeats: int) -> Table:
    """Milliseconds of planning for lognormal loads: the median, and in brackets the fastest."""
    table = Table(title=f"planning, median (fastest) of {repeats}, ms, one thread", title_justify="left")
    for column in ("ranks", "experts", "loans", "plan", "plan + a rank's part", "and alloc, send", "home only + part"):
        table.add_column(column, justify="right")
    rng = np.random.default_rng(0)
    for ranks in (8, 64, 128, 448, 512):
        experts = -(-machine.experts // ranks) * ranks
        share = np.exp(rng.normal(size=experts)) * (np.arange(experts) < machine.experts)
        counts = torch.from_numpy(rng.multinomial(machine.tokens * machine.top_k, share / share.sum(), size=ranks))
        table.add_row(
            str(ranks),
            str(experts),
            str(int((plan(counts).borrowed >= 0).sum())),
            timed(partial(plan, counts), repeats),
            timed(partial(one_part, plan, counts), repeats),
            timed(partial(everything, counts), repeats),
            timed(partial(one_part, plan_home, counts), repeats),
        )
    return table


def one_part(make: Callable[[Tensor], ExpertPlan], counts: Tensor) -> None:
    """What a rank does in a step."""
    make(counts).part(counts.shape[0] // 2)


def everything(counts: Tensor) -> None:
    """What only tests and this simulator ask for, too."""
    made = plan(counts)
    made.part(counts.shape[0] // 2)
    assert int(made.alloc.sum()) == int(made.send.sum())


def timed(action: Callable[[], object], repeats: int) -> str:
    action()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        times.append(1e3 * (time.perf_counter() - started))
    return f"{statistics.median(times):.2f} ({min(times):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--planner", action="store_true", help="time the planner instead")
    parser.add_argument("--repeats", type=int, default=50, help="of each timing of the planner")
    parser.add_argument(
        "--loads", nargs="+", default=list(SHAPES), metavar="LOAD", help=f"{list(SHAPES)} or trace:FILE"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--steps", type=int, default=32, help="steps, those that only place replicas included")
    parser.add_argument("--period", type=int, default=8, help="steps between placements of replicas")
    parser.add_argument("--spare", type=int, default=1, help="further slots for replicas on each rank")
    parser.add_argument("--above", type=float, default=1.2, help="max/mean from which balancing acts, where it may not")
    parser.add_argument(
        "--drift", type=float, default=0.01, help="variance of log popularity renewed in a step, 0 to 1"
    )
    for field in fields(Machine):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=field.type, default=field.default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    machine = Machine(**{field.name: getattr(args, field.name) for field in fields(Machine)})
    unknown = [load for load in args.loads if load not in SHAPES and not load.startswith("trace:")]
    if unknown:
        parser.error(f"--loads {unknown[0]}: must be one of {list(SHAPES)} or trace:FILE")
    console = Console(width=140)
    if args.planner:
        console.print(planner_table(machine, repeats=args.repeats))
        return
    console.print(
        f"{machine.experts} experts of {machine.width} x {machine.inner}, top {machine.top_k}; {machine.tokens} tokens "
        f"a rank; link {machine.link:g} GB/s each way, products {machine.rate:g} TFLOP/s; {args.steps} steps, replicas "
        f"placed every {args.period} with {args.spare} spare slot(s) a rank, drift {args.drift:g}. "
        "Means over steps and layers; ms of one layer, forward and backward, nothing overlapped."
    )
    for load in args.loads:
        console.print(load_table(load, machine, args))


if __name__ == "__main__":
    main()
