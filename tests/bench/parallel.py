"""What parallelism costs against what `launch.plan` says: ``python -m tests.bench.parallel``.

    traffic    calls and bytes of every collective of a step on gloo ranks; must be equal
    memory     peak of a rank, as `tests.bench.live` counts it
    bubble     idle time of pipeline schedules by simulated clock
    overhead   CPU time that the code of each axis adds where its size is 1

The model is small, but no term of the memory formulas is negligible in it. Exit status 1 if a byte is unaccounted for.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from data.loader import Microbatch
from launch.plan.memory import Memory, rank_memory
from launch.plan.step import StepPlan
from launch.plan.traffic import Predicted, step_traffic
from model.config import KDAConfig, MLAConfig, ModelConfig, MoEConfig
from model.dispatch import SEGMENT_ALIGNMENT
from model.kimi import KimiModel
from model.loss import chunked_cross_entropy
from model.moe import MoE
from model.params import initialize
from optim.groups import OptimConfig
from parallel.config import ParallelConfig
from parallel.context.layout import slice_tokens
from parallel.expert.dispatch import AllToAllDispatcher
from parallel.mesh import Mesh, make_mesh
from parallel.pipeline.layout import PipelineLayout, split_evenly
from parallel.pipeline.schedule import SPLIT_COSTS, UNSPLIT_COSTS, make_schedule, simulate
from parallel.recompute import RecomputeConfig
from parallel.tensor import RegionDispatcher, head_loss
from tests.bench.live import LiveMemory, bytes_of
from tests.dist.ranks import RankPool
from train.build import build_model
from train.proof.parity import LOSS_CHUNK, Case, build
from train.step import Stepper, to_device

CPU = torch.device("cpu")
LENGTH, MICROBATCHES = 256, 4
OPTIM = OptimConfig(bucket_mb=0.25)
SMALL = ModelConfig(
    vocab_size=1024,
    hidden_dim=96,
    layers="KKKM*2",
    dense_dim=256,
    residual_block=4,
    kda=KDAConfig(heads=4, head_dim=16),
    mla=MLAConfig(heads=4, q_rank=32, kv_rank=32, nope_dim=16, rope_dim=8, value_dim=16),
    moe=MoEConfig(experts=8, top_k=2, expert_dim=64, latent_dim=64, shared_experts=1),
)
MESHES = {
    "dp4": (ParallelConfig(dp=4), "none"),
    "dp4 zero2": (ParallelConfig(dp=4, zero=2), "none"),
    "dp4 selective": (ParallelConfig(dp=4), "selective"),
    "dp4 full": (ParallelConfig(dp=4), "full"),
    "ep4": (ParallelConfig(dp=4, ep=4), "none"),
    "cp4": (ParallelConfig(cp=4), "none"),
    "tp4": (ParallelConfig(tp=4), "none"),
    "tp2 dp2 ep2": (ParallelConfig(tp=2, dp=2, ep=2), "none"),
    "pp4": (ParallelConfig(pp=4), "none"),
    "pp2 vpp2 cp2": (ParallelConfig(pp=2, vpp=2, cp=2), "none"),
}
"""Meshes of four ranks, and what is recomputed on them."""


@dataclass(frozen=True)
class Measured:
    """One step on one rank.

    traffic: calls and bytes sent, by name.
    crossing: (token, choice) rows whose expert was on another ep rank.
    rows: rows that the rank's experts computed in a layer and microbatch on average, padding included; None: ep is 1.
    static, peak: bytes of tensors between steps, and at most.
    """

    traffic: dict[str, Predicted]
    crossing: int
    rows: float | None
    static: int
    peak: int


class RoutingCounter:
    """Watches the counts that every dispatcher of a model makes its plan from.

    crossing, computed: as in `Measured`, computed for each plan.
    """

    def __init__(self, model: KimiModel) -> None:
        self.crossing = 0
        self.computed: list[int] = []
        for module in model.modules():
            if isinstance(module, MoE):
                dispatcher = module.dispatcher
                while isinstance(dispatcher, RegionDispatcher):
                    dispatcher = dispatcher.inner
                if isinstance(dispatcher, AllToAllDispatcher):
                    self._watch(dispatcher)

    def _watch(self, dispatcher: AllToAllDispatcher) -> None:
        make_plan, axis = dispatcher.make_plan, dispatcher.axis

        def watched(counts_RE: Tensor) -> object:
            own = slice(axis.rank * counts_RE.shape[1] // axis.size, (axis.rank + 1) * counts_RE.shape[1] // axis.size)
            self.crossing += int(counts_RE[axis.rank].sum() - counts_RE[axis.rank, own].sum())
            blocks = -(-counts_RE[:, own].sum(dim=0) // SEGMENT_ALIGNMENT)
            self.computed.append(int(blocks.sum()) * SEGMENT_ALIGNMENT)
            return make_plan(counts_RE)

        dispatcher.make_plan = watched  # type: ignore[assignment]


def make_case(
    config: ModelConfig, *, length: int, microbatches: int, dp: int, dtype: torch.dtype, recompute: str = "none"
) -> Case:
    """One step on random tokens."""
    model = KimiModel(config)
    initialize(model, seed=0, std=config.init_std)
    step = []
    for seed in range(dp * microbatches):
        ids = torch.randint(1, config.vocab_size, (2, 1, length), generator=torch.Generator().manual_seed(seed))
        samples = torch.zeros(1, 3).long().numpy()
        step.append(Microbatch(input_ids=ids[0], labels=ids[1], cu_seqlens=None, sample_ids=samples))
    return Case(config, dict(model.state_dict()), (tuple(step),), OPTIM, dtype, RecomputeConfig(policy=recompute))


def plan_of(case: Case, config: ParallelConfig, *, world_size: int) -> StepPlan:
    """The step of ``case`` on a mesh, for `launch.plan`."""
    dp = config.resolved_dp(world_size)
    return StepPlan(
        model=case.config,
        parallel=config,
        world_size=world_size,
        length=case.steps[0][0].input_ids.shape[1],
        microbatches=len(case.steps[0]) // dp,
        dtype=case.dtype,
        loss_chunk=LOSS_CHUNK,
        recompute=case.recompute.policy,
        optim=case.optim,
        sends_linger=True,
    )


def measure_step(case: Case, config: ParallelConfig, world_size: int) -> Measured:
    """Train one step on this rank. Collective."""
    rig = build(case, make_mesh(config, world_size), config)
    rig.first.clear()
    routing = RoutingCounter(rig.model)
    mesh, stepper = rig.mesh, Stepper(rig.pipeline, dp=rig.dp, optimizer=rig.optimizer)
    kept = [*rig.model.parameters(), *rig.model.buffers(), *rig.optimizer.state_dict().values()]
    # Gradient sums are seen when they are set to zero, so only they are in both numbers.
    static = bytes_of(kept)
    gradients = rig.dp.gradient_bytes()
    with LiveMemory(kept) as live:
        stepper.step(case.steps[0][mesh.dp.rank :: mesh.dp.size], lr=0.01)
    traffic = mesh.world.traffic
    moved = {name: Predicted(calls, traffic.sent[name]) for name, calls in traffic.calls.items()}
    rows = statistics.mean(routing.computed) if routing.computed else None
    return Measured(moved, routing.crossing, rows, static + gradients, static + live.peak)


def measure(pool: RankPool, case: Case, config: ParallelConfig) -> list[Measured]:
    """`measure_step` on every rank."""
    return pool.run(measure_step, case, config, pool.size)


def compare_traffic(plan: StepPlan, ranks: Sequence[Measured]) -> dict[str, tuple[Predicted, Predicted]]:
    """By name, what all ranks together moved and what `launch.plan.traffic` says."""
    found: dict[str, Predicted] = {}
    for rank in ranks:
        for name, moved in rank.traffic.items():
            before = found.get(name, Predicted(0, 0))
            found[name] = Predicted(before.calls + moved.calls, before.sent + moved.sent)
    crossing = sum(rank.crossing for rank in ranks)
    expected = {
        name: Predicted(moved.calls, round(moved.sent))
        for name, moved in step_traffic(plan, crossing_rows=crossing).items()
    }
    nothing = Predicted(0, 0)
    return {
        name: (found.get(name, nothing), expected.get(name, nothing)) for name in sorted(found.keys() | expected.keys())
    }


def compare_memory(plan: StepPlan, ranks: Sequence[Measured]) -> list[tuple[Measured, Memory]]:
    """For each rank what was measured and what `launch.plan.memory` says."""
    return [(rank, rank_memory(plan, rank=i, rows=rank.rows)) for i, rank in enumerate(ranks)]


def table(title: str, *columns: str) -> Table:
    made = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right")
    return made


def traffic_table(found: Mapping[str, Mapping[str, tuple[Predicted, Predicted]]]) -> Table:
    """One row for each mesh and collective: over all ranks, measured, and what the formulas say."""
    made = table("collectives of one step, all ranks", "mesh", "collective", "calls", "bytes", "formulas")
    for mesh, by_name in found.items():
        for name, (measured, expected) in by_name.items():
            same = measured == expected
            verdict = "equal" if same else f"{expected.calls:,} calls, {expected.sent:,} bytes"
            made.add_row(mesh, name, f"{measured.calls:,}", f"{measured.sent:,}", verdict)
    return made


def memory_table(found: Mapping[str, Sequence[tuple[Measured, Memory]]]) -> Table:
    """One row for each mesh and policy, of the rank whose estimate is worst."""
    made = table("peak memory of a rank, KiB", "mesh", "between steps", "peak", "estimate", "off by")
    for mesh, ranks in found.items():
        measured, memory = max(ranks, key=lambda pair: abs(off_by(*pair)))
        made.add_row(
            mesh,
            f"{measured.static / 1024:,.0f}",
            f"{measured.peak / 1024:,.0f}",
            f"{memory.peak / 1024:,.0f}",
            f"{off_by(measured, memory):+.1%}",
        )
    return made


def off_by(measured: Measured, memory: Memory) -> float:
    """How much the estimate of the peak is too large, relative to it."""
    return memory.peak / measured.peak - 1


def bubble_table(*, ranks: int, microbatches: int) -> Table:
    """Schedules by simulated clock: a forward takes 1, a backward 2 (1 + 1 where the weights' part is split off)."""
    made = table(
        f"bubble, {ranks} ranks, {microbatches} microbatches",
        "schedule",
        "stages a rank",
        "simulated",
        "theory",
        "held",
    )
    plain = (ranks - 1) / microbatches
    for name, stages, theory in [
        ("gpipe", 1, plain),
        ("1f1b", 1, plain),
        ("interleaved", 2, plain / 2),
        ("interleaved", 4, plain / 4),
        ("zero_bubble", 1, plain / 3),
    ]:
        layout = PipelineLayout(split_evenly(ranks * stages * 2, ranks * stages), ranks=ranks)
        schedule = make_schedule(name, layout, microbatches=microbatches)
        clock = simulate(schedule, layout, costs=SPLIT_COSTS if name == "zero_bubble" else UNSPLIT_COSTS)
        made.add_row(name, str(stages), f"{clock.bubble:.3f}", f"{theory:.3f}", str(max(clock.held)))
    return made


def overhead_table(*, repeats: int) -> Table:
    """CPU time of forward and backward on one rank: the plain model, and with one axis' code at size 1 at a time."""
    plain, *others = variants()
    times: dict[str, list[float]] = {name: [] for name, _ in others}
    plain[1]()
    for name, action in others:
        action()
        for _ in range(repeats):
            # In turns and next to each other, so that whatever slows the machine slows both.
            times[name].append(cpu_seconds(action) / cpu_seconds(plain[1]))
    made = table(f"time added at size 1, {repeats} pairs", "code", "median")
    for name, ratios in times.items():
        made.add_row(name, f"{statistics.median(ratios) - 1:+.2%}")
    return made


def cpu_seconds(action: Callable[[], object]) -> float:
    """CPU time of one call."""
    started = time.process_time()
    action()
    return time.process_time() - started


def variants() -> list[tuple[str, Callable[[], None]]]:
    """Forward and backward of a microbatch, gradients added up from zero: by hand, and by each axis' code at size 1."""
    case = make_case(SMALL, length=LENGTH, microbatches=1, dp=1, dtype=torch.float32)
    ids, labels = case.steps[0][0].input_ids, case.steps[0][0].labels
    mesh = Mesh()
    plain, rig = KimiModel(SMALL), build(case, mesh)
    plain.load_state_dict(case.values)
    swapped = build_model(SMALL, seed=0, dtype=torch.float32, device=CPU, mesh=mesh)
    sums = [torch.zeros_like(param) for param in plain.parameters()]

    def by_hand(model: KimiModel, *, context: bool = False, tensor: bool = False) -> None:
        torch._foreach_zero_(sums)
        tokens = slice_tokens(ids, labels, None, axis=mesh.cp) if context else None
        hidden = model.hidden(ids) if tokens is None else model.hidden(tokens.input_ids, documents=tokens.documents)
        if tensor:
            loss = head_loss(
                hidden, model.head.weight, labels, axis=mesh.tp, chunk=LOSS_CHUNK, product=model.head.product
            )
        else:
            loss = chunked_cross_entropy(hidden, model.head.weight, labels, chunk=LOSS_CHUNK)
        (loss / LENGTH).backward()
        for total, param in zip(sums, model.parameters(), strict=True):
            # The first layer's mix has one source and so no gradient.
            if param.grad is not None:
                total.add_(param.grad)
                param.grad = None

    def data() -> None:
        rig.dp.zero_gradients()
        with rig.dp.backward(last=True):
            loss = chunked_cross_entropy(rig.model.hidden(ids), rig.model.head.weight, labels, chunk=LOSS_CHUNK)
            (loss / LENGTH).backward()
        rig.dp.finish()

    def pipeline() -> None:
        rig.dp.zero_gradients()
        batch = to_device(case.steps[0][0], device=CPU, cp=mesh.cp)
        rig.pipeline.train([batch], labels=LENGTH, stats=None, dp=rig.dp)
        rig.dp.finish()

    return [
        ("plain", lambda: by_hand(plain)),
        ("expert, recompute: swapped in", lambda: by_hand(swapped)),
        ("context", lambda: by_hand(plain, context=True)),
        ("tensor", lambda: by_hand(plain, tensor=True)),
        ("data", data),
        ("pipeline, with all of these", pipeline),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=120)
    traffic, memory = {}, {}
    with RankPool(4) as pool:
        for name, (config, recompute) in MESHES.items():
            dp = config.resolved_dp(4)
            case = make_case(
                SMALL, length=LENGTH, microbatches=MICROBATCHES, dp=dp, dtype=torch.bfloat16, recompute=recompute
            )
            plan, ranks = plan_of(case, config, world_size=4), measure(pool, case, config)
            traffic[name], memory[name] = compare_traffic(plan, ranks), compare_memory(plan, ranks)
    console.print(traffic_table(traffic))
    console.print(memory_table(memory))
    console.print(bubble_table(ranks=4, microbatches=16))
    console.print(overhead_table(repeats=arguments.repeats))
    return int(any(found != expected for by_name in traffic.values() for found, expected in by_name.values()))


if __name__ == "__main__":
    sys.exit(main())
