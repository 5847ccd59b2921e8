"""Plan: what will this configuration cost? Known from the config alone, on any machine, in seconds.

    python -m launch.plan model=kimi_k3 parallel.tp=8 parallel.pp=16 parallel.ep=64 batch.sequences=512 --ranks 8192

The config is composed and checked as `launch.train` does for so many ranks. Then tables: parameters and operations by
part of the model, memory of a rank by what takes it, traffic of a step by axis, and the pipeline's bubble.

Exit status: 0 planned, 2 the configuration cannot be used.
"""

import logging
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from configs.compose import ConfigError, compose_config
from configs.schema import RunConfig, validate
from data.output import run_command
from launch.failures import UNUSABLE, complain
from launch.plan.memory import Memory, memory_of
from launch.plan.step import StepPlan, held_by_busiest
from launch.plan.traffic import Predicted, step_traffic
from model.config import ModelConfig
from model.flops import forward_flops, training_flops
from model.kimi import KimiModel
from parallel.pipeline.schedule import SPLIT_COSTS, UNSPLIT_COSTS, make_schedule, simulate, splits_weights
from train.build import DTYPES
from train.proof.shrink import ranks_of

USAGE = """usage: python -m launch.plan [KEY=VALUE ...] [--ranks N] [--device cuda|cpu]

KEY=VALUE   override a config key or choose a group, as for launch.train
--ranks N   how many ranks will be launched; default: as many as the parallel.* keys need
--device    where the ranks will run, cuda (default) or cpu: how the optimizer works decides what it needs
"""

DEVICES = ("cuda", "cpu")

PARTS = {
    "embedding": ("embed.",),
    "output head": ("head.",),
    "routed experts": (".ffn.experts.",),
    "shared experts": (".ffn.shared.",),
    "router": (".ffn.router.",),
    "latent projections": (".ffn.latent", ".ffn.down.", ".ffn.up.", ".ffn.norm."),
    "dense feed-forward": (".ffn.",),
    "attention (KDA)": (".mixer.",),
}
"""What a parameter's name says of its part, the first that fits; see `part_of` for what names do not say."""


@dataclass(frozen=True)
class Request:
    """A command line: the config's overrides, and what `USAGE` says."""

    overrides: list[str]
    ranks: int | None
    device: str


class Count(NamedTuple):
    """Parameters of a part, and how many of them a token meets; the input embedding is looked up and meets none."""

    total: int
    active: int


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns its exit status."""
    if "--help" in arguments or "-h" in arguments:
        print(USAGE, end="")
        return 0
    try:
        request = parse(arguments)
        config = compose_config(request.overrides)
        ranks = ranks_of(config.parallel) if request.ranks is None else request.ranks
        problems = validate(config, world_size=ranks)
        if problems:
            raise ConfigError("\n".join(problems))
        print_plan(Console(highlight=False), make_plan(config, ranks=ranks, device=request.device), config)
    except ValueError as error:
        complain(error)
        return UNUSABLE
    return 0


def parse(arguments: Sequence[str]) -> Request:
    """The command line taken apart.

    Raises:
        ValueError: an option without a value or with a wrong one.
    """
    overrides: list[str] = []
    options: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name not in ("--ranks", "--device"):
            overrides.append(argument)
            continue
        options[name] = value if equals else next(rest, "")
    ranks, device = options.get("--ranks"), options.get("--device", DEVICES[0])
    if ranks is not None and not (ranks.isascii() and ranks.isdigit() and int(ranks) >= 1):
        raise ValueError(f"--ranks={ranks}: must be a whole number of at least 1; give the ranks that will be launched")
    if device not in DEVICES:
        raise ValueError(f"--device={device}: must be one of {', '.join(DEVICES)}; give where the ranks will run")
    return Request(overrides, None if ranks is None else int(ranks), device)


def make_plan(config: RunConfig, *, ranks: int, device: str) -> StepPlan:
    """The step that a config, free of errors, describes for so many ranks."""
    dp = config.parallel.resolved_dp(ranks)
    microbatch = config.batch.microbatch_of(dp=dp, pp=config.parallel.pp)
    return StepPlan(
        model=config.model,
        parallel=config.parallel,
        world_size=ranks,
        length=config.batch.length,
        rows=microbatch,
        microbatches=config.batch.sequences // (dp * microbatch),
        dtype=DTYPES[config.train.precision],
        loss_chunk=config.train.loss_chunk,
        recompute=config.recompute.policy,
        optim=config.optim,
        device=device,
        sends_linger=device == "cpu",
    )


def print_plan(console: Console, plan: StepPlan, config: RunConfig) -> None:
    """The tables, and what they leave out."""
    axes = plan.parallel
    shape = " x ".join(f"{name}={size}" for name, size in (("pp", axes.pp), ("dp", plan.dp), ("cp", axes.cp)))
    tokens = config.batch.tokens
    console.print(
        f"{plan.world_size:,} rank(s) on {plan.device}, {shape} x tp={axes.tp}, ep={axes.ep}, vpp={axes.vpp}\n"
        f"a step: {config.batch.sequences:,} sequences of {plan.length:,} tokens = {tokens:,} tokens, of each "
        f"data-parallel rank {plan.microbatches:,} microbatches of {plan.rows} sequence(s)\n"
    )
    console.print(parameter_table(plan.model))
    console.print(flops_table(plan, tokens=tokens))
    console.print(memory_table([memory_of(plan, held_by_busiest(plan, stage=stage)) for stage in range(axes.pp)]))
    console.print(traffic_table(step_traffic(plan), ranks=plan.world_size))
    console.print(bubble_table(plan))
    for line in omissions(config):
        console.print(line, markup=False)


def omissions(config: RunConfig) -> list[str]:
    """What the config asks for and the tables do not contain, one line each."""
    found = []
    if config.parallel.ep > 1:
        found.append("Tokens are taken to choose all experts equally often.")
    if config.parallel.ep > 1 and config.parallel.experts.dispatcher == "balanced":
        found.append(
            "Experts that parallel.experts.dispatcher=balanced lends depend on the routing; they are left out."
        )
    if config.recompute.offload:
        found.append("What recompute.offload=true keeps on the host is counted as if the device kept it.")
    return found


def part_of(name: str, model: ModelConfig) -> str:
    """The part of the model that a parameter belongs to."""
    found = next((part for part, words in PARTS.items() if any(word in f".{name}" for word in words)), "")
    layer = int(name.split(".")[1]) if name.startswith("layers.") else -1
    if found == "latent projections" and not model.is_moe(layer):
        return "dense feed-forward"
    if found == "attention (KDA)" and model.mixers[layer] == "M":
        return "attention (MLA)"
    return found or "norms and depth mixes"


def count_parts(model: ModelConfig) -> dict[str, Count]:
    """Parameters by part, largest first."""
    with torch.device("meta"):
        parameters = dict(KimiModel(model).named_parameters())
    totals: Counter[str] = Counter()
    for name, param in parameters.items():
        totals[part_of(name, model)] += param.numel()
    active = {**totals, "embedding": 0}
    if "routed experts" in totals:
        active["routed experts"] = totals["routed experts"] * model.moe.top_k // model.moe.experts
    if model.tie_embeddings:
        active["output head"], totals["output head"] = totals["embedding"], 0
    return {part: Count(total, active[part]) for part, total in totals.most_common()}


def parameter_table(model: ModelConfig) -> Table:
    """A row for each part, and their sum."""
    made = table("parameters", "part", "total", "of all", "active per token")
    counts = count_parts(model)
    total, active = (sum(numbers) for numbers in zip(*counts.values()))
    for part, count in counts.items():
        made.add_row(part, f"{count.total:,}", f"{count.total / total:.1%}", f"{count.active:,}")
    made.add_section()
    made.add_row("whole model", f"{total:,}", "", f"{active:,}")
    return made


def flops_table(plan: StepPlan, *, tokens: int) -> Table:
    """A row for each part's products in the forward pass of a token, and what training takes."""
    made = table("operations", "part", "forward, FLOP a token", "of all")
    forward = forward_flops(plan.model, length=plan.length)
    for part, flops in sorted(vars(forward).items(), key=lambda item: -item[1]):
        if flops:
            made.add_row(part.replace("_", " "), f"{flops:,.0f}", f"{flops / forward.total:.1%}")
    made.add_section()
    training = training_flops(plan.model, length=plan.length)
    made.add_row("forward", f"{forward.total:,.0f}", "")
    made.add_row("forward and backward", f"{training:,.0f}", "")
    made.add_row("a step, all tokens", f"{training * tokens:.3e}", "")
    made.add_row("a step, of each rank", f"{training * tokens / plan.world_size:.3e}", "")
    return made


