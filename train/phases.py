"""What a step looks like as a function of the tokens consumed: batch, length and learning rate.

Everything is on one *token clock*. Warm-up and decay are written in tokens, so changing the batch, or when a
run stops, neither stretches the warm-up nor leaves the decay unfinished.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

DECAYS = ("cosine", "wsd")

AUTO_TOKENS = 2048
"""Most tokens of a microbatch whose size is not given: enough to keep two cores busy, and one sample of a long
context."""


@dataclass
class BatchConfig:
    """One optimizer step consumes ``sequences`` samples of ``length`` tokens, over all ranks."""

    AT_RESUME: ClassVar[str] = "other batches: a step would take other samples, and the token clock go at another pace"
    FREE_AT_RESUME: ClassVar[tuple[str, ...]] = ("microbatch",)

    length: int = 8192
    """Tokens of a sample: the context length."""
    sequences: int = 512
    microbatch: int = 0
    """Samples that a rank runs forward and backward at once; 0: as many as fit, see `microbatch_of`."""

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.length * self.sequences

    def microbatch_of(self, *, dp: int, pp: int) -> int:
        """Samples of a microbatch on this mesh: those asked for, else the most of which `AUTO_TOKENS` hold all tokens.

        Always a divisor of a rank's samples and at least one; a pipeline has a microbatch for each of its ``pp`` ranks
        where there are samples enough.
        """
        if self.microbatch:
            return self.microbatch
        share = self.sequences // dp
        most = max(1, min(AUTO_TOKENS // self.length, share // pp))
        return max(size for size in range(1, most + 1) if share % size == 0)

    def errors(self, dp: int) -> list[str]:
        """Every problem, one line each.

        Args:
            dp: data-parallel size.
        """
        found = [
            f"batch.{name}={getattr(self, name)}: must be at least 1"
            for name in ("length", "sequences")
            if getattr(self, name) < 1
        ]
        if self.microbatch < 0:
            found.append(f"batch.microbatch={self.microbatch}: must be at least 0; 0 takes as many as fit")
        if found:
            return found
        share, left = divmod(self.sequences, dp)
        if left:
            common = math.gcd(self.sequences, dp)
            found.append(
                f"batch.sequences={self.sequences}: must be divisible by the data-parallel size {dp}; give a factor of "
                f"{dp // common} of the ranks to another axis, as parallel.cp={dp // common}, launch fewer, or begin a "
                f"new run with batch.sequences={max(1, self.sequences // dp) * dp}"
            )
        elif self.microbatch and share % self.microbatch:
            found.append(
                f"batch.microbatch={self.microbatch}: must divide the {share} sequences of each rank "
                f"(batch.sequences={self.sequences} over dp={dp}); batch.microbatch=0 takes a divisor that fits"
            )
        return found


@dataclass
class ScheduleConfig:
    """Learning-rate factor by consumed tokens: linear warm-up, then "cosine" or "wsd" down to ``minimum``.

    cosine decays from the end of warm-up to ``total_tokens``; wsd (warm-up, stable, decay) stays at 1 and
    decays linearly over the last ``decay_tokens``. After ``total_tokens`` the factor stays at the minimum.
    """

    AT_RESUME: ClassVar[str] = "another learning rate"

    kind: str = "cosine"
    warmup_tokens: int = 0
    total_tokens: int = 0
    decay_tokens: int = 0
    minimum: float = 0.1

    def errors(self) -> list[str]:
        """Every problem, one line each."""
        found = []
        if self.kind not in DECAYS:
            found.append(f"schedule.kind={self.kind}: must be one of {', '.join(DECAYS)}")
        if self.total_tokens < 1:
            found.append(f"schedule.total_tokens={self.total_tokens}: must be at least 1")
        if not 0 <= self.warmup_tokens < max(1, self.total_tokens):
            found.append(
                f"schedule.warmup_tokens={self.warmup_tokens}: must lie in 0..{self.total_tokens - 1}, below "
                f"schedule.total_tokens={self.total_tokens}"
            )
        if self.decay_tokens < 0:
            found.append(f"schedule.decay_tokens={self.decay_tokens}: must be at least 0; only wsd uses it")
        if not 0 <= self.minimum <= 1:
            found.append(f"schedule.minimum={self.minimum}: a factor of the peak, must lie in 0..1")
        room = self.total_tokens - self.warmup_tokens
        if self.kind == "wsd" and self.decay_tokens >= 0 and not 1 <= self.decay_tokens <= room:
            found.append(f"schedule.decay_tokens={self.decay_tokens}: must lie in 1..{room}, the tokens after warm-up")
        return found


def learning_rate_factor(schedule: ScheduleConfig, tokens: int) -> float:
    """Factor of the peak learning rate for the step that brings the run to ``tokens`` consumed tokens.

    The clock is read after the step, so the first step already moves (at 1/n of the peak in a warm-up of n
    equal steps) and the step that reaches ``total_tokens`` runs at the minimum.
    """
    if tokens < schedule.warmup_tokens:
        return tokens / schedule.warmup_tokens
    if tokens >= schedule.total_tokens:
        return schedule.minimum
    span = 1 - schedule.minimum
    if schedule.kind == "cosine":
        progress = (tokens - schedule.warmup_tokens) / (schedule.total_tokens - schedule.warmup_tokens)
        return schedule.minimum + span * 0.5 * (1 + math.cos(math.pi * progress))
    left = (schedule.total_tokens - tokens) / schedule.decay_tokens
    return schedule.minimum + span * min(1.0, left)
