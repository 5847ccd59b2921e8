"""The schema that Hydra composes, and every check of a configuration that needs more than one section.

A key that is not in `train.config.RunConfig` is refused, wherever it comes from.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from hydra.core.config_store import ConfigStore

from parallel.context.layout import length_error
from parallel.pipeline.layout import layout_errors
from parallel.tensor import cut_errors
from train.config import RunConfig

LARGEST = 2**63 - 1
"""Of whole numbers: what tensors, files and process groups count with."""


def register() -> None:
    """Make the schema known to Hydra as ``schema``, the first entry of run.yaml's defaults."""
    ConfigStore.instance().store(name="schema", node=RunConfig)


def validate(config: RunConfig, *, world_size: int) -> list[str]:
    """Every contradiction in the configuration, one line each: field, value, rule, remedy.

    Args:
        world_size: ranks that were launched.
    """
    sizes = {"parallel": (world_size,), "batch": (config.parallel.resolved_dp(world_size),)}
    found = [problem for name, section in config.sections().items() for problem in section.errors(*sizes.get(name, ()))]
    found += _routing_errors(config)
    unfit = {}
    for name, value in _numbers(dataclasses.asdict(config)):
        if isinstance(value, float) and not math.isfinite(value):
            unfit[name] = f"{name}={value}: must be a finite number; give one"
        elif isinstance(value, int) and value > LARGEST and name != "run.seed":
            unfit[name] = f"{name}={value}: must be at most {LARGEST}, 2^63-1; give a smaller one"
    # Said once: a field's own rule may refuse it as well.
    found = [*(problem for problem in found if problem.split("=")[0] not in unfit), *unfit.values()]
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


def _numbers(tree: Any, name: str = "") -> Iterator[tuple[str, int | float]]:
    """(dotted name, value) of every number in nested dicts and lists."""
    if isinstance(tree, int | float) and not isinstance(tree, bool):
        yield name, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from _numbers(value, f"{name}.{key}" if name else key)
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _numbers(value, f"{name}[{index}]")


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
