"""ModelConfig: one description that covers Kimi K3, Kimi Linear and a Kimi-K2-like baseline.

Pure data and arithmetic: no torch. The layer pattern is written as text, so that the whole depth is one
field with nothing to contradict it: ``"KKKM*23 M"`` is 23 times (three KDA layers, one MLA layer), then
one more MLA layer, which is Kimi K3's 93 layers.
"""

import re
from dataclasses import dataclass, field
from typing import ClassVar

BALANCING = ("quantile", "sign", "none")
ACTIVATIONS = ("situ", "swiglu")


@dataclass
class KDAConfig:
    """Kimi Delta Attention. ``head_dim`` is both key and value width and the rank of the decay projection."""

    heads: int = 96
    head_dim: int = 128
    conv_size: int = 4
    gate_lower_bound: float | None = -5.0
    """Least log decay per token; null is Kimi Linear's unbounded softplus gate."""
    full_rank_output_gate: bool = True
    """True: D -> H*V (K3). False: through rank ``head_dim`` (Kimi Linear)."""


@dataclass
class MLAConfig:
    """Multi-head latent attention; ``q_rank`` null projects queries directly from the hidden state."""

    heads: int = 96
    q_rank: int | None = 1536
    kv_rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    value_dim: int = 128
    output_gate: bool = True
    rotary: bool = False
    """Rotate the ``rope_dim`` part (Kimi K2). K3 and Kimi Linear keep that part and do not rotate it."""
    rope_theta: float = 10000.0


@dataclass
class MoEConfig:
    """Routed and shared experts. ``latent_dim`` null routes the full hidden width (no latent)."""

    experts: int = 896
    top_k: int = 16
    expert_dim: int = 3072
    latent_dim: int | None = 3584
    latent_norm: bool = True
    shared_experts: int = 2
    routed_scaling: float = 1.0
    renormalize: bool = True
    balancing: str = "quantile"
    """"quantile" (K3), "sign" (DeepSeek-V3's step of fixed size) or "none"."""
    histogram_bins: int = 1000
    sign_step: float = 0.001


