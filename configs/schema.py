"""RunConfig: the whole configuration, typed; and every check that needs more than one field.

The dataclasses stand beside the code that they configure and are only put together here. A key that is not
in them is refused, wherever it comes from.
"""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore

from data.loader import DataConfig
from model.config import ModelConfig
from optim.groups import OptimConfig
from parallel.context.layout import length_error
from parallel.mesh import ParallelConfig
from parallel.pipeline.layout import layout_errors
from parallel.recompute import RecomputeConfig
from parallel.tensor import cut_errors
from train.checkpoint import CheckpointConfig
from train.forced_routing import RoutingSettings
from train.metrics import TrackerConfig
from train.phases import BatchConfig, ScheduleConfig
from train.settings import EvaluateSettings, RunSettings, TrainSettings


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


def register() -> None:
    """Make the schema known to Hydra as ``schema``, the first entry of run.yaml's defaults."""
    ConfigStore.instance().store(name="schema", node=RunConfig)


def validate(config: RunConfig, *, world_size: int) -> list[str]:
    """Every contradiction in the configuration, one line each: field, value, rule, remedy.

    Args:
        world_size: ranks that were launched.
    """
    found = [
        *config.parallel.errors(world_size),
        *config.model.errors(),
        *config.data.errors(),
        *config.batch.errors(config.parallel.resolved_dp(world_size)),
        *config.schedule.errors(),
        *config.optim.errors(),
        *config.run.errors(),
        *config.train.errors(),
        *config.evaluate.errors(),
        *config.checkpoint.errors(),
        *config.trackers.errors(),
        *config.recompute.errors(),
        *config.routing.errors(),
        *_routing_errors(config),
    ]
    infinite = {name: value for name, value in _floats(dataclasses.asdict(config)) if not math.isfinite(value)}
    # Said once: a field's own rule may refuse it as well.
    found = [problem for problem in found if problem.split("=")[0] not in infinite]
    found += [f"{name}={value}: must be a finite number; give one" for name, value in infinite.items()]
    if config.evaluate.every > 0 and config.data.validation_fraction == 0:
        found.append(
            f"evaluate.every={config.evaluate.every}: contradicts data.validation_fraction=0, which holds out no text "
            "to evaluate on; set evaluate.every=0 or raise data.validation_fraction"
        )
    tp, ep, cp = config.parallel.tp, config.parallel.ep, config.parallel.cp
    if tp > 1 and not config.model.errors():
        found += cut_errors(config.model, tp=tp)
        found += _grouped_product_errors(config)
    if ep > 1 and config.model.moe.experts % ep:
        found.append(
            f"model.moe.experts={config.model.moe.experts}: must be divisible by parallel.ep={ep}, so that every rank "
            "holds as many; change one of them"
        )
    if not config.parallel.errors(world_size) and not config.model.errors():
        found += layout_errors(config.parallel, layers=config.model.num_layers)
    if cp * tp > 1 and (problem := length_error("batch.length", config.batch.length, cp=cp, tp=tp)) is not None:
        found.append(problem)
    if config.data.default_corpus and config.data.vocab_size > config.model.vocab_size:
        found.append(
            f"data.vocab_size={config.data.vocab_size}: the default corpus' tokenizer must fit into "
            f"model.vocab_size={config.model.vocab_size}; raise that or lower data.vocab_size"
        )
    return found


def _floats(tree: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """(dotted name, value) of every float in nested dicts and lists."""
    if isinstance(tree, float):
        yield name, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _floats(value, f"{name}.{key}" if name else key)
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _floats(value, f"{name}[{index}]")


def _grouped_product_errors(config: RunConfig) -> list[str]:
    """Grouped products want rows of a multiple of 16 bytes: what a whole expert offers, its slice must offer too."""
    moe, tp = config.model.moe, config.parallel.tp
    elements = {"bf16": 8, "fp32": 4}.get(config.train.precision, 1)
    fits, cut = moe.expert_dim % elements == 0, moe.expert_dim % (tp * elements) == 0
    if not config.model.moe_layers or moe.expert_dim % tp or not fits or cut:
        return []
    return [
        f"model.moe.expert_dim={moe.expert_dim}: the {moe.expert_dim // tp} of it on a rank of parallel.tp={tp} must "
        f"be a multiple of {elements}, 16 bytes in train.precision={config.train.precision}, for grouped products; use "
        f"{-(-moe.expert_dim // (tp * elements)) * tp * elements} or another parallel.tp"
    ]


def _routing_errors(config: RunConfig) -> list[str]:
    """What routing asks of the model, and that the weights of a forced run are not taken for trained ones."""
    if config.routing.errors():
        return []
    found = [] if config.model.errors() else config.routing.model_errors(config.model)
    if config.checkpoint.every and not config.routing.saves:
        found.append(
            f"checkpoint.every={config.checkpoint.every}: must be 0 with routing.force={config.routing.force}, whose "
            "weights are worth nothing; set checkpoint.every=0, or routing.save=true to save them all the same"
        )
    return found


# What a resumed run may change, and what every other difference means for it.
FREE = (
    "train.steps",
    "train.max_skipped",
    "train.detail_every",
    "train.replica_check_every",
    "evaluate.",
    "checkpoint.",
    "trackers.",
    "run.dir",
    "run.name",
    "run.cache",
    "run.timeout",
    "run.max_minutes",
    "parallel.",
    "recompute.",
    "routing.save",
    "routing.trace",
    "data.verify",
)
MEANING = {
    "model": "another model: the saved weights would not fit or would mean something else",
    "data": "other data: the saved position would point at other samples",
    "batch": "other batches: the saved position and token clock would not continue",
    "schedule": "another learning-rate schedule",
    "optim": "another optimizer",
    "train": "another computation",
    "run": "another random seed",
    "routing": "experts chosen by another rule: its steps do not belong to the same run",
}


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


def differences(saved: dict[str, Any], config: RunConfig) -> tuple[list[str], list[str]]:
    """(allowed, refused) differences between a run folder's saved config and the present one.

    Each is one line; a refused line ends with what the difference means.
    """
    # A folder older than a key ran as that key's default does.
    before, now = flatten(RunConfig()) | flatten(saved), flatten(config)
    allowed, refused = [], []
    for name in sorted(before.keys() | now.keys()):
        old, new = before[name], now.get(name, "(absent)")
        if old == new:
            continue
        line = f"{name}: {old} -> {new}"
        if name.startswith(FREE):
            allowed.append(line)
        else:
            refused.append(f"{line}  ({MEANING[name.split('.')[0]]})")
    return allowed, refused
