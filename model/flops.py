"""What a model costs, from its config alone: floating-point operations per token.

One function per module, each a sum of the matrix products that the module runs, so that a utilisation above
100% cannot come from a formula made for another architecture. A multiply-add counts as two operations;
elementwise work does not count. Backward costs twice the forward.
"""

from dataclasses import dataclass

from model.config import ModelConfig

# Tokens that KDA's chunked form treats as one dense tile (flash-linear-attention uses 64 too). Its cost per
# token depends on it; the recurrence itself would need 6 K V per head.
KDA_CHUNK = 64


@dataclass(frozen=True)
class ForwardFlops:
    """Operations of one token's forward pass, by kind of module, summed over layers."""

    kda: float
    mla: float
    dense_ffn: float
    router: float
    routed_experts: float
    shared_experts: float
    latent: float
    residual: float
    head: float

    @property
    def total(self) -> float:
        return sum(vars(self).values())


def forward_flops(config: ModelConfig, *, length: int) -> ForwardFlops:
    """Per-token forward operations at context ``length`` (mean over a sequence, causal).

    Args:
        config: the model.
        length: tokens over which MLA attends; packed documents attend over less.
    """
    d, moe = config.hidden_dim, config.moe
    kda_layers = config.mixers.count("K")
    moe_layers = len(config.moe_layers)
    width = moe.latent_dim or d
    return ForwardFlops(
        kda=kda_layers * _kda_flops(config),
        mla=len(config.mla_layers) * _mla_flops(config, length),
        dense_ffn=(config.num_layers - moe_layers) * 6 * d * config.dense_dim,
        router=moe_layers * 2 * d * moe.experts,
        routed_experts=moe_layers * moe.top_k * 6 * width * moe.expert_dim,
        shared_experts=moe_layers * 6 * d * moe.shared_experts * moe.expert_dim,
        latent=moe_layers * (4 * d * moe.latent_dim if moe.latent_dim is not None else 0),
        residual=_residual_flops(config),
        head=2 * d * config.vocab_size,
    )


def layer_flops(config: ModelConfig, *, length: int) -> list[float]:
    """Per-token forward operations of each layer; with the head's and the output mix's they make `forward_flops`."""
    d, moe = config.hidden_dim, config.moe
    width = moe.latent_dim or d
    experts = 2 * d * moe.experts + 6 * moe.expert_dim * (moe.top_k * width + moe.shared_experts * d)
    experts += 4 * d * moe.latent_dim if moe.latent_dim is not None else 0
    costs = []
    for layer, mixer in enumerate(config.mixers):
        cost = _kda_flops(config) if mixer == "K" else _mla_flops(config, length)
        cost += experts if config.is_moe(layer) else 6 * d * config.dense_dim
        costs.append(cost + _mix_flops(config, 2 * layer) + _mix_flops(config, 2 * layer + 1))
    return costs


def training_flops(config: ModelConfig, *, length: int) -> float:
    """Operations per trained token: forward once, backward twice that."""
    return 3 * forward_flops(config, length=length).total


def _kda_flops(config: ModelConfig) -> float:
    d, h, k = config.hidden_dim, config.kda.heads, config.kda.head_dim
    width = h * k
    gate = d * width if config.kda.full_rank_output_gate else d * k + k * width
    projections = 4 * d * width + gate + d * k + k * width + d * h
    # Per token of a chunk of C: two C x K score rows, the triangular solve on K + V columns, U - W S and Q S,
    # the scores' product with V, and the state's update.
    c = KDA_CHUNK
    recurrence = h * (2 * c * k + c * 2 * k / 2 + c * k + 3 * k * k)
    return 2 * (projections + 3 * width * config.kda.conv_size + recurrence)


def _mla_flops(config: ModelConfig, length: int) -> float:
    d, m = config.hidden_dim, config.mla
    q_out = m.heads * (m.nope_dim + m.rope_dim)
    query = d * q_out if m.q_rank is None else d * m.q_rank + m.q_rank * q_out
    key_value = d * (m.kv_rank + m.rope_dim) + m.kv_rank * m.heads * (m.nope_dim + m.value_dim)
    output = m.heads * m.value_dim * d * (2 if m.output_gate else 1)
    attention = m.heads * (m.nope_dim + m.rope_dim + m.value_dim) * (length + 1) / 2
    return 2 * (query + key_value + output + attention)


def _residual_flops(config: ModelConfig) -> float:
    """All mixes: one before each sublayer, and the output's."""
    return sum(_mix_flops(config, sublayer) for sublayer in range(2 * config.num_layers + 1))


def _mix_flops(config: ModelConfig, sublayer: int) -> float:
    """Scores and weighted sum over the sources that ``sublayer`` reads, 4 D each; the first reads one as it is."""
    if config.residual_block is None or sublayer == 0:
        return 0
    closed = (sublayer - 1) // config.residual_block + 1
    return 4 * config.hidden_dim * (closed + 1)
