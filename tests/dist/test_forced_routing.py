"""Forced loads on meshes: the numbers of balance are those that the load has by construction, on every rank alike."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from parallel.expert.trace import load_trace
from parallel.config import ParallelConfig
from parallel.expert.config import ExpertsConfig
from parallel.mesh import make_mesh
from parallel.recompute import RecomputeConfig
from tests.dist.parity import Case
from tests.dist.ranks import RankPool
from tests.dist.test_expert import make_case
from tests.dist.test_train import train_rank
from tests.launch.tiny_run import make_corpus, overrides, read_metrics
from tests.model.tiny import tiny_model
from train.balance import expert_balance
from train.evaluate import validation_loss
from train.forced_routing import ForcedRouting, parse_rule
from train.proof.parity import build
from train.step import Stepper

pytestmark = pytest.mark.slow  # runs on many meshes

MICROBATCHES, TOKENS, TOP_K = 4, 24, 2
MESHES = {
    "dp4-ep4": ParallelConfig(dp=4, ep=4),
    "dp4-ep2": ParallelConfig(dp=4, ep=2),
    "cp2-dp2-ep4": ParallelConfig(cp=2, dp=2, ep=4),
    "tp2-dp2-ep2": ParallelConfig(tp=2, dp=2, ep=2),
    "pp2-dp2-ep2": ParallelConfig(pp=2, dp=2, ep=2),
    "pp2-vpp2-dp2-ep2-zero_bubble": ParallelConfig(pp=2, vpp=2, dp=2, ep=2, schedule="zero_bubble"),
}

Balance = dict[str, dict[str, float | int]]


@pytest.fixture(scope="module")
def four() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def forced_steps(case: Case, config: ParallelConfig, rule: str) -> list[tuple[Balance, Tensor]]:
    """Balance and load of each of the case's steps, with an evaluation before each."""
    rig = build(case, make_mesh(config, dist.get_world_size()), config)
    parsed = parse_rule(rule)
    assert parsed is not None
    forced = ForcedRouting(parsed, seed=0, axis=rig.mesh.replicas)
    forced.install(rig.model)
    stepper = Stepper(rig.pipeline, dp=rig.dp, optimizer=rig.optimizer)
    found = []
    for number, step in enumerate(case.steps):
        own = step[rig.mesh.dp.rank :: rig.mesh.dp.size]
        validation_loss(rig.pipeline, own)
        with forced.during(number):
            result = stepper.step(own, lr=0.01)
        layers = case.config.moe_layers
        found.append((expert_balance(result.rows, result.load, moe_layers=layers, mesh=rig.mesh), result.load))
    return found


def run(pool: RankPool, case: Case, config: ParallelConfig, rule: str) -> list[tuple[Balance, Tensor]]:
    """`forced_steps`, which must be equal on all ranks."""
    first, *others = pool.run(forced_steps, case, config, rule)
    for other in others:
        for (balance, load), (same, same_load) in zip(first, other, strict=True):
            assert balance == same
            assert torch.equal(load, same_load)
    return first


def dispatched(config: ParallelConfig, dispatcher: str) -> ParallelConfig:
    return dataclasses.replace(config, experts=ExpertsConfig(dispatcher=dispatcher))


@pytest.mark.parametrize(
    ("name", "dispatcher", "policy"),
    [
        *((name, "balanced", "none") for name in MESHES),
        ("dp4-ep2", "all_to_all", "none"),
        ("tp2-dp2-ep2", "all_to_all", "selective"),
        ("dp4-ep4", "balanced", "full"),
        ("pp2-dp2-ep2", "balanced", "full"),
    ],
)
def test_one_home_has_everything(four: RankPool, name: str, dispatcher: str, policy: str) -> None:
    """Each pass, one rank of ep holds both experts that have rows; all others want 1 / ep of them, from one each."""
    case = dataclasses.replace(make_case(tiny_model(), steps=2), recompute=RecomputeConfig(policy=policy))
    mesh = MESHES[name]
    passes = MICROBATCHES // mesh.dp * (mesh.dp * mesh.cp // mesh.ep)
    lends = (mesh.ep - 1) * passes if dispatcher == "balanced" else 0
    moe = case.config.moe
    expected = {
        "entropy": pytest.approx(1 / 3),
        "before": float(mesh.ep),
        "after": 1.0 if dispatcher == "balanced" else float(mesh.ep),
        "borrowed": lends,
        "lent_bytes": lends * 3 * moe.latent_dim * moe.expert_dim * 8,
        "dropped": 0,
    }
    for balance, load in run(four, case, dispatched(mesh, dispatcher), "one_expert"):
        assert balance == {str(layer): expected for layer in case.config.moe_layers}
        assert load.tolist() == [[MICROBATCHES * TOKENS] * 2 + [0] * 6] * len(case.config.moe_layers)


@pytest.mark.parametrize("name", ["dp4-ep4", "dp4-ep2", "tp2-dp2-ep2", "pp2-dp2-ep2"])
def test_a_balanced_load_lends_nothing(four: RankPool, name: str) -> None:
    case = make_case(tiny_model(), steps=1)
    ((balance, load),) = run(four, case, dispatched(MESHES[name], "balanced"), "balanced")
    assert load.tolist() == [[MICROBATCHES * TOKENS * TOP_K // 8] * 8] * len(case.config.moe_layers)
    for numbers in balance.values():
        assert numbers == {
            "entropy": pytest.approx(1), "before": 1, "after": 1, "borrowed": 0, "lent_bytes": 0, "dropped": 0
        }  # fmt: skip


@pytest.mark.parametrize("name", MESHES)
def test_zipf_is_drawn_by_every_rank_for_itself_and_evened_out(four: RankPool, name: str) -> None:
    case = make_case(tiny_model(), steps=2)
    (first, load), (_, later) = run(four, case, dispatched(MESHES[name], "balanced"), "zipf(1.5)")
    assert (load.sum(dim=1) == MICROBATCHES * TOKENS * TOP_K).all()
    assert not torch.equal(load, later)
    # Had ranks or passes drawn alike, every count would be a multiple of how many did.
    assert all(int(np.gcd.reduce(row.numpy())) == 1 for row in load)
    for numbers in first.values():
        assert 0 < numbers["entropy"] < 1
        assert numbers["before"] > numbers["after"] == 1
        assert numbers["borrowed"] > 0
        assert numbers["dropped"] == 0


def test_a_run_of_four_ranks_reports_its_balance_and_records_its_routing(four: RankPool, tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    options = ["train.steps=3", "train.detail_every=1", "routing.trace=true", "routing.force=zipf(1.5)"]
    mesh = ["parallel.ep=4", "parallel.experts.dispatcher=balanced"]
    folder = tmp_path / "run"
    assert four.run(train_rank, overrides(folder, corpus, *options, *mesh)) == [0] * 4
    records = read_metrics(folder)
    trace = load_trace(folder / "routing.npz")
    assert trace.counts[:, 0].tolist() == [record["expert_load"]["1"] for record in records]
    for record in records:
        numbers = record["expert_balance"]["1"]
        assert numbers["before"] > numbers["after"] == 1
        assert (numbers["dropped"], record["forced_routing"]) == (0, "zipf(1.5)")
    assert "Ranks before and after balancing" in (folder / "report.html").read_text("utf-8")
    assert not list((folder / "checkpoints").glob("*"))
