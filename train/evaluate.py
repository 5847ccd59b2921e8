"""Held-out loss and a sample of text. Neither touches any state of the training run."""

from collections.abc import Callable, Sequence

import torch

from data.loader import Microbatch
from model.generate import continue_text
from model.loss import IGNORE_INDEX
from parallel.pipeline.decode import PipelineDecoder
from parallel.pipeline.runtime import Pipeline
from parallel.tensor import whole_sequence
from train.step import to_device


def validation_loss(pipeline: Pipeline, batches: Sequence[Microbatch]) -> float:
    """Mean cross-entropy in nats over every labelled token of all ranks' batches; equal on all ranks.

    Args:
        pipeline: counts nothing and moves no bias, because it is given no statistics to write to.
        batches: this rank's share of the validation split; the ranks of a pp, cp or tp group have the same ones, uncut.
    """
    mesh = pipeline.mesh
    slices = [to_device(batch, device=pipeline.device, cp=mesh.cp) for batch in batches]
    loss = pipeline.evaluate(slices)
    count = sum(int((batch.labels != IGNORE_INDEX).sum()) for batch in slices) if pipeline.has_loss else 0
    total, count = pipeline.sum_over_ranks(torch.stack([loss, loss.new_tensor(count)])).tolist()
    return total / max(count, 1)


def sample_text(
    pipeline: Pipeline,
    prompt: Sequence[int],
    *,
    decode: Callable[[list[int]], str],
    tokens: int,
    temperature: float,
    seed: int,
    stop: int | None,
) -> str:
    """The prompt and a sampled continuation, as text; equal on all ranks, which must all call.

    Args:
        prompt: token ids, at least one.
        decode: token ids to text.
        tokens: most tokens to sample.
        temperature: 0 is greedy.
        seed: of the sampling alone.
        stop: id that ends the text.
    """
    ids = torch.tensor(list(prompt), device=pipeline.device)
    feed = PipelineDecoder(pipeline).feed
    with whole_sequence(pipeline.model):
        sampled = list(continue_text(feed, ids, tokens=tokens, temperature=temperature, seed=seed, stop=stop))
    return decode([*prompt, *sampled])
