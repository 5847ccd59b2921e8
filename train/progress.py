"""What a run shows while it trains: a live bar on a terminal, plain lines anywhere else.

    step  120/400 ━━━━━━━━╸━━━━━━━━━━━ loss 3.412  12,480 tok/s  MFU 21.3%  lr 1.9e-03  |g| 0.84  0:01:32

A log file gets the same numbers as one line now and then, without control codes.
"""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from train.metrics import StepMetrics

ETA_DECAY = 0.9
"""Weight of the past in the moving average of seconds per step."""


class ProgressDisplay:
    """Shows each step of a run; use as a context manager, on rank 0."""

    def __init__(
        self, total_steps: int, *, start_step: int = 0, plain_every: int = 10, console: Console | None = None
    ) -> None:
        """
        Args:
            total_steps: steps of the whole run.
            start_step: steps done before, if the run is resumed.
            plain_every: without a terminal, steps between lines; first, last and special ones are shown.
            console: where to; standard output by default.
        """
        self._total = total_steps
        self._last = start_step
        self._first = start_step + 1
        self._plain_every = plain_every
        self._console = console or Console(file=sys.stdout, highlight=False)
        self._seconds_per_step: float | None = None
        self._updated = time.monotonic()
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> "ProgressDisplay":
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("[bold]step {task.completed:>{task.fields[width]}}/{task.total}"),
                BarColumn(bar_width=None),
                TextColumn("{task.description}"),
                console=self._console,
                expand=True,
            )
            width = len(str(self._total))
            self._task = self._bar.add_task("", total=self._total, completed=self._last, width=width)
            self._bar.start()
        self._updated = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, metrics: StepMetrics) -> None:
        """Show one step; its evaluation and sample, if any, stay above the bar."""
        eta = self._estimate(metrics.step)
        numbers = "  ".join([*describe(metrics), f"ETA {format_duration(eta)}"])
        if self._bar is not None:
            self._bar.update(self._task, completed=metrics.step, description=numbers)
        elif self._is_shown(metrics):
            width = len(str(self._total))
            self.note(f"step {metrics.step:>{width}}/{self._total}  {numbers}")
        if metrics.skipped:
            self.note(f"step {metrics.step}: loss or gradient not finite, update skipped")
        if metrics.validation_loss is not None:
            self.note(f"step {metrics.step}: validation loss {metrics.validation_loss:.4f} nats/token")
        if metrics.sample is not None:
            self.note(f"step {metrics.step}: sample\n" + "\n".join(f"  | {x}" for x in metrics.sample.splitlines()))

    def note(self, text: str) -> None:
        """Print ``text`` as it is, above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _is_shown(self, metrics: StepMetrics) -> bool:
        special = metrics.step in (self._first, self._total) or metrics.validation_loss is not None
        return special or metrics.step % self._plain_every == 0

    def _estimate(self, step: int) -> float:
        """Seconds left, from a moving average over the steps of this process."""
        now = time.monotonic()
        seconds = (now - self._updated) / max(1, step - self._last)
        past = self._seconds_per_step
        self._seconds_per_step = seconds if past is None else ETA_DECAY * past + (1 - ETA_DECAY) * seconds
        self._updated, self._last = now, step
        return self._seconds_per_step * max(0, self._total - step)


def describe(metrics: StepMetrics) -> list[str]:
    """The numbers of one step, each with its name or unit."""
    words = [f"loss {metrics.loss:.4f}", f"{metrics.tokens_per_second:,.0f} tok/s"]
    if metrics.mfu is not None:
        words.append(f"MFU {metrics.mfu:.1%}")
    return [*words, f"lr {metrics.learning_rate:.2e}", f"|g| {metrics.grad_norm:.3g}"]


def format_duration(seconds: float) -> str:
    """``h:mm:ss``, or ``m:ss`` below an hour."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
