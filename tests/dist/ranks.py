"""The ranks that tests run on: `launch.ranks`, spawned once per module and reused."""

import launch.ranks
from launch.ranks import RankError

__all__ = ["RankError", "RankPool"]


class RankPool(launch.ranks.RankPool):
    """Ranks that find imported what nearly every test needs: seconds of each rank's life otherwise."""

    def __init__(self, size: int, *, timeout: float = 60.0) -> None:
        super().__init__(size, timeout=timeout, preload=("train.proof.parity",))
