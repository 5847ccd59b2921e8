"""From a validated config to a `Run`: each part of the config goes to one constructor, and no further."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from data.loader import Loader, open_loader
from model.config import ModelConfig
from model.flops import training_flops
from model.kimi import KimiModel
from model.mla import MLA
from model.params import named_roles, seed_from_name
from model.widen import in_fp32, wants_fp32_products
from optim.distributed import ShardedOptimizer
from optim.groups import OptimConfig, make_groups
from optim.qk_clip import QKClipTarget
from parallel.apply import Install, parallelize
from parallel.data import DataParallel
from parallel.expert.config import ExpertsConfig
from parallel.grads import EMBEDDING
from parallel.mesh import Axis, Mesh
from parallel.pipeline.deferred import DeferredGradients, deferral
from parallel.pipeline.layout import PipelineLayout, make_layout
from parallel.pipeline.runtime import Pipeline
from parallel.pipeline.stage import held_layers, parameter_stages, tied_to
from parallel.recompute import RecomputeConfig
from parallel.sharding import axis_of, parameter_specs
from parallel.tensor import cut_errors
from train.agreement import check_equal
from train.checkpoint import CheckpointStore
from train.checkpoint.contents import Progress, resume
from train.config import RunConfig
from train.forced_routing import ForcedRouting, RoutingSettings, parse_rule
from train.metrics import TrackerSet, load_run_id, make_trackers
from train.precision import DTYPES, describe_precision
from train.report.facts import bytes_per_token, run_facts
from train.routing_trace import RoutingRecorder
from train.run_folder import CHECKPOINTS, ROUTING_FILE, explained
from train.starting import start_from
from train.step import Stepper
from train.throughput import Throughput, matmul_rate, total_rate

logger = logging.getLogger(__name__)


@dataclass
class Rig:
    """What holds parameters and trains them: a run's, a proof's, and on every mesh."""

    mesh: Mesh
    model: KimiModel
    pipeline: Pipeline
    dp: DataParallel
    optimizer: ShardedOptimizer


@dataclass
class Run(Rig):
    """Everything that the loop uses, ready to go."""

    config: RunConfig
    folder: Path
    stepper: Stepper
    loader: Loader
    microbatch: int
    checkpoints: CheckpointStore
    trackers: TrackerSet
    throughput: Throughput
    forced: ForcedRouting | None
    recorder: RoutingRecorder | None
    progress: Progress
    facts: dict[str, Any]


def build_model(
    config: ModelConfig,
    *,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    mesh: Mesh | None = None,
    layout: PipelineLayout | None = None,
    experts: ExpertsConfig | None = None,
    recompute: RecomputeConfig | None = None,
    deferred: DeferredGradients | None = None,
    observers: Sequence[Install] = (),
) -> KimiModel:
    """A model with its first weights, drawn in fp32 and then cast: bf16 masters start from what bf16 holds.

    Args:
        mesh: this rank's place; the model holds this rank's slices and exchanges tokens over ep. None: one rank.
        layout: how the model is cut into pipeline stages, of which it holds this rank's. None: it is whole.
        experts: how rows of experts are shared over ep. None: the defaults.
        recompute: what is kept between forward and backward. None: everything.
        deferred: takes weight gradients that the pipeline's schedule puts off. None: none is put off.
        observers: what else is installed, last of all.

    Raises:
        ValueError: the experts cannot be spread, or other parameters not be cut, evenly.
    """
    mesh = Mesh() if mesh is None else mesh
    errors = cut_errors(config, tp=mesh.tp.size)
    if errors:
        raise ValueError("; ".join(errors))
    if config.moe_layers and config.moe.experts % mesh.ep.size:
        raise ValueError(
            f"parallel.ep={mesh.ep.size}: must divide model.moe.experts={config.moe.experts}, so that every rank holds "
            "as many; use a divisor of it"
        )
    with torch.device("meta"):
        model = KimiModel(config)
    parallelize(
        model,
        mesh=mesh,
        layout=layout,
        seed=seed,
        dtype=dtype,
        wide=wants_fp32_products(dtype, device),
        experts=experts or ExpertsConfig(),
        recompute=recompute or RecomputeConfig(),
        deferred=deferred,
        observers=observers,
    )
    return model.to(device)


def qk_clip_targets(model: KimiModel, *, tp: Axis) -> list[QKClipTarget]:
    """Where each MLA layer keeps the weights that QK-Clip scales, in order of the layers; of this tp rank's heads."""
    mla = model.config.mla
    names = {id(param): name for name, param in model.named_parameters()}
    return [
        QKClipTarget(
            query=names[id(layer.mixer.q.up.weight)],
            key_value=names[id(layer.mixer.kv_up.weight)],
            heads=layer.mixer.heads,
            first=tp.rank * layer.mixer.heads,
            nope=mla.nope_dim,
            rope=mla.rope_dim,
            value=mla.value_dim,
        )
        for layer in (model.layers[index] for index in held_layers(model))
        if isinstance(layer.mixer, MLA)
    ]


