"""Held-out loss and a sample of text. Neither touches any state of the training run."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from data.loader import Microbatch
from model.generate import generate
from model.kimi import KimiModel
from model.loss import IGNORE_INDEX, chunked_cross_entropy
from parallel.context.layout import slice_tokens
from parallel.mesh import Mesh


@torch.no_grad()
def validation_loss(model: KimiModel, batches: Sequence[Microbatch], *, mesh: Mesh, chunk: int) -> float:
    """Mean cross-entropy in nats over every labelled token of all ranks' batches.

    Args:
        model: counts nothing and moves no bias, because it is given no statistics to write to.
        batches: this rank's share of the validation split; the ranks of a cp group have the same ones, uncut.
        mesh: for the sum over ranks.
        chunk: tokens whose logits exist at once.
    """
    device = next(model.parameters()).device
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for batch in batches:
        ids, labels = batch.input_ids.to(device), batch.labels.to(device)
        ids, labels, documents = slice_tokens(ids, labels, batch.cu_seqlens, axis=mesh.cp)
        hidden = model.hidden(ids, documents=documents)
        sums[0] += chunked_cross_entropy(hidden, model.head.weight, labels, chunk=chunk)
        sums[1] += (labels != IGNORE_INDEX).sum()
    if mesh.dense.group is not None:
        dist.all_reduce(sums, group=mesh.dense.group)
    total, count = sums.tolist()
    return total / max(count, 1)


def sample_text(
    model: KimiModel,
    prompt: Sequence[int],
    *,
    decode: Callable[[list[int]], str],
    tokens: int,
    temperature: float,
    seed: int,
    stop: int | None,
) -> str:
    """The prompt and a sampled continuation, as text.

    Args:
        prompt: token ids, at least one.
        decode: token ids to text.
        tokens: most tokens to sample.
        temperature: 0 is greedy.
        seed: of the sampling alone.
        stop: id that ends the text.
    """
    device = next(model.parameters()).device
    ids = torch.tensor(list(prompt), device=device)
    sampled = generate(model, ids, tokens=tokens, temperature=temperature, seed=seed, stop=stop)
    return decode([*prompt, *sampled])
