"""Data parallel with ZeRO-1: gradients in buckets, each bucket owned by one rank.

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
one order, whatever their group.

Gradients are summed, in fp32 whatever the parameters' dtype (fp64 for fp64): the loss is already divided by
the step's global token count, and bf16 sums stop growing at 256 times their smallest term.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

BUCKETS_PER_OWNER = 8
"""At least this many buckets a rank (sizes permitting), so that owners can be balanced."""

ALIGNMENT = 64
"""Parameters begin at multiples of this many elements: grouped products want strides and addresses at
multiples of 16 bytes, vector units at 64, and 64 bf16 elements are 128 bytes."""

GRADIENT_BYTES = 4
"""Bucket sizes are counted in fp32 gradients, which is what travels."""


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a bucket, in elements."""

    name: str
    offset: int
    numel: int


@dataclass(frozen=True)
class Bucket:
    """A run of whole parameters of one dtype and one number of copies.

    numel: elements, alignment gaps included.
    copies: ranks that hold these parameters.
    owner: which of them updates these parameters.
    """

    slots: tuple[Slot, ...]
    numel: int
    copies: int
    owner: int


@dataclass(frozen=True)
class BucketPlan:
    """Every bucket, in the order in which backward completes them: the order of the reductions.

    Where a bucket has fewer copies than there are ranks, each run of ``ranks / copies`` neighbours holds one copy in
    parts, and copy ``c`` lies on ranks ``c * ranks / copies`` onwards (`parallel.mesh`: ep inside dense).
    """

    buckets: tuple[Bucket, ...]
    ranks: int

    def owned_by(self, rank: int) -> tuple[str, ...]:
        """Names of the parameters that ``rank`` owns."""
        return tuple(
            slot.name
            for bucket in self.buckets
            if bucket.owner == rank * bucket.copies // self.ranks
            for slot in bucket.slots
        )


