"""Save and load the state of a run: `torch.distributed.checkpoint` storage in sealed folders.

    save(step)   snapshot to CPU ── returns ──> training goes on, check() after every step
                     └─ writer thread: every rank writes and hashes its tensors ─ rank 0 seals, publishes ─ prunes
                            └─ the storage refuses: the same copy once more, a bounded number of times

A tensor is stored once under a globally unique name, whichever rank holds it, so a later run with other
ranks, or another mesh, asks for the names it needs. A rank may hold a slice of it, and ask for another: the
file knows the tensor as a whole. What several ranks hold alike is replicated: one of them writes it. What is
not a tensor (token clock, data position, counters) is one JSON file.

Saving is asynchronous by default: the tensors are copied before `save` returns, so later updates cannot
leak into the file, and the thread's collectives run on a process group of their own, so they cannot
interleave with training's. Every phase of a save ends in an agreement of all ranks: it succeeds on all
or fails on all, with one error that names the rank and the cause, and a failed save leaves the older
checkpoints as they were. What comes after the new folder has its name (removing old ones) is a warning.
No rank waits while another does work that grows with the whole checkpoint: each writes, hashes and verifies its part.
"""

import json
import logging
import secrets
import shutil
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel.sharding import TensorSlice
from train.checkpoint import files, staging
from train.checkpoint.agreement import Agreement
from train.checkpoint.staging import Candidate, CheckpointError, FileEntry, StorageError
from train.checkpoint.verify import Verifier

