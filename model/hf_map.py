"""Our names and shapes <-> those of the released Hugging Face checkpoints, exact both ways.

One table row per tensor says where it goes and how its shape changes; both directions read the same rows, so
they cannot disagree. Covers Kimi K3 and Kimi Linear (`KimiLinearForCausalLM` naming).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from reprlib import repr as shortened
from typing import Any

import torch
from torch import Tensor

from model.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from model.kimi import KimiModel
from model.precision import set_precision

# The attention-residual block counts decoder layers there and sublayers here.
SUBLAYERS = 2
# What the released configuration class takes where config.json does not say.
DEFAULT_PADDING = 0


# What a released config must say, and of which kind; null is not a value of these.
REQUIRED: dict[str, type] = {
    "vocab_size": int,
    "hidden_size": int,
    "intermediate_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "hidden_act": str,
    "rms_norm_eps": float,
    "kv_lora_rank": int,
    "qk_nope_head_dim": int,
    "qk_rope_head_dim": int,
    "v_head_dim": int,
    "mla_use_nope": bool,
    "num_experts": int,
    "num_experts_per_token": int,
    "moe_intermediate_size": int,
    "moe_renormalize": bool,
    "routed_scaling_factor": float,
    "first_k_dense_replace": int,
    "linear_attn_config": dict,
    "linear_attn_config.kda_layers": list,
    "linear_attn_config.full_attn_layers": list,
    "linear_attn_config.num_heads": int,
    "linear_attn_config.head_dim": int,
    "linear_attn_config.short_conv_kernel_size": int,
}
# What it may leave out or hold as null.
OPTIONAL: dict[str, type] = {
    "q_lora_rank": int,
    "mla_use_output_gate": bool,
    "rope_theta": float,
    "num_key_value_heads": int,
    "num_shared_experts": int,
    "routed_expert_hidden_size": int,
    "latent_moe_use_norm": bool,
    "attn_res_block_size": int,
    "activation_situ_beta": float,
    "activation_situ_linear_beta": float,
    "pad_token_id": int,
    "tie_word_embeddings": bool,
    "linear_attn_config.use_full_rank_gate": bool,
    "linear_attn_config.gate_lower_bound": float,
}
# What changes the function and has one value here (the first; the others say the same), and what to do about others.
UNFIT = "a model trained with another value cannot be loaded"
FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "model_type": (("kimi_linear",), "other families have other tensors; " + UNFIT),
    "moe_router_activation_func": (("sigmoid",), UNFIT),
    "moe_layer_freq": ((1,), UNFIT),
    "topk_method": (("noaux_tc",), UNFIT),
    "num_expert_group": ((1, None), "experts are not routed by groups; " + UNFIT),
    "num_nextn_predict_layers": ((0, None), "layers that predict further tokens are not built; remove key and tensors"),
    "attention_bias": ((False, None), "projections have no bias; " + UNFIT),
    "attention_dropout": ((0, None), "there is no dropout; set it to 0 to train on without"),
    "pruned_heads": (({}, None), UNFIT),
    "add_cross_attention": ((False, None), UNFIT),
    "cross_attention_hidden_size": ((None,), UNFIT),
    "is_encoder_decoder": ((False, None), UNFIT),
    "tie_encoder_decoder": ((False, None), UNFIT),
    "quantization_config": ((None,), "packed tensors are not read; unpack them to floating point and remove the key"),
}
# What does not change the function that is computed of token ids. The released code reads no `head_dim` and no
# `use_grouped_topk`, and `topk_group` only with several groups; `top_k` is that of sampling.
_IGNORED = """
    _name_or_path _commit_hash architectures auto_map dtype torch_dtype transformers_version initializer_range
    use_cache head_dim use_grouped_topk topk_group max_position_embeddings model_max_length
    bos_token_id eos_token_id sep_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id
    tokenizer_class prefix finetuning_task task_specific_params problem_type id2label label2id num_labels
    output_attentions output_hidden_states output_scores return_dict return_dict_in_generate is_decoder
    chunk_size_feed_forward torchscript tf_legacy_loss use_bfloat16
    do_sample temperature top_k top_p typical_p num_beams num_beam_groups diversity_penalty early_stopping
    min_length max_length length_penalty exponential_decay_length_penalty repetition_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids suppress_tokens begin_suppress_tokens num_return_sequences
    remove_invalid_values
