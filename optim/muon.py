"""Muon over many parameters at once: momentum per parameter, one Newton-Schulz per shape of block.

    m <- m + (1 - momentum) (g - m);   u = g + momentum (m - g)   (or u = m without Nesterov)
    W <- (1 - lr weight_decay) W - lr 0.2 sqrt(max(r, c)) NewtonSchulz(u)     for every [r, c] block of W

which is `torch.optim.Muon` with ``adjust_lr_fn="match_rms_adamw"`` when a parameter is one block
("Muon is Scalable for LLM Training", arXiv 2502.16982). A head or an expert is a block of its own
(Kimi K3 technical report 2.5). Blocks of equal shape, from whichever parameters, are stacked and go through
one batched Newton-Schulz: a model has thousands of blocks and a handful of shapes.

A block whose gradient is zero in a step only decays in that step, and so does its momentum. The direction of a momentum
has no scale: an expert that gets no more tokens would otherwise move as far as ever, in one direction, until its
momentum is zero. The rule needs no state and no threshold, so it holds at every scale of gradients, on every mesh and
after a resume.

A block that tensor parallelism cuts is orthogonalised whole, by one of the ranks that hold its parts
(`optim.exchange`): the parts of an orthogonal matrix are not the orthogonalised parts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from optim.exchange import MatrixExchange
from optim.groups import NS_DTYPES, Group, OptimConfig
from optim.newton_schulz import default_dtype, orthogonalize
from parallel.collectives import combine_in_place
from parallel.mesh import Axis

_CPU_BATCH_ELEMENTS = 2**19
"""2 MB in fp32: a stack that stays in a core's cache between products takes half the time of a large one."""

_ACCELERATOR_BATCH_ELEMENTS = 2**26
"""Enough to fill any accelerator; bounds the memory of a call (a few times this many elements)."""


def batch_elements(device: torch.device) -> int:
    """Largest stack that one Newton-Schulz call should work on, in elements."""
    return _CPU_BATCH_ELEMENTS if device.type == "cpu" else _ACCELERATOR_BATCH_ELEMENTS


@dataclass(frozen=True)
class Piece:
    """Blocks ``start:stop`` of ``role.blocks(parameter)[part]``."""

    name: str
    part: int
    start: int
    stop: int


@dataclass(frozen=True)
class MuonBatch:
    """Equal-shaped blocks that are orthogonalised together."""

    rows: int
    columns: int
    pieces: tuple[Piece, ...]


