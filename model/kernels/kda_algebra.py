"""Algebra of `kda_chunk`: the delta rule of one segment of chunks and its gradients, as matrix products.

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
        7    4 4 4 4 2 2 1          own past only, so outputs are causal to the bit. Gates' gradients alone
                                    are differences, of what rows and columns get: their rounding is
                                    relative to those parts, and shows where strong decay leaves little.

The triangular inverse comes by substitution and not as a power series, hence stable for repeated keys.

**Tiles.** Most of the tree's cost is its lowest levels, many products of very few tokens. Where the caller knows a
bound of the gate (K3's is -5 a token), tiles of t tokens replace them: inside a tile 1/Gamma, counted from the
tile's start, is at most exp(-t bound), so (Gamma Q)(K / Gamma)^T is one product, masked. Counted from the start, it
is as causal as the tree. Gamma times a constant, the lift exp(-t bound / 2) rounded to a power of two, gives the same
product exactly, and with t bound >= -80 every factor inside a tile is between 1e-18 and 1e18: gradients from 1e-21 to
1e18 have room in fp32. Without a bound t is 1 and only the diagonal is left to the tiles.

Shape letters: B batch, T tokens, H heads, K key, V value, C chunk, n chunks times heads.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model.kernels.kda_plan import Move, Segment, chunk_size

# Largest |log decay| over a tile: see the module's docstring.
TILE_DECAY = 80.0


@dataclass(frozen=True)
class Tile:
    """size: tokens, a power of two. lift: power of two that centres the decays within a tile around 1."""

    size: int = 1
    lift: float = 1.0


def make_tile(gate_bound: float | None, g: Tensor, longest: int) -> Tile:
    """The tiles of chunks, given the longest document; checks that g keeps the bound."""
    if gate_bound is None:
        return Tile()
    if not -math.inf < gate_bound <= 0:
        raise ValueError(f"gate_bound={gate_bound}: must be finite and at most 0, or None for no bound")
    if g.numel() and bool(g.amin() < g.new_tensor(gate_bound)):
        raise ValueError(f"g: {g.amin().item():.6g} is below gate_bound={gate_bound}; pass gate_bound=None")
    size = 1
    while size < chunk_size(longest) and 2 * size * -gate_bound <= TILE_DECAY:
        size *= 2
    return Tile(size, 2.0 ** round(size * -gate_bound / 2 / math.log(2)) if size > 1 else 1.0)


@dataclass(frozen=True)
class _Level:
    """One level of the tree: blocks of 2 half tokens, m of them over all chunks."""

    half: int
    rows: Tensor  # [m, 2 half, K]: q and k (alternating) of the right half, decayed from the middle
    columns: Tensor  # [m, half, K]: k of the left half, decayed to the middle
    left: Tensor  # [m, 1, K]: decay through the left half
    right: Tensor  # [m, 1, K]: decay through the right half


def _climb(inputs: "Inputs", reads: Tensor, writes: Tensor) -> Iterator[_Level]:
    """The levels from small blocks to large, as views of ``reads`` [n, C, 2, K] and ``writes`` [n, C, K], which
    every step overwrites: relative to blocks of ``half`` tokens, rows are decayed from the start of their block
    and columns to its end. They begin as those of tiles, without the lift, and end as those of chunks."""
    _, chunk, key = writes.shape
    half = inputs.tile.size
    through = inputs.ends() / inputs.tile.lift
    while half < chunk:
        left, right = through.view(-1, 2, 1, key).unbind(1)
        rows, columns = reads.view(-1, 2, 2 * half, key)[:, 1], writes.view(-1, 2, half, key)[:, 0]
        yield _Level(half, rows, columns, left, right)
        rows *= left
        columns *= right
        through = left * right
        half *= 2


def _blocks(matrix: Tensor, *, size: int, every: int, below: int) -> Tensor:
    """Square blocks of ``matrix``, contiguous [n, C, ..., C], every ``every`` tokens along its diagonal and
    ``below`` tokens below it; a view [n, C / every, size, ..., size]."""
    n, chunk, *middle, _ = matrix.shape
    outer, line, *strides = matrix.stride()
    return matrix.as_strided(
        (n, chunk // every, size, *middle, size),
        (outer, every * (line + 1), line, *strides),
        matrix.storage_offset() + below * line,
    )


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Batched a @ b; elementwise for the single tokens of the lowest level, which `torch.bmm` does one by one."""
    if a.shape[1] * a.shape[2] > 2:
        return torch.bmm(a, b)
    return (a.mT * b).sum(1, keepdim=True) if a.shape[1] == 1 else a * b


