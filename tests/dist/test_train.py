"""Whole runs on several ranks against one rank, and resuming on another number of ranks."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from configs.compose import compose_config
from launch.session import train_on
from launch.train import main
from tests.dist.ranks import RankPool
from tests.launch.test_train import saved
from tests.launch.tiny_run import make_corpus, overrides, read_metrics

pytestmark = pytest.mark.slow  # whole runs on every mesh


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


def train_rank(arguments: list[str]) -> int:
    return train_on(compose_config(arguments), device=torch.device("cpu"), rank=dist.get_rank())


# fp64, so that ranks differ by the order of sums alone and no score falls into another bin or expert.
PROOF = ["train.precision=fp64", "optim.lr=1e-3"]


def check_equal(found: Path, expected: Path, *, step: int) -> None:
    """Same samples and texts; losses, norms, weights, biases and optimizer state equal but for the order of sums."""
    for record, reference in zip(read_metrics(found), read_metrics(expected), strict=True):
        assert record["samples_hash"] == reference["samples_hash"]
        assert record["learning_rate"] == reference["learning_rate"]
        assert record.get("sample") == reference.get("sample")
        for name in ("loss", "grad_norm", "validation_loss"):
            assert record.get(name, 0.0) == pytest.approx(reference.get(name, 0.0), rel=1e-9)
    one, other = ({k: v for k, v in saved(f, step).items() if not k.startswith("rng/")} for f in (found, expected))
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-7, atol=1e-10, msg=name)


MESHES = {
    "dp2": [],
    "ep2": ["parallel.ep=2"],
    "cp2": ["parallel.cp=2"],
    "tp2": ["parallel.tp=2"],
    "cp2-ep2": ["parallel.cp=2", "parallel.ep=2"],
    "pp2": ["parallel.pp=2"],
    "pp2-zero_bubble": ["parallel.pp=2", "parallel.schedule=zero_bubble"],
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """The run of one rank that every mesh must equal."""
    folder = tmp_path_factory.mktemp("alone")
    assert main(overrides(folder, corpus, "train.steps=8", "evaluate.every=4", *PROOF)) == 0
    return folder


@pytest.mark.parametrize("mesh", MESHES)
def test_two_ranks_equal_one(tmp_path: Path, corpus: Path, pool: RankPool, alone: Path, mesh: str) -> None:
    options = ["train.steps=8", "evaluate.every=4", *PROOF, *MESHES[mesh]]
    assert pool.run(train_rank, overrides(tmp_path, corpus, *options)) == [0, 0]
    check_equal(tmp_path, alone, step=8)


@pytest.mark.parametrize(
    "mesh",
    [
        ["parallel.ep=4"],
        ["parallel.cp=2", "parallel.ep=2"],
        ["parallel.cp=4", "parallel.ep=4"],
        ["parallel.tp=2", "parallel.ep=2"],
        ["parallel.tp=2", "parallel.cp=2"],
        ["parallel.pp=2", "parallel.tp=2"],
        ["parallel.pp=2", "parallel.ep=2", "parallel.zero=2"],
    ],
    ids="-".join,
)
def test_four_ranks_equal_one(tmp_path: Path, corpus: Path, alone: Path, mesh: list[str]) -> None:
    options = ["train.steps=8", "evaluate.every=4", *PROOF, *mesh]
    with RankPool(4) as four:
        assert four.run(train_rank, overrides(tmp_path, corpus, *options)) == [0] * 4
    check_equal(tmp_path, alone, step=8)


def test_a_run_moves_between_meshes(tmp_path: Path, corpus: Path, pool: RankPool, alone: Path) -> None:
    """Two steps on each mesh, then the rest on one rank: the same run."""
    for steps, mesh in [(2, "ep2"), (3, "tp2"), (4, "pp2"), (5, "cp2-ep2"), (6, "dp2")]:
        options = [f"train.steps={steps}", "evaluate.every=4", *PROOF, *MESHES[mesh]]
        assert pool.run(train_rank, overrides(tmp_path, corpus, *options)) == [0, 0]
    assert main(overrides(tmp_path, corpus, "train.steps=8", "evaluate.every=4", *PROOF)) == 0
    check_equal(tmp_path, alone, step=8)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_two_ranks_stop_and_resume_bit_for_bit(tmp_path: Path, corpus: Path, pool: RankPool, precision: str) -> None:
    options = [f"train.precision={precision}"]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    for folder, steps in [(straight, 12), (stopped, 5), (stopped, 12)]:
        assert pool.run(train_rank, overrides(folder, corpus, f"train.steps={steps}", *options)) == [0, 0]
    assert read_metrics(stopped) == read_metrics(straight)
    one, other = saved(straight, 12), saved(stopped, 12)
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("first", [1, 2], ids=["one-to-two", "two-to-one"])
def test_a_run_continues_on_another_number_of_ranks(tmp_path: Path, corpus: Path, pool: RankPool, first: int) -> None:
    def train(ranks: int, folder: Path, steps: int) -> None:
        arguments = overrides(folder, corpus, f"train.steps={steps}", *PROOF)
        if ranks == 1:
            assert main(arguments) == 0
        else:
            assert pool.run(train_rank, arguments) == [0, 0]

    train(1, tmp_path / "one", 8)
    train(first, tmp_path / "moved", 4)
    train(3 - first, tmp_path / "moved", 8)
    check_equal(tmp_path / "moved", tmp_path / "one", step=8)


def test_a_step_that_is_not_finite_on_two_ranks_names_the_samples_of_both(
    tmp_path: Path, corpus: Path, pool: RankPool
) -> None:
    arguments = overrides(tmp_path, corpus, "train.steps=4", "optim.lr=1e30", "schedule.warmup_tokens=0")
    assert pool.run(train_rank, arguments) == [0, 0]
    skipped = [record for record in read_metrics(tmp_path) if record.get("skipped")]
    assert skipped
    assert all(len(record["sample_ids"]) == 3 * 4 for record in skipped)
