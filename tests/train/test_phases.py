"""Learning rate and batches on the token clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.phases import BatchConfig, ScheduleConfig, learning_rate_factor


def test_cosine_closed_form() -> None:
    schedule = ScheduleConfig(kind="cosine", warmup_tokens=10, total_tokens=100, minimum=0.1)
    factors = {t: learning_rate_factor(schedule, t) for t in (1, 5, 10, 55, 99, 100, 1000)}
    assert factors == pytest.approx({1: 0.1, 5: 0.5, 10: 1.0, 55: 0.55, 99: 0.100274, 100: 0.1, 1000: 0.1}, abs=1e-6)


def test_wsd_closed_form() -> None:
    schedule = ScheduleConfig(kind="wsd", warmup_tokens=10, total_tokens=100, decay_tokens=20, minimum=0.2)
    factors = {t: learning_rate_factor(schedule, t) for t in (5, 10, 79, 80, 90, 100, 101)}
    assert factors == pytest.approx({5: 0.5, 10: 1.0, 79: 1.0, 80: 1.0, 90: 0.6, 100: 0.2, 101: 0.2})


@given(
    kind=st.sampled_from(["cosine", "wsd"]),
    warmup=st.integers(0, 50),
    decay=st.integers(1, 50),
    minimum=st.floats(0, 1),
    tokens=st.integers(1, 300),
)
def test_factor_stays_between_its_bounds_and_never_rises_after_warmup(
    kind: str, warmup: int, decay: int, minimum: float, tokens: int
) -> None:
    schedule = ScheduleConfig(kind, warmup_tokens=warmup, total_tokens=100, decay_tokens=decay, minimum=minimum)
    assert schedule.errors() == []
    factor = learning_rate_factor(schedule, tokens)
    assert 0 < factor <= 1 or minimum == 0
    if tokens >= warmup:
        assert factor >= minimum - 1e-12
        assert learning_rate_factor(schedule, tokens + 1) <= factor + 1e-12
    else:
        assert factor == pytest.approx(tokens / warmup)


@pytest.mark.parametrize(
    ("schedule", "names"),
    [
        (ScheduleConfig(kind="linear", total_tokens=10), ["schedule.kind=linear"]),
        (ScheduleConfig(total_tokens=0), ["schedule.total_tokens=0"]),
        (ScheduleConfig(warmup_tokens=10, total_tokens=10), ["schedule.warmup_tokens=10"]),
        (ScheduleConfig(total_tokens=10, minimum=2), ["schedule.minimum=2"]),
        (ScheduleConfig(kind="wsd", total_tokens=10, decay_tokens=11), ["schedule.decay_tokens=11"]),
        (ScheduleConfig(warmup_tokens=-1, total_tokens=10), ["schedule.warmup_tokens=-1"]),
        (ScheduleConfig(total_tokens=10, minimum=-0.1), ["schedule.minimum=-0.1"]),
        (ScheduleConfig(total_tokens=10, decay_tokens=-1), ["schedule.decay_tokens=-1"]),
        (ScheduleConfig(kind="wsd", total_tokens=10, decay_tokens=-1), ["schedule.decay_tokens=-1"]),
        (ScheduleConfig(kind="wsd", total_tokens=10, decay_tokens=0), ["schedule.decay_tokens=0"]),
        (ScheduleConfig(kind="wsd", warmup_tokens=4, total_tokens=10, decay_tokens=7), ["schedule.decay_tokens=7"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else f"{value.kind} {value.warmup_tokens}",
)
def test_schedule_errors(schedule: ScheduleConfig, names: list[str]) -> None:
    errors = schedule.errors()
    assert [error.split(":")[0] for error in errors] == names


@pytest.mark.parametrize(
    ("batch", "dp", "name"),
    [
        (BatchConfig(length=8, sequences=6, microbatch=1), 4, "batch.sequences=6"),
        (BatchConfig(length=8, sequences=12, microbatch=2), 4, "batch.microbatch=2"),
        (BatchConfig(length=0, sequences=4, microbatch=1), 1, "batch.length=0"),
        (BatchConfig(length=8, sequences=0), 1, "batch.sequences=0"),
        (BatchConfig(length=8, sequences=4, microbatch=-1), 1, "batch.microbatch=-1"),
        (BatchConfig(length=8, sequences=4, microbatch=8), 1, "batch.microbatch=8"),
    ],
)
def test_batch_errors(batch: BatchConfig, dp: int, name: str) -> None:
    (error,) = batch.errors(dp)
    assert error.startswith(name)


def test_a_batch_that_divides_is_fine() -> None:
    assert BatchConfig(length=8, sequences=12, microbatch=3).errors(4) == []


@pytest.mark.parametrize(
    ("batch", "dp", "pp", "size"),
    [
        (BatchConfig(length=512, sequences=8), 1, 1, 4),
        (BatchConfig(length=512, sequences=8), 2, 1, 4),
        (BatchConfig(length=512, sequences=8), 4, 1, 2),
        (BatchConfig(length=512, sequences=8), 8, 1, 1),
        (BatchConfig(length=512, sequences=12), 2, 1, 3),
        (BatchConfig(length=512, sequences=14), 2, 1, 1),
        (BatchConfig(length=512, sequences=8), 2, 2, 2),
        (BatchConfig(length=512, sequences=8), 2, 8, 1),
        (BatchConfig(length=8192, sequences=8), 2, 1, 1),
        (BatchConfig(length=512, sequences=8, microbatch=2), 1, 1, 2),
    ],
    ids=lambda value: f"{value.sequences}x{value.length}" if isinstance(value, BatchConfig) else str(value),
)
def test_a_microbatch_that_is_not_given_fits(batch: BatchConfig, dp: int, pp: int, size: int) -> None:
    assert batch.errors(dp) == []
    assert batch.microbatch_of(dp=dp, pp=pp) == size


@pytest.mark.parametrize(("dp", "remedy"), [(16, "parallel.cp=2"), (3, "parallel.cp=3"), (12, "parallel.cp=3")])
def test_ranks_that_do_not_divide_get_a_remedy_that_works(dp: int, remedy: str) -> None:
    batch = BatchConfig(length=512, sequences=8)
    (error,) = batch.errors(dp)
    assert remedy in error
    assert batch.errors(dp // int(remedy[-1])) == []
    assert BatchConfig(length=512, sequences=int(error.rsplit("=", 1)[1])).errors(dp) == []


@pytest.mark.parametrize(
    "schedule",
    [
        ScheduleConfig(total_tokens=1),
        ScheduleConfig(warmup_tokens=9, total_tokens=10, minimum=0),
        ScheduleConfig(total_tokens=10, minimum=1, decay_tokens=0),
        ScheduleConfig(kind="wsd", warmup_tokens=4, total_tokens=10, decay_tokens=6),
        ScheduleConfig(kind="wsd", warmup_tokens=9, total_tokens=10, decay_tokens=1),
    ],
    ids=["one token", "all warm-up", "constant", "decay after warm-up", "decay of one token"],
)
def test_schedules_at_their_limits_are_fine(schedule: ScheduleConfig) -> None:
    assert schedule.errors() == []


@pytest.mark.parametrize("batch", [BatchConfig(length=1, sequences=1), BatchConfig(1, 1, 1), BatchConfig(8, 4, 4)])
def test_batches_at_their_limits_are_fine(batch: BatchConfig) -> None:
    assert batch.errors(1) == []


def test_a_step_consumes_all_tokens_of_all_samples() -> None:
    assert BatchConfig(length=8, sequences=3).tokens == 24


def test_without_warmup_the_first_token_is_at_the_peak() -> None:
    assert learning_rate_factor(ScheduleConfig(total_tokens=100), 0) == 1.0
    assert learning_rate_factor(ScheduleConfig(kind="wsd", total_tokens=100, decay_tokens=100), 0) == 1.0
