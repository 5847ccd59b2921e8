"""Gated multi-head latent attention.

    q = W_qb RMSNorm(W_qa x)     [c; k_x] = W_kva x     [k_n; v] = W_kvb RMSNorm(c)
    k = [k_n; k_x, shared by all heads]     y = W_o [ softmax(q k^T / sqrt(N + P)) v * sigmoid(W_g x) ]

No position encoding in K3 and Kimi Linear: order comes from the KDA layers. The Kimi-K2-like baseline
rotates the P part. Source: Kimi K3 technical report 2.1.2.
Shapes: B batch, T tokens, D model, H heads, N and P query parts, R latent rank, V value.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from model.config import MLAConfig
from model.documents import Documents
from model.layers import Linear, RMSNorm
from model.params import ParamRole
from model.precision import compute_dtype
from model.products import Product
from model.seams import AttentionCore, AttentionKernel, MLACache
from model.stats import LayerStats


class QueryProjection(nn.Module):
    """D -> H * (N + P), through a normalised low rank or directly (``q_rank`` None)."""

    def __init__(self, dim: int, config: MLAConfig, *, eps: float) -> None:
        super().__init__()
        width = config.heads * (config.nope_dim + config.rope_dim)
        role = ParamRole(kind="matrix", heads=config.heads)
        self.down = None if config.q_rank is None else Linear(dim, config.q_rank)
        self.norm = None if config.q_rank is None else RMSNorm(config.q_rank, eps=eps)
        self.up = Linear(config.q_rank or dim, width, role=role)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.down is not None and self.norm is not None:
            x_BTD = self.norm(self.down(x_BTD))
        return self.up(x_BTD)


class MLA(nn.Module):
    """The mixer of an "M" layer: [B, T, D] -> [B, T, D]."""

    def __init__(self, dim: int, config: MLAConfig, *, latent_norm_eps: float) -> None:
        super().__init__()
        self.heads, self.value_dim = config.heads, config.value_dim
        self.split = [config.kv_rank, config.rope_dim]
        self.rope_theta = config.rope_theta if config.rotary else None
        width = config.heads * config.value_dim
        self.q = QueryProjection(dim, config, eps=latent_norm_eps)
        self.kv_down = Linear(dim, config.kv_rank + config.rope_dim)
        self.kv_norm = RMSNorm(config.kv_rank, eps=latent_norm_eps)
        self.kv_up = Linear(
            config.kv_rank,
            config.heads * (config.nope_dim + config.value_dim),
            role=ParamRole(kind="matrix", heads=config.heads, sections=(config.nope_dim, config.value_dim)),
        )
        per_head = ParamRole(kind="matrix", heads=config.heads)
        self.gate = Linear(dim, width, role=per_head) if config.output_gate else None
        self.out = Linear(width, dim, role=ParamRole(kind="matrix", heads=config.heads, by_columns=True))
        self.core: AttentionCore = LocalAttention()

    def forward(
        self, x_BTD: Tensor, *, documents: Documents, stats: LayerStats | None, cache: MLACache | None
    ) -> Tensor:
        q_BTHQ = self.q(x_BTD).unflatten(-1, (self.heads, -1))
        latent_BTR, shared_key_BTP = self.kv_down(x_BTD).split(self.split, dim=-1)
        if self.rope_theta is not None:
            past = 0 if cache is None else cache.latent_BTR.shape[1]
            position_BT = documents.position_BT + past
            q_nope, q_rope = q_BTHQ.split([q_BTHQ.shape[-1] - self.split[1], self.split[1]], dim=-1)
            q_rope = rotate(q_rope, position_BT.unsqueeze(-1), theta=self.rope_theta)
            q_BTHQ = torch.cat([q_nope, q_rope], dim=-1)
            shared_key_BTP = rotate(shared_key_BTP, position_BT, theta=self.rope_theta)
        o_BTHV = self.core(
            q_BTHQ,
            self.kv_norm(latent_BTR),
            shared_key_BTP,
            self.kv_up.weight,
            product=self.kv_up.product,
            value_dim=self.value_dim,
            documents=documents,
            stats=stats,
            cache=cache,
        )
        o = o_BTHV.flatten(2)
        return self.out(o if self.gate is None else o * torch.sigmoid(self.gate(x_BTD)))

    def empty_cache(self, batch: int) -> MLACache:
        """No tokens yet, for ``batch`` running documents."""
        weight = self.kv_down.weight
        return MLACache(*(weight.new_zeros(batch, 0, size) for size in self.split))


def rotate(x: Tensor, position: Tensor, *, theta: float) -> Tensor:
    """Rotary position encoding of neighbouring pairs (DeepSeek-V3's layout), computed in fp32.

    Args:
        x: [..., P], P even.
        position: integers broadcastable to x's leading dims.
        theta: base of the wavelengths.
    """
    dtype = compute_dtype(x.dtype)
    dim = x.shape[-1]
    frequency = theta ** (-torch.arange(0, dim, 2, dtype=dtype, device=x.device) / dim)
    angle = position.unsqueeze(-1).to(dtype) * frequency
    cos, sin = angle.cos(), angle.sin()
    even, odd = x.to(dtype).unflatten(-1, (-1, 2)).unbind(dim=-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).to(x.dtype)


class LocalAttention:
    """`AttentionCore` on one rank: keys and values from the latent, one causal product per document."""

    def __init__(self) -> None:
        self.kernel = AttentionKernel(F.scaled_dot_product_attention, torch.matmul)

    def __call__(
        self,
        q_BTHQ: Tensor,
        latent_BTR: Tensor,
        shared_key_BTP: Tensor,
        up_weight: Tensor,
        *,
        product: Product,
        value_dim: int,
        documents: Documents,
        stats: LayerStats | None,
        cache: MLACache | None,
    ) -> Tensor:
        if cache is not None:
            cache.latent_BTR = torch.cat([cache.latent_BTR, latent_BTR], dim=1)
            cache.shared_key_BTP = torch.cat([cache.shared_key_BTP, shared_key_BTP], dim=1)
            return _attend_latent(q_BTHQ, cache, up_weight, value_dim=value_dim)
        q, scale = q_BTHQ.transpose(1, 2), q_BTHQ.shape[3] ** -0.5
        k, v = expand_latent(
            latent_BTR, shared_key_BTP, up_weight, product=product, heads=q_BTHQ.shape[2], value_dim=value_dim
        )
        outputs = []
        for start, stop in documents.spans():
            q_doc, k_doc, v_doc = (x[:, :, start:stop] for x in (q, k, v))
            outputs.append(self.kernel.attend(q_doc, k_doc, v_doc, is_causal=True, scale=scale))
            if stats is not None and stats.max_logit_H is not None:
                track_max_logit(q_doc.detach(), k_doc.detach(), scale, stats.max_logit_H, kernel=self.kernel)
        o = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
        return o[..., :value_dim].transpose(1, 2)


def expand_latent(
    latent_BTR: Tensor, shared_key_BTP: Tensor, up_weight: Tensor, *, product: Product, heads: int, value_dim: int
) -> tuple[Tensor, Tensor]:
    """Keys [B, H, T, N + P] and values [B, H, T, V] of all heads; arguments as for `AttentionCore`.

    On a CPU zeros widen the values to the keys' width: the fused kernel wants one head dim, and otherwise falls back to
    a ten times slower path.
    """
    kv = product(latent_BTR, up_weight).unflatten(-1, (heads, -1))
    k_nope, v = kv.split([kv.shape[-1] - value_dim, value_dim], dim=-1)
    k_shared = shared_key_BTP.unsqueeze(2).expand(-1, -1, heads, -1)
    k, v = (x.transpose(1, 2) for x in (torch.cat([k_nope, k_shared], dim=-1), v))
    if v.device.type == "cpu" and k.shape[-1] > value_dim:
        v = F.pad(v, (0, k.shape[-1] - value_dim))
    return k, v


def _attend_latent(q_BTHQ: Tensor, cache: MLACache, up_weight: Tensor, *, value_dim: int) -> Tensor:
    """Attention on the latent itself: the key up-projection moves into the query, the value one behind the sum.

    A decoded token then reads R + P numbers of each earlier token and never rebuilds their keys and values. So no rows
    meet ``up_weight`` as they do in training, and what wraps that product is not in effect: whoever gives weights
    another value must do so before they come here.
    """
    batch, length, heads, q_dim = q_BTHQ.shape
    dtype = compute_dtype(q_BTHQ.dtype)
    latent, shared_key = cache.latent_BTR.to(dtype), cache.shared_key_BTP.to(dtype)
    past = latent.shape[1] - length
    nope_dim = q_dim - shared_key.shape[-1]
    w_key, w_value = up_weight.to(dtype).unflatten(0, (heads, -1)).split([nope_dim, value_dim], dim=1)
    q_nope, q_rope = q_BTHQ.to(dtype).split([nope_dim, q_dim - nope_dim], dim=-1)
    q_latent = torch.einsum("bthn,hnr->bthr", q_nope, w_key)
    logits = torch.einsum("bthr,bsr->bhts", q_latent, latent) + torch.einsum("bthp,bsp->bhts", q_rope, shared_key)
    future = torch.ones(length, past + length, dtype=torch.bool, device=logits.device).triu(past + 1)
    weights = (logits * q_dim**-0.5).masked_fill(future, -torch.inf).softmax(dim=-1)
    attended = torch.einsum("bhts,bsr->bthr", weights, latent)
    return torch.einsum("bthr,hvr->bthv", attended, w_value).to(q_BTHQ.dtype)


@torch.no_grad()
def track_max_logit(
    q_BHTQ: Tensor, k_BHTQ: Tensor, scale: float, max_logit_H: Tensor, *, kernel: AttentionKernel, tile: int = 512
) -> None:
    """Raise ``max_logit_H`` to the largest causal logit of each head; query tiles bound the memory."""
    length = q_BHTQ.shape[2]
    for start in range(0, length, tile):
        stop = min(start + tile, length)
        logits = kernel.multiply(q_BHTQ[:, :, start:stop], k_BHTQ[:, :, :stop].transpose(2, 3)).float() * scale
        future = torch.ones(stop - start, stop, dtype=torch.bool, device=logits.device).triu(start + 1)
        largest_H = logits.masked_fill_(future, -torch.inf).amax(dim=(0, 2, 3))
        torch.maximum(max_logit_H, largest_H, out=max_logit_H)
