"""One start of a run, in one process: check the config, join the other ranks, build, rehearse, train, and record it."""

import resource
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from configs.compose import ConfigError, compose_config
from configs.schema import validate
from data.output import Output
from launch.failures import DONE, STOPPED, Failures, edge, was_interrupted
from launch.record import LOG_FILE, append_record, describe_start, now
from launch.signals import stopping_at_signals
from launch.world import World
from parallel.mesh import build_mesh
from train.agreement import check_ranks
from train.allocator import keep_freed_memory
from train.build import Run, build_run
from train.config import RunConfig
from train.loop import show_report, train
from train.precision import resolve_precision
from train.progress import ProgressDisplay
from train.proof.shrink import ranks_of
from train.rehearse import rehearse
from train.resuming import check_folder
from train.run_folder import CONFIG_FILE, RunLock, explained, write_config, write_facts
from train.stopping import Stopping

REMEDY = "restore it or set another run.dir"


@dataclass
class Session:
    """What belongs to this process rather than to the run: its place, its output, what it says, when it began."""

    world: World = field(default_factory=World)
    output: Output = field(default_factory=Output)
    failures: Failures = field(default_factory=Failures)
    began: float = field(default_factory=time.monotonic)


def command(arguments: list[str], session: Session) -> int:
    """Compose the config and train, or print the config; returns the exit status."""
    with edge("configuration", remedy="correct the command line or the file that it names"):
        config = compose_config([argument for argument in arguments if argument != "--cfg"])
    if "--cfg" in arguments:
        return show(config, session.world)
    # Before anything reads it: so the run folder holds what the run computes in, whatever machine resumes it.
    config.train.precision = resolve_precision(config.train.precision, choose_device(session.world.local_rank))
    check(config, world_size=session.world.size, rank=session.world.rank)
    return run(config, session)


def show(config: RunConfig, world: World) -> int:
    """Print the configuration, and what is wrong with it on these ranks, or of one alone on those that it asks for."""
    if world.rank == 0:
        print(OmegaConf.to_yaml(OmegaConf.structured(config)), end="")
    if problems := validate(config, world_size=world.size if world.size > 1 else ranks_of(config.parallel)):
        raise ConfigError("\n".join(problems))
    return DONE


def check(config: RunConfig, *, world_size: int, rank: int) -> None:
    """Everything that can be known to be wrong before any process group starts.

    Raises:
        ConfigError: contradictions.
        ValueError: a run folder made by another config, or one that cannot be read.
    """
    with edge("configuration", remedy="correct the command line or the file that it names"):
        problems = validate(config, world_size=world_size)
    if problems:
        raise ConfigError("\n".join(problems))
    with edge(Path(config.run.dir) / CONFIG_FILE, remedy=REMEDY):
        allowed = check_folder(config)
    if allowed and rank == 0:
        print("resuming with " + ", ".join(allowed))


