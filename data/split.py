"""The validation split: which documents are held out, so that none of them is also trained on.

A corpus often has a document more than once, and so have two sources of one blend. All copies of a document are on
one side, through all sources: they are one group, and groups are held out, not documents.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data.edges import InputError
from data.shuffle import make_key, permutation


@dataclass(frozen=True)
class Documents:
    """What a source is split by.

    hashes: uint64 [documents], equal for copies; None if they are not known, and then no copies are looked for.
    number: of documents.
    key: from `make_key`, of the source's content and the seed.
    """

    number: int
    key: int
    hashes: NDArray[np.uint64] | None = None


@dataclass(frozen=True)
class Split:
    """One source's sides: document indices, each int64 and rising; together every index once.

    copies: documents that are equal to another one of this source or of one before it.
    """

    training: NDArray[np.int64]
    validation: NDArray[np.int64]
    copies: int = 0


def split_documents(sources: Sequence[Documents], *, fraction: float) -> list[Split]:
    """Hold out documents of each source.

    A source's documents are held out in an order that is a function of its key, up to ``fraction`` of them, rounded,
    but at least one. Copies of a document that an earlier source has are on the side that they have there.

    Raises:
        InputError: a side would be empty.
    """
    if not 0 <= fraction < 1:
        raise InputError(f"data.validation_fraction={fraction}: must be at least 0 and below 1")
    trained = held = np.empty(0, dtype=np.uint64)
    splits = []
    for source in sources:
        split = _split(source, fraction=fraction, trained=trained, held=held)
        splits.append(split)
        if len(sources) > 1 and source.hashes is not None:
            trained = np.union1d(trained, source.hashes[split.training])
            held = np.union1d(held, source.hashes[split.validation])
    return splits


def _split(source: Documents, *, fraction: float, trained: NDArray[np.uint64], held: NDArray[np.uint64]) -> Split:
    """Split one source.

    Args:
        trained, held: rising hashes of the documents of earlier sources, by side.
    """
    number, empty = source.number, np.empty(0, dtype=np.int64)
    if source.hashes is None:
        groups, sizes, sides = np.arange(number), np.ones(number, dtype=np.int64), np.zeros(number, dtype=np.int64)
        copies = 0
    else:
        values, groups, sizes = np.unique(source.hashes, return_inverse=True, return_counts=True)
        sides = np.isin(values, held).astype(np.int64) - np.isin(values, trained)
        copies = number - int((sides == 0).sum())
    if fraction == 0:
        return Split(np.arange(number), empty, copies)
    wanted = max(1, math.floor(fraction * number + 0.5))
    order = groups[permutation(number, key=make_key("split", source.key))]
    _, first = np.unique(order, return_index=True)
    in_turn = order[np.sort(first)]
    free = in_turn[sides[in_turn] == 0]
    chosen = _fill(free, sizes[free], room=wanted - int(sizes[sides > 0].sum()), one=not (sides != 0).any())
    is_held = sides > 0
    is_held[chosen] = True
    validation = np.flatnonzero(is_held[groups])
    if len(validation) == number or (not len(validation) and not (sides != 0).any()):
        what = f"{number} document(s)" + (f" with {len(sizes)} different text(s)" if len(sizes) < number else "")
        raise InputError(
            f"data.validation_fraction={fraction}: {what} cannot be split in two; add documents or "
            "set data.validation_fraction=0 evaluate.every=0"
        )
    return Split(np.flatnonzero(~is_held[groups]), validation, copies)


def _fill(groups: NDArray[np.int64], sizes: NDArray[np.int64], *, room: int, one: bool) -> NDArray[np.int64]:
    """The first groups that have room together; the last group is never taken, one is in any case if it must be.

    Groups too large for the room are passed over: half a corpus may be copies of one document.
    """
    groups, sizes = groups[:-1] if one else groups, sizes[:-1] if one else sizes
    small = sizes <= room
    chosen = groups[small][np.cumsum(sizes[small]) <= room]
    return groups[np.argmin(sizes) :][:1] if one and not len(chosen) and len(groups) else chosen
