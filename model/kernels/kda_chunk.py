"""Kimi Delta Attention in chunks: the same function as `kda_reference`, as matrix products.

Inside a chunk of C tokens that starts from the state S, with Gamma_i the decay from the chunk's start to token
i (technical report 2.1.1, rearranged):

    P = Tril[(Gamma Q)(K / Gamma)^T]         L = StrictTril[(Gamma K)(K / Gamma)^T]
    M = (I + Diag(beta) L)^-1 Diag(beta)     N = M (V - (Gamma K) S)          what is written, [C, V]
    O = (Gamma Q) S + P N                    S' = Diag(Gamma_C) S + (K Gamma_C / Gamma)^T N

S' is affine in S: S' = A S + B with A [K, K] and B [K, V] that do not depend on S. So everything is batched
over all chunks and heads, and only ``S' = A S + B`` runs in order, one product per chunk.

**Decay without overflow.** 1/Gamma overflows, so it never appears. The lower triangle is cut as a binary
tree: blocks of 2, 4, ... C tokens, each contributing the square of its right half (rows) against its left
half (columns), with the decay taken relative to the block's middle:

      token  0 1 2 3 4 5 6 7            row i:    exp(sum of g from the middle to i)
        1    1                          column j: exp(sum of g after j up to the middle)
        2    2 2
        3    2 2 1                      every exponent is a plain sum of g's, so at most 0: nothing
        4    4 4 4 4                    overflows, nothing cancels, and any gate down to -inf is exact.
        5    4 4 4 4 1                  Rows depend on the row's past only, so outputs are causal to
        6    4 4 4 4 2 2                the bit.
        7    4 4 4 4 2 2 1

The triangular inverse is built on the same tree (the block formula for [[A, 0], [B, D]]), which is a
substitution and not a power series, hence stable for repeated keys.

**Layout.** Every document is padded to whole chunks; a batch is B documents. Chunks are ordered step-major:
first chunks of all documents, longest document first, then second chunks, ... so a step of the recurrence
is one slice and the documents still running are a prefix: batch and packed input are one path. Steps are
grouped into segments that fit the cache; forward keeps the state at each segment's start, backward walks the
segments in reverse and recomputes the inside.

Shape letters: B batch, T tokens, H heads, K key, V value, C chunk, n chunks times heads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.kernels.kda_reference import check_kda_inputs

# Measured with tests/bench/kda.py: longer chunks do more work inside, shorter ones more steps in order.
CHUNK = 64
SEGMENT_TOKENS = 2048


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

    Memory kept for backward: the inputs and one state per document and segment. On CUDA the kernels of
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
            if initial_state is not None:
                initial_state = initial_state.float()
            return chunk_kda(
                q,
                k,
                v,
                g,
                beta,
                scale=scale,
                initial_state=initial_state,
                output_final_state=True,
                cu_seqlens=cu_seqlens,
            )
    if offsets is None:
        offsets = [row * length for row in range(batch + 1)]
    if initial_state is None:
        initial_state = q.new_zeros(len(offsets) - 1, heads, key, v.shape[-1], dtype=dtype)
    return _ChunkKDA.apply(q, k, v, g, beta, initial_state, scale, offsets, dtype)


@dataclass(frozen=True)
class _Segment:
    """Consecutive steps of the recurrence. Chunks are numbered inside the segment.

    starts, stops: int64 [chunks], the tokens of each chunk.
    steps: (first chunk, number of chunks) of each step; the chunks belong to the first documents in order.
    """

    starts: Tensor
    stops: Tensor
    steps: list[tuple[int, int]]

    @property
    def documents(self) -> int:
        """Documents that run in this segment: a prefix of the order."""
        return self.steps[0][1]


@dataclass(frozen=True)
class _Plan:
    """order: document numbers, longest first. chunk: tokens per chunk, a power of two."""

    order: Tensor
    chunk: int
    segments: list[_Segment]


def _plan(offsets: list[int]) -> _Plan:
    starts = torch.tensor(offsets[:-1])
    stops = torch.tensor(offsets[1:])
    lengths, order = (stops - starts).sort(descending=True, stable=True)
    starts, stops = starts[order], stops[order]
    longest = int(lengths[0])
    # A chunk longer than the longest document would be padding only.
    chunk = min(CHUNK, 1 << max(longest - 1, 0).bit_length())
    steps = -(-longest // chunk)
    running = (lengths.unsqueeze(0) > chunk * torch.arange(steps).unsqueeze(1)).sum(1).tolist()

    segments = []
    step = 0
    while step < steps:
        count = max(1, SEGMENT_TOKENS // (chunk * running[step]))
        group = running[step : step + count]
        first = [sum(group[:i]) for i in range(len(group))]
        segments.append(
            _Segment(
                torch.cat([starts[:n] + chunk * (step + i) for i, n in enumerate(group)]),
                torch.cat([stops[:n] for n in group]),
                list(zip(first, group)),
            )
        )
        step += count
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


def _levels(alpha: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Walk the tree up: for half = 1, 2, ... C, the decay [n, C, K] from the start of each block of ``half``
    tokens up to and with each token, and the decay after each token up to the block's end. The same two
    tensors are updated in place."""
    n, chunk, key = alpha.shape
    to_token = alpha.clone()
    to_end = torch.ones_like(alpha)
    half = 1
    while half < chunk:
        yield half, to_token, to_end
        token, end = (x.view(n, -1, 2, half, key) for x in (to_token, to_end))
        left, right = token[:, :, 0, -1:], token[:, :, 1, -1:].clone()
        token[:, :, 1] *= left
        end[:, :, 0] *= right
        half *= 2
    yield chunk, to_token, to_end


