"""Ranks that were given different things do not start; the refusal names keys and ranks, alike on all ranks."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

import train.agreement
from configs.compose import compose_config
from launch.ranks import RankPool
from train.agreement import check_equal, check_ranks, code_version


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3, timeout=180) as ranks:
        yield ranks


def refusal(overrides: list[list[str]]) -> str | None:
    """What this rank says where rank r is given ``overrides[r]``."""
    try:
        check_ranks(compose_config(overrides[dist.get_rank()]))
    except ValueError as error:
        return str(error)
    return None


def refusal_of_code() -> str | None:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 2:
            patch.setattr(train.agreement, "code_version", lambda: "other")
        return refusal([[], [], []])


def refusal_of_values(values: list[dict]) -> str | None:
    try:
        check_equal(values[dist.get_rank()], remedy="mend it")
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([[], [], []], None),
        ([["run.cache=/a", "data.sources=[{path: x}]"], ["run.cache=/b", "data.sources=[{path: y}]"], []], None),
        ([[], ["optim.lr=1e-3"], []], "optim.lr is 0.004 on rank 0, 2, 0.001 on rank 1;"),
        ([["run.seed=1"], [], []], "run.seed is 0 on rank 1, 2, 1 on rank 0;"),
        ([["run.name=a"], ["run.name=b"], ["run.name=c"]], 'run.name is "a" on rank 0, "b" on rank 1, "c" on rank 2;'),
        (
            [[], [], ["parallel.tp=3", "train.steps=7"]],
            "parallel.tp is 1 on rank 0, 1, 3 on rank 2; train.steps is",
        ),
    ],
    ids=["equal", "own-places", "rate", "seed", "all-differ", "two-keys"],
)
def test_configs_are_compared(pool: RankPool, overrides: list[list[str]], message: str | None) -> None:
    one, *others = pool.run(refusal, overrides)
    assert others == [one, one]
    assert (one is None) == (message is None)
    if message is not None:
        assert message in one
        assert one.startswith("ranks were given different things: ")
        assert one.endswith("start all ranks with the same command and the same installation")


def test_other_data_is_named(pool: RankPool) -> None:
    said = pool.run(refusal_of_values, [{"data.sources": ["a"]}, {"data.sources": ["b"]}, {"data.sources": ["a"]}])
    assert (
        said == ['ranks were given different things: data.sources is ["a"] on rank 0, 2, ["b"] on rank 1; mend it'] * 3
    )


def test_other_code_is_named(pool: RankPool) -> None:
    said = pool.run(refusal_of_code)
    assert said[1:] == said[:1] * 2
    assert f'code is "{code_version()}" on rank 0, 1, "other" on rank 2;' in said[0]


def test_one_rank_agrees_with_itself() -> None:
    check_ranks(compose_config([]))


def test_the_code_version_is_of_every_file() -> None:
    root = Path(train.agreement.__file__).parents[1]
    rooms = {path.parent.name for path in root.glob("*/__init__.py")} - {"tests"}
    assert set(train.agreement.ROOMS) == rooms
    assert len(code_version()) == 16
