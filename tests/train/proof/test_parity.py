"""The comparison itself: what it must find, on outcomes that are changed by hand, without ranks."""

import dataclasses
import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from configs.compose import compose_config
from launch.certify import TOLERANCE
from parallel.mesh import Mesh
from parallel.sharding import TensorSlice
from train.proof.case import make_case
from train.proof.parity import Case, Outcome, build, compare, join, merge, relative_error, train, train_alone
from train.proof.shrink import shrink

EXPERTS = "layers.1.ffn.experts.up"


@functools.cache
def case() -> Case:
    return make_case(shrink(compose_config(["parallel.dp=2"])))


@functools.cache
def alone() -> Outcome[Tensor]:
    return train_alone(case())


def changed(kind: str, change: Callable[[dict[str, Tensor]], None]) -> Outcome[Tensor]:
    """`alone` with one of its dicts (the last step's gradients) changed in place."""
    value = getattr(alone(), kind)
    copied = [dict(x) for x in value] if isinstance(value, list) else dict(value)
    change(copied[-1] if isinstance(copied, list) else copied)
    return dataclasses.replace(alone(), **{kind: copied})


def scale(name: str, by: float) -> Callable[[dict[str, Tensor]], None]:
    def change(values: dict[str, Tensor]) -> None:
        values[name] = values[name] * by

    return change


def first_failure(found: Outcome[Tensor]) -> str:
    return (compare(found, alone()).failures(TOLERANCE) or ["equal"])[0]


def test_an_outcome_equals_itself_in_every_kind() -> None:
    report = compare(alone(), alone())
    assert report.failures(0.0) == []
    assert set(report.parameters[EXPERTS]) == {"first", "gradient", "step", "weight", "state"}
    assert {"loss of step 1", "gradient norm of step 2", "expert loads of step 1"} <= report.others.keys()
    assert sum(name.endswith("router.bias") for name in report.others) == 2


def test_two_runs_of_one_rank_are_equal_to_the_bit() -> None:
    again = merge([train(case(), build(case(), Mesh()))])
    assert compare(again, alone()).failures(0.0) == []


def test_the_case_is_as_awkward_as_it_should_be() -> None:
    counts = [[int((m.labels >= 0).sum()) for m in step] for step in case().steps]
    assert all(min(step) == 0 and max(step) > 15 for step in counts)
    assert all(sum(len(m.cu_seqlens) > 2 for m in step) == 3 for step in case().steps)
    assert all(norm > case().optim.clip_norm for norm in alone().norms)
    assert all((load.sum(dim=1) == load[0].sum()).all() and (load > 0).any() for load in alone().loads)
    gradients = [name for name, x in alone().gradients[0].items() if x.abs().max() == 0]
    # The first mix has one source and so no gradient; nothing else may go without.
    assert gradients == ["layers.0.mixer_mix.norm", "layers.0.mixer_mix.query"]


@pytest.mark.parametrize("kind", ["gradients", "updates", "first"])
@pytest.mark.parametrize("by", [1 + 1e-8, 2.0, -1.0, math.nan], ids=str)
def test_a_factor_on_one_parameter_is_named_first(kind: str, by: float) -> None:
    name = {"gradients": "gradient", "updates": "step", "first": "first"}[kind]
    assert first_failure(changed(kind, scale(EXPERTS, by))).startswith(f"{name} of {EXPERTS}: error ")


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (f"model/{EXPERTS}", f"weight of {EXPERTS}: "),
        (f"optim/{EXPERTS}/momentum", f"state of {EXPERTS}: "),
        ("optim/head.weight/exp_avg_sq", "state of head.weight: "),
        ("model/layers.2.ffn.router.bias", "layers.2.ffn.router.bias: "),
        ("optim/step", "optim/step: "),
    ],
)
def test_weights_state_and_biases_are_compared(key: str, expected: str) -> None:
    assert first_failure(changed("saved", scale(key, 3))).startswith(expected)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"losses": [100.0, 1.0]}, "loss of step 1"),
        ({"norms": [0.0, math.nan]}, "gradient norm of step 2"),
        ({"faults": ("step 1 was skipped: not finite",)}, "step 1 was skipped"),
        ({"gradients": []}, "0 updates, not 2"),
    ],
)
def test_what_belongs_to_no_parameter_is_compared(change: dict[str, object], expected: str) -> None:
    assert first_failure(dataclasses.replace(alone(), **change)).startswith(expected)


