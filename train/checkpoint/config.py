"""When checkpoints are saved, what is kept, and how long and how often the ranks try."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass
class CheckpointConfig:
    """When to save and what to keep.

    every: steps between checkpoints; 0 saves only at the end of the run.
    keep: verified checkpoints kept, the newest included; one more exists while a save is under way.
    asynchronous: write in a background thread while training goes on.
    timeout: seconds that a rank waits for the slowest one to write or verify its part, before the save fails.
    retries: how often a save that the storage refused is tried again, from the same copy, before the run ends.
    """

    AT_RESUME: ClassVar[str] = ""

    every: int = 100
    keep: int = 2
    asynchronous: bool = True
    timeout: float = 3600.0
    retries: int = 2

    def errors(self) -> list[str]:
        """Every violated rule: field, value, rule, remedy; empty if all is well."""
        found = []
        if self.every < 0:
            found.append(f"checkpoint.every={self.every}: must be at least 0; use 0 to save only at the end of the run")
        if self.keep < 1:
            found.append(f"checkpoint.keep={self.keep}: must be at least 1; use 1 to keep only the newest")
        if not 0 < self.timeout <= 1e9:
            found.append(
                f"checkpoint.timeout={self.timeout}: must lie above 0 and be at most 1e9 s; give the slowest rank "
                "time to write its part, 3600 suffices for most storage"
            )
        if not 0 <= self.retries <= 100:
            found.append(f"checkpoint.retries={self.retries}: must lie in 0..100; 0 ends the run at the first failure")
        return found
