"""Settings at their limits: the last value that is taken, and the first that is refused by its name."""

import pytest

from train.settings import EvaluateSettings, RunSettings, TrainSettings

TAKEN = [
    RunSettings(seed=0),
    RunSettings(seed=-(2**63)),
    RunSettings(seed=2**64 - 1),
    RunSettings(timeout=1e9),
    RunSettings(timeout=0.5),
    RunSettings(max_minutes=0),
    RunSettings(max_minutes=1e9),
    TrainSettings(steps=1),
    TrainSettings(max_skipped=1),
    TrainSettings(loss_chunk=1),
    TrainSettings(detail_every=0),
    TrainSettings(replica_check_every=0),
    EvaluateSettings(every=0),
    EvaluateSettings(sample_tokens=0),
    EvaluateSettings(tokens=1),
    EvaluateSettings(temperature=0),
]

REFUSED = [
    (RunSettings(name=" "), "run.name=' '"),
    (RunSettings(dir=""), "run.dir=''"),
    (RunSettings(cache=""), "run.cache=''"),
    (RunSettings(seed=-(2**63) - 1), "run.seed=-9223372036854775809"),
    (RunSettings(seed=2**64), "run.seed=18446744073709551616"),
    (RunSettings(timeout=0), "run.timeout=0"),
    (RunSettings(timeout=1e9 + 1), "run.timeout=1000000001.0"),
    (RunSettings(max_minutes=-1), "run.max_minutes=-1"),
    (RunSettings(max_minutes=1e9 + 1), "run.max_minutes=1000000001.0"),
    (TrainSettings(steps=0), "train.steps=0"),
    (TrainSettings(max_skipped=0), "train.max_skipped=0"),
    (TrainSettings(loss_chunk=0), "train.loss_chunk=0"),
    (TrainSettings(detail_every=-1), "train.detail_every=-1"),
    (TrainSettings(replica_check_every=-1), "train.replica_check_every=-1"),
    (TrainSettings(precision="fp16"), "train.precision=fp16"),
    (EvaluateSettings(every=-1), "evaluate.every=-1"),
    (EvaluateSettings(sample_tokens=-1), "evaluate.sample_tokens=-1"),
    (EvaluateSettings(tokens=0), "evaluate.tokens=0"),
    (EvaluateSettings(temperature=-0.1), "evaluate.temperature=-0.1"),
]


@pytest.mark.parametrize("settings", TAKEN, ids=repr)
def test_the_last_value_is_taken(settings: RunSettings | TrainSettings | EvaluateSettings) -> None:
    assert settings.errors() == []


@pytest.mark.parametrize(("settings", "name"), REFUSED, ids=[name for _, name in REFUSED])
def test_the_next_value_is_refused_by_its_name(
    settings: RunSettings | TrainSettings | EvaluateSettings, name: str
) -> None:
    (error,) = settings.errors()
    assert error.startswith(f"{name}: ")
