"""What `auto` becomes, what the heading says of it, and that a resumed run does not change it in silence."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from launch.train import main
from model.layers import Linear
from model.products import DENSE
from tests.launch.tiny_run import make_corpus, overrides, read_metrics
from tests.model.tiny import tiny_config
from train.build import build_model
from train.precision import describe_precision, resolve_precision

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def machine(monkeypatch: pytest.MonkeyPatch, *, units: bool) -> None:
    """From here on the CPU has units for bf16, or has none."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: units)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "aarch64"})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("units", [True, False])
def test_what_is_resolved_and_said(monkeypatch: pytest.MonkeyPatch, units: bool) -> None:
    machine(monkeypatch, units=units)
    assert resolve_precision("auto", CPU) == ("bf16" if units else "fp32")
    assert resolve_precision("auto", GPU) == "bf16"
    for given in ("bf16", "fp32", "fp64"):
        assert resolve_precision(given, CPU) == given
        assert describe_precision(given, GPU) == given
        said = describe_precision(given, CPU)
        assert said.startswith(given)
        assert ("no bf16 units" in said) == (not units and given != "fp64")
        assert ("products in fp32" in said) == (not units and given == "bf16")


@pytest.mark.parametrize(("units", "dtype"), [(True, "bfloat16"), (False, "bfloat16"), (False, "float32")])
def test_the_kernel_is_chosen_when_a_model_is_built(monkeypatch: pytest.MonkeyPatch, units: bool, dtype: str) -> None:
    machine(monkeypatch, units=units)
    model = build_model(tiny_config(), seed=0, dtype=getattr(torch, dtype), device=CPU)
    plain = [module.product is DENSE for module in model.modules() if isinstance(module, Linear)]
    assert plain == [units or dtype == "float32"] * len(plain)


@pytest.mark.parametrize("units", [True, False])
def test_the_run_folder_holds_what_auto_became_and_another_machine_must_ask(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], units: bool
) -> None:
    first, other = ("bf16", "fp32") if units else ("fp32", "bf16")
    command = ["train.precision=auto", "checkpoint.every=2"]
    machine(monkeypatch, units=units)
    assert main(overrides(tmp_path, corpus, "train.steps=2", *command)) == 0
    assert f", {first}" in capsys.readouterr().out
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["train"]["precision"] == first
    assert json.loads((tmp_path / "facts.json").read_text())["precision"].startswith(first)

    machine(monkeypatch, units=not units)
    assert main(overrides(tmp_path, corpus, "train.steps=4", *command)) == 2
    refusal = capsys.readouterr().err
    assert f"train.precision: {first} -> {other}" in refusal
    # The remedy works as it is printed.
    remedy = f"train.precision={first}"
    assert remedy in refusal
    assert main(overrides(tmp_path, corpus, "train.steps=4", "checkpoint.every=2", remedy)) == 0
    assert [line["step"] for line in read_metrics(tmp_path) if "loss" in line] == [1, 2, 3, 4]
