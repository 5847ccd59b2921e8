"""Certify finds every known mistake of the table, and finds nothing where there is none."""

import functools
from collections.abc import Iterator
from fnmatch import fnmatchcase

import pytest
from torch import Tensor

from configs.compose import compose_config
from launch.certify import TOLERANCE, unproven
from parallel.config import ParallelConfig
from parallel.sharding import TensorSlice
from tests.certify.mutation import Reach
from tests.certify.mutations import MUTATIONS
from tests.dist.ranks import Pools, RankError
from train.config import RunConfig
from train.proof.case import make_case
from train.proof.parity import Case, Outcome, compare, merge, train_alone, train_on_mesh
from train.proof.shrink import ranks_of, shrink

pytestmark = pytest.mark.slow  # a certify run for each mistake

BY_ID = {mutation.id: mutation for mutation in MUTATIONS}
MESHES = list(dict.fromkeys(mutation.mesh for mutation in MUTATIONS))


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with Pools(grace=2.0) as pools:
        yield pools


@functools.cache
def subject(mesh: tuple[str, ...]) -> tuple[Case, RunConfig, Outcome[Tensor]]:
    """The case of the overrides, the shrunk config, and the reference."""
    config = shrink(compose_config(mesh))
    case = make_case(config)
    return case, config, train_alone(case)


def train_mutated(case: Case, config: ParallelConfig, name: str) -> tuple[Outcome[TensorSlice], Reach]:
    """On a rank: train with the mistake ``name`` in the code."""
    with BY_ID[name].injected() as reach:
        return train_on_mesh(case, config), reach


@pytest.mark.parametrize("mesh", MESHES, ids=" ".join)
def test_without_a_mistake_all_is_equal(pools: Pools, mesh: tuple[str, ...]) -> None:
    case, config, expected = subject(mesh)
    found = merge(pools.of(ranks_of(config.parallel)).run(train_on_mesh, case, config.parallel))
    assert compare(found, expected).failures(TOLERANCE) == []
    assert unproven(config, found) == []


@pytest.mark.parametrize("name", BY_ID)
def test_the_mistake_is_found(pools: Pools, name: str) -> None:
    mutation = BY_ID[name]
    case, config, expected = subject(mutation.mesh)
    size = ranks_of(config.parallel)
    try:
        outcomes, reached = zip(*pools.of(size).run(train_mutated, case, config.parallel, name), strict=True)
    except RankError as error:
        pools.drop(size)
        failures = str(error).splitlines()
    else:
        failures = compare(merge(outcomes), expected).failures(TOLERANCE)
        for target in reached[0].calls:
            assert any(reach.calls[target] for reach in reached), f"{target} never ran: the mutation proves nothing"
    assert any(fnmatchcase(line, mutation.shows) for line in failures), "\n".join(failures[:20]) or "nothing found"


def test_the_table_is_long_enough_and_cites_its_sources() -> None:
    assert len(BY_ID) == len(MUTATIONS) >= 40
    assert all(mutation.source.startswith("https://github.com/") for mutation in MUTATIONS)
