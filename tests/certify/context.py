"""Mistakes of context parallelism: borders of slices, the state of the delta rule, the gathered latent."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from model.loss import IGNORE_INDEX
from parallel.collectives import gather_plain
from parallel.context.layout import SlicedDocuments, TokenSlice
from parallel.mesh import Axis
from tests.certify.experts import send_no_gradient_back
from tests.certify.mutation import CP, Mutate, Mutation


def count_once_per_cp_rank(original: Mutate, self: Any, value: Tensor, axis: Axis) -> Any:
    return original(self, value, axis) * self.mesh.cp.size


def shift_labels_after_the_cut(original: Mutate, *args: Any, axis: Axis) -> TokenSlice:
    cut = original(*args, axis=axis)
    labels = cut.labels.clone()
    labels[:, -1] = IGNORE_INDEX
    return cut._replace(labels=labels)


def end_documents_at_the_cut(original: Mutate, *args: Any, axis: Axis) -> TokenSlice:
    cut = original(*args, axis=axis)
    documents: SlicedDocuments = cut.documents
    start = documents.start
    return cut._replace(documents=replace(documents, first_start=start, last_stop=start + documents.length))


def count_positions_from_the_cut(original: Mutate, *args: Any, axis: Axis) -> TokenSlice:
    cut = original(*args, axis=axis)
    position = cut.documents.position_BT
    return cut._replace(documents=replace(cut.documents, position_BT=torch.arange(position.shape[1]).unsqueeze(0)))


def lose_halo(original: Mutate, *args: Any, **options: Any) -> tuple[Tensor, ...]:
    return tuple(torch.zeros_like(x) for x in original(*args, **options))


def begin_from_nothing(original: Mutate, *args: Any) -> Tensor:
    return torch.zeros_like(original(*args))


def keep_own_gradient_only(original: Mutate, x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    parts = list(gather_plain(x.detach(), axis, dim=dim).chunk(axis.size, dim=dim))
    parts[axis.rank] = x
    return torch.cat(parts, dim=dim)


CONTEXT = (
    Mutation(
        id="cp-counted-twice",
        sentence="The count of labels includes every cp rank's copy of the sequence.",
        source="https://github.com/NVIDIA/Megatron-LM/issues/673",
        mesh=CP,
        target="train.step:Stepper._sum",
        mutate=count_once_per_cp_rank,
        shows="gradient of embed.weight: *",
    ),
    Mutation(
        id="labels-shifted-after-the-cut",
        sentence="The last token of a slice does not know the next one, and loses its label.",
        source="https://github.com/NVIDIA-NeMo/Automodel/pull/3544",
        mesh=CP,
        target="train.step:slice_tokens",
        mutate=shift_labels_after_the_cut,
        shows="gradient of head.weight: *",
    ),
    Mutation(
        id="documents-end-at-the-cut",
        sentence="A document that crosses a border of slices is treated as two.",
        source="https://github.com/THUDM/slime/pull/1686",
        mesh=CP,
        target="train.step:slice_tokens",
        mutate=end_documents_at_the_cut,
        shows="gradient of *",
    ),
    Mutation(
        id="positions-from-the-cut",
        sentence="Rotary positions start again in every slice.",
        source="https://github.com/verl-project/verl/issues/6609",
        mesh=("model=kimi_k2_small", *CP),
        target="train.step:slice_tokens",
        mutate=count_positions_from_the_cut,
        shows="gradient of *.kv_down.weight: *",
    ),
    Mutation(
        id="halo-lost",
        sentence="The convolutions of a slice begin with zeros instead of the tokens before it.",
        source="https://github.com/fla-org/flash-linear-attention/issues/1092",
        mesh=CP,
        target="parallel.context.kda:halo",
        mutate=lose_halo,
        shows="gradient of *_conv.weight: *",
    ),
    Mutation(
        id="halo-without-gradient",
        sentence="The halo comes, but its gradient does not return to the rank that sent it.",
        source="https://github.com/fla-org/flash-linear-attention/pull/1208",
        mesh=CP,
        target="parallel.context.kda:all_gather",
        mutate=keep_own_gradient_only,
        shows="gradient of layers.0.mixer.?.weight: *",
    ),
    Mutation(
        id="state-not-handed-over",
        sentence="The delta rule's state starts at zero in every slice.",
        source="https://github.com/fla-org/flash-linear-attention/pull/37",
        mesh=CP,
        target="parallel.context.kda:_HandOver.forward",
        mutate=begin_from_nothing,
        shows="gradient of layers.0.mixer.*",
    ),
    Mutation(
        id="state-gradient-not-handed-back",
        sentence="Forward is exact; the gradient of the state stops at the border of slices.",
        source="https://github.com/fla-org/flash-linear-attention/issues/1115",
        mesh=CP,
        target="parallel.context.kda:_HandOver.backward",
        mutate=send_no_gradient_back,
        shows="gradient of layers.0.mixer.*",
    ),
    Mutation(
        id="latent-gradient-not-summed",
        sentence="Other ranks' queries give no gradient to this rank's gathered latent.",
        source="https://github.com/NVIDIA/Megatron-LM/issues/7452",
        mesh=CP,
        target="parallel.context.mla:all_gather",
        mutate=keep_own_gradient_only,
        shows="gradient of *.kv_down.weight: *",
    ),
)
