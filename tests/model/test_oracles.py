"""Whole models against values of the released code run in fp64: logits, loss and every parameter's gradient."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from model.hf_map import a_log_shape_of, from_hf, rows, to_hf
from model.kimi import KimiModel
from model.loss import chunked_cross_entropy

ORACLES = Path(__file__).parents[1] / "oracles"
NAMES = ["k3_tiny", "kimi_linear_tiny"]
# fp64 sums in another order; the issue asks for 1e-9.
TOLERANCE = 1e-10


def load(name: str) -> tuple[dict, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    config = json.loads((ORACLES / f"{name}.json").read_text())
    values = load_file(ORACLES / f"{name}.safetensors")
    params = {key.removeprefix("param."): value for key, value in values.items() if key.startswith("param.")}
    return config, params, values


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def next_token_loss(model: KimiModel, ids: torch.Tensor) -> torch.Tensor:
    hidden = model.hidden(ids)[:, :-1]
    return chunked_cross_entropy(hidden, model.head.weight, ids[:, 1:], chunk=37) / ids[:, 1:].numel()


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_released_code(name: str) -> None:
    config, params, values = load(name)
    model = from_hf(config, params, dtype=torch.float64)
    with torch.no_grad():
        assert relative(model(values["input_ids"]), values["logits"]) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_every_gradient_equal_the_released_code(name: str) -> None:
    config, params, values = load(name)
    model = from_hf(config, params, dtype=torch.float64)
    loss = next_token_loss(model, values["input_ids"])
    loss.backward()
    assert abs(float(loss.detach() / values["loss"]) - 1) < TOLERANCE

    grads = {key: param.grad for key, param in model.named_parameters()}
    compared = set()
    for row in rows(model.config):
        expected = values.get(f"grad.{row.theirs}")
        if expected is None:
            # The selection bias has no gradient, and layer 0 reads the embedding alone, unmixed.
            assert row.ours.endswith("router.bias") or row.ours.startswith("layers.0.mixer_mix")
            assert grads.get(row.ours) is None
            continue
        found = grads[row.ours] if row.expert is None else grads[row.ours][row.expert]
        assert relative(found.reshape(expected.shape), expected) < TOLERANCE, row.theirs
        compared.add(f"grad.{row.theirs}")
    assert compared == {key for key in values if key.startswith("grad.")}


@pytest.mark.parametrize("name", NAMES)
def test_hugging_face_round_trip_is_exact(name: str) -> None:
    config, params, _ = load(name)
    shape = a_log_shape_of(config, params)
    back_config, back = to_hf(from_hf(config, params, dtype=torch.float64), a_log_shape=shape)
    assert back_config == config
    assert back.keys() == params.keys()
    for key, value in params.items():
        assert torch.equal(back[key], value), key