def build_optimizer(
    model: KimiModel, config: OptimConfig, *, mesh: Mesh, layout: PipelineLayout | None = None, zero: int = 1
) -> tuple[DataParallel, ShardedOptimizer]:
    """Data parallelism (``zero`` 1 or 2) and the sharded optimizer over all of the parameters that ``model`` holds.

    Args:
        layout: as for `build_model`; each virtual stage's gradients are reduced when its own last one has come.
    """
    params = dict(model.named_parameters())
    roles = named_roles(model)
    specs = parameter_specs(model, mesh=mesh)
    groups = make_groups(params, roles=roles, config=config, specs=specs)
    dp = DataParallel(
        params,
        axis=mesh.replicas,
        axes={name: axis_of(mesh, spec.copies) for name, spec in specs.items()},
        parts=None if layout is None else parameter_stages(model, layout),
        pinned=() if tied_to(model, mesh=mesh) is None else (EMBEDDING,),
        zero=zero,
        bucket_bytes=config.bucket_bytes,
        cost={name: group.cost for name, group in groups.items()},
    )
    targets = qk_clip_targets(model, tp=mesh.tp) if config.qk_clip > 0 else []
    optimizer = ShardedOptimizer(params, roles=roles, config=config, dp=dp, specs=specs, tp=mesh.tp, qk_targets=targets)
    return dp, optimizer


def build_rig(config: RunConfig, *, mesh: Mesh, device: torch.device, observers: Sequence[Install] = ()) -> Rig:
    """The model with its first weights on this rank of the mesh, and what trains it.

    Args:
        config: its ``parallel`` made ``mesh``, and says besides how layers are cut into stages and what data
            parallelism shards.
        observers: as for `build_model`.

    Raises:
        ValueError: the model cannot be cut so.
    """
    parallel = config.parallel
    layout = make_layout(parallel, config.model, length=config.batch.length)
    deferred = deferral(parallel.schedule)
    model = build_model(
        config.model,
        seed=config.run.seed,
        dtype=DTYPES[config.train.precision],
        device=device,
        mesh=mesh,
        layout=layout,
        experts=parallel.experts,
        recompute=config.recompute,
        deferred=deferred,
        observers=observers,
    )
    pipeline = Pipeline(
        model,
        mesh=mesh,
        layout=layout,
        schedule=parallel.schedule,
        deferred=deferred,
        loss_chunk=config.train.loss_chunk,
    )
    dp, optimizer = build_optimizer(model, config.optim, mesh=mesh, layout=layout, zero=parallel.zero)
    return Rig(mesh, model, pipeline, dp, optimizer)


def build_run(config: RunConfig, *, mesh: Mesh, device: torch.device) -> Run:
    """Build everything and, where the folder holds a checkpoint, continue from it.

    Args:
        config: free of errors.
        mesh: this rank's place.
        device: where the model runs.

    Raises:
        ValueError: the data cannot be used with this model or batch, or is not what the checkpoint continues on.
        CheckpointError: checkpoints exist and none can be loaded.
        OSError: the run folder cannot be written.
    """
    folder, world, seed = Path(config.run.dir), mesh.world, config.run.seed
    logger.info("opening the data")
    loader = open_loader(config.data, cache=Path(config.run.cache), vocab_size=config.model.vocab_size, seed=seed)
    data = {"data.sources": data_identity(loader), "their shares": data_shares(loader)}
    check_equal(data, remedy="give every rank the same data in the same order")
    logger.info("building the model")
    rule = parse_rule(config.routing.force)
    forced = None if rule is None else ForcedRouting(rule, seed=seed, axis=mesh.replicas)
    rig = build_rig(config, mesh=mesh, device=device, observers=() if forced is None else (forced.install,))
    store = CheckpointStore(
        folder / CHECKPOINTS,
        rank=world.rank,
        ranks=world.size,
        group=world.group,
        keep=config.checkpoint.keep,
        asynchronous=config.checkpoint.asynchronous,
        timeout=config.checkpoint.timeout,
        retries=config.checkpoint.retries,
    )
    torch.manual_seed(seed_from_name(seed, f"rank {world.rank}"))
    logger.info("looking for a checkpoint in %s", folder / CHECKPOINTS)
    progress = resume(store, rig.model, dp=rig.dp, optimizer=rig.optimizer, mesh=mesh)
    if progress is None:
        progress = Progress(loader.start())
        if config.run.init_from:
            logger.info("beginning from the weights in %s", config.run.init_from)
            progress.origin = start_from(config, rig.model, optimizer=rig.optimizer, mesh=mesh)
    loader = continue_data(progress, loader, seed=seed)
    progress.data, progress.shares = data_identity(loader), data_shares(loader)
    logger.info("measuring the device")
    dtype = DTYPES[config.train.precision]
    multiply = in_fp32(torch.matmul) if wants_fp32_products(dtype, device) else torch.matmul
    peak = total_rate(matmul_rate(device, dtype, multiply=multiply), axis=world)
    with explained(folder):
        trackers = make_trackers(
            config.trackers,
            run_dir=folder,
            run_id=load_run_id(folder) if world.rank == 0 else "",
            config_dict=asdict(config),
            resume_step=progress.step,
            rank=world.rank,
        )
    return Run(
        **vars(rig),
        config=config,
        folder=folder,
        stepper=Stepper(rig.pipeline, dp=rig.dp, optimizer=rig.optimizer),
        loader=loader,
        microbatch=config.batch.microbatch_of(dp=mesh.dp.size, pp=mesh.pp.size),
        checkpoints=store,
        trackers=trackers,
        throughput=Throughput(flops_per_token=training_flops(config.model, length=config.batch.length), peak=peak),
        forced=forced,
        recorder=make_recorder(config.routing, config.model, folder=folder, resume_step=progress.step, rank=world.rank),
        progress=progress,
        facts={
            **describe(config.model, loader),
            **run_facts(folder),
            "matmul_flops_per_second": peak,
            "ranks": world.size,
            "device": str(device),
            "init_from": progress.origin or None,
            "precision": describe_precision(config.train.precision, device),
        },
    )


