"""Writing shards: documents in, two files and their record out, whole or not at all."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from data.manifest import DTYPES, INDEX_DTYPE, Counts, Shard, dtype_name
from data.tokenizer import eos_id_of, load_tokenizer, vocab_size_of

BATCH_CHARACTERS = 2**20
"""Text that is encoded at once."""
REPLACEMENT = "\ufffd"
_SURROGATES = dict.fromkeys(range(0xD800, 0xE000), REPLACEMENT)


@dataclass(frozen=True)
class Document:
    """One document as its source gave it.

    text: None if the source had none (a null, or no such field).
    replaced: some of it was not valid text and has been replaced.
    """

    text: str | None
    replaced: bool = False


def decode_text(raw: bytes) -> tuple[str, bool]:
    """(text, whether invalid UTF-8 was replaced); a byte order mark is dropped."""
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        return raw.decode("utf-8"), False
    except UnicodeDecodeError:
        return raw.decode("utf-8", errors="replace"), True


def clean_text(text: str) -> tuple[str, bool]:
    """(text, whether lone surrogates were replaced): JSON can spell half a character, UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.translate(_SURROGATES), True
    return text, False


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
        tokenizer = load_tokenizer(path)
        vocab_size = vocab_size_of(tokenizer)
        eos_id = eos_id_of(tokenizer, eos_token) if append_eos else None
        return cls(tokenizer, vocab_size, dtype_name(vocab_size), eos_id)

    def encode(self, texts: list[str]) -> Iterator[NDArray[np.unsignedinteger]]:
        """Ids of each text, its end-of-text token included; empty where the text has no tokens."""
        ending = [] if self.eos_id is None else [self.eos_id]
        for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False):
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
    shard = Shard(
        name=name,
        tokens=len(tokens),
        documents=len(pieces),
        bytes=tokens.nbytes,
        max_id=int(tokens.max()),
        tokens_sha256=hashlib.sha256(tokens.data).hexdigest(),
        index_sha256=hashlib.sha256(offsets.data).hexdigest(),
    )
    _publish(folder / shard.tokens_file, tokens)
    _publish(folder / shard.index_file, offsets)
    return shard


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


def _publish(path: Path, array: NDArray) -> None:
    """Write a file that is there whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with partial.open("wb") as file:
        file.write(array.data)  # not tofile, whose error does not say why
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
