"""Everything that ranks send each other in a run, named and counted; first what autograd knows, with its adjoint.

    forward          backward          where
    all_gather       reduce_scatter    sequence shards before a column-parallel product
    reduce_scatter   all_gather        partial sums after a row-parallel product
    all_reduce       identity          partial sums of which every rank needs the whole
    all_to_all       all_to_all        rows to other ranks, uneven

An axis of size 1 makes every one of them the identity, without a call. Sums run in fp32 at least: a bf16 sum over
ranks would round at every hop. Every rank of the axis must make the same calls in the same order.
"""

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel.mesh import Axis

T = TypeVar("T")


def all_gather(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """The shards of all ranks joined along ``dim`` in rank order; backward sums and scatters."""
    return x if axis.size == 1 else _AllGather.apply(x, axis, dim)


def reduce_scatter(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """This rank's slice along ``dim`` of the sum over ranks; backward gathers."""
    return x if axis.size == 1 else _ReduceScatter.apply(x, axis, dim)


def all_reduce(x: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks; backward passes the gradient on, which must be equal on all ranks."""
    return x if axis.size == 1 else _AllReduce.apply(x, axis)


def all_to_all(x: Tensor, axis: Axis, *, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """Rows to every rank: ``send[r]`` rows of ``x`` in order go to rank r, ``receive[r]`` come from it.

    Args:
        x: [sum(send), ...].
        send, receive: host integers; ``receive`` of one rank is ``send`` of the others.

    Returns:
        [sum(receive), ...] in rank order; backward sends the gradients back.
    """
    return x if axis.size == 1 else _AllToAll.apply(x, axis, tuple(send), tuple(receive))


def gather_plain(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """`all_gather` outside autograd."""
    if axis.size == 1:
        return x
    moved = x.movedim(dim, 0).contiguous()
    out = moved.new_empty(axis.size * moved.shape[0], *moved.shape[1:])
    dist.all_gather_single(out, moved, group=axis.group)
    axis.traffic.record(f"{axis.name} all_gather", _bytes(out) * (axis.size - 1) // axis.size)
    return out.movedim(0, dim)


def reduce_scatter_plain(x: Tensor, axis: Axis, *, dim: int) -> Tensor:
    """`reduce_scatter` outside autograd."""
    if axis.size == 1:
        return x
    size = x.shape[dim]
    assert size % axis.size == 0, f"{size} rows over {axis.name}={axis.size}"
    moved = x.movedim(dim, 0).to(torch.promote_types(x.dtype, torch.float32)).contiguous()
    out = moved.new_empty(size // axis.size, *moved.shape[1:])
    dist.reduce_scatter_single(out, moved, group=axis.group)
    axis.traffic.record(f"{axis.name} reduce_scatter", _bytes(moved) * (axis.size - 1) // axis.size)
    return out.to(x.dtype).movedim(0, dim)


def all_reduce_plain(x: Tensor, axis: Axis) -> Tensor:
    """`all_reduce` outside autograd, into a new tensor."""
    if axis.size == 1:
        return x
    out = x.to(torch.promote_types(x.dtype, torch.float32), copy=True).contiguous()
    dist.all_reduce(out, group=axis.group)
    axis.traffic.record(f"{axis.name} all_reduce", 2 * _bytes(out) * (axis.size - 1) // axis.size)
    return out.to(x.dtype)


def combine_in_place(x: Tensor, axis: Axis, *, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
    """The sum (or maximum) over ranks into ``x`` itself and in its own dtype: for counts, verdicts and fp64 sums."""
    if axis.size > 1 and x.numel():
        dist.all_reduce(x, op=op, group=axis.group)
        axis.traffic.record(f"{axis.name} all_reduce", 2 * _bytes(x) * (axis.size - 1) // axis.size)


def broadcast_in_place(x: Tensor, axis: Axis, *, source: int) -> None:
    """``x`` of the rank ``source`` of the axis into ``x`` on all of its ranks."""
    if axis.size > 1:
        broadcast_start(x, axis, source=source).wait()


def gather_objects(value: T, axis: Axis) -> list[T]:
    """Every rank's ``value``, in rank order. It is pickled, and waited for on the host: for what is small and rare."""
    if axis.size == 1:
        return [value]
    values: list[Any] = [None] * axis.size
    dist.all_gather_object(values, value, group=axis.group)
    axis.traffic.record(f"{axis.name} all_gather_object", len(pickle.dumps(value)) * (axis.size - 1))
    return values


def reduce_start(x: Tensor, axis: Axis, *, owner: int) -> dist.Work:
    """The sum over ranks into ``x`` of the rank ``owner``, under way; ``x`` of the others is undefined until `wait`.

    Counted as a sum that collects on its way to the owner: every rank but the owner sends all of it, once.
    """
    work = dist.reduce(x, group_dst=owner, group=axis.group, async_op=True)
    axis.traffic.record(f"{axis.name} reduce", 0 if owner == axis.rank else _bytes(x))
    return work


def broadcast_start(x: Tensor, axis: Axis, *, source: int) -> dist.Work:
    """`broadcast_in_place`, under way; the axis has several ranks.

    Counted as what is passed on around a ring: every rank but the one before the source sends all of it, once.
    """
    work = dist.broadcast(x, group_src=source, group=axis.group, async_op=True)
    ends_here = (axis.rank + 1) % axis.size == source
    axis.traffic.record(f"{axis.name} broadcast", 0 if ends_here else _bytes(x))
    return work


def send_start(x: Tensor, axis: Axis, *, target: int, name: str) -> dist.Work:
    """``x`` to one rank of the axis, under way; counted as ``name``. ``x`` must live until it has been waited for."""
    work = dist.isend(x, group=axis.group, group_dst=target)
    assert work is not None, "this rank is not in the group"
    axis.traffic.record(name, _bytes(x))
    return work


def receive_start(x: Tensor, axis: Axis, *, source: int) -> dist.Work:
    """What the rank ``source`` of the axis sends, into ``x``, under way; the sender counts it."""
    work = dist.irecv(x, group=axis.group, group_src=source)
    assert work is not None, "this rank is not in the group"
    return work


class Pending(NamedTuple):
    """A collective under way. ``source`` is kept alive, and must not be written to, until `wait`."""

    out: Tensor
    source: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        """The result, complete."""
        if self.work is not None:
            self.work.wait()
        return self.out


def all_to_all_start(
    x: Tensor, axis: Axis, *, send: Sequence[int], receive: Sequence[int], name: str = "all_to_all"
) -> Pending:
    """`all_to_all` outside autograd, under way; ``name`` is what the traffic is counted as."""
    if axis.size == 1:
        return Pending(x, x, None)
    assert sum(send) == x.shape[0], (send, x.shape)
    source = x.contiguous()
    out = x.new_empty(sum(receive), *x.shape[1:])
    work = dist.all_to_all_single(out, source, list(receive), list(send), group=axis.group, async_op=True)
    row = _bytes(x[:1]) if x.shape[0] else 0
    axis.traffic.record(f"{axis.name} {name}", row * (sum(send) - send[axis.rank]))
    return Pending(out, source, work)


def all_to_all_plain(x: Tensor, axis: Axis, *, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """`all_to_all` outside autograd."""
    return all_to_all_start(x, axis, send=send, receive=receive).wait()


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return gather_plain(x, axis, dim=dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return reduce_scatter_plain(grad, ctx.axis, dim=ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return reduce_scatter_plain(x, axis, dim=dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return gather_plain(grad, ctx.axis, dim=ctx.dim), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return all_reduce_plain(x, axis)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, send: tuple[int, ...], receive: tuple[int, ...]) -> Tensor:
        ctx.axis, ctx.send, ctx.receive = axis, send, receive
        return all_to_all_plain(x, axis, send=send, receive=receive)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return all_to_all_plain(grad, ctx.axis, send=ctx.receive, receive=ctx.send), None, None, None
