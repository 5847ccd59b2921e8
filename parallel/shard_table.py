"""Which parameters are cut, along what and over which axis: one table, data only.

The first row whose pattern matches a parameter's full name holds. `parallel.sharding` reads it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the parameters whose names match ``pattern`` (shell wildcards) lie on the mesh.

    The other fields are those of `parallel.sharding.ShardSpec`.
    """

    pattern: str
    shards: tuple[tuple[int, str], ...] = ()
    owners: str = "stage"


SHARD_TABLE = (
    Layout(pattern="*.experts.*", shards=((0, "ep"),), owners="expert_dp"),
    Layout(pattern="*"),
)
