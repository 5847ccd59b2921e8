"""Numbers of balance, from hand-made tables of ranks."""

import math

import pytest
import torch
from torch import Tensor

from parallel.expert.stats import RowStats
from train.balance import COLUMNS, Sizes, entropy, share_of_ranks


def table(*layers: RowStats | None) -> Tensor:
    """One rank's; None is a layer of another stage."""
    return torch.tensor([[getattr(rows or RowStats(), name) for name in COLUMNS] for rows in layers])


def test_groups_tp_and_stages_count_once() -> None:
    """Two stages of one layer each, two groups of two ep ranks, each rank's experts cut over two tp ranks."""

    def rank(stage: int, group: int, ep: int) -> Tensor:
        if stage == 0:
            # The busiest rank had all of group 0's rows and 60% of group 1's; group 0 could not be quite balanced.
            rows = RowStats(chosen=100, home=(100, 60)[group], busiest=(51, 50)[group], borrowed=2 - group)
            rows.computed, rows.lent_bytes = ((49, 51), (50, 50))[group][ep], 10
            return table(rows, None)
        return table(None, RowStats(chosen=8, home=4, busiest=4, computed=4))

    ranks = [rank(s, g, e) for s in range(2) for g in range(2) for e in range(2) for _ in range(2)]
    load = torch.tensor([[150, 50], [8, 8]])
    found = share_of_ranks(torch.stack(ranks), load, Sizes(pp=2, groups=2, ep=2, tp=2))
    assert {name: value.tolist() for name, value in found.items()} == {
        "before": [2.0, 1.0],
        "after": [1.02, 1.0],
        "borrowed": [3, 0],
        # Both groups' copies, each of two slices.
        "lent_bytes": [40, 0],
        "dropped": [0, 0],
    }


def test_a_lost_row_shows() -> None:
    ranks = [table(RowStats(chosen=6, home=4, busiest=3, computed=computed)) for computed in (3, 2)]
    found = share_of_ranks(torch.stack(ranks), torch.tensor([[4, 2]]), Sizes(pp=1, groups=1, ep=2, tp=1))
    assert found["dropped"].tolist() == [1]


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ([5, 5, 5, 5], 1.0),
        ([20, 0, 0, 0], 0.0),
        ([8, 8, 0, 0], 0.5),
        ([3, 1, 0, 0], -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)),
        ([7], 1.0),
    ],
)
def test_entropy(load: list[int], expected: float) -> None:
    assert entropy(torch.tensor([load])).tolist() == [pytest.approx(expected, abs=1e-12)]
