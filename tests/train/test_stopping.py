"""When a rank wants to stop: asked, or in time for one more step and a save."""

import pytest

import train.stopping
from train.stopping import FIRST_SAVE, MARGIN, RECENT, Stopping


class Clock:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(train.stopping.time, "monotonic", clock)
    return clock


def test_nobody_asked_and_no_limit(clock: Clock) -> None:
    stopping = Stopping()
    stopping.step_took(1e9)
    clock.now += 1e9
    assert stopping.wanted() is None


def test_the_first_request_counts(clock: Clock) -> None:
    stopping = Stopping()
    stopping.request("SIGTERM")
    stopping.request("Ctrl-C")
    assert stopping.wanted() == "SIGTERM"


@pytest.mark.parametrize(("step", "save"), [(10.0, 30.0), (50.0, 1.0), (0.001, 0.001)])
def test_time_is_left_for_the_longest_step_and_save(clock: Clock, step: float, save: float) -> None:
    stopping = Stopping(minutes=10, began=clock.now)
    for seconds in (step / 2, step, step / 3):
        stopping.step_took(seconds)
    stopping.save_took(save)
    stopping.save_took(save / 2)
    clock.now += 600 - MARGIN * (step + save) - 0.001
    assert stopping.wanted() is None
    clock.now += 0.002
    assert stopping.wanted() == "run.max_minutes=10"
    # Whatever happens afterwards.
    clock.now -= 100
    assert stopping.wanted() == "run.max_minutes=10"


@pytest.mark.parametrize(("minutes", "reserve"), [(1.0, 6.0), (100.0, 60.0)])
def test_before_the_first_save_a_part_of_the_time_is_kept_for_it(clock: Clock, minutes: float, reserve: float) -> None:
    stopping = Stopping(minutes=minutes, began=clock.now)
    stopping.step_took(2.0)
    assert FIRST_SAVE == (0.1, 60.0)
    assert stopping.reserve() == pytest.approx(MARGIN * (2.0 + reserve))


def test_the_time_from_before_counts(clock: Clock) -> None:
    assert Stopping(minutes=1, began=clock.now - 61).wanted() == "run.max_minutes=1"


def test_a_long_step_of_long_ago_is_forgotten(clock: Clock) -> None:
    stopping = Stopping(minutes=1)
    stopping.save_took(0.0)
    stopping.step_took(50.0)
    for _ in range(RECENT):
        stopping.step_took(1.0)
    assert stopping.reserve() == pytest.approx(MARGIN)
