"""The ranks that tests run on: `launch.ranks`, spawned once per module and reused."""

import launch.ranks
from launch.ranks import RankError

__all__ = ["PATIENCE", "Pools", "RankError", "RankPool"]

PATIENCE = 900.0
"""Seconds after which what a test waits for is taken to hang: far more than the slowest machine needs, so that time
decides nothing but how long a test hangs that is broken."""


class RankPool(launch.ranks.RankPool):
    """Ranks that find imported what nearly every test needs: seconds of each rank's life otherwise.

    Args:
        size: ranks.
        grace: as of `launch.ranks.RankPool`; short only where a rank is meant to be left alone, and the pool given up.
    """

    def __init__(self, size: int, *, grace: float = PATIENCE) -> None:
        super().__init__(size, timeout=PATIENCE, grace=grace, preload=("train.proof.parity",))


class Pools:
    """A `RankPool` of each size, started when first asked for; use as a context manager."""

    def __init__(self, *, grace: float = PATIENCE) -> None:
        self._grace = grace
        self._by_size: dict[int, RankPool] = {}

    def of(self, size: int) -> RankPool:
        if size not in self._by_size:
            self._by_size[size] = RankPool(size, grace=self._grace)
        return self._by_size[size]

    def drop(self, size: int) -> None:
        """Close a pool in which a rank failed: the others may have been killed."""
        self._by_size.pop(size).close()

    def __enter__(self) -> "Pools":
        return self

    def __exit__(self, *exception: object) -> None:
        for size in list(self._by_size):
            self.drop(size)
