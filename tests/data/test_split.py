import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.edges import InputError
from data.split import Documents, split_documents


def plain(number: int, *, key: int = 0) -> Documents:
    """Documents that are all different."""
    return Documents(number, key, np.arange(number, dtype=np.uint64) + np.uint64(1000 * key))


@given(n=st.integers(2, 500), fraction=st.floats(0.001, 0.999), key=st.integers(0, 2**64 - 1), known=st.booleans())
@settings(deadline=None)
def test_every_document_once_and_two_sides(n: int, fraction: float, key: int, known: bool) -> None:
    source = Documents(n, key, np.arange(n, dtype=np.uint64) if known else None)
    (split,) = split_documents([source], fraction=fraction)
    assert sorted([*split.training, *split.validation]) == list(range(n))
    assert len(split.training) > 0
    assert abs(len(split.validation) - max(1, fraction * n)) <= 1
    (again,) = split_documents([source], fraction=fraction)
    np.testing.assert_array_equal(again.validation, split.validation)
    assert split.copies == 0


HASHES = st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=40), min_size=1, max_size=3)


@given(sources=HASHES, fraction=st.floats(0.0, 0.9), seed=st.integers(0, 100))
@settings(max_examples=100, deadline=None)
def test_no_text_is_on_both_sides_of_any_sources(sources: list[list[int]], fraction: float, seed: int) -> None:
    given_ = [Documents(len(hashes), seed + i, np.array(hashes, dtype=np.uint64)) for i, hashes in enumerate(sources)]
    try:
        splits = split_documents(given_, fraction=fraction)
    except InputError:
        with pytest.raises(InputError, match="cannot be split in two"):
            split_documents(given_, fraction=fraction)
        return
    sides: dict[int, set[str]] = {}
    for hashes, split in zip(sources, splits):
        assert sorted([*split.training, *split.validation]) == list(range(len(hashes)))
        assert len(split.training) > 0
        for name, side in (("training", split.training), ("validation", split.validation)):
            for index in side:
                sides.setdefault(hashes[index], set()).add(name)
    assert all(len(names) == 1 for names in sides.values())
    everything = [value for hashes in sources for value in hashes]
    assert sum(split.copies for split in splits) == len(everything) - len(set(everything))


@pytest.mark.parametrize("times", [1, 2, 5])
def test_the_share_is_kept_with_copies(times: int) -> None:
    hashes = np.tile(np.arange(1000, dtype=np.uint64), times)
    (split,) = split_documents([Documents(len(hashes), 7, hashes)], fraction=0.1)
    assert len(split.validation) == 100 * times
    assert split.copies == 1000 * (times - 1)


def test_one_text_that_fills_half_a_corpus_is_trained_on() -> None:
    hashes = np.array([0] * 500 + list(range(1, 501)), dtype=np.uint64)
    for key in range(20):
        (split,) = split_documents([Documents(1000, key, hashes)], fraction=0.05)
        assert len(split.validation) == 50
        assert 0 not in hashes[split.validation]


def test_the_same_corpus_as_two_sources_has_one_split() -> None:
    hashes = np.arange(100, dtype=np.uint64)
    first, second = split_documents([Documents(100, 1, hashes), Documents(100, 2, hashes)], fraction=0.1)
    assert first.validation.tolist() == second.validation.tolist()
    assert (first.copies, second.copies) == (0, 100)


def test_a_source_of_documents_that_another_trains_on_holds_out_none() -> None:
    hashes = np.arange(100, dtype=np.uint64)
    (first,) = split_documents([Documents(100, 1, hashes)], fraction=0.1)
    inside = hashes[first.training[:20]]
    _, second = split_documents([Documents(100, 1, hashes), Documents(20, 2, inside)], fraction=0.1)
    assert (len(second.training), len(second.validation)) == (20, 0)


def test_depends_on_the_key_and_may_be_empty_only_by_wish() -> None:
    one, other = (split_documents([plain(100, key=key)], fraction=0.1)[0].validation for key in (0, 1))
    assert one.tolist() != other.tolist()
    (split,) = split_documents([plain(3)], fraction=0)
    assert (split.training.tolist(), split.validation.tolist()) == ([0, 1, 2], [])
    with pytest.raises(ValueError, match=r"data.validation_fraction=0.1: 1 document\(s\) cannot be split") as error:
        split_documents([plain(1)], fraction=0.1)
    # What the remedy leaves must be a config that can run.
    assert str(error.value).endswith("set data.validation_fraction=0 evaluate.every=0")
    with pytest.raises(ValueError, match=r"3 document\(s\) with 1 different text\(s\) cannot be split in two"):
        split_documents([Documents(3, 0, np.zeros(3, dtype=np.uint64))], fraction=0.5)
    with pytest.raises(ValueError, match=r"data.validation_fraction=1.0: must be at least 0 and below 1"):
        split_documents([plain(5)], fraction=1.0)
