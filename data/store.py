"""A tokenised corpus on disk, read through memory maps.

Opening reads the manifest and compares the files with it, a small corpus to the byte; a shard is mapped when its
first token is wanted, and let go when many others have been since: a map holds a file descriptor, and a corpus has
more shards than a process may have files. Documents are numbered through all shards in the manifest's order, and their
boundaries come from the index alone: an end-of-text id inside a document means nothing here.
"""

import resource
from collections import OrderedDict
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data.edges import InputError, edge
from data.manifest import DTYPES, HASH_DTYPE, INDEX_DTYPE, TOKENIZER, Manifest, Shard, read_manifest, sha256_file
from data.shards import document_hashes

VERIFY = ("auto", "size", "hash")
HASH_BYTES = 2**30
"""Largest corpus whose bytes "auto" hashes: about a second of one core with SHA instructions, and its reading."""
SCAN_SHARDS = 16
SCAN_TOKENS = 4096
"""What the scan for foreign ids reads when a store is opened: so many tokens, evenly spread, of so many shards."""
COUNT_SHARDS = 256
"""Most shards whose tokens are counted for the unigram entropy."""
MOST_MAPS = 256
"""Shards that all stores of a process keep mapped together, if its limit on open files is far above."""
REMEDY = "copy it again, or remove its folder and make the corpus again"


