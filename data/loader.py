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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from data.blend import Blend, weight_error
from data.corpus import prepare_default_corpus
from data.pack import IGNORE_INDEX, TokenStream, pack
from data.shuffle import make_key
from data.store import VERIFY, TokenStore, split_documents, unigram_entropy
from data.tokenizer import MIN_VOCAB_SIZE

PADDING = -1
"""Source and cursor in the id of a validation row that is all padding."""


@dataclass
class SourceConfig:
    """One tokenised corpus of a blend."""

    path: str = ""
    """Folder made by ``python -m data.tokenize``."""
    weight: float = 1.0
    """Share of the samples, in proportion to the other sources' weights."""


@dataclass
class DataConfig:
    """What a run reads."""

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
            if (problem := weight_error(source.weight)) is not None:
                found.append(f"data.sources[{index}].{problem}")
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
    """

    samples: int
    tokens: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {"samples": self.samples, "tokens": list(self.tokens)}

    @classmethod
    def from_json(cls, state: dict[str, Any]) -> "DataPosition":
        """Back from `to_json`."""
        return cls(int(state["samples"]), tuple(int(cursor) for cursor in state["tokens"]))


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
    """One source of a blend, opened and split. ``validation`` is None if nothing is held out."""

    store: TokenStore
    weight: float
    training: TokenStream
    validation: TokenStream | None


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


def open_source(store: TokenStore, *, weight: float, fraction: float, seed: int) -> Source:
    """Split a store's documents and make the streams of both sides.

    Args:
        weight: in the blend.
        fraction: of the documents that is held out.
        seed: of the split and of every epoch's order.

    Raises:
        ValueError: the documents cannot be split.
    """
    key = make_key("source", store.manifest.content_hash, seed)
    training, validation = split_documents(store.num_documents, fraction=fraction, key=key)
    return Source(
        store=store,
        weight=weight,
        training=TokenStream(store, training, key=make_key("training", key)),
        validation=TokenStream(store, validation, key=make_key("validation", key)) if len(validation) else None,
    )


def open_loader(config: DataConfig, *, cache: Path, vocab_size: int, seed: int) -> "Loader":
    """The loader of a run.

    Args:
        config: without errors.
        cache: where the default corpus is kept; it is built there if need be.
        vocab_size: the model's; every id is below it.
        seed: of splits, orders and the blend.

    Raises:
        ValueError: a source cannot be used, or the sources' tokenizers differ.
    """
    chosen = config.sources or [
        SourceConfig(path=str(prepare_default_corpus(cache, vocab_size=config.vocab_size)), weight=1.0)
    ]
    stores = [TokenStore.open(source.path, verify=config.verify, vocab_size=vocab_size) for source in chosen]
    for index, store in enumerate(stores):
        if store.manifest.tokenizer_sha256 != stores[0].manifest.tokenizer_sha256:
            raise ValueError(
                f"data.sources[{index}].path={chosen[index].path}: has another tokenizer than {chosen[0].path}, and "
                "all sources must share one; tokenise it again with that one's tokenizer.json"
            )
    return Loader(
        [
            open_source(store, weight=source.weight, fraction=config.validation_fraction, seed=seed)
            for store, source in zip(stores, chosen)
        ],
        seed=seed,
    )


class Loader:
    """Serves a blend of sources.

    Args:
        sources: at least one.
        seed: of the blend's order.
    """

    def __init__(self, sources: Sequence[Source], *, seed: int) -> None:
        self.sources = list(sources)
        self._blend = Blend([source.weight for source in sources], seed=seed)
        self._identity = ",".join(f"{source.training.key:016x}" for source in sources).encode()
        self._tokenizer: Tokenizer | None = None
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._ahead: tuple[_Request, Future[_Step]] | None = None

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
            ValueError: the samples cannot be divided so, or the position is of another blend.
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
            ValueError: nothing is held out.
        """
        ids, limits = self._validation_ids(length=length, max_tokens=max_tokens)
        batches = -(-len(ids) // (microbatch * ranks))
        missing = batches * ranks * microbatch - len(ids)
        ids = np.concatenate([ids, np.tile([[PADDING, PADDING, length]], (missing, 1))])
        mine = ids.reshape(ranks, batches * microbatch, 3)[rank]
        streams = [source.validation for source in self.sources]
        return _microbatches(streams, mine, limits=limits, microbatch=microbatch)

    def num_tokens(self) -> int:
        """Training tokens of all sources, each counted once."""
        return sum(source.training.tokens_per_epoch for source in self.sources)

    def unigram_entropy(self) -> float:
        """Nats per token that a model pays which knows only how often each token occurs in the blend."""
        total = sum(source.weight for source in self.sources)
        mixture = np.zeros(max(source.store.manifest.vocab_size for source in self.sources))
        for source in self.sources:
            counts = source.store.unigram_counts()
            mixture[: len(counts)] += source.weight / total * counts / counts.sum()
        return unigram_entropy(mixture)

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that all sources share."""
        if self._tokenizer is None:
            self._tokenizer = Tokenizer.from_file(str(self.sources[0].store.tokenizer_file))
        return self._tokenizer

    def encode_prompt(self, prompt: str) -> list[int]:
        """Token ids of a prompt, at least one: an empty prompt is an empty line, or else the end of a text.

        Raises:
            ValueError: the tokenizer has no token for the prompt.
        """
        remedy = "give a text that has, or set evaluate.sample_tokens=0"
        try:
            ids = self.tokenizer().encode(prompt or "\n", add_special_tokens=False).ids
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"evaluate.prompt={prompt!r}: has no tokens ({error}); {remedy}") from error
        if ids:
            return ids
        eos_id = self.sources[0].store.manifest.eos_id
        if prompt.strip() or eos_id is None:
            raise ValueError(f"evaluate.prompt={prompt!r}: has no tokens in this corpus' tokenizer; {remedy}")
        return [eos_id]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special tokens are left out."""
        return self.tokenizer().decode(list(ids))

    def _check(self, position: DataPosition, *, sequences: int, length: int, ranks: int, microbatch: int) -> None:
        if len(position.tokens) != len(self.sources):
            raise ValueError(
                f"data.sources: the position is of {len(position.tokens)} sources and the blend has "
                f"{len(self.sources)}; resume with the sources that the run began with"
            )
        if length < 1:
            raise ValueError(f"batch.length={length}: must be at least 1")
        if sequences < 1 or microbatch < 1 or sequences % (ranks * microbatch):
            raise ValueError(
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
            if source.validation is None:
                raise ValueError(
                    "data.validation_fraction=0: there is no held-out text to evaluate on; raise it "
                    "or set evaluate.every=0"
                )
            whole_samples = max(1, int(max_tokens * source.weight / total) // length)
            limits.append(min(source.validation.tokens_per_epoch, whole_samples * length))
            cursors = np.arange(0, limits[-1], length)
            ids.append(np.stack([np.full_like(cursors, index), cursors, np.full_like(cursors, length)], axis=1))
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
