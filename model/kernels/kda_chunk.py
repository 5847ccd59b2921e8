"""Kimi Delta Attention in chunks: the same function as `kda_reference`, as matrix products.

Inside a chunk of C tokens that starts from the state S, with Gamma_i the decay from the chunk's start to token
i (technical report 2.1.1, rearranged):

    P = Tril[(Gamma Q)(K / Gamma)^T]         L = StrictTril[(Gamma K)(K / Gamma)^T]
    M = (I + Diag(beta) L)^-1 Diag(beta)     N = M (V - (Gamma K) S)          what is written, [C, V]
    O = (Gamma Q) S + P N                    S' = Diag(Gamma_C) S + (K Gamma_C / Gamma)^T N

Everything without S, and everything after S is known, is batched over all chunks and heads. Only
``N = M V - M (Gamma K) S`` and ``S'`` run in order: two products per chunk.

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

The triangular inverse is built on the same tree (the block formula for [[A, 0], [B, D]]), which is a
substitution and not a power series, hence stable for repeated keys.

**Layout.** Every document is padded to whole chunks; a batch is B documents. Chunks are ordered step-major:
first chunks of all documents, longest document first, then second chunks, ... so a step of the recurrence
is one slice and the documents still running are a prefix: batch and packed input are one path. Documents and
steps are grouped into segments that fit the cache, so working memory does not grow with B or T. Forward keeps
the state at each chunk's start; backward walks the segments in reverse and recomputes the inside of the chunks.

Shape letters: B batch, T tokens, H heads, K key, V value, C chunk, n chunks times heads.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.kernels.kda_reference import check_kda_inputs

# Tokens, measured with tests/bench/kda.py. Longer chunks do more work inside, shorter ones more steps in
# order; longer segments fall out of the cache, shorter ones pay for more calls.
CHUNK = 32
SEGMENT_TOKENS = 1024


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

    Kept for backward: the inputs and the state at the start of each chunk. On CUDA the kernels of
    flash-linear-attention run where it is installed, except in fp64, which they do not compute.
    """
    offsets, dtype = check_kda_inputs(q, k, v, g, beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    batch, length, heads, key = q.shape
    scale = key**-0.5 if scale is None else scale
    if q.is_cuda and dtype == torch.float32:
        try:
            from fla.ops.kda import chunk_kda
        except ImportError:
            pass
        else:
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

    def __init__(self, segment: _Segment, chunk: int, tokens: int, heads: int, device: torch.device) -> None:
        token = segment.starts.unsqueeze(1) + torch.arange(chunk)
        pad = token >= segment.stops.unsqueeze(1)
        self.shape = len(token) * heads, chunk
        head = torch.arange(heads).view(1, heads, 1)
        # Past the end lies one spare row of tokens, where padding may be written.
        rows = token.masked_fill(pad, tokens).unsqueeze(1) * heads + head
        self.write_to = rows.flatten().to(device)
        self.pad = None
        self.read_from = self.write_to
        if bool(pad.any()):
            self.pad = pad.unsqueeze(1).expand_as(rows).reshape(-1, 1).to(device)
            self.read_from = self.write_to.masked_fill(self.pad.squeeze(1), 0)

    def read(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, T, H, D] -> [n, C, D]; padding is zero, whatever the memory around the tokens holds."""
        rows = x.reshape(-1, x.shape[-1]).index_select(0, self.read_from).to(dtype)
        if self.pad is not None:
            rows.masked_fill_(self.pad, 0)
        return rows.view(*self.shape, -1)

    def write(self, x: Tensor, to: Tensor) -> None:
        """[n, C, D] -> ``to``, [B * T + 1, H, D]."""
        to.view(-1, to.shape[-1]).index_copy_(0, self.write_to, x.reshape(-1, x.shape[-1]).to(to.dtype))


@dataclass(frozen=True)
class _Level:
    """One level of the tree, kept for backward: blocks of 2 half tokens, m of them over all chunks."""

    half: int
    rows: Tensor  # [m, 2 half, K]: q and k (alternating) of the right half, decayed from the middle
    columns: Tensor  # [m, half, K]: k of the left half, decayed to the middle
    left: Tensor  # [m, 1, K]: decay through the left half
    right: Tensor  # [m, 1, K]: decay through the right half


@dataclass(frozen=True)
class _Inside:
    """What a chunk computes without the state; in the comments, the names of the module's docstring."""

    levels: list[_Level]  # from small blocks to large; only if asked for
    scores: Tensor  # [n, C, 2, C]: P and L
    inverse: Tensor  # [n, C, C]: (I + L Diag(beta))^-1
    reads: Tensor  # [n, C, 2, K]: Gamma Q and Gamma K
    writes: Tensor  # [n, C, K]: K Gamma_C / Gamma
    through: Tensor  # [n, K, 1]: Gamma_C
    alpha: Tensor  # [n, C, K]: exp(g)
    erase: Tensor  # [n, C, K]: M (Gamma K)


def _inside(x: Tensor, g: Tensor, beta: Tensor, *, keep_levels: bool) -> _Inside:
    """x [n, C, 2, K] alternates q and k, g [n, C, K], beta [n, C]."""
    n, chunk, _, key = x.shape
    scores = x.new_zeros(n, chunk, 2, chunk)
    scores[:, :, 0].diagonal(dim1=1, dim2=2).copy_((x[:, :, 0] * x[:, :, 1]).sum(-1))
    inverse = torch.eye(chunk, dtype=x.dtype, device=x.device).repeat(n, 1, 1)
    # Relative to blocks of `half` tokens: rows decayed from the start of their block, columns to its end.
    through = alpha = g.exp()
    reads = x * alpha.unsqueeze(2)
    writes = x[:, :, 1].clone()
    levels = []
    half = 1
    while half < chunk:
        left, right = through.view(-1, 2, 1, key).unbind(1)
        rows, columns = reads.view(-1, 2, 2 * half, key)[:, 1], writes.view(-1, 2, half, key)[:, 0]
        block = torch.bmm(rows, columns.mT).view(n, -1, half, 2, half)
        _blocks(scores, half, 1, 0).copy_(block)
        lower = block[..., 1, :] * beta.view(n, -1, 2, half)[:, :, :1]
        first, second = _blocks(inverse, half, 0, 0), _blocks(inverse, half, 1, 1)
        _blocks(inverse, half, 1, 0).copy_((second @ lower @ first).neg_())
        if keep_levels:
            levels.append(_Level(half, rows.clone(), columns.clone(), left, right))
        rows *= left
        columns *= right
        through = left * right
        half *= 2
    erase = torch.bmm(inverse, reads[:, :, 1]).mul_(beta.unsqueeze(-1))
    # Not the product above: over many chunks its rounding would add up in the slowest channels.
    return _Inside(levels, scores, inverse, reads, writes, g.sum(1).exp_().unsqueeze(-1), alpha, erase)


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


def _run_states(segment: _Segment, inside: _Inside, written: Tensor, state: Tensor) -> Tensor:
    """The recurrence over the segment's steps. ``state`` [documents, H, K, V] is advanced in place, ``written``
    goes from M V to N in place; returns the state at the start of each chunk, [n, K, V]."""
    heads = state.shape[1]
    sizes = [count * heads for count in segment.running]
    state = state.view(-1, *state.shape[2:])
    per_step = (x.split(sizes) for x in (written, inside.erase, inside.writes.mT, inside.through))
    start = state[: sizes[0]].clone()
    starts = []
    for following, (new, erase, writes, through) in zip([*sizes[1:], 0], zip(*per_step)):
        starts.append(start)
        new.baddbmm_(erase, start, alpha=-1)
        end = (start * through).baddbmm_(writes, new)
        if following < len(end):
            state[following : len(end)] = end[following:]
        start = end[:following]
    return torch.cat(starts)


def _run_states_back(
    segment: _Segment, inside: _Inside, grad_written: Tensor, by_output: Tensor, grad_state: Tensor
) -> Tensor:
    """The adjoint of `_run_states`: ``grad_state`` goes from the segment's end to its start in place,
    ``grad_written`` from the outputs' part of dN to the whole; ``by_output`` [n, K, V] is the outputs' part of
    the gradient of each chunk's starting state. Returns the gradient of the state at the end of each chunk."""
    heads = grad_state.shape[1]
    sizes = [count * heads for count in segment.running]
    grad_state = grad_state.view(-1, *grad_state.shape[2:])
    tensors = grad_written, by_output, inside.erase.mT, inside.writes, inside.through
    per_step = (reversed(x.split(sizes)) for x in tensors)
    end = grad_state[:0]
    ends = []
    for new, output, erase, writes, through in zip(*per_step):
        if len(end) < len(new):
            end = torch.cat([end, grad_state[len(end) : len(new)]])
        ends.append(end)
        new.baddbmm_(writes, end)
        end = torch.addcmul(output, end, through).baddbmm_(erase, new, alpha=-1)
    grad_state[: sizes[0]] = end
    return torch.cat(ends[::-1])


def _forward_segment(
    segment: _Segment, x: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs [n, C, V] and starting states [n, K, V] of a segment; advances ``state`` in place."""
    inside = _inside(x, g, beta, keep_levels=False)
    written = torch.bmm(inside.inverse, v).mul_(beta.unsqueeze(-1))
    starts = _run_states(segment, inside, written, state)
    o = torch.bmm(inside.scores[:, :, 0], written)
    return o.baddbmm_(inside.reads[:, :, 0], starts), starts


def _backward_segment(
    segment: _Segment,
    x: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    starts: Tensor,
    grad_o: Tensor,
    grad_state: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q (scaled), k, v, g, beta in chunks; ``grad_state`` goes from end to start in place.

    With R = V - (Gamma K) S, E = (I + L Diag(beta))^-1 R and N = Diag(beta) E:
    dV = (I + L Diag(beta))^-T Diag(beta) dN, and the rows Y = [dO; -dV] of the reads q and k give the
    gradients Y S^T of Gamma Q and Gamma K, and Y N^T = Y E^T Diag(beta) of P and L.
    """
    inside = _inside(x, g, beta, keep_levels=True)
    n, chunk, _, key = x.shape
    scores, lower = inside.scores.unbind(2)
    step = beta.unsqueeze(-1)
    error = torch.bmm(inside.inverse, torch.baddbmm(v, inside.reads[:, :, 1], starts, alpha=-1))
    written = step * error

    grad_written = torch.bmm(scores.mT, grad_o)
    by_output = torch.bmm(inside.reads[:, :, 0].mT, grad_o)
    ends = _run_states_back(segment, inside, grad_written, by_output, grad_state)
    grad_v = torch.bmm(inside.inverse.mT, step * grad_written)
    grad_rows = grad_o.new_empty(n, chunk, 2, grad_o.shape[-1])
    grad_rows[:, :, 0] = grad_o
    torch.neg(grad_v, out=grad_rows[:, :, 1])
    grad_rows = grad_rows.view(n, 2 * chunk, -1)

    grad_scores = torch.bmm(grad_rows, error.mT).view(n, chunk, 2, chunk)
    grad_beta = (grad_written * error).sum(-1) + (grad_scores[:, :, 1] * lower).sum(1)
    grad_scores *= beta.view(n, 1, 1, chunk)
    by_row = torch.bmm(grad_rows, starts.mT).view(n, chunk, 2, key)
    by_column = torch.bmm(written, ends.mT)
    grad_through = (inside.writes * by_column).sum(1) + inside.through.squeeze(-1) * (starts * ends).sum(-1)
    _descend(inside.levels, grad_scores, by_row, by_column)
    by_row *= inside.alpha.unsqueeze(2)

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
    grad_k = torch.addcmul(by_k, own, q).add_(by_column)
    return grad_q, grad_k, grad_v, grad_g, grad_beta


def _descend(levels: list[_Level], grad_scores: Tensor, by_row: Tensor, by_column: Tensor) -> None:
    """Adjoint of the climb in `_inside`: from gradients of the rows and columns relative to the chunk to those
    relative to single tokens, in place, taking in on the way what P and L (but P's diagonal) give."""
    key = by_column.shape[-1]
    for level in reversed(levels):
        half = level.half
        row, column = by_row.view(-1, 2, 2 * half, key)[:, 1], by_column.view(-1, 2, half, key)[:, 0]
        block = _blocks(grad_scores, half, 1, 0).reshape(-1, 2 * half, half)
        torch.addcmul(_product(block, level.columns), row, level.left, out=row)
        torch.addcmul(_product(block.mT, level.rows), column, level.right, out=column)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Batched a @ b; elementwise for the single tokens of the lowest level, which `torch.bmm` does one by one."""
    if a.shape[1] * a.shape[2] > 2:
        return torch.bmm(a, b)
    return (a.mT * b).sum(1, keepdim=True) if a.shape[1] == 1 else a * b


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
        batch, length, heads, _ = q.shape
        plan = _plan(offsets)
        order = plan.order.to(q.device)
        state = initial_state.to(dtype)[order]
        o = v.new_empty(batch * length + 1, heads, v.shape[-1])
        states = []
        with torch.autocast(q.device.type, enabled=False):
            for segment in plan.segments:
                rows = _Rows(segment, plan.chunk, batch * length, heads, q.device)
                inputs = _read_inputs(rows, q, k, v, g, beta, scale, dtype)
                o_chunks, starts = _forward_segment(segment, *inputs, state[segment.first_document :])
                rows.write(o_chunks, o)
                states.append(starts)
        ctx.save_for_backward(q, k, v, g, beta, *states)
        ctx.plan, ctx.scale, ctx.dtype, ctx.state_dtype = plan, scale, dtype, initial_state.dtype
        final_state = torch.empty_like(state)
        final_state[order] = state
        return o[:-1].view_as(v), final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_o: Tensor, grad_final_state: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, *states = ctx.saved_tensors
        plan, dtype = ctx.plan, ctx.dtype
        batch, length, heads, _ = q.shape
        order = plan.order.to(q.device)
        grad_state = grad_final_state.to(dtype)[order]
        inputs = (q, k, v, g, beta.unsqueeze(-1))
        grads = [x.new_empty(batch * length + 1, *x.shape[2:]) for x in inputs]
        with torch.autocast(q.device.type, enabled=False):
            for segment, starts in zip(reversed(plan.segments), reversed(states)):
                rows = _Rows(segment, plan.chunk, batch * length, heads, q.device)
                chunks = _read_inputs(rows, q, k, v, g, beta, ctx.scale, dtype)
                grad_q, *others = _backward_segment(
                    segment, *chunks, starts, rows.read(grad_o, dtype), grad_state[segment.first_document :]
                )
                for grad, to in zip((grad_q.mul_(ctx.scale), *others), grads):
                    rows.write(grad.view(*rows.shape, -1), to)
        grad_q, grad_k, grad_v, grad_g, grad_beta = (grad[:-1].view_as(x) for grad, x in zip(grads, (q, k, v, g, beta)))
        grad_initial = torch.empty_like(grad_state)
        grad_initial[order] = grad_state
        return grad_q, grad_k, grad_v, grad_g, grad_beta, grad_initial.to(ctx.state_dtype), None, None, None


def _read_inputs(
    rows: _Rows, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Chunks of q (scaled) and k alternating [n, C, 2, K], v [n, C, V], g [n, C, K], beta [n, C]."""
    x = q.new_empty(*rows.shape, 2, q.shape[-1], dtype=dtype)
    torch.mul(rows.read(q, dtype), scale, out=x[:, :, 0])
    x[:, :, 1] = rows.read(k, dtype)
    return x, rows.read(v, dtype), rows.read(g, dtype), rows.read(beta.unsqueeze(-1), dtype).squeeze(-1)
