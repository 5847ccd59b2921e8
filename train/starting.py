"""Begin a new run from the weights of another: `run.init_from`.

    a run's folder                    its newest checkpoint that verifies, saved on whatever mesh
    ... /checkpoints/step-00000040    that checkpoint
    a folder with config.json and     an exported or released model, in Hugging Face's names
      *.safetensors

Only weights and router biases are taken. Optimizer, schedule, data and step count begin anew. Of a checkpoint with
bf16 weights the fp32 masters are taken, so that nothing is rounded twice.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from model.hf_map import from_hf
from model.kimi import KimiModel
from optim.distributed import ShardedOptimizer
from parallel.collectives import gather_objects
from parallel.mesh import Mesh
from parallel.sharding import TensorSlice, parameter_specs
from train.checkpoint import CheckpointStore
from train.checkpoint.staging import list_candidates
from train.config import RunConfig, flatten
from train.run_folder import CHECKPOINTS, CONFIG_FILE, read_config

logger = logging.getLogger(__name__)

HF_CONFIG = "config.json"
REMEDY = "name a run folder, one of its checkpoints, or a folder with config.json and *.safetensors"


def start_from(config: RunConfig, model: KimiModel, *, optimizer: ShardedOptimizer, mesh: Mesh) -> str:
    """Put the weights that ``run.init_from`` names into a model that was just built; returns their origin in words.

    Collective.

    Raises:
        ValueError: there is nothing to begin from, or it is of another model; one line.
        CheckpointError: there are checkpoints and none is valid.
    """
    source = Path(config.run.init_from)
    if (source / HF_CONFIG).is_file():
        values, theirs, origin = exported_weights(source, model=model, mesh=mesh)
    else:
        root, step = checkpoints_of(source)
        values, step = saved_weights(root, step=step, model=model, mesh=mesh, timeout=config.checkpoint.timeout)
        theirs = (read_config(root.parent) or {}).get("model", {}) if (root.parent / CONFIG_FILE).exists() else {}
        origin = f"{source}, step {step}"
    optimizer.take_weights(values)
    for name, tensor in held(model).items():
        tensor.copy_(values[name])
    if mesh.world.rank == 0:
        for line in other_settings(theirs, config):
            logger.warning(
                "run.init_from=%s: was made with another %s; the weights may mean something else", source, line
            )
    return origin


def checkpoints_of(source: Path) -> tuple[Path, int | None]:
    """(folder of checkpoints, step; None for the newest) that a run folder or a checkpoint's folder stands for.

    Raises:
        ValueError: it is neither.
    """
    for candidate in list_candidates(source.parent):
        if candidate.folder == source:
            return source.parent, candidate.step
    for root in (source / CHECKPOINTS, source):
        if list_candidates(root):
            return root, None
    what = "has no checkpoint and no exported model" if source.is_dir() else "is not a folder"
    raise ValueError(f"run.init_from={source}: {what}; {REMEDY}")


def held(model: KimiModel) -> dict[str, Tensor]:
    """Every parameter and buffer of this rank, by name."""
    return {name: x.detach() for name, x in model.named_parameters()} | dict(model.named_buffers())


def saved_weights(
    root: Path, *, step: int | None, model: KimiModel, mesh: Mesh, timeout: float
) -> tuple[dict[str, Tensor], int]:
    """This rank's slices of the weights in a checkpoint, in the widest dtype that it has them in, and its step."""
    world = mesh.world
    store = CheckpointStore(
        root, rank=world.rank, ranks=world.size, group=world.group, asynchronous=False, timeout=timeout
    )
    step = store.latest() if step is None else step
    assert step is not None, "checkpoints_of has seen candidates"
    saved = store.names(step)
    weights = {name.removeprefix("model/"): x.shape for name, x in saved.items() if name.startswith("model/")}
    check_names(weights, model=model, mesh=mesh, source=root)
    specs = parameter_specs(model, mesh=mesh)
    wanted: dict[str, TensorSlice] = {}
    keys: dict[str, str] = {}
    for name, x in held(model).items():
        master = f"optim/{name}/master"
        keys[name] = master if master in saved else f"model/{name}"
        value = torch.empty(x.shape, dtype=saved[keys[name]].dtype)
        wanted[keys[name]] = specs[name].place(value, mesh) if name in specs else TensorSlice.whole(value)
    store.load(step, tensors=wanted, ignore=("model/", "optim/", "rng/"))
    store.close()
    return {name: wanted[key].local for name, key in keys.items()}, step


def exported_weights(source: Path, *, model: KimiModel, mesh: Mesh) -> tuple[dict[str, Tensor], dict[str, Any], str]:
    """This rank's slices of an exported model's weights in fp32, its settings, and its origin in words.

    Every rank reads the whole model and keeps its part.
    """
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ValueError(f"run.init_from={source}: has {HF_CONFIG} and no *.safetensors; {REMEDY}")
    try:
        given = json.loads((source / HF_CONFIG).read_text("utf-8"))
        tensors = {name: tensor for path in files for name, tensor in load_file(path).items()}
        exported = from_hf(given, tensors, dtype=torch.float32)
    except Exception as error:  # whatever a parser or the system raises
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(f"run.init_from={source}: cannot be read ({lines[0]}); {REMEDY}") from error
    state = exported.state_dict()
    check_names({name: tuple(x.shape) for name, x in state.items()}, model=model, mesh=mesh, source=source)
    specs = parameter_specs(model, mesh=mesh)
    values = {name: specs[name].take(state[name], mesh) if name in specs else state[name] for name in held(model)}
    return values, flatten(exported.config), str(source)


def check_names(weights: Mapping[str, tuple[int, ...]], *, model: KimiModel, mesh: Mesh, source: Path) -> None:
    """Refuse the weights of a model with other tensors. Collective: a rank of a pipeline holds a part of the names.

    Args:
        weights: global shapes by name.

    Raises:
        ValueError: on all ranks alike, naming the first tensors that differ.
    """
    specs = parameter_specs(model, mesh=mesh)
    own = {name: specs[name].shape if name in specs else tuple(x.shape) for name, x in held(model).items()}
    ours: dict[str, tuple[int, ...]] = {}
    for part in gather_objects(own, mesh.world):
        ours |= part
    different = [
        f"{name} is {shown(weights.get(name))} there and {shown(ours.get(name))} here"
        for name in sorted(ours.keys() | weights.keys())
        if weights.get(name) != ours.get(name)
    ]
    if different:
        more = f" and {len(different) - 3} more" if len(different) > 3 else ""
        raise ValueError(
            f"run.init_from={source}: holds another model: {', '.join(different[:3])}{more}; choose the model that it "
            "was made with"
        )


def shown(shape: tuple[int, ...] | None) -> str:
    """A shape in words."""
    return "absent" if shape is None else str(list(shape))


def other_settings(theirs: Mapping[str, Any], config: RunConfig) -> list[str]:
    """The model's settings that differ from those that the weights were made with, one line each."""
    before, now = flatten(dict(theirs)), flatten(config.model)
    return [
        f"model.{name} ({before[name]} -> {now[name]})"
        for name in sorted(before.keys() & now.keys())
        if before[name] != now[name] and name != "init_std"
    ]
