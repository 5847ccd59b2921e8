"""Settings of the training run itself; the other rooms' settings stand beside the code they configure."""

from dataclasses import dataclass
from typing import ClassVar

from data.edges import place_error

PRECISIONS = ("auto", "bf16", "fp32", "fp64")


@dataclass
class RunSettings:
    """Where a run lives. The same folder again resumes it."""

    AT_RESUME: ClassVar[str] = "another beginning: other first weights, or data in another order"
    FREE_AT_RESUME: ClassVar[tuple[str, ...]] = ("name", "dir", "cache", "timeout", "max_minutes")

    name: str = "run"
    dir: str = "runs/${run.name}"
    cache: str = "runs/cache"
    """Where the default corpus is kept between runs."""
    seed: int = 0
    timeout: float = 600.0
    """Seconds that a rank waits for the others in one collective before the run fails. A rank that fails or dies ends
    the others at once; this is for one that hangs."""
    init_from: str = ""
    """Begin from the weights of another run's folder or checkpoint, or of an exported model, with a new optimizer,
    schedule and data. A run that has a checkpoint of its own goes on with that."""
    max_minutes: float = 0.0
    """Time that the process has: it saves and stops in time by itself, and the same command goes on; 0 is no limit."""

    def errors(self) -> list[str]:
        """Every problem, one line each."""
        found = []
        for name, example in (("name", "mine"), ("dir", "runs/mine"), ("cache", "runs/cache")):
            value = getattr(self, name)
            if not value.strip():
                found.append(f"run.{name}={value!r}: must not be empty; name one, such as run.{name}={example}")
            elif name != "name" and (problem := place_error(f"run.{name}", value)) is not None:
                found.append(problem)
        if (problem := place_error("run.init_from", self.init_from)) is not None:
            found.append(problem)
        if not -(2**63) <= self.seed < 2**64:
            found.append(
                f"run.seed={self.seed}: must lie in -2^63..2^64-1, what a generator takes; choose a smaller one"
            )
        if not 0 < self.timeout <= 1e9:
            found.append(f"run.timeout={self.timeout}: must lie above 0 and be at most 1e9 s; 600 suits slow storage")
        if not 0 <= self.max_minutes <= 1e9:
            found.append(f"run.max_minutes={self.max_minutes}: must lie in 0..1e9; 0 is no limit")
        return found


@dataclass
class TrainSettings:
    """How far and how a run trains. ``steps`` only says when to stop: the learning rate follows tokens."""

    AT_RESUME: ClassVar[str] = "another precision: the steps to come would be computed otherwise"
    FREE_AT_RESUME: ClassVar[tuple[str, ...]] = (
        "steps",
        "max_skipped",
        "loss_chunk",
        "detail_every",
        "replica_check_every",
    )

    steps: int = 1000
    precision: str = "auto"
    """auto: bf16 where its products are fast (GPUs, CPUs with units for it), else fp32; decided when a run begins.
    bf16: bf16 compute, fp32 master weights and gradient sums. fp32: fp32 throughout.
    fp64: for proofs that two runs are equal."""
    max_skipped: int = 10
    """Updates skipped in a row for a non-finite loss or gradient before the run gives up."""
    loss_chunk: int = 1024
    """Tokens whose logits exist at once."""
    detail_every: int = 10
    """Steps between records of the experts' loads in metrics.jsonl; 0 is never."""
    replica_check_every: int = 100
    """Steps between comparisons of the parameters and router biases that ranks hold copies of; 0 is never."""

    def errors(self) -> list[str]:
        """Every problem, one line each."""
        found = []
        for name in ("steps", "max_skipped", "loss_chunk"):
            if getattr(self, name) < 1:
                found.append(f"train.{name}={getattr(self, name)}: must be at least 1")
        for name in ("detail_every", "replica_check_every"):
            if getattr(self, name) < 0:
                found.append(f"train.{name}={getattr(self, name)}: must be at least 0; 0 is never")
        if self.precision not in PRECISIONS:
            found.append(f"train.precision={self.precision}: must be one of {', '.join(PRECISIONS)}")
        return found


@dataclass
class EvaluateSettings:
    """Held-out loss and a sample of text every so many steps; 0 is never."""

    AT_RESUME: ClassVar[str] = ""

    every: int = 0
    tokens: int = 65536
    """Most validation tokens per evaluation."""
    sample_tokens: int = 128
    """Tokens of the text sample; 0 takes none."""
    prompt: str = ""
    """What the sample continues; empty begins a new document."""
    temperature: float = 0.8

    def errors(self) -> list[str]:
        """Every problem, one line each."""
        found = []
        for name in ("every", "sample_tokens"):
            if getattr(self, name) < 0:
                found.append(f"evaluate.{name}={getattr(self, name)}: must be at least 0; 0 is never")
        if self.tokens < 1:
            found.append(f"evaluate.tokens={self.tokens}: must be at least 1")
        if self.temperature < 0:
            found.append(f"evaluate.temperature={self.temperature}: must be at least 0; 0 is greedy")
        return found
