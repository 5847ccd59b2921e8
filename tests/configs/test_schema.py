"""Every numeric key has a range, and its borders are where they are said to be."""

import copy

import pytest

from configs.compose import compose_config
from configs.schema import LARGEST, validate
from train.config import RunConfig, flatten

BASE = compose_config(["evaluate.every=0", "model.moe.balancing=sign", "model.mla.rotary=true"])

# What is allowed, least and most, of keys whose range is neither from 1 nor from just above 0; None: no border.
OTHER = {
    "run.seed": (-(2**63), 2**64 - 1),
    "run.timeout": (1e-9, 1e9),
    "run.max_minutes": (0.0, 1e9),
    "checkpoint.timeout": (1e-9, 1e9),
    "checkpoint.retries": (0, 100),
    "model.kda.gate_lower_bound": (None, -1e-9),
    "model.mla.rope_dim": (2, None),
    "model.moe.experts": (2, None),  # chosen for a token
    "model.moe.histogram_bins": (2, None),
    "data.vocab_size": (259, 8192),
    "data.validation_fraction": (0.0, 1 - 1e-9),
    "schedule.minimum": (0.0, 1.0),
    "optim.momentum": (0.0, 1 - 1e-9),
    "optim.ns_steps": (1, 99),
    "optim.bucket_mb": (1e-9, 2.0**20),
    "parallel.zero": (1, 2),
    "parallel.experts.balance_above": (1.0, None),
}
AT_LEAST_0 = {
    "model.dense_layers",
    "model.padding_id",
    "model.moe.shared_experts",
    "model.moe.sign_step",
    "batch.microbatch",
    "schedule.warmup_tokens",
    "schedule.decay_tokens",
    "optim.weight_decay",
    "optim.clip_norm",
    "optim.qk_clip",
    "train.detail_every",
    "train.replica_check_every",
    "evaluate.every",
    "evaluate.sample_tokens",
    "evaluate.temperature",
    "checkpoint.every",
    "parallel.dp",
}
NUMBERS = {
    name: value
    for name, value in flatten(BASE).items()
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
}


def refused(name: str, value: float) -> bool:
    """Whether ``name`` itself is refused with this value."""
    config: RunConfig = copy.deepcopy(BASE)
    *path, leaf = name.split(".")
    section = config
    for part in path:
        section = getattr(section, part)
    setattr(section, leaf, value)
    return any(problem.startswith(f"{name}=") for problem in validate(config, world_size=1))


def least_of(name: str) -> float | None:
    """The least value that is allowed."""
    if name in OTHER:
        return OTHER[name][0]
    if name in AT_LEAST_0:
        return 0
    return 1e-9 if isinstance(NUMBERS[name], float) else 1


@pytest.mark.parametrize("name", NUMBERS)
def test_the_lower_border(name: str) -> None:
    least = least_of(name)
    if least is not None:
        below = least - 1 if isinstance(least, int) else -1e-9 if least == 0 else least - max(2e-9, abs(least) * 1e-9)
        assert refused(name, below), below
        assert not refused(name, least), least


@pytest.mark.parametrize("name", [name for name, (_, most) in OTHER.items() if most is not None])
def test_the_upper_border(name: str) -> None:
    most = OTHER[name][1]
    assert most is not None
    assert not refused(name, most)
    assert refused(name, most + 1 if isinstance(most, int) else most + max(2e-9, abs(most) * 1e-6))


@pytest.mark.parametrize("name", [name for name in NUMBERS if not isinstance(NUMBERS[name], float)])
def test_whole_numbers_end_where_machines_do(name: str) -> None:
    assert refused(name, 2 * (LARGEST + 1))
    if name != "run.seed":
        assert refused(name, LARGEST + 1)
