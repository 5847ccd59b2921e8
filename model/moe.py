"""Stable LatentMoE: routed experts in a narrow latent beside shared experts at full width.

    u = sum_k p_k E_k(W_down x)      y = E_shared(x) + W_up RMSNorm(u)

The router sees the full width; its weights are applied at combine, before the norm. Without a latent
(Kimi Linear, Kimi K2) the experts read x itself and y = E_shared(x) + u. Source: Kimi K3 technical report
2.3. Shapes: B batch, T tokens, D model, L latent, E experts, R routed rows, S segments.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from model.config import MoEConfig
from model.dispatch import LocalDispatcher
from model.layers import GatedActivation, GatedFFN, Linear, RMSNorm
from model.params import ParamRole, declare
from model.products import GROUPED, Product
from model.router import Decisions, Router
from model.seams import ExpertWeights, Received, TokenDispatcher
from model.stats import LayerStats


class Experts(nn.Module):
    """Weights of all experts, each a matrix of its own to the optimizer: gate, up [E, I, L], down [E, L, I]."""

    def __init__(self, experts: int, dim: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, inner, dim))
        self.up = nn.Parameter(torch.empty(experts, inner, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, inner))
        role = ParamRole(kind="matrix")
        declare(self, gate=role, up=role, down=role)
        self.product: Product = GROUPED

    def weights(self) -> ExpertWeights:
        return ExpertWeights(self.gate, self.up, self.down)


def expert_ffn(received: Received, activation: GatedActivation, *, product: Product = GROUPED) -> Tensor:
    """The gated feed-forward of each segment's expert. Weights are an argument: home or borrowed, all one product."""
    rows_RL, ends_S, weights, again = received

    def multiply(rows: Tensor, which: int) -> Tensor:
        read = None if again is None else partial(_one, again, which)
        return product(rows, weights[which], ends_S, again=read)

    gate, up, down = range(3)
    return multiply(activation(multiply(rows_RL, gate), multiply(rows_RL, up)), down)


def _one(read: Callable[[], ExpertWeights], which: int) -> Tensor:
    return read()[which]


class MoE(nn.Module):
    """The feed-forward of an expert layer: [B, T, D] -> [B, T, D]."""

    def __init__(self, dim: int, config: MoEConfig, *, activation: GatedActivation, norm_eps: float) -> None:
        super().__init__()
        self.activation = activation
        self.router = Router(dim, config)
        latent = config.latent_dim
        self.down = None if latent is None else Linear(dim, latent)
        self.up = None if latent is None else Linear(latent, dim)
        self.norm = RMSNorm(latent, eps=norm_eps) if latent is not None and config.latent_norm else None
        self.experts = Experts(config.experts, latent or dim, config.expert_dim)
        shared_dim = config.shared_experts * config.expert_dim
        self.shared = GatedFFN(dim, shared_dim, activation=activation) if shared_dim else None
        self.dispatcher: TokenDispatcher = LocalDispatcher()

    def forward(self, x_BTD: Tensor, *, stats: LayerStats | None, decisions: Decisions | None = None) -> Tensor:
        """``decisions`` of an earlier pass over the same tokens, where this one repeats it."""
        x_TD = x_BTD.flatten(0, 1)
        routing = self.router(x_TD, stats=stats, decisions=decisions)
        x_TL = x_TD if self.down is None else self.down(x_TD)
        handle = self.dispatcher.dispatch(x_TL, routing, self.experts.weights())
        shared_BTD = None if self.shared is None else self.shared(x_BTD)
        results = [
            expert_ffn(received, self.activation, product=self.experts.product)
            for received in self.dispatcher.receive(handle)
        ]
        rows_RL = results[0] if len(results) == 1 else torch.cat(results)
        u_TL = self.dispatcher.combine(rows_RL, routing, handle)
        if self.norm is not None:
            u_TL = self.norm(u_TL)
        y_BTD = (u_TL if self.up is None else self.up(u_TL)).view_as(x_BTD)
        return y_BTD if shared_BTD is None else shared_BTD + y_BTD
