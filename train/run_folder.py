"""The run folder: who may use it, and which config made it.

config.yaml     the effective configuration
facts.json      what is known about the run: sizes, corpus, unigram entropy
metrics.jsonl   one object per step
routing.npz     rows of each expert, step by step, if the run records them
checkpoints/    sealed checkpoints
report.html     written at the end and after every evaluation
"""

import errno
import fcntl
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

CONFIG_FILE = "config.yaml"
FACTS_FILE = "facts.json"
CHECKPOINTS = "checkpoints"
ROUTING_FILE = "routing.npz"
LOCK_FILE = ".lock"

logger = logging.getLogger(__name__)

REMEDIES = {
    errno.ENOSPC: "free disk space",
    errno.EDQUOT: "free disk space",
    errno.EACCES: "make the folder writable for this user",
    errno.EPERM: "make the folder writable for this user",
    errno.EROFS: "mount it writable",
}


def read_config(run_dir: Path) -> dict[str, Any] | None:
    """The configuration that made this folder, as nested dicts; None for a new folder.

    Raises:
        ValueError: the file holds no configuration, or is missing beside steps or checkpoints.
    """
    path = run_dir / CONFIG_FILE
    if not path.exists():
        if has_progress(run_dir):
            raise ValueError(
                f"{path}: is missing beside steps or checkpoints, so that nothing tells which config they are of; "
                "restore it or set another run.dir"
            )
        return None
    try:
        config = yaml.safe_load(path.read_text("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text; restore it or set another run.dir") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" in line {mark.line + 1}"
        raise ValueError(f"{path}: is not valid YAML{where}; restore it or set another run.dir") from error
    if not isinstance(config, dict) or not config:
        raise ValueError(f"{path}: holds no keys and values; restore it or set another run.dir")
    return config


@contextmanager
def explained(run_dir: Path) -> Iterator[None]:
    """Inside, what the operating system refuses is said in one line: the run folder, the path, the cause, a remedy.

    Raises:
        OSError: so explained.
    """
    try:
        yield
    except OSError as error:
        inside = f" {error.filename}:" if error.filename else ""
        remedy = REMEDIES.get(error.errno or 0, "mend the folder")
        raise OSError(
            f"run.dir={run_dir}:{inside} {error.strerror or error}; {remedy}, or set another run.dir"
        ) from error


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


def _open_lock(path: Path) -> int:
    """A descriptor of the lock file, made with the rights that the user's umask leaves.

    Another user of the folder may have made it for reading only: that suffices for a lock.
    """
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        if not path.exists():
            raise
        return os.open(path, os.O_RDONLY)


class RunLock:
    """Held by rank 0 while it trains: two runs in one folder would interleave their files.

    The operating system drops it with the process, so a killed run leaves nothing to clean up.
    """

    def __init__(self, run_dir: Path) -> None:
        """Make the folder where there is none, and take the lock.

        Raises:
            ValueError: another process holds it, or the folder cannot be made.
            OSError: it cannot be written.
        """
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"run.dir={run_dir}: cannot be made a folder ({error.filename}: {error.strerror}); set run.dir to a "
                "folder that can be made and written"
            ) from error
        with explained(run_dir):
            self._file = _open_lock(run_dir / LOCK_FILE)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            raise ValueError(
                f"run.dir={run_dir}: another run is using this folder; wait for it, stop it, or set another run.dir"
            ) from None
        except OSError as error:
            # Storage without locks (Lustre without the option flock, NFS without its lock daemon) trains as well.
            logger.warning(
                "run.dir=%s: this file system has no locks (%s); a second run in the folder would not be noticed, so "
                "start none",
                run_dir,
                error.strerror,
            )

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._file)
