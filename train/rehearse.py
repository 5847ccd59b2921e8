"""Before the first step: try what the first evaluation and the first save will need.

A prompt without tokens, a folder that cannot be renamed or a disk without room would otherwise end the run when it is
hours old. All ranks try, all learn what failed on any of them, and all raise the same error.
"""

import errno
import logging
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parallel.collectives import gather_objects
from train.build import Run
from train.checkpoint.contents import checkpoint_tensors
from train.loop import evaluate
from train.run_folder import CHECKPOINTS, REMEDIES

PREFIX = ".rehearsal-"
"""Folders of rehearsals; one that is left over belongs to a process that was killed."""

logger = logging.getLogger(__name__)


class RehearsalFailed(RuntimeError):
    """What the run will need does not work here; nothing was trained yet. Equal on all ranks."""


def rehearse(run: Run) -> None:
    """Try the first evaluation and the first save on a small scale. Collective; changes nothing of the run.

    Raises:
        RehearsalFailed: naming every rank on which something failed, why, and a remedy.
        ValueError: the settings of the evaluation cannot be used.
    """
    if run.progress.step >= run.config.train.steps:
        return
    logger.info("rehearsing the first evaluation and the first save")
    if run.config.evaluate.every > 0:
        evaluate(run, tokens=1, sample_tokens=min(1, run.config.evaluate.sample_tokens))
    if run.config.routing.saves:
        rehearse_saving(run)


def rehearse_saving(run: Run) -> None:
    """Write, fsync, rename and remove a small folder where the checkpoints will be, and see whether they have room.

    Raises:
        RehearsalFailed: it did not work on some rank.
    """
    folder = run.folder / CHECKPOINTS
    folder = folder if folder.exists() else run.folder
    rank, first = run.mesh.world.rank, run.mesh.world.rank == 0
    staged = folder / f"{PREFIX}{share(run, secrets.token_hex(4))[0]}"
    final = staged.with_name(f"{staged.name}-renamed")
    if first:
        remove_abandoned(folder)
    try:
        agree(run, attempt(staged, staged.mkdir) if first else None)
        agree(run, attempt(staged, lambda: write_small_file(staged / f"rank-{rank}")))
        agree(run, attempt(staged, lambda: staged.rename(final)) if first else None)
    finally:
        if first:
            remove_abandoned(folder)
    needed = sum(share(run, bytes_to_save(run)))
    agree(run, room_problem(folder, needed) if first else None)


def write_small_file(path: Path) -> None:
    """As a checkpoint's file is written: under another name, durably, then renamed."""
    staged = path.with_name(f"{path.name}.tmp")
    with staged.open("wb") as stream:
        stream.write(b"rehearsal")
        stream.flush()
        os.fsync(stream.fileno())
    staged.rename(path)


def bytes_to_save(run: Run) -> int:
    """Bytes of this rank's part of a checkpoint."""
    tensors = checkpoint_tensors(run.model, dp=run.dp, optimizer=run.optimizer, mesh=run.mesh)
    return sum(part.local.numel() * part.local.element_size() for part in tensors.values())


def room_problem(folder: Path, needed: int) -> str | None:
    """Why a checkpoint of ``needed`` bytes has no room; None if it has, or if the file system does not tell."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    if usage.total == 0 or usage.free >= needed:
        return None
    return (
        f"{folder}: has {format_bytes(usage.free)} free and one checkpoint takes {format_bytes(needed)}; free disk "
        "space, lower checkpoint.keep, or set another run.dir"
    )


def remove_abandoned(folder: Path) -> None:
    """Take away what rehearsals left. What cannot be removed stays, and is said: it costs nothing."""
    for path in folder.glob(f"{PREFIX}*"):
        try:
            shutil.rmtree(path)
        except OSError as error:
            logger.warning("%s: cannot be removed (%s); remove it by hand", path, error.strerror or error)


def attempt(place: Path, action: Callable[[], Any]) -> str | None:
    """Why the file system did not let ``action`` be done at ``place``; None if it did."""
    try:
        action()
    except OSError as error:
        number = error.errno or 0
        remedy = REMEDIES.get(number, "mend the folder")
        size = "; the limit is of the file system or of ulimit -f" if number == errno.EFBIG else ""
        return f"{error.filename or place}: {error.strerror or error}{size}; {remedy}, or set another run.dir"
    return None


def agree(run: Run, problem: str | None) -> None:
    """Go on if no rank has a problem. Collective.

    Raises:
        RehearsalFailed: on all ranks, with the ranks of each problem.
    """
    ranks: dict[str, list[int]] = {}
    for rank, found in enumerate(share(run, problem)):
        if found is not None:
            ranks.setdefault(found, []).append(rank)
    if ranks:
        several = run.mesh.world.size > 1
        lines = [f"rank {', '.join(map(str, who))}: {what}" if several else what for what, who in ranks.items()]
        raise RehearsalFailed("\n".join(f"before the first step: {line}" for line in lines))


def share(run: Run, value: Any) -> list[Any]:
    """``value`` of every rank, in rank order. Collective."""
    return gather_objects(value, run.mesh.world)


def format_bytes(size: int) -> str:
    """In the unit that a disk's size is read in."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000  # type: ignore[assignment]
    return f"{size:.3g} TB"
