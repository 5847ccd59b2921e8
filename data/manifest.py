"""The manifest: everything that there is to know about a tokenised corpus without touching its tokens.

    corpus/
      manifest.json           written last: a folder without it is unfinished
      tokenizer.json          what made the ids, and what decodes them
      shard-00000.tokens      ids of all its documents, end to end, uint16 or uint32, little-endian
      shard-00000.index       where each document begins, and the end: int64 [documents + 1], little-endian
      shard-00000.hashes      a hash of each document's ids, to find copies: uint64 [documents], little-endian

One file describes all shards, so that opening thousands of them costs one read. Its content hash covers
everything that decides which tokens are read, and nothing else: the same texts tokenised elsewhere, or after
an interruption, have the same hash, and so the same order of samples. What follows from the tokens is not in it:
corpora from before it was kept are the same corpora.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data.edges import InputError, edge
from data.files import write_atomically

FORMAT = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
DTYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
INDEX_DTYPE = np.dtype("<i8")
HASH_DTYPE = np.dtype("<u8")
REMEDY = "tokenise again"


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
    """One shard. ``bytes`` is the size of its token file, ``max_id`` the largest id in it, ``hashes_sha256`` empty if
    the documents' hashes were not kept."""

    name: str
    tokens: int
    documents: int
    bytes: int
    max_id: int
    tokens_sha256: str
    index_sha256: str
    hashes_sha256: str = ""

    @property
    def tokens_file(self) -> str:
        return f"{self.name}.tokens"

    @property
    def index_file(self) -> str:
        return f"{self.name}.index"

    @property
    def hashes_file(self) -> str:
        return f"{self.name}.hashes"

    @property
    def index_bytes(self) -> int:
        return (self.documents + 1) * INDEX_DTYPE.itemsize

    @property
    def hashes_bytes(self) -> int:
        return self.documents * HASH_DTYPE.itemsize


@dataclass(frozen=True)
class Manifest:
    """A whole corpus.

    dtype: key of `DTYPES`.
    vocab_size: largest id of the tokenizer, added tokens included, plus one.
    eos_id: the token that ends every document; None if none was appended.
    made_from: inputs and options, for people and for a repeated command; not part of the content hash.
    copies: documents that are equal to an earlier one; None if the documents' hashes were not kept.
    """

    tokenizer_sha256: str
    vocab_size: int
    dtype: str
    eos_id: int | None
    shards: tuple[Shard, ...]
    counts: Counts
    format: int = FORMAT
    made_from: dict[str, Any] = field(default_factory=dict)
    copies: int | None = None

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
        """Hash over everything but ``made_from`` and what follows from the rest, 32 hex digits."""
        content = asdict(self) | {"tokens": self.tokens, "documents": self.documents}
        del content["made_from"], content["copies"]
        for shard in content["shards"]:
            del shard["hashes_sha256"]
        return hashlib.blake2b(canonical(content), digest_size=16).hexdigest()

    def write(self, folder: Path) -> None:
        """Publish in ``folder``, whole or not at all."""
        totals = {"tokens": self.tokens, "documents": self.documents, "content_hash": self.content_hash}
        write_atomically(folder / MANIFEST, json.dumps(asdict(self) | totals, indent=1).encode())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished corpus.

    Raises:
        InputError: there is none, or it is of another format, or altered.
    """
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise InputError(
            f"{folder}: has no {MANIFEST}, so it is not a finished tokenised corpus; make it with "
            "python -m data.tokenize, or run the same command again to finish it"
        ) from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); make it readable for this user") from None
    with edge(path, what=f"must be JSON and a manifest of format {FORMAT}", remedy=REMEDY):
        manifest = _parse(json.loads(content), path)
        known = manifest.dtype in DTYPES
        largest = int(manifest.vocab_size) - 1
    if not known:
        raise InputError(f"{path}: dtype={manifest.dtype}: must be one of {', '.join(DTYPES)}; {REMEDY}")
    if largest > np.iinfo(DTYPES[manifest.dtype]).max:
        raise InputError(
            f"{path}: vocab_size={manifest.vocab_size}: its ids do not fit dtype={manifest.dtype}, so the tokens are "
            f"not its tokenizer's; {REMEDY}"
        )
    return manifest


def _parse(raw: Any, path: Path) -> Manifest:
    """A manifest from its JSON.

    Raises:
        InputError: it is of another format or altered; anything, if it is no manifest at all.
    """
    found = raw.get("format") if isinstance(raw, dict) else None
    if found != FORMAT:
        raise InputError(f"{path}: format={found}: must be {FORMAT}; {REMEDY}")
    expected = raw.pop("content_hash", None)
    totals = raw.pop("tokens", None), raw.pop("documents", None)
    shards = tuple(Shard(**shard) for shard in raw.pop("shards"))
    manifest = Manifest(shards=shards, counts=Counts(**raw.pop("counts")), **raw)
    if not _well_typed(manifest):
        raise InputError(f"{path}: has numbers where text belongs, or text where numbers belong; {REMEDY}")
    if (manifest.content_hash, (manifest.tokens, manifest.documents)) != (expected, totals):
        raise InputError(f"{path}: content_hash={expected}: does not match the content; {REMEDY}")
    return manifest


def _well_typed(manifest: Manifest) -> bool:
    """Whether the values are of their types: JSON may hold any at any place."""
    counts, shards = manifest.counts, manifest.shards
    sizes = [size for shard in shards for size in (shard.tokens, shard.documents, shard.bytes, shard.max_id)]
    texts = [
        text for shard in shards for text in (shard.name, shard.tokens_sha256, shard.index_sha256, shard.hashes_sha256)
    ]
    optional = [number for number in (manifest.eos_id, manifest.copies) if number is not None]
    numbers = [manifest.vocab_size, counts.empty, counts.replaced, counts.missing, *sizes, *optional]
    return all(type(number) is int and number >= 0 for number in numbers) and all(
        isinstance(text, str) for text in (manifest.tokenizer_sha256, manifest.dtype, *texts)
    )


def canonical(value: Any) -> bytes:
    """JSON bytes that depend on the value alone."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
