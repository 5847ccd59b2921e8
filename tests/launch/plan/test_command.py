"""The command: its numbers are those of the formulas, every shipped model has them, bad input is one line."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from configs.compose import compose_config
from launch.plan.__main__ import count_parts, main, make_plan, part_of
from launch.plan.memory import memory_of
from launch.plan.step import held_by, held_by_busiest
from launch.plan.traffic import step_traffic
from model.flops import forward_flops
from tests.train.proof.test_shrink import MODELS

ROOT = Path(__file__).parents[3]
MESH = ["parallel.pp=2", "parallel.cp=2", "parallel.dp=2", "parallel.ep=2"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tied", ["true", "false"])
def test_parts_add_up_to_the_model(model: str, tied: str) -> None:
    config = compose_config([f"model={model}", f"model.tie_embeddings={tied}"]).model
    counts = count_parts(config)
    sums = tuple(sum(numbers) for numbers in zip(*counts.values()))
    assert sums == config.count_parameters()


def test_every_parameter_of_kimi_k3_has_its_part() -> None:
    config = compose_config(["model=kimi_k3"]).model
    parts = {
        "embed.weight": "embedding",
        "head.weight": "output head",
        "layers.0.ffn.up.weight": "dense feed-forward",
        "layers.0.mixer.A_log": "attention (KDA)",
        f"layers.{config.mla_layers[0]}.mixer.kv_up.weight": "attention (MLA)",
        "layers.5.ffn.up.weight": "latent projections",
        "layers.5.ffn.experts.up": "routed experts",
        "layers.5.ffn.shared.up.weight": "shared experts",
        "layers.5.ffn.router.weight": "router",
        "layers.5.ffn_norm.weight": "norms and depth mixes",
        "layers.5.mixer_mix.query": "norms and depth mixes",
        "norm.weight": "norms and depth mixes",
    }
    assert {name: part_of(name, config) for name in parts} == parts
    moe = config.moe
    experts = len(config.moe_layers) * moe.experts * 3 * (moe.latent_dim or 0) * moe.expert_dim
    assert count_parts(config)["routed experts"].total == experts


def test_it_prints_what_the_formulas_say(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [*MESH, "batch.sequences=8", "batch.microbatch=4", "train.precision=bf16", "recompute.offload=true"]
    assert main([*overrides, "--ranks", "8"]) == 0
    output = capsys.readouterr().out
    plan = make_plan(compose_config(overrides), ranks=8, device="cuda")
    assert (plan.microbatches, plan.rows, plan.world_size) == (1, 4, 8)
    assert f"{plan.model.count_parameters()[0]:,}" in output
    assert f"{forward_flops(plan.model, length=plan.length).total:,.0f}" in output
    for stage in range(2):
        memory = memory_of(plan, held_by_busiest(plan, stage=stage))
        row = next(line for line in output.splitlines() if re.match(rf" *{stage} +\d", line))
        values = [memory.weights + memory.buffers, memory.gradients, memory.masters, memory.optimizer]
        values += [memory.activations, memory.working, memory.update, memory.peak]
        assert [float(x) for x in row.split()[1:]] == [pytest.approx(value / 2**20, abs=0.0051) for value in values]
    for name, moved in step_traffic(plan).items():
        assert re.search(rf"{name.split()[1]} +{moved.calls:,} ", output)
    assert "recompute.offload=true" in output


def test_the_busiest_rank_owns_at_least_as_much_as_any() -> None:
    plan = make_plan(compose_config([*MESH, "batch.sequences=8"]), ranks=8, device="cpu")
    for stage in range(2):
        most = memory_of(plan, held_by_busiest(plan, stage=stage)).optimizer
        assert most == max(
            memory_of(plan, held_by(plan, rank=rank)).optimizer for rank in range(4 * stage, 4 * stage + 4)
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks=0: must be a whole number of at least 1"),
        (["--ranks=two"], "--ranks=two: must be a whole number"),
        (["--ranks"], "--ranks=: must be a whole number"),
        (["--ranks=²"], "--ranks=²: must be a whole number"),
        (["--device", "tpu"], "--device=tpu: must be one of cuda, cpu"),
        (["--rank", "3"], "--rank"),
        (["train.step=5"], "train.step"),
        (["parallel.tp=3", "--ranks=3"], "must be divisible by parallel.tp=3"),
        (["parallel.tp=2", "--ranks=3"], "parallel"),
        (["nonsense"], "nonsense"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_said_and_nothing_printed(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert all(line.startswith("error: ") for line in captured.err.splitlines())


def test_help_and_the_module_itself() -> None:
    command = [sys.executable, "-m", "launch.plan"]
    shown = subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("usage: python -m launch.plan")
    refused = subprocess.run([*command, "--device=x"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1


def test_kimi_k3_on_thousands_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    mesh = ["parallel.tp=8", "parallel.pp=16", "parallel.ep=64", "batch.sequences=512"]
    assert main(["model=kimi_k3", *mesh, "--ranks", "8192"]) == 0
    output = capsys.readouterr().out
    assert "2,779,484,393,568" in output
    assert max(map(len, output.splitlines())) <= 80
