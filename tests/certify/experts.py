"""Mistakes of expert parallelism and of the routers' statistics."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from model.router import bias_from_load
from parallel.mesh import Axis
from tests.certify.mutation import CP, DP, EP, Mutate, Mutation


def leave_experts_out(original: Mutate, self: Any, total: Any) -> Any:
    return None if any(".experts." in slot.name for slot in total.bucket.slots) else original(self, total)


def multiply_experts(original: Mutate, self: Any) -> dict[str, Tensor]:
    return {name: x * 2 if ".experts." in name else x for name, x in original(self).items()}


def sum_experts_with_the_rest(
    original: Mutate, self: Any, params: Any, *, axis: Axis, axes: Any = None, **options: Any
) -> None:
    original(self, params, axis=axis, axes=dict.fromkeys(params, axis), **options)


def draw_the_first_slice(original: Mutate, out: Tensor, *, part: Any, **options: Any) -> None:
    original(out, part=tuple(slice(0, size) for size in out.shape), **options)


class CombineWithEarlierOrder:
    """Puts rows back in the order of the exchange before this one."""

    def __init__(self) -> None:
        self.earlier: Tensor | None = None

    def __call__(self, original: Mutate, rows: Tensor, weight: Tensor, slot: Tensor) -> Tensor:
        stale, self.earlier = self.earlier, slot
        return original(rows, weight, slot if stale is None or stale.shape != slot.shape else stale)


def detach_routing_weights(original: Mutate, rows: Tensor, weight: Tensor, slot: Tensor) -> Tensor:
    return original(rows, weight.detach(), slot)


def leave_padding_unwritten(original: Mutate, x: Tensor, moves: Any) -> Tensor:
    return torch.cat([x, x.new_full((1, x.shape[1]), torch.nan)]).index_select(0, moves.source)


def send_no_gradient_back(original: Mutate, ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    sent, *rest = original(ctx, grad)
    return torch.zeros_like(sent), *rest


def mistake_senders(original: Mutate, arrivals: Tensor, **options: Any) -> Any:
    return original(arrivals.flip(0), **options)


def leave_counts(original: Mutate, x: Tensor, *args: Any, **options: Any) -> Any:
    return None if x.dim() >= 2 and not x.is_floating_point() else original(x, *args, **options)


def leave_histograms(original: Mutate, x: Tensor, *args: Any, **options: Any) -> Any:
    return None if x.dim() == 3 and x.dtype == torch.int32 else original(x, *args, **options)


def average_quantiles(original: Mutate, histogram: Tensor, bias: Tensor, **options: Any) -> Tensor:
    mean = original(histogram, bias, **options) / dist.get_world_size()
    dist.all_reduce(mean)
    return mean


def move_bias_in_forward(original: Mutate, self: Any, *args: Any, **options: Any) -> Any:
    routing = original(self, *args, **options)
    load = torch.bincount(routing.expert_TK.flatten(), minlength=self.bias.numel())
    self.bias.copy_(bias_from_load(load, self.bias, step=0.001))
    return routing


def count_twice(original: Mutate, *args: Any) -> None:
    original(*args)
    original(*args)


def keep_own_maxima(original: Mutate, tensor: Tensor, op: Any = dist.ReduceOp.SUM, **options: Any) -> Any:
    return None if op == dist.ReduceOp.MAX else original(tensor, op=op, **options)


EXPERTS = (
    Mutation(
        id="expert-gradients-times-ep",
        sentence="The exchange has summed all ranks' tokens already; expert gradients are scaled by ep once more.",
        source="https://github.com/pytorch/pytorch/issues/160285",
        mesh=EP,
        target="parallel.data:DataParallel.owned_gradients",
        mutate=multiply_experts,
        shows="gradient of *.experts.*",
    ),
    Mutation(
        id="experts-summed-over-the-wrong-group",
        sentence="Expert gradients are reduced over all data ranks, adding different experts to each other.",
        source="https://github.com/NVIDIA/Megatron-LM/pull/5956",
        mesh=EP,
        target="parallel.data:DataParallel.__init__",
        mutate=sum_experts_with_the_rest,
        shows="*.experts.*: no rank holds all of it",
    ),
    Mutation(
        id="experts-not-summed",
        sentence="The ranks with the same experts never add up their gradients.",
        source="https://github.com/pytorch/pytorch/pull/167178",
        mesh=(*EP, "parallel.cp=2"),
        target="parallel.data:DataParallel._reduce",
        mutate=leave_experts_out,
        shows="gradient of *.experts.*",
    ),
    Mutation(
        id="experts-begin-alike",
        sentence="Every rank draws its experts as if they were the first ones.",
        source="https://github.com/pytorch/torchtitan/issues/514",
        mesh=EP,
        target="parallel.sharding:draw",
        mutate=draw_the_first_slice,
        shows="first of *.experts.*",
    ),
    Mutation(
        id="stale-plan",
        sentence="Rows come back in the order of an earlier exchange.",
        source="https://github.com/pytorch/torchtitan/issues/1117",
        mesh=EP,
        target="parallel.expert.dispatch:combine_rows",
        mutate=CombineWithEarlierOrder(),
        shows="gradient of *",
    ),
    Mutation(
        id="senders-mistaken",
        sentence="Arriving rows are given to experts as if another rank had sent them.",
        source="https://github.com/NVIDIA/Megatron-LM/pull/3626",
        mesh=EP,
        target="parallel.expert.dispatch:place_arrivals",
        mutate=mistake_senders,
        shows="gradient of *.experts.*",
    ),
    Mutation(
        id="rows-unwritten",
        sentence="The rows that pad a segment are left as the memory was.",
        source="https://github.com/huggingface/transformers/pull/48205",
        mesh=EP,
        target="parallel.expert.dispatch:_spread",
        mutate=leave_padding_unwritten,
        shows="step 1 was skipped: not finite",
    ),
    Mutation(
        id="exchange-without-gradient",
        sentence="The exchange's backward sends no gradient to where the tokens came from.",
        source="https://github.com/NVIDIA/Megatron-LM/issues/7452",
        mesh=EP,
        target="parallel.collectives:_AllToAll.backward",
        mutate=send_no_gradient_back,
        shows="gradient of *.ffn.down.weight: *",
    ),
    Mutation(
        id="router-without-gradient",
        sentence="The routing weights lose their graph on the way to the combination.",
        source="https://github.com/NVIDIA-NeMo/Automodel/pull/1412",
        mesh=EP,
        target="parallel.expert.dispatch:combine_rows",
        mutate=detach_routing_weights,
        shows="gradient of *.router.weight: *",
    ),
    Mutation(
        id="statistics-not-reduced",
        sentence="Every rank balances by the loads of its own tokens.",
        source="https://github.com/NVIDIA/Megatron-LM/pull/3769",
        mesh=DP,
        target="torch.distributed:all_reduce",
        mutate=leave_counts,
        shows="loads: rank 1 reports *",
    ),
    Mutation(
        id="quantiles-averaged",
        sentence="Each rank takes the quantile of its own histogram, and the quantiles are averaged.",
        source="https://github.com/NVIDIA/Megatron-LM/pull/7081",
        mesh=DP,
        target="torch.distributed:all_reduce",
        mutate=leave_histograms,
        also=(("train.step:bias_from_histogram", average_quantiles),),
        shows="*.router.bias: error *",
    ),
    Mutation(
        id="bias-moves-by-microbatch",
        sentence="The selection bias is updated in every forward pass, from that pass's tokens.",
        source="https://github.com/pytorch/torchtitan/pull/1304",
        mesh=DP,
        target="model.router:Router.forward",
        mutate=move_bias_in_forward,
        shows="saved model/*.router.bias: copies differ between ranks",
    ),
    Mutation(
        id="statistics-counted-twice",
        sentence="A repeated forward pass counts its tokens again.",
        source="https://github.com/pytorch/torchtitan/pull/1593",
        mesh=DP,
        target="model.router:Router._count",
        mutate=count_twice,
        shows="expert loads of step 1: *",
    ),
    Mutation(
        id="maxima-by-rank",
        sentence="QK-Clip scales heads by the largest logits that the owner's own tokens had.",
        source="https://github.com/NVIDIA/Megatron-LM/issues/7452",
        mesh=CP,
        target="torch.distributed:all_reduce",
        mutate=keep_own_maxima,
        shows="weight of *.mixer.*up.weight: *",
    ),
)