"""
IGNORED = frozenset(_IGNORED.split())
# Checked where positions are rotated, ignored where they are not.
ROTARY = ("rope_scaling", "rope_parameters")
ACTIVATIONS = {"situ": "situ", "silu": "swiglu"}
_ONE_EXPERT = (
    "num_experts_per_token=1 with moe_renormalize=true: the released code does not renormalise the weight of a single "
    "expert, this model would; set moe_renormalize=false"
)
_KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "text", dict: "a mapping", list: "a list"}


@dataclass(frozen=True)
class Row:
    """One Hugging Face tensor: ``theirs``, our name, which expert of a stack, and the shape it has there."""

    theirs: str
    ours: str
    expert: int | None = None
    shape: tuple[int, ...] | None = None
    padded: int | None = None


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of a released ``config.json`` (of Kimi K3: of its ``text_config``).

    Raises:
        ValueError: what is missing, unknown or not what this model computes, all of it, one line each.
    """
    problems = _config_problems(config)
    if problems:
        raise ValueError("\n".join(problems))
    linear = config["linear_attn_config"]
    situ = config["hidden_act"] == "situ"
    block, theta = config.get("attn_res_block_size"), config.get("rope_theta")
    return ModelConfig(
        vocab_size=config["vocab_size"],
        hidden_dim=config["hidden_size"],
        layers="".join("K" if i + 1 in linear["kda_layers"] else "M" for i in range(config["num_hidden_layers"])),
        dense_layers=config["first_k_dense_replace"],
        dense_dim=config["intermediate_size"],
        activation=ACTIVATIONS[config["hidden_act"]],
        situ_beta=config["activation_situ_beta"] if situ else ModelConfig.situ_beta,
        situ_linear_beta=config["activation_situ_linear_beta"] if situ else ModelConfig.situ_linear_beta,
        residual_block=None if block is None else block * SUBLAYERS,
        norm_eps=config["rms_norm_eps"],
        padding_id=config.get("pad_token_id", DEFAULT_PADDING),
        tie_embeddings=bool(config.get("tie_word_embeddings")),
        kda=KDAConfig(
            heads=linear["num_heads"],
            head_dim=linear["head_dim"],
            conv_size=linear["short_conv_kernel_size"],
            gate_lower_bound=linear.get("gate_lower_bound"),
            full_rank_output_gate=bool(linear.get("use_full_rank_gate")),
        ),
        mla=MLAConfig(
            heads=config["num_attention_heads"],
            q_rank=config.get("q_lora_rank"),
            kv_rank=config["kv_lora_rank"],
            nope_dim=config["qk_nope_head_dim"],
            rope_dim=config["qk_rope_head_dim"],
            value_dim=config["v_head_dim"],
            output_gate=bool(config.get("mla_use_output_gate")),
            rotary=not config["mla_use_nope"],
            rope_theta=MLAConfig.rope_theta if theta is None else theta,
        ),
        moe=MoEConfig(
            experts=config["num_experts"],
            top_k=config["num_experts_per_token"],
            expert_dim=config["moe_intermediate_size"],
            latent_dim=config.get("routed_expert_hidden_size"),
            latent_norm=bool(config.get("latent_moe_use_norm")),
            shared_experts=config.get("num_shared_experts") or 0,
            routed_scaling=config["routed_scaling_factor"],
            renormalize=config["moe_renormalize"],
        ),
    )


