"""The choices of a pipeline: its size, how the model is cut and placed, and the order of the work."""

from dataclasses import dataclass, field

SCHEDULES = ("auto", "gpipe", "1f1b", "interleaved", "zero_bubble")
PLACEMENTS = ("loop", "v")
BALANCES = ("even", "cost")


@dataclass
class PipelineConfig:
    """Pipeline ranks ``pp``, virtual stages on each ``vpp``, and what they do in which order."""

    pp: int = 1
    vpp: int = 1
    schedule: str = "auto"
    """Order of a pipeline's work: "gpipe", "1f1b", "interleaved" or "zero_bubble"; "auto" is 1f1b, interleaved where
    vpp is above 1."""
    placement: str = "loop"
    """Ranks of the virtual stages: "loop" 0 1 2 0 1 2, "v" 0 1 2 2 1 0."""
    balance: str = "even"
    """How layers are shared out where ``layout`` is empty: "even", the remainder to the first stages, or by "cost"."""
    layout: list[int] = field(default_factory=list)
    """Layers of each of the pp x vpp virtual stages."""
    bank_cache: bool = True
    """Whether pipeline ranks keep residual rows over their virtual stages, so that no row comes to a rank twice."""

    def pipeline_errors(self) -> list[str]:
        """Every contradiction among these, one line each: field, value, rule, remedy."""
        found = []
        for name, known in (("schedule", SCHEDULES), ("placement", PLACEMENTS), ("balance", BALANCES)):
            if getattr(self, name) not in known:
                found.append(f"parallel.{name}={getattr(self, name)}: must be one of {', '.join(known)}")
        if self.vpp > 1 and self.pp == 1:
            found.append(f"parallel.vpp={self.vpp}: virtual stages need parallel.pp above 1; set parallel.vpp=1")
        if self.placement == "v" and self.vpp != 2:
            found.append(
                f"parallel.placement=v: contradicts parallel.vpp={self.vpp}, since a V passes every rank twice; set "
                "parallel.vpp=2 or parallel.placement=loop"
            )
        if self.schedule == "1f1b" and self.vpp > 1:
            found.append(
                f"parallel.schedule=1f1b: contradicts parallel.vpp={self.vpp}, since it runs one stage per rank; set "
                "parallel.schedule=interleaved or parallel.vpp=1"
            )
        return found
