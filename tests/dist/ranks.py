"""The ranks that tests run on: `launch.ranks`, spawned once per module and reused."""

import launch.ranks
from launch.ranks import RankError

__all__ = ["PATIENCE", "RankError", "RankPool"]

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
        super().__init__(size, timeout=PATIENCE, grace=grace, preload=("train.parity",))
