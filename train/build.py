"""From a validated config to a `Run`: each part of the config goes to one constructor, and no further."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from data.loader import DataConfig, Loader, open_loader
from model.config import ModelConfig
from model.kimi import KimiModel
from model.mla import MLA
from model.params import named_roles, seed_from_name
from model.precision import set_precision
from optim.distributed import ShardedOptimizer
from optim.groups import OptimConfig, make_groups
from optim.qk_clip import QKClipTarget
from parallel.apply import parallelize
from parallel.cost import training_flops
from parallel.data import DataParallel
from parallel.grads import EMBEDDING
from parallel.mesh import Axis, ExpertsConfig, Mesh, ParallelConfig
from parallel.pipeline.layout import PipelineLayout, make_layout
from parallel.pipeline.runtime import Pipeline
from parallel.pipeline.stage import held_layers, keep_part, parameter_stages, tied_to
from parallel.recompute import RecomputeConfig
from parallel.sharding import axis_of, materialize, parameter_specs
from parallel.tensor import cut_errors
from train.checkpoint import CheckpointConfig, CheckpointStore
from train.checkpoint.contents import Progress, resume
from train.forced_routing import ForcedRouting, RoutingSettings, parse_rule
from train.metrics import TrackerConfig, TrackerSet, load_run_id, make_trackers
from train.phases import BatchConfig, ScheduleConfig
from train.routing_trace import RoutingRecorder
from train.run_folder import CHECKPOINTS, ROUTING_FILE, explained
from train.settings import EvaluateSettings, RunSettings, TrainSettings
from train.step import Stepper
from train.throughput import Throughput, matmul_rate, sum_over_ranks

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass
class Run:
    """Everything that the loop uses, ready to go."""

    folder: Path
    mesh: Mesh
    model: KimiModel
    pipeline: Pipeline
    dp: DataParallel
    optimizer: ShardedOptimizer
    stepper: Stepper
    loader: Loader
    checkpoints: CheckpointStore
    trackers: TrackerSet
    throughput: Throughput
    batch: BatchConfig
    schedule: ScheduleConfig
    train: TrainSettings
    evaluate: EvaluateSettings
    checkpoint: CheckpointConfig
    routing: RoutingSettings
    forced: ForcedRouting | None
    recorder: RoutingRecorder | None
    peak_lr: float
    seed: int
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
) -> KimiModel:
    """A model with its first weights, drawn in fp32 and then cast: bf16 masters start from what bf16 holds.

    Args:
        mesh: this rank's place; the model holds this rank's slices and exchanges tokens over ep. None: one rank.
        layout: how the model is cut into pipeline stages, of which it holds this rank's. None: it is whole.
        experts: how rows of experts are shared over ep. None: the defaults.
        recompute: what is kept between forward and backward. None: everything.

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
    if layout is not None:
        stages = layout.stages_of(mesh.pp.rank)
        keep_part(model, layout.layers_of(mesh.pp.rank), first=0 in stages, last=layout.last in stages)
    materialize(model, mesh=mesh, seed=seed, std=config.init_std)
    set_precision(model, dtype)
    parallelize(model, mesh=mesh, experts=experts or ExpertsConfig(), recompute=recompute or RecomputeConfig())
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
        axis=mesh.stage,
        axes={name: axis_of(mesh, spec.owners) for name, spec in specs.items()},
        parts=None if layout is None else parameter_stages(model, layout),
        pinned=() if tied_to(model, mesh=mesh) is None else (EMBEDDING,),
        zero=zero,
        bucket_bytes=config.bucket_bytes,
        cost={name: group.cost for name, group in groups.items()},
    )
    targets = qk_clip_targets(model, tp=mesh.tp) if config.qk_clip > 0 else []
    optimizer = ShardedOptimizer(params, roles=roles, config=config, dp=dp, specs=specs, tp=mesh.tp, qk_targets=targets)
    return dp, optimizer