def _blocks(matrix: Tensor, half: int, row: int, column: int) -> Tensor:
    """The quarter (row, column) of every diagonal block of 2 half tokens, a view: [n, C, ..., C] -> [n,
    C / (2 half), half, ..., half]."""
    grid = matrix.unflatten(-1, (-1, 2, half)).unflatten(1, (-1, 2, half))
    grid = grid.select(-2, column).select(2, row)
    return grid.diagonal(dim1=1, dim2=-2).movedim(-1, 1)


def _rows_and_columns(x: Tensor, to_token: Tensor, to_end: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Right halves of q and k, decayed from the middle, and left halves of k, decayed to it: [m, 2 half, K]
    (q and k alternate) and [m, half, K], m blocks."""
    n, chunk, _, key = x.shape
    x = x.view(-1, 2, half, 2, key)
    rows = x[:, 1] * to_token.view(-1, 2, half, 1, key)[:, 1]
    columns = x[:, 0, :, 1] * to_end.view(-1, 2, half, key)[:, 0]
    return rows.view(-1, 2 * half, key), columns


@dataclass(frozen=True)
class _Inside:
    """What a chunk computes without the state. In comments, the names of the module's docstring."""

    scores: Tensor  # [n, C, 2, C]: P and L
    inverse: Tensor  # [n, C, C]: (I + Diag(beta) L)^-1
    reads: Tensor  # [n, C, 2, K]: Gamma Q and Gamma K
    writes: Tensor  # [n, C, K]: K Gamma_C / Gamma
    from_start: Tensor  # [n, C, K]: Gamma
    to_end: Tensor  # [n, C, K]: Gamma_C / Gamma
    through: Tensor  # [n, K]: Gamma_C
    erase: Tensor  # [n, C, K]: M (Gamma K)
    transition: Tensor  # [n, K, K]: A


def _inside(x: Tensor, g: Tensor, beta: Tensor) -> _Inside:
    n, chunk, _, key = x.shape
    scores = x.new_zeros(n, chunk, 2, chunk)
    scores[:, :, 0].diagonal(dim1=1, dim2=2).copy_((x[:, :, 0] * x[:, :, 1]).sum(-1))
    inverse = torch.eye(chunk, dtype=x.dtype, device=x.device).repeat(n, 1, 1)
    for half, to_token, to_end in _levels(g.exp()):
        if half == chunk:
            break
        rows, columns = _rows_and_columns(x, to_token, to_end, half)
        block = torch.bmm(rows, columns.transpose(1, 2)).view(n, -1, half, 2, half)
        _blocks(scores, half, 1, 0).copy_(block)
        lower = block[..., 1, :] * beta.view(n, -1, 2, half)[:, :, 1].unsqueeze(-1)
        left, right = _blocks(inverse, half, 0, 0), _blocks(inverse, half, 1, 1)
        _blocks(inverse, half, 1, 0).copy_(right @ lower @ left).neg_()
    reads = x * to_token.unsqueeze(2)
    writes = x[:, :, 1] * to_end
    erase = torch.bmm(inverse, beta.unsqueeze(-1) * reads[:, :, 1])
    transition = torch.bmm(writes.transpose(1, 2), erase).neg_()
    # Not the product in to_token: over many chunks its rounding would add up in the slowest channels.
    through = g.sum(1).exp()
    transition.diagonal(dim1=1, dim2=2).add_(through)
    return _Inside(scores, inverse, reads, writes, to_token, to_end, through, erase, transition)


def _run_states(segment: _Segment, transition: Tensor, added: Tensor, state: Tensor) -> Tensor:
    """S' = A S + B over the segment's steps. ``state`` [documents, H, K, V] is advanced in place, ``added``
    [n, K, V] becomes the state at the end of each chunk; returns the state at the start of each."""
    heads = state.shape[1]
    sizes = [count * heads for _, count in segment.steps]
    state = state.view(-1, *state.shape[2:])
    starts = [state[: sizes[0]].clone()]
    for a, b, following in zip(transition.split(sizes), added.split(sizes), [*sizes[1:], 0]):
        b.baddbmm_(a, starts[-1])
        state[following : len(b)] = b[following:]
        starts.append(b[:following])
    return torch.cat(starts)


def _run_states_back(segment: _Segment, transition: Tensor, added: Tensor, grad_state: Tensor) -> Tensor:
    """The adjoint of `_run_states`: ``grad_state`` goes from the segment's end to its start in place; returns
    the gradient of the state at the end of each chunk, [n, K, V]. ``added`` [n, K, V], the gradient of each
    chunk's starting state by that chunk's outputs, becomes the whole gradient of the starting state."""
    heads = grad_state.shape[1]
    sizes = [count * heads for _, count in segment.steps]
    grad_state = grad_state.view(-1, *grad_state.shape[2:])
    ends: list[Tensor] = []
    following = grad_state[:0]
    for a, b in zip(reversed(transition.mT.split(sizes)), reversed(added.split(sizes))):
        if len(following) < len(b):
            following = torch.cat([following, grad_state[len(following) : len(b)]])
        ends.append(following)
        following = b.baddbmm_(a, following)
    grad_state[: sizes[0]] = following
    return torch.cat(ends[::-1])


def _forward_segment(
    segment: _Segment, x: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
) -> Tensor:
    """Outputs [n, C, V] of a segment; advances ``state`` in place."""
    inside = _inside(x, g, beta)
    written = torch.bmm(inside.inverse, beta.unsqueeze(-1) * v)
    added = torch.bmm(inside.writes.transpose(1, 2), written)
    starts = _run_states(segment, inside.transition, added, state)
    written.baddbmm_(inside.erase, starts, alpha=-1)
    o = torch.bmm(inside.scores[:, :, 0], written)
    return o.baddbmm_(inside.reads[:, :, 0], starts)


def _backward_segment(
    segment: _Segment,
    x: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    grad_o: Tensor,
    grad_state: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q (scaled), k, v, g, beta in chunks; ``grad_state`` goes from end to start in place.

    With E = V - (Gamma K) S - L N (so N = Diag(beta) E) and Z = (I + Diag(beta) L)^-T dN:
    dV = Diag(beta) Z, dbeta = rowsum(Z * E), and the rows Y = [dO; -dV] of the reads q and k give both
    dscores = Y N^T and dreads = Y S^T.
    """
    inside = _inside(x, g, beta)
    n, chunk, _, key = x.shape
    beta = beta.unsqueeze(-1)
    scores, lower = inside.scores.unbind(2)
    added = torch.bmm(inside.writes.transpose(1, 2), torch.bmm(inside.inverse, beta * v))
    starts = _run_states(segment, inside.transition, added, state)
    unread = torch.baddbmm(v, inside.reads[:, :, 1], starts, alpha=-1)
    written = torch.bmm(inside.inverse, beta * unread)

    grad_written = torch.bmm(scores.transpose(1, 2), grad_o)
    by_output = torch.bmm(inside.reads[:, :, 0].transpose(1, 2), grad_o)
    by_output.baddbmm_(inside.erase.transpose(1, 2), grad_written, alpha=-1)
    ends = _run_states_back(segment, inside.transition, by_output, grad_state)
    grad_written.baddbmm_(inside.writes, ends)
    solved = torch.bmm(inside.inverse.transpose(1, 2), grad_written)
    error = unread.baddbmm_(lower, written, alpha=-1)
    grad_beta = (solved * error).sum(-1)
    grad_v = beta * solved
    grad_rows = torch.stack([grad_o, -grad_v], dim=2).view(n, 2 * chunk, -1)

    grad_scores = torch.bmm(grad_rows, written.transpose(1, 2)).view(n, chunk, 2, chunk)
    grad_reads = torch.bmm(grad_rows, starts.transpose(1, 2)).view(n, chunk, 2, key)
    grad_writes = torch.bmm(written, ends.transpose(1, 2))
    # Gradients of q and k as rows (they read) and of k as column (it writes): each times its decay.
    by_row = grad_reads * inside.from_start.unsqueeze(2)
    by_column = grad_writes * inside.to_end
    _add_score_gradients(x, g, grad_scores, by_row, by_column)

    # A decay exp(G_i - G_j) of row i and column j passes to G_i what the row gets and takes the column's part
    # from G_j, so dG needs no more than the gradients at hand; the end of the chunk is a row of its own.
    k = x[:, :, 1]
    grad_sum = (x * by_row).sum(2) - k * by_column
    grad_sum[:, -1] += (inside.writes * grad_writes).sum(1)
    grad_sum[:, -1] += inside.through * (starts * ends).sum(-1)
    grad_g = grad_sum.flip(1).cumsum(1).flip(1)

    own = grad_scores[:, :, 0].diagonal(dim1=1, dim2=2).unsqueeze(-1)
    grad_q = by_row[:, :, 0] + own * k
    grad_k = by_row[:, :, 1] + by_column + own * x[:, :, 0]
    return grad_q, grad_k, grad_v, grad_g, grad_beta


def _add_score_gradients(
    x: Tensor, g: Tensor, grad_scores: Tensor, by_row: Tensor, by_column: Tensor
) -> None:
    """Add what P and L (without P's diagonal) give back to q and k, in place."""
    n, chunk, _, key = x.shape
    for half, to_token, to_end in _levels(g.exp()):
        if half == chunk:
            break
        rows, columns = _rows_and_columns(x, to_token, to_end, half)
        block = _blocks(grad_scores, half, 1, 0).reshape(-1, 2 * half, half)
        grad = torch.bmm(block, columns).view(-1, half, 2, key)
        by_row.view(-1, 2, half, 2, key)[:, 1].addcmul_(grad, to_token.view(-1, 2, half, 1, key)[:, 1])
        grad = torch.bmm(block.transpose(1, 2), rows)
        by_column.view(-1, 2, half, key)[:, 0].addcmul_(grad, to_end.view(-1, 2, half, key)[:, 0])


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
                states.append(state[: segment.documents].clone())
                inputs = _read_inputs(rows, q, k, v, g, beta, scale, dtype)
                rows.write(_forward_segment(segment, *inputs, state), o)
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
            for segment, state in zip(reversed(plan.segments), reversed(states)):
                rows = _Rows(segment, plan.chunk, batch * length, heads, q.device)
                chunks = _read_inputs(rows, q, k, v, g, beta, ctx.scale, dtype)
                grad_chunks = _backward_segment(
                    segment, *chunks, state.clone(), rows.read(grad_o, dtype), grad_state
                )
                for grad, to in zip(grad_chunks, grads):
                    rows.write(grad.view(*rows.shape, -1), to)
        grads[0] *= ctx.scale
        grad_q, grad_k, grad_v, grad_g, grad_beta = (
            grad[:-1].view_as(x) for grad, x in zip(grads, (q, k, v, g, beta))
        )
        grad_initial = torch.empty_like(grad_state)
        grad_initial[order] = grad_state
        return grad_q, grad_k, grad_v, grad_g, grad_beta, grad_initial.to(ctx.state_dtype), None, None, None


def _read_inputs(
    rows: _Rows, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Chunks of q (scaled) and k alternating [n, C, 2, K], v [n, C, V], g [n, C, K], beta [n, C]."""
    x = torch.stack([rows.read(q, dtype) * scale, rows.read(k, dtype)], dim=2)
    return x, rows.read(v, dtype), rows.read(g, dtype), rows.read(beta.unsqueeze(-1), dtype).squeeze(-1)
