"""Writing shards: documents in, three files and their record out, whole or not at all."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from data.edges import edge
from data.files import write_atomically
from data.manifest import DTYPES, HASH_DTYPE, INDEX_DTYPE, Counts, Shard, dtype_name
from data.tokenizer import eos_id_of, load_tokenizer, vocab_size_of

BATCH_CHARACTERS = 2**20
"""Text that is encoded at once."""


@dataclass(frozen=True)
class Document:
    """One document as its source gave it.

    text: None if the source had none (a null, or no such field).
    replaced: some of it was not valid text and has been replaced.
    """

    text: str | None
    replaced: bool = False


@dataclass(frozen=True)
class Encoder:
    """How text becomes ids.

    eos_id: appended to every document; None appends nothing.
    """

    tokenizer: Tokenizer
    vocab_size: int
    dtype: str
    eos_id: int | None

    @classmethod
    def load(cls, path: Path, *, append_eos: bool, eos_token: str | None = None) -> "Encoder":
        """From a ``tokenizer.json``.

        Raises:
            ValueError: it cannot be read, or has no end-of-text token to append, or too many ids.
        """
        return cls._of(load_tokenizer(path), append_eos=append_eos, eos_token=eos_token)

    @classmethod
    def parse(cls, text: str, *, append_eos: bool, eos_token: str | None = None) -> "Encoder":
        """From the text of a ``tokenizer.json``; raises as `load` does."""
        return cls._of(Tokenizer.from_str(text), append_eos=append_eos, eos_token=eos_token)

    @classmethod
    def _of(cls, tokenizer: Tokenizer, *, append_eos: bool, eos_token: str | None) -> "Encoder":
        vocab_size = vocab_size_of(tokenizer)
        eos_id = eos_id_of(tokenizer, eos_token) if append_eos else None
        return cls(tokenizer, vocab_size, dtype_name(vocab_size), eos_id)

    def encode(self, texts: list[str]) -> Iterator[NDArray[np.unsignedinteger]]:
        """Ids of each text, its end-of-text token included; empty where the text has no tokens."""
        ending = [] if self.eos_id is None else [self.eos_id]
        # A vocabulary of words, without a token for those it lacks, raises at the first of them.
        with edge("--tokenizer", what="cannot encode a document", remedy="name one that has tokens for any text"):
            encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        for encoding in encodings:
            ids = encoding.ids
            yield np.array(ids + ending if ids else ids, dtype=DTYPES[self.dtype])


def write_shard(
    folder: Path, name: str, documents: Iterable[Document], *, encoder: Encoder
) -> tuple[Shard | None, Counts]:
    """Tokenise documents into one shard.

    A document that is empty or only white space, or that has no tokens, is skipped and counted.

    Returns:
        the shard's record, None if no document is left (then there is no file either), and what was counted.
    """
    pieces: list[NDArray[np.unsignedinteger]] = []
    empty = replaced = missing = 0
    for batch in _batches(documents):
        missing += sum(document.text is None for document in batch)
        given = [document for document in batch if document.text is not None]
        kept = [document for document in given if document.text and not document.text.isspace()]
        empty += len(given) - len(kept)
        for document, ids in zip(kept, encoder.encode([document.text or "" for document in kept])):
            if len(ids):
                pieces.append(ids)
                replaced += document.replaced
            else:
                empty += 1
    counts = Counts(empty=empty, replaced=replaced, missing=missing)
    return (save_shard(folder, name, pieces) if pieces else None), counts


def save_shard(folder: Path, name: str, pieces: Sequence[NDArray[np.unsignedinteger]]) -> Shard:
    """Publish documents of token ids as one shard.

    Args:
        pieces: at least one document; none is empty, and all have the corpus' id type.
    """
    assert pieces, name
    assert all(len(piece) for piece in pieces), name
    tokens = np.concatenate(pieces)
    offsets = np.cumsum([0, *(len(piece) for piece in pieces)], dtype=INDEX_DTYPE)
    hashes = document_hashes(tokens, offsets)
    shard = Shard(
        name=name,
        tokens=len(tokens),
        documents=len(pieces),
        bytes=tokens.nbytes,
        max_id=int(tokens.max()),
        tokens_sha256=hashlib.sha256(tokens.data).hexdigest(),
        index_sha256=hashlib.sha256(offsets.data).hexdigest(),
        hashes_sha256=hashlib.sha256(hashes.data).hexdigest(),
    )
    write_atomically(folder / shard.tokens_file, tokens.data)
    write_atomically(folder / shard.index_file, offsets.data)
    write_atomically(folder / shard.hashes_file, hashes.data)
    return shard


def document_hashes(tokens: NDArray[np.unsignedinteger], offsets: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A hash of each document's ids, uint64 [documents]: equal for copies, else different but for one chance in 2^64.

    Args:
        tokens: of a shard.
        offsets: where each document begins, and the end.
    """
    raw, width = tokens.data.cast("B"), tokens.itemsize
    edges = (offsets * width).tolist()
    digests = (hashlib.blake2b(raw[start:stop], digest_size=8).digest() for start, stop in zip(edges, edges[1:]))
    return np.frombuffer(b"".join(digests), dtype=HASH_DTYPE)


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents in lists of about `BATCH_CHARACTERS`."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document.text or "")
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
