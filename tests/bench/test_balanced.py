"""The benchmark of balancing: its numbers from hand-made timings, and one tiny measurement."""

import pytest

from parallel.expert.stats import RowStats
from tests.bench.balanced import ABOVE, BALANCED, PLAIN, Timing, load_rows, time_layer
from tests.dist.ranks import RankPool


def timing(cpu: list[float], *, computed: int, borrowed: int) -> Timing:
    rows = RowStats(chosen=16, home=12, busiest=computed, computed=computed, borrowed=borrowed, lent_bytes=2_000_000)
    return Timing(cpu, [0.5] * len(cpu), [rows] * len(cpu))


def test_the_busiest_rank_is_another_in_each_turn() -> None:
    plain = [timing([0.3, 0.1, 0.3], computed=12, borrowed=0), timing([0.1, 0.3, 0.1], computed=4, borrowed=0)]
    even = [timing([0.2] * 3, computed=8, borrowed=1)] * 2
    ranks = [{PLAIN: one, BALANCED: other, ABOVE: other} for one, other in zip(plain, even, strict=True)]
    first, second, _ = load_rows(ranks)
    assert first == [PLAIN, "1.500", "8", "0.0", "2.0", "300", "200", "1.50", "500"]
    assert second == [BALANCED, "1.000", "0", "1.0", "2.0", "200", "200", "1.00", "500"]


@pytest.mark.slow
def test_two_ranks_are_measured_under_the_same_load() -> None:
    with RankPool(2) as pool:
        ranks = pool.run(time_layer, "zipf(2)", 32, 2)
    for rank in ranks:
        for name, measured in rank.items():
            assert len(measured.cpu) == len(measured.wall) == 2
            assert all(cpu > 0 for cpu in measured.cpu)
            assert [rows.home for rows in measured.rows] == [rows.home for rows in rank[PLAIN].rows], name
    for turn in range(2):
        assert ranks[0][BALANCED].rows[turn].computed == ranks[1][BALANCED].rows[turn].computed == 32 * 4
