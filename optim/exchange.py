"""Whole matrices from the parts that the tp ranks hold, for Newton-Schulz, and the results back as parts.

    rank 0 holds  a0 b0 c0  of the matrices A B C  ->  rank 0 orthogonalises  A C  ->  rank 0 has  a0' b0' c0'
    rank 1 holds  a1 b1 c1                             rank 1                 B        rank 1      a1' b1' c1'

Each matrix goes whole to one rank and is orthogonalised once; every rank gets its share of the work, and a part
travels only where it is missing. Of a matrix of N elements cut over n ranks, (n - 1) / n N elements travel each way.
The matrices of a step come in rounds of bounded size (`optim.rounds`), each back before the next begins.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from model.params import ParamRole
from optim.groups import Group
from optim.rounds import Round, Shape, plan_rounds
from parallel.collectives import all_to_all_plain
from parallel.mesh import Axis


class MatrixExchange:
    """One round of the exchange over ``axis``.

    share: by parameter, the group of the whole matrices that this rank orthogonalises, [n, rows, columns] with n >= 0.

    Args:
        groups: Muon groups that are cut over ``axis``, the same on all its ranks.
        axis: tp.
        portions: which of their matrices are in this round.
    """

    def __init__(self, groups: Mapping[str, Group], axis: Axis, portions: Round) -> None:
        self.axis = axis
        self._portions = {portion.name: portion for portion in portions}
        # Of a parameter as [n, rows, columns]: which dim is cut, and the part's rows and columns.
        self._dims: dict[str, int] = {}
        self._sides: dict[str, tuple[int, int]] = {}
        self.share: dict[str, Group] = {}
        for name, portion in self._portions.items():
            group = groups[name]
            assert group.cut is not None, name
            dim, parts = group.cut
            assert parts == axis.size, f"{name}: {parts} parts over {axis.name}={axis.size}"
            self._dims[name] = dim + 3 - len(group.shape)
            self._sides[name] = group.shape[-2], group.shape[-1]
            _, rows, columns = group.blocks[0]
            shape = portion.counts[axis.rank], rows, columns
            self.share[name] = replace(group, shape=shape, blocks=(shape,), role=ParamRole(kind="matrix"), cut=None)

    def parts(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Views, [n, rows, columns], of what belongs to this round in tensors of the parameters' shapes."""
        return {
            name: tensors[name].view(-1, *side)[self._portions[name].start : self._portions[name].stop]
            for name, side in self._sides.items()
        }

    def gather(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's whole matrices by name, shaped as `share` says.

        Args:
            parts: as `parts` returns them, all of one dtype.
        """
        cut = [part.split(self._portions[name].counts) for name, part in parts.items()]
        own = self._parts_of(self.axis.rank)
        arrived = self._swap(cut, receive=[_numel(own)] * self.axis.size)
        sources = [_unpack(flat, own) for flat in arrived]
        return {name: torch.cat([source[name] for source in sources], dim=dim) for name, dim in self._dims.items()}

    def scatter(self, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The way back: tensors shaped as those that `parts` returns.

        Args:
            whole: as `gather` returned them; any dtype.
        """
        cut = [whole[name].chunk(self.axis.size, dim=dim) for name, dim in self._dims.items()]
        shapes = [self._parts_of(rank) for rank in range(self.axis.size)]
        arrived = self._swap(cut, receive=[_numel(of_rank) for of_rank in shapes])
        owners = [_unpack(flat, of_rank) for flat, of_rank in zip(arrived, shapes)]
        return {name: torch.cat([owner[name] for owner in owners]) for name in self._dims}

    def _parts_of(self, rank: int) -> dict[str, Shape]:
        """Shape of one part of all matrices of each parameter that ``rank`` orthogonalises."""
        return {name: (self._portions[name].counts[rank], *side) for name, side in self._sides.items()}

    def _swap(self, cut: Sequence[Sequence[Tensor]], *, receive: Sequence[int]) -> Sequence[Tensor]:
        """Of each parameter one piece to every rank, and a flat tensor of such pieces from every rank."""
        by_rank = list(zip(*cut, strict=True))
        send = [sum(piece.numel() for piece in pieces) for pieces in by_rank]
        leaving = cut[0][0].new_empty(sum(send))
        pieces = [piece for pieces in by_rank for piece in pieces]
        for place, piece in zip(leaving.split([piece.numel() for piece in pieces]), pieces):
            place.view(piece.shape).copy_(piece)
        return all_to_all_plain(leaving, self.axis, send=send, receive=receive).split(list(receive))


def make_exchanges(groups: Mapping[str, Group], axis: Axis, *, round_bytes: int) -> list[MatrixExchange]:
    """The rounds of all matrices of ``groups``, in order; no round if there is no group.

    Args:
        groups: Muon groups that are cut over ``axis``, the same on all its ranks.
        axis: tp.
        round_bytes: as for `plan_rounds`.
    """
    rounds = rounds_of(groups, ranks=axis.size, round_bytes=round_bytes)
    return [MatrixExchange(groups, axis, portions) for portions in rounds]


def rounds_of(groups: Mapping[str, Group], *, ranks: int, round_bytes: int) -> tuple[Round, ...]:
    """`plan_rounds` for the matrices of groups that are cut."""
    matrices = {name: group.blocks[0] for name, group in groups.items()}
    return plan_rounds(matrices, ranks=ranks, round_bytes=round_bytes)


def _numel(shapes: Mapping[str, Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())


def _unpack(flat: Tensor, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    parts = flat.split([math.prod(shape) for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
