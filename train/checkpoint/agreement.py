"""Phases of a save or a load: each succeeds on all ranks or fails on all, with one error.

    rank 0  action() ── result ──┐
    rank 1  action() ── failure ─┴─ all ranks exchange ── all raise what rank 1 says

The exchange is collective, so every rank reaches it whatever its action did.
"""

import errno
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException

from train.checkpoint.staging import CheckpointError, StorageError

T = TypeVar("T")

REMEDIES = {
    errno.ENOSPC: "; free disk space or lower checkpoint.keep",
    errno.EDQUOT: "; free disk space or lower checkpoint.keep",
    errno.EACCES: "; make the folder writable for this user",
    errno.EPERM: "; make the folder writable for this user",
    errno.EROFS: "; make the folder writable for this user",
    errno.EFBIG: "; raise the file size limit (ulimit -f)",
}


@dataclass(frozen=True)
class _Failure:
    rank: int
    message: str
    storage: bool


class Agreement:
    """The ranks that save and load together. Every method is called by all of them alike."""

    def __init__(self, *, rank: int, ranks: int, group: ProcessGroup | None) -> None:
        """Args:
        rank: this process's place among the ``ranks``.
        ranks: how many there are.
        group: a gloo group of theirs alone; None where there is one rank.
        """
        self.rank = rank
        self.ranks = ranks
        self.group = group

    def exchange(self, value: T) -> list[T]:
        """``value`` of every rank, in rank order."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value, group=self.group)
        return values

    def phase(self, verb: str, folder: Path, action: Callable[[], T]) -> list[T]:
        """Run ``action`` on every rank; its results in rank order.

        Raises:
            CheckpointError: the action failed anywhere; the same error on all ranks, the lowest rank's cause. A
                `StorageError` if that cause is the operating system's.
        """
        result: T | None = None
        failure: _Failure | None = None
        try:
            result = action()
        except CheckpointError as error:
            failure = _Failure(self.rank, str(error), isinstance(error, StorageError))
        except (Exception, CheckpointException) as error:
            failure = _describe(error, rank=self.rank, verb=verb, folder=folder)
        outcomes = self.exchange((result, failure))
        failures = [failed for _, failed in outcomes if failed is not None]
        if failures:
            first = min(failures, key=lambda failed: failed.rank)
            raise (StorageError if first.storage else CheckpointError)(first.message)
        return [value for value, _ in outcomes]  # type: ignore[misc]

    def on_first(self, verb: str, folder: Path, action: Callable[[], T]) -> T:
        """Result of ``action``, run on rank 0 alone, on all ranks; its error likewise."""
        return self.phase(verb, folder, lambda: action() if self.rank == 0 else None)[0]  # type: ignore[return-value]


def _describe(error: BaseException, *, rank: int, verb: str, folder: Path) -> _Failure:
    """What failed, in one line that names the rank on which it failed: not always the one that was told of it."""
    if isinstance(error, CheckpointException) and error.failures:
        rank = min(error.failures)
        error = error.failures[rank][0]
    root = root_cause(error)
    line = ((str(root) or type(root).__name__).strip().splitlines() or [type(root).__name__])[0]
    if isinstance(root, OSError):
        line = (root.strerror or line) + REMEDIES.get(root.errno or 0, "; look at the storage, or set another run.dir")
    if verb == "save":
        line += " (older checkpoints are untouched)"
    return _Failure(rank, f"checkpoint {folder}: {verb} failed on rank {rank}: {line}", isinstance(root, OSError))


def root_cause(error: BaseException) -> BaseException:
    """The OSError behind ``error`` if there is one among its causes, else the first cause."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    return next((link for link in chain if isinstance(link, OSError)), chain[-1])
