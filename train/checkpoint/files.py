"""Tensors in the files of `torch.distributed.checkpoint`: slices of global tensors, checksummed as they pass.

    tensors ─ torch.save ─> stream ─┬─> file            one per rank
                                    └─> SHA-256 of the file, CRC-32 of each piece

The writer hashes what it writes while it writes it, so nothing is read a second time. A piece is what lies between
two borders at which dcp asks for the position, which it does before and after each tensor. The reader compares the
CRC-32 of each tensor's bytes as they come from the storage: damage between verification and load is noticed too.
"""

import hashlib
import io
import os
import warnings
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.filesystem import FileSystem
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
from train.checkpoint import staging
from train.checkpoint.agreement import root_cause
from train.checkpoint.staging import CheckpointError, FileEntry, Piece

METADATA = ".metadata"


class _HashedStream(io.RawIOBase):
    """Writes through to a file and hashes what passes. Only appends."""

    def __init__(self, raw: IO[bytes]) -> None:
        super().__init__()
        self._raw = raw
        self._digest = hashlib.sha256()
        self._position = self._begun = self._crc = 0
        self._pieces: list[Piece] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._raw.write(data)
        self._digest.update(data)
        self._crc = zlib.crc32(data, self._crc)
        size = memoryview(data).nbytes
        self._position += size
        return size

    def tell(self) -> int:
        if self._position > self._begun:
            self._pieces.append(Piece(self._begun, self._position - self._begun, self._crc))
            self._begun, self._crc = self._position, 0
        return self._position

    def flush(self) -> None:
        # A closed stream is flushed once more by its collection.
        if not self._raw.closed:
            self._raw.flush()

    def entry(self) -> FileEntry:
        """The file as it was written."""
        self.tell()
        return FileEntry(size=self._position, sha256=self._digest.hexdigest(), pieces=tuple(self._pieces))


class _HashingFiles(FileSystem):
    """Files that are hashed while they are written and durable when they are closed."""

    def __init__(self) -> None:
        self.entries: dict[str, FileEntry] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with Path(path).open("wb") as raw:
            stream = _HashedStream(raw)
            yield stream
            raw.flush()
            staging.sync(raw.fileno(), Path(path))
        self.entries[Path(path).name] = stream.entry()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.entries[Path(new_path).name] = self.entries.pop(Path(path).name)


class _Writer(dcp.FileSystemWriter):
    """The file-system writer, but it hashes, and a failed write raises the operating system's error.

    `torch.save` reports a full disk as an assertion about file positions, and the error that it handled
    then is lost on the way to the other ranks.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=False)
        self.fs = self.files = _HashingFiles()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise root_cause(error) from None


class _Reader(dcp.FileSystemReader):
    """The file-system reader, but it compares the checksum of each stored tensor that it reads."""

    def __init__(self, folder: Path, files: Mapping[str, FileEntry]) -> None:
        super().__init__(folder)
        self._files = files

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        file.seek(sinfo.offset)
        content = file.read(sinfo.length)
        name, begun, end = sinfo.relative_path, sinfo.offset, sinfo.offset + sinfo.length
        for piece in self._files[name].pieces:
            if piece.offset < begun or piece.offset + piece.size > end:
                continue
            inside = memoryview(content)[piece.offset - begun : piece.offset - begun + piece.size]
            if zlib.crc32(inside) != piece.crc32:
                raise CheckpointError(
                    f"checkpoint {self.path}: {name} was altered after it had been verified (bytes {piece.offset:,} to "
                    f"{piece.offset + piece.size:,}); look at the storage and start again: the damaged one is skipped"
                )
        return io.BytesIO(content)


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


def write_tensors(
    folder: Path, tensors: Mapping[str, TensorSlice], *, group: ProcessGroup | None
) -> dict[str, FileEntry]:
    """Write this rank's part of ``tensors`` (on the host) into ``folder``; its files as they were written. Collective.

    What several ranks hold alike is written by one of them. Rank 0 writes `METADATA` as well.

    Raises:
        CheckpointException: the write failed on the ranks that its ``failures`` name.
    """
    writer = _Writer(folder)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(
            {name: part.local for name, part in tensors.items()},
            storage_writer=writer,
            planner=_SlicePlanner(tensors),
            process_group=group,
            no_dist=group is None,
        )
    return writer.files.entries


def read_metadata(folder: Path) -> dict[str, TensorStorageMetadata]:
    """What dcp knows of each tensor in ``folder``, by name."""
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {name: entry for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}


def read_tensors(folder: Path, tensors: Mapping[str, TensorSlice]) -> None:
    """Fill ``tensors`` in place. Each rank reads what it asked for; no rank waits for another.

    Raises:
        CheckpointError: what was read is not what was written.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(
                {name: part.local for name, part in tensors.items()},
                storage_reader=_Reader(folder, staging.read_files(folder)),
                planner=_SliceReader(tensors),
                no_dist=True,
            )
        except dcp.api.CheckpointException as error:
            altered = [cause for cause, _ in error.failures.values() if isinstance(cause, CheckpointError)]
            if altered:
                raise altered[0] from None
            raise
