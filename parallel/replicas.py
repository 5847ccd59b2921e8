"""Do the ranks that should hold the same numbers hold them, to the bit?

A broken link, a flipped bit or a step that one rank computes otherwise leaves no trace in the loss for a long time.
So every so often each rank hashes what it holds, and ranks that hold copies compare: of a parameter those of its
axis of copies (`parallel.sharding.ShardSpec`), of a buffer (the router biases, which every rank updates for itself) all
`replicas` of the stage.

    hash     one int64 a tensor, on the device: its bits as integers, each times an odd number that depends on the
             place, summed modulo 2^64. An odd factor is invertible there, so no single flipped bit can go unseen.
    compare  one maximum of (hash, ~hash) per axis: its halves agree exactly if all ranks do, for max(~h) = ~min(h).
    verdict  one flag over all ranks, so that all of them learn of a fault anywhere, or none; the host waits here.

Only if there is a fault do hashes travel, to say who differs. Every update sends the parameters from their owners
again (`parallel.data`), so their copies differ for long only if that is broken; a bias is nobody's to send.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from model.kimi import KimiModel
from parallel.collectives import combine_in_place, gather_objects
from parallel.grads import EMBEDDING
from parallel.mesh import Axis, Mesh
from parallel.pipeline.stage import tied_to
from parallel.sharding import axis_of, parameter_specs

CHUNK = 2**20
"""Words that are hashed at once: bounds the int64 temporaries."""

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""How elements of so many bytes are read; eight in halves, so that half of the sum's bits remain above every flip."""

ODD = 0x9E3779B97F4A7C15 - 2**64
"""2^64 over the golden ratio, odd, as int64: its multiples are spread evenly over all 64 bits (Knuth)."""

SHOWN = 5
"""Tensors that a message names."""


class Copy(NamedTuple):
    """A tensor of which several ranks should hold the same bits.

    name: as in the model.
    start: first index of this rank's slice in each dim of the whole tensor.
    """

    name: str
    start: tuple[int, ...]
    value: Tensor
    axis: Axis


def replica_faults(model: KimiModel, *, mesh: Mesh) -> list[str]:
    """What differs between ranks that should be equal, one line each; empty if nothing does. Collective.

    Args:
        model: this rank's parameters and buffers.
        mesh: this rank's place.

    Returns:
        the same on all ranks: the tensor, and the world ranks that differ from most.
    """
    if mesh.world.size == 1:
        return []
    copies = _copies(model, mesh)
    hashes = hash_tensors([copy.value for copy in copies], device=next(model.parameters()).device)
    differs = torch.zeros_like(hashes, dtype=torch.bool)
    for axis in {copy.axis.name: copy.axis for copy in copies}.values():
        rows = [row for row, copy in enumerate(copies) if copy.axis.name == axis.name]
        differs[rows] = _differs(hashes[rows], axis)
    fault = differs.any().to(torch.int32)
    combine_in_place(fault, mesh.world, op=dist.ReduceOp.MAX)
    if not fault.item():
        return []
    marked = zip(copies, hashes.tolist(), differs.tolist())
    found = [((copy.name, copy.start), value) for copy, value, bad in marked if bad]
    return _describe(gather_objects(found, mesh.world))


def hash_tensors(tensors: Sequence[Tensor], *, device: torch.device) -> Tensor:
    """int64 [len(tensors)]: a hash of each one's bits in order. NaNs and signed zeros count as what they are."""
    longest = max((x.numel() * x.element_size() for x in tensors), default=0)
    weights = torch.arange(min(longest, CHUNK), device=device).mul_(2).add_(1).mul_(ODD)
    hashes = [_hash(x.detach(), weights) for x in tensors]
    return torch.stack(hashes) if hashes else weights


def _hash(x: Tensor, weights: Tensor) -> Tensor:
    words = x.contiguous().view(-1).view(WORDS[x.element_size()])
    total = weights.new_zeros(())
    for chunk in words.split(len(weights)):
        # All of it wraps around; the factor before the next chunk is odd too, so what differs stays different.
        total = total * ODD + (chunk * weights[: len(chunk)]).sum()
    return total


def _copies(model: KimiModel, mesh: Mesh) -> list[Copy]:
    """Everything of this rank that others hold too; other ranks of an axis list the same in the same order."""
    specs = parameter_specs(model, mesh=mesh)
    copies = [
        Copy(name, tuple(part.start for part in specs[name].slices(mesh)), param, axis_of(mesh, specs[name].copies))
        for name, param in model.named_parameters()
    ]
    copies += [Copy(name, (0,) * buffer.dim(), buffer, mesh.replicas) for name, buffer in model.named_buffers()]
    tied = tied_to(model, mesh=mesh)
    if tied is not None:
        copies += [copy._replace(axis=tied) for copy in copies if copy.name == EMBEDDING]
    return [copy for copy in copies if copy.axis.size > 1]


def _differs(hashes: Tensor, axis: Axis) -> Tensor:
    """bool, for each hash: whether the ranks of the axis have unequal ones."""
    both = torch.stack([hashes, ~hashes])
    combine_in_place(both, axis, op=dist.ReduceOp.MAX)
    return both[0] != ~both[1]


def _describe(gathered: Sequence[Sequence[tuple[tuple[str, tuple[int, ...]], int]]]) -> list[str]:
    """One line for each slice of a tensor that differs; ``gathered`` holds every world rank's hashes of those."""
    holders: dict[tuple[str, tuple[int, ...]], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for rank, found in enumerate(gathered):
        for key, value in found:
            holders[key][value].append(rank)
    lines = []
    for (name, start), by_hash in holders.items():
        *others, most = sorted(by_hash.values(), key=len)
        odd = sorted(rank for ranks in others for rank in ranks)
        where = f" from {list(start)}" if any(start) else ""
        lines.append(f"{name}{where}: world rank(s) {_list(odd)} differ from {_list(most)}")
    shown, rest = lines[:SHOWN], len(lines) - SHOWN
    return [*shown, f"and {rest} more"] if rest > 0 else shown


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
