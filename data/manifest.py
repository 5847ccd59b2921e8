"""The manifest: everything that there is to know about a tokenised corpus without touching its tokens.

    corpus/
      manifest.json           written last: a folder without it is unfinished
      tokenizer.json          what made the ids, and what decodes them
      shard-00000.tokens      ids of all its documents, end to end, uint16 or uint32, little-endian
      shard-00000.index       where each document begins, and the end: int64 [documents + 1], little-endian

One file describes all shards, so that opening thousands of them costs one read. Its content hash covers
everything that decides which tokens are read, and nothing else: the same texts tokenised elsewhere, or after
an interruption, have the same hash, and so the same order of samples.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
INDEX_DTYPE = np.dtype("<i8")


def dtype_name(vocab_size: int) -> str:
    """The narrowest id type: uint16 exactly if the largest id, ``vocab_size - 1``, is at most 65,535.

    Raises:
        ValueError: not even uint32 holds the vocabulary.
    """
    if vocab_size > 2**32:
        raise ValueError(f"vocab_size={vocab_size}: ids must fit uint32, at most {2**32}; use another tokenizer")
    return "uint16" if vocab_size - 1 <= np.iinfo(np.uint16).max else "uint32"


@dataclass(frozen=True)
class Counts:
    """Documents treated by a rule: skipped as empty, kept with invalid text replaced, skipped without the field."""

    empty: int = 0
    replaced: int = 0
    missing: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(self.empty + other.empty, self.replaced + other.replaced, self.missing + other.missing)


@dataclass(frozen=True)
class Shard:
    """One shard. ``bytes`` is the size of its token file, ``max_id`` the largest id in it."""

    name: str
    tokens: int
    documents: int
    bytes: int
    max_id: int
    tokens_sha256: str
    index_sha256: str

    @property
    def tokens_file(self) -> str:
        return f"{self.name}.tokens"

    @property
    def index_file(self) -> str:
        return f"{self.name}.index"

    @property
    def index_bytes(self) -> int:
        return (self.documents + 1) * INDEX_DTYPE.itemsize


@dataclass(frozen=True)
class Manifest:
    """A whole corpus.

    dtype: key of `DTYPES`.
    vocab_size: largest id of the tokenizer, added tokens included, plus one.
    eos_id: the token that ends every document; None if none was appended.
    made_from: inputs and options, for people and for a repeated command; not part of the content hash.
    """

    tokenizer_sha256: str
    vocab_size: int
    dtype: str
    eos_id: int | None
    shards: tuple[Shard, ...]
    counts: Counts
    format: int = FORMAT
    made_from: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def tokens(self) -> int:
        """Tokens of all shards."""
        return sum(shard.tokens for shard in self.shards)

    @cached_property
    def documents(self) -> int:
        """Documents of all shards."""
        return sum(shard.documents for shard in self.shards)

    @cached_property
    def content_hash(self) -> str:
        """Hash over everything but ``made_from``, 32 hex digits."""
        content = asdict(self) | {"tokens": self.tokens, "documents": self.documents}
        del content["made_from"]
        return hashlib.blake2b(canonical(content), digest_size=16).hexdigest()

    def write(self, folder: Path) -> None:
        """Publish in ``folder``, whole or not at all."""
        totals = {"tokens": self.tokens, "documents": self.documents, "content_hash": self.content_hash}
        write_atomically(folder / MANIFEST, json.dumps(asdict(self) | totals, indent=1).encode())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished corpus.

    Raises:
        ValueError: there is none, or it is of another format, or altered.
    """
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(
            f"{folder}: has no {MANIFEST}, so it is not a finished tokenised corpus; make it with "
            "python -m data.tokenize, or run the same command again to finish it"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path}: must be JSON ({error}); tokenise again") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        found = raw.get("format") if isinstance(raw, dict) else None
        raise ValueError(f"{path}: format={found}: must be {FORMAT}; tokenise again")
    expected = raw.pop("content_hash", None)
    totals = raw.pop("tokens", None), raw.pop("documents", None)
    try:
        shards = tuple(Shard(**shard) for shard in raw.pop("shards"))
        manifest = Manifest(shards=shards, counts=Counts(**raw.pop("counts")), **raw)
        intact = (manifest.content_hash, (manifest.tokens, manifest.documents)) == (expected, totals)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: is not a manifest of format {FORMAT} ({error}); tokenise again") from None
    if not intact:
        raise ValueError(f"{path}: content_hash={expected}: does not match the content; tokenise again")
    if manifest.dtype not in DTYPES:
        raise ValueError(f"{path}: dtype={manifest.dtype}: must be one of {', '.join(DTYPES)}; tokenise again")
    if manifest.vocab_size - 1 > np.iinfo(DTYPES[manifest.dtype]).max:
        raise ValueError(
            f"{path}: vocab_size={manifest.vocab_size}: its ids do not fit dtype={manifest.dtype}, so the tokens are "
            "not its tokenizer's; tokenise again"
        )
    return manifest


def canonical(value: Any) -> bytes:
    """JSON bytes that depend on the value alone."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all, even if the machine stops."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
