"""The choices of expert parallelism."""

from dataclasses import dataclass

DISPATCHERS = ("all_to_all", "balanced")


@dataclass
class ExpertsConfig:
    """How expert-parallel ranks share the rows of a layer.

    dispatcher: "all_to_all" computes every expert at its home; "balanced" gives every rank the same number of rows,
        whatever the routing, by lending copies of hot experts for one pass.
    balance_above: balanced: act only where the busiest rank has more than this many times the mean; 1 is always.
    deduplicate: a token with several experts on a rank travels there once, and their sum comes back.
    """

    dispatcher: str = "all_to_all"
    balance_above: float = 1.0
    deduplicate: bool = False

    def errors(self) -> list[str]:
        """Every problem, one line each."""
        found = []
        if self.dispatcher not in DISPATCHERS:
            found.append(
                f"parallel.experts.dispatcher={self.dispatcher}: must be one of {', '.join(DISPATCHERS)}; with "
                "parallel.ep=1 nothing is exchanged"
            )
        if not self.balance_above >= 1:
            found.append(
                f"parallel.experts.balance_above={self.balance_above}: must be at least 1, the ratio of perfect "
                "balance; use 1 to balance always"
            )
        return found
