"""Readers: a piece of an input, to documents. Every error names the file and the line or element."""

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from data.edges import InputError, edge, reason
from data.encoded import REPLACEMENT, check_utf8, clean_text, decode_text, open_plain, splits_lines
from data.shards import Document

ONE_LINE = "JSON is read as one object a line, or a .json file as one list, and never as one object over several lines"


@dataclass(frozen=True)
class Piece:
    """A part of one file.

    kind: "text", "json", "stream" (whole files), "lines" (bytes ``start .. stop - 1``), "parquet" (row groups),
        "arrow" (record batches).
    size: bytes of text, about, for sharing out the work.
    member: of a zip archive.
    compression, encoding: what the file's first bytes say.
    """

    kind: str
    path: str
    start: int
    stop: int
    size: int
    member: str = ""
    compression: str | None = None
    encoding: str = "utf-8"

    @property
    def place(self) -> str:
        """The file's name, for errors."""
        return f"{self.path}:{self.member}" if self.member else self.path


def read_piece(piece: Piece, *, text_field: str) -> Iterator[Document]:
    """The piece's documents in order.

    Raises:
        InputError: naming file and line.
    """
    readers: dict[str, Callable[[Piece, str], Iterator[Document]]] = {
        "text": _read_text,
        "json": _read_json,
        "stream": _read_stream,
        "lines": _read_lines,
        "parquet": _read_parquet,
        "arrow": _read_arrow,
    }
    documents = readers[piece.kind](piece, text_field)
    while True:
        with edge(piece.place, remedy="repair it or copy it again, or leave such files out with --suffix"):
            document = next(documents, None)
        if document is None:
            return
        yield document


def _content(piece: Piece) -> bytes:
    with open_plain(piece.path, compression=piece.compression, member=piece.member) as file:
        return file.read()


def _read_text(piece: Piece, text_field: str) -> Iterator[Document]:
    raw = _content(piece)
    text, replaced = decode_text(raw, piece.encoding)
    if replaced and piece.encoding == "utf-8":
        check_utf8(raw, place=piece.place, whole=True)
    yield Document(text, replaced)


def _read_lines(piece: Piece, text_field: str) -> Iterator[Document]:
    with open(piece.path, "rb") as file:
        if piece.start > 0:
            file.seek(piece.start - 1)
            file.readline()
        while (position := file.tell()) < piece.stop:
            line = file.readline()
            if not line:
                raise InputError(f"{piece.place}: has become shorter while it was read; run the same command again")
            if line.strip():
                yield _line_document(line, piece, text_field, number=partial(_line_number, piece.path, position))


def _read_stream(piece: Piece, text_field: str) -> Iterator[Document]:
    """Lines of a file that cannot be cut."""
    with open_plain(piece.path, compression=piece.compression, member=piece.member) as file:
        lines: Iterator[bytes] = iter(file)
        if not splits_lines(piece.encoding):
            text = io.TextIOWrapper(file, piece.encoding, errors="replace", newline="\n")
            lines = (line.encode() for line in text)
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _line_document(line, piece, text_field, number=partial(int, number))


def _line_document(line: bytes, piece: Piece, text_field: str, *, number: Callable[[], int]) -> Document:
    """
    Args:
        line: not empty; its encoding is UTF-8 or splits lines.
        number: finds the line's number, which takes a while, when something is wrong.
    """
    encoding = piece.encoding if splits_lines(piece.encoding) else "utf-8"
    try:
        text, replaced = decode_text(line.rstrip(b"\r\n"), encoding)
        return _document(json.loads(text), text_field, replaced)
    except Exception as error:
        # json's msg is without its own idea of the line.
        problem = f"{error.msg}; {ONE_LINE}" if isinstance(error, json.JSONDecodeError) else _problem(error)
        raise InputError(
            f"{piece.place}:{number()}: {problem}; repair or remove the line, or leave such files out with --suffix"
        ) from None


def _read_json(piece: Piece, text_field: str) -> Iterator[Document]:
    with open_plain(piece.path, compression=piece.compression, member=piece.member) as file:
        raw = file.read()
    if splits_lines(piece.encoding) and not raw.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
        yield from _read_stream(piece, text_field)
        return
    text, replaced = decode_text(raw, piece.encoding)
    if not text.lstrip().startswith("["):
        yield from _read_stream(piece, text_field)
        return
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{piece.place}:{error.lineno}: {error.msg}; repair the file or leave it out with --suffix"
        ) from None
    for index, row in enumerate(rows):
        # Such a file is one value: an invalid byte is found before the row that it is in.
        here = replaced and REPLACEMENT in str(_field(row, text_field))
        try:
            yield _document(row, text_field, here)
        except ValueError as error:
            raise InputError(f"{piece.place}: element {index}: {error}; repair or remove it") from None


def _problem(error: Exception) -> str:
    return str(error) if isinstance(error, InputError) else f"cannot be read ({reason(error)})"


