"""Train: compose and check the config, join the other ranks, run the loop.

    torchrun --nproc-per-node=2 -m launch.train experiment=demo optim.lr=2e-3
    python -m launch.train run.dir=runs/mine train.steps=50

The same command with the same run folder resumes. Exit status: 0 done, 1 the run failed (what was saved is
intact), 2 the configuration or data cannot be used, 130 interrupted (Ctrl-C).
"""

import logging
import os
import re
import sys
import traceback
import warnings
from contextlib import nullcontext, suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from configs.compose import ConfigError, compose_config
from configs.schema import validate
from parallel.mesh import build_mesh
from train.agreement import check_ranks
from train.allocator import keep_freed_memory
from train.build import build_run
from train.checkpoint import CheckpointError
from train.config import RunConfig
from train.loop import TrainingFailed, train
from train.precision import resolve_precision
from train.progress import ProgressDisplay
from train.proof.shrink import ranks_of
from train.report import write_report
from train.resuming import check_folder
from train.run_folder import RunLock, explained, write_config, write_facts

USAGE = """usage: [torchrun --nproc-per-node=N] -m launch.train [OPTIONS] [KEY=VALUE ...]

KEY=VALUE            override a config key or choose a group: train.steps=50, model=kimi_k3_small
--cfg                print the effective config, check it, and exit
--config-dir FOLDER  more choices: FOLDER/experiment/NAME.yaml for experiment=NAME, FOLDER/model/NAME.yaml
--config FILE        start from a whole configuration, such as a run's own config.yaml
"""

INTERRUPTED = 130
"""Exit status after Ctrl-C, as of a command that the signal ended."""


def main(arguments: list[str]) -> int:
    """Run the command; returns its exit status."""
    if "--help" in arguments or "-h" in arguments:
        print(USAGE, end="")
        return 0
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    try:
        config = compose_config([argument for argument in arguments if argument != "--cfg"])
        if "--cfg" in arguments:
            return show(config, world_size=world_size, rank=rank)
        # Before anything reads it: so the run folder holds what the run computes in, whatever machine resumes it.
        config.train.precision = resolve_precision(config.train.precision, choose_device(local_rank))
        check(config, world_size=world_size, rank=rank)
        return run(config, world_size=world_size, rank=rank, local_rank=local_rank)
    except (ConfigError, ValueError) as error:
        return complain(error, rank=rank, status=2)
    except (CheckpointError, TrainingFailed) as error:
        return complain(error, rank=rank, status=1)
    except OSError as error:
        # A machine's own storage: perhaps no other rank sees it.
        return complain(error, rank=0, status=1) if world_size == 1 else fail(error, rank=rank)
    except MemoryError as error:
        # Of one rank alone; with several, `run` has dealt with it.
        return complain(error, rank=0, status=1)
    except KeyboardInterrupt:
        if rank == 0:
            print("interrupted: the same command goes on from the last checkpoint, if there is one", file=sys.stderr)
        return INTERRUPTED


def show(config: RunConfig, *, world_size: int, rank: int) -> int:
    """Print the configuration, and what is wrong with it on these ranks, or of one alone on those that it asks for."""
    if rank == 0:
        print(OmegaConf.to_yaml(OmegaConf.structured(config)), end="")
    problems = validate(config, world_size=world_size if world_size > 1 else ranks_of(config.parallel))
    return complain(ConfigError("\n".join(problems)), rank=rank, status=2) if problems else 0


def check(config: RunConfig, *, world_size: int, rank: int) -> None:
    """Everything that can be known to be wrong before any process group starts.

    Raises:
        ValueError: contradictions, or a run folder made by another config.
    """
    problems = validate(config, world_size=world_size)
    if problems:
        raise ConfigError("\n".join(problems))
    allowed = check_folder(config)
    if allowed and rank == 0:
        print("resuming with " + ", ".join(allowed))


