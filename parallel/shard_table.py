"""Which parameters are cut, along what and over which axis: one table, data only.

A row names parameters as the module that it speaks of does: ``up`` is cut in a gated feed-forward and whole in an
expert layer, where it leads out of the latent, though both are called ``layers.<i>.ffn.up.weight``. What no row names
is whole. `parallel.sharding` reads the table.
"""

from dataclasses import dataclass

from torch import nn

from model.kda import KDA
from model.kimi import KimiModel
from model.layers import GatedFFN
from model.mla import MLA
from model.moe import Experts


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the parameters ``names`` of every module of class ``within`` lie on the mesh; names are relative to it.

    shards: as in `parallel.sharding.ShardSpec`.
    """

    within: type[nn.Module]
    names: tuple[str, ...]
    shards: tuple[tuple[int, str], ...]


_ROWS = ((0, "tp"),)
_COLUMNS = ((1, "tp"),)

SHARD_TABLE = (
    Layout(within=KimiModel, names=("embed.weight", "head.weight"), shards=_ROWS),
    # KDA's rows are heads; the norm and the low ranks' down-projections serve all heads and are whole.
    Layout(
        within=KDA,
        names=(
            *("q.weight", "k.weight", "v.weight", "q_conv.weight", "k_conv.weight", "v_conv.weight"),
            *("beta.weight", "decay.up.weight", "decay.A_log", "decay.dt_bias", "gate.up.weight"),
        ),
        shards=_ROWS,
    ),
    Layout(within=KDA, names=("out.weight",), shards=_COLUMNS),
    # MLA's too; both latents, their norms and the shared key are whole.
    Layout(within=MLA, names=("q.up.weight", "kv_up.weight", "gate.weight"), shards=_ROWS),
    Layout(within=MLA, names=("out.weight",), shards=_COLUMNS),
    Layout(within=GatedFFN, names=("gate.weight", "up.weight"), shards=_ROWS),
    Layout(within=GatedFFN, names=("down.weight",), shards=_COLUMNS),
    Layout(within=Experts, names=("gate", "up"), shards=((0, "ep"), (1, "tp"))),
    Layout(within=Experts, names=("down",), shards=((0, "ep"), (2, "tp"))),
)