@dataclass(frozen=True)
class _Constants:
    identity: Tensor  # [C, C]
    sums: Tensor  # [C, C]: ones where row <= column
    past: Tensor  # bool [tile, 2, tile]: where P and L are not zero inside a tile
    zero: Tensor  # in their place, chosen and not multiplied: what lies above the diagonal may be infinite


@functools.cache
def _constants(chunk: int, tile: int, dtype: torch.dtype, device: torch.device) -> _Constants:
    identity = torch.eye(chunk, dtype=dtype, device=device)
    sums = torch.ones_like(identity).triu_()
    inside = sums.mT[:tile, :tile].bool()
    return _Constants(identity, sums, torch.stack([inside, inside.tril(-1)], dim=1), identity.new_zeros(()))


@dataclass(frozen=True)
class Inputs:
    """A segment's inputs in chunks, with the decay Gamma from the start of each tile (and through the token itself)
    times the tiles' lift."""

    tile: Tile
    constants: _Constants
    q: Tensor  # [n, C, K], read where a tile is one token
    inside: Tensor  # [n, C, K]: K / Gamma; K itself in tiles of one token, where Gamma may be 0
    reads: Tensor  # [n, C, 2, K]: Gamma Q and Gamma K, alternating; forward goes on to use it up
    beta: Tensor  # [n, C, 1]
    decay: Tensor  # [n, C, K]: Gamma
    through: Tensor  # [n, K, 1]: decay through the chunk

    @staticmethod
    def read(move: Move, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, dtype: torch.dtype, tile: Tile) -> "Inputs":
        n, chunk = move.shape
        key = q.shape[-1]
        q, k, decay, beta = (move.read(x, dtype) for x in (q, k, g, beta))
        # Not the product of alphas: over many chunks its rounding would add up in the slowest channels.
        through = decay.sum(1).exp_().unsqueeze(-1)
        # Inside a tile the product, more exact than exp of a sum, in log2(tile) steps.
        decay.exp_()
        if tile.lift != 1:
            decay[:, :: tile.size].mul_(tile.lift)
        half = 1
        while half < tile.size:
            left, right = decay.view(-1, 2, half, key).unbind(1)
            right *= left[:, -1:]
            half *= 2
        reads = decay.new_empty(n, chunk, 2, key)
        # One product for both would run through an inner loop of 64 elements, at half the speed.
        torch.mul(q, decay, out=reads[:, :, 0])
        torch.mul(k, decay, out=reads[:, :, 1])
        if tile.size > 1:
            k /= decay
        constants = _constants(chunk, tile.size, dtype, decay.device)
        return Inputs(tile, constants, q, k, reads, beta, decay, through)

    def ends(self) -> Tensor:
        """`decay` through each tile, [tiles, 1, K]."""
        return self.decay.view(-1, self.tile.size, self.decay.shape[-1])[:, -1:]

    def writes(self) -> Tensor:
        """K decayed to the end of its tile, [n, C, K]."""
        if self.tile.size == 1:
            return self.inside.clone()
        return (self.inside.view(-1, self.tile.size, self.inside.shape[-1]) * self.ends()).view_as(self.inside)


@dataclass(frozen=True)
class Saved:
    """What forward keeps of a segment, beside the inputs."""

    scores: Tensor  # [n, C, 2, C]: P and L
    inverse: Tensor  # [n, C, C]: (I + L Diag(beta))^-1
    error: Tensor  # [n, C, V]: E
    starts: Tensor  # [n, K, V]: the state before each chunk


