"""The replica check: one flipped bit on one rank is found on every axis, and named; nothing else is."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import parallel.replicas
import train.loop
from configs.compose import compose_config
from launch.session import train_on
from parallel.config import ParallelConfig
from parallel.mesh import make_mesh
from parallel.pipeline.layout import make_layout
from parallel.replicas import hash_tensors, replica_faults
from tests.dist.ranks import RankPool
from tests.launch.tiny_run import make_corpus, overrides, read_metrics
from tests.model.tiny import tiny_config
from train.build import build_model

EXPERT = "layers.1.ffn.experts.up"
DENSE = "layers.3.mixer.kv_down.weight"
BIAS = "layers.2.ffn.router.bias"


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as ranks:
        yield ranks


def flip(x: torch.Tensor, place: int, bit: int) -> None:
    words = x.detach().view(-1).view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    # The highest bit alone is the least signed integer.
    words[place] ^= 1 << bit if bit < 8 * x.element_size() - 1 else -(1 << bit)


def check(config: ParallelConfig, flips: dict[int, tuple[str, int, int]]) -> tuple[list[str], dict[str, int]]:
    """Faults, and calls by name, on a fresh bf16 model in which some ranks flip (tensor, element, bit)."""
    mesh = make_mesh(config, dist.get_world_size())
    layout = make_layout(config, tiny_config(), length=8)
    cpu = torch.device("cpu")
    model = build_model(tiny_config(), seed=0, dtype=torch.bfloat16, device=cpu, mesh=mesh, layout=layout)
    if mesh.world.rank in flips:
        name, place, bit = flips[mesh.world.rank]
        flip(dict([*model.named_parameters(), *model.named_buffers()])[name], place, bit)
    return replica_faults(model, mesh=mesh), mesh.world.traffic.calls


DP4 = ParallelConfig(dp=4)
EP2 = ParallelConfig(dp=4, ep=2)
CP2 = ParallelConfig(dp=2, cp=2, ep=2)
TP2 = ParallelConfig(dp=2, tp=2)
PP2 = ParallelConfig(dp=2, pp=2)
CASES = {
    "dp: sign of a zero": (DP4, 3, ("layers.0.mixer_mix.query", 0, 14), ": world rank(s) 3 differ from 0, 1, 2"),
    "dp: last element": (DP4, 0, (DENSE, -1, 0), ": world rank(s) 0 differ from 1, 2, 3"),
    "dp: fp32 parameter": (DP4, 1, ("layers.0.mixer.decay.A_log", 1, 31), ": world rank(s) 1 differ from 0, 2, 3"),
    "dp: router bias": (DP4, 2, (BIAS, 3, 0), ": world rank(s) 2 differ from 0, 1, 3"),
    "ep: a whole parameter": (EP2, 2, ("embed.weight", 77, 3), ": world rank(s) 2 differ from 0, 1, 3"),
    "ep: an expert": (EP2, 3, (EXPERT, 100, 9), " from [4, 0, 0]: world rank(s) 1 differ from 3"),
    "ep: an expert of rank 0": (EP2, 0, (EXPERT, 100, 9), ": world rank(s) 0 differ from 2"),
    "cp: a whole parameter": (CP2, 1, (DENSE, 5, 1), ": world rank(s) 1 differ from 0, 2, 3"),
    "cp: an expert": (CP2, 2, (EXPERT, 0, 0), ": world rank(s) 0 differ from 2"),
    "tp: a whole parameter": (TP2, 3, (DENSE, 5, 1), ": world rank(s) 3 differ from 0, 1, 2"),
    "tp: a slice": (TP2, 3, ("layers.3.mixer.kv_up.weight", 0, 7), " from [32, 0]: world rank(s) 1 differ from 3"),
    "pp: the first stage": (PP2, 1, ("embed.weight", 0, 0), ": world rank(s) 0 differ from 1"),
    "pp: the last stage": (PP2, 2, ("head.weight", 9, 15), ": world rank(s) 2 differ from 3"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_flipped_bit_is_found_and_named_on_all_ranks(pool: RankPool, case: str) -> None:
    config, rank, (name, place, bit), expected = CASES[case]
    assert [faults for faults, _ in pool.run(check, config, {rank: (name, place, bit)})] == [[name + expected]] * 4


@pytest.mark.parametrize("config", [DP4, EP2, CP2, ParallelConfig(dp=4, ep=4)], ids=str)
def test_equal_ranks_pass_with_one_collective_an_axis(pool: RankPool, config: ParallelConfig) -> None:
    axes = ["replicas", "dense", "world"] + ["expert_dp"] * (config.ep < 4)
    calls = {f"{axis} all_reduce": 1 for axis in axes}
    assert pool.run(check, config, {}) == [([], calls)] * 4


def test_several_faults_are_all_told(pool: RankPool) -> None:
    flips = {0: ("embed.weight", 0, 0), 1: ("embed.weight", 0, 0), 2: (EXPERT, 0, 0), 3: (BIAS, 0, 0)}
    results = pool.run(check, EP2, flips)
    assert results == [results[0]] * 4
    faults = results[0][0]
    assert [line.split(":")[0] for line in faults] == ["embed.weight", EXPERT, BIAS]
    assert faults[2].endswith("world rank(s) 3 differ from 0, 1, 2")


def flipped(x: torch.Tensor, place: int, bit: int) -> torch.Tensor:
    changed = x.clone()
    flip(changed, place, bit)
    return changed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_no_flipped_bit_goes_unseen_wherever_it_is(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(parallel.replicas, "CHUNK", 4)
    x = torch.randn(11, dtype=dtype, generator=torch.Generator().manual_seed(0))
    bits = 8 * x.element_size()
    changed = [flipped(x, place, bit) for place in range(x.numel()) for bit in range(bits)]
    hashes = hash_tensors([x, *changed, x.flip(0)], device=x.device)
    assert len(hashes.unique()) == len(hashes)
    assert torch.equal(hash_tensors([x.clone()], device=x.device), hashes[:1])


def run_with_a_fault(arguments: list[str], step: int) -> tuple[int, str]:
    """A whole run in which rank 1 loses a bit of a router bias after ``step``; exit status and message."""
    original = train.loop.check_health

    def check_health(run: train.loop.Run) -> None:
        original(run)
        if run.progress.step == step and dist.get_rank() == 1:
            flip(run.model.get_buffer("layers.1.ffn.router.bias"), 0, 20)

    with patch.object(train.loop, "check_health", check_health):
        try:
            return train_on(compose_config(arguments), device=torch.device("cpu"), rank=dist.get_rank()), ""
        except train.loop.TrainingFailed as error:
            return 1, str(error)


def test_a_run_stops_and_its_last_checkpoint_is_intact(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    # With this balancing a bias moves from where it is: what differs once differs for ever.
    options = ["train.replica_check_every=2", "checkpoint.every=2", "train.precision=fp32", "model.moe.balancing=sign"]
    arguments = overrides(tmp_path / "run", corpus, "train.steps=8", *options)
    with RankPool(2) as two:
        results = two.run(run_with_a_fault, arguments, 3)
        assert results == [results[0]] * 2
        status, message = results[0]
        assert status == 1
        assert message.startswith("step 4: ranks hold unequal copies (train.replica_check_every=2): layers.1.ffn.rout")
        assert "last checkpoint" in message
        # The fault came after step 3: what was saved at step 2 continues as if nothing had happened.
        assert two.run(run_with_a_fault, arguments, 0) == [(0, "")] * 2
    assert read_metrics(tmp_path / "run")[-1]["step"] == 8
