"""Checkpoint folders on disk: staged, sealed, published, verified, pruned. Plain files, no torch.

    root/step-00000020.tmp-1f0c9a2b/    being written (or left by a dead save): nobody reads it
    root/step-00000020/                 published: complete and sealed before it got this name
        ...                             files of the ranks
        manifest.json                   size and SHA-256 of every file above, and checksums of its tensors
        COMMIT                          SHA-256 of manifest.json; written last

There is no pointer to the newest checkpoint that could be torn or lag behind: the folder names are the
record. A folder gets its final name by one rename, after everything in it is durable and of the size that was
written, and loses it by one rename before its files go, so a reader at any instant sees a checkpoint whole or not
at all. Names that are not of these forms belong to somebody else and are never touched.

What a file system lacks and the checkpoint can do without (fsync, removing at once) is a warning; see `tolerated`.
"""

import errno
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

MANIFEST = "manifest.json"
COMMIT = "COMMIT"
FORMAT = 1
# What an fsync says when data is lost; everything else says that it cannot be asked for here.
LOST = (errno.EIO, errno.ENOSPC, errno.EDQUOT)

_PUBLISHED = re.compile(r"step-(\d{8,})(\.replaced)?")
_STAGED = re.compile(r"step-\d{8,}(\.replaced)?\.tmp-[0-9a-f]+")

logger = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, found or read. One line: what, where, why, remedy."""


class StorageError(CheckpointError):
    """The storage refused: another try may succeed."""


class Piece(NamedTuple):
    """CRC-32 of ``size`` bytes of a file from ``offset`` on: one stored tensor."""

    offset: int
    size: int
    crc32: int


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """What the manifest knows of one file: its length in bytes, the SHA-256 of its content, its tensors' checksums.

    A checkpoint from before there were checksums has no ``pieces``.
    """

    size: int
    sha256: str
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A folder that carries a checkpoint's name; whether it is one, `find_problem` tells."""

    step: int
    folder: Path
    replaced: bool = False


def folder_name(step: int) -> str:
    """Name of the published checkpoint of ``step``; equal widths, so names sort as steps do."""
    return f"step-{step:08d}"


def staging_name(step: int, token: str) -> str:
    """Name of a folder in which ``step`` is being written; ``token`` (hex) tells the saves apart."""
    return f"{folder_name(step)}.tmp-{token}"


def sync(handle: int, path: Path) -> None:
    """fsync an open file or folder. Where the file system has no fsync, this is a warning: only a crash can lose it.

    Raises:
        OSError: what was written did not reach the storage.
    """
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno in LOST:
            raise
        logger.warning(
            "%s: this file system cannot fsync %s (%s); a crash of the machine may lose what was just written",
            path.parent,
            "a folder" if path.is_dir() else "a file",
            error.strerror,
        )


def make_durable(folder: Path) -> None:
    """fsync a folder's list of names; see `sync`."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        logger.warning("%s: cannot be opened to make it durable (%s)", folder, error.strerror)
        return
    try:
        sync(handle, folder)
    finally:
        os.close(handle)


def write_durable(path: Path, text: str) -> FileEntry:
    """Write ``text`` as UTF-8 and fsync it; the file as it was written."""
    content = text.encode()
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        sync(stream.fileno(), path)
    return FileEntry(size=len(content), sha256=hashlib.sha256(content).hexdigest())


def describe_file(path: Path) -> FileEntry:
    """Size and SHA-256 of ``path``, read in chunks."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileEntry(size=os.fstat(stream.fileno()).st_size, sha256=digest)


def seal(folder: Path, *, step: int, files: dict[str, FileEntry]) -> None:
    """Write the manifest of ``files`` and then the commit marker, each durable before the next."""
    entries = {name: asdict(files[name]) for name in sorted(files)}
    manifest = write_durable(folder / MANIFEST, json.dumps({"format": FORMAT, "step": step, "files": entries}) + "\n")
    make_durable(folder)
    write_durable(folder / COMMIT, manifest.sha256 + "\n")
    make_durable(folder)


def read_files(folder: Path) -> dict[str, FileEntry]:
    """What the manifest of a sealed ``folder`` knows of each file, by name."""
    entries = json.loads((folder / MANIFEST).read_text("utf-8"))["files"]
    return {
        name: FileEntry(
            size=entry["size"], sha256=entry["sha256"], pieces=tuple(Piece(*piece) for piece in entry.get("pieces", ()))
        )
        for name, entry in entries.items()
    }