def plan_buckets(
    sizes: Mapping[str, int],
    *,
    dp: int,
    bucket_bytes: int,
    cost: Mapping[str, float],
    dtypes: Mapping[str, torch.dtype],
    copies: Mapping[str, int] | None = None,
) -> BucketPlan:
    """Cut parameters into buckets and give each bucket an owner.

    Walks the model backwards, filling one open bucket per dtype and number of copies up to ``bucket_bytes``
    (less for a small model, so that there are enough buckets to balance). Owners are then assigned longest
    first: the most expensive bucket to the least loaded rank (or run of ranks that hold its parts), ties to
    the lowest.

    Args:
        sizes: elements of each parameter, in the order of the model.
        dp: ranks.
        bucket_bytes: gradient bytes at which a bucket closes.
        cost: work of updating each parameter, any unit.
        dtypes: dtype of each parameter; a bucket holds one.
        copies: how many of the ranks hold each parameter, a divisor of ``dp``; None: all do.
    """
    copies = dict.fromkeys(sizes, dp) if copies is None else copies
    totals: Counter[int] = Counter()
    for name, size in sizes.items():
        totals[copies[name]] += size
    limits = {n: min(bucket_bytes, GRADIENT_BYTES * total // (n * BUCKETS_PER_OWNER)) for n, total in totals.items()}
    closed: list[tuple[int, list[Slot]]] = []
    filling: dict[tuple[int, torch.dtype], list[Slot]] = {}
    for name in reversed(list(sizes)):
        kind = copies[name], dtypes[name]
        slots = filling.setdefault(kind, [])
        slots.append(Slot(name, _end(slots), sizes[name]))
        if GRADIENT_BYTES * _end(slots) >= limits[copies[name]]:
            closed.append((copies[name], filling.pop(kind)))
    closed.extend((held, slots) for (held, _), slots in filling.items())

    costs = [sum(cost[slot.name] for slot in slots) for _, slots in closed]
    load = [0.0] * dp
    owners = [0] * len(closed)
    for index in sorted(range(len(closed)), key=lambda i: -costs[i]):
        width = dp // closed[index][0]
        loads = [max(load[first : first + width]) for first in range(0, dp, width)]
        owners[index] = owner = loads.index(min(loads))
        for rank in range(owner * width, (owner + 1) * width):
            load[rank] += costs[index]
    return BucketPlan(
        tuple(Bucket(tuple(slots), _end(slots), held, owner) for (held, slots), owner in zip(closed, owners)),
        ranks=dp,
    )


def _end(slots: list[Slot]) -> int:
    """First aligned element after the slots."""
    if not slots:
        return 0
    end = slots[-1].offset + slots[-1].numel
    return -(-end // ALIGNMENT) * ALIGNMENT


class DataParallel:
    """Gradient accumulation, reduction to owners and broadcast from owners, for one set of parameters.

    The parameters' storage becomes views into flat buckets, so one collective moves a bucket; do not move
    or cast the module afterwards. Gradients never stay in ``param.grad``: a hook adds each into its fp32
    bucket. A step is::

        dp.zero_gradients()
        for microbatch in ...:            # the last one inside `with dp.last_microbatch():`
            loss(microbatch).backward()
        dp.finish()
        ... dp.owned_gradients() ...      # update the owned parameters
        dp.broadcast_parameters()

    A group of one (or None) communicates nothing.

    Args:
        params: trainable parameters in the order of the model, each once, all on one device, with equal
            values on every rank.
        group: process group of all ranks that train these parameters, or None for one process.
        groups: by name, the group of the ranks that hold a parameter's copies (for experts fewer than
            ``group``, see `BucketPlan`); None: ``group`` holds every parameter.
        bucket_bytes: gradient bytes at which a bucket closes.
        cost: work of updating each parameter, to balance the owners; None counts elements.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        *,
        group: ProcessGroup | None,
        groups: Mapping[str, ProcessGroup | None] | None = None,
        bucket_bytes: int = 32 * 2**20,
        cost: Mapping[str, float] | None = None,
    ) -> None:
        assert len({id(param) for param in params.values()}) == len(params), "a parameter has two names"
        assert all(param.requires_grad for param in params.values()), "leave frozen parameters out"
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = _size(group)
        self.device = next((param.device for param in params.values()), torch.device("cpu"))
        groups = dict.fromkeys(params, group) if groups is None else groups
        sizes = {name: param.numel() for name, param in params.items()}
        self.plan = plan_buckets(
            sizes,
            dp=self.size,
            bucket_bytes=bucket_bytes,
            cost=sizes if cost is None else cost,
            dtypes={name: param.dtype for name, param in params.items()},
            copies={name: _size(groups[name]) for name in params},
        )
        self.owned_names = self.plan.owned_by(self.rank)
        self._groups = [groups[bucket.slots[0].name] for bucket in self.plan.buckets]
        for bucket, held_by in zip(self.plan.buckets, self._groups):
            copy = 0 if held_by is None else dist.get_rank(held_by)
            assert copy == self.rank * bucket.copies // self.size, "copies do not lie as the plan says"
        self._weights: list[Tensor] = []
        self._sums: list[Tensor] = []
        self._gradients: dict[str, Tensor] = {}
        for index, bucket in enumerate(self.plan.buckets):
            self._adopt(bucket, index, params)
        self._reducing = False
        self._works: list[dist.Work] = []
        self.zero_gradients()

    @torch.no_grad()
    def _adopt(self, bucket: Bucket, index: int, params: Mapping[str, nn.Parameter]) -> None:
        """Move a bucket's parameters into one buffer, and give each a view for its gradient's sum."""
        dtype = params[bucket.slots[0].name].dtype
        weights = torch.zeros(bucket.numel, dtype=dtype, device=self.device)
        sums = weights.to(torch.promote_types(dtype, torch.float32), copy=True)
        for slot in bucket.slots:
            param = params[slot.name]
            view = weights.narrow(0, slot.offset, slot.numel).view(param.shape)
            view.copy_(param)
            param.data = view
            self._gradients[slot.name] = sums.narrow(0, slot.offset, slot.numel).view(param.shape)
            self._register_hook(param, slot.name, index)
        self._weights.append(weights)
        self._sums.append(sums)

    def _register_hook(self, param: nn.Parameter, name: str, index: int) -> None:
        total = self._gradients[name]

        def accumulate(param: Tensor) -> None:
            assert index >= self._launched, f"{name}: a gradient arrived after its bucket was reduced"
            assert param.grad is not None
            total.add_(param.grad)
            param.grad = None
            if self._reducing:
                self._missing[index].discard(name)
                self._launch_complete()

        param.register_post_accumulate_grad_hook(accumulate)

    def zero_gradients(self) -> None:
        """Start a new step: all sums become zero."""
        for sums in self._sums:
            sums.zero_()
        self._launched = 0
        self._missing = [{slot.name for slot in bucket.slots} for bucket in self.plan.buckets]

    @contextmanager
    def last_microbatch(self) -> Iterator[None]:
        """Inside, a bucket's reduction starts as soon as its last gradient has arrived."""
        self._reducing = True
        try:
            yield
        finally:
            self._reducing = False

    def _launch_complete(self) -> None:
        """Reduce complete buckets, in plan order only: a bucket waits for those before it.

        Ranks may visit parameters in another order or lack a gradient that others have (an unused expert);
        one fixed order means their collectives cannot pair wrongly.
        """
        while self._launched < len(self._missing) and not self._missing[self._launched]:
            self._launch_next()

    def _launch_next(self) -> None:
        index = self._launched
        self._launched += 1
        bucket = self.plan.buckets[index]
        if bucket.copies == 1:
            return
        work = dist.reduce(self._sums[index], group_dst=bucket.owner, group=self._groups[index], async_op=True)
        self._works.append(work)

    def finish(self) -> None:
        """Reduce every bucket that has not been, and wait. A gradient that never came counts as zero."""
        while self._launched < len(self._missing):
            self._launch_next()
        self._wait()

    def _wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()

    def owned_gradients(self) -> dict[str, Tensor]:
        """Gradient sums over all copies of the parameters this rank owns, after `finish`.

        Returns:
            fp32 (fp64 for fp64 parameters) views into the buckets, in parameter shape; valid until
            `zero_gradients`, and the optimizer may overwrite them.
        """
        return {name: self._gradients[name] for name in self.owned_names}

    def broadcast_parameters(self) -> None:
        """Send every bucket's parameters from its owner to all ranks that hold them, and wait."""
        for bucket, group, weights in zip(self.plan.buckets, self._groups, self._weights, strict=True):
            if bucket.copies > 1:
                work = dist.broadcast(weights, group_src=bucket.owner, group=group, async_op=True)
                self._works.append(work)
        self._wait()


def _size(group: ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)
