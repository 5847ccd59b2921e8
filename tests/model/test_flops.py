"""Operations against what torch counts while the real modules run."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model.config import ModelConfig, MoEConfig
from model.flops import KDA_CHUNK, forward_flops, training_flops
from model.kda import KDA
from model.kimi import KimiModel
from tests.model.tiny import tiny_config, tiny_model, tokens


def dense(config: ModelConfig) -> ModelConfig:
    config.dense_layers = config.num_layers
    return config


def counted(model: KimiModel, length: int) -> int:
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens(1, length))
    return counter.get_total_flops()


def test_mla_feed_forward_and_head_equal_the_count_of_the_run() -> None:
    config, length = dense(tiny_config("k2")), 64
    mla = config.mla
    # torch does not count its fused CPU attention: token i meets i + 1 keys, N + P and V wide.
    pairs = sum(i + 1 for i in range(length))
    attention = config.num_layers * pairs * 2 * mla.heads * (mla.nope_dim + mla.rope_dim + mla.value_dim)
    found = counted(tiny_model(config), length) + attention
    assert found == pytest.approx(length * forward_flops(config, length=length).total, rel=1e-12)


def test_kda_projections_equal_the_count_of_the_run() -> None:
    config = dense(tiny_config("k3"))
    config.layers = "K"
    kda = config.kda
    width, dim, k = kda.heads * kda.head_dim, config.hidden_dim, kda.head_dim
    module = KDA(dim, kda, norm_eps=1e-5)
    projections = 2 * (5 * dim * width + dim * k + k * width + dim * kda.heads)
    weights = sum(
        p.numel() for n, p in module.named_parameters() if n.endswith(".weight") and p.dim() == 2 and "conv" not in n
    )
    assert projections == 2 * weights
    recurrence = 2 * kda.heads * (4 * KDA_CHUNK * k + 3 * k * k)
    assert forward_flops(config, length=1).kda == projections + 6 * width * kda.conv_size + recurrence


def test_only_active_experts_count() -> None:
    base = tiny_config("k3")
    more = tiny_config("k3")
    more.moe = MoEConfig(experts=64, top_k=2, expert_dim=16, latent_dim=16, shared_experts=1)
    one, other = forward_flops(base, length=8), forward_flops(more, length=8)
    assert one.routed_experts == other.routed_experts
    assert other.router == 8 * one.router


def test_released_model_costs_six_operations_per_active_weight_and_little_more() -> None:
    config = ModelConfig()
    _, active = config.count_parameters()
    ratio = training_flops(config, length=1) / (6 * active)
    assert 1.0 < ratio < 1.03


def test_residual_sources_grow_with_the_bank() -> None:
    config = ModelConfig()
    plain = ModelConfig(residual_block=None)
    assert forward_flops(plain, length=1).residual == 0
    # Each of 186 sublayers and the output reads the prefix and, on average, about half of 8 rows.
    sources = forward_flops(config, length=1).residual / (4 * config.hidden_dim)
    assert 187 * 2 < sources < 187 * 9
