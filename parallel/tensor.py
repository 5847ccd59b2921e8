"""Tensor parallel with sequence parallel: heads, inner dims and the vocabulary are cut, and between them the tokens.

    parameters cut   vocabulary |             |  heads  |             | inner |                     | inner | ...
    tokens cut                  |  mix, norm  |         |  mix, norm  |       |  mix, norm, router  |
                             scatter       gather    scatter       gather  scatter               gather  scatter

A *region* is a stretch in which every rank sees all tokens of its cp slice and computes its part of them: its heads,
its columns of a feed-forward. Tokens enter it by an all-gather and leave it, as partial sums, by a reduce-scatter; so
what lies between regions runs on slices of the sequence, [B, T / tp, D], and is computed once. The regions are hooks
around the plain modules, which keep their names and their code.

A parameter that is whole (a norm, a router, a low rank's down-projection) has on each rank the gradient of the rank's
tokens or heads: a part, whose sum over `replicas` is the gradient. A parameter that is cut has the whole gradient of
its slice, summed over `dense`. Both sums are those that data parallelism makes; `parallel.shard_table` says which is
whose.

Decoding feeds one token, which cannot be cut: inside `whole_sequence` every rank holds all tokens everywhere.
Entering a region needs no communication; leaving it is an all-reduce.

Shapes: B batch, T tokens, D model, L latent, K choices, H heads, M tokens (flat), V vocabulary (of a rank).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from model.config import ModelConfig
from model.kda import KDA
from model.kimi import KimiModel
from model.layers import Embedding, GatedFFN, Linear, look_up
from model.loss import chunked_cross_entropy
from model.mla import MLA
from model.moe import MoE
from model.params import declare, named_roles
from model.products import Product
from model.router import Routing
from model.seams import ExpertWeights, Received, TokenDispatcher
from parallel.collectives import all_gather, all_reduce, gather_plain, reduce_scatter
from parallel.mesh import Axis


def cut_errors(config: ModelConfig, *, tp: int) -> list[str]:
    """Every size of a model that ``tp`` ranks cannot share evenly, one line each.

    Args:
        config: without errors of its own.
    """
    sizes = {"vocab_size": config.vocab_size}
    if "K" in config.mixers:
        sizes["kda.heads"] = config.kda.heads
    if "M" in config.mixers:
        sizes["mla.heads"] = config.mla.heads
    if config.dense_layers:
        sizes["dense_dim"] = config.dense_dim
    if config.moe_layers:
        sizes["moe.expert_dim"] = config.moe.expert_dim
    return [
        f"model.{name}={size}: must be divisible by parallel.tp={tp}, which splits it; use {-(-size // tp) * tp} or "
        "another parallel.tp"
        for name, size in sizes.items()
        if size % tp
    ]


class Region(nn.Module):
    """The border between cut and whole tokens, one for all regions of a model.

    Args:
        axis: tp.
    """

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        self.whole = False

    def enter(self, x: Tensor, *, dim: int) -> Tensor:
        """All tokens from the ranks' slices along ``dim``."""
        return x if self.whole else all_gather(x, self.axis, dim=dim)

    def leave(self, part: Tensor, *, dim: int) -> Tensor:
        """This rank's tokens along ``dim`` of the sum of the ranks' parts."""
        return all_reduce(part, self.axis) if self.whole else reduce_scatter(part, self.axis, dim=dim)

    def extra_repr(self) -> str:
        return f"{self.axis.name}={self.axis.size}"


@contextmanager
def whole_sequence(model: nn.Module) -> Iterator[None]:
    """Inside, no token dim of ``model`` is cut: every tp rank is fed all tokens and gets all logits. For decoding."""
    regions = [module for module in model.modules() if isinstance(module, Region)]
    for region in regions:
        region.whole = True
    try:
        yield
    finally:
        for region in regions:
            region.whole = False


