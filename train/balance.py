"""How evenly a step's rows were shared among experts and ranks, layer by layer, for the metrics.

Of each expert layer, summed over the step's microbatches:

    entropy      of the experts' shares of rows, over that of equal shares: 1 is even, 0 one expert
    before       rows of the busiest rank over the mean, had every expert been computed at its home
    after        the same of what was computed
    borrowed     copies of experts that were lent
    lent_bytes   of their weights; they travel forward, again backward, and as gradients in fp32 at least
    dropped      rows that the routers chose and no rank computed: always 0, and counted at both ends

The busiest rank is looked for in each pass, for that is where the others wait. Groups of ep ranks are independent of
each other, so the ratios are those of the worst group. All but entropy are there only where rows move, from ep 2 on.
"""

import math
from dataclasses import astuple, fields
from typing import NamedTuple

import torch
from torch import Tensor

from model.stats import ForwardStats
from parallel.collectives import gather_plain
from parallel.expert.stats import RowStats
from parallel.mesh import Mesh

COLUMNS = tuple(field.name for field in fields(RowStats))


class Sizes(NamedTuple):
    """Ranks along the axes in which world ranks are counted here; groups are the ep groups of a stage."""

    pp: int
    groups: int
    ep: int
    tp: int


def row_table(stats: ForwardStats, moe_layers: tuple[int, ...]) -> Tensor:
    """What this rank counted, int64 [MoE layers, fields of `RowStats`]; zeros in layers of other stages."""
    table = torch.zeros(len(moe_layers), len(COLUMNS), dtype=torch.int64)
    for layer, rows in zip(stats.moe_layers, stats.dispatch, strict=True):
        assert isinstance(rows, RowStats)
        table[moe_layers.index(layer)] = torch.tensor(astuple(rows))
    return table


def expert_balance(
    rows: Tensor, load: Tensor, *, moe_layers: tuple[int, ...], mesh: Mesh
) -> dict[str, dict[str, float | int]]:
    """The numbers above by layer, equal on all ranks. Collective, one gather.

    Args:
        rows: this rank's `row_table`.
        load: int64 [MoE layers, E], rows that all ranks' routers chose.
    """
    sizes = Sizes(mesh.pp.size, mesh.expert_dp.size, mesh.ep.size, mesh.tp.size)
    columns = {"entropy": entropy(load).tolist()}
    if mesh.ep.size > 1:
        tables = gather_plain(rows.unsqueeze(0), mesh.world, dim=0)
        columns |= {name: value.tolist() for name, value in share_of_ranks(tables, load, sizes).items()}
    return {
        str(layer): dict(zip(columns, numbers))
        for layer, numbers in zip(moe_layers, zip(*columns.values(), strict=True), strict=True)
    }


def share_of_ranks(tables: Tensor, load: Tensor, sizes: Sizes) -> dict[str, Tensor]:
    """From all ranks' tables, [world, layers, fields], the numbers of each layer."""
    # A layer is on one stage and zero on the others; then [groups, ep, tp, layers] for each field.
    by_rank = tables.view(*sizes, *tables.shape[1:]).sum(dim=0)
    found = dict(zip(COLUMNS, by_rank.unbind(dim=-1)))
    # All tp ranks of an ep rank compute the same rows, each with its slice of the weights.
    one = {name: value[:, 0, 0] for name, value in found.items()}
    mean = one["chosen"].double() / sizes.ep
    return {
        "before": (one["home"] / mean).amax(dim=0),
        "after": (one["busiest"] / mean).amax(dim=0),
        "borrowed": one["borrowed"].sum(dim=0),
        "lent_bytes": found["lent_bytes"][:, 0].sum(dim=(0, 1)),
        "dropped": load.sum(dim=1) - found["computed"][:, :, 0].sum(dim=(0, 1)),
    }


def entropy(load: Tensor) -> Tensor:
    """Of each layer's shares, [layers] fp64, over log E; 1 for a single expert."""
    share = load.double() / load.sum(dim=1, keepdim=True)
    if load.shape[1] == 1:
        return torch.ones(len(load), dtype=torch.float64)
    return torch.special.entr(share).sum(dim=1) / math.log(load.shape[1])