def data_identity(loader: Loader) -> tuple[str, ...]:
    """The content hash of each source: what decides which samples a position means, wherever the data lies."""
    return tuple(source.store.manifest.content_hash for source in loader.sources)


def data_shares(loader: Loader) -> tuple[float, ...]:
    """Each source's share of the samples."""
    total = sum(source.weight for source in loader.sources)
    return tuple(source.weight / total for source in loader.sources)


def continue_data(progress: Progress, loader: Loader, *, seed: int) -> Loader:
    """The loader whose sources are those of the checkpoint and in its order, wherever they lie and are named now.

    A checkpoint from before its identity was kept is taken as is.

    Raises:
        ValueError: naming each source that differs.
    """
    loader.check_order(progress.position)
    if not progress.data:
        return loader
    now = list(zip(data_identity(loader), data_shares(loader)))
    # One from before the shares were kept: the weights are taken as they are.
    before = list(zip(progress.data, progress.shares or data_shares(loader)))
    left, order = list(range(len(now))), []
    for source in before:
        found = next((index for index in left if now[index] == source), None)
        if found is not None:
            left.remove(found)
            order.append(found)
    if len(order) == len(before) == len(now):
        return loader if order == sorted(order) else Loader([loader.sources[index] for index in order], seed=seed)
    raise ValueError(
        f"data.sources: step {progress.step} was trained on other data than is now in "
        f"{_other_data(before, now, loader)}, so its position would point at other samples; restore the data, or set "
        "another run.dir to begin anew"
    )


def _other_data(before: list[tuple[str, float]], now: list[tuple[str, float]], loader: Loader) -> str:
    """Which sources differ, and in what."""
    if len(before) != len(now):
        return f"data.sources ({len(before)} source(s) -> {len(now)})"
    found = []
    for source, (old, old_share), (new, new_share) in zip(loader.sources, before, now):
        if old != new:
            found.append(f"{source.store.folder} (content_hash {old} -> {new})")
        elif old_share != new_share:
            found.append(f"{source.store.folder} (share of the samples {old_share:g} -> {new_share:g})")
    return ", ".join(found)


def make_recorder(
    routing: RoutingSettings, config: ModelConfig, *, folder: Path, resume_step: int, rank: int
) -> RoutingRecorder | None:
    """What records the experts' loads, on the one rank that does, if it is asked for."""
    if not routing.trace or rank != 0:
        return None
    path, layers = folder / ROUTING_FILE, config.moe_layers
    return RoutingRecorder(path, layers=layers, top_k=config.moe.top_k, resume_step=resume_step)


def describe(config: ModelConfig, loader: Loader) -> dict[str, Any]:
    """Facts of the model and its data, for the heading and the report."""
    total, active = config.count_parameters()
    return {
        "parameters": total,
        "active_parameters": active,
        "unigram_entropy": loader.unigram_entropy(),
        "training_tokens": loader.num_tokens(),
        "bytes_per_token": bytes_per_token(loader),
        "data_notes": "; ".join(loader.notes()) or None,
    }
