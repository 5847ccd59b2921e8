"""Ranks agree before they start: on the configuration, the code and the data.

A rank that was given another learning rate, or finds other data at the same path, would train to the end like all
others: owners broadcast what they updated, so no comparison of replicas would ever see it. Every rank shows a hash of
what it was given; only where two differ is the whole compared, to name keys and ranks.
"""

import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel.collectives import gather_objects
from parallel.mesh import Axis
from train.config import RunConfig, flatten

OWN = ("run.cache", "data.sources")
"""Keys that may differ between ranks: where data lies on a machine. What it is must be equal, and is compared where it
has been opened."""

ROOMS = ("model", "parallel", "data", "optim", "train", "configs", "launch")


def check_ranks(config: RunConfig) -> None:
    """Refuse to start ranks of which one was given another configuration or runs other code. All ranks call it.

    Raises:
        ValueError: on all ranks alike, naming the keys and the ranks.
    """
    given = {name: value for name, value in flatten(config).items() if name not in OWN}
    code = {"code": code_version(), "python": platform.python_version(), "torch": torch.__version__}
    check_equal(given | code, remedy="start all ranks with the same command and the same installation")


def check_equal(values: Mapping[str, Any], *, remedy: str) -> None:
    """Refuse values that are not equal on all ranks of the default process group, if there is one. All ranks call it.

    Raises:
        ValueError: on all ranks alike, naming the values and the ranks.
    """
    if not dist.is_initialized():
        return
    text = json.dumps(values, sort_keys=True)
    digests = _gather(hashlib.sha256(text.encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    ranks = [json.loads(other) for other in _gather(text)]
    names = sorted({name for rank in ranks for name in rank})
    differing = [line for name in names if (line := _difference(name, [rank.get(name) for rank in ranks])) is not None]
    raise ValueError(f"ranks were given different things: {'; '.join(differing)}; {remedy}")


def code_version() -> str:
    """A hash, 16 hex digits, of all of this program's source files."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(path for room in ROOMS for path in (root / room).rglob("*") if path.suffix in (".py", ".yaml")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _gather(text: str) -> list[str]:
    # Of the default group: there is no mesh yet.
    return gather_objects(text, Axis("world", dist.group.WORLD, dist.get_rank(), dist.get_world_size()))


def _difference(name: str, values: list[Any]) -> str | None:
    """``name`` is A on rank 0, B on rank 1, 3; None where all are equal."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(json.dumps(value), []).append(str(rank))
    if len(ranks) == 1:
        return None
    # The most come first: what differs from them is the mistake.
    several = sorted(ranks.items(), key=lambda item: -len(item[1]))
    return f"{name} is " + ", ".join(f"{value} on rank {', '.join(numbers[:8])}" for value, numbers in several[:4])
