"""How the rows of an expert layer were shared among ep ranks: what a dispatcher over several ranks counts."""

from dataclasses import dataclass

from parallel.expert.planner import ExpertPlan


@dataclass
class RowStats:
    """Rows of one expert layer, summed over passes; host integers, all but ``computed`` equal on the ep ranks.

    A row is one (token, choice) pair.

    chosen: of all ranks together.
    home: of the busiest rank if every expert were computed at its home, pass by pass.
    busiest: of the busiest rank, as planned.
    computed: what this rank computed.
    borrowed: copies of experts that were lent.
    lent_bytes: of their weights, of each this rank's slice.
    """

    chosen: int = 0
    home: int = 0
    busiest: int = 0
    computed: int = 0
    borrowed: int = 0
    lent_bytes: int = 0

    def add(self, plan: ExpertPlan, *, computed: int, expert_bytes: int) -> None:
        """Add one pass: its plan, the rows with a place on this rank, the bytes of this rank's slice of one expert."""
        borrowed = int((plan.borrowed >= 0).sum())
        self.chosen += int(plan.counts.sum())
        self.home += int(plan.counts.sum(dim=0).view(len(plan.borrowed), -1).sum(dim=1).max())
        self.busiest += int(plan.rows.sum(dim=1).max())
        self.computed += computed
        self.borrowed += borrowed
        self.lent_bytes += borrowed * expert_bytes
