"""The loader: global positions to microbatches. It has no state that matters.

A step is a pure function of (position, shape): the position says how many samples the run has drawn and where
each source's stream stands, so resuming needs nothing else, any number of ranks draws the same samples in the
same order, and samples may change their length between steps.

    position -> blend -> (source, cursor) of every sample of the global step -> hash of their ids
                                 |
                 rank r takes the r-th contiguous part -> pack -> microbatches

A background thread prepares the next step while the present one computes. A source that is smaller than a
batch wraps inside it: its next epoch has another order.
"""

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from data.blend import Blend, weight_errors
from data.corpus import prepare_default_corpus
from data.edges import InputError, edge, place_error
from data.pack import IGNORE_INDEX, TokenStream, pack
from data.shuffle import make_key
from data.split import Documents, Split, split_documents
from data.store import VERIFY, TokenStore, unigram_entropy
from data.tokenizer import MIN_VOCAB_SIZE

ORDER = 2
"""Version of what decides, for given sources and seed, which samples come in which order: the split, the streams and
the blend. 2: copies of a document are on one side of the split; the blend holds the weights after every sample."""
PADDING = -1
"""Source and cursor in the id of a validation row that is all padding."""


@dataclass
class SourceConfig:
    """One tokenised corpus of a blend."""

    path: str = ""
    """Folder made by ``python -m data.tokenize``."""
    weight: float = 1.0
    """Share of the samples, in proportion to the other sources' weights; 0 draws nothing."""


@dataclass
class DataConfig:
    """What a run reads."""

    AT_RESUME: ClassVar[str] = "other samples would be held out, and those trained on come in another order"
    # What the sources are is known by their content, which the checkpoint names: `train.build.continue_data`.
    FREE_AT_RESUME: ClassVar[tuple[str, ...]] = ("sources", "vocab_size", "verify")

    sources: list[SourceConfig] = field(default_factory=list)
    """Empty: the default corpus, the Python standard library's own sources."""
    vocab_size: int = 8192
    """Of the default corpus' tokenizer."""
    validation_fraction: float = 0.02
    """Share of each source's documents that is never trained on; 0 holds out none."""
    verify: str = "auto"
    """Check of the shards at start. size: sizes and a sample of the ids. hash: all of their bytes too. auto: hash for a
    source of at most 1 GiB, else size."""

    @property
    def default_corpus(self) -> bool:
        """No source is named."""
        return not self.sources

    def errors(self) -> list[str]:
        """Every problem, one line each."""
        found = []
        for index, source in enumerate(self.sources):
            if not source.path:
                found.append(f"data.sources[{index}].path: is empty; name a folder made by python -m data.tokenize")
            if (problem := place_error(f"data.sources[{index}].path", source.path)) is not None:
                found.append(problem)
        if self.sources:
            found += weight_errors([source.weight for source in self.sources])
        if self.vocab_size < MIN_VOCAB_SIZE:
            found.append(
                f"data.vocab_size={self.vocab_size}: must be at least {MIN_VOCAB_SIZE}, the bytes and the special "
                "tokens; raise it"
            )
        if not 0 <= self.validation_fraction < 1:
            found.append(f"data.validation_fraction={self.validation_fraction}: must be at least 0 and below 1")
        if self.verify not in VERIFY:
            found.append(f"data.verify={self.verify}: must be one of {', '.join(VERIFY)}")
        return found


@dataclass(frozen=True)
class DataPosition:
    """Where a run stands in its data, the same for any number of ranks.

    samples: drawn so far; the blend's position.
    tokens: each source's cursor, the tokens drawn from its stream so far.
    order: `ORDER` of the program that counted them.
    """

    samples: int
    tokens: tuple[int, ...]
    order: int = ORDER

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {"samples": self.samples, "tokens": list(self.tokens), "order": self.order}

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> "DataPosition":
        """Back from `to_json`."""
        # Before the order had a version, it was the first.
        return cls(int(state["samples"]), tuple(map(int, state["tokens"])), int(state.get("order", 1)))


@dataclass(frozen=True)
class Microbatch:
    """M samples of T tokens in one row.

    input_ids: int64 [1, M*T].
    labels: int64 [1, M*T], -100 where there is nothing to predict.
    cu_seqlens: int32 [N + 1], strictly rising from 0 to M*T: where a document or a sample begins.
    sample_ids: int64 [M, 3], (source, cursor, T) of each sample.
    """

    input_ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor
    sample_ids: NDArray[np.int64]


@dataclass(frozen=True)
class Source:
    """One source of a blend, opened and split. ``validation`` is None if nothing is held out; ``note`` says what was
    found by the way, if anything."""

    store: TokenStore
    weight: float
    training: TokenStream
    validation: TokenStream | None
    note: str = ""


