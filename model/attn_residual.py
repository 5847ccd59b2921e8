"""Attention Residuals: every sublayer reads a learned mix of what the sublayers before it wrote.

The state of the stream is explicit, so that a pipeline stage can send it:

    prefix   the open sum: what the sublayers of the present block have written so far
    bank     the closed rows: the embedding, then one sum per finished block

A sublayer reads mix(bank + [prefix]); a sublayer that begins a block then closes the prefix into the bank.
With an empty bank the mix is the identity, so the plain residual is the same code with a bank that is never
written, and a block of one sublayer is the full form, in which every sublayer reads every earlier output.

Source: arXiv:2603.15031; Kimi K3 technical report 2.2.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.kernels.residual_mix import residual_mix
from model.params import ParamRole, declare


class ResidualState(NamedTuple):
    """The residual stream between sublayers; ``prefix`` is None only right after a block was closed."""

    prefix: Tensor | None
    bank: tuple[Tensor, ...] = ()

    def close_block(self) -> "ResidualState":
        """The prefix becomes a bank row."""
        assert self.prefix is not None, "a block is closed once"
        return ResidualState(None, (*self.bank, self.prefix))

    def add(self, output: Tensor) -> "ResidualState":
        """Add a sublayer's output to the open block."""
        return ResidualState(output if self.prefix is None else self.prefix + output, self.bank)


def begins_block(sublayer: int, block: int | None) -> bool:
    """Whether ``sublayer`` (two per layer, counted from 0) closes the block before it; None: never."""
    return block is not None and sublayer % block == 0


class ResidualMix(nn.Module):
    """One pseudo-query and the norm of its keys. The query starts at zero: a uniform average."""

    def __init__(self, dim: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.query = nn.Parameter(torch.empty(dim))
        self.norm = nn.Parameter(torch.empty(dim))
        declare(
            self,
            query=ParamRole(kind="vector", decay=False, init="zeros"),
            norm=ParamRole(kind="vector", decay=False, init="ones"),
        )
        self.mix: Callable[..., Tensor] = mix_sources

    def forward(self, state: ResidualState) -> Tensor:
        assert state.prefix is not None, "a sublayer reads before it closes a block"
        if not state.bank:
            return state.prefix
        return self.mix((*state.bank, state.prefix), self.query, self.norm, self.eps)


def mix_sources(sources: tuple[Tensor, ...], query_D: Tensor, norm_D: Tensor, eps: float) -> Tensor:
    """`residual_mix` of the bank's rows and the prefix."""
    return residual_mix(list(sources), query_D, norm_D, eps=eps)