def memory_table(memories: Sequence[Memory]) -> Table:
    """A row for each pipeline rank: of its ranks, the one that owns most."""
    size, unit = unit_of(max(memory.peak for memory in memories))
    columns = ("weights", "gradients", "masters", "optimizer", "activations", "working", "update", "peak")
    made = table(f"memory of a rank, {unit}", "pp", *columns)
    for stage, memory in enumerate(memories):
        values = [
            memory.weights + memory.buffers,
            memory.gradients + memory.transient,
            *(getattr(memory, column) for column in columns[2:]),
        ]
        made.add_row(str(stage), *(f"{value / size:,.2f}" for value in values))
    made.caption = "peak: the first four, with activations and working or with update"
    return made


def traffic_table(moved: dict[str, Predicted], *, ranks: int) -> Table:
    """A row for each axis and collective, over all ranks and of a rank on average."""
    made = table("traffic of a step", "axis", "collective", "calls", "all ranks", "a rank, on average")
    before = ""
    for key, one in moved.items():
        axis, _, collective = key.partition(" ")
        if before not in ("", axis):
            made.add_section()
        sizes = []
        for sent in (one.sent, one.sent / ranks):
            size, unit = unit_of(sent)
            sizes.append(f"{sent / size:,.1f} {unit}")
        made.add_row(axis if axis != before else "", collective, f"{one.calls:,}", *sizes)
        before = axis
    if not moved:
        made.add_row("none", "", "", "", "")
    return made


def bubble_table(plan: StepPlan) -> Table:
    """The schedule by simulated clock: a forward takes 1, a backward 2, a message nothing."""
    name = plan.parallel.schedule
    schedule = make_schedule(name, plan.layout, microbatches=plan.microbatches)
    clock = simulate(schedule, plan.layout, costs=SPLIT_COSTS if splits_weights(schedule) else UNSPLIT_COSTS)
    made = table("pipeline", "schedule", "stages a rank", "layers of each stage", "microbatches held", "bubble")
    layers = " ".join(map(str, plan.layout.counts))
    stages = plan.layout.stages // plan.layout.ranks
    made.add_row(name, str(stages), layers, str(max(clock.held)), f"{clock.bubble:.1%}")
    made.caption = "bubble: idle over working time, if all layers are alike"
    return made


def unit_of(size: float) -> tuple[int, str]:
    """The largest unit, in bytes and by name, of which ``size`` has at least one."""
    units = [(2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")]
    return next((unit for unit in units if size >= unit[0]), (1, "bytes"))


def table(title: str, *columns: str) -> Table:
    """An empty table, as wide as 80 columns hold; numbers stand to the right."""
    made = Table(title=title, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return made


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    sys.exit(run_command(main, sys.argv[1:]))
