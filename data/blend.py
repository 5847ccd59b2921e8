"""Weighted blends: which source does the sample at a global position come from?

After any number of samples, each source has been drawn less than one sample more or less than its share of them.
Each draw has a window for that: source s with share w is drawn for the j-th time, from 0 on, at a position from
floor(j / w) to ceil((j + 1) / w) - 1. Drawing the source whose window ends first meets all windows. After that,
neighbours change places at random wherever both stay in their windows, so that a pattern does not give one rank one
source for ever.

    shares 1/2, 1/4, 1/4     0 1 0 2 0 2 1 0 | 2 0 1 0 0 1 0 2 | ...

Positions are cut into blocks, and nothing is carried from one to the next: any position is found without visiting the
earlier ones. A block is a multiple of the weights' sum where that is possible (weights 7 and 3: ten samples), and then
the shares are exact at its end. For weights of many digits, the draws up to a block's end are rounded, which adds less
than one sample to the deviation.
"""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from data.edges import InputError
from data.shuffle import make_key, permutation

MIN_BLOCK = 1024
EXACT_BLOCK = 2**16
"""Largest sum of the weights, as whole numbers, for which a block is a multiple of it."""
MAX_BLOCK = 2**20
"""A source must be due at least once a block, or rounding could take a draw back that was already made."""
SWAP_ROUNDS = 16
"""How often neighbours are offered to change places; a draw moves by about the root of it, if its window lets it."""


class Blend:
    """A pure function from positions to sources.

    Args:
        weights: one per source, in proportion to the samples drawn; need not sum to one. 0 draws nothing.
        seed: of the order.

    Raises:
        InputError: no weight, or one that is no number from 0 on, none above 0, or a share below one in a million.
    """

    def __init__(self, weights: Sequence[float], *, seed: int) -> None:
        if problems := weight_errors(weights):
            raise InputError(problems[0])
        # A weight is the decimal number that was written: 0.7 is seven tenths, and no binary fraction beside it.
        exact = [Fraction(str(weight)) for weight in weights]
        scale = math.lcm(*(weight.denominator for weight in exact))
        whole = [int(weight * scale) for weight in exact]
        common = math.gcd(*whole)
        self._weights = [weight // common for weight in whole]
        self._total = sum(self._weights)
        rarest = min(weight for weight in self._weights if weight)
        if rarest * MAX_BLOCK < self._total:
            index = self._weights.index(rarest)
            raise InputError(
                f"data.sources[{index}].weight={weights[index]}: is {rarest / self._total:.1e} of all weights and must "
                f"be at least {1 / MAX_BLOCK:.1e}; raise it, or set it to 0"
            )
        due = -(-self._total // rarest)
        self.block = max(EXACT_BLOCK, 1 << (due - 1).bit_length())
        if self._total <= EXACT_BLOCK:
            self.block = -(-MIN_BLOCK // self._total) * self._total
        self._seed = seed
        # The blocks last asked for: steps follow each other.
        self._kept = lru_cache(maxsize=2)(self._make_block)

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
        return self._kept(block)

    def _make_block(self, block: int) -> NDArray[np.int64]:
        draws = np.subtract(self.counts(block + 1), self.counts(block))
        return _mix(_schedule(draws.tolist()), draws, key=make_key("blend", self._seed, block))

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


def _schedule(draws: Sequence[int]) -> NDArray[np.int64]:
    """Sources in an order in which each stays within one of its share of ``draws`` after any number of draws."""
    size = sum(draws)
    order = np.empty(size, dtype=np.int64)
    done = [0] * len(draws)
    waiting = [(0, source) for source, number in enumerate(draws) if number]
    ready: list[tuple[int, int]] = []
    for position in range(size):
        while waiting and waiting[0][0] <= position:
            _, source = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(done[source] + 1) * size // draws[source]), source))
        deadline, source = heapq.heappop(ready)
        assert position < deadline, "every window can be met"
        order[position] = source
        done[source] += 1
        if done[source] < draws[source]:
            heapq.heappush(waiting, (done[source] * size // draws[source], source))
    return order


def _mix(order: NDArray[np.int64], draws: NDArray[np.int64], *, key: int) -> NDArray[np.int64]:
    """Let neighbours change places at random where both sources stay within one of their shares."""
    size = len(order)
    for turn in range(SWAP_ROUNDS):
        # How often the source of each position was drawn before it.
        earlier = np.empty(size, dtype=np.int64)
        for source in np.flatnonzero(draws):
            drawn = np.flatnonzero(order == source)
            earlier[drawn] = np.arange(len(drawn))
        left = np.arange(turn % 2, size - 1, 2)
        gone, come = order[left], order[left + 1]
        behind = left + 1
        # After position ``left``: the left source has one draw less, the right one has its next.
        fits = earlier[left] * size > draws[gone] * behind - size
        fits &= (earlier[left + 1] + 1) * size < draws[come] * behind + size
        chosen = left[fits & (permutation(len(left), key=make_key("swap", key, turn)) % 2 == 0)]
        order[chosen], order[chosen + 1] = order[chosen + 1], order[chosen]
    return order


def weight_errors(weights: Sequence[float]) -> list[str]:
    """What is wrong with the sources' weights, one line each."""
    if not weights:
        return ["data.sources=[]: a blend needs at least one source; add one"]
    found = [
        f"data.sources[{index}].weight={weight}: must be a finite number from 0 on; 0 draws nothing from the source"
        for index, weight in enumerate(weights)
        if not (math.isfinite(weight) and weight >= 0)
    ]
    if not any(weights):
        found.append(f"data.sources[0].weight={weights[0]}: all weights are 0, and one must be above; raise it")
    return found
