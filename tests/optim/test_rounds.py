"""The rounds of Muon's exchange: every matrix once, bounded memory, even work, equal matrices together."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.rounds import Shape, newton_schulz_cost, plan_rounds

SHAPES = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40), st.integers(1, 40)), max_size=8)
RANKS = st.integers(1, 5)
# From less than one matrix to all of them.
BYTES = st.integers(1, 40_000)


def named(shapes: list[Shape]) -> dict[str, Shape]:
    return {str(i): shape for i, shape in enumerate(shapes)}


@settings(deadline=None)
@given(shapes=SHAPES, ranks=RANKS, round_bytes=BYTES)
def test_every_matrix_is_in_one_round_in_order(shapes: list[Shape], ranks: int, round_bytes: int) -> None:
    matrices = named(shapes)
    rounds = plan_rounds(matrices, ranks=ranks, round_bytes=round_bytes)
    done = dict.fromkeys(matrices, 0)
    for portions in rounds:
        assert portions
        for portion in portions:
            assert len(portion.counts) == ranks
            assert done[portion.name] == portion.start < portion.stop
            done[portion.name] = portion.stop
    assert done == {name: count for name, (count, _, _) in matrices.items()}


@settings(deadline=None)
@given(shapes=SHAPES, ranks=RANKS, round_bytes=BYTES)
def test_a_rank_holds_no_more_than_the_bound_or_one_matrix(shapes: list[Shape], ranks: int, round_bytes: int) -> None:
    matrices = named(shapes)
    for portions in plan_rounds(matrices, ranks=ranks, round_bytes=round_bytes):
        for rank in range(ranks):
            counts = {portion.name: portion.counts[rank] for portion in portions}
            held = sum(4 * count * matrices[name][1] * matrices[name][2] for name, count in counts.items())
            assert held <= round_bytes or sum(counts.values()) == 1


@settings(deadline=None)
@given(shapes=SHAPES, ranks=RANKS, round_bytes=BYTES)
def test_work_is_shared_evenly(shapes: list[Shape], ranks: int, round_bytes: int) -> None:
    matrices = named(shapes)
    costs = {name: newton_schulz_cost(rows, columns) for name, (_, rows, columns) in matrices.items()}
    load = [0.0] * ranks
    for portions in plan_rounds(matrices, ranks=ranks, round_bytes=round_bytes):
        for portion in portions:
            load = [done + count * costs[portion.name] for done, count in zip(load, portion.counts)]
        assert max(load) - min(load) <= max(costs.values()) * (1 + 1e-9)


@settings(deadline=None)
@given(shapes=SHAPES, ranks=RANKS, round_bytes=BYTES)
def test_the_bound_does_not_move_a_matrix_to_another_rank(shapes: list[Shape], ranks: int, round_bytes: int) -> None:
    matrices = named(shapes)

    def totals(bound: int) -> dict[str, list[int]]:
        found = {name: [0] * ranks for name in matrices}
        for portions in plan_rounds(matrices, ranks=ranks, round_bytes=bound):
            for portion in portions:
                found[portion.name] = [a + b for a, b in zip(found[portion.name], portion.counts)]
        return found

    assert totals(round_bytes) == totals(2**40)


@pytest.mark.parametrize(("round_bytes", "rounds"), [(1, 4), (4 * 24, 2), (2**20, 1)])
def test_equal_matrices_are_together(round_bytes: int, rounds: int) -> None:
    """Three parameters of two transposed shapes, which cost the same."""
    matrices = {"up": (3, 3, 4), "down": (3, 4, 3), "gate": (1, 3, 4)}
    found = plan_rounds(matrices, ranks=2, round_bytes=round_bytes)
    assert len(found) == rounds
    order = [portion.name for portions in found for portion in portions]
    assert list(dict.fromkeys(order)) == ["up", "gate", "down"]


def test_all_ranks_have_work_in_every_round() -> None:
    rounds = plan_rounds({"large": (8, 64, 64), "small": (16, 8, 8)}, ranks=4, round_bytes=1)
    assert [[portion.counts for portion in portions] for portions in rounds] == [[(1, 1, 1, 1)]] * 6


@pytest.mark.parametrize(("shape", "flops"), [((1, 1), 30), ((2, 3), 320), ((3, 2), 320)], ids=str)
def test_cost_closed_form(shape: tuple[int, int], flops: int) -> None:
    """5 (4 r^2 c + 2 r^3), r the smaller side."""
    assert newton_schulz_cost(*shape) == flops


@pytest.mark.parametrize(("spare", "rounds"), [(-1, 2), (0, 1), (1, 1)])
def test_a_round_may_be_exactly_full(spare: int, rounds: int) -> None:
    """Two turns of fp32 matrices of three by four."""
    assert len(plan_rounds({"m": (4, 3, 4)}, ranks=2, round_bytes=2 * 4 * 3 * 4 + spare)) == rounds


def test_an_odd_matrix_goes_to_the_first_rank_and_no_matrices_make_no_round() -> None:
    assert [[p.counts for p in portions] for portions in plan_rounds({"m": (3, 2, 2)}, ranks=2, round_bytes=64)] == [
        [(2, 1)]
    ]
    assert plan_rounds({}, ranks=2, round_bytes=64) == ()
    assert plan_rounds({"none": (0, 2, 2)}, ranks=2, round_bytes=64) == ()