def _steps(sizes: list[int], *tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Each tensor cut into steps. The unsafe cut keeps no record of its views for autograd, which is off here: 4 us and
    not 7."""
    return [x.unsafe_split_with_sizes(sizes) for x in tensors]


def _run_states(
    segment: Segment, erase: Tensor, writes: Tensor, through: Tensor, error: Tensor, state: Tensor
) -> Tensor:
    """The recurrence over the segment's steps. ``state`` [documents, H, K, V] is advanced in place, ``error``
    goes from its value for S = 0 to E in place; returns the state at the start of each chunk, [n, K, V]."""
    heads = state.shape[1]
    sizes = [count * heads for count in segment.running]
    state = state.view(-1, *state.shape[2:])
    starts = state.new_empty(len(error), *state.shape[1:])
    per_step = _steps(sizes, starts, error, erase, writes.mT, through)
    starts[: sizes[0]] = state[: sizes[0]]
    following = [*per_step[0][1:], starts[:0]]
    for size, going, after, start, new, rows, columns, decay in zip(sizes, [*sizes[1:], 0], following, *per_step):
        new.baddbmm_(rows, start, alpha=-1)
        if going == size:
            torch.mul(start, decay, out=after).baddbmm_(columns, new)
        else:
            end = (start * decay).baddbmm_(columns, new)
            after.copy_(end[:going])
            state[going:size] = end[going:]
    return starts


def _run_states_back(
    segment: Segment,
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
    per_step = _steps(sizes, ends, grad_error, by_output, erase.mT, writes, through)
    before = [grad_state[: sizes[0]], *per_step[0][:-1]]
    steps = list(zip(sizes, [sizes[0], *sizes], before, *per_step))
    for size, width, start, end, new, output, rows, columns, decay in reversed(steps):
        new.baddbmm_(columns, end)
        if width > size:
            start[size:] = grad_state[size:width]
            start = start[:size]
        torch.addcmul(output, end, decay, out=start).baddbmm_(rows, new, alpha=-1)
    return ends


def _score_tiles(inputs: Inputs, scores: Tensor) -> None:
    """Writes the part of ``scores`` inside tiles."""
    tile, key = inputs.tile.size, inputs.q.shape[-1]
    if tile == 1:
        scores[:, :, 0].diagonal(dim1=1, dim2=2).copy_((inputs.q * inputs.inside).sum(-1))
        return
    rows, columns = inputs.reads.view(-1, 2 * tile, key), inputs.inside.view(-1, tile, key)
    block = torch.bmm(columns, rows.mT).mT.unflatten(1, (tile, 2)).unflatten(0, (len(scores), -1))
    past, zero = inputs.constants.past, inputs.constants.zero
    torch.where(past, block, zero, out=_blocks(scores, size=tile, every=tile, below=0))


def _descend_tiles(inputs: Inputs, grad_scores: Tensor, by_row: Tensor, by_column: Tensor) -> Tensor:
    """Adjoint of `_score_tiles` and `Inputs.read`: the gradients of rows and columns relative to tiles become
    those of q and k as rows and of k as columns, in place. Returns the gradient of the sum of gates G.

    A decay exp(G_i - G_j) of row i and column j gives to G_i what the row gets and takes from G_j what the column
    gets, so that gradient needs only what is at hand.
    """
    tile, key = inputs.tile.size, by_column.shape[-1]
    if tile > 1:
        past, zero = inputs.constants.past, inputs.constants.zero
        block = torch.where(past, _blocks(grad_scores, size=tile, every=tile, below=0), zero)
        block = block.view(-1, 2 * tile, tile)
        by_row.view(-1, 2 * tile, key).baddbmm_(block, inputs.inside.view(-1, tile, key), beta=1 / inputs.tile.lift)
        columns = by_column.view(-1, tile, key)
        columns.mul_(inputs.ends()).baddbmm_(block.mT, inputs.reads.view(-1, 2 * tile, key))
    (q, k), (by_q, by_k) = inputs.reads.unbind(2), by_row.unbind(2)
    grad_sum = (q * by_q).addcmul_(k, by_k).addcmul_(inputs.inside, by_column, value=-1)
    by_q *= inputs.decay
    by_k *= inputs.decay
    if tile > 1:
        by_column /= inputs.decay
    else:
        own = grad_scores[:, :, 0].diagonal(dim1=1, dim2=2).unsqueeze(-1)
        by_q.addcmul_(own, inputs.inside)
        by_column.addcmul_(own, inputs.q)
    return grad_sum


def forward_segment(segment: Segment, inputs: Inputs, v: Tensor, state: Tensor, scale: float) -> tuple[Tensor, Saved]:
    """Outputs [n, C, V]; advances ``state`` in place."""
    beta, reads, writes = inputs.beta, inputs.reads, inputs.writes()
    n, chunk, _ = v.shape
    scores = v.new_zeros(n, chunk, 2, chunk)
    _score_tiles(inputs, scores)
    reads *= 1 / inputs.tile.lift
    for level in _climb(inputs, reads, writes):
        block, half = torch.bmm(level.columns, level.rows.mT).mT, level.half
        _blocks(scores, size=half, every=2 * half, below=half).copy_(block.view(n, -1, half, 2, half))
    # From the right: half the time of the left, from the same BLAS.
    inverse = torch.linalg.solve_triangular(
        scores[:, :, 1] * beta.mT,
        inputs.constants.identity.expand(n, -1, -1),
        upper=False,
        left=False,
        unitriangular=True,
    )
    writes *= beta
    erase = torch.bmm(inverse, reads[:, :, 1])
    error = torch.bmm(inverse, v)
    starts = _run_states(segment, erase, writes, inputs.through, error, state)
    o = torch.bmm(scores[:, :, 0] * beta.mT, error)
    o.baddbmm_(reads[:, :, 0], starts, beta=scale, alpha=scale)
    return o, Saved(scores, inverse, error, starts)


def backward_segment(
    segment: Segment, inputs: Inputs, saved: Saved, grad_rows: Tensor, grad_state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, beta in chunks; ``grad_state`` goes from end to start in place. ``grad_rows``
    [n, C, 2, V] alternates dO times the scale, and room for -dV.

    With R = V - (Gamma K) S, E = (I + L Diag(beta))^-1 R and N = Diag(beta) E:
    dV = (I + L Diag(beta))^-T dE, and the rows Y = [dO; -dV] of the reads q and k give the gradients Y S^T of
    Gamma Q and Gamma K, and Y E^T of P Diag(beta) and L Diag(beta).
    """
    beta, reads, writes = inputs.beta, inputs.reads / inputs.tile.lift, inputs.writes()
    n, chunk, key = writes.shape
    levels = [
        replace(level, rows=level.rows.clone(), columns=level.columns.clone())
        for level in _climb(inputs, reads, writes)
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
    grad_sum = _descend_tiles(inputs, grad_scores, by_row, by_column)
    # The chunk's end is one more row.
    grad_sum[:, -1].add_(grad_through)
    # Every G_i is a sum over g_1 ... g_i; as a product, since cumsum along a strided dim is slow.
    grad_g = torch.bmm(inputs.constants.sums.expand(n, -1, -1), grad_sum)
    by_q, by_k = by_row.unbind(2)
    return by_q, by_column.add_(by_k), grad_v, grad_g, grad_beta


def _descend(levels: list[_Level], grad_scores: Tensor, by_row: Tensor, by_column: Tensor) -> None:
    """Adjoint of `_climb`: from gradients of the rows and columns relative to the chunk to those relative to
    tiles, in place, taking in on the way what P and L give outside the tiles."""
    key = by_column.shape[-1]
    while levels:
        level = levels.pop()
        half = level.half
        row, column = by_row.view(-1, 2, 2 * half, key)[:, 1], by_column.view(-1, 2, half, key)[:, 0]
        block = _blocks(grad_scores, size=half, every=2 * half, below=half).reshape(-1, 2 * half, half)
        torch.addcmul(_product(block, level.columns), row, level.left, out=row)
        torch.addcmul(_product(block.mT, level.rows), column, level.right, out=column)
