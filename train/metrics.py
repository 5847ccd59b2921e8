"""What a training step measures, and where it is written.

`StepMetrics` is the one declaration: every field states its unit and how the ranks' values become one.
A step is one object, whole: an evaluation made at a step is part of that step's object, so that
`metrics.jsonl` has exactly one line per training step, in order, also after the run was killed and
resumed (lines past the checkpoint are rewound, and the replayed steps write them again).

Trackers (jsonl always; tensorboard and wandb on request) share one interface. They live on rank 0, and
one that fails while training is reported once and then left out: it never stops the run.
"""

import dataclasses
import importlib
import importlib.util
import json
import logging
import math
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch

from parallel.collectives import gather_plain
from parallel.mesh import Axis

METRICS_FILE = "metrics.jsonl"
RUN_ID_FILE = "run_id"

logger = logging.getLogger(__name__)

_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "max": torch.max,
    "last": lambda values: values[0],
}


def _measured(unit: str, *, reduce: str = "last") -> dict[str, str]:
    """Metadata of a field of `StepMetrics`.

    Args:
        unit: what its numbers count.
        reduce: how values of several ranks become one: "sum", "mean" or "max" over the ranks that have
            one; "last" for what is equal on all ranks, or known to rank 0 alone (rank 0's is taken).
    """
    assert reduce in _REDUCTIONS, reduce
    return {"unit": unit, "reduce": reduce}


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One training step. ``None`` is "not measured at this step"."""

    step: int = field(metadata=_measured("steps done"))
    loss: float = field(metadata=_measured("nats per token, mean over the step's labelled tokens"))
    grad_norm: float = field(metadata=_measured("global norm before clipping"))
    tokens: int = field(metadata=_measured("tokens consumed since the start"))
    tokens_per_second: float = field(metadata=_measured("tokens/s of all ranks"))
    learning_rate: float = field(metadata=_measured("rate of the matrices"))
    samples_hash: str = field(metadata=_measured("hash of the step's sample ids"))
    step_seconds: float | None = field(default=None, metadata=_measured("s", reduce="max"))
    mfu: float | None = field(default=None, metadata=_measured("fraction of the peak FLOP rate"))
    peak_memory: int | None = field(default=None, metadata=_measured("bytes", reduce="max"))
    max_over_mean_load: float | None = field(
        default=None, metadata=_measured("largest expert load over the mean, worst layer", reduce="max")
    )
    max_logit: float | None = field(default=None, metadata=_measured("largest attention logit", reduce="max"))
    expert_load: dict[str, list[int]] | None = field(
        default=None, metadata=_measured("routed tokens per expert, by layer")
    )
    expert_balance: dict[str, dict[str, float | int]] | None = field(
        default=None, metadata=_measured("how evenly experts and ranks were used, by layer: see train/balance.py")
    )
    forced_routing: str | None = field(
        default=None, metadata=_measured("the rule that chose the experts instead of the routers: a benchmark")
    )
    skipped: bool | None = field(default=None, metadata=_measured("true if the update was skipped"))
    sample_ids: list[int] | None = field(default=None, metadata=_measured("ids of the samples of a skipped step"))
    validation_loss: float | None = field(default=None, metadata=_measured("nats per token"))
    sample: str | None = field(default=None, metadata=_measured("generated text"))
    stop: bool | None = field(default=None, metadata=_measured("true if a rank wants the run to stop", reduce="max"))
    """Not written: where a run happens to stop must not show in its metrics."""

    def as_json(self) -> dict[str, Any]:
        """The object that is written: what was measured, in order of declaration.

        JSON has no NaN or infinity: such a number is written as null, and ``"finite": false`` is added.
        """
        values: dict[str, Any] = {}
        finite = True
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if value is None:
                continue
            if isinstance(value, float) and not math.isfinite(value):
                value, finite = None, False
            values[item.name] = value
        return values if finite else values | {"finite": False}

    def numbers(self) -> dict[str, float]:
        """The fields that are one number, as trackers plot them; NaN and infinity included."""
        values = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def reduce_over_ranks(metrics: StepMetrics, *, axis: Axis) -> StepMetrics:
    """One value of every number from those of the ranks of ``axis``, by the declared rules; the same on all.

    One collective whose size depends on the declaration alone, so that ranks that measured different
    things cannot hang. Fields that are not one number (text, lists) stay this rank's own.

    Args:
        metrics: this rank's values, in fp64 on the way: integers are exact up to 2^53.
    """
    if axis.size == 1:
        return metrics
    own = metrics.numbers()
    names = [item.name for item in dataclasses.fields(StepMetrics)]
    local = torch.tensor([[own.get(n, 0.0) for n in names], [float(n in own) for n in names]], dtype=torch.float64)
    gathered = gather_plain(local.unsqueeze(0), axis, dim=0)
    changes: dict[str, Any] = {}
    for column, item in enumerate(dataclasses.fields(StepMetrics)):
        has = [rank for rank in range(axis.size) if gathered[rank][1, column] > 0]
        if has:
            values = torch.stack([gathered[rank][0, column] for rank in has])
            number = _REDUCTIONS[item.metadata["reduce"]](values).item()
            changes[item.name] = _like(getattr(metrics, item.name), number)
    return dataclasses.replace(metrics, **changes)


def _like(value: Any, number: float) -> Any:
    """``number`` as the type of this rank's ``value`` (a float where this rank had none)."""
    return type(value)(number) if isinstance(value, int) else number


