"""Save and load the state of a run: `torch.distributed.checkpoint` storage in sealed folders.

    save(step)   snapshot to CPU ── returns ──> training goes on
                     └─ writer thread: every rank writes its tensors ─ rank 0 seals, verifies,
                        publishes, prunes                                   (`train/staging.py`)

A tensor is stored once under a globally unique name, whichever rank holds it, so a later run with other
ranks, or another mesh, asks for the names it needs. A rank may hold a slice of it, and ask for another: the
file knows the tensor as a whole. What several ranks hold alike is replicated: one of them writes it. What is
not a tensor (token clock, data position, counters) is one JSON file.

Saving is asynchronous by default: the tensors are copied before `save` returns, so later updates cannot
leak into the file, and the thread's collectives run on a process group of their own, so they cannot
interleave with training's. Every phase of a save ends in an agreement of all ranks: it succeeds on all
or fails on all, with one error that names the rank and the cause, and a failed save leaves the older
checkpoints as they were.
"""

import errno
import json
import logging
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from parallel.sharding import TensorSlice
from train import staging
from train.staging import Candidate, CheckpointError, FileEntry

__all__ = ["CheckpointConfig", "CheckpointError", "CheckpointStore", "SavedTensor"]

STATE = "state.json"
DCP_METADATA = ".metadata"

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass
class CheckpointConfig:
    """When to save and what to keep.

    every: steps between checkpoints; 0 saves only at the end of the run.
    keep: verified checkpoints kept, the newest included; one more exists while a save is under way.
    asynchronous: write in a background thread while training goes on.
    """

    AT_RESUME: ClassVar[str] = ""

    every: int = 100
    keep: int = 2
    asynchronous: bool = True

    def errors(self) -> list[str]:
        """Every violated rule: field, value, rule, remedy; empty if all is well."""
        found = []
        if self.every < 0:
            found.append(f"checkpoint.every={self.every}: must be at least 0; use 0 to save only at the end of the run")
        if self.keep < 1:
            found.append(f"checkpoint.keep={self.keep}: must be at least 1; use 1 to keep only the newest")
        return found


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """Global shape and dtype of a tensor in a checkpoint (or of one that is to be filled from it)."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class _Writer(dcp.FileSystemWriter):
    """The file-system writer, but a failed write raises the operating system's error.

    `torch.save` reports a full disk as an assertion about file positions, and the error that it handled
    then is lost on the way to the other ranks.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise _root_cause(error) from None


class _SlicePlanner(dcp.DefaultSavePlanner):
    """Plans the writing of slices: each is one chunk of its global tensor."""

    def __init__(self, slices: Mapping[str, TensorSlice]) -> None:
        super().__init__(flatten_state_dict=False)
        self._slices = slices

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(name, part) for name, part in self._slices.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._slices[index.fqn].local


class _SliceReader(dcp.DefaultLoadPlanner):
    """Plans the reading of slices from whatever chunks were written."""

    def __init__(self, slices: Mapping[str, TensorSlice]) -> None:
        super().__init__(flatten_state_dict=False)
        self._slices = slices

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        items = []
        for name, part in self._slices.items():
            saved = stored[name]
            assert isinstance(saved, TensorStorageMetadata)
            items += create_read_items_for_chunk_list(name, saved, [_chunk(part)])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._slices[index.fqn].local


def _chunk(part: TensorSlice) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(part.offsets), sizes=part.local.shape)