def find_seal_problem(folder: Path, *, step: int) -> str | None:
    """Why the seal of ``folder`` is not one of ``step``, or which file has not its size; None if all is well.

    The work does not grow with the files: their content is not read.
    """
    if not folder.is_dir():
        return "it is not a folder"
    name = COMMIT
    try:
        sealed = (folder / COMMIT).read_text("utf-8").strip()
        name = MANIFEST
        if describe_file(folder / MANIFEST).sha256 != sealed:
            return f"{MANIFEST} does not have the SHA-256 in {COMMIT}"
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        if manifest["format"] != FORMAT:
            return f"{MANIFEST} has format {manifest['format']}, this version reads {FORMAT}"
        if manifest["step"] != step:
            return f"{MANIFEST} belongs to step {manifest['step']}"
        for name, entry in manifest["files"].items():
            size = (folder / name).stat().st_size
            if size != entry["size"]:
                return f"{name} has {size} bytes, the manifest says {entry['size']}"
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, UnicodeDecodeError) as error:
        return f"{name} cannot be read ({error})"
    return None


def find_altered(folder: Path, files: dict[str, FileEntry]) -> str | None:
    """Which of ``files`` has not the content that the manifest knows; None if all have. Reads all of each file."""
    for name, entry in files.items():
        try:
            if describe_file(folder / name).sha256 != entry.sha256:
                return f"{name} does not have its SHA-256 (its content was altered)"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error})"
    return None


def read_checked(folder: Path, name: str) -> bytes:
    """A small file of a sealed ``folder``.

    Raises:
        CheckpointError: it is not what the manifest knows.
    """
    content = (folder / name).read_bytes()
    if hashlib.sha256(content).hexdigest() != read_files(folder)[name].sha256:
        raise CheckpointError(
            f"checkpoint {folder}: {name} was altered after it had been verified; look at the storage and start again"
        )
    return content


def signature(folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    """(name, size, time of change, inode) of every file: equal as long as nobody writes to them by ordinary means.

    Not the folder's own: it is renamed.
    """
    stats = [(name, (folder / name).stat()) for name in sorted((*read_files(folder), MANIFEST, COMMIT))]
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)


def list_candidates(root: Path) -> list[Candidate]:
    """Everything under ``root`` with a published checkpoint's name, newest first; empty if no root.

    A checkpoint set aside while its step is written anew comes after the one that replaces it.
    """
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        if match := _PUBLISHED.fullmatch(path.name):
            found.append(Candidate(step=int(match[1]), folder=path, replaced=match[2] is not None))
    return sorted(found, key=lambda candidate: (-candidate.step, candidate.replaced))


def identity(folder: Path) -> tuple[int, int] | None:
    """Device and inode of ``folder``, None if it is gone: another one under the same name has others."""
    try:
        stat = folder.lstat()
    except FileNotFoundError:
        return None
    return stat.st_dev, stat.st_ino


def remove(folder: Path) -> None:
    """Take ``folder`` away: first its name, atomically, then its files. A link is only unlinked.

    Files that stay although the name is gone are a warning, and the next save tries again.

    Raises:
        OSError: the name could not be taken away.
    """
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink()
        return
    if not _STAGED.fullmatch(folder.name):
        folder = folder.rename(folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}"))
    with tolerated(f"{folder}: cannot be removed now"):
        shutil.rmtree(folder)


def remove_abandoned(root: Path) -> None:
    """Remove the staging folders of saves that died. Only the one writer of ``root`` may call this.

    One that cannot be removed now costs space and is tried again by the next save.
    """
    for path in list(root.iterdir()):
        if _STAGED.fullmatch(path.name) and not path.is_symlink():
            with tolerated(f"{path}: cannot be removed now"):
                remove(path)


@contextmanager
def tolerated(what: str) -> Iterator[None]:
    """Inside, a failure is a warning: for what comes after the checkpoint is safe, or before it is begun."""
    try:
        yield
    except Exception as error:
        logger.warning("%s (%s); it is tried again at the next save", what, getattr(error, "strerror", None) or error)


def publish(staged: Path, *, step: int, valid: bool) -> Path:
    """Give the sealed folder ``staged`` the name of ``step``; returns the new path.

    A valid checkpoint of the same step (written before the run was rewound) is set aside under a name
    that readers still accept, until the new one is in place; an invalid one is removed.

    Args:
        valid: whether the checkpoint that has the name now verifies; of no effect if there is none.

    Raises:
        StorageError: the files have not the sizes that were written.
        OSError: the folder did not get its name.
    """
    if problem := find_seal_problem(staged, step=step):
        raise StorageError(f"reading back {staged}: {problem}; check the disk")
    final = staged.with_name(folder_name(step))
    aside = final.with_name(f"{final.name}.replaced")
    if os.path.lexists(final):
        if valid:
            if os.path.lexists(aside):
                remove(aside)
            final.rename(aside)
        else:
            remove(final)
    staged.rename(final)
    # From here on the checkpoint is saved.
    with tolerated(f"{final}: is saved, but the folder above is not durable"):
        make_durable(final.parent)
    with tolerated(f"{aside}: cannot be removed now"):
        if os.path.lexists(aside):
            remove(aside)
    return final
