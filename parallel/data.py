"""Data parallel with ZeRO-1 or ZeRO-2: gradients in buckets, each bucket owned by one rank.

A bucket is a run of whole parameters in one flat buffer. Its gradient is *reduced to its owner*, the owner
alone updates its parameters, and the owner *broadcasts* them back:

    backward:  bucket 0 complete -> reduce to rank 1 (while backward goes on)
               bucket 1 complete -> reduce to rank 0 ...
    step:      rank 0 updates bucket 1, rank 1 updates bucket 0
    then:      rank 1 broadcasts bucket 0, rank 0 broadcasts bucket 1

The common ZeRO-1 reduce-scatters every bucket, which cuts matrices at arbitrary elements; Muon would then
have to gather each one again before orthogonalising it. Whole matrices to one owner move the same number
of bytes and need no gather.

Experts that are spread over expert-parallel ranks have fewer copies than the rest: their buckets reduce and
broadcast over the ranks with the same experts only. All buckets stand in one plan and their collectives in
one order, whatever their axis. On a pipeline rank each virtual stage is a *part* with buckets of its own, so
that its last microbatch may be reduced while other parts still run.

**ZeRO-1** keeps the sums of all buckets and reduces them once a step. **ZeRO-2** reduces every microbatch and
keeps the sums of owned buckets only; of another bucket there is a buffer from a microbatch's first gradient
to its reduction:

               owner                    others
    add        sum += gradient          buffer  = gradient, made at the first one
    reduce     sum += others' buffers   buffer -> owner, then freed

The owner's running sum is its own term of the reduction, so nothing is added twice and no second buffer is
needed. That trades memory for bytes: a reduction per microbatch and bucket.

Gradients are summed, in fp32 whatever the parameters' dtype (fp64 for fp64): the loss is already divided by
the step's global token count, and bf16 sums stop growing at 256 times their smallest term.
"""

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel.buckets import Bucket, plan_buckets
from parallel.collectives import broadcast_start, reduce_start
from parallel.mesh import Axis

IN_FLIGHT = 2
"""Reductions that may still run when a microbatch's backward has ended, each with its buffer."""


class _Sum:
    """The gradient of one bucket on this rank: a flat fp32 buffer and its reduction to the owner.

    Args:
        bucket: what it holds.
        params: its parameters by name.
        axis: the ranks that hold copies of them.
        keep: hold the buffer for good; else it lasts from the first gradient to the reduction.
    """

    def __init__(self, bucket: Bucket, params: Mapping[str, nn.Parameter], *, axis: Axis, keep: bool) -> None:
        self.bucket, self.axis, self.keep = bucket, axis, keep
        self.missing: set[str] = set()
        self.final = False
        self._shapes = {slot.name: params[slot.name].shape for slot in bucket.slots}
        param = params[bucket.slots[0].name]
        self._dtype, self._device = torch.promote_types(param.dtype, torch.float32), param.device
        self._buffer: Tensor | None = None
        self._views: dict[str, Tensor] = {}
        self._work: dist.Work | None = None
        if keep:
            self._make()

    @property
    def bytes(self) -> int:
        """Memory that it takes at present."""
        return 0 if self._buffer is None else self._buffer.numel() * self._buffer.element_size()

    def view(self, name: str) -> Tensor:
        """The sum of one parameter's gradient, in the parameter's shape."""
        return self._views[name]

    def zero(self) -> None:
        """Start again."""
        self.wait()
        self.final = False
        if self.keep and self._buffer is not None:
            self._buffer.zero_()
        else:
            self._drop()

    def add(self, name: str, gradient: Tensor) -> None:
        """Add one parameter's gradient."""
        self.wait()
        if self._buffer is None:
            self._make()
        self._views[name].add_(gradient)

    def reduce(self) -> None:
        """Begin to sum the buffers of all copies into the owner's. Without a gradient, zeros take part."""
        if self.axis.size == 1:
            return
        self.wait()
        buffer = self._make() if self._buffer is None else self._buffer
        self._work = reduce_start(buffer, self.axis, owner=self.bucket.owner)

    def done(self) -> bool:
        """Whether no reduction runs."""
        return self._work is None or self._work.is_completed()

    def wait(self) -> None:
        """Until its reduction is done."""
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        if not self.keep:
            self._drop()

    def _make(self) -> Tensor:
        self._buffer = buffer = torch.zeros(self.bucket.numel, dtype=self._dtype, device=self._device)
        for slot in self.bucket.slots:
            self._views[slot.name] = buffer.narrow(0, slot.offset, slot.numel).view(self._shapes[slot.name])
        return buffer

    def _drop(self) -> None:
        self._buffer = None
        self._views = {}


