"""Gradient buckets: which parameters share a flat buffer, in which order, and which rank owns each. Pure.

`parallel.data` moves what this plan says, `launch.plan` prices it, and every rank makes the same plan for itself.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

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
    """A run of whole parameters of one dtype, one number of copies and one part of the model.

    numel: elements, alignment gaps included.
    copies: ranks that hold these parameters.
    owner: which of them updates these parameters.
    part: virtual stage that they belong to.
    """

    slots: tuple[Slot, ...]
    numel: int
    copies: int
    owner: int
    part: int = 0


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


class _Kind(NamedTuple):
    """What all parameters of a bucket share."""

    part: int
    copies: int
    dtype: torch.dtype
    pinned: bool


def plan_buckets(
    sizes: Mapping[str, int],
    *,
    ranks: int,
    bucket_bytes: int,
    cost: Mapping[str, float],
    dtypes: Mapping[str, torch.dtype],
    copies: Mapping[str, int] | None = None,
    parts: Mapping[str, int] | None = None,
    pinned: Collection[str] = (),
) -> BucketPlan:
    """Cut parameters into buckets and give each bucket an owner.

    Walks the model backwards, filling one open bucket per part, dtype and number of copies up to ``bucket_bytes``
    (less for a small model, so that there are enough buckets to balance). Owners are then assigned longest
    first: the most expensive bucket to the least loaded rank (or run of ranks that hold its parts), ties to
    the lowest.

    Args:
        sizes: elements of each parameter, in the order of the model.
        ranks: that train these parameters.
        bucket_bytes: gradient bytes at which a bucket closes.
        cost: work of updating each parameter, any unit.
        dtypes: dtype of each parameter; a bucket holds one.
        copies: how many of the ranks hold each parameter, a divisor of ``ranks``; None: all do.
        parts: virtual stage of each parameter; a bucket holds one. None: there is one part.
        pinned: parameters in buckets of their own, which copy 0 owns, so that other ranks know without this plan.
    """
    copies = dict.fromkeys(sizes, ranks) if copies is None else copies
    parts = dict.fromkeys(sizes, 0) if parts is None else parts
    totals: Counter[int] = Counter()
    for name, size in sizes.items():
        totals[copies[name]] += size
    limits = {n: min(bucket_bytes, GRADIENT_BYTES * total // (n * BUCKETS_PER_OWNER)) for n, total in totals.items()}
    closed: list[tuple[_Kind, list[Slot]]] = []
    filling: dict[_Kind, list[Slot]] = {}
    for name in reversed(list(sizes)):
        kind = _Kind(parts[name], copies[name], dtypes[name], name in pinned)
        slots = filling.setdefault(kind, [])
        slots.append(Slot(name, _end(slots), sizes[name]))
        if GRADIENT_BYTES * _end(slots) >= limits[kind.copies]:
            closed.append((kind, filling.pop(kind)))
    closed.extend(filling.items())

    costs = [sum(cost[slot.name] for slot in slots) for _, slots in closed]
    load = [0.0] * ranks
    owners = [0] * len(closed)
    for index in sorted(range(len(closed)), key=lambda i: (not closed[i][0].pinned, -costs[i])):
        width = ranks // closed[index][0].copies
        loads = [max(load[first : first + width]) for first in range(0, ranks, width)]
        owners[index] = owner = 0 if closed[index][0].pinned else loads.index(min(loads))
        for rank in range(owner * width, (owner + 1) * width):
            load[rank] += costs[index]
    return BucketPlan(
        tuple(
            Bucket(tuple(slots), _end(slots), kind.copies, owner, kind.part)
            for (kind, slots), owner in zip(closed, owners)
        ),
        ranks=ranks,
    )


def _end(slots: list[Slot]) -> int:
    """First aligned element after the slots."""
    if not slots:
        return 0
    end = slots[-1].offset + slots[-1].numel
    return -(-end // ALIGNMENT) * ALIGNMENT
