"""Whole matrices from the parts that the tp ranks hold, for Newton-Schulz, and the results back as parts.

    rank 0 holds  a0 b0 c0  of the matrices A B C  ->  rank 0 orthogonalises  A C  ->  rank 0 has  a0' b0' c0'
    rank 1 holds  a1 b1 c1                             rank 1                 B        rank 1      a1' b1' c1'

Each matrix goes whole to one rank and is orthogonalised once; every rank gets its share of the work, and a part
travels only where it is missing. Of a matrix of N elements cut over n ranks, (n - 1) / n N elements travel each way,
all matrices of a step together in one exchange. Who gets what follows from the shapes alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from model.params import ParamRole
from optim.groups import Group, newton_schulz_cost
from parallel.collectives import all_to_all_plain
from parallel.mesh import Axis

Shape = tuple[int, int, int]


class MatrixExchange:
    """The exchange of one set of parameters over ``axis``.

    share: by parameter, the group of the whole matrices that this rank orthogonalises, [n, rows, columns] with n >= 0.

    Args:
        groups: Muon groups that are cut over ``axis``, the same on all its ranks.
        axis: tp.
    """

    def __init__(self, groups: Mapping[str, Group], axis: Axis) -> None:
        self.axis = axis
        self._shapes = {name: group.shape for name, group in groups.items()}
        self._counts = share_matrices(groups, ranks=axis.size)
        # Of a parameter as [n, rows, columns]: which dim is cut, and the part's rows and columns.
        self._dims: dict[str, int] = {}
        self._sides: dict[str, tuple[int, int]] = {}
        self.share: dict[str, Group] = {}
        for name, group in groups.items():
            assert group.cut is not None, name
            dim, parts = group.cut
            assert parts == axis.size, f"{name}: {parts} parts over {axis.name}={axis.size}"
            self._dims[name] = dim + 3 - len(group.shape)
            self._sides[name] = group.shape[-2], group.shape[-1]
            _, rows, columns = group.blocks[0]
            shape = self._counts[name][axis.rank], rows, columns
            self.share[name] = replace(group, shape=shape, blocks=(shape,), role=ParamRole(kind="matrix"), cut=None)

    def gather(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's whole matrices by name, shaped as `share` says.

        Args:
            parts: this rank's part of every parameter, all of one dtype.
        """
        cut = {name: parts[name].view(-1, *side).split(self._counts[name]) for name, side in self._sides.items()}
        own = self._parts_of(self.axis.rank)
        arrived = self._swap(list(cut.values()), receive=[_numel(own)] * self.axis.size)
        sources = [_unpack(flat, own) for flat in arrived]
        return {name: torch.cat([source[name] for source in sources], dim=dim) for name, dim in self._dims.items()}

    def scatter(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The way back: this rank's part of every parameter, in the parameter's shape.

        Args:
            whole: as `gather` returned them; any dtype.
        """
        cut = {name: whole[name].chunk(self.axis.size, dim=dim) for name, dim in self._dims.items()}
        shapes = [self._parts_of(rank) for rank in range(self.axis.size)]
        arrived = self._swap(list(cut.values()), receive=[_numel(of_rank) for of_rank in shapes])
        owners = [_unpack(flat, of_rank) for flat, of_rank in zip(arrived, shapes)]
        return {name: torch.cat([owner[name] for owner in owners]).view(shape) for name, shape in self._shapes.items()}

    def _parts_of(self, rank: int) -> dict[str, Shape]:
        """Shape of one part of all matrices of each parameter that ``rank`` orthogonalises."""
        return {name: (self._counts[name][rank], *side) for name, side in self._sides.items()}

    def _swap(self, cut: Sequence[Sequence[Tensor]], *, receive: Sequence[int]) -> Sequence[Tensor]:
        """Of each parameter one piece to every rank, and a flat tensor of such pieces from every rank."""
        by_rank = list(zip(*cut, strict=True))
        send = [sum(piece.numel() for piece in pieces) for pieces in by_rank]
        leaving = torch.cat([piece.flatten() for pieces in by_rank for piece in pieces])
        return all_to_all_plain(leaving, self.axis, send=send, receive=receive).split(list(receive))


def share_matrices(groups: Mapping[str, Group], *, ranks: int) -> dict[str, list[int]]:
    """How many of each parameter's matrices each rank orthogonalises, in rank order; pure.

    The most expensive matrices first. All ranks get equally many of a parameter's, and those that are left over go
    one each to the ranks with the least to do, ties to the lowest.
    """
    counts: dict[str, list[int]] = {}
    load = [0.0] * ranks
    costs = {name: newton_schulz_cost(*group.blocks[0][1:]) for name, group in groups.items()}
    for name in sorted(groups, key=lambda name: -costs[name]):
        each, rest = divmod(groups[name].blocks[0][0], ranks)
        lighter = sorted(range(ranks), key=lambda rank: load[rank])[:rest]
        counts[name] = [each + (rank in lighter) for rank in range(ranks)]
        load = [done + count * costs[name] for done, count in zip(load, counts[name])]
    return counts


def _numel(shapes: Mapping[str, Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _unpack(flat: Tensor, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    parts = flat.split([math.prod(shape) for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
