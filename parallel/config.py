"""How a run is cut over its ranks: the `parallel` section of a configuration."""

from dataclasses import dataclass, field
from typing import ClassVar

from parallel.expert.config import ExpertsConfig
from parallel.pipeline.config import PipelineConfig


@dataclass
class ParallelConfig(PipelineConfig):
    """Ranks along each axis, and how the ranks of an axis share its work. ``dp`` 0 takes all ranks left."""

    AT_RESUME: ClassVar[str] = ""

    tp: int = 1
    ep: int = 1
    cp: int = 1
    dp: int = 0
    zero: int = 1
    """1: every rank sums all gradients of its step. 2: only those that it updates; each microbatch is reduced."""
    experts: ExpertsConfig = field(default_factory=ExpertsConfig)

    def resolved_dp(self, world_size: int) -> int:
        """Data-parallel size: as given, or what the other axes leave of ``world_size``."""
        return self.dp or max(1, world_size // max(1, self.tp * self.pp * self.cp))

    def errors(self, world_size: int) -> list[str]:
        """Every contradiction, one line each: field, value, rule, remedy.

        Args:
            world_size: ranks that were launched.
        """
        found = []
        for name in ("tp", "pp", "vpp", "ep", "cp", "dp"):
            value, least = getattr(self, name), 0 if name == "dp" else 1
            if value < least:
                meaning = "takes the ranks that other axes leave" if name == "dp" else "cuts nothing"
                found.append(f"parallel.{name}={value}: must be at least {least}; use {least}, which {meaning}")
        if found:
            return found
        dp = self.resolved_dp(world_size)
        needed = self.pp * dp * self.cp * self.tp
        if needed != world_size:
            fits = world_size % (self.pp * self.cp * self.tp) == 0
            remedy = "set parallel.dp=0 to take every rank" if fits else "let pp x cp x tp divide what is launched"
            cuts = [f"parallel.{name}={getattr(self, name)}" for name in ("pp", "cp", "tp") if getattr(self, name) > 1]
            given = f"parallel.dp={dp}" if self.dp else ", ".join(cuts)
            found.append(
                f"{given}: contradicts the {world_size} launched rank(s), since pp x dp x cp x tp = "
                f"{self.pp} x {dp} x {self.cp} x {self.tp} = {needed}; launch {needed}, or {remedy}"
            )
        if (dp * self.cp) % self.ep:
            found.append(
                f"parallel.ep={self.ep}: must divide dp x cp = {dp * self.cp}, the ranks that experts are spread over; "
                "use a divisor of it"
            )
        if self.zero not in (1, 2):
            found.append(f"parallel.zero={self.zero}: must be 1 or 2; 1 moves less, 2 needs less memory for gradients")
        return found + self.pipeline_errors() + self.experts.errors()