class Tracker(Protocol):
    """Takes the steps of a run, one object each."""

    def log(self, metrics: StepMetrics) -> None:
        """Record one step."""

    def sync(self) -> None:
        """Make durable what was logged, where the tracker writes files of the run."""

    def close(self) -> None:
        """Make durable what was logged, and let go."""


@dataclass
class TrackerConfig:
    """Where metrics go besides `metrics.jsonl`, which is always written.

    tensorboard: event files under the run folder's ``tensorboard``.
    wandb: a Weights & Biases run; ``mode`` "offline" needs no network and no account.
    project: its wandb project.
    mode: "online", "offline" or "disabled", for wandb.
    """

    AT_RESUME: ClassVar[str] = ""

    tensorboard: bool = False
    wandb: bool = False
    project: str = "perilune"
    mode: str = "offline"

    def errors(self) -> list[str]:
        """Every violated rule, a missing package included: field, value, rule, remedy."""
        found = []
        for name, wanted in (("tensorboard", self.tensorboard), ("wandb", self.wandb)):
            if wanted and importlib.util.find_spec(name) is None:
                found.append(_missing(name))
        modes = ("online", "offline", "disabled")
        if self.mode not in modes:
            found.append(f"trackers.mode={self.mode}: must be one of {', '.join(modes)}; choose one of them")
        if self.wandb and not self.project:
            found.append("trackers.project='': must not be empty with trackers.wandb=true; name a project")
        return found


def load_run_id(run_dir: Path) -> str:
    """The run's id, drawn once and kept in the run folder, so that a resumed run is the same run."""
    path = run_dir / RUN_ID_FILE
    if not path.exists():
        staged = run_dir / f".{RUN_ID_FILE}.tmp"
        staged.write_text(secrets.token_hex(4) + "\n", "utf-8")
        staged.replace(path)
    return path.read_text("utf-8").strip()


class JsonlTracker:
    """One JSON object per step and line. Every line is written at once, or (disk full) kept and tried
    again with the next; the file never ends in part of a line that this process wrote."""

    def __init__(self, path: Path, *, resume_step: int) -> None:
        """Open ``path`` to go on after ``resume_step``: lines of later steps are dropped (0: all)."""
        rewind(path, step=resume_step)
        self._path = path
        self._pending = b""
        self._size = path.stat().st_size
        self._file = os.open(path, os.O_WRONLY)

    def log(self, metrics: StepMetrics) -> None:
        self._pending += (json.dumps(metrics.as_json(), allow_nan=False) + "\n").encode()
        try:
            self._write()
        except OSError as error:
            logger.warning("%s: writing failed (%s); will be tried again at the next step", self._path, error)

    def sync(self) -> None:
        try:
            self._write()
            os.fsync(self._file)
        except OSError as error:
            logger.warning("%s: is not durable (%s); will be tried again", self._path, error)

    def close(self) -> None:
        try:
            self._write()
            os.fsync(self._file)
        finally:
            os.close(self._file)

    def _write(self) -> None:
        written = 0
        try:
            while written < len(self._pending):
                written += os.pwrite(self._file, self._pending[written:], self._size + written)
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += written
        self._pending = b""


def rewind(path: Path, *, step: int) -> None:
    """Drop the lines of steps after ``step`` from the end of a metrics file, at once; creates it if absent.

    No more is read than is dropped. A torn last line, as a killed process leaves it, is dropped too.
    """
    path.touch()
    kept = 0
    for start, line in reversed_lines(path) if step > 0 else ():
        found = parse_step(line)
        if found is not None and found["step"] <= step:
            kept = start + len(line)
            break
        if found is None:
            logger.warning("%s: dropping a line that is not a step's object: %.80r", path, line)
    if kept < path.stat().st_size:
        with path.open("rb+") as stream:
            stream.truncate(kept)
            os.fsync(stream.fileno())


def parse_step(line: bytes) -> dict[str, Any] | None:
    """The step's object in a line of `metrics.jsonl`; None if it is torn or something else."""
    try:
        found = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return found if isinstance(found, dict) and isinstance(found.get("step"), int) else None


