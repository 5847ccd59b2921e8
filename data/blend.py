"""Weighted blends: which source does the sample at a global position come from?

Positions are cut into blocks. After n blocks, source s has been drawn as often as the largest-remainder
rounding of ``share[s] * n * block`` says, so no source is ever more than one sample from its share at a block's
end, however long the run. Inside a block the draws are in an order of the block's own. Nothing is carried from
one block to the next: any position is found without visiting the earlier ones.

    shares 1/2, 1/4, 1/4     |0 1 0 2 0 2 1 0|2 0 1 0 0 1 0 2| ...
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from data.shuffle import make_key, permutation

MIN_BLOCK = 1024
MAX_BLOCK = 2**20
"""A source must be due at least once a block, or rounding could take a draw back that was already made."""


class Blend:
    """A pure function from positions to sources.

    Args:
        weights: one per source, in proportion to the samples drawn; need not sum to one.
        seed: of the order inside blocks.

    Raises:
        ValueError: no weight, or one that is not a positive finite number, or a share below one in a million.
    """

    def __init__(self, weights: Sequence[float], *, seed: int) -> None:
        if not weights:
            raise ValueError("data.sources=[]: a blend needs at least one source; add one")
        for index, weight in enumerate(weights):
            if (problem := weight_error(weight)) is not None:
                raise ValueError(f"data.sources[{index}].{problem}")
        exact = [Fraction(weight) for weight in weights]
        scale = math.lcm(*(weight.denominator for weight in exact))
        self._weights = [int(weight * scale) for weight in exact]
        self._total = sum(self._weights)
        rarest = min(self._weights)
        if rarest * MAX_BLOCK < self._total:
            raise ValueError(
                f"data.sources[{self._weights.index(rarest)}].weight={min(weights)}: is {rarest / self._total:.1e} of "
                f"all weights and must be at least {1 / MAX_BLOCK:.1e}; raise it or remove the source"
            )
        due = -(-self._total // rarest)
        self.block = max(MIN_BLOCK, 1 << (due - 1).bit_length())
        self._seed = seed

    def counts(self, blocks: int) -> list[int]:
        """Draws of each source in the first ``blocks`` blocks; they sum to ``blocks * self.block``."""
        positions = blocks * self.block
        floors = [weight * positions // self._total for weight in self._weights]
        remainders = [weight * positions % self._total for weight in self._weights]
        by_remainder = sorted(range(len(floors)), key=lambda source: -remainders[source])
        for source in by_remainder[: positions - sum(floors)]:
            floors[source] += 1
        return floors

    def block_sources(self, block: int) -> NDArray[np.int64]:
        """Sources of block number ``block``'s positions, int64 [self.block]."""
        before, after = self.counts(block), self.counts(block + 1)
        draws = np.subtract(after, before)
        in_order = np.repeat(np.arange(len(draws)), draws)
        return in_order[permutation(self.block, key=make_key("blend", self._seed, block))]

    def draw(self, start: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the samples at positions ``start .. start + count - 1`` come from; ``count`` is at least one.

        Returns:
            sources: int64 [count].
            ranks: int64 [count], how many earlier positions, from 0 on, drew the same source.
        """
        assert count > 0, count
        first, last = start // self.block, (start + count - 1) // self.block
        sources = np.concatenate([self.block_sources(block) for block in range(first, last + 1)])
        ranks = np.empty_like(sources)
        for source, earlier in enumerate(self.counts(first)):
            drawn = np.flatnonzero(sources == source)
            ranks[drawn] = earlier + np.arange(len(drawn))
        skip = start - first * self.block
        return sources[skip : skip + count], ranks[skip : skip + count]


def weight_error(weight: float) -> str | None:
    """What is wrong with a source's weight, or None."""
    if weight > 0 and math.isfinite(weight):
        return None
    return f"weight={weight}: must be a positive finite number; raise it or remove the source"
