"""How a row of tokens is cut over the cp axis.

Slices are contiguous and equal, because KDA passes its state in order. Labels and document boundaries are made
on the whole row, before the cut, so a border changes neither: the last token of a slice keeps its label, and a
document that crosses a border stays one document.

    tokens      0 1 2 3 | 4 5 6 7 | 8 9 10 11       cp = 3, cu_seqlens = [0, 2, 9, 12]
    document    a a b b | b b b b | b c c  c
    position    0 1 0 1 | 2 3 4 5 | 6 0 1  2        inside the document: convolutions, rotary angles
    local       a b       b         b c             cu_seqlens [0, 2, 4], [0, 4], [0, 1, 4]
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from model.documents import Documents
from parallel.mesh import Axis


@dataclass(frozen=True)
class SlicedDocuments(Documents):
    """The documents of one rank's slice; ``position_BT`` counts from where each document really begins.

    cu_seqlens: offsets into the slice of the pieces of documents that lie in it.
    whole: the documents of the uncut row.
    start: first token of the slice.
    first_start: first token of the slice's first document, at most ``start``.
    last_stop: end of the slice's last document, at or after the end of the slice.
    """

    whole: Documents
    start: int
    first_start: int
    last_stop: int

    @property
    def length(self) -> int:
        """Tokens of a slice."""
        return self.position_BT.shape[1]

    @property
    def continued(self) -> int:
        """Leading tokens that belong to a document begun on an earlier rank."""
        return self.spans()[0][1] if self.first_start < self.start else 0

    @property
    def first_rank(self) -> int:
        """Rank on which the slice's first document begins."""
        return self.first_start // self.length

    @property
    def last_rank(self) -> int:
        """Rank on which the slice's last document ends."""
        return (self.last_stop - 1) // self.length


class TokenSlice(NamedTuple):
    """What a rank's forward pass reads: ids and labels [B, T] and their documents."""

    input_ids: Tensor
    labels: Tensor
    documents: Documents


def length_error(field: str, length: int, *, cp: int, tp: int = 1) -> str | None:
    """What is wrong with a length of ``length`` tokens, if anything; for a config's check before any step.

    Args:
        field: the name of the length.
        tp: tensor-parallel size, where the slices are cut once more for sequence parallel.
    """
    parts = cp * tp
    if length >= parts and length % parts == 0:
        return None
    below = length // parts * parts
    lengths = f"{below} or {below + parts}" if below else f"{parts}"
    remedy = " or ".join(name for name, size in (("parallel.cp", cp), ("parallel.tp", tp)) if size > 1)
    return (
        f"{field}={length}: must be a multiple of parallel.cp x parallel.tp = {cp} x {tp}, so that every rank gets "
        f"equally many tokens; use {lengths}, or another {remedy}"
    )


def slice_tokens(input_ids: Tensor, labels: Tensor, cu_seqlens: Tensor | None, *, axis: Axis) -> TokenSlice:
    """This rank's part of a microbatch; all of it on an axis of size 1.

    Args:
        input_ids: int64 [1, T]; on an axis of size 1 also [B, T] rows of one document each.
        labels: int64, as ``input_ids``: the next token of each position, made before the cut.
        cu_seqlens: int [N + 1] document boundaries over T; None: each row is one document.
        axis: cp.

    Raises:
        ValueError: T is not a multiple of the axis' size, several rows on more than one rank, or malformed
            ``cu_seqlens``.
    """
    batch, length = input_ids.shape
    if axis.size > 1:
        if batch != 1:
            raise ValueError(
                f"input_ids with {batch} rows: parallel.cp={axis.size} cuts a single row; flatten it to [1, B*T], with "
                "a boundary in cu_seqlens at every row"
            )
        error = length_error("tokens of a microbatch", length, cp=axis.size)
        if error is not None:
            raise ValueError(error)
    whole = Documents.of(batch, length, cu_seqlens, input_ids.device)
    if axis.size == 1:
        return TokenSlice(input_ids, labels, whole)
    size = length // axis.size
    start, stop = axis.rank * size, (axis.rank + 1) * size
    offsets = torch.tensor([0, length]) if whole.cu_seqlens is None else whole.cu_seqlens
    inside = torch.unique_consecutive(offsets.clamp(start, stop) - start)
    documents = SlicedDocuments(
        inside,
        whole.position_BT[:, start:stop],
        whole=whole,
        start=start,
        first_start=int(offsets[offsets <= start][-1]),
        last_stop=int(offsets[offsets >= stop][0]),
    )
    return TokenSlice(input_ids[:, start:stop], labels[:, start:stop], documents)