def reversed_lines(path: Path, *, block: int = 2**16) -> Iterator[tuple[int, bytes]]:
    """(byte at which it begins, line with its end) from the last line of a file to the first; reads what is asked for.

    Args:
        block: bytes read at a time.
    """
    with path.open("rb") as stream:
        begin = stream.seek(0, os.SEEK_END)
        rest = b""
        while begin > 0:
            length = min(block, begin)
            begin -= length
            stream.seek(begin)
            lines = (stream.read(length) + rest).splitlines(keepends=True)
            # The first may begin earlier.
            rest = lines[0]
            end = begin + sum(map(len, lines))
            for line in reversed(lines[1:]):
                end -= len(line)
                yield end, line
        if rest:
            yield 0, rest


class TensorBoardTracker:
    """Scalars and sample texts as TensorBoard event files."""

    def __init__(self, folder: Path, *, resume_step: int) -> None:
        """Write under ``folder``; TensorBoard discards what earlier legs logged after ``resume_step``.

        Raises:
            ValueError: the package is not installed.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(_missing("tensorboard")) from error
        self._writer: Any = SummaryWriter(str(folder), purge_step=resume_step + 1 if resume_step else None)

    def log(self, metrics: StepMetrics) -> None:
        for name, value in metrics.numbers().items():
            if name != "step":
                self._writer.add_scalar(name, value, metrics.step)
        if metrics.sample is not None:
            self._writer.add_text("sample", metrics.sample, metrics.step)

    def sync(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run.

    The x axis is our own ``step``: wandb's built-in one must grow, so it would drop the steps that a
    resumed run does again. Offline, every leg of a run is a folder of its own under ``wandb``, all with
    the run's id; ``wandb sync`` them in the order of their times.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        project: str,
        run_id: str,
        mode: str,
        config: dict[str, Any],
        client: Any = None,
    ) -> None:
        """Start or go on with run ``run_id``.

        Args:
            run_dir: the run's folder; wandb keeps its files under it.
            project: see `TrackerConfig`.
            run_id: see `load_run_id`.
            mode: see `TrackerConfig`.
            config: the composed configuration, shown with the run.
            client: stands in for the module ``wandb``.

        Raises:
            ValueError: the package is not installed, or it cannot start the run.
        """
        if client is None:
            try:
                client = importlib.import_module("wandb")
            except ImportError as error:
                raise ValueError(_missing("wandb")) from error
        try:
            self._run = client.init(
                project=project, id=run_id, resume="allow", mode=mode, dir=str(run_dir), config=config
            )
        except Exception as error:
            # Its own errors share no public base class: no key, no network, a project of somebody else.
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(
                f"trackers.wandb=true: wandb could not start ({reason}); run `wandb login` or set WANDB_API_KEY, "
                "or set trackers.mode=offline"
            ) from error
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: StepMetrics) -> None:
        values: dict[str, Any] = dict(metrics.numbers())
        if metrics.sample is not None:
            values["sample"] = metrics.sample
        self._run.log(values)

    def sync(self) -> None:
        """wandb sends what it has by itself."""

    def close(self) -> None:
        self._run.finish()


def _missing(package: str) -> str:
    return (
        f"trackers.{package}=true: the package {package} is not installed; pip install 'perilune[{package}]' "
        f"or set it to false"
    )


class TrackerSet:
    """Several trackers as one that never raises; empty on every rank but 0."""

    def __init__(self, trackers: list[Tracker]) -> None:
        self._trackers = list(trackers)

    def log(self, metrics: StepMetrics) -> None:
        self._each("log", metrics)

    def sync(self) -> None:
        self._each("sync")

    def close(self) -> None:
        self._each("close")
        self._trackers = []

    def _each(self, method: str, *args: StepMetrics) -> None:
        for tracker in list(self._trackers):
            try:
                getattr(tracker, method)(*args)
            except Exception as error:
                self._trackers.remove(tracker)
                logger.warning(
                    "%s failed (%s: %s); training goes on without it",
                    type(tracker).__name__,
                    type(error).__name__,
                    error,
                )


def make_trackers(
    config: TrackerConfig,
    *,
    run_dir: Path,
    run_id: str,
    config_dict: dict[str, Any],
    resume_step: int = 0,
    rank: int = 0,
) -> TrackerSet:
    """The trackers of this rank, rewound to ``resume_step``: rank 0 has all of them, the others none.

    Raises:
        ValueError: a wanted package is not installed.
        OSError: `metrics.jsonl` cannot be opened.
    """
    if rank != 0:
        return TrackerSet([])
    trackers: list[Tracker] = [JsonlTracker(run_dir / METRICS_FILE, resume_step=resume_step)]
    if config.tensorboard:
        trackers.append(TensorBoardTracker(run_dir / "tensorboard", resume_step=resume_step))
    if config.wandb:
        trackers.append(
            WandbTracker(run_dir, project=config.project, run_id=run_id, mode=config.mode, config=config_dict)
        )
    return TrackerSet(trackers)