def run(config: RunConfig, *, world_size: int, rank: int, local_rank: int) -> int:
    """Join the ranks and train.

    A rank that fails leaves the others with a broken connection, so that they end too; see `fail`.
    """
    device = choose_device(local_rank)
    keep_freed_memory()
    if world_size > 1:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=config.run.timeout))
    try:
        check_ranks(config)
        status = train_on(config, device=device, rank=rank)
        if dist.is_initialized():
            # Without it a rank may tear down its connections while another still uses them.
            dist.barrier()
        return status
    except KeyboardInterrupt:
        if world_size > 1:
            # So that what other ranks run into is not taken for the first failure.
            first_to_fail()
        raise
    except Exception as error:
        if was_interrupted(error):
            raise KeyboardInterrupt from error
        if isinstance(error, CheckpointError | TrainingFailed):
            # The same on all ranks.
            raise
        short = too_little_memory(error, device=device)
        if world_size > 1:
            return fail(short or error, rank=rank)
        if short is None:
            raise
        raise short from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def was_interrupted(error: BaseException) -> bool:
    """Whether the error came up while the end after Ctrl-C was under way, as where other ranks have gone already."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, KeyboardInterrupt):
        link = link.__cause__ or link.__context__
    return link is not None


def too_little_memory(error: Exception, *, device: torch.device) -> MemoryError | None:
    """One line for what torch says at length where an allocation fails; None for another error."""
    wanted = re.search(r"ried to allocate ([\d.]+ \w+)", str(error))
    if wanted is None or not isinstance(error, RuntimeError):
        return None
    return MemoryError(
        f"{device}: not enough memory: {wanted[1]} more were asked for at once; lower batch.microbatch or "
        "batch.length, choose a smaller model or more recompute, or spread it over more ranks"
    )


def fail(error: Exception, *, rank: int) -> int:
    """Say what went wrong on this rank; returns its exit status.

    Only the first rank to fail says it in full: what the others run into is that it has gone.
    """
    expected = isinstance(error, ValueError | OSError | MemoryError)
    if not first_to_fail():
        print(f"rank {rank} ends because another failed first: {error}".splitlines()[0], file=sys.stderr)
    elif expected:
        print(f"error: rank {rank}: {error}", file=sys.stderr)
    else:
        print(f"error: rank {rank}:\n{''.join(traceback.format_exception(error))}", end="", file=sys.stderr)
    return 2 if isinstance(error, ValueError) else 1


def first_to_fail() -> bool:
    """Whether no other rank has asked this before; true as well if that cannot be found out any more."""
    try:
        # A connection of its own: that of the process group may be what failed.
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=5))
        # torchrun's store outlives its restarts.
        return store.add(f"failed/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", 1) == 1
    except (RuntimeError, OSError, KeyError):
        return True


def train_on(config: RunConfig, *, device: torch.device, rank: int) -> int:
    """Build the run on this rank and train it to its end."""
    folder = Path(config.run.dir)
    first = rank == 0
    with RunLock(folder) if first else nullcontext():
        mesh = build_mesh(config.parallel, timeout=timedelta(seconds=config.run.timeout))
        built = build_run(config, mesh=mesh, device=device)
        if not first:
            train(built)
            return 0
        # Only now: a command that could not be built must not lay claim to the folder.
        with explained(folder):
            write_config(folder, asdict(config))
            write_facts(folder, built.facts)
        print_heading(config, built.facts, begun_at=built.progress.step)
        try:
            with ProgressDisplay(config.train.steps, start_step=built.progress.step) as display:
                train(built, on_step=display.update)
        except BaseException:
            # A run that failed is the one whose curves are wanted; what stops the report must not hide why.
            with suppress(Exception):
                write_report(folder)
            raise
        with explained(folder):
            print(f"run folder: {folder}\nreport:     {write_report(folder)}")
    return 0


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
        print(f"new run in {config.run.dir}")
    last = batch.tokens * config.train.steps
    if last > config.schedule.total_tokens:
        print(
            f"note:  the learning rate reaches its minimum at {config.schedule.total_tokens:,} of {last:,} tokens; "
            "schedule.total_tokens moves that point, where no step done would have had another rate"
        )


def complain(error: BaseException, *, rank: int, status: int) -> int:
    """Print an error once, in its own words."""
    if rank == 0:
        print(
            "\n".join(f"error: {line}" if line[0] != " " else line for line in str(error).splitlines() if line),
            file=sys.stderr,
        )
    return status


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    warnings.filterwarnings("default", category=UserWarning, module="train")
    sys.exit(main(sys.argv[1:]))
