"""Hugging Face names: exact both ways, and every mismatch named."""

import re

import pytest
import torch
from torch import Tensor

from model.config import KDAConfig, ModelConfig
from model.hf_map import config_from_hf, config_to_hf, from_hf, to_hf
from model.kimi import KimiModel
from tests.model.tiny import FAMILIES, tiny_config, tiny_model, tokens


def padded_config() -> ModelConfig:
    """96 heads whose A_log is stored as 128, as in the released checkpoint, at a width of 2."""
    config = tiny_config()
    config.kda = KDAConfig(heads=96, head_dim=2, padded_heads=128)
    return config


def exported(config: ModelConfig) -> tuple[dict, dict[str, Tensor]]:
    return to_hf(tiny_model(config, dtype=torch.bfloat16))


# The full form has no name there: see the last test.
@pytest.mark.parametrize("family", [*(family for family in FAMILIES if family != "k3_full"), "tied"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_model_to_names_and_back_is_exact(family: str, dtype: torch.dtype) -> None:
    ours = tiny_config("k3" if family == "tied" else family)
    ours.tie_embeddings = family == "tied"
    model = tiny_model(ours, dtype=dtype)
    config, tensors = to_hf(model)
    assert ("lm_head.weight" in tensors) == (family != "tied")
    back = from_hf(config, tensors, dtype=dtype)
    for (name, value), (other_name, other) in zip(model.state_dict().items(), back.state_dict().items(), strict=True):
        assert name == other_name
        assert value.dtype == other.dtype
        assert torch.equal(value, other), name
    with torch.no_grad():
        assert torch.equal(model(tokens(1, 12)), back(tokens(1, 12)))


def test_a_log_is_padded_with_zeros_to_128_and_back() -> None:
    config, tensors = exported(padded_config())
    name = "model.layers.0.self_attn.A_log"
    assert tensors[name].shape == (128,)
    assert tensors[name].dtype == torch.float32
    assert not tensors[name][96:].any()
    model = from_hf(config, tensors, dtype=torch.bfloat16)
    assert model.config.kda.padded_heads == 128
    assert model.layers[0].mixer.decay.A_log.shape == (96,)
    _, again = to_hf(model)
    assert again.keys() == tensors.keys()
    assert all(torch.equal(value, again[key]) for key, value in tensors.items())


def test_a_log_of_four_dims_comes_back_as_it_was() -> None:
    """The released Kimi Linear keeps A_log as [1, 1, H, 1]."""
    config, tensors = exported(tiny_config("linear"))
    name = "model.layers.0.self_attn.A_log"
    flat = tensors[name]
    four = {key: value.view(1, 1, -1, 1) if key.endswith("A_log") else value for key, value in tensors.items()}
    model = from_hf(config, four, dtype=torch.bfloat16)
    assert torch.equal(model.layers[0].mixer.decay.A_log, flat)
    _, again = to_hf(model)
    assert all(torch.equal(value, again[key]) and value.shape == again[key].shape for key, value in four.items())
    mixed = four | {name: flat}
    with pytest.raises(ValueError, match=r"layers\.\d\.self_attn\.A_log: shape"):
        from_hf(config, mixed, dtype=torch.bfloat16)


def test_padding_that_is_not_zero_is_refused() -> None:
    config, tensors = exported(padded_config())
    tensors["model.layers.1.self_attn.A_log"][100] = 0.5
    with pytest.raises(
        ValueError, match=r"layers\.1\.self_attn\.A_log: the 32 entries beyond its 96 heads must be zero"
    ):
        from_hf(config, tensors, dtype=torch.bfloat16)


def test_fp32_tensors_stay_fp32() -> None:
    config, tensors = exported(tiny_config())
    wide = [key.removesuffix(".weight") for key, value in tensors.items() if value.dtype == torch.float32]
    kept = {key.rsplit(".", 1)[-1] for key in wide}
    assert kept == {"A_log", "dt_bias", "q_conv1d", "k_conv1d", "v_conv1d", "o_norm", "e_score_correction_bias"}


def test_missing_unexpected_and_misshapen_tensors_are_named() -> None:
    config, tensors = exported(tiny_config())
    lacking = {key: value for key, value in tensors.items() if key != "model.norm.weight"}
    with pytest.raises(ValueError, match=r"tensors missing: model\.norm\.weight"):
        from_hf(config, lacking, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"tensors unexpected: model\.extra"):
        from_hf(config, tensors | {"model.extra": torch.zeros(1)}, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"lm_head\.weight: shape \[3\], expected \[96, 32\]"):
        from_hf(config, tensors | {"lm_head.weight": torch.zeros(3)}, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu': must be one of situ, silu"),
        ({"use_grouped_topk": True, "num_expert_group": 4}, "num_expert_group=4"),
        ({"num_hidden_layers": 9}, "must name each of the layers 1..9 exactly once"),
    ],
    ids=["activation", "groups", "layers"],
)
def test_configs_that_cannot_be_honoured_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        config_from_hf(config_to_hf(tiny_config()) | change)


def test_a_block_of_half_layers_cannot_be_exported() -> None:
    with pytest.raises(ValueError, match=r"model\.residual_block=1: Hugging Face counts whole layers"):
        to_hf(KimiModel(tiny_config("k3_full")))