def plan_batches(groups: Sequence[Group], *, max_elements: int) -> tuple[MuonBatch, ...]:
    """Sort the blocks of all Muon parameters by shape and cut each shape into batches of bounded size.

    Every block is in exactly one batch. A batch holds at least one block, however large.
    """
    by_shape: dict[tuple[int, int], list[Piece]] = {}
    for group in groups:
        for part, (count, rows, columns) in enumerate(group.blocks):
            by_shape.setdefault((rows, columns), []).append(Piece(group.name, part, 0, count))
    batches: list[MuonBatch] = []
    for (rows, columns), pieces in by_shape.items():
        limit = max(1, max_elements // (rows * columns))
        filling: list[Piece] = []
        room = limit
        for piece in pieces:
            start = piece.start
            while start < piece.stop:
                stop = min(piece.stop, start + room)
                filling.append(Piece(piece.name, piece.part, start, stop))
                room -= stop - start
                start = stop
                if room == 0:
                    batches.append(MuonBatch(rows, columns, tuple(filling)))
                    filling, room = [], limit
        if filling:
            batches.append(MuonBatch(rows, columns, tuple(filling)))
    return tuple(batches)


@torch.no_grad()
def muon_step(
    masters: Mapping[str, Tensor],
    *,
    momenta: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    groups: Mapping[str, Group],
    batches: Sequence[MuonBatch],
    lr: float,
    config: OptimConfig,
) -> None:
    """Update the weights and momenta of all ``groups`` in place. Overwrites the gradients.

    Args:
        masters: weights, fp32 or fp64.
        momenta: of the same names, shapes and dtypes.
        gradients: of the same names, shapes and dtypes.
        groups: Muon groups by name, none of them cut.
        batches: `plan_batches` of these groups.
        lr: learning rate of this step.
        config: momentum, Nesterov, Newton-Schulz steps and dtype.
    """
    if not groups:
        return
    updates = advance_momenta(momenta, gradients=gradients, groups=groups, config=config, axis=Axis())
    decay_weights(masters, groups=groups, lr=lr)
    for batch in batches:
        blocks = [_blocks(masters, piece, groups) for piece in batch.pieces]
        scale = -update_scale(lr, batch.rows, batch.columns)
        torch._foreach_add_(blocks, orthogonal_blocks(updates, groups=groups, batch=batch, config=config), alpha=scale)


@torch.no_grad()
def muon_step_cut(
    masters: Mapping[str, Tensor],
    *,
    momenta: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    groups: Mapping[str, Group],
    exchanges: Sequence[MatrixExchange],
    batches: Sequence[Sequence[MuonBatch]],
    lr: float,
    config: OptimConfig,
) -> None:
    """`muon_step` for groups whose matrices are cut over tp: each rank orthogonalises its share of them, whole.

    Momentum and decay act on the parts. Every rank of the axis must call it with the same groups.

    Args:
        groups: Muon groups by name, all of them cut.
        exchanges: the rounds of these groups.
        batches: of each round, `plan_batches` of its ``share``.
    """
    if not groups:
        return
    axis = exchanges[0].axis
    updates = advance_momenta(momenta, gradients=gradients, groups=groups, config=config, axis=axis)
    decay_weights(masters, groups=groups, lr=lr)
    for exchange, of_round in zip(exchanges, batches, strict=True):
        _update_round(masters, updates=updates, exchange=exchange, batches=of_round, lr=lr, config=config)


def _update_round(
    masters: Mapping[str, Tensor],
    *,
    updates: Mapping[str, Tensor],
    exchange: MatrixExchange,
    batches: Sequence[MuonBatch],
    lr: float,
    config: OptimConfig,
) -> None:
    """One round of `muon_step_cut`; with it the memory of all that travelled ends."""
    found = _orthogonal(exchange.gather(exchange.parts(updates)), groups=exchange.share, batches=batches, config=config)
    weights = exchange.parts(masters)
    for name, direction in exchange.scatter(found).items():
        _, rows, columns = exchange.share[name].shape
        weights[name].add_(direction, alpha=-update_scale(lr, rows, columns))


def _orthogonal(
    whole: Mapping[str, Tensor], *, groups: Mapping[str, Group], batches: Sequence[MuonBatch], config: OptimConfig
) -> dict[str, Tensor]:
    """All blocks of ``whole`` orthogonalised; with it its memory ends, before the results travel."""
    dtype = NS_DTYPES[config.ns_dtype] or default_dtype(next(iter(whole.values())))
    found = {name: torch.empty_like(x, dtype=dtype) for name, x in whole.items()}
    for batch in batches:
        blocks = [_blocks(found, piece, groups) for piece in batch.pieces]
        torch._foreach_copy_(blocks, orthogonal_blocks(whole, groups=groups, batch=batch, config=config))
    return found


def advance_momenta(
    momenta: Mapping[str, Tensor],
    *,
    gradients: Mapping[str, Tensor],
    groups: Mapping[str, Group],
    config: OptimConfig,
    axis: Axis,
) -> dict[str, Tensor]:
    """Move the momenta in place; returns what is to be orthogonalised, in the memory of the gradients.

    Args:
        axis: the ranks that hold the parts of each matrix, all of which call.
    """
    moments = [momenta[name] for name in groups]
    updates = [gradients[name] for name in groups]
    moves = moving_matrices(gradients, groups=groups, axis=axis)
    torch._foreach_lerp_(moments, updates, 1 - config.momentum)
    drop_denormals(moments)
    if config.nesterov:
        torch._foreach_lerp_(updates, moments, config.momentum)
    else:
        torch._foreach_copy_(updates, moments)
    for matrices, moves_n in zip(_matrices(gradients, groups), moves, strict=True):
        matrices.mul_(moves_n.view(-1, 1, 1))
    return dict(zip(groups, updates))


def moving_matrices(gradients: Mapping[str, Tensor], *, groups: Mapping[str, Group], axis: Axis) -> tuple[Tensor, ...]:
    """For each stack of `Group.matrices`, uint8 [n]: 1 where the gradient of a whole matrix is not all zero, else 0.

    Args:
        axis: as for `advance_momenta`.
    """
    stacks = _matrices(gradients, groups)
    # Two passes that make no copy of the gradient.
    signs = [(stack.amax(dim=(1, 2)) > 0) | (stack.amin(dim=(1, 2)) < 0) for stack in stacks]
    moves = torch.cat(signs).to(torch.uint8)
    # A part may be zero where the matrix is not.
    combine_in_place(moves, axis, op=dist.ReduceOp.MAX)
    return moves.split([len(stack) for stack in stacks])


def _matrices(tensors: Mapping[str, Tensor], groups: Mapping[str, Group]) -> list[Tensor]:
    return [stack for name, group in groups.items() for stack in group.matrices(tensors[name])]


def drop_denormals(tensors: Sequence[Tensor]) -> None:
    """Set to zero, in place, what is not above the smallest normal number of its dtype.

    A running mean without new terms would never become zero: 0.95 times the ninth denormal number rounds to the ninth.
    """
    for x in tensors:
        torch.ops.aten.hardshrink.out(x, torch.finfo(x.dtype).tiny, out=x)


def orthogonal_blocks(
    updates: Mapping[str, Tensor], *, groups: Mapping[str, Group], batch: MuonBatch, config: OptimConfig
) -> list[Tensor]:
    """The orthogonalised blocks of one batch, a tensor for every piece of it; use them up before the next batch."""
    sources = [_blocks(updates, piece, groups) for piece in batch.pieces]
    stacked = sources[0] if len(sources) == 1 else torch.cat(sources)
    orthogonal = orthogonalize(stacked, steps=config.ns_steps, dtype=NS_DTYPES[config.ns_dtype])
    return list(orthogonal.split([len(source) for source in sources]))


def update_scale(lr: float, rows: int, columns: int) -> float:
    """Factor of an orthogonal [rows, columns] update, which gives it the size of AdamW's."""
    return lr * 0.2 * math.sqrt(max(rows, columns))


def _blocks(tensors: Mapping[str, Tensor], piece: Piece, groups: Mapping[str, Group]) -> Tensor:
    return groups[piece.name].role.blocks(tensors[piece.name])[piece.part][piece.start : piece.stop]


def decay_weights(masters: Mapping[str, Tensor], *, groups: Mapping[str, Group], lr: float) -> None:
    """Decoupled weight decay: ``W <- (1 - lr * weight_decay) W`` in place, where a group decays."""
    decaying = [name for name, group in groups.items() if group.weight_decay]
    if decaying:
        factors = [1 - lr * groups[name].weight_decay for name in decaying]
        torch._foreach_mul_([masters[name] for name in decaying], factors)
