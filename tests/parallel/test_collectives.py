"""What each collective counts as sent, rank by rank, without any other rank; tests/dist has what they move."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from parallel import collectives
from parallel.mesh import Axis

SIZE = 4
X = torch.zeros(8, 3)
BYTES = 8 * 3 * 4


@pytest.fixture(autouse=True)
def _silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collectives that move nothing."""
    work = SimpleNamespace(wait=lambda: None)
    for name in (
        "all_gather_single",
        "reduce_scatter_single",
        "all_reduce",
        "reduce",
        "broadcast",
        "all_to_all_single",
        "isend",
        "irecv",
    ):
        monkeypatch.setattr(dist, name, lambda *_, **__: work)


def axes(size: int = SIZE) -> list[Axis]:
    return [Axis("dp", None, rank, size) for rank in range(size)]


@pytest.mark.parametrize("source", range(SIZE))
def test_a_broadcast_is_sent_by_all_but_the_rank_before_its_source(source: int) -> None:
    ring = axes()
    for axis in ring:
        collectives.broadcast_in_place(X, axis, source=source)
    sent = [axis.traffic.sent["dp broadcast"] for axis in ring]
    assert sent == [0 if rank == (source - 1) % SIZE else BYTES for rank in range(SIZE)]
    assert all(axis.traffic.calls == {"dp broadcast": 1} for axis in ring)


@pytest.mark.parametrize("owner", range(SIZE))
def test_a_reduction_is_sent_by_all_but_its_owner(owner: int) -> None:
    ring = axes()
    for axis in ring:
        collectives.reduce_start(X, axis, owner=owner).wait()
    assert [axis.traffic.sent["dp reduce"] for axis in ring] == [BYTES * (rank != owner) for rank in range(SIZE)]


@pytest.mark.parametrize("dim", [0, 1])
def test_a_gather_sends_all_of_the_whole_but_a_rank_s_part(dim: int) -> None:
    axis = axes()[1]
    whole = collectives.gather_plain(X, axis, dim=dim)
    assert whole.shape == ((4 * 8, 3) if dim == 0 else (8, 4 * 3))
    assert axis.traffic.sent == {"dp all_gather": 3 * BYTES}


@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 4), (torch.bfloat16, 4), (torch.float64, 8)], ids=str)
def test_sums_are_sent_in_fp32_at_least(dtype: torch.dtype, width: int) -> None:
    axis = axes()[1]
    part = collectives.reduce_scatter_plain(X.to(dtype), axis, dim=0)
    assert (part.shape, part.dtype) == ((2, 3), dtype)
    assert collectives.all_reduce_plain(X.to(dtype), axis).dtype == dtype
    assert axis.traffic.sent == {
        "dp reduce_scatter": 8 * 3 * width * 3 // 4,
        "dp all_reduce": 2 * 8 * 3 * width * 3 // 4,
    }


def test_a_sum_in_place_is_sent_twice_but_for_a_rank_s_part_and_nothing_if_it_is_empty() -> None:
    axis = axes(2)[0]
    collectives.combine_in_place(X.double(), axis)
    collectives.combine_in_place(X[:0], axis)
    assert (axis.traffic.sent, axis.traffic.calls) == ({"dp all_reduce": 2 * BYTES}, {"dp all_reduce": 1})


@pytest.mark.parametrize("rank", range(SIZE))
def test_rows_to_the_rank_itself_are_not_sent(rank: int) -> None:
    axis, send = axes()[rank], [1, 4, 0, 3]
    out = collectives.all_to_all_plain(X, axis, send=send, receive=[2, 0, 0, 3])
    assert out.shape == (5, 3)
    assert axis.traffic.sent == {"dp all_to_all": (8 - send[rank]) * 3 * 4}
    nothing = collectives.all_to_all_plain(X[:0], axis, send=[0] * 4, receive=[1] * 4)
    assert nothing.shape == (4, 3)
    assert axis.traffic.sent == {"dp all_to_all": (8 - send[rank]) * 3 * 4}
    assert axis.traffic.calls == {"dp all_to_all": 2}


def test_the_sender_counts_and_the_receiver_does_not() -> None:
    axis = axes()[0]
    collectives.send_start(X, axis, target=1, name="hop").wait()
    collectives.receive_start(X, axis, source=1).wait()
    assert axis.traffic.sent == {"hop": BYTES}


def test_alone_nothing_is_moved_or_counted() -> None:
    axis = Axis()
    assert collectives.gather_plain(X, axis, dim=0) is X
    assert collectives.reduce_scatter(X, axis, dim=0) is X
    assert collectives.all_gather(X, axis, dim=1) is X
    assert collectives.all_reduce(X, axis) is X
    assert collectives.all_to_all(X, axis, send=[8], receive=[8]) is X
    collectives.combine_in_place(X, axis)
    collectives.broadcast_in_place(X, axis, source=0)
    assert collectives.gather_objects("value", axis) == ["value"]
    assert axis.traffic.calls == {}
