"""Forced routing: experts chosen by a rule and not by the router, to measure what a load costs. For benchmarks only.

    balanced       the experts in turn over all (token, choice) of all ranks: each equally often
    zipf(s)        the expert of popularity rank r has weight r^-s; which one is popular differs by layer; also zipf:s
    one_expert     every token to experts 0 to k - 1
    trace:FILE     the counts that a run recorded (`parallel.expert.trace`), layer by layer and step by step, wrapping

The rule wraps `model.router.select_experts` in every router, while a training step runs and no longer: an
evaluation, and ranks that must agree on a sampled token, keep the routers' own choice. In a step that choice is made
all the same, so that its cost stays in what is measured; routing weights are the scores of the forced experts. Nothing
is drawn from torch's global state: a choice is a function of (seed, layer, step, pass, rank), so a resumed run repeats
it, and a recomputed pass does not ask again (`model.router.Decisions`).

Shapes: T tokens, E experts, K choices of a token.
"""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from model.config import ModelConfig
from model.kimi import Block, KimiModel
from model.moe import MoE
from model.params import seed_from_name
from model.router import Selection
from parallel.expert.trace import RoutingTrace, load_trace
from parallel.mesh import Axis

RULES = "balanced, zipf(s), one_expert or trace:FILE"


@dataclass
class RoutingSettings:
    """Routing as a load to measure; see the module's docstring.

    force: "" leaves it to the routers; else "balanced", "zipf(1.2)", "one_expert" or "trace:FILE".
    save: let a forced run save checkpoints, whose weights are good for nothing else.
    trace: record how many rows each expert had, in the run folder's routing.npz.
    """

    AT_RESUME: ClassVar[str] = "experts chosen by another rule: its steps do not belong to the same run"
    FREE_AT_RESUME: ClassVar[tuple[str, ...]] = ("save", "trace")

    force: str = ""
    save: bool = False
    trace: bool = False

    @property
    def saves(self) -> bool:
        """Whether the run may save checkpoints."""
        return not self.force or self.save

    def errors(self) -> list[str]:
        """Every problem, one line each; reads the trace, if one is named."""
        try:
            parse_rule(self.force)
        except ValueError as error:
            return [str(error)]
        return []

    def model_errors(self, model: ModelConfig) -> list[str]:
        """What contradicts ``model``, one line each, of settings that are sound by themselves."""
        wanted = {"force": self.force, "trace": self.trace}
        if not model.moe_layers:
            return [
                f"routing.{name}={value}: needs expert layers, and the model has none; leave it out"
                for name, value in wanted.items()
                if value
            ]
        rule = parse_rule(self.force)
        problem = rule.misfit(model) if isinstance(rule, Replay) else None
        return [] if problem is None else [f"routing.force={self.force}: {problem}; record it with this model"]


@dataclass(frozen=True)
class Pass:
    """One pass of one layer on one rank, and where its random numbers come from.

    call: passes of the layer before this one in the step.
    rank, ranks: of all ranks that route tokens of the layer.
    """

    seed: int
    layer: int
    step: int
    call: int
    rank: int
    ranks: int

    def generator(self, device: torch.device | str) -> torch.Generator:
        """Of this pass alone."""
        name = f"routing {self.layer} {self.step} {self.call} {self.rank}"
        return torch.Generator(device).manual_seed(seed_from_name(self.seed, name))

    def shuffled(self, experts: int) -> Tensor:
        """The experts in an order of the layer's own, on the host; in every step and on every rank the same."""
        generator = torch.Generator().manual_seed(seed_from_name(self.seed, f"routing {self.layer}"))
        return torch.randperm(experts, generator=generator)


class Rule(Protocol):
    """Says which experts tokens go to."""

    def choose(self, tokens: int, at: Pass, *, experts: int, k: int, device: torch.device) -> Tensor:
        """expert_TK, int64; the experts of a token differ."""
        ...


@dataclass(frozen=True)
class Balanced:
    """All experts equally often, to within one row a pass over all ranks (which have as many tokens each)."""

    def choose(self, tokens: int, at: Pass, *, experts: int, k: int, device: torch.device) -> Tensor:
        first = (at.call * at.ranks + at.rank) * tokens * k
        return (torch.arange(tokens * k, device=device) + first).view(tokens, k) % experts


@dataclass(frozen=True)
class OneExpert:
    """The worst case: as many experts as a token has choices do everything."""

    def choose(self, tokens: int, at: Pass, *, experts: int, k: int, device: torch.device) -> Tensor:
        return torch.arange(k, device=device).repeat(tokens, 1)


@dataclass(frozen=True)
class Zipf:
    """Weights r^-exponent, drawn without replacement: the k largest of log weight + Gumbel noise."""

    exponent: float

    def choose(self, tokens: int, at: Pass, *, experts: int, k: int, device: torch.device) -> Tensor:
        weight_E = torch.empty(experts, device=device)
        weight_E[at.shuffled(experts).to(device)] = -self.exponent * torch.arange(1, experts + 1, device=device).log()
        noise_TE = torch.empty(tokens, experts, device=device).exponential_(generator=at.generator(device)).log_()
        return (weight_E - noise_TE).topk(k, dim=1).indices