def _write_item(name: str, part: TensorSlice) -> WriteItem:
    properties = TensorProperties.create_from_tensor(part.local)
    return WriteItem(
        index=MetadataIndex(name, part.offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk=_chunk(part), properties=properties, size=torch.Size(part.shape)),
    )


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
    ) -> None:
        """Collective over the default process group.

        Args:
            root: folder of the checkpoints, on storage that all ranks see; made by the first save.
            rank: this process's rank in ``group``; rank 0 names, seals, publishes and prunes.
            ranks: size of ``group``.
            group: the ranks that save together; None only if ``ranks`` is 1, then no group is needed.
            keep: see `CheckpointConfig`.
            asynchronous: see `CheckpointConfig`.
        """
        assert (ranks == 1) or (group is not None), "several ranks need their process group"
        self._root = root
        self._rank = rank
        self._ranks = ranks
        self._keep = keep
        self._group: ProcessGroup | None = None
        if group is not None and ranks > 1:
            members = dist.get_process_group_ranks(group)
            self._group = dist.new_group(members, backend="gloo")
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if asynchronous else None
        self._pending: Future[None] | None = None
        self._verified: Candidate | None = None
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
            CheckpointError: the *previous* asynchronous save failed (this one is then not begun), or
                this one failed and the store is not asynchronous; the same on all ranks.
        """
        self.wait()
        text = json.dumps(state, indent=1) + "\n"
        snapshot = {name: _copy_to_cpu(_as_slice(tensor)) for name, tensor in tensors.items()}
        if self._executor is None:
            self._write(step, snapshot, text)
        else:
            self._pending = self._executor.submit(self._write, step, snapshot, text)

    def wait(self) -> None:
        """Wait for the save in flight, if any.

        Raises:
            CheckpointError: it failed; raised once, on all ranks, then the store can save again.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pending.result()

    def close(self) -> None:
        """`wait`, then end the writer thread. Raises like `wait`."""
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
        self._verified = self._on_rank0(lambda: staging.find_verified(self._root))
        return None if self._verified is None else self._verified.step

    def names(self, step: int) -> dict[str, SavedTensor]:
        """Every tensor saved at ``step`` by name. Collective.

        Raises:
            CheckpointError: there is no valid checkpoint of ``step``.
        """
        self.wait()
        return _read_names(self._find(step))

    def load(
        self, step: int, *, tensors: Mapping[str, Tensor | TensorSlice], ignore: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        """Fill ``tensors`` in place from the checkpoint of ``step`` and return its state. Collective.

        Any rank may ask for any name, so the ranks that load need not be those that saved.

        Args:
            step: as given to `save`; its files are verified first unless `latest` has just done so.
            tensors: what this rank wants, by name, whole or a slice; global shapes and dtypes must be the saved
                ones.
            ignore: prefixes of names that may be in the checkpoint without any rank asking for them.

        Raises:
            CheckpointError: no valid checkpoint of ``step``; a name is missing, has another shape or
                dtype, or is saved but wanted by nobody. All of them are named, and on an error in names
                no tensor has been changed.
        """
        self.wait()
        folder = self._find(step)
        slices = {name: _as_slice(tensor) for name, tensor in tensors.items()}
        wanted = {name: _describe(part) for name, part in slices.items()}
        saved = _read_names(folder)
        asked = set().union(*self._phase("load", folder, lambda: _check(folder, saved, wanted)))
        unasked = [name for name in saved if name not in asked and not name.startswith(ignore)]
        if unasked:
            raise CheckpointError(
                f"checkpoint {folder}: holds tensors that nothing asks for: {_join(unasked)}; load into the "
                f"model and optimizer that were saved, or ignore them by prefix"
            )
        self._phase("load", folder, lambda: _read_tensors(folder, slices))
        return json.loads((folder / STATE).read_text("utf-8"))

    def _find(self, step: int) -> Path:
        found = self._verified
        if found is None or found.step != step:
            found = self._on_rank0(lambda: staging.find_verified(self._root, step=step))
        if found is None:
            raise CheckpointError(f"checkpoint of step {step}: not found in {self._root}; choose a step that is there")
        return found.folder

    def _write(self, step: int, tensors: dict[str, TensorSlice], state: str) -> None:
        """One whole save, in the writer thread. Its phases are the points where the ranks agree."""
        began = time.monotonic()
        token = self._exchange(secrets.token_hex(4))[0]
        staged = self._root / staging.staging_name(step, token)
        final = staged.with_name(staging.folder_name(step))
        try:
            described = self._phase("save", final, lambda: self._begin(staged, tensors))
            self._phase("save", final, lambda: _check_replicas(described))
            self._phase("save", final, lambda: self._write_tensors(staged, tensors))
            tables = self._phase("save", final, lambda: _describe_files(staged, f"__{self._rank}_*"))
            self._phase("save", final, lambda: self._publish(staged, step, tables, state))
            self.slowest = max(self.slowest, time.monotonic() - began)
        except Exception:
            if self._rank == 0:
                shutil.rmtree(staged, ignore_errors=True)
            raise

    def _begin(self, staged: Path, tensors: dict[str, TensorSlice]) -> dict[str, SavedTensor]:
        if self._rank == 0:
            self._root.mkdir(parents=True, exist_ok=True)
            staging.remove_abandoned(self._root)
            staged.mkdir()
        return {name: _describe(tensor) for name, tensor in tensors.items()}

    def _write_tensors(self, staged: Path, tensors: dict[str, TensorSlice]) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(
                {name: part.local for name, part in tensors.items()},
                storage_writer=_Writer(staged, sync_files=True),
                planner=_SlicePlanner(tensors),
                process_group=self._group,
                no_dist=self._ranks == 1,
            )

    def _publish(self, staged: Path, step: int, tables: list[dict[str, FileEntry]], state: str) -> None:
        # On all ranks: whether `_find` asks rank 0 must not depend on the rank.
        self._verified = None
        if self._rank != 0:
            return
        staging.write_durable(staged / STATE, state)
        files = {name: entry for table in tables for name, entry in table.items()}
        files |= {name: staging.describe_file(staged / name) for name in (STATE, DCP_METADATA)}
        staging.seal(staged, step=step, files=files)
        staging.publish(staged, step=step)
        try:
            staging.prune(self._root, newest=step, keep=self._keep)
        except OSError as error:
            # The checkpoint itself is safe; old ones that stay cost space, and the next save tries again.
            logger.warning("checkpoints in %s: removing old ones failed: %s", self._root, error)

    def _exchange(self, value: T) -> list[T]:
        """``value`` of every rank, in rank order."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self._ranks
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _phase(self, verb: str, folder: Path, action: Callable[[], T]) -> list[T]:
        """Run ``action`` on every rank; its results in rank order.

        Raises:
            CheckpointError: it failed anywhere; the same error on all ranks, the lowest rank's cause.
        """
        result: T | None = None
        failure: str | None = None
        try:
            result = action()
        except CheckpointError as error:
            failure = str(error)
        except (Exception, CheckpointException) as error:
            failure = f"checkpoint {folder}: {verb} failed on rank {self._rank}: {_explain(error, verb)}"
        outcomes = self._exchange((result, failure))
        for _, message in outcomes:
            if message is not None:
                raise CheckpointError(message)
        return [value for value, _ in outcomes]  # type: ignore[misc]

    def _on_rank0(self, action: Callable[[], T]) -> T | None:
        """Result of ``action``, run on rank 0 alone, on all ranks; its error likewise."""
        return self._phase("read", self._root, lambda: action() if self._rank == 0 else None)[0]


def _as_slice(tensor: Tensor | TensorSlice) -> TensorSlice:
    part = tensor if isinstance(tensor, TensorSlice) else TensorSlice.whole(tensor)
    return replace(part, local=part.local.detach())


def _copy_to_cpu(part: TensorSlice) -> TensorSlice:
    return replace(part, local=part.local.to("cpu", copy=True, memory_format=torch.contiguous_format))


def _describe(part: TensorSlice) -> SavedTensor:
    return SavedTensor(shape=part.shape, dtype=part.local.dtype)


def _describe_files(folder: Path, pattern: str) -> dict[str, FileEntry]:
    return {path.name: staging.describe_file(path) for path in folder.glob(pattern)}


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
    metadata = dcp.FileSystemReader(folder).read_metadata()
    return {
        name: SavedTensor(shape=tuple(entry.size), dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _read_tensors(folder: Path, tensors: Mapping[str, TensorSlice]) -> None:
    """Fill ``tensors`` in place. Each rank reads what it asked for; no rank waits for another."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(
            {name: part.local for name, part in tensors.items()},
            storage_reader=dcp.FileSystemReader(folder),
            planner=_SliceReader(tensors),
            no_dist=True,
        )


def _explain(error: BaseException, verb: str) -> str:
    """One line for ``error``: its root cause, and what to do about it."""
    root = _root_cause(error)
    line = (str(root) or type(root).__name__).strip().splitlines()[0]
    if isinstance(root, OSError):
        line = root.strerror or line
        if root.errno in (errno.ENOSPC, errno.EDQUOT):
            line += "; free disk space or lower checkpoint.keep"
        elif root.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            line += "; make the folder writable for this user"
        elif root.errno == errno.EFBIG:
            line += "; raise the file size limit (ulimit -f)"
    return f"{line} (older checkpoints are untouched)" if verb == "save" else line


def _root_cause(error: BaseException) -> BaseException:
    """The OSError behind ``error`` if there is one among its causes, else the first cause."""
    if isinstance(error, CheckpointException) and error.failures:
        return _root_cause(error.failures[min(error.failures)][0])
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    return next((link for link in chain if isinstance(link, OSError)), chain[-1])
