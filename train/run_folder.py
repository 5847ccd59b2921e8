"""The run folder: who may use it, and which config made it.

config.yaml     the effective configuration
facts.json      what is known about the run: sizes, corpus, unigram entropy
metrics.jsonl   one object per step
routing.npz     rows of each expert, step by step, if the run records them
checkpoints/    sealed checkpoints
report.html     written at the end and after every evaluation
"""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import yaml

CONFIG_FILE = "config.yaml"
FACTS_FILE = "facts.json"
CHECKPOINTS = "checkpoints"
ROUTING_FILE = "routing.npz"
LOCK_FILE = ".lock"


def read_config(run_dir: Path) -> dict[str, Any] | None:
    """The configuration that made this folder, as nested dicts; None for a new folder.

    Raises:
        ValueError: the file is not readable as YAML.
    """
    path = run_dir / CONFIG_FILE
    if not path.exists():
        return None
    try:
        return yaml.safe_load(path.read_text("utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: is not valid YAML ({error}); restore it or use another run.dir") from error


def has_progress(run_dir: Path) -> bool:
    """Whether anything was trained here: steps or checkpoints that another config must not mix with."""
    metrics = run_dir / "metrics.jsonl"
    return (metrics.exists() and metrics.stat().st_size > 0) or any((run_dir / CHECKPOINTS).glob("*"))


def write_config(run_dir: Path, config: dict[str, Any]) -> None:
    """Save the effective configuration, atomically."""
    write_text(run_dir / CONFIG_FILE, yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


def write_facts(run_dir: Path, facts: dict[str, Any]) -> None:
    """Save what the report shows beside the curves, atomically."""
    write_text(run_dir / FACTS_FILE, json.dumps(facts, indent=1) + "\n")


def write_text(path: Path, text: str) -> None:
    """Replace a file as a whole, so that a reader or a crash never meets half of it."""
    staged = path.with_name(f".{path.name}.tmp")
    staged.write_text(text, "utf-8")
    staged.replace(path)


class RunLock:
    """Held by rank 0 while it trains: two runs in one folder would interleave their files.

    The operating system drops it with the process, so a killed run leaves nothing to clean up.
    """

    def __init__(self, run_dir: Path) -> None:
        """Take the lock.

        Raises:
            ValueError: another process holds it.
        """
        self._file = os.open(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise ValueError(
                f"run.dir={run_dir}: another run is using this folder; wait for it, stop it, or set another run.dir"
            ) from None

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._file)
