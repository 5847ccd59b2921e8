"""The loop, and only the loop: next batch, one step, record, evaluate, checkpoint."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import torch

from data.loader import Microbatch
from parallel.collectives import gather_objects
from parallel.replicas import replica_faults
from train.balance import expert_balance
from train.build import Run
from train.checkpoint.contents import checkpoint_tensors
from train.evaluate import sample_text, validation_loss
from train.metrics import StepMetrics, reduce_over_ranks
from train.phases import learning_rate_factor
from train.report import write_report
from train.step import StepResult
from train.stopping import Stopping

logger = logging.getLogger(__name__)


class TrainingFailed(RuntimeError):
    """The run cannot go on; what was saved is intact."""


def train(
    run: Run,
    *,
    on_step: Callable[[StepMetrics], None] | None = None,
    on_failure: Callable[[Exception], None] | None = None,
    stopping: Stopping | None = None,
) -> bool:
    """Train until ``train.steps`` or until a rank wants to stop, and leave a checkpoint, unless routing is forced.

    Args:
        run: from `train.build.build_run`; its progress says where to begin.
        on_step: called with each step's metrics, to show them.
        on_failure: called with what ends the run, before anything else is done: cleaning up may take long, or be cut
            short by whoever started the ranks.
        stopping: whether this rank wants to stop; no rank does by default.

    Returns:
        Whether all steps are done; False if the run was stopped.

    Raises:
        TrainingFailed: too many updates in a row were skipped, ranks differ that should be equal, or data or settings
            turned out to be unusable only now.
        CheckpointError: a checkpoint could not be written.
    """
    try:
        done = train_steps(run, on_step=on_step, stopping=stopping or Stopping())
    except BaseException as error:
        failure = unusable(run, error) if isinstance(error, ValueError) else error
        if on_failure is not None and isinstance(failure, Exception):
            on_failure(failure)
        # What then cannot be closed, as a save that waits for a rank that has gone, must not hide why.
        with suppress(Exception):
            close(run)
        if failure is error:
            raise
        raise failure from failure.__cause__
    close(run)
    return done


def close(run: Run) -> None:
    """End what the run has open."""
    if run.recorder is not None:
        run.recorder.write()
    run.trackers.close()
    run.checkpoints.close()


def unusable(run: Run, error: ValueError) -> TrainingFailed:
    """A ValueError says what a user can change; after the first step it is no longer the command that was wrong."""
    where = f"rank {run.mesh.world.rank}, " if run.mesh.world.size > 1 else ""
    failure = TrainingFailed(f"{where}after step {run.progress.step}: {error}; the last checkpoint is intact")
    failure.__cause__ = error
    return failure


def train_steps(run: Run, *, on_step: Callable[[StepMetrics], None] | None, stopping: Stopping) -> bool:
    """`train`, without what is done when it ends."""
    began = time.monotonic()
    for metrics in steps(run, stopping):
        stop, metrics = bool(metrics.stop), replace(metrics, stop=None)
        run.trackers.log(metrics)
        if on_step is not None:
            on_step(metrics)
        if metrics.validation_loss is not None:
            write_files(run)
        run.checkpoints.check()
        check_health(run)
        check_replicas(run)
        stopping.step_took(time.monotonic() - began)
        began = time.monotonic()
        if stop or due(run.config.checkpoint.every, run.progress.step) or run.progress.step == run.config.train.steps:
            save(run)
            stopping.save_took(time.monotonic() - began)
            began = time.monotonic()
        if run.checkpoints.slowest > 0:
            stopping.save_took(run.checkpoints.slowest)
        if stop:
            break
    run.checkpoints.wait()
    return run.progress.step >= run.config.train.steps


def steps(run: Run, stopping: Stopping) -> Iterator[StepMetrics]:
    """Do the remaining steps; yields each one's metrics, its evaluation included, and whether a rank wants to stop."""
    progress, config, batch = run.progress, run.config, run.config.batch
    while progress.step < config.train.steps:
        started = time.perf_counter()
        microbatches, position, samples_hash = run.loader.step(
            progress.position,
            sequences=batch.sequences,
            length=batch.length,
            rank=run.mesh.dp.rank,
            ranks=run.mesh.dp.size,
            microbatch=run.microbatch,
        )
        tokens = progress.tokens + batch.tokens
        lr = config.optim.lr * learning_rate_factor(config.schedule, tokens)
        with nullcontext() if run.forced is None else run.forced.during(progress.step):
            result = run.stepper.step(microbatches, lr=lr)
        if run.recorder is not None:
            run.recorder.add(result.load)
        progress.advance(tokens=tokens, learning_rate=lr, position=position, skipped=result.skipped)
        seconds = time.perf_counter() - started
        rate, utilisation = run.throughput.measure(batch.tokens, seconds)
        validation, sample = None, None
        if due(config.evaluate.every, progress.step):
            validation, sample = evaluate(
                run, tokens=config.evaluate.tokens, sample_tokens=config.evaluate.sample_tokens
            )
        detailed = due(config.train.detail_every, progress.step)
        yield reduce_over_ranks(
            StepMetrics(
                step=progress.step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                tokens=tokens,
                tokens_per_second=rate,
                learning_rate=lr,
                samples_hash=samples_hash,
                step_seconds=seconds,
                mfu=utilisation,
                max_over_mean_load=worst_imbalance(result),
                max_logit=result.max_logit,
                peak_memory=peak_memory(run.stepper.device),
                expert_load=expert_load(run, result) if detailed else None,
                expert_balance=balance(run, result) if detailed else None,
                forced_routing=config.routing.force or None,
                skipped=result.skipped or None,
                sample_ids=gather_sample_ids(run, microbatches) if result.skipped else None,
                validation_loss=validation,
                sample=sample,
                stop=True if stopping.wanted() else None,
            ),
            axis=run.mesh.world,
        )


