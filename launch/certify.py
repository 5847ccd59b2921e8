"""Certify: is this configuration's mesh equal to one rank? Proven on this machine, before a run pays for it.

    python -m launch.certify model=kimi_k3 parallel.tp=8 parallel.pp=16 parallel.ep=64 batch.sequences=512

The config is composed and checked as `launch.train` does, shrunk (`train.proof.shrink`) and trained for two steps
twice, on its mesh, one gloo process a rank, and on one rank, with awkward data (`train.proof.case`).
`train.proof.parity` compares.

Exit status: 0 equal, 1 something differs, balanced experts lent nothing or a rank failed, 2 the configuration cannot be
used.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from configs.compose import ConfigError, compose_config
from configs.schema import validate
from data.output import run_command
from launch.failures import FAILED, UNUSABLE, complain
from launch.ranks import RankError, RankPool
from train.config import RunConfig
from train.proof.case import STEPS, lends, make_case
from train.proof.parity import Case, Moved, Outcome, ParityReport, compare, merge, train_alone, train_on_mesh
from train.proof.shrink import LENGTH, changes, ranks_of, shrink

USAGE = """usage: python -m launch.certify [KEY=VALUE ...]

KEY=VALUE   override a config key or choose a group, as for launch.train
"""

TOLERANCE = 1e-9
"""Largest relative error in fp64. Orders of sums make 1e-12 at the most, the mildest of the known mistakes
(`tests.certify`) 1e-2."""

FP32_TOLERANCE = 1e-4
"""Largest relative error of a loss in fp32, where a score that is nearly a tie may choose another expert."""

TIMEOUT = 120.0
"""Seconds that the ranks may take."""

LENT, RETURNED = "ep lend_weights", "ep return_gradients"
"""What the exchanges of balanced experts are counted as."""


@dataclass(frozen=True)
class Certificate:
    """What was found: fp64 errors per parameter, relative errors of the losses in fp32, and what `unproven` says."""

    report: ParityReport
    fp32_losses: list[float]
    outcome: Outcome[Tensor]
    unproven: list[str]

    def failures(self) -> list[str]:
        """What does not hold, one line each, the worst first."""
        fp32 = [
            f"fp32 loss of step {step}: error {error:.1e}"
            for step, error in enumerate(self.fp32_losses, 1)
            if not error <= FP32_TOLERANCE
        ]
        return [*self.unproven, *self.report.failures(TOLERANCE), *fp32]


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    if "--help" in arguments or "-h" in arguments:
        print(USAGE, end="")
        return 0
    console = Console(highlight=False)
    try:
        config = compose_config(arguments)
        problems = validate(config, world_size=ranks_of(config.parallel))
        if problems:
            raise ConfigError("\n".join(problems))
        small = shrink(config)
        print_plan(console, config, small)
        began = time.monotonic()
        with RankPool(ranks_of(small.parallel), timeout=TIMEOUT, preload=("train.proof.parity",)) as pool:
            certificate = certify(small, pool=pool)
    except RankError as error:
        complain(error)
        return FAILED
    except ValueError as error:
        complain(error)
        return UNUSABLE
    return print_verdict(console, certificate, seconds=time.monotonic() - began)


def certify(config: RunConfig, *, pool: RankPool) -> Certificate:
    """Train a shrunk config on its mesh and on one rank, in fp64 and in fp32, and compare.

    Args:
        config: from `shrink`.
        pool: as many ranks as its mesh has.

    Raises:
        RankError: a rank failed or hung.
        ValueError: the model cannot be built so.
    """
    case = make_case(config)
    single = replace(case, dtype=torch.float32)
    found = merge(pool.run(train_on_mesh, case, config.parallel))
    report = compare(found, pool.run(train_on_first_rank, case)[0])
    losses = merge(pool.run(train_on_mesh, single, config.parallel)).losses
    expected = pool.run(train_on_first_rank, single)[0].losses
    fp32 = [abs(one - other) / abs(other) for one, other in zip(losses, expected, strict=True)]
    return Certificate(report, fp32, found, unproven(config, found))


def unproven(config: RunConfig, outcome: Outcome[Tensor]) -> list[str]:
    """What the shrunk config asks for and the run did not do, however equal it was; one line each."""
    if not lends(config) or lent_bytes(outcome, LENT):
        return []
    return ["parallel.experts.dispatcher=balanced: no expert was lent, so nothing is proven of lending"]


def lent_bytes(outcome: Outcome[Tensor], name: str) -> int:
    """Bytes that the exchanges `LENT` or `RETURNED` moved."""
    return outcome.traffic.get(name, Moved(0, 0)).sent


def train_on_first_rank(case: Case) -> Outcome[Tensor] | None:
    """The reference, where one thread is all there is, as for the mesh; nothing on the other ranks."""
    return train_alone(case) if dist.get_rank() == 0 else None


def print_plan(console: Console, config: RunConfig, small: RunConfig) -> None:
    """What is run, and what of the config was changed for it."""
    console.print("shrunk to what one machine can run:")
    for line in changes(config, small):
        console.print(f"  {line}", markup=False)
    axes = small.parallel
    shape = " x ".join(f"{axis}={getattr(axes, axis)}" for axis in ("pp", "dp", "cp", "tp"))
    console.print(
        f"\n{ranks_of(axes)} rank(s) on gloo, {shape}, ep={axes.ep}, vpp={axes.vpp}, against one rank\n"
        f"{STEPS} steps of {small.batch.sequences} microbatches of {LENGTH} tokens\n"
    )


def print_verdict(console: Console, certificate: Certificate, *, seconds: float) -> int:
    """The tables and the verdict; returns the exit status."""
    report, failures = certificate.report, certificate.failures()
    console.print(parameter_table(report, worst_first=bool(failures)))
    console.print(other_table(certificate))
    console.print(traffic_table(certificate.outcome))
    if (lent := lent_bytes(certificate.outcome, LENT)) > 0:
        returned = lent_bytes(certificate.outcome, RETURNED)
        console.print(f"balanced experts: {lent:,} bytes of weights lent, {returned:,} bytes of gradients returned")
    limits = f"tolerance {TOLERANCE:g} in fp64, {FP32_TOLERANCE:g} for losses in fp32"
    if not failures:
        console.print(
            f"EQUAL: {len(report.parameters)} parameters on the mesh as on one rank ({limits}; {seconds:.0f} s)"
        )
        return 0
    for line in failures[:20]:
        console.print(line, style="red", markup=False)
    if len(failures) > 20:
        console.print(f"... and {len(failures) - 20} more", style="red")
    verdict = "NOT PROVEN" if failures == certificate.unproven else f"NOT EQUAL: {len(failures)} differences"
    console.print(f"{verdict} ({limits}; {seconds:.0f} s)", style="bold red")
    return 1


def parameter_table(report: ParityReport, *, worst_first: bool) -> Table:
    """A row for each parameter: relative errors of gradient, step and optimizer state."""
    table = Table(title="relative error per parameter, fp64", title_justify="left")
    table.add_column("parameter", overflow="fold")
    kinds = ("gradient", "step", "state")
    for kind in kinds:
        table.add_column(kind, justify="right", min_width=8)
    rows = list(report.parameters.items())
    if worst_first:
        rows.sort(key=lambda row: -max(row[1].values(), default=0.0))
    for name, errors in rows:
        table.add_row(name, *(cell(errors.get(kind, 0.0), TOLERANCE) for kind in kinds))
    return table


def other_table(certificate: Certificate) -> Table:
    """Relative errors of what belongs to no single parameter."""
    table = Table(title="relative error of the rest", title_justify="left")
    table.add_column("quantity", overflow="fold")
    table.add_column("error", justify="right", min_width=8)
    for name, error in certificate.report.others.items():
        table.add_row(name, cell(error, TOLERANCE))
    first = max(errors.get("first", 0.0) for errors in certificate.report.parameters.values())
    table.add_row("first weights, worst parameter", cell(first, TOLERANCE))
    for step, error in enumerate(certificate.fp32_losses, 1):
        table.add_row(f"fp32 loss of step {step}", cell(error, FP32_TOLERANCE))
    return table


def traffic_table(outcome: Outcome[Tensor]) -> Table:
    """What each collective moved in all steps of the fp64 run, summed over the ranks."""
    table = Table(title=f"collectives of the {STEPS} steps, all ranks", title_justify="left")
    table.add_column("collective")
    table.add_column("calls", justify="right")
    table.add_column("bytes sent", justify="right")
    for name, moved in sorted(outcome.traffic.items(), key=lambda item: -item[1].sent):
        table.add_row(name, f"{moved.calls:,}", f"{moved.sent:,}")
    return table


def cell(error: float, tolerance: float) -> str:
    """An error as text, marked where it is too large."""
    text = "0" if error == 0 else f"{error:.1e}"
    return text if error <= tolerance else f"[red]{text} ![/red]"


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
