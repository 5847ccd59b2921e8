"""Small corpora of known token ids."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.manifest import DTYPES, TOKENIZER, Counts, Manifest, dtype_name, sha256_file
from data.shards import save_shard
from data.store import TokenStore
from data.tokenizer import train_bpe

VOCAB_SIZE = 300


def write_corpus(
    folder: Path, shards: Sequence[Sequence[Sequence[int]]], *, vocab_size: int = VOCAB_SIZE, tokenizer: str = "{}"
) -> TokenStore:
    """A corpus of the given shards of documents of ids."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TOKENIZER).write_text(tokenizer)
    name = dtype_name(vocab_size)
    Manifest(
        tokenizer_sha256=sha256_file(folder / TOKENIZER),
        vocab_size=vocab_size,
        dtype=name,
        eos_id=None,
        shards=tuple(
            save_shard(folder, f"shard-{index:05d}", [np.array(ids, dtype=DTYPES[name]) for ids in documents])
            for index, documents in enumerate(shards)
        ),
        counts=Counts(),
    ).write(folder)
    return TokenStore.open(folder)


def numbered(lengths: Sequence[int], *, first: int = 0) -> list[list[int]]:
    """Documents of these lengths whose tokens are all different: 0, 1, 2, ... through all of them."""
    counter = itertools.count(first)
    return [[next(counter) for _ in range(length)] for length in lengths]


def byte_tokenizer(folder: Path) -> Path:
    """A tokenizer of single bytes: with the three special tokens, 259 ids."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "bytes.json"
    path.write_text(train_bpe([], vocab_size=259))
    return path
