"""What a file's bytes are: compressed or not, text or not, and in which encoding. Content decides, not the name.

    magic bytes         gzip, bzip2, xz, zstd, lz4 and zip are read through; other archives are refused
    byte order mark     UTF-8, UTF-16 and UTF-32 are read
    none of these       UTF-8; bytes that are no text, or are text of another encoding, are refused

The encoding of text without a byte order mark can only be guessed, and a wrong guess is a corpus of garbage. So
the first bytes are judged as UTF-8: a few invalid ones among valid ones are damage and are replaced and counted,
and many without are another encoding, which the user has to name.
"""

import bz2
import codecs
import gzip
import io
import lzma
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import IO, cast

from data.edges import InputError, edge

HEAD = 2**16
"""Bytes that a file is judged by."""
DAMAGE = 4
"""So many invalid sequences among lines are damage, even if no valid one stands beside them."""
SUFFIXES = {
    ".gz": "gzip",
    ".bz2": "bzip2",
    ".xz": "xz",
    ".lzma": "xz",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".lz4": "lz4",
    ".zip": "zip",
}
"""Names of compressed files; what is left of the name says what is inside."""
_MAGIC = (
    (b"\x1f\x8b", "gzip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"\x5d\x00\x00", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\x04\x22\x4d\x18", "lz4"),
    (b"PK\x03\x04", "zip"),
    (b"PK\x05\x06", "zip"),
)
_REFUSED = (
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"Rar!\x1a\x07", "a rar archive"),
    (b"\x1f\x9d", "a .Z file"),
    (b"%PDF-", "a PDF"),
    (b"\x89PNG", "a PNG picture"),
    (b"\xff\xd8\xff", "a JPEG picture"),
    (b"\x7fELF", "a program"),
    (b"PAR1", "a parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"Obj\x01", "an Avro file"),
    (b"SQLite format 3", "a database"),
)
_MARKS = (
    # UTF-32 first: its little-endian mark begins with UTF-16's.
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_MULTIBYTE = re.compile(rb"[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3}")
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")
REPLACEMENT = "\ufffd"
_SURROGATES = dict.fromkeys(range(0xD800, 0xE000), REPLACEMENT)
NAME_ENCODING = "name its encoding with --encoding, such as latin-1, or convert it with iconv"


class NotText(InputError):
    """The bytes are no text at all: in a folder such a file is left out, by name it is refused."""


@dataclass(frozen=True)
class Nature:
    """compression: key of what `open_plain` reads through; None is none. encoding: of the text inside."""

    compression: str | None
    encoding: str


def judge(path: str, *, member: str = "", kind: str, encoding: str | None = None) -> Nature:
    """Look at a file's first bytes.

    Args:
        member: of a zip archive.
        kind: what it is read as; "parquet" and "arrow" are formats of their own and may not be compressed around.
        encoding: given by the user, who knows better.

    Raises:
        NotText: it is not what it is read as.
        InputError: it cannot be read, or its encoding is not known.
    """
    remedy = "repair it or copy it again, or leave it out"
    place = f"{path}:{member}" if member else path
    with edge(place, remedy=remedy):
        compression = "zip" if member else compression_of(path)
        with open_plain(path, compression=compression, member=member) as file:
            head = file.read(HEAD)
        inner = _compression(head) or (kind if kind in ("parquet", "arrow") else None)
        if compression is not None and inner is not None:
            raise NotText(f"{place}: is {inner} inside {compression}; unpack it first")
        if inner is not None:
            return Nature(None, "utf-8")
        return Nature(compression, _encoding(head, place=place, kind=kind, encoding=encoding))


def compression_of(path: str) -> str | None:
    """By the first bytes; the name must not promise another one.

    Raises:
        NotText: a compressed file's name on something else.
    """
    with open(path, "rb") as file:
        found = _compression(file.read(16))
    promised = SUFFIXES.get(PurePath(path).suffix.lower())
    if found == "zip" and promised != "zip":
        raise NotText(f"{path}: is a zip archive by another name; unpack it, or name it .zip")
    if promised is not None and found != promised:
        raise NotText(
            f"{path}: is named like {promised} and is {found or 'not compressed'}; rename it or copy it again"
        )
    return found


def _compression(head: bytes) -> str | None:
    if head[1:4] == b"\x2a\x4d\x18" and head[0] & 0xF0 == 0x50:
        return "zstd"  # begins with a frame that is to be skipped
    for magic, name in _MAGIC:
        if head.startswith(magic):
            # Text may begin with these letters; bzip2 goes on with a digit and the digits of pi.
            return None if name == "bzip2" and head[4:10] != b"1AY&SY" else name
    return None


@contextmanager
def open_plain(path: str, *, compression: str | None, member: str = "") -> Iterator[IO[bytes]]:
    """The file's bytes, unpacked as they are read."""
    if compression == "zip":
        with zipfile.ZipFile(path) as archive, archive.open(member) as inside:
            yield inside
        return
    with open(path, "rb") as file:
        if compression is None:
            yield file
        elif compression == "gzip":
            yield cast(IO[bytes], gzip.GzipFile(fileobj=file))
        elif compression == "bzip2":
            yield bz2.BZ2File(file)
        elif compression == "xz":
            with lzma.open(file) as unpacked:
                yield unpacked
        else:
            import pyarrow  # slow to import, and needed for these alone

            with pyarrow.CompressedInputStream(file, compression) as stream:
                yield io.BufferedReader(stream)


def _encoding(head: bytes, *, place: str, kind: str, encoding: str | None) -> str:
    """
    Raises:
        NotText: the head is of no text.
        InputError: it is text of an encoding that is not known.
    """
    for mark, name in _MARKS:
        if head.startswith(mark):
            return name
    if encoding is not None and (splits_lines(encoding) or b"\0" in head):
        return encoding
    if head[257:262] == b"ustar":
        raise NotText(f"{place}: is a tar archive; unpack it and name the folder")
    for magic, name in _REFUSED:
        if head.startswith(magic):
            raise NotText(f"{place}: is {name} and must be text; convert it, or leave it out")
    for offset, name in ((0, "utf-16-be"), (1, "utf-16-le")):
        # Most text has letters of the first 256 code points in plenty, and their other byte is zero.
        if head[offset::2].count(0) * 5 > len(head) and not head[1 - offset :: 2].count(0):
            raise InputError(f"{place}: is UTF-16 without a byte order mark; name it with --encoding {name}")
    if b"\0" in head or len(_CONTROL.findall(head)) > len(head) // 32:
        raise NotText(f"{place}: is binary and must be text; convert it, or leave it out")
    if encoding is None:
        check_utf8(head, place=place, whole=kind == "text")
    return "utf-8"


def splits_lines(encoding: str) -> bool:
    """Whether bytes of this encoding can be cut at the byte of a line feed."""
    return "\n".encode(encoding) == b"\n"


def check_utf8(raw: bytes, *, place: str, whole: bool) -> None:
    """Bytes that are invalid as UTF-8 and outnumber its valid sequences are no damage.

    Args:
        whole: ``raw`` is one document; among many a few damaged ones are no sign.

    Raises:
        InputError: it is text of another encoding.
    """
    if raw.isascii():
        return
    rest = _MULTIBYTE.sub(b"", raw)
    # The last three may be a sequence that was cut.
    invalid = [byte for byte in (rest if len(raw) != HEAD else rest[:-3]) if byte >= 0x80]
    valid = len(_MULTIBYTE.findall(raw))
    if len(invalid) > (0 if whole else DAMAGE) and len(invalid) > valid:
        raise InputError(f"{place}: is text but not UTF-8 (byte 0x{invalid[0]:02x}); {NAME_ENCODING}")


def decode_text(raw: bytes, encoding: str = "utf-8") -> tuple[str, bool]:
    """(text, whether something invalid was replaced); a byte order mark is dropped.

    Args:
        encoding: of what is not UTF-8.
    """
    raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        return raw.decode("utf-8" if splits_lines(encoding) else encoding), False
    except UnicodeDecodeError:
        text = raw.decode(encoding, errors="replace")
        return text, REPLACEMENT in text


def clean_text(text: str) -> tuple[str, bool]:
    """(text, whether lone surrogates were replaced): JSON can spell half a character, UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.translate(_SURROGATES), True
    return text, False