def _config_problems(config: Mapping[str, Any]) -> list[str]:
    """Everything in a released config that keeps it from being this model, one line each."""
    if "text_config" in config:
        return [
            "text_config: this is the config of the whole multimodal model, of which the language model is built; give "
            "config['text_config'] and the tensors under 'language_model.', without that prefix"
        ]
    keys = dict(config)
    linear = keys.get("linear_attn_config")
    if isinstance(linear, Mapping):
        keys |= {f"linear_attn_config.{key}": value for key, value in linear.items()}
    # What lies in a mapping that is itself missing is not missed one by one.
    found = [
        f"{key}: missing; the model cannot be built without it, so add it as the checkpoint has it"
        for key in REQUIRED
        if key not in keys and ("." not in key or isinstance(linear, Mapping))
    ]
    for key, value in keys.items():
        kind = REQUIRED.get(key) or OPTIONAL.get(key)
        if kind is not None and not _is_a(value, kind) and not (value is None and key in OPTIONAL):
            null = " or null" if key in OPTIONAL else ""
            found.append(f"{key}={shortened(value)}: must be {_KINDS[kind]}{null}; correct it")
    if not found:
        found = _contradictions(config)
    for key, value in keys.items():
        if key in FIXED:
            allowed, remedy = FIXED[key]
            # By type too: True is not a 1 of a config.
            if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in allowed):
                found.append(f"{key}={shortened(value)}: must be {allowed[0]!r}; {remedy}")
        elif not any(key in known for known in (REQUIRED, OPTIONAL, IGNORED, ROTARY)):
            found.append(
                f"{key}={shortened(value)}: unknown key, so nothing here computes it; remove it from the config if "
                "the model's function does not depend on it"
            )
    return found


def _contradictions(config: Mapping[str, Any]) -> list[str]:
    """What keys of the right kinds say together that this model does not compute."""
    found = []
    act = config["hidden_act"]
    if act not in ACTIVATIONS:
        found.append(f"hidden_act={act!r}: must be one of {', '.join(ACTIVATIONS)}; {UNFIT}")
    if act == "situ":
        for key in ("activation_situ_beta", "activation_situ_linear_beta"):
            if not (config.get(key) or 0) > 0:
                found.append(f"{key}={config.get(key)}: must be above 0 with hidden_act='situ'; {UNFIT}")
    heads, shared = config["num_attention_heads"], config.get("num_key_value_heads")
    if shared not in (None, heads):
        found.append(f"num_key_value_heads={shared}: must be num_attention_heads={heads}; {UNFIT}")
    if not config["mla_use_nope"]:
        for key in ROTARY:
            if config.get(key) is not None:
                found.append(
                    f"{key}={shortened(config[key])}: must be null with mla_use_nope=false, for angles are not scaled; "
                    "remove it if it only repeats rope_theta"
                )
    if config["num_experts_per_token"] == 1 and config["moe_renormalize"]:
        found.append(_ONE_EXPERT)
    layers = config["num_hidden_layers"]
    kda, mla = (config["linear_attn_config"][name] for name in ("kda_layers", "full_attn_layers"))
    named = kda + mla
    if len(named) != layers or any(layer not in named for layer in range(1, layers + 1)):
        found.append(
            f"kda_layers={kda} and full_attn_layers={mla}: must name each of the layers 1..{layers} exactly once; "
            "correct num_hidden_layers or the lists"
        )
    return found