@dataclass(frozen=True)
class _Request:
    """The arguments of a step."""

    position: DataPosition
    sequences: int
    length: int
    rank: int
    ranks: int
    microbatch: int


_Step = tuple[list[Microbatch], DataPosition, str]


def open_sources(stores: Sequence[TokenStore], *, weights: Sequence[float], fraction: float, seed: int) -> list[Source]:
    """Split the stores' documents and make the streams of both sides.

    Args:
        weights: in the blend.
        fraction: of each store's documents that is held out.
        seed: of the split and of every epoch's order.

    Raises:
        InputError: the documents cannot be split.
    """
    keys = [make_key("source", store.manifest.content_hash, seed) for store in stores]
    documents = [Documents(store.num_documents, key, store.document_hashes()) for store, key in zip(stores, keys)]
    splits = split_documents(documents, fraction=fraction)
    return [
        Source(
            store=store,
            weight=weight,
            training=TokenStream(store, split.training, key=make_key("training", key)),
            validation=TokenStream(store, split.validation, key=make_key("validation", key))
            if len(split.validation)
            else None,
            note=_note(store, split, known=given.hashes is not None),
        )
        for store, weight, key, given, split in zip(stores, weights, keys, documents, splits)
    ]


def _note(store: TokenStore, split: Split, *, known: bool) -> str:
    """What a reader of the validation loss should know of a source's split; empty if there is nothing."""
    if not known:
        return (
            f"{store.folder}: was made before copies of documents were looked for, so held-out text may also be "
            "trained on; tokenise again to keep them apart"
        )
    if not split.copies:
        return ""
    where = "all on the training side" if not len(split.validation) else "on one side of the split with what they copy"
    return f"{store.folder}: {split.copies:,} of {store.num_documents:,} documents are copies of others, {where}"


def open_loader(config: DataConfig, *, cache: Path, vocab_size: int, seed: int) -> "Loader":
    """The loader of a run.

    Args:
        config: without errors.
        cache: where the default corpus is kept; it is built there if need be.
        vocab_size: the model's; every id is below it.
        seed: of splits, orders and the blend.

    Raises:
        InputError: a source cannot be used, or the sources' tokenizers differ.
    """
    chosen = config.sources or [
        SourceConfig(path=str(prepare_default_corpus(cache, vocab_size=config.vocab_size)), weight=1.0)
    ]
    stores = [
        TokenStore.open(source.path, verify=config.verify, vocab_size=vocab_size, stores=len(chosen))
        for source in chosen
    ]
    for index, store in enumerate(stores):
        if store.manifest.tokenizer_sha256 != stores[0].manifest.tokenizer_sha256:
            raise InputError(
                f"data.sources[{index}].path={chosen[index].path}: has another tokenizer than {chosen[0].path}, and "
                "all sources must share one; tokenise it again with that one's tokenizer.json"
            )
    weights = [source.weight for source in chosen]
    return Loader(open_sources(stores, weights=weights, fraction=config.validation_fraction, seed=seed), seed=seed)


