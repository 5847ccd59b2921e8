"""Any config, shrunk to what one machine can run in seconds: the same model and mesh, smaller in every way.

What decides which code runs is kept: kinds of layers and their order, gates, norms and latents that are there or not,
rotary or not, heads that divide over an axis or do not, the axes themselves, the optimizer, recomputation. What only
decides how long it runs becomes small.

    layers     the first of every kind (KDA or MLA, dense or experts); for a pipeline `PIPELINE_LAYERS`
    widths     the constants below, which everything that cuts them divides
    axes       above 2 become 2, at most `MAX_RANKS` ranks in all
    experts    balanced ones lend from a mild imbalance on
    optimizer  fp64 Newton-Schulz, buckets so small that there are many, clips so tight that they clip
"""

import math
from dataclasses import replace

from model.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from optim.groups import OptimConfig
from parallel.config import ParallelConfig
from train.config import RunConfig, flatten

MAX_RANKS = 8

AXIS = 2
"""Ranks along an axis that had more."""

LENGTH = 24
VOCABULARY = 64
HIDDEN = 32
DENSE = 48
EXPERTS = 8
HEAD = 8
NARROW = 16
"""Low ranks, the latent of the experts and their inner width."""

BLOCK = 4
"""Sublayers of an attention-residual block."""

PIPELINE_LAYERS = 5
"""Does not divide over 2 or 4 stages, and with `BLOCK` some blocks are open where stages meet, and others closed."""

BALANCE_ABOVE = 1.25
"""Imbalance from which balanced experts lend at the latest, so that they do in some passes."""

INIT_STD = 0.2
"""So wide that a model this narrow passes signals and gradients on at the size of real ones."""


def ranks_of(parallel: ParallelConfig) -> int:
    """World size that the axes ask for. ``dp`` 0 stands for the fewest ranks over which ``ep`` fits."""
    fewest = parallel.ep // max(1, math.gcd(parallel.ep, parallel.cp))
    return parallel.pp * parallel.cp * parallel.tp * (parallel.dp or fewest)


def shrink(config: RunConfig) -> RunConfig:
    """The config's small likeness, with ``parallel.dp`` filled in. Pure; ``config`` must be free of errors."""
    parallel = shrink_parallel(config.parallel)
    model = shrink_model(config.model, was=config.parallel, parallel=parallel)
    per_rank = microbatches_per_rank(parallel)
    return replace(
        config,
        model=model,
        parallel=replace(parallel, layout=shrink_layout(config.parallel.layout, parallel=parallel, model=model)),
        optim=shrink_optim(config.optim),
        batch=replace(config.batch, length=LENGTH, sequences=per_rank * parallel.dp, microbatch=1),
        train=replace(config.train, precision="fp64"),
    )


def microbatches_per_rank(parallel: ParallelConfig) -> int:
    """Two with several data-parallel ranks; four for one rank or a pipeline, which must have something to overlap."""
    return 4 if parallel.dp == 1 or parallel.pp > 1 else 2


def shrink_parallel(parallel: ParallelConfig) -> ParallelConfig:
    """Axes of at most `AXIS`; ``dp`` 0 becomes 2. Where all of tp, cp and pp are there, dp gives way to 1: ``ep`` then
    lies over cp."""
    small = {name: min(getattr(parallel, name), AXIS) for name in ("tp", "pp", "vpp", "ep", "cp")}
    others = small["tp"] * small["pp"] * small["cp"]
    dp = min(parallel.dp or AXIS, AXIS)
    if others * dp > MAX_RANKS:
        dp = 1
    experts = replace(parallel.experts, balance_above=min(parallel.experts.balance_above, BALANCE_ABOVE))
    return replace(parallel, **small, dp=dp, layout=[], experts=experts)


def shrink_model(model: ModelConfig, *, was: ParallelConfig, parallel: ParallelConfig) -> ModelConfig:
    """The model's likeness for a mesh that ``was`` larger and is now ``parallel``."""
    layers = kept_layers(model, at_least=1 if parallel.pp == 1 else PIPELINE_LAYERS)
    return replace(
        model,
        vocab_size=VOCABULARY,
        hidden_dim=HIDDEN,
        layers="".join(model.mixers[i] for i in layers),
        dense_layers=sum(not model.is_moe(i) for i in layers),
        dense_dim=DENSE,
        # An odd block closes inside a layer.
        residual_block=None
        if model.residual_block is None
        else min(model.residual_block, BLOCK - model.residual_block % 2),
        init_std=max(model.init_std, INIT_STD),
        padding_id=None if model.padding_id is None else VOCABULARY - 1,
        kda=_shrink_kda(model.kda, heads=shrink_heads(model.kda.heads, was=was, parallel=parallel)),
        mla=_shrink_mla(model.mla, heads=shrink_heads(model.mla.heads, was=was, parallel=parallel)),
        moe=_shrink_moe(model.moe),
    )


def shrink_layout(layout: list[int], *, parallel: ParallelConfig, model: ModelConfig) -> list[int]:
    """An explicit cut's likeness: one layer a stage, and all others on the stage that had the most; [] stays."""
    if not layout:
        return []
    counts = [1] * (parallel.pp * parallel.vpp)
    largest = layout.index(max(layout)) * len(counts) // len(layout)
    counts[largest] += model.num_layers - len(counts)
    return counts


def kept_layers(model: ModelConfig, *, at_least: int) -> list[int]:
    """Layers (counted from 0) of the likeness: one of each kind, then the earliest others up to ``at_least``."""
    kinds = [(mixer, model.is_moe(i)) for i, mixer in enumerate(model.mixers)]
    kept = {kinds.index(kind) for kind in kinds}
    rest = [i for i in range(len(kinds)) if i not in kept]
    return sorted([*kept, *rest[: max(0, at_least - len(kept))]])


def shrink_heads(heads: int, *, was: ParallelConfig, parallel: ParallelConfig) -> int:
    """Few heads, which tp divides, and over which cp divides a tp rank's share exactly if it did before."""
    share = heads // was.tp
    if share > 1:
        share = AXIS if share % was.cp == 0 else AXIS + 1
    return share * parallel.tp


def _shrink_kda(kda: KDAConfig, *, heads: int) -> KDAConfig:
    return replace(kda, heads=heads, head_dim=HEAD)


def _shrink_mla(mla: MLAConfig, *, heads: int) -> MLAConfig:
    return replace(
        mla,
        heads=heads,
        q_rank=None if mla.q_rank is None else NARROW,
        kv_rank=NARROW,
        nope_dim=HEAD,
        rope_dim=HEAD // 2,
        value_dim=HEAD,
    )


def _shrink_moe(moe: MoEConfig) -> MoEConfig:
    return replace(
        moe,
        experts=EXPERTS,
        top_k=min(moe.top_k, 2),
        expert_dim=NARROW,
        latent_dim=None if moe.latent_dim is None else NARROW,
        shared_experts=min(moe.shared_experts, 2),
    )


def shrink_optim(optim: OptimConfig) -> OptimConfig:
    """The same optimizer, exact, in many buckets; where it clips gradients or attention logits, it will."""
    return replace(
        optim,
        ns_dtype="fp64",
        bucket_mb=min(optim.bucket_mb, 0.01),
        clip_norm=min(optim.clip_norm, 0.05),
        qk_clip=min(optim.qk_clip, 3.0),
    )


def changes(before: RunConfig, after: RunConfig) -> list[str]:
    """``key: old -> new`` of every value that differs."""
    old, new = flatten(before), flatten(after)
    return [f"{name}: {old[name]} -> {new[name]}" for name in old if old[name] != new[name]]
