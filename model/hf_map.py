"""Our names and shapes <-> those of the released Hugging Face checkpoints, exact both ways.

One table row per tensor says where it goes and how its shape changes; both directions read the same rows, so
they cannot disagree. Covers Kimi K3 and Kimi Linear (`KimiLinearForCausalLM` naming).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Row:
    """One Hugging Face tensor: ``theirs``, our name, which expert of a stack, and the shape it has there."""

    theirs: str
    ours: str
    expert: int | None = None
    shape: tuple[int, ...] | None = None
    padded: int | None = None


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of a released ``config.json``.

    Raises:
        ValueError: a field this model cannot honour (grouped top-k, an unknown activation, layer lists that
            do not cover every layer once).
    """
    linear = config["linear_attn_config"]
    if config.get("use_grouped_topk") and config.get("num_expert_group", 1) not in (None, 1):
        raise ValueError(
            f"num_expert_group={config['num_expert_group']}: routing by expert groups is not supported; use 1"
        )
    activations = {"situ": "situ", "silu": "swiglu"}
    if config["hidden_act"] not in activations:
        raise ValueError(f"hidden_act={config['hidden_act']!r}: must be one of {', '.join(activations)}")
    block = config.get("attn_res_block_size")
    bound = linear.get("gate_lower_bound")
    return ModelConfig(
        vocab_size=config["vocab_size"],
        hidden_dim=config["hidden_size"],
        layers=_pattern_from_hf(config),
        dense_layers=config["first_k_dense_replace"],
        dense_dim=config["intermediate_size"],
        activation=activations[config["hidden_act"]],
        situ_beta=config.get("activation_situ_beta") or ModelConfig.situ_beta,
        situ_linear_beta=config.get("activation_situ_linear_beta") or ModelConfig.situ_linear_beta,
        residual_block=None if block is None else block * SUBLAYERS,
        norm_eps=config["rms_norm_eps"],
        padding_id=config.get("pad_token_id", DEFAULT_PADDING),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        kda=KDAConfig(
            heads=linear["num_heads"],
            head_dim=linear["head_dim"],
            conv_size=linear["short_conv_kernel_size"],
            gate_lower_bound=bound,
            full_rank_output_gate=bool(linear.get("use_full_rank_gate", False)),
        ),
        mla=MLAConfig(
            heads=config["num_attention_heads"],
            q_rank=config["q_lora_rank"],
            kv_rank=config["kv_lora_rank"],
            nope_dim=config["qk_nope_head_dim"],
            rope_dim=config["qk_rope_head_dim"],
            value_dim=config["v_head_dim"],
            output_gate=bool(config.get("mla_use_output_gate", False)),
            rotary=not config.get("mla_use_nope", False),
            rope_theta=config.get("rope_theta", MLAConfig.rope_theta),
        ),
        moe=MoEConfig(
            experts=config["num_experts"],
            top_k=config["num_experts_per_token"],
            expert_dim=config["moe_intermediate_size"],
            latent_dim=config.get("routed_expert_hidden_size"),
            latent_norm=bool(config.get("latent_moe_use_norm", False)),
            shared_experts=config["num_shared_experts"] or 0,
            routed_scaling=config["routed_scaling_factor"],
            renormalize=config["moe_renormalize"],
        ),
    )


def _pattern_from_hf(config: Mapping[str, Any]) -> str:
    layers = config["num_hidden_layers"]
    kda = set(config["linear_attn_config"]["kda_layers"])
    mla = set(config["linear_attn_config"]["full_attn_layers"])
    if kda & mla or kda | mla != set(range(1, layers + 1)):
        raise ValueError(
            f"kda_layers={sorted(kda)} and full_attn_layers={sorted(mla)}: must name each of the layers "
            f"1..{layers} exactly once"
        )
    return "".join("K" if layer in kda else "M" for layer in range(1, layers + 1))


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The released config's keys for a ModelConfig.

    Raises:
        ValueError: an attention-residual block that is not a whole number of layers.
    """
    block = config.residual_block
    if block is not None and block % SUBLAYERS:
        raise ValueError(
            f"model.residual_block={block}: Hugging Face counts whole layers, so the block must be even to be exported"
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


def rows(config: ModelConfig) -> Iterator[Row]:
    """The whole table for one model, in checkpoint order."""
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
        mixer_rows = _kda_rows(config.kda) if mixer == "K" else _mla_rows(config.mla)
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


def _kda_rows(kda: KDAConfig) -> Iterator[Row]:
    width = kda.heads * kda.head_dim
    for stream in "qkv":
        yield Row(f"{stream}_proj.weight", f"{stream}.weight")
        yield Row(f"{stream}_conv1d.weight", f"{stream}_conv.weight", shape=(width, 1, kda.conv_size))
    yield Row("b_proj.weight", "beta.weight")
    yield Row("f_a_proj.weight", "decay.down.weight")
    yield Row("f_b_proj.weight", "decay.up.weight")
    yield Row(
        "A_log", "decay.A_log", shape=(1, 1, kda.heads, 1) if kda.a_log_dims == 4 else None, padded=kda.padded_heads
    )
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
    ours.kda.padded_heads, ours.kda.a_log_dims = _a_log_layout(ours, tensors)
    problems = ours.errors()
    if problems:
        raise ValueError("; ".join(problems))
    model = KimiModel(ours)
    set_precision(model, dtype)
    state = model.state_dict()
    table = list(rows(ours))
    _check_names({row.theirs for row in table}, set(tensors))
    with torch.no_grad():
        for row in table:
            target = state[row.ours] if row.expert is None else state[row.ours][row.expert]
            target.copy_(_unpad(row, tensors[row.theirs], target))
    return model


def to_hf(model: KimiModel) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(config, tensors) of ``model`` in Hugging Face names, each tensor a copy in the model's own dtype."""
    state = model.state_dict()
    tensors = {}
    for row in rows(model.config):
        source = state[row.ours] if row.expert is None else state[row.ours][row.expert]
        value = source.detach().clone() if row.shape is None else source.detach().clone().view(row.shape)
        if row.padded is not None:
            value = torch.cat([value, value.new_zeros(row.padded - value.numel())])
        tensors[row.theirs] = value
    return config_to_hf(model.config), tensors


def _a_log_layout(config: ModelConfig, tensors: Mapping[str, Tensor]) -> tuple[int | None, int]:
    """(length of A_log in the checkpoint where it is longer than the number of heads, its dims)."""
    first = config.mixers.find("K")
    a_log = tensors.get(f"model.layers.{first}.self_attn.A_log")
    if a_log is None:
        return None, 1
    return a_log.numel() if a_log.numel() > config.kda.heads else None, a_log.dim()


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
