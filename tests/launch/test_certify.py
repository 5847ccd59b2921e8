"""The command that proves a mesh: every shipped config passes, what is wrong is refused, what differs is said."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import launch.certify
import launch.train
from configs.compose import compose_config
from configs.schema import validate
from launch.certify import LENT, RETURNED, Certificate, certify, lent_bytes, main
from model.loss import IGNORE_INDEX
from parallel.config import ParallelConfig
from parallel.expert.planner import ExpertPlan, plan_home
from parallel.sharding import TensorSlice
from tests.dist.ranks import PATIENCE, RankPool
from tests.train.proof.test_shrink import MODELS
from train.proof.case import LEAN, STEPS, lends, make_case
from train.proof.parity import Case, Outcome, train_on_mesh
from train.proof.shrink import BALANCE_ABOVE, microbatches_per_rank, ranks_of, shrink

pytestmark = pytest.mark.slow  # certify runs

ROOT = Path(__file__).parents[2]
TWO_RANKS = {
    "dp2": ["parallel.dp=2"],
    "dp2-ep2": ["parallel.dp=2", "parallel.ep=2"],
    "dp2-ep2-balanced": ["parallel.dp=2", "parallel.ep=2", "parallel.experts.dispatcher=balanced"],
    "cp2": ["parallel.dp=1", "parallel.cp=2"],
    "cp2-ep2": ["parallel.dp=1", "parallel.cp=2", "parallel.ep=2"],
    "tp2": ["parallel.dp=1", "parallel.tp=2"],
    "pp2": ["parallel.dp=1", "parallel.pp=2"],
    "pp2-vpp2": ["parallel.dp=1", "parallel.pp=2", "parallel.vpp=2"],
}
# Their three heads cannot be shared by two ranks, and the config is refused.
NO_TENSOR = ("kimi_k3_demo", "kimi_k2_small", "kimi_linear_small")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


def check_certified(pool: RankPool, overrides: list[str]) -> Certificate:
    config = compose_config(overrides)
    assert validate(config, world_size=ranks_of(config.parallel)) == []
    certificate = certify(shrink(config), pool=pool)
    assert certificate.failures() == []
    assert len(certificate.fp32_losses) == STEPS
    assert certificate.outcome.traffic
    return certificate


@pytest.mark.parametrize("model", MODELS)
def test_every_shipped_model_passes_with_context_and_experts_over_two_ranks(pool: RankPool, model: str) -> None:
    check_certified(pool, [f"model={model}", *TWO_RANKS["cp2-ep2"]])


@pytest.mark.parametrize("mesh", ["dp2", "tp2", "pp2-vpp2"])
def test_k3_passes_on_the_other_axes(pool: RankPool, mesh: str) -> None:
    check_certified(pool, ["model=kimi_k3", *TWO_RANKS[mesh]])


@pytest.mark.parametrize("model", ["kimi_k3", "kimi_linear_48b", "kimi_k2_1t"])
@pytest.mark.parametrize("deduplicate", ["false", "true"])
def test_balanced_experts_pass_and_some_are_borrowed_two_at_once(pool: RankPool, model: str, deduplicate: str) -> None:
    overrides = [f"model={model}", *TWO_RANKS["dp2-ep2-balanced"], f"parallel.experts.deduplicate={deduplicate}"]
    certificate = check_certified(pool, overrides)
    small = shrink(compose_config(overrides)).model
    expert_bytes = 3 * small.moe.expert_dim * (small.moe.latent_dim or small.hidden_dim) * 8
    lent = certificate.outcome.traffic[LENT]
    exchanges = lent.calls // 2
    assert lent.sent > exchanges * expert_bytes
    assert lent.sent == 2 * lent_bytes(certificate.outcome, RETURNED)


def test_a_threshold_is_lowered_until_passes_above_and_below_it_are_run(pool: RankPool) -> None:
    overrides = ["model=kimi_k3", *TWO_RANKS["dp2-ep2-balanced"], "parallel.experts.balance_above=3"]
    certificate = check_certified(pool, overrides)
    config = shrink(compose_config(overrides))
    assert config.parallel.experts.balance_above == BALANCE_ABOVE
    passes = STEPS * microbatches_per_rank(config.parallel) * len(config.model.moe_layers)
    # Two ranks, forward and backward.
    assert 0 < certificate.outcome.traffic[LENT].calls // 4 < passes


def test_the_demo_passes(pool: RankPool) -> None:
    check_certified(pool, ["experiment=demo", *TWO_RANKS["dp2-ep2"]])


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [mesh for mesh in TWO_RANKS if mesh != "cp2-ep2"])
@pytest.mark.parametrize("model", MODELS)
def test_every_shipped_model_passes_on_every_axis(pool: RankPool, model: str, mesh: str) -> None:
    if mesh == "tp2" and model in NO_TENSOR:
        assert main([f"model={model}", *TWO_RANKS[mesh]]) == 2
    else:
        check_certified(pool, [f"model={model}", *TWO_RANKS[mesh]])


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.tp=2", "parallel.pp=2", "parallel.dp=2", "parallel.ep=2", "recompute.policy=selective"],
        ["parallel.cp=2", "parallel.pp=2", "parallel.vpp=2", "parallel.dp=2", "parallel.zero=2"],
        ["parallel.tp=2", "parallel.pp=2", *TWO_RANKS["dp2-ep2-balanced"], "parallel.zero=2", "recompute.policy=full"],
    ],
    ids=" ".join,
)
def test_k3_passes_on_eight_ranks(overrides: list[str]) -> None:
    with RankPool(8) as eight:
        check_certified(eight, ["model=kimi_k3", *overrides])


def test_the_command_prints_what_it_proved() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "launch.certify", "model=kimi_k3", "parallel.cp=8", "parallel.dp=1", "parallel.ep=8"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stderr) == (0, "")
    for text in (
        "model.layers: KKKM*23 M -> KKM",
        "2 rank(s) on gloo, pp=1 x dp=1 x cp=2 x tp=1, ep=2",
        "layers.1.ffn.experts.gate",
        "gradient norm of step 2",
        "fp32 loss of step 1",
        "cp all_gather",
        "cp all_to_all",
        "EQUAL: 82 parameters",
        "tolerance 1e-09 in fp64",
    ):
        assert text in " ".join(done.stdout.split()), text


@pytest.mark.parametrize(
    "arguments",
    [
        ["parallel.cq=2"],
        ["+parallel.cq=2"],
        ["model=kimi_k4"],
        ["parallel.cp=two"],
        ["parallel.cp=0"],
        ["parallel.cp=3"],
        ["parallel.ep=5", "parallel.dp=5"],
        ["model.moe.top_k=16", "optim.lr=-1", "model.mla.heads=0"],
    ],
    ids=" ".join,
)
def test_what_train_refuses_is_refused_in_the_same_words(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert all(line.startswith("error: ") for line in printed.err.splitlines())
    # As under torchrun with the world that the config asks for.
    if "=0" not in arguments[0] and not arguments[0].startswith(("parallel.cq", "+", "model=", "parallel.cp=two")):
        monkeypatch.setenv("WORLD_SIZE", str(ranks_of(compose_config(arguments).parallel)))
    assert launch.train.main(arguments) == 2
    assert capsys.readouterr().err == printed.err


@pytest.mark.parametrize("text", [launch.certify.__doc__, (ROOT / "docs" / "certify.md").read_text("utf-8")])
def test_the_documented_command_is_accepted(text: str) -> None:
    forms = ("python -m launch.certify ", "perilune certify ")
    command = next(line.strip() for line in text.splitlines() if line.strip().startswith(forms))
    config = compose_config([word for word in command.split() if "=" in word])
    assert validate(config, world_size=ranks_of(config.parallel)) == []
    assert ranks_of(config.parallel) == 8 * 16 * 64
    assert ranks_of(shrink(config).parallel) == 8


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: python -m launch.certify")


def test_one_rank_is_certified_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parallel.dp=1"]) == 0
    assert "1 rank(s) on gloo" in capsys.readouterr().out


def train_wrongly(case: Case, config: ParallelConfig) -> Outcome[TensorSlice]:
    """One mistake: rank 1 scales what it adds to the sum of gradients."""
    reduce = dist.reduce

    def scaled(tensor: torch.Tensor, *args: object, **options: object) -> object:
        return reduce(tensor.mul_(1 + 1e-6 * dist.get_rank()), *args, **options)

    with patch.object(dist, "reduce", scaled):
        return train_on_mesh(case, config)


def plan_without_lending(counts: torch.Tensor, *, above: float) -> ExpertPlan:
    return plan_home(counts)


def train_without_lending(case: Case, config: ParallelConfig) -> Outcome[TensorSlice]:
    """No mistake in any number, but the balance that was asked for is not there."""
    with patch("parallel.expert.plan", plan_without_lending):
        return train_on_mesh(case, config)


def test_balanced_experts_that_lend_nothing_are_not_certified(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(TWO_RANKS["dp2-ep2-balanced"]) == 0
    assert "bytes of weights lent" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr(launch.certify, "train_on_mesh", train_without_lending)
    assert main(TWO_RANKS["dp2-ep2-balanced"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "parallel.experts.dispatcher=balanced: no expert was lent, so nothing is proven of lending" in out
    assert "NOT PROVEN" in out
    assert "EQUAL:" not in out
    assert "bytes of weights lent" not in out


@pytest.mark.parametrize("mesh", ["dp2-ep2", "dp2"])
def test_biases_lean_only_where_experts_are_to_be_lent(mesh: str) -> None:
    config = shrink(compose_config(TWO_RANKS[mesh]))
    bias = "layers.1.ffn.router.bias"
    balanced = make_case(shrink(compose_config(TWO_RANKS["dp2-ep2-balanced"]))).values[bias]
    plain = make_case(config).values[bias]
    home = len(plain) // 2
    assert not lends(config)
    assert torch.equal(balanced[home:], plain[home:])
    torch.testing.assert_close(balanced[:home], plain[:home] + LEAN)


def fail_on_rank_1(case: Case, config: ParallelConfig) -> Outcome[TensorSlice]:
    if dist.get_rank() == 1:
        raise RuntimeError("the link is cut")
    return train_on_mesh(case, config)


def test_a_difference_is_status_1_and_the_worst_comes_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.certify, "train_on_mesh", train_wrongly)
    assert main(["parallel.dp=2"]) == 1
    out = capsys.readouterr().out
    assert "NOT EQUAL: " in out
    listed = [line for line in out.splitlines() if line.startswith(("gradient of", "step of", "state of", "weight of"))]
    assert len(listed) > 10
    errors = [float(line.split()[-1]) for line in listed]
    assert errors == sorted(errors, reverse=True)
    first_row = next(line for line in out.splitlines() if line.startswith("│"))
    assert "!" in first_row


def test_a_failing_rank_takes_the_others_down_and_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch.certify, "train_on_mesh", fail_on_rank_1)
    # The ranks that wait for the failed one are ended, and not waited for.
    monkeypatch.setattr(launch.certify, "TIMEOUT", PATIENCE)
    assert main(["parallel.dp=2"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("error: rank 1")
    assert lines[-1].endswith("RuntimeError: the link is cut")


@pytest.mark.parametrize("arguments", [[], ["parallel.cp=2"], ["parallel.cp=2", "parallel.dp=1"]], ids=" ".join)
def test_the_data_is_packed_padded_and_uneven(arguments: list[str]) -> None:
    config = shrink(compose_config(arguments))
    steps = make_case(config).steps
    assert [len(step) for step in steps] == [config.batch.sequences] * STEPS
    cut = config.batch.length // config.parallel.cp
    for step in steps:
        labelled = [int((m.labels != IGNORE_INDEX).sum()) for m in step]
        assert min(labelled) == 0
        assert max(labelled) >= 20
        for dp_rank in range(config.parallel.dp):
            assert len(step[dp_rank :: config.parallel.dp]) >= 2
        bounds = [m.cu_seqlens.tolist() for m in step]
        assert any(cut in b for b in bounds)
        assert any(len(b) == 2 for b in bounds)
        for m in step:
            ends = m.cu_seqlens[1:].long() - 1
            assert (m.labels[0, ends] == IGNORE_INDEX).all()
            kept = m.labels[0, :-1] != IGNORE_INDEX
            assert torch.equal(m.labels[0, :-1][kept], m.input_ids[0, 1:][kept])
    assert not torch.equal(steps[0][0].input_ids, steps[1][0].input_ids)
