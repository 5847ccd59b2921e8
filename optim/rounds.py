"""The rounds in which matrices that tensor parallelism cuts become whole, each on one rank, for Muon. Pure.

Every rank holds a part of every matrix, and Newton-Schulz wants whole ones (`optim.exchange`). All of them at once
would take the memory of the gradients again, so they come in rounds of bounded size. They are dealt in turns of one to
each rank, the most work first, and as many turns make a round as fit what a rank may hold of whole matrices:

    matrices over two ranks    A A A A A B B C
    turns                      A A   A A   A B   B C
    rounds                     A A   A A | A B   B C

So all ranks have work in every round, and equal matrices meet in one product. It all follows from the shapes, which
every rank knows.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from parallel.buckets import GRADIENT_BYTES

Shape = tuple[int, int, int]


@dataclass(frozen=True)
class Portion:
    """Neighbouring matrices of one parameter that are in one round.

    start: the first of them.
    counts: how many of them each rank orthogonalises, in rank order.
    """

    name: str
    start: int
    counts: tuple[int, ...]

    @property
    def stop(self) -> int:
        """One past the last of them."""
        return self.start + sum(self.counts)


Round = tuple[Portion, ...]


def newton_schulz_cost(rows: int, columns: int) -> float:
    """FLOPs of orthogonalising one matrix: about ``4 r^2 c + 2 r^3`` in each of five steps, for r <= c."""
    r, c = sorted((rows, columns))
    return 5 * (4 * r * r * c + 2 * r**3)


def plan_rounds(matrices: Mapping[str, Shape], *, ranks: int, round_bytes: int) -> tuple[Round, ...]:
    """Put every matrix into one round and give it to one rank.

    In a turn the matrix with the most work goes to the rank with the least to do so far, ties to the lowest. No rank's
    work differs from another's by more than one matrix.

    Args:
        matrices: (count, rows, columns) of each parameter's whole matrices.
        ranks: that hold the parts.
        round_bytes: of whole fp32 matrices that a rank may have in a round; one matrix it may have always.
    """
    costs = {name: newton_schulz_cost(rows, columns) for name, (_, rows, columns) in matrices.items()}
    # Transposed shapes cost the same, and would not meet their like in one product.
    order = sorted(matrices, key=lambda name: (-costs[name], matrices[name][1:]))
    dealt = [name for name in order for _ in range(matrices[name][0])]
    load = [0.0] * ranks
    rounds: list[dict[str, list[int]]] = []
    room = 0
    for first in range(0, len(dealt), ranks):
        turn = dealt[first : first + ranks]
        needed = max(GRADIENT_BYTES * matrices[name][1] * matrices[name][2] for name in turn)
        if not rounds or needed > room:
            rounds.append({})
            room = round_bytes
        room -= needed
        for rank, name in zip(sorted(range(ranks), key=lambda rank: load[rank]), turn):
            rounds[-1].setdefault(name, [0] * ranks)[rank] += 1
            load[rank] += costs[name]
    return _number(rounds)


def _number(rounds: list[dict[str, list[int]]]) -> tuple[Round, ...]:
    """Of every parameter the first matrices to the first round, and so on."""
    done: Counter[str] = Counter()
    numbered: list[Round] = []
    for counts in rounds:
        numbered.append(tuple(Portion(name, done[name], tuple(of_rank)) for name, of_rank in counts.items()))
        done.update({name: sum(of_rank) for name, of_rank in counts.items()})
    return tuple(numbered)
