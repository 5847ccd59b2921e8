"""What a run shows while it trains: a live bar on a terminal, plain lines anywhere else.

    step  120/400 ━━━━━━━━╸━━━━━━━━━━━ loss 3.412  12,480 tok/s  MFU 21.3%  lr 1.9e-03  |g| 0.84  0:01:32

The run's log file gets the same numbers as one line now and then, without control codes, in either case.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import IO, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from data.output import Output
from train.metrics import StepMetrics

logger = logging.getLogger(__name__)

ETA_DECAY = 0.9
"""Weight of the past in the moving average of seconds per step."""


class ProgressDisplay:
    """Shows each step of a run; use as a context manager, on rank 0."""

    def __init__(
        self, total_steps: int, *, output: Output | None = None, start_step: int = 0, plain_every: int = 10
    ) -> None:
        """
        Args:
            total_steps: steps of the whole run.
            output: of the command, with the screen that a bar needs; None shows lines.
            start_step: steps done before, if the run is resumed.
            plain_every: without a terminal, steps between lines; first, last and special ones are shown.
        """
        self._total = total_steps
        self._last = start_step
        self._first = start_step + 1
        self._plain_every = plain_every
        self._output = output
        self._seconds_per_step: float | None = None
        self._updated = time.monotonic()
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._shown = ExitStack()
        self._works = True

    def __enter__(self) -> "ProgressDisplay":
        console = None if self._output is None else Console(file=cast("IO[str]", self._output.screen), highlight=False)
        if self._output is not None and console is not None and console.is_terminal and not console.is_dumb_terminal:
            self._bar = self._shown.enter_context(make_bar(console, output=self._output))
            width = len(str(self._total))
            self._task = self._bar.add_task("", total=self._total, completed=self._last, width=width)
        self._updated = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shown.close()

    def update(self, metrics: StepMetrics) -> None:
        """Show one step; its evaluation and sample, if any, stay above the bar. Never fails: it only shows the run."""
        if not self._works:
            return
        try:
            self._show(metrics)
        except Exception as error:
            self._works = False
            logger.warning("steps are no longer shown (%s: %s); the run goes on", type(error).__name__, error)

    def _show(self, metrics: StepMetrics) -> None:
        eta = self._estimate(metrics.step)
        numbers = "  ".join([*describe(metrics), f"ETA {format_duration(eta)}"])
        line = f"step {metrics.step:>{len(str(self._total))}}/{self._total}  {numbers}"
        if self._bar is not None:
            assert self._output is not None
            self._bar.update(self._task, completed=metrics.step, description=numbers)
            if self._is_shown(metrics):
                self._output.record(line)
        elif self._is_shown(metrics):
            print(line, flush=True)
        if metrics.skipped:
            print(f"step {metrics.step}: loss or gradient not finite, update skipped", flush=True)
        if metrics.validation_loss is not None:
            print(f"step {metrics.step}: validation loss {metrics.validation_loss:.4f} nats/token", flush=True)
        if metrics.sample is not None:
            lines = "\n".join(f"  | {line}" for line in metrics.sample.splitlines())
            print(f"step {metrics.step}: sample\n{lines}", flush=True)

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


@contextmanager
def make_bar(console: Console, *, output: Output) -> Iterator[Progress]:
    """A live bar at the bottom of the screen; what is printed meanwhile stays above it."""
    bar = Progress(
        TextColumn("[bold]step {task.completed:>{task.fields[width]}}/{task.total}"),
        BarColumn(bar_width=None),
        TextColumn("{task.description}"),
        console=console,
        expand=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )

    def show(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    with bar, output.above(show):
        yield bar


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