STATE = "state.json"
PAUSE = 2.0
"""Seconds before a save is tried again; doubled for each further try."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """Global shape and dtype of a tensor in a checkpoint (or of one that is to be filled from it)."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class CheckpointStore:
    """The checkpoints under one folder. Methods marked *collective* are called by all ranks alike."""

    def __init__(
        self,
        root: Path,
        *,
        rank: int = 0,
        ranks: int = 1,
        group: ProcessGroup | None = None,
        keep: int = 2,
        asynchronous: bool = True,
        timeout: float = 3600.0,
        retries: int = 0,
    ) -> None:
        """Collective over the default process group.

        Args:
            root: folder of the checkpoints, on storage that all ranks see; made by the first save.
            rank: this process's rank in ``group``; rank 0 names, seals, publishes and prunes.
            ranks: size of ``group``.
            group: the ranks that save together; None only if ``ranks`` is 1, then no group is needed.
            keep: see `CheckpointConfig`.
            asynchronous: see `CheckpointConfig`.
            timeout: see `CheckpointConfig`.
            retries: see `CheckpointConfig`.
        """
        assert (ranks == 1) or (group is not None), "several ranks need their process group"
        self._root = root
        self._rank = rank
        self._keep = keep
        self._retries = retries
        own = None
        if group is not None and ranks > 1:
            members = dist.get_process_group_ranks(group)
            own = dist.new_group(members, backend="gloo", timeout=timedelta(seconds=timeout))
        self._ranks = Agreement(rank=rank, ranks=ranks, group=own)
        self._verifier = Verifier(root, agreement=self._ranks)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if asynchronous else None
        self._pending: Future[None] | None = None
        self._verified: Candidate | None = None
        # Held while `check` counts and while the ranks agree on the count at which to raise.
        self._gate = threading.Lock()
        self._checks = 0
        self._raise_at: int | None = None
        self._closing = threading.Event()
        self.slowest = 0.0
        """Seconds that the longest save has taken in the writer thread, until it was published."""

    def save(self, step: int, *, tensors: Mapping[str, Tensor | TensorSlice], state: dict[str, Any]) -> None:
        """Save ``step`` (steps done so far). Collective.

        Waits for the previous save, copies the tensors, and returns while they are being written, or
        when they are published if the store is not asynchronous.

        Args:
            step: names the checkpoint; the last step whose update is in ``tensors``.
            tensors: this rank's tensors, or slices of them, by globally unique name; what several ranks give
                of one name is equal where it overlaps. Any device, dtype and strides.
            state: JSON-able and equal on all ranks (rank 0's is written); tuples come back as lists.

        Raises:
            CheckpointError: the *previous* asynchronous save failed and no `check` said so (this one is then not
                begun), or this one failed and the store is not asynchronous; the same on all ranks.
        """
        self.wait()
        text = json.dumps(state, indent=1) + "\n"
        snapshot = {name: _copy_to_cpu(_as_slice(tensor)) for name, tensor in tensors.items()}
        if self._executor is None:
            self._save(step, snapshot, text)
        else:
            self._pending = self._executor.submit(self._save, step, snapshot, text)

    def check(self) -> None:
        """Notice a save that failed in the background; called by all ranks as often, after every step.

        It costs nothing as long as nothing failed. Ranks learn of a failure at different moments, and one that ended
        a step before the others would leave them waiting in it: so the writer threads agree on a count of checks that
        no rank has passed, holding back each rank's next check meanwhile, and all raise there.

        Raises:
            CheckpointError: the save in flight failed, also when tried again; raised once, on all ranks alike.
        """
        with self._gate:
            self._checks += 1
            due = self._raise_at is not None and self._checks >= self._raise_at
        if due:
            self.wait()

    def wait(self) -> None:
        """Wait for the save in flight, if any.

        Raises:
            CheckpointError: it failed; raised once, on all ranks, then the store can save again.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            pending.result()
        finally:
            self._raise_at = None

    def close(self) -> None:
        """`wait`, then end the writer thread. Raises like `wait`."""
        self._closing.set()
        try:
            self.wait()
        finally:
            if self._executor is not None:
                self._executor.shutdown()

    def latest(self) -> int | None:
        """Step of the newest checkpoint whose files all verify, None if there is no checkpoint. Collective.

        An invalid one is skipped with a warning that names its folder, the file and the cause.

        Raises:
            CheckpointError: there are checkpoints but none is valid, so starting afresh would be a
                silent loss; or a pending save had failed.
        """
        self.wait()
        self._verified = self._verifier.find()
        return None if self._verified is None else self._verified.step

    def names(self, step: int) -> dict[str, SavedTensor]:
        """Every tensor saved at ``step`` by name. Collective.

        Raises:
            CheckpointError: there is no valid checkpoint of ``step``.
        """
        self.wait()
        folder = self._find(step)
        return self._ranks.phase("read", folder, lambda: _read_names(folder))[self._rank]

    def load(
        self, step: int, *, tensors: Mapping[str, Tensor | TensorSlice], ignore: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """Fill ``tensors`` in place from the checkpoint of ``step`` and return its state. Collective.

        Any rank may ask for any name, so the ranks that load need not be those that saved.

        Args:
            step: as given to `save`; its files are verified first unless this store has done so.
            tensors: what this rank wants, by name, whole or a slice; global shapes and dtypes must be the saved
                ones.
            ignore: prefixes of names that may be in the checkpoint without any rank asking for them.

        Raises:
            CheckpointError: no valid checkpoint of ``step``; a name is missing, has another shape or
                dtype, or is saved but wanted by nobody. All of them are named, and on an error in names
                no tensor has been changed. Or what was read is not what was written: then tensors have been changed.
        """
        self.wait()
        folder = self._find(step)
        slices = {name: _as_slice(tensor) for name, tensor in tensors.items()}
        wanted = {name: _describe(part) for name, part in slices.items()}
        saved = self._ranks.phase("load", folder, lambda: _read_names(folder))[self._rank]
        asked = set().union(*self._ranks.phase("load", folder, lambda: _check(folder, saved, wanted)))
        unasked = [name for name in saved if name not in asked and not name.startswith(ignore)]
        if unasked:
            raise CheckpointError(
                f"checkpoint {folder}: holds tensors that nothing asks for: {_join(unasked)}; load into the "
                f"model and optimizer that were saved, or ignore them by prefix"
            )
        self._ranks.phase("load", folder, lambda: files.read_tensors(folder, slices))
        state = self._ranks.phase("load", folder, lambda: staging.read_checked(folder, STATE))[self._rank]
        return json.loads(state)

    def _find(self, step: int) -> Path:
        found = self._verified
        if found is None or found.step != step:
            found = self._verifier.find(step=step)
        if found is None:
            raise CheckpointError(f"checkpoint of step {step}: not found in {self._root}; choose a step that is there")
        return found.folder

    def _save(self, step: int, tensors: dict[str, TensorSlice], state: str) -> None:
        """`_write`, again where the storage refused; all ranks try as often. In the writer thread, if there is one."""
        for attempt in range(self._retries + 1):
            try:
                self._write(step, tensors, state)
                return
            except StorageError as error:
                if attempt == self._retries:
                    self._agree_when_to_raise()
                    raise
                pause = PAUSE * 2**attempt
                if self._rank == 0:
                    logger.warning("%s; is tried again in %g seconds (checkpoint.retries)", error, pause)
                # Nobody trains meanwhile if the run waits for this save in order to end.
                self._closing.wait(pause)
            except BaseException:
                self._agree_when_to_raise()
                raise

    def _agree_when_to_raise(self) -> None:
        if self._executor is None:
            return
        with self._gate:
            # Should the ranks be cut off from each other, this one at least says it.
            self._raise_at = self._checks + 1
            self._raise_at = max(self._ranks.exchange(self._raise_at))

    def _write(self, step: int, tensors: dict[str, TensorSlice], state: str) -> None:
        """One whole save. Its phases are the points where the ranks agree."""
        began = time.monotonic()
        token = self._ranks.exchange(secrets.token_hex(4))[0]
        staged = self._root / staging.staging_name(step, token)
        final = staged.with_name(staging.folder_name(step))
        phase = self._ranks.phase
        try:
            described = phase("save", final, lambda: self._begin(staged, tensors))
            phase("save", final, lambda: _check_replicas(described))
            tables = phase("save", final, lambda: self._write_tensors(staged, tensors))
            # Of one that is to be replaced; verified by all ranks, as everything is.
            valid = self._verifier.problem(Candidate(step=step, folder=final)) is None
            phase("save", final, lambda: self._publish(staged, step, tables, state, valid))
        except Exception:
            if self._rank == 0:
                shutil.rmtree(staged, ignore_errors=True)
            raise
        self.slowest = max(self.slowest, time.monotonic() - began)
        self._prune(step)

    def _begin(self, staged: Path, tensors: dict[str, TensorSlice]) -> dict[str, SavedTensor]:
        if self._rank == 0:
            self._root.mkdir(parents=True, exist_ok=True)
            staging.remove_abandoned(self._root)
            staged.mkdir()
        return {name: _describe(tensor) for name, tensor in tensors.items()}

    def _write_tensors(self, staged: Path, tensors: dict[str, TensorSlice]) -> dict[str, FileEntry]:
        return files.write_tensors(staged, tensors, group=self._ranks.group)

    def _publish(self, staged: Path, step: int, tables: list[dict[str, FileEntry]], state: str, valid: bool) -> None:
        # On all ranks: whether `_find` verifies must not depend on the rank.
        self._verified = None
        if self._rank != 0:
            return
        written = {name: entry for table in tables for name, entry in table.items()}
        written[STATE] = staging.write_durable(staged / STATE, state)
        staging.seal(staged, step=step, files=written)
        final = staging.publish(staged, step=step, valid=valid)
        with staging.tolerated(f"{final}: is saved, but will be verified again"):
            self._verifier.trust(final)

    def _prune(self, step: int) -> None:
        """Remove what is obsolete. The new checkpoint is safe: old ones that stay cost space, and are tried again."""
        what = f"checkpoints in {self._root}: removing old ones failed"
        with staging.tolerated(what):
            for folder in self._verifier.obsolete(newest=step, keep=self._keep):
                if self._rank == 0 and not folder.is_symlink():
                    with staging.tolerated(what):
                        staging.remove(folder)


def _as_slice(tensor: Tensor | TensorSlice) -> TensorSlice:
    part = tensor if isinstance(tensor, TensorSlice) else TensorSlice.whole(tensor)
    return replace(part, local=part.local.detach())


def _copy_to_cpu(part: TensorSlice) -> TensorSlice:
    return replace(part, local=part.local.to("cpu", copy=True, memory_format=torch.contiguous_format))


def _describe(part: TensorSlice) -> SavedTensor:
    return SavedTensor(shape=part.shape, dtype=part.local.dtype)


def _join(names: list[str]) -> str:
    """The first few of ``names``, and how many more."""
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _check_replicas(described: list[dict[str, SavedTensor]]) -> None:
    """Ranks that hold the same name must hold the same tensor: one of them writes it for all."""
    first: dict[str, SavedTensor] = {}
    for rank, table in enumerate(described):
        for name, tensor in table.items():
            if first.setdefault(name, tensor) != tensor:
                raise CheckpointError(
                    f"tensor {name}: {first[name]} on one rank and {tensor} on rank {rank}; the same name "
                    f"means the same tensor, give a part of a tensor as a TensorSlice"
                )


def _check(folder: Path, saved: dict[str, SavedTensor], wanted: dict[str, SavedTensor]) -> set[str]:
    """The wanted names, after checking that every one is saved with its shape and dtype."""
    missing = [name for name in wanted if name not in saved]
    if missing:
        raise CheckpointError(
            f"checkpoint {folder}: lacks {_join(missing)}; load into the model and optimizer that were saved"
        )
    different = [
        f"{name} is saved as {saved[name]} but {tensor} is asked for"
        for name, tensor in wanted.items()
        if saved[name] != tensor
    ]
    if different:
        raise CheckpointError(f"checkpoint {folder}: {_join(different)}; use the configuration of the saved run")
    return set(wanted)


def _read_names(folder: Path) -> dict[str, SavedTensor]:
    staging.read_checked(folder, files.METADATA)
    return {
        name: SavedTensor(shape=tuple(entry.size), dtype=entry.properties.dtype)
        for name, entry in files.read_metadata(folder).items()
    }
