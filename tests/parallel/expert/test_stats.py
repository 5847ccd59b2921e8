"""What a dispatcher counts of a plan, added up over passes."""

from dataclasses import astuple

import torch

from parallel.expert.planner import plan, plan_home
from parallel.expert.stats import RowStats

# Two ranks with two experts each; all rows choose the experts of rank 0.
COUNTS = torch.tensor([[3, 1, 0, 0], [4, 0, 0, 0]])


def test_every_expert_at_home() -> None:
    stats = RowStats()
    stats.add(plan_home(COUNTS), computed=8, expert_bytes=100)
    assert stats == RowStats(chosen=8, home=8, busiest=8, computed=8)


def test_balanced_passes_add_up() -> None:
    stats = RowStats()
    balanced = plan(COUNTS)
    lent = int((balanced.borrowed >= 0).sum())
    assert lent > 0
    stats.add(balanced, computed=4, expert_bytes=100)
    assert stats == RowStats(chosen=8, home=8, busiest=4, computed=4, borrowed=lent, lent_bytes=100 * lent)
    once = astuple(stats)
    stats.add(balanced, computed=4, expert_bytes=100)
    assert astuple(stats) == tuple(2 * value for value in once)