def peak_memory(device: torch.device) -> int | None:
    """Most bytes that tensors on ``device`` have taken at once so far; None on a CPU, where nobody counts."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def due(every: int, step: int) -> bool:
    """Whether something done every so many steps is due; 0 is never.

    Not at the last step as such: where a run happens to stop must not show in its metrics.
    """
    return every > 0 and step % every == 0


def gather_sample_ids(run: Run, microbatches: Sequence[Microbatch]) -> list[int]:
    """(source, cursor, length) of every sample of the step, of all ranks in order, flat. All ranks call it."""
    own = [int(value) for microbatch in microbatches for value in microbatch.sample_ids.flatten()]
    return [value for part in gather_objects(own, run.mesh.dp) for value in part]


def expert_load(run: Run, result: StepResult) -> dict[str, list[int]]:
    """Tokens routed to each expert in this step, by MoE layer (counted from 0)."""
    return {str(layer): row.tolist() for layer, row in zip(run.model.config.moe_layers, result.load)}


def balance(run: Run, result: StepResult) -> dict[str, dict[str, float | int]]:
    """How evenly the step's rows were shared out, by MoE layer; see `train.balance`. All ranks call it."""
    return expert_balance(result.rows, result.load, moe_layers=run.model.config.moe_layers, mesh=run.mesh)


def worst_imbalance(result: StepResult) -> float | None:
    """Largest expert load over the mean, in the worst layer; None without experts."""
    if not result.load.numel():
        return None
    load = result.load.double()
    return float((load.amax(dim=1) / load.mean(dim=1)).max())


def evaluate(run: Run, *, tokens: int, sample_tokens: int) -> tuple[float, str | None]:
    """(validation loss over at most ``tokens``, text sample) of the model as it is now; equal on all ranks."""
    config = run.config
    batches = run.loader.validation_batches(
        length=config.batch.length,
        microbatch=run.microbatch,
        max_tokens=tokens,
        rank=run.mesh.dp.rank,
        ranks=run.mesh.dp.size,
    )
    loss = validation_loss(run.pipeline, batches)
    if not sample_tokens:
        return loss, None
    # On every rank, alike: with experts or layers spread over ranks, one alone could not decode.
    text = sample_text(
        run.pipeline,
        run.loader.encode_prompt(config.evaluate.prompt),
        decode=run.loader.decode,
        tokens=sample_tokens,
        temperature=config.evaluate.temperature,
        seed=config.run.seed,
        stop=run.loader.sources[0].store.manifest.eos_id,
    )
    return loss, text


def check_health(run: Run) -> None:
    """Stop a run that no longer learns.

    Raises:
        TrainingFailed: too many updates in a row were skipped.
    """
    progress = run.progress
    if progress.skipped_in_a_row >= run.config.train.max_skipped:
        raise TrainingFailed(
            f"step {progress.step}: {progress.skipped_in_a_row} updates in a row had a non-finite loss or gradient "
            f"(train.max_skipped={run.config.train.max_skipped}); look at the samples (sample_ids in "
            f"{run.folder / 'metrics.jsonl'}), or begin again with a lower optim.lr in another run.dir, since this one "
            "keeps its optimizer; the last checkpoint is intact"
        )


def check_replicas(run: Run) -> None:
    """Where it is due, stop a run whose ranks no longer hold the same numbers, before it writes a checkpoint of them.

    Raises:
        TrainingFailed: on all ranks, if copies differ on any.
    """
    every = run.config.train.replica_check_every
    if not due(every, run.progress.step):
        return
    if faults := replica_faults(run.model, mesh=run.mesh):
        raise TrainingFailed(
            f"step {run.progress.step}: ranks hold unequal copies (train.replica_check_every={every}): "
            f"{'; '.join(faults)}; look for a failing device or link and start the "
            "same command again: it continues from the last checkpoint, which is intact"
        )


def write_files(run: Run) -> None:
    """What else the run folder holds, brought up to date; all on rank 0."""
    if run.recorder is not None:
        run.recorder.write()
    if run.mesh.world.rank == 0:
        show_report(run.folder)


def show_report(folder: Path) -> Path | None:
    """Write the report; its path, or None where that failed: it only shows the run, and must not end it."""
    try:
        return write_report(folder)
    except Exception as error:
        logger.warning("%s: the report could not be written (%s: %s)", folder, type(error).__name__, error)
        return None


def save(run: Run) -> None:
    """Checkpoint the run as it is after the step just done, unless its routing is forced."""
    if not run.config.routing.saves:
        return
    # First, so that no checkpoint is ahead of them.
    if run.recorder is not None:
        run.recorder.write()
    run.trackers.sync()
    run.checkpoints.save(
        run.progress.step,
        tensors=checkpoint_tensors(run.model, dp=run.dp, optimizer=run.optimizer, mesh=run.mesh),
        state=run.progress.to_state(),
    )