@dataclass
class ModelConfig:
    """Sizes and choices of one model. Defaults are Kimi K3's."""

    AT_RESUME: ClassVar[str] = "another model: the saved weights would not fit or would mean something else"
    # Only ever drawn from before the first step.
    FREE_AT_RESUME: ClassVar[tuple[str, ...]] = ("init_std",)

    vocab_size: int = 163840
    hidden_dim: int = 7168
    layers: str = "KKKM*23 M"
    dense_layers: int = 1
    """The first layers have a dense feed-forward instead of experts."""
    dense_dim: int = 33792
    activation: str = "situ"
    situ_beta: float = 4.0
    situ_linear_beta: float = 25.0
    residual_block: int | None = 24
    """Attention-residual block in sublayers (two per layer): 24 is K3's 12 layers, 1 is the full form,
    null is the plain residual."""
    norm_eps: float = 1e-5
    latent_norm_eps: float = 1e-6
    """Epsilon of MLA's inner norms, as in the released code."""
    init_std: float = 0.02
    padding_id: int | None = None
    """Token whose embedding takes no gradient, as in the released code; null: none."""
    tie_embeddings: bool = False
    """The head is the embedding: one matrix, two uses."""
    kda: KDAConfig = field(default_factory=KDAConfig)
    mla: MLAConfig = field(default_factory=MLAConfig)
    moe: MoEConfig = field(default_factory=MoEConfig)

    @property
    def mixers(self) -> str:
        """One letter a layer: "K" for KDA, "M" for MLA. Raises ValueError on a malformed pattern."""
        return expand_pattern(self.layers)

    @property
    def num_layers(self) -> int:
        return len(self.mixers)

    def is_moe(self, layer: int) -> bool:
        """Whether the feed-forward of ``layer`` (counted from 0) is a mixture of experts."""
        return layer >= self.dense_layers

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.num_layers) if self.is_moe(i))

    @property
    def mla_layers(self) -> tuple[int, ...]:
        return tuple(i for i, mixer in enumerate(self.mixers) if mixer == "M")

    def count_parameters(self) -> tuple[int, int]:
        """(total parameters, parameters active per token without the input embedding).

        The router's selection bias is a buffer and does not count.
        """
        embedding = self.vocab_size * self.hidden_dim
        shared, routed_total, routed_active = 0, 0, 0
        for layer, mixer in enumerate(self.mixers):
            shared += self._kda_parameters() if mixer == "K" else self._mla_parameters()
            shared += 2 * self.hidden_dim
            if self.residual_block is not None:
                shared += 4 * self.hidden_dim
            if not self.is_moe(layer):
                shared += 3 * self.hidden_dim * self.dense_dim
                continue
            shared += self._moe_shared_parameters()
            routed_total += self.moe.experts * self._expert_parameters()
            routed_active += self.moe.top_k * self._expert_parameters()
        shared += self.hidden_dim + embedding
        if self.residual_block is not None:
            shared += 2 * self.hidden_dim
        own = 0 if self.tie_embeddings else embedding
        return own + shared + routed_total, shared + routed_active

    def _kda_parameters(self) -> int:
        d, heads, k = self.hidden_dim, self.kda.heads, self.kda.head_dim
        width = heads * k
        gate = d * width if self.kda.full_rank_output_gate else d * k + k * width
        decay = d * k + k * width + width + heads
        return 4 * d * width + 3 * width * self.kda.conv_size + decay + gate + d * heads + k

    def _mla_parameters(self) -> int:
        d, m = self.hidden_dim, self.mla
        q_out = m.heads * (m.nope_dim + m.rope_dim)
        query = d * q_out if m.q_rank is None else d * m.q_rank + m.q_rank + m.q_rank * q_out
        key_value = d * (m.kv_rank + m.rope_dim) + m.kv_rank + m.kv_rank * m.heads * (m.nope_dim + m.value_dim)
        output = m.heads * m.value_dim * d
        return query + key_value + output * (2 if m.output_gate else 1)

    def _expert_parameters(self) -> int:
        return 3 * (self.moe.latent_dim or self.hidden_dim) * self.moe.expert_dim

    def _moe_shared_parameters(self) -> int:
        d, moe = self.hidden_dim, self.moe
        count = moe.experts * d + 3 * d * moe.shared_experts * moe.expert_dim
        if moe.latent_dim is not None:
            count += 2 * d * moe.latent_dim + (moe.latent_dim if moe.latent_norm else 0)
        return count

    def errors(self) -> list[str]:
        """Every contradiction in this config, one line each: field, value, rule, remedy."""
        found: list[str] = []

        def require(ok: bool, message: str) -> None:
            if not ok:
                found.append(message)

        try:
            layers = self.num_layers
        except ValueError as error:
            return [str(error)]
        for name, value in _positive_fields(self):
            require(value >= 1, f"model.{name}={value}: must be at least 1")
        for name in ("norm_eps", "latent_norm_eps", "init_std", "situ_beta", "situ_linear_beta"):
            require(getattr(self, name) > 0, f"model.{name}={getattr(self, name)}: must be above 0")
        require(self.mla.rope_theta > 0, f"model.mla.rope_theta={self.mla.rope_theta}: must be above 0")
        require(self.moe.sign_step >= 0, f"model.moe.sign_step={self.moe.sign_step}: must be at least 0")
        require(
            self.activation in ACTIVATIONS,
            f"model.activation={self.activation}: must be one of {', '.join(ACTIVATIONS)}",
        )
        require(
            0 <= self.dense_layers <= layers,
            f"model.dense_layers={self.dense_layers}: must lie in 0..{layers}, the number of layers in "
            f"model.layers={self.layers!r}",
        )
        require(
            self.residual_block is None or self.residual_block >= 1,
            f"model.residual_block={self.residual_block}: must be at least 1 sublayer, or null for the plain residual",
        )
        require(
            self.padding_id is None or 0 <= self.padding_id < self.vocab_size,
            f"model.padding_id={self.padding_id}: must lie in 0..{self.vocab_size - 1}, or null",
        )
        bound = self.kda.gate_lower_bound
        require(
            bound is None or bound < 0,
            f"model.kda.gate_lower_bound={bound}: a log decay must be negative, or null for the unbounded gate",
        )
        require(
            not self.mla.rotary or self.mla.rope_dim % 2 == 0,
            f"model.mla.rope_dim={self.mla.rope_dim}: rotary rotates pairs, so it must be even; "
            "change it or set model.mla.rotary=false",
        )
        found.extend(self._moe_errors())
        return found

    def _moe_errors(self) -> list[str]:
        moe, found = self.moe, []
        if moe.experts == 1:
            found.append(
                "model.moe.experts=1: must be at least 2, since model.moe.top_k lies in 1..experts-1; raise it"
            )
        elif not 1 <= moe.top_k < moe.experts:
            found.append(
                f"model.moe.top_k={moe.top_k}: must lie in 1..{moe.experts - 1}, below "
                f"model.moe.experts={moe.experts}; lower top_k or raise experts"
            )
        if moe.balancing not in BALANCING:
            found.append(f"model.moe.balancing={moe.balancing}: must be one of {', '.join(BALANCING)}")
        if moe.shared_experts < 0:
            found.append(f"model.moe.shared_experts={moe.shared_experts}: must be at least 0")
        if moe.histogram_bins < 2:
            found.append(f"model.moe.histogram_bins={moe.histogram_bins}: must be at least 2")
        if moe.routed_scaling <= 0:
            found.append(f"model.moe.routed_scaling={moe.routed_scaling}: must be above 0")
        return found


def _positive_fields(config: ModelConfig) -> list[tuple[str, int]]:
    parts = {
        "": (config, ("vocab_size", "hidden_dim", "dense_dim")),
        "kda.": (config.kda, ("heads", "head_dim", "conv_size")),
        "mla.": (config.mla, ("heads", "q_rank", "kv_rank", "nope_dim", "rope_dim", "value_dim")),
        "moe.": (config.moe, ("experts", "expert_dim", "latent_dim")),
    }
    return [
        (prefix + name, getattr(part, name))
        for prefix, (part, names) in parts.items()
        for name in names
        if getattr(part, name) is not None
    ]


def expand_pattern(pattern: str) -> str:
    """``"KKKM*2 M"`` -> ``"KKKMKKKMM"``: groups of K and M, each optionally repeated.

    Raises:
        ValueError: an empty pattern or a group that is not ``[KM]+`` with an optional ``*count``.
    """
    mixers = ""
    for group in pattern.split():
        match = re.fullmatch(r"([KM]+)(?:\*([1-9]\d*))?", group)
        if match is None:
            raise ValueError(
                f"model.layers={pattern!r}: group {group!r} must be letters K (KDA) and M (MLA) with an optional "
                "repeat, as in 'KKKM*6 KKM'"
            )
        mixers += match[1] * int(match[2] or 1)
    if not mixers:
        raise ValueError(f"model.layers={pattern!r}: needs at least one layer, as in 'KKKM*2'")
    return mixers
