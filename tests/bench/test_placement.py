"""The simulator's rules do what their descriptions say, and none loses a row."""

import numpy as np
import pytest

from tests.bench.placement import balanced, homes, least_loaded, moved_slots, plain, replicate, with_replicas


def loads(seed: int, experts: int) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(8, 1.5, experts).astype(np.int64)


@pytest.mark.parametrize("ranks", [1, 4, 6, 16])
@pytest.mark.parametrize("seed", range(5))
def test_no_row_is_lost_and_every_copy_has_two_ends(seed: int, ranks: int) -> None:
    total = loads(seed, 28)
    placement = replicate(total, ranks=ranks, slots=-(-28 // ranks) + 1)
    for outcome in (
        plain(total, ranks=ranks),
        balanced(total, ranks=ranks),
        least_loaded(total, ranks=ranks),
        with_replicas(total, placement),
    ):
        assert outcome.rows.sum() == total.sum()
        assert outcome.lent.sum() == outcome.borrowed.sum()
        assert (outcome.rows >= 0).all()


def test_homes_are_even_where_ranks_do_not_divide_experts() -> None:
    assert homes(8, 4).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert np.bincount(homes(7, 4)).tolist() == [2, 2, 2, 1]


def test_balanced_is_exact() -> None:
    for ranks in (4, 6, 16):
        rows = balanced(loads(0, 28), ranks=ranks).rows
        assert rows.max() - rows.min() <= 1


def test_least_loaded_by_hand() -> None:
    total = np.array([10_000, 0, 4_100, 0, 1_900, 0])
    outcome = least_loaded(total, ranks=3)
    # At most 5334 rows a rank: expert 0 keeps as many; of its other 4666 rank 2 takes 3434 and rank 1 the rest.
    assert outcome.rows.tolist() == [5334, 5332, 5334]
    assert outcome.lent.tolist() == [2, 0, 0]
    assert outcome.borrowed.tolist() == [0, 1, 1]
    # Room for 3434 rows is not worth a product of 4000: the least loaded rank takes the whole rest.
    assert least_loaded(total, ranks=3, smallest=4000).rows.tolist() == [5334, 4100, 6566]
    # Below the threshold nothing moves.
    assert least_loaded(total, ranks=3, above=2.0).rows.tolist() == [10_000, 4_100, 1_900]


def test_least_loaded_keeps_a_rest_too_small_for_a_product_at_home() -> None:
    outcome = least_loaded(np.array([5_000, 2_000]), ranks=2, smallest=2000)
    assert outcome.rows.tolist() == [5_000, 2_000]
    assert least_loaded(np.array([5_000, 2_000]), ranks=2, smallest=1000).rows.tolist() == [3_500, 3_500]


def test_replicas_by_hand() -> None:
    # Expert 1 gets both further slots (90, 45, 30 rows a copy), largest copies first to the least loaded rank.
    placement = replicate(np.array([10, 90, 20, 30]), ranks=2, slots=3)
    assert placement.tolist() == [[1, 1, 2], [0, 1, 3]]
    outcome = with_replicas(np.array([10, 90, 20, 30]), placement)
    assert outcome.rows.tolist() == [80, 70]
    # The second copy on rank 0 needs nothing from another rank.
    assert outcome.lent.tolist() == [1, 0]
    assert outcome.borrowed.tolist() == [0, 1]


def test_a_changed_placement_moves_what_was_not_there() -> None:
    assert moved_slots(np.array([[0, 1], [2, 3]]), np.array([[1, 2], [2, 0]])) == 2
