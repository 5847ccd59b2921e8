"""Sources: what ``--source`` names, cut into units of work that are the same whenever the inputs are.

    SRC                        one document is
    file or folder of text     a file
    .jsonl                     a line          (its text field)
    .json                      an element of the array, or a line
    .parquet                   a row
    hub:NAME[:CONFIG][:SPLIT]  a row           (Hugging Face hub, through the `datasets` library)

Of each file only the first bytes are read in order to plan: a unit is a list of whole files, stretches of bytes of
line-based files and row groups of columnar ones, of about the same size. A line belongs to the stretch that it begins
in. A compressed file, or one whose encoding has no byte for a line feed, is not cut. What a folder holds and no unit
has is counted.
"""

import glob
import os
import stat
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from data.edges import InputError, edge, place_error, reason
from data.encoded import SUFFIXES, NotText, compression_of, judge, splits_lines
from data.readers import Piece, record_batches, row_groups

_TEXT = (
    "txt text md rst tex html htm xml csv tsv yaml yml toml ini cfg sql sh py pyi c h cc cpp cxx hpp cu cuh java js "
    "jsx ts tsx go rs rb php pl lua r jl scala kt swift cs hs ml clj el lisp f90 m css cmake proto"
)
TEXT_SUFFIXES = frozenset(f".{name}" for name in _TEXT.split())
"""What is read as text in a folder; a file that is named itself may have any other suffix."""
ROW_KINDS = {".jsonl": "lines", ".ndjson": "lines", ".json": "json", ".parquet": "parquet"}
HUB = "hub:"
SHARED_UNITS, SHARED_BYTES = 16, 2**20
"""Small inputs are cut into about so many units, not below this size, so that several processes share them."""
UNPACKED = 4
"""How many times larger compressed text is taken to be when units are planned."""


