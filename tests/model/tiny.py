"""Tiny models of the three families, for tests."""

import torch

from model.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from model.kimi import KimiModel
from model.params import initialize
from model.precision import set_precision


def tiny_config(family: str = "k3") -> ModelConfig:
    """ "k3", "k3_full" (attention residuals over every sublayer), "linear" or "k2", a few thousand parameters."""
    mla = MLAConfig(heads=2, q_rank=16, kv_rank=16, nope_dim=16, rope_dim=8, value_dim=16)
    moe = MoEConfig(experts=8, top_k=2, expert_dim=16, latent_dim=16, shared_experts=1)
    config = ModelConfig(
        vocab_size=96,
        hidden_dim=32,
        layers="KKKM M",
        dense_dim=48,
        residual_block=4,
        init_std=0.2,
        kda=KDAConfig(heads=2, head_dim=16),
        mla=mla,
        moe=moe,
    )
    if family == "k3_full":
        config.residual_block = 1
    if family in ("linear", "k2"):
        config.activation, config.residual_block = "swiglu", None
        config.moe = MoEConfig(experts=8, top_k=2, expert_dim=16, latent_dim=None, routed_scaling=2.4, balancing="sign")
    if family == "linear":
        config.kda = KDAConfig(heads=2, head_dim=16, gate_lower_bound=None, full_rank_output_gate=False)
        config.mla.q_rank, config.mla.output_gate = None, False
    if family == "k2":
        config.layers = "M*3"
        config.mla.output_gate, config.mla.rotary = False, True
    assert config.errors() == []
    return config


FAMILIES = ["k3", "k3_full", "linear", "k2"]


def tiny_model(family: str | ModelConfig = "k3", *, dtype: torch.dtype = torch.float64, seed: int = 0) -> KimiModel:
    """Initialised, with random pseudo-queries and biases so that nothing is trivially zero or uniform."""
    model = KimiModel(tiny_config(family) if isinstance(family, str) else family)
    initialize(model, seed=seed, std=model.config.init_std)
    set_precision(model, dtype)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if name.endswith(".query"):
                param.copy_(0.5 * torch.randn(param.shape, generator=generator))
        for buffer in model.buffers():
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model


def tokens(batch: int, length: int, *, seed: int = 0, vocab: int = 96) -> torch.Tensor:
    return torch.randint(1, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))