@dataclass(frozen=True)
class Replay:
    """Each expert gets its recorded share of a pass's rows, to within one row.

    Systematic sampling: experts stand side by side in [0, K), each as wide as the share of tokens that chose it, so at
    most 1. A token takes those at u, u + 1, ..., u + K - 1, which differ; tokens' u are spaced evenly. In integers, so
    that nothing rounds: widths are counts times K, and 1 is their sum over K.
    """

    trace: RoutingTrace

    def misfit(self, model: ModelConfig) -> str | None:
        """Why the trace cannot drive ``model``; None if it can."""
        (_, _, experts), layers = self.trace.counts.shape, tuple(self.trace.layers.tolist())
        moe, top_k = model.moe, self.trace.top_k
        if (experts, top_k) != (moe.experts, moe.top_k):
            return f"recorded {experts} experts, {top_k} a token; the model has {moe.experts}, {moe.top_k} a token"
        if layers != model.moe_layers:
            return f"recorded layers {list(layers)}; the model has experts in layers {list(model.moe_layers)}"
        tokens = self.trace.counts.sum(axis=2) / top_k
        if (tokens == 0).any() or (self.trace.counts.max(axis=2) > tokens).any():
            return "some layer has a step without rows, or an expert that a token chose twice"
        return None

    def choose(self, tokens: int, at: Pass, *, experts: int, k: int, device: torch.device) -> Tensor:
        row = self.trace.layers.tolist().index(at.layer)
        count_E = torch.from_numpy(self.trace.counts[at.step % len(self.trace.counts), row])
        whole = int(count_E.sum())
        order_E = at.shuffled(experts).to(device)
        end_E = (count_E.to(device)[order_E] * k).cumsum(0)
        generator = at.generator(device)
        shift = torch.randint(whole, (1,), generator=generator, device=device)
        mixed_T = torch.randperm(tokens, generator=generator, device=device)
        point_T = torch.div(mixed_T * whole + shift, tokens, rounding_mode="floor")
        point_TK = point_T.unsqueeze(1) + torch.arange(k, device=device) * whole
        return order_E[torch.searchsorted(end_E, point_TK, right=True)]


def parse_rule(text: str) -> Rule | None:
    """The rule that ``routing.force`` names; None for "".

    Raises:
        ValueError: one line.
    """
    if not text:
        return None
    named: dict[str, Rule] = {"balanced": Balanced(), "one_expert": OneExpert()}
    if text in named:
        return named[text]
    if text.startswith("trace:"):
        try:
            return Replay(load_trace(Path(text.removeprefix("trace:"))))
        except ValueError as error:
            raise ValueError(f"routing.force={text}: {error}") from error
    zipf = re.fullmatch(r"zipf\((.*)\)|zipf:(.*)", text)
    if not zipf:
        raise ValueError(f"routing.force={text}: must be {RULES}; leave it empty to let the routers choose")
    try:
        exponent = float(zipf[1] or zipf[2] or "")
    except ValueError:
        exponent = math.nan
    if not 0 <= exponent < math.inf:
        raise ValueError(f"routing.force={text}: s of zipf(s) must be a number from 0; use zipf(1)")
    return Zipf(exponent)


class ForcedRouting:
    """Puts ``rule`` into the routers of a model.

    Args:
        seed: of the run.
        axis: the ranks that route tokens of the same layers, each its own: a stage's.
    """

    def __init__(self, rule: Rule, *, seed: int, axis: Axis) -> None:
        self.rule, self.seed, self.axis = rule, seed, axis
        self._layers: list[_ForcedLayer] = []

    def install(self, model: KimiModel) -> None:
        """Wrap the choice of every router that ``model`` holds."""
        for index, block in enumerate(model.layers):
            if isinstance(block, Block) and isinstance(block.ffn, MoE):
                router = block.ffn.router
                router.select = _ForcedLayer(router.select, self.rule, seed=self.seed, layer=index, axis=self.axis)
                self._layers.append(router.select)

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        """Force the routing of the training step that follows ``step`` others."""
        for layer in self._layers:
            layer.step, layer.calls = step, 0
        try:
            yield
        finally:
            for layer in self._layers:
                layer.step = None


class _ForcedLayer:
    """A `model.router.Selection` that makes the one it wraps, and replaces the experts while a step is under way."""

    def __init__(self, select: Selection, rule: Rule, *, seed: int, layer: int, axis: Axis) -> None:
        self.select = select
        self.rule, self.seed, self.layer, self.axis = rule, seed, layer, axis
        self.step: int | None = None
        self.calls = 0

    def __call__(self, scores_TE: Tensor, bias_E: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
        expert_TK, cutoff_T = self.select(scores_TE, bias_E, k=k)
        if self.step is None:
            return expert_TK, cutoff_T
        at = Pass(self.seed, self.layer, self.step, self.calls, self.axis.rank, self.axis.size)
        self.calls += 1
        tokens, experts = scores_TE.shape
        return self.rule.choose(tokens, at, experts=experts, k=k, device=scores_TE.device), cutoff_T
