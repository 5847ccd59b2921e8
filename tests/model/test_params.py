"""First values: what they depend on, what of them is made, and where."""

import pytest
import torch
from torch import nn

from model.params import INITIALISERS, ParamRole, declare, draw, initialize, seed_from_name
from tests.bench.live import LiveMemory

STACK = (6, 10, 8)
STD = 0.3


def drawn(shape: tuple[int, ...], part: tuple[slice, ...], *, init: str = "normal", seed: int = 7) -> torch.Tensor:
    out = torch.full([len(range(size)[cut]) for size, cut in zip(shape, part)], torch.nan)
    draw(out, role=ParamRole(kind="matrix", init=init), name="w", shape=shape, part=part, seed=seed, std=STD)
    return out


def everything(shape: tuple[int, ...]) -> tuple[slice, ...]:
    return (slice(None),) * len(shape)


def test_what_is_no_stack_is_drawn_over_its_global_shape() -> None:
    generator = torch.Generator().manual_seed(seed_from_name(7, "w"))
    assert torch.equal(drawn((10, 8), everything((10, 8))), torch.empty(10, 8).normal_(0.0, STD, generator=generator))


def test_a_matrix_of_a_stack_depends_on_seed_name_and_index_alone() -> None:
    stack = drawn(STACK, everything(STACK))
    for index, matrix in enumerate(stack):
        generator = torch.Generator().manual_seed(seed_from_name(7, f"w.{index}"))
        assert torch.equal(matrix, torch.empty(STACK[1:]).normal_(0.0, STD, generator=generator))
    assert torch.equal(drawn((3, 10, 8), everything(STACK)), stack[:3])
    assert not torch.equal(drawn(STACK, everything(STACK), seed=8)[0], stack[0])


@pytest.mark.parametrize("init", INITIALISERS)
@pytest.mark.parametrize(
    ("shape", "part"),
    [
        ((10,), (slice(5, 10),)),
        ((10, 8), (slice(5, 10), slice(0, 8))),
        ((10, 8), (slice(0, 10), slice(4, 8))),
        (STACK, (slice(2, 4), slice(0, 10), slice(0, 8))),
        (STACK, (slice(2, 4), slice(5, 10), slice(0, 8))),
        (STACK, (slice(0, 6), slice(0, 10), slice(4, 8))),
    ],
    ids=["vector", "rows", "columns", "experts", "experts-rows", "experts-columns"],
)
def test_a_part_is_that_of_the_whole(shape: tuple[int, ...], part: tuple[slice, ...], init: str) -> None:
    assert torch.equal(drawn(shape, part, init=init), drawn(shape, everything(shape), init=init)[part])


@pytest.mark.parametrize(
    ("shape", "part", "beside"),
    [
        ((10, 8), (slice(0, 10), slice(0, 8)), 0),
        ((10, 8), (slice(5, 10), slice(0, 8)), 10 * 8),
        (STACK, (slice(2, 4), slice(0, 10), slice(0, 8)), 0),
        (STACK, (slice(2, 4), slice(5, 10), slice(0, 8)), 10 * 8),
    ],
    ids=["whole", "rows", "experts", "experts-rows"],
)
def test_beside_what_is_kept_there_is_one_matrix_at_most(
    shape: tuple[int, ...], part: tuple[slice, ...], beside: int
) -> None:
    with LiveMemory() as live:
        kept = drawn(shape, part)
    assert live.peak == kept.untyped_storage().nbytes() + 4 * beside


@pytest.mark.parametrize(
    "like",
    [torch.empty(STACK, dtype=torch.bfloat16), torch.empty(STACK, dtype=torch.float64), torch.empty(6, 8, 10).mT],
    ids=["bf16", "fp64", "columns-first"],
)
def test_where_the_value_goes_does_not_change_it(like: torch.Tensor) -> None:
    module = nn.Module()
    module.w = nn.Parameter(like)
    declare(module, w=ParamRole(kind="matrix"))
    initialize(module, seed=7, std=STD)
    assert torch.equal(module.w, drawn(STACK, everything(STACK)).to(like.dtype))
