"""A bounded number of random cases; ``python -m tests.fuzz`` does any number. And that a case finds what is wrong."""

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import tests.fuzz.__main__ as command
from parallel.config import ParallelConfig
from parallel.sharding import TensorSlice
from tests.dist.parity import Case, Outcome
from tests.dist.ranks import Pools
from tests.fuzz import cases
from tests.fuzz.cases import Verdict, is_run, judge
from train.proof.parity import train_on_mesh

QUICK = range(100, 108)
# The last of these is a run.
LONG = range(1000, 1040)


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with Pools() as pools:
        yield pools


@pytest.mark.parametrize("seed", [*QUICK, *(pytest.param(seed, marks=pytest.mark.slow) for seed in LONG)])
def test_a_random_case_equals_one_rank(pools: Pools, seed: int) -> None:
    verdict = judge(seed, pools=pools)
    assert not verdict.failures, "\n".join([verdict.subject, *verdict.failures])


def test_both_kinds_are_done() -> None:
    assert not any(is_run(seed) for seed in QUICK)
    assert sum(is_run(seed) for seed in LONG) == 2


def train_wrongly(case: Case, config: ParallelConfig) -> Outcome[TensorSlice]:
    """One mistake: every rank but the first scales what it adds to a sum of gradients."""
    reduce = dist.reduce

    def scaled(tensor: torch.Tensor, *args: object, **options: object) -> object:
        return reduce(tensor.mul_(1 + 1e-6 * dist.get_rank()), *args, **options)

    with patch.object(dist, "reduce", scaled):
        return train_on_mesh(case, config)


def test_a_small_mistake_is_found(pools: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "train_on_mesh", train_wrongly)
    found = [bool(judge(seed, pools=pools).failures) for seed in QUICK]
    # Where tensor and pipeline parallelism take all ranks, no gradient is summed over dp and cp.
    assert sum(found) >= len(QUICK) // 2


def fail_in_turn(seed: int, *, pools: Pools) -> Verdict:
    return Verdict(seed, "a step", ["gradient of head.weight: error 1.0e-03"] if seed == 8 else [])


def test_the_command_prints_the_seed_of_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "judge", fail_in_turn)
    assert command.main(["--cases", "5", "--seed", "3"]) == 0
    assert capsys.readouterr().out == "5 steps and 0 runs from seed 3: wrong none\n"
    assert command.main(["--cases", "5", "--seed", "7"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "seed 8 FAILED: a step"
    assert "again: python -m tests.fuzz --cases 1 --seed 8" in lines
    assert lines[-1] == "5 steps and 0 runs from seed 7: wrong [8]"


def test_a_seed_names_its_case(pools: Pools) -> None:
    one, again = (judge(QUICK[0], pools=pools).subject for _ in range(2))
    assert one == again
    assert judge(QUICK[1], pools=pools).subject != one
