"""Kimi Delta Attention in chunks: the same function as `kda_reference`, as matrix products.

Inside a chunk of C tokens that starts from the state S, with Gamma_i the decay from the chunk's start to token
i (technical report 2.1.1, rearranged):

    P = Tril[(Gamma Q)(K / Gamma)^T]         L = StrictTril[(Gamma K)(K / Gamma)^T]
    E = (I + L Diag(beta))^-1 (V - (Gamma K) S)                                   errors to correct, [C, V]
    O = (Gamma Q) S + P Diag(beta) E         S' = Diag(Gamma_C) S + (K Gamma_C / Gamma)^T Diag(beta) E

Everything without S, and everything after S is known, is batched over all chunks and heads. Only the part of S
in E, and S', run in order: two products per chunk.

**Decay without overflow.** 1/Gamma overflows, so it never appears. The lower triangle is cut as a binary
tree: blocks of 2, 4, ... C tokens, each contributing the square of its right half (rows) against its left
half (columns), with the decay taken relative to the block's middle:

      token  0 1 2 3 4 5 6 7
        1    1                      row i:     decay from the middle to i
        2    2 2                    column j:  decay after j to the middle
        3    2 2 1
        4    4 4 4 4                Both are products of alphas, at most 1, and going up a level multiplies
        5    4 4 4 4 1              half of them by the decay of the other half. Nothing overflows, nothing
        6    4 4 4 4 2 2            cancels, so any gate down to -inf is exact; and a row depends on its
        7    4 4 4 4 2 2 1          own past only, so outputs are causal to the bit.

The triangular inverse comes by substitution and not as a power series, hence stable for repeated keys.

**Layout.** Every document is padded to whole chunks; a batch is B documents. Chunks are ordered step-major:
first chunks of all documents, longest document first, then second chunks, ... so a step of the recurrence
is one slice and the documents still running are a prefix: batch and packed input are one path. Documents and
steps are grouped into segments that fit the cache, so working memory does not grow with B or T.

**Kept for backward**, which walks the segments in reverse: the state at each chunk's start, P, L, the inverse and
E, so K V / C + 3 C + V numbers a token and head. The decays are cheaper to compute again than to keep.
Large temporaries are dropped as soon as they are used: in a pass bound by memory, touching a fresh page costs
more than filling it.

Shape letters: B batch, T tokens, H heads, K key, V value, C chunk, n chunks times heads.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.kernels.kda_reference import check_kda_inputs

# Tokens, measured with tests/bench/kda.py. Longer chunks do more work inside, shorter ones more steps in
# order; longer segments fall out of the cache and touch fresh memory, shorter ones pay for more calls.
CHUNK = 32
SEGMENT_TOKENS = 512


def kda_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `kda_reference`: arguments, results, errors and gradients.

    Kept for backward: the inputs, and for each chunk its starting state, scores, inverse and errors. On CUDA
    the kernels of flash-linear-attention run where it is installed, except in fp64, which they do not compute.
    """
    offsets, dtype = check_kda_inputs(q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    batch, length, heads, key = q.shape
    scale = key**-0.5 if scale is None else scale
    if q.is_cuda and dtype == torch.float32 and importlib.util.find_spec("fla") is not None:
        from fla.ops.kda import chunk_kda

        o, final_state = chunk_kda(
            q,
            k,
            v,
            g,
            beta,
            scale=scale,
            initial_state=None if initial_state is None else initial_state.float(),
            output_final_state=True,
            cu_seqlens=None if cu_seqlens is None else cu_seqlens.to(q.device, torch.int64),
        )
        return o.to(v.dtype), final_state
    if offsets is None:
        offsets = [row * length for row in range(batch + 1)]
    if initial_state is None:
        initial_state = q.new_zeros(len(offsets) - 1, heads, key, v.shape[-1], dtype=dtype)
    return _ChunkKDA.apply(q, k, v, g, beta, initial_state, scale, offsets, dtype)


@dataclass(frozen=True)
class _Segment:
    """Consecutive steps of the recurrence for neighbours in the order of documents.

    first_document: place in the order of the first of them.
    starts, stops: int64 [chunks], first token of each chunk and end of its document.
    running: how many documents each step runs, from the first one on; one chunk of each.
    """

    first_document: int
    starts: Tensor
    stops: Tensor
    running: list[int]


@dataclass(frozen=True)
class _Plan:
    """order: document numbers, longest first. chunk: tokens per chunk, a power of two."""

    order: Tensor
    chunk: int
    segments: list[_Segment]


def _plan(offsets: list[int]) -> _Plan:
    starts, stops = torch.tensor(offsets[:-1]), torch.tensor(offsets[1:])
    lengths, order = (stops - starts).sort(descending=True, stable=True)
    starts, stops = starts[order], stops[order]
    longest = int(lengths[0])
    # A chunk longer than the longest document would be padding only.
    chunk = min(CHUNK, 1 << max(longest - 1, 0).bit_length())
    done = torch.arange(0, longest, chunk)
    segments = []
    together = SEGMENT_TOKENS // chunk
    for first_document in range(0, len(order), together):
        group = slice(first_document, first_document + together)
        running = len(lengths[group]) - torch.searchsorted(lengths[group].flip(0), done, right=True)
        running = running[running > 0]
        first = 0
        while first < len(running):
            count = running[first : first + together // int(running[first])]
            at = torch.repeat_interleave(done[first : first + len(count)], count)
            document = torch.arange(len(at)) - torch.repeat_interleave(count.cumsum(0) - count, count)
            document += first_document
            segments.append(_Segment(first_document, starts[document] + at, stops[document], count.tolist()))
            first += len(count)
    return _Plan(order, chunk, segments)


class _Rows:
    """Moves a segment's tokens between [B, T, H, .] tensors and chunks [n, C, .]."""

    def __init__(self, segment: _Segment, chunk: int, heads: int, device: torch.device) -> None:
        token = segment.starts.unsqueeze(1) + torch.arange(chunk)
        pad = token >= segment.stops.unsqueeze(1)
        self.shape = len(token) * heads, chunk
        head = torch.arange(heads).view(1, heads, 1)
        self.read_from = (token.masked_fill(pad, 0).unsqueeze(1) * heads + head).flatten().to(device)
        self.pad = None
        if bool(pad.any()):
            self.pad = pad.unsqueeze(1).expand(-1, heads, -1).reshape(-1, 1).to(device)
        # Tokens in order of their place, in runs of neighbours: gathering into a run beats scattering from chunks.
        place, at = token[~pad].sort()
        row, column = (~pad).nonzero()[at].unbind(1)
        rows = ((row.unsqueeze(1) * heads + torch.arange(heads)) * chunk + column.unsqueeze(1)).to(device)
        gaps = (place.diff() != 1).nonzero().flatten() + 1
        firsts = place[torch.cat([gaps.new_zeros(1), gaps])].tolist()
        self.runs = [(first, run.flatten()) for first, run in zip(firsts, rows.tensor_split(gaps))]

    def read(self, x: Tensor, *, out: Tensor) -> Tensor:
        """Contiguous [B, T, H, D] -> [n, C, D]; padding is zero, whatever the memory around the tokens holds."""
        to = out.view(-1, *out.shape[2:])
        if x.dtype == out.dtype:
            torch.index_select(x.view(-1, x.shape[-1]), 0, self.read_from, out=to)
        else:
            to.copy_(x.view(-1, x.shape[-1]).index_select(0, self.read_from))
        if self.pad is not None:
            to.masked_fill_(self.pad, 0)
        return out

    def write(self, x: Tensor, to: Tensor) -> None:
        """[n, C, D] -> ``to``, contiguous [B, T, H, D]."""
        rows, lines = x.reshape(-1, x.shape[-1]).to(to.dtype), to.view(-1, x.shape[-1])
        heads = to.shape[2]
        for first, run in self.runs:
            torch.index_select(rows, 0, run, out=lines[first * heads : first * heads + len(run)])


@dataclass(frozen=True)
class _Level:
    """One level of the tree: blocks of 2 half tokens, m of them over all chunks."""

    half: int
    rows: Tensor  # [m, 2 half, K]: q and k (alternating) of the right half, decayed from the middle
    columns: Tensor  # [m, half, K]: k of the left half, decayed to the middle
    left: Tensor  # [m, 1, K]: decay through the left half
    right: Tensor  # [m, 1, K]: decay through the right half


def _climb(alpha: Tensor, reads: Tensor, writes: Tensor) -> Iterator[_Level]:
    """The levels from small blocks to large, as views of ``reads`` [n, C, 2, K] and ``writes`` [n, C, K], which
    every step overwrites: relative to blocks of ``half`` tokens, rows are decayed from the start of their block
    and columns to its end. They begin as Gamma Q, Gamma K and K of single tokens, and end as those of chunks."""
    key = alpha.shape[-1]
    through = alpha
    half = 1
    while half < alpha.shape[1]:
        left, right = through.view(-1, 2, 1, key).unbind(1)
        rows, columns = reads.view(-1, 2, 2 * half, key)[:, 1], writes.view(-1, 2, half, key)[:, 0]
        yield _Level(half, rows, columns, left, right)
        rows *= left
        columns *= right
        through = left * right
        half *= 2


def _blocks(matrix: Tensor, half: int, row: int, column: int) -> Tensor:
    """The quarter (row, column) of every diagonal block of 2 half tokens, a view: contiguous [n, C, ..., C]
    -> [n, C / (2 half), half, ..., half]."""
    n, chunk, *middle, _ = matrix.shape
    outer, line, *strides = matrix.stride()
    return matrix.as_strided(
        (n, chunk // (2 * half), half, *middle, half),
        (outer, 2 * half * (line + 1), line, *strides),
        matrix.storage_offset() + half * (row * line + column),
    )


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Batched a @ b; elementwise for the single tokens of the lowest level, which `torch.bmm` does one by one."""
    if a.shape[1] * a.shape[2] > 2:
        return torch.bmm(a, b)
    return (a.mT * b).sum(1, keepdim=True) if a.shape[1] == 1 else a * b


@dataclass(frozen=True)
class _Inputs:
    """A segment's inputs in chunks."""

    x: Tensor  # [n, C, 2, K]: q and k, alternating
    beta: Tensor  # [n, C, 1]
    alpha: Tensor  # [n, C, K]: exp(g)
    through: Tensor  # [n, K, 1]: Gamma_C

    @staticmethod
    def read(rows: _Rows, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, dtype: torch.dtype) -> "_Inputs":
        n, chunk = rows.shape
        key = q.shape[-1]
        x = q.new_empty(n, chunk, 2, key, dtype=dtype)
        rows.read(q, out=x[:, :, 0])
        rows.read(k, out=x[:, :, 1])
        g = rows.read(g, out=x.new_empty(n, chunk, key))
        beta = rows.read(beta, out=x.new_empty(n, chunk, 1))
        # Not the product of alphas: over many chunks its rounding would add up in the slowest channels.
        through = g.sum(1).exp_().unsqueeze(-1)
        return _Inputs(x, beta, g.exp_(), through)

    def start(self) -> tuple[Tensor, Tensor]:
        """Where `_climb` starts: reads [n, C, 2, K] and writes [n, C, K]."""
        return self.x * self.alpha.unsqueeze(2), self.x[:, :, 1].clone()


@dataclass(frozen=True)
class _Saved:
    """What forward keeps of a segment, beside the inputs."""

    scores: Tensor  # [n, C, 2, C]: P and L
    inverse: Tensor  # [n, C, C]: (I + L Diag(beta))^-1
    error: Tensor  # [n, C, V]: E
    starts: Tensor  # [n, K, V]: the state before each chunk


def _run_states(
    segment: _Segment, erase: Tensor, writes: Tensor, through: Tensor, error: Tensor, state: Tensor
) -> Tensor:
    """The recurrence over the segment's steps. ``state`` [documents, H, K, V] is advanced in place, ``error``
    goes from its value for S = 0 to E in place; returns the state at the start of each chunk, [n, K, V]."""
    heads = state.shape[1]
    sizes = [count * heads for count in segment.running]
    state = state.view(-1, *state.shape[2:])
    starts = state.new_empty(len(error), *state.shape[1:])
    per_step = (x.split(sizes) for x in (starts, error, erase, writes.mT, through))
    following = [*starts.split(sizes)[1:], starts[:0]]
    starts[: sizes[0]] = state[: sizes[0]]
    for after, (start, new, rows, columns, decay) in zip(following, zip(*per_step)):
        new.baddbmm_(rows, start, alpha=-1)
        going, size = len(after), len(start)
        if going == size:
            torch.mul(start, decay, out=after).baddbmm_(columns, new)
        else:
            end = (start * decay).baddbmm_(columns, new)
            after.copy_(end[:going])
            state[going:size] = end[going:]
    return starts


def _run_states_back(
    segment: _Segment,
    erase: Tensor,
    writes: Tensor,
    through: Tensor,
    grad_error: Tensor,
    by_output: Tensor,
    grad_state: Tensor,
) -> Tensor:
    """The adjoint of `_run_states`: ``grad_state`` goes from the segment's end to its start in place,
    ``grad_error`` from the outputs' part of dE to the whole; ``by_output`` [n, K, V] is the outputs' part of
    the gradient of each chunk's starting state. Returns the gradient of the state at the end of each chunk."""
    heads = grad_state.shape[1]
    sizes = [count * heads for count in segment.running]
    grad_state = grad_state.view(-1, *grad_state.shape[2:])
    ends = torch.empty_like(by_output)
    ends[len(ends) - sizes[-1] :] = grad_state[: sizes[-1]]
    per_step = [x.split(sizes) for x in (ends, grad_error, by_output, erase.mT, writes, through)]
    before = [grad_state[: sizes[0]], *per_step[0][:-1]]
    for start, (end, new, output, rows, columns, decay) in zip(reversed(before), reversed(list(zip(*per_step)))):
        new.baddbmm_(columns, end)
        size = len(end)
        torch.addcmul(output, end, decay, out=start[:size]).baddbmm_(rows, new, alpha=-1)
        if size < len(start):
            start[size:] = grad_state[size : len(start)]
    return ends


def _forward_segment(
    segment: _Segment, inputs: _Inputs, v: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, _Saved]:
    """Outputs [n, C, V]; advances ``state`` in place."""
    x, beta = inputs.x, inputs.beta
    n, chunk, _, _ = x.shape
    scores = x.new_zeros(n, chunk, 2, chunk)
    scores[:, :, 0].diagonal(dim1=1, dim2=2).copy_((x[:, :, 0] * x[:, :, 1]).sum(-1))
    reads, writes = inputs.start()
    for level in _climb(inputs.alpha, reads, writes):
        block = torch.bmm(level.columns, level.rows.mT).mT
        _blocks(scores, level.half, 1, 0).copy_(block.view(n, -1, level.half, 2, level.half))
    identity = torch.eye(chunk, dtype=x.dtype, device=x.device).expand(n, -1, -1)
    inverse = torch.linalg.solve_triangular(scores[:, :, 1] * beta.mT, identity, upper=False, unitriangular=True)
    writes *= beta
    erase = torch.bmm(inverse, reads[:, :, 1])
    error = torch.bmm(inverse, v)
    starts = _run_states(segment, erase, writes, inputs.through, error, state)
    o = torch.bmm(scores[:, :, 0] * beta.mT, error)
    o.baddbmm_(reads[:, :, 0], starts, beta=scale, alpha=scale)
    return o, _Saved(scores, inverse, error, starts)


def _backward_segment(
    segment: _Segment, inputs: _Inputs, saved: _Saved, grad_rows: Tensor, grad_state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, beta in chunks; ``grad_state`` goes from end to start in place. ``grad_rows``
    [n, C, 2, V] alternates dO times the scale, and room for -dV.

    With R = V - (Gamma K) S, E = (I + L Diag(beta))^-1 R and N = Diag(beta) E:
    dV = (I + L Diag(beta))^-T dE, and the rows Y = [dO; -dV] of the reads q and k give the gradients Y S^T of
    Gamma Q and Gamma K, and Y E^T of P Diag(beta) and L Diag(beta).
    """
    x, beta = inputs.x, inputs.beta
    n, chunk, _, key = x.shape
    reads, writes = inputs.start()
    levels = [
        replace(level, rows=level.rows.clone(), columns=level.columns.clone())
        for level in _climb(inputs.alpha, reads, writes)
    ]
    grad_o = grad_rows[:, :, 0]
    grad_error = torch.bmm((saved.scores[:, :, 0] * beta.mT).mT, grad_o)
    by_output = torch.bmm(reads[:, :, 0].mT, grad_o)
    erase = torch.bmm(saved.inverse, reads[:, :, 1])
    del reads
    ends = _run_states_back(segment, erase, writes * beta, inputs.through, grad_error, by_output, grad_state)
    grad_through = inputs.through.squeeze(-1) * torch.mul(saved.starts, ends, out=by_output).sum(-1)
    del erase, by_output
    grad_v = torch.bmm(saved.inverse.mT, grad_error)
    del grad_error
    torch.neg(grad_v, out=grad_rows[:, :, 1])

    grad_rows = grad_rows.view(n, 2 * chunk, -1)
    grad_scores = torch.bmm(grad_rows, saved.error.mT).view(n, chunk, 2, chunk)
    by_row = torch.bmm(grad_rows, saved.starts.mT).view(n, chunk, 2, key)
    by_column = torch.bmm(saved.error, ends.mT)
    del ends
    writes *= by_column
    grad_beta = (grad_scores * saved.scores).sum((1, 2)).add_(writes.sum(-1))
    grad_through += torch.bmm(beta.mT, writes).squeeze(1)
    grad_scores *= beta.view(n, 1, 1, chunk)
    by_column *= beta
    _descend(levels, grad_scores, by_row, by_column)
    by_row *= inputs.alpha.unsqueeze(2)

    # A decay exp(G_i - G_j) of row i and column j gives to G_i what the row gets and takes from G_j what the
    # column gets, so the gradient of G needs only what is at hand; the chunk's end is one more row.
    q, k = x.unbind(2)
    by_q, by_k = by_row.unbind(2)
    grad_sum = (q * by_q).addcmul_(k, by_k - by_column)
    grad_sum[:, -1] += grad_through
    # Every G_i is a sum over g_1 ... g_i; as a product, since cumsum along a strided dim is slow.
    grad_g = torch.matmul(torch.ones(chunk, chunk, dtype=x.dtype, device=x.device).triu_(), grad_sum)

    own = grad_scores[:, :, 0].diagonal(dim1=1, dim2=2).unsqueeze(-1)
    grad_q = torch.addcmul(by_q, own, k)
    grad_k = by_column.add_(by_k).addcmul_(own, q)
    return grad_q, grad_k, grad_v, grad_g, grad_beta


def _descend(levels: list[_Level], grad_scores: Tensor, by_row: Tensor, by_column: Tensor) -> None:
    """Adjoint of `_climb`: from gradients of the rows and columns relative to the chunk to those relative to
    single tokens, in place, taking in on the way what P and L (but P's diagonal) give."""
    key = by_column.shape[-1]
    while levels:
        level = levels.pop()
        half = level.half
        row, column = by_row.view(-1, 2, 2 * half, key)[:, 1], by_column.view(-1, 2, half, key)[:, 0]
        block = _blocks(grad_scores, half, 1, 0).reshape(-1, 2 * half, half)
        torch.addcmul(_product(block, level.columns), row, level.left, out=row)
        torch.addcmul(_product(block.mT, level.rows), column, level.right, out=column)


class _ChunkKDA(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor,
        scale: float,
        offsets: list[int],
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        heads = q.shape[2]
        plan = _plan(offsets)
        order = plan.order.to(q.device)
        state = initial_state.to(dtype)[order]
        o = torch.empty_like(v, memory_format=torch.contiguous_format)
        q_, k_, v_, g_, beta_ = (x.contiguous() for x in (q, k, v, g, beta.unsqueeze(-1)))
        moves = [_Rows(segment, plan.chunk, heads, q.device) for segment in plan.segments]
        saved: list[Tensor] = []
        with torch.autocast(q.device.type, enabled=False):
            for segment, rows in zip(plan.segments, moves):
                inputs = _Inputs.read(rows, q_, k_, g_, beta_, dtype)
                v_chunks = rows.read(v_, out=inputs.x.new_empty(*rows.shape, v.shape[-1]))
                o_chunks, kept = _forward_segment(segment, inputs, v_chunks, state[segment.first_document :], scale)
                rows.write(o_chunks, o)
                saved += [kept.scores, kept.inverse, kept.error, kept.starts]
        ctx.save_for_backward(q, k, v, g, beta, *saved)
        ctx.plan, ctx.moves, ctx.scale, ctx.dtype, ctx.state_dtype = plan, moves, scale, dtype, initial_state.dtype
        final_state = torch.empty_like(state)
        final_state[order] = state
        return o, final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_o: Tensor, grad_final_state: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, *saved = ctx.saved_tensors
        order = ctx.plan.order.to(q.device)
        grad_state = grad_final_state.to(ctx.dtype)[order]
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v, g, beta.unsqueeze(-1))]
        q, k, g, beta, grad_o = (x.contiguous() for x in (q, k, g, beta.unsqueeze(-1), grad_o))
        with torch.autocast(q.device.type, enabled=False):
            for index in reversed(range(len(ctx.moves))):
                segment, rows = ctx.plan.segments[index], ctx.moves[index]
                inputs = _Inputs.read(rows, q, k, g, beta, ctx.dtype)
                grad_rows = inputs.x.new_empty(*rows.shape, 2, v.shape[-1])
                rows.read(grad_o, out=grad_rows[:, :, 0]).mul_(ctx.scale)
                kept = _Saved(*saved[4 * index : 4 * index + 4])
                by_chunk = _backward_segment(segment, inputs, kept, grad_rows, grad_state[segment.first_document :])
                for grad, to in zip(by_chunk, grads):
                    rows.write(grad.view(*rows.shape, -1), to)
        grad_initial = torch.empty_like(grad_state)
        grad_initial[order] = grad_state
        *grads, grad_beta = grads
        return *grads, grad_beta.squeeze(-1), grad_initial.to(ctx.state_dtype), None, None, None