def install_tensor(model: KimiModel, axis: Axis) -> None:
    """Make ``model``, which holds this rank's slices, run on the tp axis; nothing changes on an axis of size 1.

    Its token dispatchers must be those of the expert axis already: they run inside a region. From then on
    `KimiModel.hidden` takes all ids of the cp slice and returns this rank's slice of the hidden states; `head_loss`
    takes it from there. Modules that another pipeline rank holds may be absent.
    """
    if axis.size == 1:
        return
    region = Region(axis)
    for module in list(model.modules()):
        if isinstance(module, (KDA, MLA)):
            _cut_mixer(module, region)
        elif isinstance(module, GatedFFN):
            module.register_forward_pre_hook(lambda module, args: region.enter(args[0], dim=1))
            _leave_after(module.down, region)
        elif isinstance(module, MoE):
            module.dispatcher = RegionDispatcher(module.dispatcher, region)
    if isinstance(model.embed, Embedding):
        model.embed = VocabEmbedding(model.embed, region)  # type: ignore[assignment]
    if isinstance(model.head, Linear):
        model.head.register_forward_pre_hook(lambda module, args: region.enter(args[0], dim=1))
        model.head.register_forward_hook(lambda module, args, logits: _gather_logits(logits, axis))
    model.tensor_region = region


def _leave_after(product: Linear, region: Region) -> None:
    """``product`` multiplies the rank's columns, so its outputs are parts of a sum."""
    product.register_forward_hook(lambda module, args, part: region.leave(part, dim=1))


def _cut_mixer(mixer: KDA | MLA, region: Region) -> None:
    """A mixer in a region, on the heads that this rank holds."""
    assert mixer.heads % region.axis.size == 0, f"{mixer.heads} heads over tp={region.axis.size}"
    heads = mixer.heads // region.axis.size
    mixer.heads = heads

    def enter(mixer: nn.Module, args: tuple[Tensor], kwargs: dict[str, Any]) -> tuple[tuple[Tensor], dict[str, Any]]:
        stats = kwargs.get("stats")
        if stats is not None and stats.max_logit_H is not None:
            own_H = stats.max_logit_H.narrow(0, region.axis.rank * heads, heads)
            kwargs = kwargs | {"stats": replace(stats, max_logit_H=own_H)}
        return (region.enter(args[0], dim=1),), kwargs

    mixer.register_forward_pre_hook(enter, with_kwargs=True)
    _leave_after(mixer.out, region)


class VocabEmbedding(nn.Module):
    """Token embedding whose rows are cut over tp: ids [B, T] of all tokens -> this rank's tokens [B, T / tp, D].

    Args:
        part: the plain embedding, with this rank's rows.
    """

    def __init__(self, part: Embedding, region: Region) -> None:
        super().__init__()
        self.region = region
        self.weight = part.weight
        declare(self, weight=named_roles(part)["weight"])
        rows = self.weight.shape[0]
        self.first = region.axis.rank * rows
        held = part.padding_id is not None and self.first <= part.padding_id < self.first + rows
        self.padding_row = part.padding_id - self.first if held and part.padding_id is not None else None

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Raises ValueError where the tokens cannot be cut evenly."""
        tp, length = self.region.axis.size, ids_BT.shape[1]
        if length % tp and not self.region.whole:
            raise ValueError(
                f"input_ids with {length} tokens a row (of a cp slice): must be a multiple of parallel.tp={tp}, so "
                "that every rank gets equally many; pad the rows, or use another parallel.tp"
            )
        row_BT, held_BT = _rows_held(ids_BT, first=self.first, rows=self.weight.shape[0])
        x_BTD = look_up(row_BT, self.weight, padding_row=self.padding_row)
        return self.region.leave(x_BTD.masked_fill(~held_BT.unsqueeze(-1), 0.0), dim=1)


def _rows_held(ids: Tensor, *, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Row of each id among the ``rows`` from ``first`` on, and whether it is one of them (if not, the row is any)."""
    row = ids - first
    held = (row >= 0) & (row < rows)
    return row.clamp(0, rows - 1), held


