"""What a run's folder says of how it was run: by whom, where, when, with what, and how it ended.

record.jsonl   two objects for each start: when, where, command and versions; and how it ended
run.log        every line that was printed, with its time (`data.output`)
"""

import getpass
import importlib.metadata
import json
import logging
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

LOG_FILE = "run.log"
RECORD_FILE = "record.jsonl"
PACKAGES = ("perilune", "torch", "numpy", "tokenizers", "hydra-core")
GIT_SECONDS = 5.0

T = TypeVar("T")

logger = logging.getLogger(__name__)


def now() -> str:
    """Local time with its offset."""
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def describe_start() -> dict[str, Any]:
    """This start of the run, for record.jsonl and facts.json; what the system does not tell is None."""
    return {
        "started": now(),
        "host": known(platform.node),
        "user": known(getpass.getuser),
        "pid": os.getpid(),
        "folder": known(os.getcwd),
        "command": shlex.join(sys.orig_argv),
        "versions": {
            "python": platform.python_version(),
            **{package: known(importlib.metadata.version, package) for package in PACKAGES},
            "cuda": torch.version.cuda,
        },
        "commit": known(git_commit, Path(__file__).parents[1]),
    }


def known(ask: Callable[..., T], *arguments: object) -> T | None:
    """What ``ask(*arguments)`` returns; None if the system does not know, as the name of a user in a container."""
    try:
        return ask(*arguments)
    except Exception:  # a record is worth no run
        return None


def git_commit(code: Path) -> str | None:
    """The commit that the code is at, with "+" where files were changed since; None where it is no checkout."""
    if not (code / ".git").exists():
        return None
    head, changes = (
        subprocess.run(
            ["git", "-C", str(code), *arguments], capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        ).stdout
        for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
    )
    return head.strip() + ("+" if changes.strip() else "")


def append_record(run_dir: Path, entry: dict[str, Any]) -> None:
    """Add an object to the folder's record; where that fails, the run goes on without it, and says so."""
    path = run_dir / RECORD_FILE
    try:
        with path.open("a", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(json.dumps(entry) + "\n")
    except OSError as error:
        logger.warning("%s: cannot be written (%s); the run goes on without it", path, error.strerror or error)
