"""What a resumed run may change: all that leaves its samples, its clock and its updates as they are."""

import dataclasses
from typing import Any

import pytest

from configs.compose import compose_config
from train.config import RunConfig, differences

SECTIONS = RunConfig().sections()


def nested(overrides: list[str]) -> dict[str, Any]:
    return dataclasses.asdict(compose_config(overrides))


def names(lines: list[str]) -> list[str]:
    return [line.split(":")[0] for line in lines]


@pytest.mark.parametrize("name", SECTIONS)
def test_every_section_says_what_its_change_means(name: str) -> None:
    section = SECTIONS[name]
    assert isinstance(section.AT_RESUME, str)
    free = getattr(section, "FREE_AT_RESUME", ())
    assert set(free) <= {field.name for field in dataclasses.fields(section)}
    assert section.AT_RESUME or not free, "all of it is free"


def test_differences_are_classified() -> None:
    saved = nested([])
    assert differences(saved, compose_config([]), steps=1) == ([], [])
    config = compose_config(["train.steps=7", "checkpoint.keep=5", "optim.lr=1", "model.hidden_dim=8", "run.seed=4"])
    allowed, refused = differences(saved, config, steps=1)
    assert [line.split(":")[0] for line in allowed] == ["checkpoint.keep", "train.steps"]
    assert [line.split(":")[0] for line in refused] == ["model.hidden_dim", "optim.lr", "run.seed"]
    assert "another model: the saved weights would not fit" in refused[0]


def test_keys_that_only_described_exported_files_are_forgotten() -> None:
    saved = nested([])
    saved["model"]["kda"] |= {"a_log_dims": 4, "padded_heads": None}
    assert differences(saved, compose_config([]), steps=1) == ([], [])


@pytest.mark.parametrize(
    "override",
    [
        "batch.microbatch=1",
        "train.loss_chunk=8",
        "optim.bucket_mb=1",
        "model.init_std=1",
        "data.sources=[{path: elsewhere}]",
        "data.vocab_size=300",
        "parallel.tp=2",
        "recompute.policy=full",
        "evaluate.temperature=0",
    ],
)
def test_what_changes_neither_samples_nor_clock_nor_updates_is_free(override: str) -> None:
    allowed, refused = differences(nested([]), compose_config([override]), steps=10)
    assert (names(allowed), refused) == ([override.split("=")[0]], [])


@pytest.mark.parametrize(
    ("override", "meaning"),
    [
        ("batch.length=64", "a step would take other samples"),
        ("batch.sequences=16", "a step would take other samples"),
        ("data.validation_fraction=0.5", "other samples would be held out"),
        ("run.seed=1", "data in another order"),
        ("train.precision=fp64", "another precision"),
        ("optim.momentum=0.5", "another rule"),
        ("model.moe.top_k=1", "another model"),
        ("routing.force=balanced", "experts chosen by another rule"),
    ],
)
def test_what_would_be_another_run_is_refused_with_its_reason(override: str, meaning: str) -> None:
    allowed, refused = differences(nested([]), compose_config([override]), steps=10)
    assert (allowed, names(refused)) == ([], [override.split("=")[0]])
    assert meaning in refused[0]


# 4,096 tokens a step; the demo's warm-up ends with step 8.
@pytest.mark.parametrize(
    ("overrides", "steps", "first"),
    [
        (["schedule.total_tokens=900000"], 8, None),
        (["schedule.total_tokens=900000"], 9, 9),
        (["schedule.total_tokens=900000"], 0, None),
        (["schedule.minimum=0.5"], 8, None),
        (["schedule.minimum=0.5"], 9, 9),
        (["schedule.warmup_tokens=65536"], 1, 1),
        (["schedule.kind=wsd", "schedule.decay_tokens=4096"], 8, None),
        (["schedule.kind=wsd", "schedule.decay_tokens=4096"], 9, 9),
        (["schedule.decay_tokens=1"], 100, None),
        (["optim.lr=1"], 1, 1),
        (["optim.lr=1"], 0, None),
        (["optim.lr=8e-3", "schedule.warmup_tokens=65536"], 8, None),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else str(value),
)
def test_a_schedule_changes_where_no_step_done_would_have_been_otherwise(
    overrides: list[str], steps: int, first: int | None
) -> None:
    allowed, refused = differences(nested([]), compose_config(overrides), steps=steps)
    keys = sorted(override.split("=")[0] for override in overrides)
    assert names(allowed if first is None else refused) == keys
    assert len(allowed) + len(refused) == len(keys)
    assert all(f"another learning rate: step {first} was done at " in line for line in refused)