class TokenStore:
    """Documents of token ids. Open with `TokenStore.open`.

    Attributes:
        folder: where it lies.
        manifest: what it holds.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, maps: int) -> None:
        self.folder = folder
        self.manifest = manifest
        self._most_maps = maps
        self._dtype = DTYPES[manifest.dtype]
        self._documents_before = np.cumsum([0, *(shard.documents for shard in manifest.shards)])
        self._lengths: NDArray[np.int64] | None = None
        self._tokens: OrderedDict[int, NDArray[np.unsignedinteger]] = OrderedDict()
        self._offsets: dict[int, NDArray[np.int64]] = {}

    @classmethod
    def open(
        cls, folder: Path | str, *, verify: str = "auto", vocab_size: int | None = None, stores: int = 1
    ) -> "TokenStore":
        """Open a finished corpus.

        Args:
            verify: "size" compares every shard's size; "hash" also its SHA-256, reading it all; "auto" is "hash" for
                a corpus of at most `HASH_BYTES`. The tokenizer's SHA-256 is always compared.
            vocab_size: the model's, at least the tokenizer's, which is the default.
            stores: that are open in this process, and share its files.

        Raises:
            InputError: not a corpus; a file that is missing, truncated or altered; an id beyond the vocabulary.
        """
        if verify not in VERIFY:
            raise InputError(f"data.verify={verify}: must be one of {', '.join(VERIFY)}")
        store = cls(Path(folder), read_manifest(Path(folder)), maps=max(1, _maps_of_process() // stores))
        _check_hash(store.tokenizer_file, store.manifest.tokenizer_sha256)
        shards = store.manifest.shards
        hashes = verify == "hash" or (verify == "auto" and store.size <= HASH_BYTES)
        for shard in shards:
            _check_files(store.folder, shard, itemsize=store._dtype.itemsize, hashes=hashes)
        store.check_ids(store.manifest.vocab_size if vocab_size is None else vocab_size)
        return store

    @property
    def num_documents(self) -> int:
        """Documents of all shards."""
        return self.manifest.documents

    @property
    def num_tokens(self) -> int:
        """Tokens of all shards."""
        return self.manifest.tokens

    @property
    def size(self) -> int:
        """Bytes of all tokens and indices."""
        return sum(shard.bytes + shard.index_bytes for shard in self.manifest.shards)

    @property
    def tokenizer_file(self) -> Path:
        """The tokenizer that made the ids."""
        return self.folder / TOKENIZER

    def document_lengths(self) -> NDArray[np.int64]:
        """Tokens of each document, int64 [num_documents]; reads every shard's index at the first call."""
        if self._lengths is None:
            lengths = [np.diff(self.shard_offsets(shard)) for shard in range(len(self.manifest.shards))]
            self._lengths = np.concatenate([np.empty(0, dtype=np.int64), *lengths])
        return self._lengths

    def document_hashes(self) -> NDArray[np.uint64] | None:
        """A hash of each document's ids, uint64 [num_documents], equal for copies.

        A corpus from before they were kept is read for them, or gives None if that would take long.

        Raises:
            InputError: they were altered.
        """
        shards = self.manifest.shards
        if all(shard.hashes_sha256 for shard in shards):
            return np.concatenate(
                [self._read(shard.hashes_file, shard.hashes_sha256, HASH_DTYPE) for shard in shards]
            ).astype(np.uint64, copy=False)
        if self.size > HASH_BYTES:
            return None
        return np.concatenate(
            [document_hashes(self.shard_tokens(shard), self.shard_offsets(shard)) for shard in range(len(shards))]
        )

    def locate(self, documents: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(shard, first token inside that shard) of each document, int64 like ``documents``."""
        shards = np.searchsorted(self._documents_before, documents, side="right") - 1
        starts = np.empty_like(documents)
        for shard in np.unique(shards):
            here = shards == shard
            starts[here] = self.shard_offsets(int(shard))[documents[here] - self._documents_before[shard]]
        return shards, starts

    def document(self, index: int) -> NDArray[np.unsignedinteger]:
        """All tokens of a document, a view of the map."""
        return self.read(index, 0, None)

    def read(self, document: int, start: int, stop: int | None) -> NDArray[np.unsignedinteger]:
        """Tokens ``start .. stop - 1`` of a document, a view of the map.

        Raises:
            IndexError: there is no such document.
        """
        if not 0 <= document < self.num_documents:
            raise IndexError(f"document {document} of {self.num_documents}")
        shard = int(np.searchsorted(self._documents_before, document, side="right")) - 1
        first, last = self.shard_offsets(shard)[document - self._documents_before[shard] :][:2]
        return self.shard_tokens(shard)[first:last][start:stop]

    def shard_tokens(self, shard: int) -> NDArray[np.unsignedinteger]:
        """All tokens of a shard, mapped unless it still is."""
        if (tokens := self._tokens.pop(shard, None)) is None:
            path = self.folder / self.manifest.shards[shard].tokens_file
            with edge(path, remedy=REMEDY):
                # A plain array over the map: slicing np.memmap itself is several times slower.
                tokens = np.asarray(np.memmap(path, dtype=self._dtype, mode="r"))
            while len(self._tokens) >= self._most_maps:
                self._tokens.popitem(last=False)
        self._tokens[shard] = tokens
        return tokens

    def shard_offsets(self, shard: int) -> NDArray[np.int64]:
        """Where each document of a shard begins, and the end, int64 [documents + 1]; read at the first call.

        Raises:
            InputError: the index was altered.
        """
        if shard not in self._offsets:
            record = self.manifest.shards[shard]
            offsets = self._read(record.index_file, record.index_sha256, INDEX_DTYPE)
            if not len(offsets) or offsets[0] != 0 or offsets[-1] != record.tokens or (np.diff(offsets) <= 0).any():
                raise InputError(
                    f"{self.folder / record.index_file}: must rise from 0 to {record.tokens}; it was altered; {REMEDY}"
                )
            self._offsets[shard] = offsets.astype(np.int64, copy=False)
        return self._offsets[shard]

    def _read(self, name: str, digest: str, dtype: np.dtype) -> NDArray:
        """A small file of a shard, of one number per document; all of it is read, so all of it is checked.

        Raises:
            InputError: it cannot be read or was altered.
        """
        path = self.folder / name
        with edge(path, remedy=REMEDY):
            content = path.read_bytes()
            if sha256(content).hexdigest() != digest:
                raise InputError(f"{path}: its SHA-256 is not the manifest's, so it was altered; {REMEDY}")
            return np.frombuffer(content, dtype=dtype)

    def check_ids(self, vocab_size: int) -> None:
        """Refuse ids that the tokenizer lacks or the model has no embedding for, by manifest and by a sampled scan.

        Args:
            vocab_size: the model's.

        Raises:
            InputError: an id, or the tokenizer's vocabulary, is too large.
        """
        if self.manifest.vocab_size > vocab_size:
            raise InputError(
                f"{self.folder}: its tokenizer has {self.manifest.vocab_size} ids, which must fit into "
                f"model.vocab_size={vocab_size}; raise that or tokenise with a smaller vocabulary"
            )
        for index, shard in enumerate(self.manifest.shards):
            self._check_id(index, shard.max_id)
        for index, ids in self._samples(shards=SCAN_SHARDS, tokens=SCAN_TOKENS):
            self._check_id(index, int(ids.max()))

    def unigram_counts(self, *, most_tokens: int = 2**23) -> NDArray[np.int64]:
        """How often each id occurs, int64 [vocab_size]; in a sample spread over all shards if there are more tokens.

        Raises:
            InputError: an id is too large.
        """
        shards = max(1, min(COUNT_SHARDS, len(self.manifest.shards)))
        counts = np.zeros(self.manifest.vocab_size, dtype=np.int64)
        for index, ids in self._samples(shards=shards, tokens=most_tokens // shards):
            self._check_id(index, int(ids.max()))
            counts += np.bincount(ids, minlength=len(counts))
        return counts

    def _check_id(self, shard: int, largest: int) -> None:
        """
        Raises:
            InputError: the largest id of a shard, or of a sample of it, is beyond the tokenizer's vocabulary.
        """
        if largest >= self.manifest.vocab_size:
            raise InputError(
                f"{self.folder / self.manifest.shards[shard].tokens_file}: has the id {largest}, which must be below "
                f"{self.manifest.vocab_size}, the tokenizer's vocabulary; it was altered; {REMEDY}"
            )

    def _samples(self, *, shards: int, tokens: int) -> Iterator[tuple[int, NDArray[np.unsignedinteger]]]:
        """(shard, about ``tokens`` ids, evenly spread in runs of 256) of at most ``shards`` evenly spread shards."""
        everything = len(self.manifest.shards)
        for shard in np.unique(np.linspace(0, everything - 1, min(shards, everything)).astype(np.int64)):
            ids = self.shard_tokens(int(shard))
            if len(ids) > tokens:
                firsts = np.linspace(0, len(ids) - 256, tokens // 256).astype(np.int64)
                ids = ids[(firsts[:, None] + np.arange(256)).ravel()]
            yield int(shard), ids


def unigram_entropy(counts: NDArray[np.int64] | NDArray[np.float64]) -> float:
    """Entropy in nats of the distribution that is proportional to ``counts``: what a model that knows only how
    often each token occurs must pay per token."""
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def _check_files(folder: Path, shard: Shard, *, itemsize: int, hashes: bool) -> None:
    """Compare a shard's two files with its record.

    Raises:
        InputError: naming the file.
    """
    if shard.bytes != shard.tokens * itemsize:
        raise InputError(
            f"{folder / shard.tokens_file}: {shard.bytes} bytes for {shard.tokens} tokens of {itemsize} bytes; {REMEDY}"
        )
    for name, size, digest in (
        (shard.tokens_file, shard.bytes, shard.tokens_sha256),
        (shard.index_file, shard.index_bytes, shard.index_sha256),
        (shard.hashes_file, shard.hashes_bytes, shard.hashes_sha256),
    ):
        if not digest:
            continue
        path = folder / name
        try:
            found = path.stat().st_size
        except FileNotFoundError:
            raise InputError(f"{path}: is missing; {REMEDY}") from None
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}); {REMEDY}") from None
        if found != size:
            raise InputError(f"{path}: is {found} bytes and must be {size}, so it is truncated or altered; {REMEDY}")
        if hashes:
            _check_hash(path, digest)


def _check_hash(path: Path, digest: str) -> None:
    """Compare a file's SHA-256 with the manifest's.

    Raises:
        InputError: naming the file.
    """
    try:
        found = sha256_file(path)
    except FileNotFoundError:
        raise InputError(f"{path}: is missing; {REMEDY}") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); {REMEDY}") from None
    if found != digest:
        raise InputError(f"{path}: its SHA-256 is not the manifest's, so it was altered; {REMEDY}")


def _maps_of_process() -> int:
    """How many shards a process may keep mapped: a quarter of its limit on open files is far from all of it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_MAPS if soft == resource.RLIM_INFINITY else max(1, min(MOST_MAPS, soft // 4))