def _is_a(value: Any, kind: type) -> bool:
    """Whether a value of a config is of ``kind``; JSON may write a number without its fraction."""
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    return isinstance(value, int | float) if kind is float else isinstance(value, Mapping if kind is dict else kind)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The released config's keys for a ModelConfig.

    Raises:
        ValueError: an attention-residual block that is not a whole number of layers, or what the released code has
            no key for and computes otherwise.
    """
    block = config.residual_block
    if block is not None and block % SUBLAYERS:
        raise ValueError(
            f"model.residual_block={block}: Hugging Face counts whole layers, so the block must be even to be exported"
        )
    if config.moe.top_k == 1 and config.moe.renormalize:
        raise ValueError(_ONE_EXPERT)
    if config.latent_norm_eps != ModelConfig.latent_norm_eps:
        raise ValueError(
            f"model.latent_norm_eps={config.latent_norm_eps}: the released code has {ModelConfig.latent_norm_eps} and "
            "no key for it, so no other value can be exported"
        )
    situ = config.activation == "situ"
    kda, mla, moe = config.kda, config.mla, config.moe
    linear: dict[str, Any] = {
        "kda_layers": [i + 1 for i, mixer in enumerate(config.mixers) if mixer == "K"],
        "full_attn_layers": [i + 1 for i, mixer in enumerate(config.mixers) if mixer == "M"],
        "num_heads": kda.heads,
        "head_dim": kda.head_dim,
        "short_conv_kernel_size": kda.conv_size,
    }
    if kda.full_rank_output_gate:
        linear["use_full_rank_gate"] = True
    if kda.gate_lower_bound is not None:
        linear["gate_lower_bound"] = kda.gate_lower_bound
    exceptions: dict[str, Any] = {}
    if mla.rotary:
        exceptions["rope_theta"] = mla.rope_theta
    if config.padding_id != DEFAULT_PADDING:
        exceptions["pad_token_id"] = config.padding_id
    if config.tie_embeddings:
        exceptions["tie_word_embeddings"] = True
    return exceptions | {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_dim,
        "intermediate_size": config.dense_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": mla.heads,
        "hidden_act": "situ" if situ else "silu",
        "rms_norm_eps": config.norm_eps,
        "q_lora_rank": mla.q_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_nope_head_dim": mla.nope_dim,
        "qk_rope_head_dim": mla.rope_dim,
        "v_head_dim": mla.value_dim,
        "mla_use_nope": not mla.rotary,
        "mla_use_output_gate": mla.output_gate,
        "num_experts": moe.experts,
        "num_experts_per_token": moe.top_k,
        "num_shared_experts": moe.shared_experts,
        "moe_intermediate_size": moe.expert_dim,
        "routed_expert_hidden_size": moe.latent_dim,
        "latent_moe_use_norm": moe.latent_dim is not None and moe.latent_norm,
        "moe_renormalize": moe.renormalize,
        "routed_scaling_factor": moe.routed_scaling,
        "first_k_dense_replace": config.dense_layers,
        "attn_res_block_size": None if block is None else block // SUBLAYERS,
        "activation_situ_beta": config.situ_beta if situ else None,
        "activation_situ_linear_beta": config.situ_linear_beta if situ else None,
        "use_grouped_topk": False,
        "linear_attn_config": linear,
    }


def rows(config: ModelConfig, *, a_log_shape: tuple[int, ...] | None = None) -> Iterator[Row]:
    """The whole table for one model, in checkpoint order; ``a_log_shape`` as in `to_hf`."""
    dim = config.hidden_dim
    yield Row("model.embed_tokens.weight", "embed.weight")
    for index, mixer in enumerate(config.mixers):
        theirs, ours = f"model.layers.{index}", f"layers.{index}"
        if config.residual_block is not None:
            for their_mix, our_mix in (("self_attention_res", "mixer_mix"), ("mlp_res", "ffn_mix")):
                yield Row(f"{theirs}.{their_mix}_norm.weight", f"{ours}.{our_mix}.norm")
                yield Row(f"{theirs}.{their_mix}_proj.weight", f"{ours}.{our_mix}.query", shape=(1, dim))
        yield Row(f"{theirs}.input_layernorm.weight", f"{ours}.mixer_norm.weight")
        yield Row(f"{theirs}.post_attention_layernorm.weight", f"{ours}.ffn_norm.weight")
        mixer_rows = _kda_rows(config.kda, a_log_shape) if mixer == "K" else _mla_rows(config.mla)
        yield from _prefixed(mixer_rows, f"{theirs}.self_attn", f"{ours}.mixer")
        if config.is_moe(index):
            yield from _prefixed(_moe_rows(config.moe), f"{theirs}.block_sparse_moe", f"{ours}.ffn")
        else:
            yield from _prefixed(_ffn_rows(), f"{theirs}.mlp", f"{ours}.ffn")
    if config.residual_block is not None:
        yield Row("model.output_attn_res_norm.weight", "output_mix.norm")
        yield Row("model.output_attn_res_proj.weight", "output_mix.query", shape=(1, dim))
    yield Row("model.norm.weight", "norm.weight")
    if not config.tie_embeddings:
        yield Row("lm_head.weight", "head.weight")


def _prefixed(rows: Iterator[Row], theirs: str, ours: str) -> Iterator[Row]:
    for row in rows:
        yield Row(f"{theirs}.{row.theirs}", f"{ours}.{row.ours}", row.expert, row.shape, row.padded)


def _kda_rows(kda: KDAConfig, a_log_shape: tuple[int, ...] | None) -> Iterator[Row]:
    width = kda.heads * kda.head_dim
    for stream in "qkv":
        yield Row(f"{stream}_proj.weight", f"{stream}.weight")
        yield Row(f"{stream}_conv1d.weight", f"{stream}_conv.weight", shape=(width, 1, kda.conv_size))
    yield Row("b_proj.weight", "beta.weight")
    yield Row("f_a_proj.weight", "decay.down.weight")
    yield Row("f_b_proj.weight", "decay.up.weight")
    if a_log_shape is None or len(a_log_shape) > 1:
        yield Row("A_log", "decay.A_log", shape=a_log_shape)
    else:
        yield Row("A_log", "decay.A_log", padded=a_log_shape[0])
    yield Row("dt_bias", "decay.dt_bias")
    if kda.full_rank_output_gate:
        yield Row("g_proj.weight", "gate.up.weight")
    else:
        yield Row("g_a_proj.weight", "gate.down.weight")
        yield Row("g_b_proj.weight", "gate.up.weight")
    yield Row("o_norm.weight", "norm.weight")
    yield Row("o_proj.weight", "out.weight")


def _mla_rows(mla: MLAConfig) -> Iterator[Row]:
    if mla.q_rank is None:
        yield Row("q_proj.weight", "q.up.weight")
    else:
        yield Row("q_a_proj.weight", "q.down.weight")
        yield Row("q_a_layernorm.weight", "q.norm.weight")
        yield Row("q_b_proj.weight", "q.up.weight")
    yield Row("kv_a_proj_with_mqa.weight", "kv_down.weight")
    yield Row("kv_a_layernorm.weight", "kv_norm.weight")
    yield Row("kv_b_proj.weight", "kv_up.weight")
    if mla.output_gate:
        yield Row("g_proj.weight", "gate.weight")
    yield Row("o_proj.weight", "out.weight")


def _ffn_rows() -> Iterator[Row]:
    for part in ("gate", "up", "down"):
        yield Row(f"{part}_proj.weight", f"{part}.weight")


def _moe_rows(moe: MoEConfig) -> Iterator[Row]:
    yield Row("gate.weight", "router.weight")
    yield Row("gate.e_score_correction_bias", "router.bias")
    for expert in range(moe.experts):
        for theirs, ours in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
            yield Row(f"experts.{expert}.{theirs}.weight", f"experts.{ours}", expert)
    if moe.latent_dim is not None:
        yield Row("routed_expert_down_proj.weight", "down.weight")
        yield Row("routed_expert_up_proj.weight", "up.weight")
        if moe.latent_norm:
            yield Row("routed_expert_norm.weight", "norm.weight")
    if moe.shared_experts:
        yield from _prefixed(_ffn_rows(), "shared_experts", "shared")


def from_hf(config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, dtype: torch.dtype) -> KimiModel:
    """A model holding a released checkpoint's weights.

    Args:
        config: the released ``config.json`` keys.
        tensors: by Hugging Face name; exactly those that the config calls for.
        dtype: compute dtype; tensors that the checkpoint keeps in fp32 stay at fp32 or wider.

    Raises:
        ValueError: missing or unexpected tensors, wrong shapes, or A_log padded with anything but zeros.
    """
    ours = config_from_hf(config)
    problems = ours.errors()
    if problems:
        raise ValueError("; ".join(problems))
    model = KimiModel(ours)
    set_precision(model, dtype)
    state = model.state_dict()
    table = list(rows(ours, a_log_shape=a_log_shape_of(config, tensors)))
    _check_names({row.theirs for row in table}, set(tensors))
    with torch.no_grad():
        for row in table:
            target = state[row.ours] if row.expert is None else state[row.ours][row.expert]
            target.copy_(_unpad(row, tensors[row.theirs], target))
    return model


def to_hf(model: KimiModel, *, a_log_shape: tuple[int, ...] | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config, tensors) of ``model`` in Hugging Face names, each tensor a copy in the model's own dtype.

    Args:
        a_log_shape: in which the file keeps KDA's A_log (`a_log_shape_of` one that was read): (128,) for 96 heads
            padded with zeros, as the released Kimi K3; (1, 1, 32, 1), as the released Kimi Linear; None: [heads].
    """
    state = model.state_dict()
    tensors = {}
    for row in rows(model.config, a_log_shape=a_log_shape):
        source = state[row.ours] if row.expert is None else state[row.ours][row.expert]
        value = source.detach().clone() if row.shape is None else source.detach().clone().view(row.shape)
        if row.padded is not None:
            value = torch.cat([value, value.new_zeros(row.padded - value.numel())])
        tensors[row.theirs] = value
    return config_to_hf(model.config), tensors