class _ChosenByAll(NamedTuple):
    """The experts of the tokens of all tp ranks: int64 [T, K]."""

    expert_TK: Tensor


class _Entered(NamedTuple):
    """What `RegionDispatcher` remembers: the routing of all tokens, and the inner dispatcher's handle."""

    routing: Routing
    handle: Any


class RegionDispatcher:
    """`model.seams.TokenDispatcher` in a region: all tokens to ``inner``, whose experts are slices, and back.

    The routing travels with the tokens, so it is made once, by the rank that has the token; the gradient of its
    weights is summed where the tokens' gradients are.
    """

    def __init__(self, inner: TokenDispatcher, region: Region) -> None:
        self.inner, self.region = inner, region

    def dispatch(self, x_TL: Tensor, routing: Routing, weights: ExpertWeights) -> _Entered:
        decisions = routing.decisions
        chosen = decisions.once(_ChosenByAll, lambda: _ChosenByAll(self.region.enter(routing.expert_TK, dim=0)))
        weight_TK = self.region.enter(routing.weight_TK, dim=0)
        entered = Routing(chosen.expert_TK, weight_TK, decisions, routing.record)
        return _Entered(entered, self.inner.dispatch(self.region.enter(x_TL, dim=0), entered, weights))

    def receive(self, handle: _Entered) -> tuple[Received, ...]:
        return self.inner.receive(handle.handle)

    def combine(self, rows_RL: Tensor, routing: Routing, handle: _Entered) -> Tensor:
        return self.region.leave(self.inner.combine(rows_RL, handle.routing, handle.handle), dim=0)


def _gather_logits(logits: Tensor, axis: Axis) -> Tensor:
    """Logits of the whole vocabulary, on every rank."""
    assert not logits.requires_grad, "every rank's loss on whole logits would count tp times; train with head_loss"
    return gather_plain(logits, axis, dim=-1)


def head_loss(
    hidden: Tensor, head_weight: Tensor, labels: Tensor, *, axis: Axis, chunk: int, product: Product
) -> Tensor:
    """`model.loss.chunked_cross_entropy` of a head whose rows are cut over ``axis``; all its ranks return one value.

    Each rank's backward gives the gradient of its own rows, and to every rank's hidden states the whole gradient.

    Args:
        hidden: [B, T / tp, D] this rank's normalised last hidden states.
        head_weight: this rank's rows.
        labels: int64 [B, T] of all tokens of the cp slice.
        axis: tp; of size 1, this is `chunked_cross_entropy`.
        chunk: tokens whose logits exist at once.
        product: of hidden states and the head's rows.
    """
    if axis.size == 1:
        return chunked_cross_entropy(hidden, head_weight, labels, product=product, chunk=chunk)
    vocabulary = CutVocabulary(axis, rows=head_weight.shape[0])
    hidden = all_gather(hidden, axis, dim=1)
    return chunked_cross_entropy(hidden, head_weight, labels, product=product, chunk=chunk, vocabulary=vocabulary)


class CutVocabulary:
    """`model.loss.Vocabulary` of a head whose rows are cut over ``axis``, ``rows`` for each rank.

    One gather brings two numbers a token and rank: log-normaliser and target logit. Every rank then adds up the same
    numbers in the same order, so all have the same loss to the bit.
    """

    def __init__(self, axis: Axis, *, rows: int) -> None:
        self.axis, self.rows = axis, rows

    def locate(self, labels_M1: Tensor) -> tuple[Tensor, Tensor]:
        return _rows_held(labels_M1, first=self.axis.rank * self.rows, rows=self.rows)

    def join(self, log_normalizer_M: Tensor, target_M: Tensor) -> tuple[Tensor, Tensor]:
        own_M2 = torch.stack([log_normalizer_M, target_M], dim=1)
        log_normalizers, targets = gather_plain(own_M2.unsqueeze(0), self.axis, dim=0).unbind(dim=2)
        return log_normalizers.logsumexp(dim=0), targets.sum(dim=0)