def build_run(
    *,
    mesh: Mesh,
    parallel: ParallelConfig,
    recompute: RecomputeConfig,
    device: torch.device,
    settings: RunSettings,
    model_config: ModelConfig,
    data: DataConfig,
    batch: BatchConfig,
    schedule: ScheduleConfig,
    optim: OptimConfig,
    train: TrainSettings,
    evaluate: EvaluateSettings,
    checkpoint: CheckpointConfig,
    trackers: TrackerConfig,
    routing: RoutingSettings,
    config_dict: dict[str, Any],
) -> Run:
    """Build everything and, where the folder holds a checkpoint, continue from it.

    Args:
        mesh: this rank's place.
        parallel: its mesh's config, for the cut into pipeline stages and what data parallelism shards.
        recompute: what is kept between forward and backward.
        device: where the model runs.
        settings, ..., routing: the parts of the validated config.
        config_dict: the effective config, for trackers that show it.

    Raises:
        ValueError: the data cannot be used with this model or batch, or is not what the checkpoint continues on.
        CheckpointError: checkpoints exist and none can be loaded.
        OSError: the run folder cannot be written.
    """
    folder = Path(settings.dir)
    loader = open_loader(data, cache=Path(settings.cache), vocab_size=model_config.vocab_size, seed=settings.seed)
    dtype = DTYPES[train.precision]
    layout = make_layout(parallel, model_config, length=batch.length)
    model = build_model(
        model_config,
        seed=settings.seed,
        dtype=dtype,
        device=device,
        mesh=mesh,
        layout=layout,
        experts=parallel.experts,
        recompute=recompute,
    )
    pipeline = Pipeline(model, mesh=mesh, layout=layout, schedule=parallel.schedule, loss_chunk=train.loss_chunk)
    dp, optimizer = build_optimizer(model, optim, mesh=mesh, layout=layout, zero=parallel.zero)
    store = CheckpointStore(
        folder / CHECKPOINTS,
        rank=mesh.world.rank,
        ranks=mesh.world.size,
        group=mesh.world.group,
        keep=checkpoint.keep,
        asynchronous=checkpoint.asynchronous,
        timeout=checkpoint.timeout,
        retries=checkpoint.retries,
    )
    if routing.saves:
        store.rehearse()
    torch.manual_seed(seed_from_name(settings.seed, f"rank {mesh.world.rank}"))
    progress = resume(store, model, dp=dp, optimizer=optimizer, mesh=mesh) or Progress(loader.start())
    check_data(progress, loader)
    progress.data = data_identity(loader)
    rule = parse_rule(routing.force)
    peak = sum_over_ranks(matmul_rate(device, dtype), group=mesh.world.group)
    with explained(folder):
        tracker_set = make_trackers(
            trackers,
            run_dir=folder,
            run_id=load_run_id(folder) if mesh.world.rank == 0 else "",
            config_dict=config_dict,
            resume_step=progress.step,
            rank=mesh.world.rank,
        )
    return Run(
        folder=folder,
        mesh=mesh,
        model=model,
        pipeline=pipeline,
        dp=dp,
        optimizer=optimizer,
        stepper=Stepper(pipeline, dp=dp, optimizer=optimizer),
        loader=loader,
        checkpoints=store,
        trackers=tracker_set,
        throughput=Throughput(flops_per_token=training_flops(model_config, length=batch.length), peak=peak),
        batch=batch,
        schedule=schedule,
        train=train,
        evaluate=evaluate,
        checkpoint=checkpoint,
        routing=routing,
        forced=None if rule is None else ForcedRouting(model, rule, seed=settings.seed, axis=mesh.stage),
        recorder=make_recorder(routing, model_config, folder=folder, resume_step=progress.step, rank=mesh.world.rank),
        peak_lr=optim.lr,
        seed=settings.seed,
        progress=progress,
        facts={
            **describe(model_config, loader),
            "matmul_flops_per_second": peak,
            "ranks": mesh.world.size,
            "device": str(device),
            "precision": train.precision,
        },
    )


def data_identity(loader: Loader) -> tuple[str, ...]:
    """The content hash of each source: what decides which samples a position means, wherever the data lies."""
    return tuple(source.store.manifest.content_hash for source in loader.sources)


def check_data(progress: Progress, loader: Loader) -> None:
    """Refuse to continue on other data than the checkpoint's; one from before its identity was kept is taken as is.

    Raises:
        ValueError: naming each source that differs.
    """
    if not progress.data:
        return
    sources = zip(loader.sources, progress.data, data_identity(loader), strict=True)
    other = [f"{source.store.folder} (content_hash {old} -> {new})" for source, old, new in sources if old != new]
    if other:
        raise ValueError(
            f"data.sources: step {progress.step} was trained on other data than is now in {', '.join(other)}, so its "
            "position would point at other samples; restore the data, or set another run.dir to begin anew"
        )


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
    }