def test_one_token_routed_elsewhere_shows_in_the_loads() -> None:
    loads = [load.clone() for load in alone().loads]
    loads[1][0, 0] += 1
    loads[1][0, 1] -= 1
    assert first_failure(dataclasses.replace(alone(), loads=loads)).startswith("expert loads of step 2: error ")


def test_missing_and_extra_tensors_are_faults() -> None:
    missing = changed("saved", lambda values: values.pop(f"optim/{EXPERTS}/momentum"))
    assert first_failure(missing) == f"saved of optim/{EXPERTS}/momentum: missing"
    extra = changed("gradients", lambda values: values.update(more=torch.ones(1)))
    assert first_failure(extra) == "gradient of more: not in the reference"


def test_a_gradient_that_is_only_rounding_is_no_difference() -> None:
    """Both are zero but for noise of the whole gradient; compared to themselves they would differ by 100%."""
    name, norm = "layers.0.mixer_mix.query", alone().norms[-1]

    def noisy(values: dict[str, Tensor]) -> None:
        values[name] = torch.full_like(values[name], 1e-17 * norm)

    assert compare(changed("gradients", noisy), alone()).failures(TOLERANCE) == []


def test_a_small_gradient_is_measured_against_itself() -> None:
    expected = changed("gradients", scale("norm.weight", 1e-5))
    found = dataclasses.replace(expected, gradients=[dict(x) for x in expected.gradients])
    found.gradients[-1]["norm.weight"] = 2 * expected.gradients[-1]["norm.weight"]
    error = compare(found, expected).parameters["norm.weight"]["gradient"]
    assert error > 1e-2


def piece(values: list[float], offset: int) -> dict[str, TensorSlice]:
    return {"x": TensorSlice(torch.tensor(values), (4,), (offset,))}


def test_slices_are_joined_and_copies_must_be_equal() -> None:
    joined = join([piece([1, 2], 0), piece([3, 4], 2), piece([1, 2], 0)])
    assert joined.faults == []
    assert joined.whole["x"].tolist() == [1, 2, 3, 4]
    assert join([piece([1, 2], 0), piece([3, 4], 2), piece([1, 2.5], 0)]).faults == ["x: copies differ between ranks"]
    # Part of a slice may be a copy.
    assert join([piece([1, 2, 3], 0), piece([3, 4], 2)]).faults == []
    assert join([piece([1, 2, 3], 0), piece([9, 4], 2)]).faults == ["x: copies differ between ranks"]


def test_a_gap_is_a_fault() -> None:
    assert join([piece([1, 2], 0), piece([4], 3)]).faults == ["x: no rank holds all of it"]


def test_ranks_that_report_different_numbers_are_a_fault() -> None:
    one = train(case(), build(case(), Mesh()))
    other = dataclasses.replace(one, losses=[2.0, 3.0], loads=[load + 1 for load in one.loads])
    faults = merge([one, other]).faults
    assert [fault.split(":")[0] for fault in faults] == ["losses", "loads"]
    assert "rank 1 reports [2.0, 3.0]" in faults[0]


def test_relative_error() -> None:
    x = torch.tensor([3.0, 4.0])
    assert relative_error(x, x) == 0
    assert relative_error(2 * x, x) == pytest.approx(1.0)
    assert relative_error(2 * x, x, floor=50.0) == pytest.approx(0.1)
    assert relative_error(x, x[:1]) == math.inf
    assert relative_error(x * math.nan, x) == math.inf
