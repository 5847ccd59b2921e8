"""Schedules are complete and free of deadlocks for any shape, and cost what the theory says."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.pipeline.layout import PipelineLayout
from parallel.pipeline.schedule import (
    SPLIT_COSTS,
    UNSPLIT_COSTS,
    Action,
    Clock,
    Schedule,
    arrivals,
    check,
    forward_only,
    make_schedule,
    receiver,
    simulate,
)

NAMES = ["gpipe", "auto", "zero_bubble"]


def chain(ranks: int, per_rank: int = 1, placement: str = "loop") -> PipelineLayout:
    return PipelineLayout((1,) * (ranks * per_rank), ranks=ranks, placement=placement)


def kinds(name: str) -> str:
    return "FBW" if name == "zero_bubble" else "FB"


def clock(name: str, layout: PipelineLayout, microbatches: int) -> Clock:
    costs = SPLIT_COSTS if name == "zero_bubble" else UNSPLIT_COSTS
    return simulate(make_schedule(name, layout, microbatches=microbatches), layout, costs=costs)


shapes = st.one_of(
    st.builds(chain, st.integers(1, 5), st.integers(1, 3)),
    st.builds(lambda ranks: chain(ranks, 2, "v"), st.integers(2, 5)),
)


@given(st.sampled_from(NAMES), shapes, st.integers(1, 11))
@settings(deadline=None, max_examples=150)
def test_every_action_once_in_an_order_that_works(name: str, layout: PipelineLayout, microbatches: int) -> None:
    schedule = make_schedule(name, layout, microbatches=microbatches)
    check(schedule, layout, microbatches=microbatches, kinds=kinds(name))


@given(shapes, st.integers(1, 11))
@settings(deadline=None)
def test_evaluations_are_forward_only_and_keep_few_microbatches(layout: PipelineLayout, microbatches: int) -> None:
    schedule = forward_only(layout, microbatches=microbatches)
    check(schedule, layout, microbatches=microbatches, kinds="F")
    for rank, actions in enumerate(schedule):
        first, *_, last = stages = layout.stages_of(rank) * 2
        assert stages
        open_, most = set(), 0
        for action in actions:
            open_ |= {action.microbatch} if action.stage == first else set()
            most = max(most, len(open_))
            open_ -= {action.microbatch} if action.stage == last else set()
        assert most <= layout.ranks


@given(st.sampled_from(NAMES), shapes, st.integers(1, 7))
@settings(deadline=None)
def test_messages_come_in_the_order_of_the_sender(name: str, layout: PipelineLayout, microbatches: int) -> None:
    """What every rank is told to expect is what the others send, each once."""
    schedule = make_schedule(name, layout, microbatches=microbatches)
    expected = [arrivals(schedule, layout, rank=rank) for rank in range(layout.ranks)]
    for source, actions in enumerate(schedule):
        for target in range(layout.ranks):
            sent = [a for a in actions if (s := receiver(a, layout)) is not None and layout.rank_of(s) == target]
            assert expected[target].get(source, []) == ([] if source == target else sent)


def text(schedule: Schedule) -> list[str]:
    return [" ".join(f"{a.kind}{a.microbatch}" for a in actions) for actions in schedule]


def test_the_textbook_lists() -> None:
    assert text(make_schedule("gpipe", chain(2), microbatches=3)) == ["F0 F1 F2 B0 B1 B2"] * 2
    assert text(make_schedule("auto", chain(3), microbatches=4)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert text(make_schedule("zero_bubble", chain(2), microbatches=3)) == [
        "F0 F1 B0 F2 B1 W0 B2 W1 W2",
        "F0 B0 F1 B1 F2 B2 W0 W1 W2",
    ]
    first, _ = make_schedule("interleaved", chain(2, 2), microbatches=4)
    assert " ".join(f"{a.kind}{a.microbatch}s{a.stage}" for a in first) == (
        "F0s0 F1s0 F0s2 F1s2 F2s0 B0s2 F3s0 B1s2 F2s2 B0s0 F3s2 B1s0 B2s2 B3s2 B2s0 B3s0"
    )


def test_one_stage_is_one_microbatch_after_the_other() -> None:
    assert text(make_schedule("auto", chain(1), microbatches=3)) == ["F0 B0 F1 B1 F2 B2"]
    assert text(make_schedule("zero_bubble", chain(1), microbatches=2)) == ["F0 B0 W0 F1 B1 W1"]


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_bubbles_are_those_of_the_theory(ranks: int, groups: int) -> None:
    """(P - 1) / M; divided by the stages of a rank when interleaved; a third of that when W fills the gaps."""
    microbatches = ranks * groups
    bubble = (ranks - 1) / microbatches
    assert clock("gpipe", chain(ranks), microbatches).bubble == pytest.approx(bubble)
    assert clock("1f1b", chain(ranks), microbatches).bubble == pytest.approx(bubble)
    for per_rank in (2, 3):
        interleaved = clock("interleaved", chain(ranks, per_rank), microbatches)
        assert interleaved.bubble == pytest.approx(bubble / per_rank)
    if groups > 1:
        for per_rank in (1, 2, 3):
            filled = clock("zero_bubble", chain(ranks, per_rank), microbatches)
            assert filled.bubble == pytest.approx(bubble / 3 / per_rank)
        assert clock("zero_bubble", chain(ranks, 2, "v"), microbatches).bubble == pytest.approx(bubble / 6)


@pytest.mark.parametrize("microbatches", [3, 5, 6, 7, 9])
def test_other_numbers_of_microbatches_cost_no_more_than_the_next_multiple(microbatches: int) -> None:
    padded = -(-microbatches // 4) * 4
    for per_rank in (2, 3):
        layout = chain(4, per_rank)
        assert clock("interleaved", layout, microbatches).total <= clock("interleaved", layout, padded).total


@pytest.mark.parametrize("microbatches", [8, 32])
def test_what_ranks_hold(microbatches: int) -> None:
    assert clock("gpipe", chain(4), microbatches).held == (microbatches,) * 4
    for name in ("1f1b", "zero_bubble"):
        assert clock(name, chain(4), microbatches).held == (4, 3, 2, 1)
    # Does not grow with the number of microbatches.
    assert clock("interleaved", chain(4, 2), microbatches).held == (11, 9, 7, 5)
    assert max(clock("zero_bubble", chain(4, 2), microbatches).held) <= 11
    assert max(clock("zero_bubble", chain(4, 2, "v"), microbatches).held) <= 11


@pytest.mark.parametrize("per_rank", [1, 2])
def test_weight_gradients_do_not_pile_up(per_rank: int) -> None:
    for actions in make_schedule("zero_bubble", chain(4, per_rank), microbatches=32):
        waiting = most = 0
        for action in actions:
            waiting += {"F": 0, "B": 1, "W": -1}[action.kind]
            most = max(most, waiting)
        assert most <= 8 * per_rank


def test_a_deadlock_is_named() -> None:
    layout = chain(2)
    good = make_schedule("gpipe", layout, microbatches=1)
    stuck = (tuple(reversed(good[0])), good[1])
    with pytest.raises(AssertionError, match=r"deadlock: ranks wait before .*'B', stage=0, microbatch=0"):
        check(stuck, layout, microbatches=1, kinds="FB")


@pytest.mark.parametrize("fault", ["missing", "twice", "foreign"])
def test_the_check_sees_what_is_wrong(fault: str) -> None:
    layout = chain(2)
    one, two = make_schedule("1f1b", layout, microbatches=2)
    broken = {"missing": one[:-1], "twice": (*one, one[-1]), "foreign": (*one[:-1], Action("B", 1, 1))}[fault]
    with pytest.raises(AssertionError, match="rank 0"):
        check((broken, two), layout, microbatches=2, kinds="FB")


def test_uneven_costs_only_make_it_longer() -> None:
    layout = dataclasses.replace(chain(4), counts=(1, 2, 3, 4))
    schedule = make_schedule("1f1b", layout, microbatches=8)
    assert simulate(schedule, layout, costs={"F": 1.0, "B": 3.0}).total == pytest.approx(4 * (8 + 3))