@dataclass(frozen=True)
class Unit:
    """What becomes one shard."""

    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Bytes of input."""
        return sum(piece.size for piece in self.pieces)


@dataclass(frozen=True)
class Inputs:
    """All inputs of a corpus.

    units: in order.
    files: (path, bytes, time of change in ns), to notice that an input has changed.
    left_out: what was found in folders and archives and is not read: a reason, how often, and the first path.
    """

    units: tuple[Unit, ...]
    files: tuple[tuple[str, int, int], ...]
    left_out: dict[str, tuple[int, str]]


@dataclass(frozen=True)
class _File:
    """A file, or a member of a zip archive, and what it is read as."""

    kind: str
    path: str
    member: str = ""
    member_bytes: int = 0
    named: bool = False


@dataclass
class _Search:
    """The files of a folder as they are found.

    seen: (device, inode) of files and folders: a link may lead to one that is read, or back to where it is.
    """

    suffixes: frozenset[str]
    left_out: dict[str, tuple[int, str]]
    found: list[_File] = field(default_factory=list)
    seen: set[tuple[int, int]] = field(default_factory=set)

    def leave_out(self, why: str, path: str) -> None:
        """Count what is not read."""
        number, first = self.left_out.get(why, (0, path))
        self.left_out[why] = number + 1, first


def plan_inputs(
    sources: Sequence[str], *, unit_bytes: int, suffixes: Sequence[str] = (), encoding: str | None = None
) -> Inputs:
    """Find all files and cut them into units of about ``unit_bytes``, less if that makes few.

    Args:
        suffixes: read only these files of folders, an unknown one as text; by default all known kinds.
        encoding: of text that is not UTF-8 and has no byte order mark.

    Raises:
        InputError: a source does not exist, cannot be loaded, is not what it is read as, or has no file of known kind.
    """
    left_out: dict[str, tuple[int, str]] = {}
    wanted = frozenset(suffix.lower() for suffix in suffixes)
    given: list[tuple[_File, str | None, str]] = []
    status: dict[str, tuple[str, int, int]] = {}
    for source in sources:
        search = _Search(wanted, left_out)
        _find(source, search)
        for file in search.found:
            try:
                nature = judge(file.path, member=file.member, kind=file.kind, encoding=encoding)
            except NotText:
                if file.named or file.kind != "text":
                    raise
                search.leave_out("binary", file.path)
                continue
            given.append((file, nature.compression, nature.encoding))
            if file.path not in status:
                found = os.stat(file.path)
                status[file.path] = file.path, found.st_size, found.st_mtime_ns
    if not given:
        raise InputError(f"--source: there is no text in {', '.join(sources)}; {_say(left_out)}name other sources")
    total = sum(size for _, size, _ in status.values())
    unit_bytes = min(unit_bytes, max(SHARED_BYTES, total // SHARED_UNITS))
    pieces = [
        piece
        for file, compression, name in given
        for piece in _cut(file, compression, name, size=status[file.path][1], piece_bytes=unit_bytes)
    ]
    return Inputs(tuple(_gather(pieces, unit_bytes=unit_bytes)), tuple(status.values()), left_out)


def say_left_out(left_out: dict[str, tuple[int, str]], *, most: int = 8) -> str:
    """What was not read, the most frequent first: ``12 .png (as in a/b.png), 1 binary (x.txt)``."""
    ordered = sorted(left_out.items(), key=lambda entry: -entry[1][0])
    said = [f"{number} {why} ({'as in ' if number > 1 else ''}{first})" for why, (number, first) in ordered[:most]]
    return ", ".join([*said, *(["..."] if len(ordered) > most else [])])


def _say(left_out: dict[str, tuple[int, str]]) -> str:
    return f"left out are {say_left_out(left_out)}; " if left_out else ""


def _find(source: str, search: _Search) -> None:
    """All files of a source."""
    if source.startswith(HUB):
        search.found += [_File("arrow", path, named=True) for path in _hub_files(source)]
        return
    if (problem := place_error("--source", source)) is not None:
        raise InputError(problem)
    path = os.path.expanduser(source)
    with edge(f"--source={source}", remedy="name a file or folder that can be read"):
        exists = os.path.lexists(path)
    if not exists and glob.has_magic(path):
        matches = sorted(glob.glob(path, recursive=True))
        if not matches:
            raise InputError(f"--source={source}: matches no file or folder; name others")
        for match in matches:
            _find_local(match, source, search)
        return
    _find_local(path, source, search)


def _find_local(path: str, source: str, search: _Search) -> None:
    """A file, or all files below a folder in the order of their names."""
    with edge(f"--source={source}", remedy="name a file or folder that can be read"):
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            raise InputError(
                f"--source={source}: is no file or folder; for a dataset of the hub, write {HUB}{source}"
            ) from None
    if stat.S_ISDIR(mode):
        before = len(search.found)
        _walk(path, search)
        if len(search.found) == before:
            raise InputError(
                f"--source={source}: has no file of a kind that is read; {_say(search.left_out)}name other kinds with "
                "--suffix"
            )
    elif stat.S_ISREG(mode):
        _add(path, search, named=True)
    else:
        raise InputError(
            f"--source={source}: is neither file nor folder but a {_special(mode)}; write it to a file first"
        )


def _walk(folder: str, search: _Search) -> None:
    """Files of a folder, then its folders, each by name; linked folders too, but each folder once."""
    with edge(folder, remedy="make it readable, or move it away"):
        status = os.stat(folder)
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    search.seen.add(_identity(status))
    folders = []
    for entry in entries:
        try:
            mode = (status := entry.stat()).st_mode
        except OSError as error:
            # A link to nowhere, or to itself.
            search.leave_out("broken links" if entry.is_symlink() else f"unreadable: {reason(error)}", entry.path)
            continue
        if entry.name.startswith("."):
            search.leave_out("hidden folders" if stat.S_ISDIR(mode) else "hidden", entry.path)
        elif stat.S_ISDIR(mode):
            folders.append((entry.path, _identity(status)))
        elif not stat.S_ISREG(mode):
            search.leave_out("special files", entry.path)
        elif _identity(status) in search.seen:
            search.leave_out("files reached twice", entry.path)
        else:
            search.seen.add(_identity(status))
            _add(entry.path, search, named=False)
    for path, identity in folders:
        if identity in search.seen:
            search.leave_out("folders reached twice", path)
        else:
            _walk(path, search)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _special(mode: int) -> str:
    return "named pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"


def _add(path: str, search: _Search, *, named: bool) -> None:
    """A file by its name; a zip archive by its members' names.

    Args:
        named: by the user: then a name of an unknown kind is read as text.
    """
    inner, suffix = _suffixes(path)
    if suffix in search.suffixes:
        named_kind: str | None = ROW_KINDS.get(inner, "text")
    else:
        named_kind = _kind(inner, search, named=named)
    if suffix == ".zip" and (named or not search.suffixes or named_kind is not None):
        _add_members(path, search)
    elif named_kind is None:
        search.leave_out(suffix or PurePath(path).name, path)
    else:
        search.found.append(_File(named_kind, path, named=named))


def _add_members(path: str, search: _Search) -> None:
    """The members of a zip archive that are of a known kind, in its own order."""
    with edge(path, remedy="copy it again, or leave it out"):
        if compression_of(path) != "zip":
            raise NotText(f"{path}: is named like zip and is none; rename it or copy it again")
        with zipfile.ZipFile(path) as archive:
            members = [item for item in archive.infolist() if not item.is_dir()]
    for item in members:
        place = f"{path}:{item.filename}"
        kind = _kind(PurePath(item.filename).suffix.lower(), search, named=False)
        if item.flag_bits & 1:
            raise NotText(f"{place}: is encrypted; unpack it first")
        if any(part.startswith((".", "__MACOSX")) for part in PurePath(item.filename).parts):
            search.leave_out("hidden", place)
        elif kind is None or kind == "parquet":
            search.leave_out(PurePath(item.filename).suffix.lower() or item.filename, place)
        else:
            search.found.append(_File(kind, path, item.filename, item.file_size))


def _suffixes(path: str) -> tuple[str, str]:
    """(suffix of what is inside, suffix of the file): .jsonl and .gz of a.jsonl.gz, twice the same of a plain file."""
    name = PurePath(path)
    suffix = name.suffix.lower()
    return (PurePath(name.stem).suffix.lower() if suffix in SUFFIXES else suffix), suffix


def _kind(suffix: str, search: _Search, *, named: bool) -> str | None:
    """What a file with this suffix is read as; None if it is not read."""
    known = suffix in search.suffixes if search.suffixes else suffix in TEXT_SUFFIXES or suffix in ROW_KINDS
    return ROW_KINDS.get(suffix, "text") if named or known else None


def _hub_files(source: str) -> list[str]:
    """The files that `datasets` keeps of a dataset of the hub."""
    name, *rest = source.removeprefix(HUB).split(":")
    if not name or len(rest) > 2 or place_error("", source.removeprefix(HUB)) is not None:
        raise InputError(f"--source={source}: must be {HUB}NAME, {HUB}NAME:CONFIG or {HUB}NAME:CONFIG:SPLIT")
    config, split = (rest[0] if rest else None) or None, rest[1] if len(rest) == 2 else "train"
    with edge(f"--source={source}", remedy="see whether name, configuration, split and network are right"):
        import datasets  # slow, and needed for this alone

        loaded = datasets.load_dataset(name, config, split=split)
        return [part["filename"] for part in loaded.cache_files]


def _cut(file: _File, compression: str | None, encoding: str, *, size: int, piece_bytes: int) -> list[Piece]:
    """A file as pieces of at most about ``piece_bytes``, where its kind allows it."""

    def piece(kind: str, start: int, stop: int, size: int) -> Piece:
        return Piece(kind, file.path, start, stop, size, file.member, compression, encoding)

    whole = size if compression is None else file.member_bytes or size * UNPACKED
    if file.kind in ("text", "json"):
        return [piece(file.kind, 0, size, whole)]
    if file.kind == "lines":
        if compression is not None or not splits_lines(encoding):
            return [piece("stream", 0, size, whole)]
        edges = [*range(0, size, piece_bytes), size]
        return [piece("lines", start, stop, stop - start) for start, stop in zip(edges, edges[1:])]
    parts = row_groups(file.path) if file.kind == "parquet" else record_batches(file.path)
    share = max(1, size // max(1, parts))
    together = max(1, piece_bytes // share)
    edges = [*range(0, parts, together), parts]
    return [piece(file.kind, start, stop, share * (stop - start)) for start, stop in zip(edges, edges[1:])]


def _gather(pieces: Sequence[Piece], *, unit_bytes: int) -> Iterator[Unit]:
    """Neighbouring pieces as units of at most ``unit_bytes``, or of one piece."""
    waiting: list[Piece] = []
    size = 0
    for piece in pieces:
        if waiting and size + piece.size > unit_bytes:
            yield Unit(tuple(waiting))
            waiting, size = [], 0
        waiting.append(piece)
        size += piece.size
    if waiting:
        yield Unit(tuple(waiting))
