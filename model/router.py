"""Routing and its balance: top-k of sigmoid scores plus a selection bias that no gradient moves.

The bias changes which experts are chosen, never their weights. It moves once per optimizer step, from
counts over the whole step: by quantile balancing (Kimi K3 technical report 2.3.3 and appendix) or by
DeepSeek-V3's step of fixed size.

Shapes: T tokens, E experts, K chosen experts, D model, B histogram bins.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from model.config import MoEConfig
from model.params import ParamRole, declare
from model.products import DENSE, Product
from model.stats import LayerStats

T = TypeVar("T")


class Decisions:
    """What one forward pass of an expert layer decided: which experts, and what the dispatcher planned for them.

    A pass that repeats another for its gradient is given the other's decisions and makes none: a tie broken
    otherwise, or another device's rounding, would send tokens to experts whose outputs were never used.
    """

    def __init__(self) -> None:
        self._made: dict[type, object] = {}

    def once(self, kind: type[T], make: Callable[[], T]) -> T:
        """The decision of type ``kind``: what ``make`` returned when it was first asked for.

        Each kind of decision has a type of its own, in the file that decides: `Chosen` is the router's.
        """
        if kind not in self._made:
            self._made[kind] = make()
        made = self._made[kind]
        assert isinstance(made, kind), f"{kind.__name__} expected, {type(made).__name__} was decided"
        return made


class Chosen(NamedTuple):
    """The experts that a router chose: int64 [T, K]."""

    expert_TK: Tensor


@dataclass(frozen=True)
class Routing:
    """Chosen experts of each token: ``expert_TK`` int64, and their weights ``weight_TK`` (fp32).

    decisions: where a dispatcher keeps what it derives from ``expert_TK`` alone.
    record: where it counts what it moves (`ForwardStats.dispatch`); None in passes that do not count.
    """

    expert_TK: Tensor
    weight_TK: Tensor
    decisions: Decisions = field(default_factory=Decisions)
    record: object | None = None


Selection = Callable[..., tuple[Tensor, Tensor]]
"""`select_experts`, or what wraps it."""


class Router(nn.Module):
    """Scores on the full model width, in fp32: ``s = sigmoid(W x)``, experts = top-k of ``s + bias``."""

    bias: Tensor

    def __init__(self, dim: int, config: MoEConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.renormalize = config.renormalize
        self.scaling = config.routed_scaling
        self.select: Selection = select_experts
        self.product: Product = DENSE
        self.weight = nn.Parameter(torch.empty(config.experts, dim))
        # fp32 whatever the compute dtype: bf16 cannot hold its small moves.
        self.register_buffer("bias", torch.zeros(config.experts, dtype=torch.float32))
        declare(self, weight=ParamRole(kind="matrix"))

    def forward(self, x_TD: Tensor, *, stats: LayerStats | None, decisions: Decisions | None = None) -> Routing:
        decisions = Decisions() if decisions is None else decisions
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        scores_TE = torch.sigmoid(self.product(x_TD.to(dtype), self.weight.to(dtype)))
        expert_TK = decisions.once(Chosen, lambda: Chosen(self._choose(scores_TE.detach(), stats))).expert_TK
        weight_TK = scores_TE.gather(1, expert_TK)
        if self.renormalize:
            weight_TK = weight_TK / (weight_TK.sum(dim=1, keepdim=True) + 1e-20)
        return Routing(expert_TK, weight_TK * self.scaling, decisions, None if stats is None else stats.dispatch)

    def _choose(self, scores_TE: Tensor, stats: LayerStats | None) -> Tensor:
        """The chosen experts, counted: what is chosen once is counted once."""
        expert_TK, cutoff_T = self.select(scores_TE, self.bias, k=self.top_k)
        if stats is not None:
            self._count(scores_TE, expert_TK, cutoff_T, stats)
        return expert_TK

    def _count(self, scores_TE: Tensor, expert_TK: Tensor, cutoff_T: Tensor, stats: LayerStats) -> None:
        if stats.valid_BT is not None:
            valid = stats.valid_BT.flatten()
            scores_TE, expert_TK, cutoff_T = scores_TE[valid], expert_TK[valid], cutoff_T[valid]
        if stats.load_E is not None:
            stats.load_E.add_(torch.bincount(expert_TK.flatten(), minlength=stats.load_E.numel()))
        if stats.histogram_EB is not None:
            bins = stats.histogram_EB.shape[1]
            counts = required_bias_histogram(scores_TE, cutoff_T, self.bias, bins=bins)
            stats.histogram_EB.add_(counts)


def select_experts(scores_TE: Tensor, bias_E: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    """Top-k of ``scores + bias``; among equal values the lowest expert index wins, on every device.

    Args:
        scores_TE, bias_E: finite, or the step is skipped anyway.
        k: below E.

    Returns:
        expert_TK int64 in falling order of value, and cutoff_T, the (k + 1)-th value (quantile balancing's
        alpha).
    """
    assert k < scores_TE.shape[1], (k, scores_TE.shape)
    # One maximum after another, the first of equal ones each time: top-k does not define which it takes, and for
    # thousands of tokens on a CPU a stable sort of all scores takes four times as long.
    values_TE = scores_TE + bias_E
    chosen = []
    for _ in range(k):
        expert_T = values_TE.max(dim=1, keepdim=True).indices
        chosen.append(expert_T)
        values_TE.scatter_(1, expert_T, -math.inf)
    return torch.cat(chosen, dim=1), values_TE.amax(dim=1)


def required_bias_histogram(scores_TE: Tensor, cutoff_T: Tensor, bias_E: Tensor, *, bins: int) -> Tensor:
    """Counts of ``r_ij = cutoff_i - s_ij`` in uniform bins over [min(bias) - 1, max(bias) + 1], int32 [E, bins]."""
    low, width = _bin_range(bias_E, bins)
    experts = scores_TE.shape[1]
    required_TE = cutoff_T.unsqueeze(1) - scores_TE
    # A non-finite score has no bin; the step that holds it is skipped, so where it lands does not matter.
    index_TE = torch.nan_to_num((required_TE - low) / width).long().clamp_(0, bins - 1)
    index_TE += torch.arange(experts, device=index_TE.device) * bins
    return torch.bincount(index_TE.flatten(), minlength=experts * bins).view(experts, bins).to(torch.int32)


def bias_from_histogram(histogram_EB: Tensor, bias_E: Tensor, *, k: int) -> Tensor:
    """New centred bias: for each expert the k/E quantile of its histogram, linear inside the bin.

    Args:
        histogram_EB: int counts over the whole step, each row summing to the step's tokens m. A step without tokens
            leaves the bias as it is.
        bias_E: the bias that was in force while counting; it defines the bins.
        k: experts per token.

    Source: Kimi K3 technical report, appendix on quantile balancing; rank q = m k / E, the first bin whose
    cumulative count reaches ceil(q).
    """
    experts, bins = histogram_EB.shape
    low, width = _bin_range(bias_E, bins)
    cumulative_EB = histogram_EB.long().cumsum(dim=1)
    tokens = int(cumulative_EB[0, -1])
    if tokens == 0:
        return bias_E.clone()
    rank = tokens * k / experts
    bin_E = (cumulative_EB < math.ceil(rank)).sum(dim=1, keepdim=True)
    count_E = histogram_EB.gather(1, bin_E).squeeze(1).double()
    below_E = cumulative_EB.gather(1, bin_E).squeeze(1) - count_E
    quantile_E = low + (bin_E.squeeze(1) + (rank - below_E) / count_E) * width
    return (quantile_E - quantile_E.mean()).to(bias_E.dtype)


def bias_from_load(load_E: Tensor, bias_E: Tensor, *, step: float) -> Tensor:
    """DeepSeek-V3's rule: up by ``step`` for an expert below the mean load, down above it, then centred.

    Args:
        load_E: int64 tokens routed to each expert over the whole step.
    """
    load = load_E.double()
    moved = bias_E + step * torch.sign(load.mean() - load).to(bias_E.dtype)
    return moved - moved.mean()


def quantile_bias(scores: Tensor, bias: Tensor, *, k: int, bins: int = 1000) -> Tensor:
    """Quantile balancing in one process: the bias after a step that saw exactly these scores.

    Args:
        scores: [T, E] sigmoid scores of all tokens of the step.
        bias: [E] the bias in force during the step.
        k: experts per token, below E.
        bins: histogram bins.

    Returns:
        [E] centred bias for the next step, in bias's dtype.
    """
    _, cutoff = select_experts(scores, bias, k=k)
    return bias_from_histogram(required_bias_histogram(scores, cutoff, bias, bins=bins), bias, k=k)


def _bin_range(bias_E: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """(lower edge, bin width). Scores lie in (0, 1), so every required bias falls inside."""
    low, high = bias_E.min() - 1, bias_E.max() + 1
    return low, (high - low) / bins