def _field(row: Any, name: str) -> Any:
    """A row's field; ``data.text`` is the field text of the object in data, unless a field has that name itself."""
    if isinstance(row, dict) and name in row:
        return row[name]
    for part in name.split("."):
        if not isinstance(row, dict):
            return None
        row = row.get(part)
    return row


def _document(row: Any, text_field: str, replaced: bool) -> Document:
    """The document in a JSON value.

    Raises:
        InputError: it is no object, or the field is no string; the caller knows the place.
    """
    if not isinstance(row, dict):
        raise InputError(f"a row must be an object and is {type(row).__name__}")
    value = _field(row, text_field)
    if value is None:
        return Document(None)
    if not isinstance(value, str):
        raise InputError(f"{text_field} must be a string and is {type(value).__name__}")
    text, had_surrogates = clean_text(value)
    return Document(text, replaced or had_surrogates)


def _read_parquet(piece: Piece, text_field: str) -> Iterator[Document]:
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(piece.path)
    path = _column_path(file.schema_arrow, text_field, piece.place)
    groups = list(range(piece.start, piece.stop))
    for batch in file.iter_batches(batch_size=1024, row_groups=groups, columns=[".".join(path)]):
        yield from _column_documents(batch.column(path[0]), path[1:])


def _read_arrow(piece: Piece, text_field: str) -> Iterator[Document]:
    import pyarrow

    with pyarrow.memory_map(piece.path) as mapped, pyarrow.ipc.open_stream(mapped) as stream:
        path = _column_path(stream.schema, text_field, piece.place)
        for index, batch in enumerate(stream):
            if index >= piece.stop:
                return
            if index >= piece.start:
                yield from _column_documents(batch.column(path[0]), path[1:])


def _column_documents(column: Any, inner: list[str]) -> Iterator[Document]:
    """Documents of an Arrow column, taken as bytes: its strings may hold invalid UTF-8.

    Args:
        inner: names of the fields inside the column's structs that lead to the text.
    """
    import pyarrow
    import pyarrow.compute

    for name in inner:
        column = pyarrow.compute.struct_field(column, name)
    while _plain_type(column.type) != column.type:
        if pyarrow.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        elif pyarrow.types.is_run_end_encoded(column.type):
            column = pyarrow.compute.run_end_decode(column)
        else:
            column = column.storage
    for raw in column.cast(pyarrow.large_binary()).to_pylist():
        yield Document(None) if raw is None else Document(*decode_text(raw))


def _plain_type(kind: Any) -> Any:
    """The type of an Arrow column's values without what wraps them: dictionaries, runs and extensions."""
    import pyarrow

    if pyarrow.types.is_dictionary(kind) or pyarrow.types.is_run_end_encoded(kind):
        return _plain_type(kind.value_type)
    return _plain_type(kind.storage_type) if isinstance(kind, pyarrow.BaseExtensionType) else kind


def _column_path(schema: Any, text_field: str, place: str) -> list[str]:
    """Names that lead to the column of text, through structs if ``text_field`` has dots.

    Raises:
        InputError: the file has no such column, or it is not of strings.
    """
    import pyarrow

    types = pyarrow.types
    path = [text_field] if text_field in schema.names else text_field.split(".")
    names, found = schema.names, None
    for index, name in enumerate(path):
        if name not in names:
            there = ", ".join(".".join([*path[:index], name]) for name in names)
            raise InputError(f"{place}: has no column {text_field} but {there}; choose one with --text-field")
        found = _plain_type(schema.field(name).type if found is None else found.field(name).type)
        names = [found.field(at).name for at in range(found.num_fields)] if types.is_struct(found) else []
    strings = (types.is_string, types.is_large_string, types.is_string_view, types.is_null)
    if not any(is_kind(found) for is_kind in strings):
        raise InputError(
            f"{place}: column {text_field} is {found}, and must be text (a string, string_view or large_string); "
            "choose another with --text-field, or convert it"
        )
    return path


def row_groups(path: str) -> int:
    """Row groups of a parquet file."""
    import pyarrow.parquet

    with edge(path, what="is not a parquet file", remedy="copy it again"):
        return int(pyarrow.parquet.ParquetFile(path).num_row_groups)


def record_batches(path: str) -> int:
    """Record batches of an Arrow stream."""
    import pyarrow

    with (
        edge(path, what="is not an Arrow stream", remedy="remove it and load the dataset again"),
        pyarrow.memory_map(path) as mapped,
        pyarrow.ipc.open_stream(mapped) as stream,
    ):
        return sum(1 for _ in stream)


def _line_number(path: str, position: int) -> int:
    """Number, from 1, of the line that begins at a byte; reads the file up to there, for error messages only."""
    line = 1
    with open(path, "rb") as file:
        while position > 0 and (block := file.read(min(position, 2**20))):
            line += block.count(b"\n")
            position -= len(block)
    return line
