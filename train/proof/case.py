"""What a shrunk config is trained on to be proven: seeded weights of which none is trivial, and awkward data.

The data is random: packed documents that end before, on and after the borders of slices, padding, microbatches from
none to all tokens labelled.
"""

import torch
from torch import Tensor

from data.loader import Microbatch
from model.config import ModelConfig
from model.loss import IGNORE_INDEX
from train.build import build_model
from train.config import RunConfig
from train.proof.parity import SEED, Case
from train.proof.shrink import LENGTH, microbatches_per_rank

STEPS = 2

DOCUMENTS = ((0, 5, 16, 24), (0, 24), (0, 12, 17, 24), (0, 1, 3, 11, 13, 20, 24))
"""Where the documents of a microbatch begin and end, by turns: inside slices, one long one, at the border of two
slices, shorter than a convolution."""

LABELLED = ((0, 24), (9, 11), (0, 17), (0, 0))
"""Tokens that have labels, by turns: all, two, all but padding, none."""

LEAN = 0.5
"""Added to the selection bias of every expert of one rank, so that with balancing on some rank has to borrow two
experts at once."""


def lends(config: RunConfig) -> bool:
    """Whether the config asks for balanced experts, and has ranks and experts to balance."""
    parallel = config.parallel
    return parallel.experts.dispatcher == "balanced" and parallel.ep > 1 and bool(config.model.moe_layers)


def make_case(config: RunConfig) -> Case:
    """Seeded random weights, none of them trivial, and the awkward data, for a shrunk config."""
    model = build_model(config.model, seed=SEED, dtype=torch.float64, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(SEED)
    values = {}
    for name, value in model.state_dict().items():
        # Pseudo-queries and biases begin at zero and norms at one, where much cannot go wrong.
        values[name] = value + 0.1 * torch.randn(value.shape, generator=generator, dtype=torch.float64)
    if lends(config):
        lean(values, config=config)
    per_step = microbatches_per_rank(config.parallel) * config.parallel.dp
    steps = tuple(
        tuple(make_microbatch(step * (per_step + 1) + i, config=config.model) for i in range(per_step))
        for step in range(STEPS)
    )
    return Case(config.model, values, steps, config.optim, recompute=config.recompute)


def lean(values: dict[str, Tensor], *, config: RunConfig) -> None:
    """Raise the selection biases of one ep rank's experts, in each layer another's, so that it must lend."""
    home = config.model.moe.experts // config.parallel.ep
    for turn, layer in enumerate(config.model.moe_layers):
        first = turn % config.parallel.ep * home
        values[f"layers.{layer}.ffn.router.bias"][first : first + home] += LEAN


def make_microbatch(index: int, *, config: ModelConfig) -> Microbatch:
    """One row of `LENGTH` random tokens; documents and labels take turns."""
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(config.vocab_size, (1, LENGTH), generator=generator)
    bounds = torch.tensor(DOCUMENTS[index % len(DOCUMENTS)], dtype=torch.int32)
    labels = ids.roll(-1, dims=1)
    labels[:, bounds[1:].long() - 1] = IGNORE_INDEX
    first, last = LABELLED[index % len(LABELLED)]
    labels[:, :first] = IGNORE_INDEX
    labels[:, last:] = IGNORE_INDEX
    return Microbatch(
        input_ids=ids, labels=labels, cu_seqlens=bounds, sample_ids=torch.tensor([[0, index, LENGTH]]).numpy()
    )
