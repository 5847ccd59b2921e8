"""Sources: what ``--source`` names, cut into units of work that are the same whenever the inputs are.

    SRC                        one document is
    file or folder of text     a file
    .jsonl                     a line          (its text field)
    .json                      an element of the array, or a line
    .parquet                   a row
    hub:NAME[:CONFIG][:SPLIT]  a row           (Hugging Face hub, through the `datasets` library)

Nothing is read in order to plan: a unit is a list of whole files, stretches of bytes of line-based files and row
groups of columnar ones, of about the same size. A line belongs to the stretch that it begins in.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.shards import REPLACEMENT, Document, clean_text, decode_text

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
BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Piece:
    """A part of one file.

    kind: "text", "json" (whole files), "lines" (bytes ``start .. stop - 1``), "parquet" (row groups), "arrow"
        (record batches).
    size: bytes, for sharing out the work.
    """

    kind: str
    path: str
    start: int
    stop: int
    size: int


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
    ignored: suffix to number of files in folders that are no text that is known.
    """

    units: tuple[Unit, ...]
    files: tuple[tuple[str, int, int], ...]
    ignored: dict[str, int]


def plan_inputs(sources: Sequence[str], *, unit_bytes: int, suffixes: Sequence[str] = ()) -> Inputs:
    """Find all files and cut them into units of about ``unit_bytes``, less if that makes few.

    Args:
        suffixes: read only these files of folders, an unknown one as text; by default all known kinds.

    Raises:
        ValueError: a source does not exist, cannot be loaded or has no file of a known kind.
    """
    kinds: list[str] = []
    files: list[tuple[str, int, int]] = []
    ignored: dict[str, int] = {}
    for source in sources:
        found = _hub_files(source) if source.startswith(HUB) else _local_files(source, suffixes, ignored)
        for kind, path in found:
            status = os.stat(path)
            kinds.append(kind)
            files.append((path, status.st_size, status.st_mtime_ns))
    total = sum(size for _, size, _ in files)
    unit_bytes = min(unit_bytes, max(SHARED_BYTES, total // SHARED_UNITS))
    pieces = [
        piece
        for kind, (path, size, _) in zip(kinds, files)
        for piece in _cut(kind, path, size=size, piece_bytes=unit_bytes)
    ]
    return Inputs(tuple(_gather(pieces, unit_bytes=unit_bytes)), tuple(files), ignored)


def read_unit(unit: Unit, *, text_field: str) -> Iterator[Document]:
    """The unit's documents in order.

    Raises:
        ValueError: a malformed line or row, named by file and line.
    """
    readers = {"lines": _read_lines, "json": _read_json, "parquet": _read_parquet, "arrow": _read_arrow}
    for piece in unit.pieces:
        if piece.kind == "text":
            yield Document(*decode_text(Path(piece.path).read_bytes()))
        else:
            yield from readers[piece.kind](piece, text_field)


def _local_files(source: str, suffixes: Sequence[str], ignored: dict[str, int]) -> list[tuple[str, str]]:
    """(kind, path) of a file, or of all files below a folder in the order of their names; counts the ignored."""
    root = Path(source)
    if root.is_file():
        return [(ROW_KINDS.get(root.suffix.lower(), "text"), source)]
    if not root.is_dir():
        raise ValueError(f"--source={source}: is no file or folder; for a dataset of the hub, write {HUB}{source}")
    wanted = frozenset(suffixes) or TEXT_SUFFIXES | ROW_KINDS.keys()
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            suffix = Path(name).suffix.lower()
            if name.startswith("."):
                continue
            if suffix in wanted:
                found.append((ROW_KINDS.get(suffix, "text"), os.path.join(folder, name)))
            else:
                ignored[suffix or name] = ignored.get(suffix or name, 0) + 1
    if not found:
        raise ValueError(f"--source={source}: has no file of a kind that is read; name other kinds with --suffix")
    return found


def _hub_files(source: str) -> list[tuple[str, str]]:
    """("arrow", path) of the files that `datasets` keeps of a dataset of the hub."""
    name, *rest = source.removeprefix(HUB).split(":")
    if not name or len(rest) > 2:
        raise ValueError(f"--source={source}: must be {HUB}NAME, {HUB}NAME:CONFIG or {HUB}NAME:CONFIG:SPLIT")
    config, split = (rest[0] if rest else None) or None, rest[1] if len(rest) == 2 else "train"
    import datasets  # slow, and needed for this alone

    try:
        loaded = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"--source={source}: cannot be loaded ({_first_line(error)})") from error
    return [("arrow", part["filename"]) for part in loaded.cache_files]


def _cut(kind: str, path: str, *, size: int, piece_bytes: int) -> list[Piece]:
    """A file as pieces of at most about ``piece_bytes``, where its kind allows it."""
    if kind in ("text", "json"):
        return [Piece(kind, path, 0, size, size)]
    if kind == "lines":
        edges = [*range(0, size, piece_bytes), size]
        return [Piece(kind, path, start, stop, stop - start) for start, stop in zip(edges, edges[1:])]
    parts = _row_groups(path) if kind == "parquet" else _record_batches(path)
    share = max(1, size // max(1, parts))
    together = max(1, piece_bytes // share)
    edges = [*range(0, parts, together), parts]
    return [Piece(kind, path, start, stop, share * (stop - start)) for start, stop in zip(edges, edges[1:])]


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


def _read_lines(piece: Piece, text_field: str) -> Iterator[Document]:
    with open(piece.path, "rb") as file:
        if piece.start > 0:
            file.seek(piece.start - 1)
            file.readline()
        while (position := file.tell()) < piece.stop:
            line = file.readline()
            if not line.strip():
                continue
            text, replaced = decode_text(line.rstrip(b"\r\n"))
            try:
                yield _document(json.loads(text), text_field, replaced)
            except ValueError as error:
                problem = str(error)
                if isinstance(error, json.JSONDecodeError):
                    # msg is without json's own idea of the line.
                    problem = (
                        f"{error.msg}; JSON is read as one object a line, or a .json file as one list, and never as "
                        "one object over several lines"
                    )
                raise ValueError(
                    f"{piece.path}:{_line_number(piece.path, position)}: {problem}; repair or remove the line, "
                    "or leave such files out with --suffix"
                ) from None


def _read_json(piece: Piece, text_field: str) -> Iterator[Document]:
    raw = Path(piece.path).read_bytes().removeprefix(BOM)
    if not raw.lstrip().startswith(b"["):
        yield from _read_lines(piece, text_field)
        return
    text, replaced = decode_text(raw)
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{piece.path}:{error.lineno}: {error.msg}; repair the file or leave it out with --suffix"
        ) from None
    for index, row in enumerate(rows):
        # Such a file is one value: an invalid byte is found before the row that it is in.
        here = replaced and isinstance(row, dict) and REPLACEMENT in str(row.get(text_field))
        try:
            yield _document(row, text_field, here)
        except ValueError as error:
            raise ValueError(f"{piece.path}: element {index}: {error}; repair or remove it") from None


def _document(row: Any, text_field: str, replaced: bool) -> Document:
    """The document in a JSON value.

    Raises:
        ValueError: it is no object, or the field is no string; the caller knows the place.
    """
    if (problem := _row_problem(row, text_field)) is not None:
        raise ValueError(problem)
    if row.get(text_field) is None:
        return Document(None)
    text, had_surrogates = clean_text(row[text_field])
    return Document(text, replaced or had_surrogates)


def _row_problem(row: Any, text_field: str) -> str | None:
    if not isinstance(row, dict):
        return f"a row must be an object and is {type(row).__name__}"
    if not isinstance(row.get(text_field), str | None):
        return f"{text_field} must be a string and is {type(row[text_field]).__name__}"
    return None


def _read_parquet(piece: Piece, text_field: str) -> Iterator[Document]:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(piece.path)
    _check_column(file.schema_arrow, text_field, piece.path)
    groups = list(range(piece.start, piece.stop))
    for batch in file.iter_batches(batch_size=1024, row_groups=groups, columns=[text_field]):
        yield from _column_documents(batch.column(0))


def _read_arrow(piece: Piece, text_field: str) -> Iterator[Document]:
    import pyarrow

    with pyarrow.memory_map(piece.path) as mapped, pyarrow.ipc.open_stream(mapped) as stream:
        _check_column(stream.schema, text_field, piece.path)
        for index, batch in enumerate(stream):
            if index >= piece.stop:
                return
            if index >= piece.start:
                yield from _column_documents(batch.column(text_field))


def _column_documents(column: Any) -> Iterator[Document]:
    """Documents of an Arrow column, taken as bytes: its strings may hold invalid UTF-8."""
    import pyarrow

    if pyarrow.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    for raw in column.cast(pyarrow.large_binary()).to_pylist():
        yield Document(None) if raw is None else Document(*decode_text(raw))


def _check_column(schema: Any, text_field: str, path: str) -> None:
    """
    Raises:
        ValueError: the file has no such column, or it is not of strings.
    """
    import pyarrow

    if text_field not in schema.names:
        raise ValueError(
            f"{path}: has no column {text_field} but {', '.join(schema.names)}; choose one with --text-field"
        )
    found = schema.field(text_field).type
    plain = found.value_type if pyarrow.types.is_dictionary(found) else found
    if not (pyarrow.types.is_string(plain) or pyarrow.types.is_large_string(plain)):
        raise ValueError(f"{path}: column {text_field} is {found}, and must be strings; choose another --text-field")


def _row_groups(path: str) -> int:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path).num_row_groups
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: is not a parquet file ({_first_line(error)}); copy it again") from None


def _record_batches(path: str) -> int:
    import pyarrow

    with pyarrow.memory_map(path) as mapped, pyarrow.ipc.open_stream(mapped) as stream:
        return sum(1 for _ in stream)


def _line_number(path: str, position: int) -> int:
    """Number, from 1, of the line that begins at a byte; reads the file up to there, for error messages only."""
    line = 1
    with open(path, "rb") as file:
        while position > 0 and (block := file.read(min(position, 2**20))):
            line += block.count(b"\n")
            position -= len(block)
    return line


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
