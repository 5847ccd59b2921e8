"""Hugging Face names: exact both ways, and every mismatch named."""

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import KDAConfig, ModelConfig, MoEConfig
from model.hf_map import REQUIRED, a_log_shape_of, config_from_hf, config_to_hf, from_hf, to_hf
from model.kimi import KimiModel
from tests.model.tiny import FAMILIES, tiny_config, tiny_model, tokens

# The released config.json files, key for key: of Kimi Linear 48B-A3B, and of Kimi K3 what its text_config has more or
# otherwise, without the mapping quantization_config.
KIMI_LINEAR: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"},
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
KIMI_K3: dict[str, Any] = {
    key: value
    for key, value in KIMI_LINEAR.items()
    if key not in ("head_dim", "model_max_length", "rope_scaling", "rope_theta")
} | {
    "_name_or_path": "",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "add_cross_attention": False,
    "attn_res_block_size": 12,
    "bad_words_ids": None,
    "begin_suppress_tokens": None,
    "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None,
    "decoder_start_token_id": None,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "finetuning_task": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "hidden_act": "situ",
    "hidden_size": 7168,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "intermediate_size": 33792,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "latent_moe_use_norm": True,
    "length_penalty": 1.0,
    "linear_attn_config": {
        "full_attn_layers": [*range(4, 93, 4), 93],
        "gate_lower_bound": -5.0,
        "head_dim": 128,
        "kda_layers": [layer for layer in range(1, 93) if layer % 4],
        "num_heads": 96,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
    },
    "max_length": 20,
    "max_position_embeddings": 1048576,
    "min_length": 0,
    "mla_use_output_gate": True,
    "moe_intermediate_size": 3072,
    "no_repeat_ngram_size": 0,
    "num_attention_heads": 96,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_experts": 896,
    "num_experts_per_token": 16,
    "num_hidden_layers": 93,
    "num_key_value_heads": 96,
    "num_return_sequences": 1,
    "num_shared_experts": 2,
    "output_attentions": False,
    "output_hidden_states": False,
    "output_scores": False,
    "prefix": None,
    "problem_type": None,
    "pruned_heads": {},
    "q_lora_rank": 1536,
    "remove_invalid_values": False,
    "repetition_penalty": 1.0,
    "return_dict": True,
    "return_dict_in_generate": False,
    "routed_expert_hidden_size": 3584,
    "routed_scaling_factor": 1.0,
    "sep_token_id": None,
    "suppress_tokens": None,
    "task_specific_params": None,
    "temperature": 1.0,
    "tf_legacy_loss": False,
    "tie_encoder_decoder": False,
    "tokenizer_class": None,
    "top_k": 50,
    "top_p": 1.0,
    "topk_method": "noaux_tc",
    "torchscript": False,
    "typical_p": 1.0,
    "use_bfloat16": False,
}
PACKED = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}


def padded_config() -> ModelConfig:
    """96 heads whose A_log is stored as 128, as in the released checkpoint, at a width of 2."""
    config = tiny_config()
    config.kda = KDAConfig(heads=96, head_dim=2)
    return config


def exported(config: ModelConfig) -> tuple[dict, dict[str, Tensor]]:
    shape = (128,) if config.kda.heads == 96 else None
    return to_hf(tiny_model(config, dtype=torch.bfloat16), a_log_shape=shape)


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
    assert a_log_shape_of(config, tensors) == (128,)
    assert model.layers[0].mixer.decay.A_log.shape == (96,)
    _, again = to_hf(model, a_log_shape=(128,))
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
    assert a_log_shape_of(config, four) == (1, 1, 2, 1)
    _, again = to_hf(model, a_log_shape=(1, 1, 2, 1))
    assert all(torch.equal(value, again[key]) and value.shape == again[key].shape for key, value in four.items())
    mixed = four | {name: flat}
    with pytest.raises(ValueError, match=r"layers\.\d\.self_attn\.A_log: shape"):
        from_hf(config, mixed, dtype=torch.bfloat16)


