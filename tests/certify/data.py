"""Mistakes that two data-parallel ranks show: the loss and its count, sums over ranks, norm, first weights, packing."""

from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from model.loss import IGNORE_INDEX
from parallel.context.layout import TokenSlice
from parallel.mesh import Axis
from tests.certify.mutation import DP, EP, Mutate, Mutation


def count_own_labels(original: Mutate, self: Any, value: Tensor, axis: Axis) -> Any:
    return value.item() * axis.size


def weigh_microbatches_equally(original: Mutate, hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Any:
    return original(hidden, weight, labels, **options) * 10 / (labels != IGNORE_INDEX).sum().clamp(min=1)


def train_on_padding(original: Mutate, hidden: Tensor, weight: Tensor, labels: Tensor, **options: Any) -> Any:
    return original(hidden, weight, labels.clamp(min=0), **options)


def average_reported_loss(original: Mutate, self: Any, total: Tensor) -> Tensor:
    return original(self, total) / self.mesh.dp.size


def forget_earlier_microbatches(original: Mutate, self: Any, part: int | None = None, *, last: bool) -> Any:
    if last:
        self.zero_gradients()
    return original(self, part, last=last)


def leave_bucket_out(original: Mutate, self: Any, total: Any) -> Any:
    return None if total.bucket is self.plan.buckets[1] else original(self, total)


def average_over_ranks(original: Mutate, tensor: Tensor, *args: Any, **options: Any) -> Any:
    tensor.div_(dist.get_world_size(options["group"]))
    return original(tensor, *args, **options)


def sum_in_bf16(original: Mutate, tensor: Tensor, *args: Any, **options: Any) -> Any:
    tensor.copy_(tensor.bfloat16())
    return original(tensor, *args, **options)


def miss_broadcast(original: Mutate, tensor: Tensor, *args: Any, **options: Any) -> Any:
    return original(tensor.clone(), *args, **options)


def norm_of_own_gradients(original: Mutate, x: Tensor, axis: Axis) -> Tensor:
    return x


def count_copies_in_the_norm(original: Mutate, dp: Any, **options: Any) -> Any:
    copies = {slot.name: bucket.copies for bucket in dp.plan.buckets for slot in bucket.slots}
    counted = {name: x * copies[name] ** 0.5 for name, x in dp.owned_gradients().items()}
    with patch.object(dp, "owned_gradients", lambda: counted):
        return original(dp, **options)


def seed_by_rank(original: Mutate, seed: int, name: str) -> int:
    return int(original(seed + dist.get_rank(), name))


def ignore_boundaries(original: Mutate, ids: Tensor, labels: Tensor, bounds: Tensor, *, axis: Axis) -> TokenSlice:
    return original(ids, labels, None, axis=axis)


DATA = (
    Mutation(
        id="loss-mean-of-means",
        sentence="Each rank divides by its own count of labels, and the ranks' gradients are averaged.",
        source="https://github.com/pytorch/torchtitan/pull/2206",
        mesh=DP,
        target="train.step:Stepper._sum",
        mutate=count_own_labels,
        shows="gradient of embed.weight: *",
    ),
    Mutation(
        id="microbatches-weigh-the-same",
        sentence="A microbatch with two labels counts as much as one with two hundred.",
        source="https://github.com/PrimeIntellect-ai/prime-rl/pull/2562",
        mesh=DP,
        target="parallel.pipeline.runtime:head_loss",
        mutate=weigh_microbatches_equally,
        shows="gradient of head.weight: *",
    ),
    Mutation(
        id="padding-is-trained-on",
        sentence="Positions without a label contribute to the loss.",
        source="https://github.com/pytorch/torchtitan/pull/4075",
        mesh=DP,
        target="parallel.pipeline.runtime:head_loss",
        mutate=train_on_padding,
        shows="loss of step 1: *",
    ),
    Mutation(
        id="reported-loss-averaged",
        sentence="Gradients are right; the reported loss is divided by the ranks once more.",
        source="https://github.com/huggingface/transformers/pull/48167",
        mesh=DP,
        target="parallel.pipeline.runtime:Pipeline.sum_over_ranks",
        mutate=average_reported_loss,
        shows="loss of step 1: *",
    ),
    Mutation(
        id="last-microbatch-only",
        sentence="Only the last microbatch's gradient is reduced; what was accumulated before is dropped.",
        source="https://github.com/pytorch/torchtitan/issues/2972",
        mesh=DP,
        target="parallel.data:DataParallel.backward",
        mutate=forget_earlier_microbatches,
        shows="gradient of *",
    ),
    Mutation(
        id="bucket-left-out",
        sentence="One bucket of several is never reduced.",
        source="https://github.com/NVIDIA/Megatron-LM/pull/5077",
        mesh=DP,
        target="parallel.data:DataParallel._reduce",
        mutate=leave_bucket_out,
        shows="gradient of *",
    ),
    Mutation(
        id="gradients-averaged-again",
        sentence="Gradients that the global count has divided already are averaged over the ranks.",
        source="https://github.com/NVIDIA/Megatron-LM/issues/906",
        mesh=DP,
        target="torch.distributed:reduce",
        mutate=average_over_ranks,
        shows="gradient of embed.weight: *",
    ),
    Mutation(
        id="gradients-summed-in-bf16",
        sentence="The reduction runs in bf16 though fp32 is configured.",
        source="https://github.com/pytorch/pytorch/issues/106395",
        mesh=DP,
        target="torch.distributed:reduce",
        mutate=sum_in_bf16,
        shows="gradient of *",
    ),
    Mutation(
        id="broadcast-missed",
        sentence="A rank keeps its old copy of parameters that another rank has updated.",
        source="https://github.com/NVIDIA-NeMo/RL/issues/3716",
        mesh=DP,
        target="torch.distributed:broadcast",
        mutate=miss_broadcast,
        shows="saved model/*: copies differ between ranks",
    ),
    Mutation(
        id="norm-of-own-gradients",
        sentence="Every rank clips by the norm of the gradients that it owns.",
        source="https://github.com/deepspeedai/DeepSpeed/pull/8478",
        mesh=DP,
        target="parallel.grads:all_reduce_plain",
        mutate=norm_of_own_gradients,
        shows="norms: rank 1 reports *",
    ),
    Mutation(
        id="copies-counted-in-the-norm",
        sentence="Replicated parameters count once for every rank that holds them.",
        source="https://github.com/ROCm/TransformerEngine/pull/715",
        mesh=EP,
        target="train.step:finalize",
        mutate=count_copies_in_the_norm,
        shows="gradient norm of step 1: *",
    ),
    Mutation(
        id="seeds-by-rank",
        sentence="Every rank draws its own first weights.",
        source="https://github.com/pytorch/torchtitan/issues/514",
        mesh=DP,
        target="model.params:seed_from_name",
        mutate=seed_by_rank,
        shows="first *: copies differ between ranks",
    ),
    Mutation(
        id="boundaries-ignored",
        sentence="Document boundaries do not reach the mixers; documents see each other.",
        source="https://github.com/NVIDIA/Megatron-LM/issues/2357",
        mesh=DP,
        target="train.step:slice_tokens",
        mutate=ignore_boundaries,
        shows="gradient of *",
    ),
    Mutation(
        id="zero-2-keeps-the-last-microbatch",
        sentence="Sharded gradients of earlier microbatches are overwritten by the last one's.",
        source="https://github.com/pytorch/pytorch/issues/190626",
        mesh=(*DP, "parallel.zero=2"),
        target="parallel.data:DataParallel.backward",
        mutate=forget_earlier_microbatches,
        shows="gradient of *",
    ),
)
