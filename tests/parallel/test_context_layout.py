"""The cut over context parallel: nothing lost, nothing twice, and borders that change no label and no position."""

import pytest
import torch

from model.documents import Documents
from parallel.context.layout import SlicedDocuments, length_error, slice_tokens
from parallel.mesh import Axis


def axes(size: int) -> list[Axis]:
    """Every rank's axis; slicing talks to nobody."""
    return [Axis("cp", None, rank, size) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("cu_seqlens", [None, [0, 5, 6, 7, 19, 24], [0, 12, 24], [0, 0, 1, 11, 12, 13, 24, 24]])
def test_slices_together_are_the_row(size: int, cu_seqlens: list[int] | None) -> None:
    ids, labels = torch.arange(24).unsqueeze(0), torch.arange(100, 124).unsqueeze(0)
    offsets = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    parts = [slice_tokens(ids, labels, offsets, axis=axis) for axis in axes(size)]
    whole = Documents.of(1, 24, offsets, ids.device)
    assert torch.equal(torch.cat([part.input_ids for part in parts], 1), ids)
    assert torch.equal(torch.cat([part.labels for part in parts], 1), labels)
    assert torch.equal(torch.cat([part.documents.position_BT for part in parts], 1), whole.position_BT)
    for part in parts:
        documents = part.documents
        assert isinstance(documents, SlicedDocuments)
        for begin, end in documents.spans():
            position = documents.position_BT[0, begin:end]
            assert torch.equal(position, position[0] + torch.arange(end - begin))
            assert int(position[0]) == 0 or begin == 0
        assert documents.start - documents.first_start == int(documents.position_BT[0, 0])
        assert (documents.continued > 0) == (int(documents.position_BT[0, 0]) > 0)


def test_the_drawing_of_the_module() -> None:
    ids = torch.zeros(1, 12, dtype=torch.int64)
    parts = [slice_tokens(ids, ids, torch.tensor([0, 2, 9, 12]), axis=axis).documents for axis in axes(3)]
    assert [part.spans() for part in parts] == [[(0, 2), (2, 4)], [(0, 4)], [(0, 1), (1, 4)]]
    assert [part.position_BT.tolist() for part in parts] == [[[0, 1, 0, 1]], [[2, 3, 4, 5]], [[6, 0, 1, 2]]]
    assert [(part.continued, part.first_rank, part.last_rank) for part in parts] == [(0, 0, 2), (4, 0, 2), (1, 0, 2)]


def test_one_rank_gets_the_row_as_it_is() -> None:
    ids = torch.zeros(3, 5, dtype=torch.int64)
    part = slice_tokens(ids, ids, None, axis=Axis())
    assert part.input_ids is ids
    assert type(part.documents) is Documents


@pytest.mark.parametrize(("length", "size"), [(10, 3), (2, 3), (2999, 4)])
def test_a_length_that_does_not_divide_is_refused_with_the_remedy(length: int, size: int) -> None:
    ids = torch.zeros(1, length, dtype=torch.int64)
    with pytest.raises(ValueError, match=rf"={length}: .*parallel\.cp.* {size} x 1.*use \d+") as error:
        slice_tokens(ids, ids, None, axis=axes(size)[0])
    remedy = int(str(error.value).split("use ")[1].split()[0].rstrip(","))
    assert length_error("batch.length", remedy, cp=size) is None


def test_a_length_must_divide_by_cp_times_tp() -> None:
    assert length_error("batch.length", 24, cp=4, tp=3) is None
    error = length_error("batch.length", 24, cp=4, tp=4)
    assert error is not None
    assert error.startswith("batch.length=24: ")
    assert "use 16 or 32" in error


def test_several_rows_are_refused() -> None:
    ids = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"2 rows: .*flatten it to \[1, B\*T\]"):
        slice_tokens(ids, ids, None, axis=axes(2)[0])


@pytest.mark.parametrize(
    ("length", "remedy"), [(1, "use 6,"), (5, "use 6,"), (7, "use 6 or 12,"), (13, "use 12 or 18,")]
)
def test_the_remedy_is_the_nearest_length_on_either_side(length: int, remedy: str) -> None:
    error = length_error("batch.length", length, cp=2, tp=3)
    assert error is not None
    assert remedy in error
    assert error.endswith("another parallel.cp or parallel.tp")
    assert length_error("batch.length", 6, cp=2, tp=3) is None


@pytest.mark.parametrize(("cp", "tp", "name"), [(2, 1, "parallel.cp"), (1, 2, "parallel.tp")])
def test_only_the_axes_that_cut_are_a_remedy(cp: int, tp: int, name: str) -> None:
    error = length_error("batch.length", 3, cp=cp, tp=tp)
    assert error is not None
    assert error.endswith(f"another {name}")