@pytest.mark.parametrize("shape", [(1,), (2, 1), (1, 2, 1, 1), (1, 1, 4, 1)], ids=str)
def test_another_shape_of_a_log_is_refused_by_name(shape: tuple[int, ...]) -> None:
    config, tensors = exported(tiny_config("linear"))
    tensors = {key: torch.zeros(shape) if key.endswith("A_log") else value for key, value in tensors.items()}
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.A_log: shape .*, expected \[2\] by the config"):
        from_hf(config, tensors, dtype=torch.bfloat16)


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
    ("released", "parameters"),
    [(KIMI_LINEAR, 49_122_675_072), (KIMI_K3, 2_779_484_393_568)],
    ids=["kimi_linear", "kimi_k3"],
)
def test_the_released_configs_are_taken_with_all_their_keys(released: dict, parameters: int) -> None:
    config = config_from_hf(released)
    assert config.errors() == []
    assert config.count_parameters()[0] == parameters
    assert config.padding_id == 163839


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu': must be one of situ, silu"),
        ({"num_hidden_layers": 94}, "must name each of the layers 1..94 exactly once"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func='softmax': must be 'sigmoid'; a model"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2: must be 1"),
        ({"moe_layer_freq": True}, "moe_layer_freq=True: must be 1"),
        ({"topk_method": "greedy"}, "topk_method='greedy': must be 'noaux_tc'"),
        ({"num_expert_group": 4, "topk_group": 2}, "num_expert_group=4: must be 1; experts are not routed by groups"),
        # The released code does not read this switch.
        ({"num_expert_group": 4, "use_grouped_topk": False}, "num_expert_group=4: must be 1"),
        ({"num_experts_per_token": 1}, "num_experts_per_token=1 with moe_renormalize=true"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1: must be 0"),
        ({"num_key_value_heads": 8}, "num_key_value_heads=8: must be num_attention_heads=96"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1: must be 0; there is no dropout"),
        ({"attention_bias": True}, "attention_bias=True: must be False"),
        ({"pruned_heads": {"3": [1]}}, "pruned_heads={'3': [1]}: must be {}"),
        ({"model_type": "deepseek_v3"}, "model_type='deepseek_v3': must be 'kimi_linear'"),
        # The released code takes 1 for no beta, and no bound for no linear beta.
        ({"activation_situ_beta": None}, "activation_situ_beta=None: must be above 0 with hidden_act='situ'"),
        ({"activation_situ_linear_beta": 0.0}, "activation_situ_linear_beta=0.0: must be above 0"),
        (
            {"mla_use_nope": False, "rope_scaling": {"type": "yarn", "factor": 32.0}},
            "rope_scaling={'factor': 32.0, 'type': 'yarn'}: must be null with mla_use_nope=false",
        ),
        ({"quantization_config": PACKED}, "must be None; packed tensors are not read; unpack them to floating point"),
        ({"vocab_size": "163840"}, "vocab_size='163840': must be an integer; correct it"),
        ({"vocab_size": None}, "vocab_size=None: must be an integer; correct it"),
        ({"moe_renormalize": 1}, "moe_renormalize=1: must be true or false"),
        ({"q_lora_rank": 1.5}, "q_lora_rank=1.5: must be an integer or null"),
        ({"linear_attn_config": None}, "linear_attn_config=None: must be a mapping"),
        ({"sliding_window": 4096}, "sliding_window=4096: unknown key, so nothing here computes it; remove it"),
        (
            {"linear_attn_config": KIMI_K3["linear_attn_config"] | {"num_v_heads": 4}},
            "linear_attn_config.num_v_heads=4: unknown key",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_configs_that_cannot_be_honoured_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        config_from_hf(KIMI_K3 | change)
    assert len(str(error.value).splitlines()) == 1


def test_everything_that_is_wrong_is_told_at_once() -> None:
    config = {key: value for key, value in KIMI_K3.items() if key not in ("vocab_size", "rms_norm_eps")}
    config["linear_attn_config"] = {"kda_layers": [1], "full_attn_layers": [2], "head_dim": 128, "num_heads": 2.0}
    with pytest.raises(ValueError, match="vocab_size: missing") as error:
        config_from_hf(config | {"moe_layer_freq": 2, "sliding_window": 4096})
    assert [line.split(": ")[0] for line in str(error.value).splitlines()] == [
        "vocab_size",
        "rms_norm_eps",
        "linear_attn_config.short_conv_kernel_size",
        "linear_attn_config.num_heads=2.0",
        "moe_layer_freq=2",
        "sliding_window=4096",
    ]
    wrong = {"hidden_act": "gelu", "num_key_value_heads": 8, "moe_layer_freq": 2, "sliding_window": 4096}
    with pytest.raises(ValueError, match="hidden_act='gelu'") as error:
        config_from_hf(KIMI_K3 | wrong)
    assert len(str(error.value).splitlines()) == len(wrong)


def without(config: dict, key: str) -> dict:
    """``config`` less one key; ``a.b`` is the key b of the mapping a."""
    head, _, tail = key.partition(".")
    rest = {name: value for name, value in config.items() if name != head}
    return rest | {head: without(config[head], tail)} if tail else rest


@pytest.mark.parametrize("key", REQUIRED)
def test_a_required_key_that_is_missing_is_named(key: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(key)}: missing; [^\n]*$"):
        config_from_hf(without(KIMI_K3, key))


@pytest.mark.parametrize("key", sorted({*KIMI_LINEAR} - {*REQUIRED, "linear_attn_config"}))
def test_a_key_that_may_be_missing_has_the_value_of_the_released_file(key: str) -> None:
    """But for those whose absence says something of its own: no shared experts, another padding."""
    config, lacking = config_from_hf(KIMI_LINEAR), config_from_hf(without(KIMI_LINEAR, key))
    if key == "num_shared_experts":
        assert lacking.moe.shared_experts == 0
    elif key == "pad_token_id":
        assert lacking.padding_id == 0
    else:
        assert lacking == config


def test_a_multimodal_config_says_which_part_to_give() -> None:
    with pytest.raises(ValueError, match=r"^text_config: .* give config\['text_config'\] and the tensors under"):
        config_from_hf({"model_type": "kimi_k3", "text_config": KIMI_K3, "vision_config": {}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latent_norm_eps": 1e-5}, "model.latent_norm_eps=1e-05: the released code has 1e-06"),
        ({"moe": MoEConfig(experts=8, top_k=1)}, "num_experts_per_token=1 with moe_renormalize=true"),
    ],
    ids=["latent_norm_eps", "one_expert"],
)
def test_what_the_released_code_computes_otherwise_is_not_exported(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        config_to_hf(dataclasses.replace(tiny_config(), **change))


def test_a_block_of_half_layers_cannot_be_exported() -> None:
    with pytest.raises(ValueError, match=r"model\.residual_block=1: Hugging Face counts whole layers"):
        to_hf(KimiModel(tiny_config("k3_full")))
