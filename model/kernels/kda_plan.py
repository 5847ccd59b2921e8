"""Index plan of `kda_chunk`: which tokens make up a chunk, and which chunks run in one step of the recurrence.

Every document is padded to whole chunks; a batch is B documents. Chunks are ordered step-major:
first chunks of all documents, longest document first, then second chunks, ... so a step of the recurrence
is one slice and the documents still running are a prefix: batch and packed input are one path. Documents and
steps are grouped into segments that fit the cache, so working memory does not grow with B or T.

Shape letters: B batch, T tokens, H heads, D any width, C chunk, n chunks times heads.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Tokens, measured with tests/bench/kda.py. Longer chunks do more work inside, shorter ones more steps in
# order; longer segments fall out of the cache and touch fresh memory, shorter ones pay for more calls.
CHUNK = 32
SEGMENT_TOKENS = 512


def chunk_size(longest: int) -> int:
    """Tokens per chunk: one longer than the longest document would be padding only."""
    return min(CHUNK, 1 << max(longest - 1, 0).bit_length())


@dataclass(frozen=True)
class Segment:
    """Consecutive steps of the recurrence for neighbours in the order of documents.

    first_document: place in the order of the first of them.
    running: how many documents each step runs, from the first one on; one chunk of each.
    """

    first_document: int
    running: list[int]


@dataclass(frozen=True)
class Move:
    """Moves a segment's tokens between [B, T, H, .] tensors and chunks [n, C, .].

    shape: (n, C).
    read_from: int64 [n * C], place of each row of the chunks among the lines (B, T, H); 0 for padding.
    pad: bool [n * C, 1], or None if there is none.
    runs: neighbouring lines, first token and row of each: gathering into a run beats scattering from chunks.
    """

    shape: tuple[int, int]
    read_from: Tensor
    pad: Tensor | None
    runs: list[tuple[int, Tensor]]

    def read(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Contiguous [B, T, H, D] -> new [n, C, D]; padding is zero, whatever the memory around the tokens holds."""
        rows = x.view(-1, x.shape[-1]).index_select(0, self.read_from).to(dtype)
        if self.pad is not None:
            rows.masked_fill_(self.pad, 0)
        return rows.view(*self.shape, -1)

    def write(self, x: Tensor, to: Tensor) -> None:
        """[n, C, D] -> ``to``, contiguous [B, T, H, D]."""
        rows, lines = x.reshape(-1, x.shape[-1]).to(to.dtype), to.view(-1, x.shape[-1])
        heads = to.shape[2]
        for first, run in self.runs:
            torch.index_select(rows, 0, run, out=lines[first * heads : first * heads + len(run)])


@dataclass(frozen=True)
class Plan:
    """order: document numbers, longest first. moves: one for each segment."""

    order: Tensor
    segments: list[Segment]
    moves: list[Move]


class Plans:
    """The plans of one batch's documents, each made when it is first asked for: 16 T H bytes.

    Whoever describes the documents owns this object and hands it to every layer, since all layers share them.
    """

    def __init__(self) -> None:
        self._made: dict[tuple[tuple[int, ...], int, torch.device], Plan] = {}

    def get(self, offsets: tuple[int, ...], *, heads: int, device: torch.device) -> Plan:
        """The plan as `make_plan` makes it."""
        key = offsets, heads, device
        if key not in self._made:
            self._made[key] = make_plan(offsets, heads=heads, device=device)
        return self._made[key]

    def __len__(self) -> int:
        return len(self._made)


def make_plan(offsets: tuple[int, ...], *, heads: int, device: torch.device) -> Plan:
    """The plan of documents with these offsets into the tokens of all rows; its tensors lie on ``device``."""
    starts, stops = torch.tensor(offsets[:-1]), torch.tensor(offsets[1:])
    lengths, order = (stops - starts).sort(descending=True, stable=True)
    starts, stops = starts[order], stops[order]
    longest = int(lengths[0])
    chunk = chunk_size(longest)
    done = torch.arange(0, longest, chunk)
    segments, places, documents = [], [done[:0]], [done[:0]]
    together = SEGMENT_TOKENS // chunk
    for first_document in range(0, len(order), together):
        group = slice(first_document, first_document + together)
        running = len(lengths[group]) - torch.searchsorted(lengths[group].flip(0), done, right=True)
        running = running[running > 0]
        places.append(torch.repeat_interleave(done[: len(running)], running))
        document = torch.arange(len(places[-1])) - torch.repeat_interleave(running.cumsum(0) - running, running)
        documents.append(document + first_document)
        counts = running.tolist()
        while counts:
            steps = together // counts[0]
            segments.append(Segment(first_document, counts[:steps]))
            counts = counts[steps:]
    document = torch.cat(documents)
    sizes = [sum(segment.running) for segment in segments]
    token = (starts[document] + torch.cat(places)).unsqueeze(1) + torch.arange(chunk)
    moves = _moves(token, token >= stops[document].unsqueeze(1), sizes, heads, device) if segments else []
    return Plan(order.to(device), segments, moves)


def _moves(token: Tensor, pad: Tensor, sizes: list[int], heads: int, device: torch.device) -> list[Move]:
    """One for each segment of ``sizes`` chunks; made together, since what it costs is calls. ``token`` [chunks, C]
    numbers the tokens of all segments in order; where ``pad`` they lie past the end of their document."""
    head = torch.arange(heads).unsqueeze(1)
    read_from = (token.masked_fill(pad, 0).unsqueeze(1) * heads + head).to(device)
    pads = pad.unsqueeze(1).expand(-1, heads, -1).to(device)
    padded = bool(pad.any())
    return [
        Move((size * heads, token.shape[1]), read.flatten(), pad.reshape(-1, 1) if padded else None, runs)
        for size, read, pad, runs in zip(
            sizes, read_from.split(sizes), pads.split(sizes), _runs(token, pad, sizes, heads, device)
        )
    ]


def _runs(
    token: Tensor, pad: Tensor, sizes: list[int], heads: int, device: torch.device
) -> list[list[tuple[int, Tensor]]]:
    """`Move.runs` of each segment: rows in order of their token, cut where a neighbour is missing."""
    counts = torch.tensor(sizes)
    segment_of = torch.repeat_interleave(torch.arange(len(sizes)), counts)
    at, column = (~pad).nonzero().unbind(1)
    # A stride between segments that leaves a gap between the last token of one and the first of the next.
    place, order = (segment_of[at] * (int(token.max()) + 2) + token[at, column]).sort()
    at, column = at[order], column[order]
    local = at - (counts.cumsum(0) - counts)[segment_of[at]]
    rows = ((local.unsqueeze(1) * heads + torch.arange(heads)) * token.shape[1] + column.unsqueeze(1)).to(device)
    cuts = (place.diff() != 1).nonzero().flatten() + 1
    firsts = torch.cat([cuts.new_zeros(1), cuts])
    runs: list[list[tuple[int, Tensor]]] = [[] for _ in sizes]
    owners, tokens = segment_of[at[firsts]].tolist(), token[at[firsts], column[firsts]].tolist()
    for owner, first, run in zip(owners, tokens, rows.tensor_split(cuts)):
        runs[owner].append((first, run.flatten()))
    return runs
