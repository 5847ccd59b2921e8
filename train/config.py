"""RunConfig: the whole configuration of a run, typed, and what a resumed run may change of it.

The dataclasses of the sections stand beside the code that they configure and are only put together here. Each says
itself what its change means to a run that goes on (`Section`); YAML and the command line come in `configs`.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from data.loader import DataConfig
from model.config import ModelConfig
from optim.groups import OptimConfig
from parallel.config import ParallelConfig
from parallel.recompute import RecomputeConfig
from train.checkpoint import CheckpointConfig
from train.forced_routing import RoutingSettings
from train.metrics import TrackerConfig
from train.phases import BatchConfig, ScheduleConfig, learning_rate_factor
from train.settings import EvaluateSettings, RunSettings, TrainSettings

RATE = "optim.lr"


class Section(Protocol):
    """What every section declares.

    AT_RESUME: what another value means to a run that goes on, the reason for which it is refused; "" where all keys
        are free to change.
    FREE_AT_RESUME, where it is there: the keys that are free all the same.
    """

    AT_RESUME: ClassVar[str]

    errors: Callable[..., list[str]]
    """Every problem, one line each. ``parallel`` takes the number of ranks, ``batch`` the data-parallel size."""


@dataclass
class RunConfig:
    """One run, whole. Group files and experiments fill it; the command line overrides it."""

    run: RunSettings = field(default_factory=RunSettings)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainSettings = field(default_factory=TrainSettings)
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    trackers: TrackerConfig = field(default_factory=TrackerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    routing: RoutingSettings = field(default_factory=RoutingSettings)

    def sections(self) -> dict[str, Section]:
        """Every section by its name."""
        return {section.name: getattr(self, section.name) for section in dataclasses.fields(self)}


GONE = {"model.kda.a_log_dims", "model.kda.padded_heads"}
"""Keys of older run folders that never changed a run: they said how an exported file is laid out."""


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Nested dicts (dataclasses) as one dict of dotted names; lists are values."""
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        tree = dataclasses.asdict(tree)
    if not isinstance(tree, dict):
        return {prefix: list(tree) if isinstance(tree, tuple) else tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def differences(saved: dict[str, Any], config: RunConfig, *, steps: int) -> tuple[list[str], list[str]]:
    """(allowed, refused) differences between a run folder's saved config and the present one.

    Each is one line; a refused line ends with what the difference means.

    Args:
        steps: of the newest checkpoint: a schedule may change where none of them would have been otherwise.
    """
    # A folder older than a key ran as that key's default does.
    before, now = flatten(RunConfig()) | flatten(saved), flatten(config)
    sections, rates = config.sections(), rate_difference(before, config, steps=steps)
    allowed, refused = [], []
    for name in sorted((before.keys() | now.keys()) - GONE):
        old, new = before[name], now.get(name, "(absent)")
        if old == new:
            continue
        line = f"{name}: {old} -> {new}"
        section, _, key = name.partition(".")
        key, meaning = key.split(".")[0], sections[section].AT_RESUME
        if name == RATE or section == "schedule":
            allowed.append(line) if rates is None else refused.append(f"{line}  ({rates})")
        elif not meaning or key in getattr(sections[section], "FREE_AT_RESUME", ()):
            allowed.append(line)
        else:
            # Whoever left a value to "auto" has nothing to take back: the key that keeps the run as it is.
            remedy = f"; {name}={old} keeps it" if name == "train.precision" else ""
            refused.append(f"{line}  ({meaning}){remedy}")
    return allowed, refused


def rate_difference(before: dict[str, Any], config: RunConfig, *, steps: int) -> str | None:
    """What is otherwise in the learning rates of the first ``steps`` steps; None if nothing.

    Args:
        before: the saved config, flat and whole.
    """
    fields = dataclasses.fields(ScheduleConfig)
    schedule = ScheduleConfig(**{field.name: before[f"schedule.{field.name}"] for field in fields})
    for step in range(1, steps + 1):
        tokens = step * config.batch.tokens
        old = before[RATE] * learning_rate_factor(schedule, tokens)
        new = config.optim.lr * learning_rate_factor(config.schedule, tokens)
        if old != new:
            return f"another learning rate: step {step} was done at {old:g} and would have been at {new:g}"
    return None
