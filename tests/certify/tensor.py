"""Mistakes of tensor and sequence parallelism: sums of parts, slices of the vocabulary, Muon on slices."""

from typing import Any

import torch
from torch import Tensor

from parallel.mesh import Axis
from tests.certify.context import keep_own_gradient_only
from tests.certify.data import count_copies_in_the_norm
from tests.certify.experts import draw_the_first_slice
from tests.certify.mutation import TP, Mutate, Mutation


def sum_over_fewer_ranks(ending: str) -> Mutate:
    """Parameters whose names end so are summed as if they were cut over tp, over dense alone."""

    def mutate(original: Mutate, self: Any, params: Any, *, axes: dict[str, Axis], **options: Any) -> None:
        dense = min(axes.values(), key=lambda axis: axis.size)
        original(self, params, axes={n: dense if n.endswith(ending) else a for n, a in axes.items()}, **options)

    return mutate


def mask_nothing(original: Mutate, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    row, held = original(*args, **options)
    return row, torch.ones_like(held)


def repeat_own_part(original: Mutate, x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    return torch.cat([x] * axis.size, dim=dim)


def take_slices_for_matrices(original: Mutate, name: str, *, spec: Any = None, **options: Any) -> Any:
    group = original(name, spec=spec, **options)
    return group if group.cut is None else original(name, spec=None, **options)


def part_not_summed(name: str, sentence: str, source: str, *, ending: str) -> Mutation:
    """A row for a whole parameter whose gradient is a part on every tp rank."""
    return Mutation(
        id=name,
        sentence=sentence,
        source=source,
        mesh=TP,
        target="parallel.data:DataParallel.__init__",
        mutate=sum_over_fewer_ranks(ending),
        shows=f"gradient *{ending}: copies differ between ranks",
    )


TENSOR = (
    part_not_summed(
        "q-norm-not-summed",
        "The norm of the query latent has on each rank the gradient of that rank's heads, and keeps it.",
        "https://github.com/NVIDIA-NeMo/RL/issues/3716",
        ending="mixer.q.norm.weight",
    ),
    part_not_summed(
        "shared-key-not-summed",
        "The key that all heads share gets the gradient of the rank's own heads only, and so does the latent.",
        "https://github.com/NVIDIA/Megatron-LM/issues/7452",
        ending="mixer.kv_down.weight",
    ),
    part_not_summed(
        "sequence-parallel-norm-not-summed",
        "A norm between regions sees a slice of the tokens; its gradient is not summed over tp.",
        "https://github.com/NVIDIA-NeMo/RL/issues/3716",
        ending="ffn_norm.weight",
    ),
    part_not_summed(
        "router-not-summed",
        "The router sees a slice of the tokens; its gradient is not summed over tp.",
        "https://github.com/pytorch/pytorch/issues/190626",
        ending="router.weight",
    ),
    Mutation(
        id="region-without-gradient",
        sentence="Where tokens enter a region, the gradient of the other ranks' heads is not returned.",
        source="https://github.com/NVIDIA/Megatron-LM/issues/7452",
        mesh=TP,
        target="parallel.tensor:all_gather",
        mutate=keep_own_gradient_only,
        shows="gradient of embed.weight: *",
    ),
    Mutation(
        id="vocabulary-not-masked",
        sentence="An id of another rank's rows looks up a row of this rank.",
        source="https://github.com/NVIDIA/Megatron-LM/issues/7452",
        mesh=TP,
        target="parallel.tensor:_rows_held",
        mutate=mask_nothing,
        shows="gradient of embed.weight: *",
    ),
    Mutation(
        id="softmax-over-own-rows",
        sentence="The loss is normalised over the rank's own part of the vocabulary.",
        source="https://github.com/NVIDIA/Megatron-LM/issues/7452",
        mesh=TP,
        target="parallel.tensor:gather_plain",
        mutate=repeat_own_part,
        shows="gradient of head.weight: *",
    ),
    Mutation(
        id="tp-copies-counted-in-the-norm",
        sentence="Whole parameters count once for every tp rank in the gradient norm.",
        source="https://github.com/NVIDIA-NeMo/RL/pull/3788",
        mesh=TP,
        target="train.step:finalize",
        mutate=count_copies_in_the_norm,
        shows="gradient norm of step 1: *",
    ),
    Mutation(
        id="muon-on-slices",
        sentence="Newton-Schulz runs on each rank's slice of a matrix.",
        source="https://github.com/deepspeedai/DeepSpeed/issues/8437",
        mesh=TP,
        target="optim.groups:make_group",
        mutate=take_slices_for_matrices,
        shows="step of *.ffn.*.weight: *",
    ),
    Mutation(
        id="slices-begin-alike",
        sentence="Every tp rank begins with the first slice of the weights.",
        source="https://github.com/pytorch/torchtitan/issues/514",
        mesh=TP,
        target="parallel.sharding:draw",
        mutate=draw_the_first_slice,
        shows="first of *.mixer.q.weight: *",
    ),
)
