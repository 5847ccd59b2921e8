"""Which layers stand where, and which residual rows a hop must carry: pure functions of a few integers.

The layers are cut into ``stages`` contiguous virtual stages, and those lie on the pipeline ranks either in a loop or in
a V:

    4 ranks, 2 each    loop   stage 0 1 2 3 4 5 6 7        V    stage 0 1 2 3 4 5 6 7
                              rank  0 1 2 3 0 1 2 3             rank  0 1 2 3 3 2 1 0

Between two stages goes the residual state: the open prefix, always, and the closed bank rows. A rank keeps the rows of
a microbatch that any of its stages has seen, so that a hop carries only those that the receiver lacks. The rows that a
stage has seen are always the first so many, hence the payload is a prefix and one range:

    rows of hop s -> s + 1 = range(rows known after the receiver's previous stage, rows that enter stage s + 1)

Kimi K3's 93 layers (blocks of 12) on 8 ranks with 4 virtual stages each send 83 slices [T, D] over their 31 hops
instead of 167, and at most 3 in one hop instead of 9. A stage whose first sublayer closes a block receives that block
as its prefix, not as a row: where block and stage begin together, the hop before carries one row less.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from model.config import ModelConfig
from model.flops import forward_flops, layer_flops
from parallel.pipeline.config import PipelineConfig


@dataclass(frozen=True)
class PipelineLayout:
    """The cut of one model.

    counts: layers of each virtual stage, all at least 1.
    ranks: pipeline ranks.
    placement: "loop" or "v".
    block: sublayers per attention-residual block; None: no bank.
    cache: whether a rank keeps rows over its virtual stages; False sends all rows over every hop.
    """

    counts: tuple[int, ...]
    ranks: int = 1
    placement: str = "loop"
    block: int | None = None
    cache: bool = True

    def __post_init__(self) -> None:
        assert min(self.counts) >= 1, self
        assert len(self.counts) % self.ranks == 0, self
        assert self.placement == "loop" or len(self.counts) == 2 * self.ranks, self

    @property
    def stages(self) -> int:
        """Virtual stages over all ranks."""
        return len(self.counts)

    @property
    def last(self) -> int:
        """The stage that computes the loss."""
        return self.stages - 1

    def layers(self, stage: int) -> range:
        """Indices of the layers of ``stage``."""
        stop = sum(self.counts[: stage + 1])
        return range(stop - self.counts[stage], stop)

    def rank_of(self, stage: int) -> int:
        """Pipeline rank that holds ``stage``."""
        if self.placement == "v":
            return min(stage, self.last - stage)
        return stage % self.ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages on ``rank``, in order."""
        return tuple(stage for stage in range(self.stages) if self.rank_of(stage) == rank)

    def layers_of(self, rank: int) -> tuple[int, ...]:
        """All layers on ``rank``, in order."""
        return tuple(layer for stage in self.stages_of(rank) for layer in self.layers(stage))

    def holder(self, stage: int) -> int:
        """Whose rows ``stage`` shares: its rank's, or its own alone where nothing is cached."""
        return self.rank_of(stage) if self.cache else stage

    def rows_before(self, stage: int) -> int:
        """Bank rows that enter ``stage``: those closed by the sublayers before it (two a layer)."""
        return 0 if self.block is None else -(-2 * self.layers(stage).start // self.block)

    def rows_after(self, stage: int) -> int:
        """Bank rows that exist when ``stage`` is done."""
        return 0 if self.block is None else -(-2 * self.layers(stage).stop // self.block)

    def closes_prefix(self, stage: int) -> bool:
        """Whether the first sublayer of ``stage`` turns the prefix that came in into a row."""
        return stage > 0 and self.block is not None and 2 * self.layers(stage).start % self.block == 0

    def arriving(self, stage: int) -> range:
        """Rows that come to ``stage`` with its prefix; none for the first stage."""
        earlier = [s for s in range(stage) if self.holder(s) == self.holder(stage)]
        known = self.rows_after(earlier[-1]) if earlier else 0
        return range(known, self.rows_before(stage))

    def is_last_of_holder(self, stage: int) -> bool:
        """Whether no later stage reads the rows that ``stage`` shares."""
        return all(self.holder(s) != self.holder(stage) for s in range(stage + 1, self.stages))

    def is_hop(self, stage: int) -> bool:
        """Whether the state goes to another rank after ``stage``."""
        return stage < self.last and self.rank_of(stage) != self.rank_of(stage + 1)

    def slices(self, stage: int) -> int:
        """Slices [B, T, D] sent to another rank after ``stage``: the prefix and the rows of the next stage."""
        return 1 + len(self.arriving(stage + 1)) if self.is_hop(stage) else 0


def split_evenly(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage, the remainder one each to the first stages."""
    size, rest = divmod(layers, stages)
    return tuple(size + (stage < rest) for stage in range(stages))


def split_by_cost(costs: Sequence[float], stages: int, *, head: float = 0.0) -> tuple[int, ...]:
    """Layers of each stage such that the most expensive stage is as cheap as can be; among such cuts, an even one.

    Args:
        costs: of each layer, any unit.
        stages: at most as many as layers.
        head: cost that comes on top in the last stage.
    """
    layers, sums = len(costs), [0.0, *accumulate(costs)]
    assert 1 <= stages <= layers, (stages, layers)
    # best[j]: (largest stage, sum of squares, counts) of the first j layers in as many stages as there were rounds.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(1, stages + 1):
        extra = head if stage == stages else 0.0
        longer = {}
        for stop in range(stage, layers - (stages - stage) + 1):
            cuts = []
            for start, (largest, squares, counts) in best.items():
                if start < stop:
                    cost = sums[stop] - sums[start] + extra
                    cuts.append((max(largest, cost), squares + cost * cost, (*counts, stop - start)))
            longer[stop] = min(cuts)
        best = longer
    return best[layers][2]


def layout_errors(config: PipelineConfig, *, layers: int) -> list[str]:
    """What keeps a model of ``layers`` layers from being cut as ``config`` says: field, value, rule, remedy."""
    stages = config.pp * config.vpp
    if stages > layers:
        return [
            f"parallel.pp x parallel.vpp={config.pp} x {config.vpp}: more virtual stages than the {layers} layers of "
            "model.layers; lower parallel.vpp or parallel.pp"
        ]
    counts = config.layout
    if not counts:
        return []
    found = []
    if len(counts) != stages:
        found.append(
            f"parallel.layout={counts}: has {len(counts)} entries for parallel.pp x parallel.vpp = {config.pp} x "
            f"{config.vpp} = {stages} virtual stages; give one layer count per virtual stage"
        )
    if min(counts) < 1:
        found.append(f"parallel.layout={counts}: every virtual stage needs at least 1 layer; take it from another")
    if sum(counts) != layers:
        found.append(
            f"parallel.layout={counts}: sums to {sum(counts)}, must be the {layers} layers of model.layers; change one "
            "of the counts, or leave parallel.layout=[] for an automatic cut"
        )
    return found


def make_layout(config: PipelineConfig, model: ModelConfig, *, length: int) -> PipelineLayout:
    """The cut that ``config`` describes: as listed in ``layout``, or automatic by ``balance``.

    Args:
        length: tokens over which a sequence attends, where the cut is by cost.

    Raises:
        ValueError: it does not fit the model.
    """
    errors = layout_errors(config, layers=model.num_layers)
    if errors:
        raise ValueError("; ".join(errors))
    stages = config.pp * config.vpp
    if config.layout:
        counts = tuple(config.layout)
    elif config.balance == "cost":
        costs = layer_flops(model, length=length)
        counts = split_by_cost(costs, stages, head=forward_flops(model, length=length).head)
    else:
        counts = split_evenly(model.num_layers, stages)
    return PipelineLayout(
        counts, ranks=config.pp, placement=config.placement, block=model.residual_block, cache=config.bank_cache
    )