def a_log_shape_of(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[int, ...] | None:
    """Shape in which a checkpoint keeps KDA's A_log; None where it is [heads], or where there is no KDA.

    Arguments as for `from_hf`.

    Raises:
        ValueError: neither a vector of at least the heads nor [1, 1, heads, 1].
    """
    heads = config["linear_attn_config"]["num_heads"]
    found = ((name, tuple(x.shape)) for name, x in tensors.items() if name.endswith(".self_attn.A_log"))
    name, shape = next(found, ("", (heads,)))
    if shape == (heads,):
        return None
    if shape == (1, 1, heads, 1) or (len(shape) == 1 and shape[0] > heads):
        return shape
    raise ValueError(
        f"{name}: shape {list(shape)}, expected [{heads}] by the config, zeros after it, or [1, 1, {heads}, 1]"
    )


def _unpad(row: Row, tensor: Tensor, target: Tensor) -> Tensor:
    if row.padded is not None:
        if tensor.shape != (row.padded,):
            raise ValueError(f"{row.theirs}: shape {list(tensor.shape)}, expected [{row.padded}] as in other layers")
        if bool(tensor[target.numel() :].count_nonzero()):
            raise ValueError(
                f"{row.theirs}: the {row.padded - target.numel()} entries beyond its {target.numel()} heads must be "
                "zero padding; the checkpoint has more heads than its config says"
            )
        return tensor[: target.numel()]
    expected = row.shape or tuple(target.shape)
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{row.theirs}: shape {list(tensor.shape)}, expected {list(expected)} by the config")
    return tensor.reshape(target.shape)


def _check_names(expected: set[str], found: set[str]) -> None:
    for what, names in (("missing", expected - found), ("unexpected", found - expected)):
        if names:
            shown = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise ValueError(f"checkpoint tensors {what}: {shown}; config and tensors must belong together")
