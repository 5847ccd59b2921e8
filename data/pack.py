"""Documents to samples: an endless stream of tokens, and any stretch of it with labels and boundaries.

Epoch e visits a source's documents in a permutation that is a pure function of (key, e); the epochs one after
another are the stream. A sample is T consecutive tokens from a cursor on, so no token is lost or repeated when
T changes between phases, a document longer than T goes on in the next sample, and every token is an input
exactly once an epoch.

    stream      | a b c d e | f g | h i j k l m | ...    three documents
    inputs, T=6   a b c d e   f                          next sample: g h i j k l
    labels        b c d e -   g                          - is -100: nothing follows e in its document
    boundaries    0           5   6
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data.shuffle import make_key, permutation
from data.store import TokenStore

IGNORE_INDEX = -100
"""Label of a token that has no successor to predict; what torch's cross-entropy leaves out."""


@dataclass(frozen=True)
class Epoch:
    """One epoch's order: its documents, and where each begins in the epoch, int64 [n] and [n + 1]."""

    documents: NDArray[np.int64]
    begins: NDArray[np.int64]


@dataclass(frozen=True)
class Pieces:
    """Consecutive stretches of documents, int64 [n] each, none of them empty.

    documents: whose.
    starts, stops: inside the document.
    """

    documents: NDArray[np.int64]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]


class TokenStream:
    """The endless stream of some documents of a store.

    Args:
        store: where the tokens are.
        documents: which of its documents, int64, at least one.
        key: from `make_key`; decides the order of every epoch.
    """

    def __init__(self, store: TokenStore, documents: NDArray[np.int64], *, key: int) -> None:
        assert len(documents) > 0, "a stream needs a document"
        self.store = store
        self.lengths = store.document_lengths()
        self._documents = documents
        self.key = key
        self.tokens_per_epoch = int(self.lengths[documents].sum())
        self._epochs: dict[int, Epoch] = {}

    def epoch(self, number: int) -> Epoch:
        """The order of epoch ``number``; the last two that were asked for are kept."""
        if number not in self._epochs:
            order = permutation(len(self._documents), key=make_key("epoch", self.key, number))
            documents = self._documents[order]
            begins = np.concatenate([[0], np.cumsum(self.lengths[documents])])
            kept = list(self._epochs.items())[-1:]
            self._epochs = dict([*kept, (number, Epoch(documents, begins))])
        return self._epochs[number]

    def pieces(self, cursor: int, length: int) -> Pieces:
        """The documents' stretches that make up the stream's tokens ``cursor .. cursor + length - 1``."""
        parts: list[Pieces] = []
        while length > 0:
            number, offset = divmod(cursor, self.tokens_per_epoch)
            stop = min(offset + length, self.tokens_per_epoch)
            parts.append(_within(self.epoch(number), offset, stop))
            cursor, length = cursor + stop - offset, length - (stop - offset)
        return Pieces(
            *(np.concatenate([getattr(part, name) for part in parts]) for name in ("documents", "starts", "stops"))
        )


def _within(epoch: Epoch, start: int, stop: int) -> Pieces:
    """Pieces of the epoch's tokens ``start .. stop - 1``."""
    first = int(np.searchsorted(epoch.begins, start, side="right")) - 1
    last = int(np.searchsorted(epoch.begins, stop, side="left"))
    begins, ends = epoch.begins[first:last], epoch.begins[first + 1 : last + 1]
    return Pieces(epoch.documents[first:last], np.maximum(start, begins) - begins, np.minimum(stop, ends) - begins)


@dataclass(frozen=True)
class PackedSample:
    """Consecutive tokens of a stream.

    input_ids: int64 [T].
    labels: int64 [T], the next token of the same document, even if it lies beyond the sample; `IGNORE_INDEX` at
        a document's last token.
    boundaries: int64 [N + 1], offsets of the N documents' stretches, from 0 to T, strictly rising.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    boundaries: NDArray[np.int64]


def pack(stream: TokenStream, cursor: int, length: int) -> PackedSample:
    """The ``length`` tokens of ``stream`` from ``cursor`` on, at least one."""
    assert length > 0, length
    pieces = stream.pieces(cursor, length)
    boundaries = np.concatenate([[0], np.cumsum(pieces.stops - pieces.starts)])
    input_ids = np.empty(length, dtype=np.int64)
    labels = np.full(length, IGNORE_INDEX, dtype=np.int64)
    shards, begins = stream.store.locate(pieces.documents)
    first = begins + pieces.starts
    last = begins + np.minimum(pieces.stops + 1, stream.lengths[pieces.documents])
    # A loop of slices, not one gather: two copies a piece are faster than an index per token.
    for at, shard, start, stop, end in zip(
        boundaries.tolist(), shards.tolist(), first.tolist(), (begins + pieces.stops).tolist(), last.tolist()
    ):
        tokens = stream.store.shard_tokens(shard)
        input_ids[at : at + stop - start] = tokens[start:stop]
        labels[at : at + end - start - 1] = tokens[start + 1 : end]
    return PackedSample(input_ids, labels, boundaries)