class Loader:
    """Serves a blend of sources.

    Args:
        sources: at least one.
        seed: of the blend's order.
    """

    def __init__(self, sources: Sequence[Source], *, seed: int) -> None:
        self.sources = list(sources)
        self._blend = Blend([source.weight for source in sources], seed=seed)
        keys = (f"{source.training.key:016x}" for source in sources)
        self._identity = ",".join([f"order {ORDER}", *keys]).encode()
        self._tokenizer: Tokenizer | None = None
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._ahead: tuple[_Request, Future[_Step]] | None = None

    def notes(self) -> list[str]:
        """What a reader of the validation loss should know, a line each: copies of documents, above all."""
        return [source.note for source in self.sources if source.note]

    def check_order(self, position: DataPosition) -> None:
        """
        Raises:
            InputError: the position was counted in another order of samples than this program's.
        """
        if position.order != ORDER:
            raise InputError(
                f"data: the position after {position.samples:,} samples is of order {position.order}, and this version "
                f"draws samples in order {ORDER}, so it would point at other samples; continue with the version that "
                "began the run, or set another run.dir to begin anew"
            )

    def start(self) -> DataPosition:
        """The position before the first sample."""
        return DataPosition(0, (0,) * len(self.sources))

    def step(
        self, position: DataPosition, *, sequences: int, length: int, rank: int, ranks: int, microbatch: int
    ) -> tuple[list[Microbatch], DataPosition, str]:
        """This rank's part of the global step at ``position``.

        Args:
            sequences: samples of the global step.
            length: tokens of a sample.
            rank, ranks: this rank takes samples ``rank * sequences / ranks`` and on.
            microbatch: samples of a microbatch.

        Returns:
            the microbatches, the position after the step, and a hash (16 hex digits) of the global step's samples;
            the latter two do not depend on ``rank``, ``ranks`` or ``microbatch``.

        Raises:
            InputError: the samples cannot be divided so, or the position is of another blend.
        """
        self._check(position, sequences=sequences, length=length, ranks=ranks, microbatch=microbatch)
        request = _Request(position, sequences, length, rank, ranks, microbatch)
        result = self._take(request) or self._prepare(request)
        following = _Request(result[1], sequences, length, rank, ranks, microbatch)
        self._ahead = following, self._worker.submit(self._prepare, following)
        return result

    def validation_batches(
        self, *, length: int, microbatch: int, max_tokens: int, rank: int, ranks: int
    ) -> list[Microbatch]:
        """This rank's share of the held-out text, always the same.

        Each source gives the beginning of its validation stream, never more than one epoch: at most its share of
        ``max_tokens``, in whole samples, but at least one. A source's last sample may be short; it is filled with
        unlabelled tokens in a segment of their own. So is what makes the number of batches equal on all ranks.

        Raises:
            InputError: nothing is held out.
        """
        ids, limits = self._validation_ids(length=length, max_tokens=max_tokens)
        batches = -(-len(ids) // (microbatch * ranks))
        missing = batches * ranks * microbatch - len(ids)
        ids = np.concatenate([ids, np.tile([[PADDING, PADDING, length]], (missing, 1))])
        mine = ids.reshape(ranks, batches * microbatch, 3)[rank]
        streams = [source.validation for source in self.sources]
        return _microbatches(streams, mine, limits=limits, microbatch=microbatch)

    def num_tokens(self) -> int:
        """Training tokens of all sources that are drawn from, each counted once."""
        return sum(source.training.tokens_per_epoch for source in self.sources if source.weight)

    def unigram_entropy(self) -> float:
        """Nats per token that a model pays which knows only how often each token occurs in the blend."""
        total = sum(source.weight for source in self.sources)
        mixture = np.zeros(max(source.store.manifest.vocab_size for source in self.sources))
        for source in (source for source in self.sources if source.weight):
            counts = source.store.unigram_counts()
            mixture[: len(counts)] += source.weight / total * counts / counts.sum()
        return unigram_entropy(mixture)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that all sources share."""
        if self._tokenizer is None:
            path = self.sources[0].store.tokenizer_file
            with edge(path, remedy="copy it again, or tokenise again"):
                self._tokenizer = Tokenizer.from_file(str(path))
        return self._tokenizer

    def encode_prompt(self, prompt: str) -> list[int]:
        """Token ids of a prompt, at least one: an empty prompt is an empty line, or else the end of a text.

        Raises:
            InputError: the tokenizer has no token for the prompt.
        """
        tokenizer, eos_id = self.tokenizer(), self.sources[0].store.manifest.eos_id
        remedy = "give a text that has, or set evaluate.sample_tokens=0"
        with edge(f"evaluate.prompt={prompt!r}", what="has no tokens", remedy=remedy):
            ids: list[int] = tokenizer.encode(prompt or "\n", add_special_tokens=False).ids
        if ids:
            return ids
        if prompt.strip() or eos_id is None:
            raise InputError(f"evaluate.prompt={prompt!r}: has no tokens in this corpus' tokenizer; {remedy}")
        return [eos_id]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens are left out."""
        return self.tokenizer().decode(list(ids))

    def _check(self, position: DataPosition, *, sequences: int, length: int, ranks: int, microbatch: int) -> None:
        self.check_order(position)
        if len(position.tokens) != len(self.sources):
            raise InputError(
                f"data.sources: the position is of {len(position.tokens)} sources and the blend has "
                f"{len(self.sources)}; resume with the sources that the run began with"
            )
        if length < 1:
            raise InputError(f"batch.length={length}: must be at least 1")
        if sequences < 1 or microbatch < 1 or sequences % (ranks * microbatch):
            raise InputError(
                f"batch.sequences={sequences}: must be a positive multiple of {ranks} ranks times "
                f"batch.microbatch={microbatch}; change one of them"
            )

    def _take(self, request: _Request) -> _Step | None:
        """The step prepared in the background, if it is the one that is asked for.

        Waits for the background in any case, so that the two never use the streams at once.
        """
        if self._ahead is None:
            return None
        (prepared, future), self._ahead = self._ahead, None
        result = future.result()
        return result if prepared == request else None

    def _prepare(self, request: _Request) -> _Step:
        ids, after = self._sample_ids(request.position, sequences=request.sequences, length=request.length)
        share = request.sequences // request.ranks
        mine = ids[request.rank * share : (request.rank + 1) * share]
        streams = [source.training for source in self.sources]
        batches = _microbatches(streams, mine, limits=None, microbatch=request.microbatch)
        digest = hashlib.blake2b(self._identity + ids.astype("<i8").tobytes(), digest_size=8).hexdigest()
        return batches, after, digest

    def _sample_ids(
        self, position: DataPosition, *, sequences: int, length: int
    ) -> tuple[NDArray[np.int64], DataPosition]:
        """(source, cursor, length) of every sample of the global step, int64 [sequences, 3]; the position after."""
        drawn, _ = self._blend.draw(position.samples, sequences)
        ids = np.empty((sequences, 3), dtype=np.int64)
        ids[:, 0], ids[:, 2] = drawn, length
        after = list(position.tokens)
        for source in range(len(self.sources)):
            rows = np.flatnonzero(drawn == source)
            ids[rows, 1] = after[source] + np.arange(len(rows)) * length
            after[source] += len(rows) * length
        return ids, DataPosition(position.samples + sequences, tuple(after))

    def _validation_ids(self, *, length: int, max_tokens: int) -> tuple[NDArray[np.int64], list[int]]:
        """Ids of all validation samples, int64 [n, 3], and how many of each stream's tokens they cover."""
        total = sum(source.weight for source in self.sources)
        ids, limits = [], []
        for index, source in enumerate(self.sources):
            if source.validation is None or not source.weight:
                limits.append(0)
                continue
            whole_samples = max(1, int(max_tokens * source.weight / total) // length)
            limits.append(min(source.validation.tokens_per_epoch, whole_samples * length))
            cursors = np.arange(0, limits[-1], length)
            ids.append(np.stack([np.full_like(cursors, index), cursors, np.full_like(cursors, length)], axis=1))
        if not ids:
            raise InputError(
                "data.validation_fraction=0: there is no held-out text to evaluate on; raise it or set evaluate.every=0"
            )
        return np.concatenate(ids), limits


def _microbatches(
    streams: Sequence[TokenStream | None], ids: NDArray[np.int64], *, limits: Sequence[int] | None, microbatch: int
) -> list[Microbatch]:
    """Read samples and put each ``microbatch`` of them in a row.

    Args:
        streams: by source.
        ids: int64 [n, 3], n a multiple of ``microbatch``; the samples of one source follow each other in its stream.
        limits: where each stream ends, if it does.
    """
    length = int(ids[0, 2])
    input_ids = np.zeros((len(ids), length), dtype=np.int64)
    labels = np.full_like(input_ids, IGNORE_INDEX)
    begins = np.zeros(input_ids.shape, dtype=bool)
    begins[:, 0] = True
    for source, stream in enumerate(streams):
        rows = np.flatnonzero(ids[:, 0] == source)
        if not len(rows):
            continue
        assert stream is not None
        cursor, wanted = int(ids[rows[0], 1]), len(rows) * length
        count = wanted if limits is None else min(wanted, limits[source] - cursor)
        stretch = pack(stream, cursor, count)
        input_ids[rows] = _filled(stretch.input_ids, wanted, 0).reshape(-1, length)
        labels[rows] = _filled(stretch.labels, wanted, IGNORE_INDEX).reshape(-1, length)
        # The last boundary begins the filling, if there is any.
        inside = stretch.boundaries[stretch.boundaries < wanted]
        begins[rows[inside // length], inside % length] = True
    return [
        _microbatch(input_ids[rows], labels[rows], begins[rows], ids[rows])
        for rows in (slice(first, first + microbatch) for first in range(0, len(ids), microbatch))
    ]


def _filled(values: NDArray[np.int64], size: int, filling: int) -> NDArray[np.int64]:
    return np.pad(values, (0, size - len(values)), constant_values=filling)


def _microbatch(
    input_ids: NDArray[np.int64], labels: NDArray[np.int64], begins: NDArray[np.bool_], ids: NDArray[np.int64]
) -> Microbatch:
    """One microbatch of [M, T] arrays."""
    boundaries = np.append(np.flatnonzero(begins), input_ids.size)
    return Microbatch(
        input_ids=torch.from_numpy(input_ids.reshape(1, -1)),
        labels=torch.from_numpy(labels.reshape(1, -1)),
        cu_seqlens=torch.from_numpy(boundaries.astype(np.int32)),
        sample_ids=ids,
    )
