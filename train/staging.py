"""Checkpoint folders on disk: staged, sealed, published, verified, pruned. Plain files, no torch.

    root/step-00000020.tmp-1f0c9a2b/    being written (or left by a dead save): nobody reads it
    root/step-00000020/                 published: complete, sealed and re-read before it got this name
        ...                             files of the ranks
        manifest.json                   size and SHA-256 of every file above
        COMMIT                          SHA-256 of manifest.json; written last

There is no pointer to the newest checkpoint that could be torn or lag behind: the folder names are the
record. A folder gets its final name by one rename, after everything in it is durable and verified, and
loses it by one rename before its files go, so a reader at any instant sees a checkpoint whole or not at
all. Names that are not of these forms belong to somebody else and are never touched.
"""

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

MANIFEST = "manifest.json"
COMMIT = "COMMIT"
FORMAT = 1

_PUBLISHED = re.compile(r"step-(\d{8,})(\.replaced)?")
_STAGED = re.compile(r"step-\d{8,}(\.replaced)?\.tmp-[0-9a-f]+")

logger = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, found or read. One line: what, where, why, remedy."""


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """What the manifest knows of one file: its length in bytes and the SHA-256 of its content."""

    size: int
    sha256: str


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


def make_durable(path: Path) -> None:
    """fsync a file, or a folder's list of names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durable(path: Path, text: str) -> None:
    """Write ``text`` as UTF-8 and fsync it."""
    with path.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def describe_file(path: Path) -> FileEntry:
    """Size and SHA-256 of ``path``, read in chunks."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileEntry(size=os.fstat(stream.fileno()).st_size, sha256=digest)


def seal(folder: Path, *, step: int, files: dict[str, FileEntry]) -> None:
    """Write the manifest of ``files`` and then the commit marker, each durable before the next."""
    entries = {name: asdict(files[name]) for name in sorted(files)}
    write_durable(folder / MANIFEST, json.dumps({"format": FORMAT, "step": step, "files": entries}, indent=1) + "\n")
    make_durable(folder)
    write_durable(folder / COMMIT, describe_file(folder / MANIFEST).sha256 + "\n")
    make_durable(folder)


def find_problem(folder: Path, *, step: int) -> str | None:
    """Why ``folder`` is not a complete, unaltered checkpoint of ``step``; None if it is one.

    Every file of the manifest is read and hashed. Files that the manifest does not name are ignored.
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
        for name, entry in manifest["files"].items():
            if describe_file(folder / name).sha256 != entry["sha256"]:
                return f"{name} does not have its SHA-256 (its content was altered)"
    except FileNotFoundError:
        return f"{name} is missing"
    except (OSError, UnicodeDecodeError) as error:
        return f"{name} cannot be read ({error})"
    return None


def list_candidates(root: Path) -> list[Candidate]:
    """Everything under ``root`` with a published checkpoint's name, newest first; empty if no root.

    A checkpoint set aside while its step is written anew comes after the one that replaces it.
    """
    found = []
    for path in root.iterdir() if root.is_dir() else ():
        if match := _PUBLISHED.fullmatch(path.name):
            found.append(Candidate(step=int(match[1]), folder=path, replaced=match[2] is not None))
    return sorted(found, key=lambda candidate: (-candidate.step, candidate.replaced))


def _identity(folder: Path) -> tuple[int, int] | None:
    try:
        stat = folder.lstat()
    except FileNotFoundError:
        return None
    return stat.st_dev, stat.st_ino


def find_verified(root: Path, *, step: int | None = None) -> Candidate | None:
    """The newest verified checkpoint (of ``step`` alone if given), or None if there is no candidate.

    A candidate that fails is reported by a warning, and the next older one is tried. A folder that
    another process pruned or replaced while it was being read says nothing: the scan starts again.

    Raises:
        CheckpointError: there are candidates, but none is valid.
    """
    while True:
        problems: list[str] = []
        for candidate in list_candidates(root):
            if step is not None and candidate.step != step:
                continue
            before = _identity(candidate.folder)
            problem = find_problem(candidate.folder, step=candidate.step)
            if before is None or _identity(candidate.folder) != before:
                break
            if problem is None:
                for line in problems:
                    logger.warning("%s; falling back to %s", line, candidate.folder.name)
                return candidate
            problems.append(f"checkpoint {candidate.folder}: {problem}")
        else:
            if not problems:
                return None
            raise CheckpointError(
                f"none of the {len(problems)} checkpoints is valid: {'; '.join(problems)}; restore one from a "
                f"copy, or move them away to start from step 0"
            )


def remove(folder: Path) -> None:
    """Take ``folder`` away: first its name, atomically, then its files. A link is only unlinked."""
    if folder.is_symlink() or not folder.is_dir():
        folder.unlink()
        return
    if not _STAGED.fullmatch(folder.name):
        folder = folder.rename(folder.with_name(f"{folder.name}.tmp-{secrets.token_hex(4)}"))
    shutil.rmtree(folder)


def remove_abandoned(root: Path) -> None:
    """Remove the staging folders of saves that died. Only the one writer of ``root`` may call this."""
    for path in list(root.iterdir()):
        if _STAGED.fullmatch(path.name) and not path.is_symlink():
            remove(path)


def publish(staged: Path, *, step: int) -> Path:
    """Verify the sealed folder ``staged`` and give it the name of ``step``; returns the new path.

    A valid checkpoint of the same step (written before the run was rewound) is set aside under a name
    that readers still accept, until the new one is in place; an invalid one is removed.

    Raises:
        CheckpointError: what was read back is not what was written.
    """
    if problem := find_problem(staged, step=step):
        raise CheckpointError(f"reading back {staged}: {problem}; check the disk")
    final = staged.with_name(folder_name(step))
    aside = final.with_name(f"{final.name}.replaced")
    if os.path.lexists(final):
        if find_problem(final, step=step) is None:
            if os.path.lexists(aside):
                remove(aside)
            final.rename(aside)
        else:
            remove(final)
    staged.rename(final)
    make_durable(final.parent)
    if os.path.lexists(aside):
        remove(aside)
    return final


def prune(root: Path, *, newest: int, keep: int) -> None:
    """Keep ``keep`` verified checkpoints up to step ``newest``; remove what is older than all of these.

    Checkpoints of later steps are left alone (the run was rewound on purpose), and so are invalid ones
    between the kept: they count for nothing and go when they have become the oldest. Nothing is removed
    unless step ``newest`` itself verifies.
    """
    kept = 0
    for candidate in list_candidates(root):
        if candidate.step > newest:
            continue
        if kept == keep:
            if not candidate.folder.is_symlink():
                remove(candidate.folder)
        elif find_problem(candidate.folder, step=candidate.step) is None:
            kept += 1
        elif candidate.step == newest and not candidate.replaced:
            return
