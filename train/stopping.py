"""When a run is to stop before its last step: somebody asked for it, or its time would run out.

    signal or clock on any rank ──> Stopping.wanted ──> reduced with the step's metrics ──> all ranks save and stop

Every rank asks itself after every step, and the answer travels with the step's metrics, so that all ranks stop after
the same step whichever of them was asked, and no collective is added.
"""

import time
from collections import deque

RECENT = 1000
"""Steps whose longest one is expected to come again: also one with an evaluation."""

MARGIN = 1.1
"""Longest step and save are taken this many times as long as they were."""

FIRST_SAVE = 0.1, 60.0
"""What is kept free for a save until one was seen: a part of the whole time, and at most so many seconds."""


class Stopping:
    """Whether this rank wants the run to stop after the present step.

    Args:
        minutes: time that the process has; 0 is without limit.
        began: `time.monotonic` at the process's start; now by default.
    """

    def __init__(self, *, minutes: float = 0.0, began: float | None = None) -> None:
        self._minutes = minutes
        self._end = (time.monotonic() if began is None else began) + 60 * minutes
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._save: float | None = None
        self._request: str | None = None

    def request(self, reason: str) -> None:
        """Stop after the present step. May be called from another thread; the first reason counts."""
        self._request = self._request or reason

    def step_took(self, seconds: float) -> None:
        """A step, with whatever was done at its end except saving, took so long."""
        self._steps.append(seconds)

    def save_took(self, seconds: float) -> None:
        """A checkpoint took so long until it was published."""
        self._save = max(seconds, self._save or 0.0)

    def wanted(self) -> str | None:
        """Why to stop now; None to go on."""
        if self._request is None and self._minutes > 0 and time.monotonic() + self.reserve() > self._end:
            self._request = f"run.max_minutes={self._minutes:g}"
        return self._request

    def reserve(self) -> float:
        """Seconds that one more step and the last save may take."""
        part, most = FIRST_SAVE
        save = min(part * 60 * self._minutes, most) if self._save is None else self._save
        return MARGIN * (max(self._steps, default=0.0) + save)