def run(config: RunConfig, session: Session) -> int:
    """Join the ranks and train; returns the exit status.

    A rank that fails leaves the others with a broken connection, so that they end too; see `launch.failures`.
    """
    world = session.world
    device = choose_device(world.local_rank)
    keep_freed_memory()
    raise_open_files()
    try:
        if world.size > 1:
            if world.rank == 0:
                print(f"waiting for all {world.size} ranks", flush=True)
            world.join("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=config.run.timeout)
        check_ranks(config)
        status = train_on(config, device=device, rank=world.rank, session=session)
        if dist.is_initialized():
            # Without it a rank may tear down its connections while another still uses them.
            dist.barrier()
        return status
    except Exception as error:
        if was_interrupted(error):
            raise KeyboardInterrupt from error
        # Now: to leave the group may take long.
        session.failures.say(error)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def raise_open_files() -> None:
    """Let this process open as many files as the system allows it to, as far as that is possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def train_on(config: RunConfig, *, device: torch.device, rank: int, session: Session | None = None) -> int:
    """Build the run on this rank and train it to its end; returns the exit status."""
    session = Session() if session is None else session
    folder = Path(config.run.dir)
    first = rank == 0
    with edge(f"run.dir={folder}", remedy="set another run.dir"):
        lock = RunLock(folder) if first else nullcontext()
    with lock:
        if first:
            session.output.log_to(folder / LOG_FILE)
        mesh = build_mesh(config.parallel, timeout=timedelta(seconds=config.run.timeout))
        built = build_run(config, mesh=mesh, device=device)
        rehearse(built)
        if not first:
            session.output.log_to(folder / LOG_FILE)
            return train_steps(built, config, session=session)
        start = describe_start()
        built.facts |= start
        # Only now: a command that could not be built must not lay claim to the folder.
        with edge(f"run.dir={folder}", remedy="set another run.dir"), explained(folder):
            write_config(folder, asdict(config))
            write_facts(folder, built.facts)
        print_heading(config, built.facts, begun_at=built.progress.step)
        append_record(folder, {"event": "start", "step": built.progress.step, "ranks": mesh.world.size, **start})
        return train_and_report(built, config, session=session)


def train_steps(built: Run, config: RunConfig, *, session: Session) -> int:
    """The steps of this rank, which a signal or the clock may end early; returns the exit status."""
    first = built.mesh.world.rank == 0
    stopping = Stopping(minutes=config.run.max_minutes, began=session.began)
    display = ProgressDisplay(config.train.steps, output=session.output, start_step=built.progress.step)
    session.failures.training = True
    with stopping_at_signals(stopping.request, speaks=first), display if first else nullcontext():
        done = train(
            built,
            on_step=display.update if first else None,
            on_failure=session.failures.say,
            stopping=stopping,
        )
    if done:
        return DONE
    if first:
        why = stopping.wanted() or "asked of another rank"
        kept = "the same command goes on from its checkpoint" if config.routing.saves else "no checkpoint is saved"
        print(f"stopped after step {built.progress.step} ({why}): {kept}")
    return STOPPED


def train_and_report(built: Run, config: RunConfig, *, session: Session) -> int:
    """`train_steps` on the rank that also writes the report and the record; returns the exit status."""
    folder, ended = built.folder, "failed"
    try:
        status = train_steps(built, config, session=session)
        ended = "done" if status == DONE else "stopped"
    except KeyboardInterrupt:
        ended = "interrupted"
        raise
    except BaseException as error:
        ended = f"failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        raise
    finally:
        append_record(folder, {"event": "end", "ended": now(), "step": built.progress.step, "how": ended})
        if ended not in ("done", "stopped"):
            # A run that failed is the one whose curves are wanted.
            show_report(folder)
    report = show_report(folder)
    print(f"run folder: {folder}" + (f"\nreport:     {report}" if report else ""))
    return status


def choose_device(local_rank: int) -> torch.device:
    """This rank's GPU, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def print_heading(config: RunConfig, facts: dict[str, Any], *, begun_at: int) -> None:
    """What is about to run, in a few lines."""
    batch = config.batch
    print(
        f"model: {facts['parameters']:,} parameters, {facts['active_parameters']:,} active per token "
        f"(without the embedding)\n"
        f"data:  {facts['training_tokens']:,} training tokens, "
        f"unigram entropy {facts['unigram_entropy']:.4f} nats/token\n"
        f"step:  {batch.sequences} sequences of {batch.length} tokens on {facts['ranks']} rank(s), "
        f"{facts['device']}, {facts['precision']}"
    )
    if facts["data_notes"]:
        print(f"note:  {facts['data_notes']}")
    if config.routing.force:
        kept = "checkpoints are saved all the same" if config.routing.saves else "no checkpoint is saved"
        print(f"FORCED ROUTING {config.routing.force}: a benchmark; loss and weights are worth nothing, {kept}")
    if begun_at >= config.train.steps:
        print(f"already done: {begun_at} of train.steps={config.train.steps} steps; raise train.steps to go on")
    elif begun_at:
        print(f"resumed after step {begun_at}")
    else:
        origin = f", from the weights of {facts['init_from']}" if facts["init_from"] else ""
        print(f"new run in {config.run.dir}{origin}")
    last = batch.tokens * config.train.steps
    if last > config.schedule.total_tokens:
        print(
            f"note:  the learning rate reaches its minimum at {config.schedule.total_tokens:,} of {last:,} tokens; "
            "schedule.total_tokens moves that point, where no step done would have had another rate"
        )