class DataParallel:
    """Gradient accumulation, reduction to owners and broadcast from owners, for one set of parameters.

    The parameters' storage becomes views into flat buckets, so one collective moves a bucket; do not move
    or cast the module afterwards. Gradients never stay in ``param.grad``: a hook adds each into its fp32
    bucket. A step is::

        dp.zero_gradients()
        for microbatch in ...:
            with dp.backward(last=...):   # true for the last one
                loss(microbatch).backward()
        dp.finish()
        ... dp.owned_gradients() ...      # update the owned parameters
        dp.broadcast_parameters()

    An axis of size 1 communicates nothing.

    **Traffic** is counted on each bucket's axis as "<axis> reduce" and "<axis> broadcast", in the bytes that this
    rank sends in a ring. A reduction collects the bucket on its way to the owner: every rank but the owner sends
    all of it, once. A broadcast passes it on from the owner: every rank but the last one, which stands before the
    owner in the ring, sends all of it, once. Summed over the ranks each is (copies - 1) x the bucket's bytes.

    Args:
        params: trainable parameters in the order of the model, each once, all on one device, with equal
            values on every rank.
        axis: all ranks that train these parameters.
        axes: by name, the axis of the ranks that hold a parameter's copies (for experts fewer than ``axis``,
            see `BucketPlan`); None: ``axis`` holds every parameter.
        parts: virtual stage of each parameter; None: there is one.
        pinned: parameters that the first of the ranks with copies must own.
        zero: 1 or 2, see the module's docstring.
        bucket_bytes: gradient bytes at which a bucket closes.
        cost: work of updating each parameter, to balance the owners; None counts elements.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        *,
        axis: Axis,
        axes: Mapping[str, Axis] | None = None,
        parts: Mapping[str, int] | None = None,
        pinned: Collection[str] = (),
        zero: int = 1,
        bucket_bytes: int = 32 * 2**20,
        cost: Mapping[str, float] | None = None,
    ) -> None:
        assert len({id(param) for param in params.values()}) == len(params), "a parameter has two names"
        assert all(param.requires_grad for param in params.values()), "leave frozen parameters out"
        assert zero in (1, 2)
        self.axis, self.zero = axis, zero
        self.device = next((param.device for param in params.values()), torch.device("cpu"))
        axes = dict.fromkeys(params, axis) if axes is None else axes
        sizes = {name: param.numel() for name, param in params.items()}
        self.plan = plan_buckets(
            sizes,
            ranks=axis.size,
            bucket_bytes=bucket_bytes,
            cost=sizes if cost is None else cost,
            dtypes={name: param.dtype for name, param in params.items()},
            copies={name: axes[name].size for name in params},
            parts=parts,
            pinned=pinned,
        )
        self.owned_names = self.plan.owned_by(axis.rank)
        self._weights: list[Tensor] = []
        self._sums: list[_Sum] = []
        self._place: dict[Tensor, tuple[str, _Sum]] = {}
        for bucket in self.plan.buckets:
            held_by = axes[bucket.slots[0].name]
            assert held_by.rank == axis.rank * bucket.copies // axis.size, "copies do not lie as the plan says"
            self._adopt(bucket, params, held_by)
        # Buckets that the present backward has yet to reduce, in order.
        self._queue: deque[_Sum] = deque()
        self._last = False
        self._in_flight: deque[_Sum] = deque()
        self.zero_gradients()

    @torch.no_grad()
    def _adopt(self, bucket: Bucket, params: Mapping[str, nn.Parameter], axis: Axis) -> None:
        """Move a bucket's parameters into one buffer, and send their gradients to a sum."""
        dtype = params[bucket.slots[0].name].dtype
        weights = torch.zeros(bucket.numel, dtype=dtype, device=self.device)
        total = _Sum(bucket, params, axis=axis, keep=self.zero == 1 or bucket.owner == axis.rank)
        for slot in bucket.slots:
            param = params[slot.name]
            view = weights.narrow(0, slot.offset, slot.numel).view(param.shape)
            view.copy_(param)
            param.data = view
            self._place[param] = slot.name, total
            param.register_post_accumulate_grad_hook(self._take_gradient)
        self._weights.append(weights)
        self._sums.append(total)

    def _take_gradient(self, param: Tensor) -> None:
        assert param.grad is not None
        self.add_gradient(param, param.grad)
        param.grad = None

    def add_gradient(self, param: Tensor, gradient: Tensor) -> None:
        """Add to the gradient of one parameter: what its hook does, for gradients that backward does not bring.

        Args:
            param: one of the parameters.
            gradient: of its shape; a microbatch's whole gradient if it comes inside `backward`.
        """
        name, total = self._place[param]
        assert not total.final, f"{name}: a gradient arrived after its bucket was reduced"
        total.add(name, gradient)
        if self._queue:
            total.missing.discard(name)
            while self._queue and not self._queue[0].missing:
                self._reduce(self._queue.popleft())

    def zero_gradients(self) -> None:
        """Start a new step: all sums become zero."""
        self._in_flight.clear()
        for total in self._sums:
            total.zero()

    @contextmanager
    def backward(self, part: int | None = None, *, last: bool) -> Iterator[None]:
        """Around the code that brings the gradients of one microbatch through one part.

        Inside, a bucket of the part is reduced as soon as all its gradients have come; when the block ends, what is
        left is reduced, so a parameter without a gradient (an unused expert) holds nothing up for longer. ZeRO-1
        does so in the part's last microbatch only. Gradients that come outside of any block wait in their buckets.

        Buckets are reduced in the order of the plan: one waits for those before it. Ranks may visit parameters in
        another order or lack a gradient that others have; with one fixed order their collectives cannot pair wrongly.
        So all ranks must run the same blocks in the same order (in ZeRO-1, the same last ones).

        Args:
            part: virtual stage, as in ``parts``; None: all of them.
            last: the part's last microbatch of the step; none of its gradients may follow.
        """
        assert not self._queue, "blocks do not nest"
        if last or self.zero == 2:
            self._queue.extend(s for s in self._sums if part is None or s.bucket.part == part)
        for total in self._queue:
            total.missing = {slot.name for slot in total.bucket.slots}
        self._last = last
        try:
            yield
            while self._queue:
                self._reduce(self._queue.popleft())
            self._drain(IN_FLIGHT)
        finally:
            self._queue.clear()

    def _reduce(self, total: _Sum) -> None:
        total.final = self._last
        total.reduce()
        self._in_flight.append(total)
        # Never wait here: another rank may begin this reduction only when its block ends, after exchanges of
        # tokens for which it needs this rank.
        while self._in_flight and self._in_flight[0].done():
            self._in_flight.popleft().wait()

    def _drain(self, limit: int) -> None:
        """Wait for the oldest reductions until at most ``limit`` run."""
        while len(self._in_flight) > limit:
            self._in_flight.popleft().wait()

    def finish(self) -> None:
        """Reduce every bucket that has not been for the last time, and wait. A gradient that never came is zero."""
        assert not self._queue, "inside `backward`"
        self._last = True
        for total in self._sums:
            if not total.final:
                self._reduce(total)
        self._drain(0)

    def owned_gradients(self) -> dict[str, Tensor]:
        """Gradient sums over all copies of the parameters this rank owns, after `finish`.

        Returns:
            fp32 (fp64 for fp64 parameters) views into the buckets, in parameter shape; valid until
            `zero_gradients`, and the optimizer may overwrite them.
        """
        owned = [total for total in self._sums if total.bucket.owner == total.axis.rank]
        return {slot.name: total.view(slot.name) for total in owned for slot in total.bucket.slots}

    def gradient_bytes(self) -> int:
        """Memory that gradients take at present: with ZeRO-1 all buckets, with ZeRO-2 the owned ones and those that
        are being filled or reduced."""
        return sum(total.bytes for total in self._sums)

    def broadcast_parameters(self) -> None:
        """Send every bucket's parameters from its owner to all ranks that hold them, and wait."""
        works = [
            broadcast_start(weights, total.axis, source=total.bucket.owner)
            for total, weights in zip(self._sums, self._weights, strict=True)
            if total.axis.size > 1
        ]
        for work in works:
            work.wait()
