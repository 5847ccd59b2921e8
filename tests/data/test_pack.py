from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.pack import IGNORE_INDEX, TokenStream, pack
from data.store import TokenStore
from tests.data.corpora import numbered, write_corpus

EOS = 1


def stream_of(store: TokenStore, *, key: int = 7) -> TokenStream:
    return TokenStream(store, np.arange(store.num_documents), key=key)


def expected_epoch(store: TokenStore, stream: TokenStream, number: int) -> tuple[list[int], list[int], list[int]]:
    """(tokens, labels, documents' first positions) of an epoch, put together the slow way."""
    tokens: list[int] = []
    labels: list[int] = []
    begins: list[int] = []
    for document in stream.epoch(number).documents:
        ids = store.document(int(document)).tolist()
        begins.append(len(tokens))
        tokens += ids
        labels += [*ids[1:], IGNORE_INDEX]
    return tokens, labels, begins


@given(
    lengths=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5), min_size=1, max_size=4),
    cuts=st.lists(st.integers(1, 70), min_size=1, max_size=12),
    key=st.integers(0, 100),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_samples_of_any_lengths_are_the_stream(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[list[int]], cuts: list[int], key: int
) -> None:
    """Whatever the lengths, and over epochs: no token lost or repeated, labels and boundaries as in the documents."""
    flat = numbered([length for shard in lengths for length in shard])
    shards = [[flat.pop(0) for _ in shard] for shard in lengths]
    store = write_corpus(tmp_path_factory.mktemp("corpus"), shards, vocab_size=1000)
    stream = stream_of(store, key=key)
    tokens: list[int] = []
    labels: list[int] = []
    begins: set[int] = set()
    for number in range(sum(cuts) // store.num_tokens + 1):
        more_tokens, more_labels, more_begins = expected_epoch(store, stream, number)
        begins |= {len(tokens) + begin for begin in more_begins}
        tokens += more_tokens
        labels += more_labels
    cursor = 0
    for length in cuts:
        sample = pack(stream, cursor, length)
        assert sample.input_ids.tolist() == tokens[cursor : cursor + length]
        assert sample.labels.tolist() == labels[cursor : cursor + length]
        inside = sorted({0, length} | {begin - cursor for begin in begins if cursor < begin < cursor + length})
        assert sample.boundaries.tolist() == inside
        cursor += length


def test_every_token_is_an_input_once_an_epoch(tmp_path: Path) -> None:
    """Documents shorter than, as long as, and longer than the context, with lengths changing on the way."""
    store = write_corpus(tmp_path, [numbered([5, 128, 129, 1000])], vocab_size=2000)
    stream = stream_of(store)
    seen: list[int] = []
    for length in [64, 128, 256, 128, 64, 256, 128, 128, 64]:
        seen += pack(stream, len(seen), length).input_ids.tolist()
    rest = store.num_tokens - len(seen)
    seen += pack(stream, len(seen), rest).input_ids.tolist()
    assert sorted(seen) == list(range(1262))


def test_only_the_last_token_of_a_document_has_no_label(tmp_path: Path) -> None:
    store = write_corpus(tmp_path, [numbered([5, 128, 129, 1000])], vocab_size=2000)
    sample = pack(stream_of(store), 0, store.num_tokens)
    last_tokens = {4, 132, 261, 1261}
    unlabelled = sample.labels == IGNORE_INDEX
    assert set(sample.input_ids[unlabelled].tolist()) == last_tokens
    np.testing.assert_array_equal(sample.labels[~unlabelled], sample.input_ids[~unlabelled] + 1)


def test_a_document_that_goes_on_has_its_label_at_the_edge(tmp_path: Path) -> None:
    stream = stream_of(write_corpus(tmp_path, [numbered([10])]))
    assert pack(stream, 0, 4).labels.tolist() == [1, 2, 3, 4]
    assert pack(stream, 4, 6).labels.tolist() == [5, 6, 7, 8, 9, IGNORE_INDEX]


def test_a_document_that_ends_at_the_edge_makes_no_empty_segment(tmp_path: Path) -> None:
    stream = stream_of(write_corpus(tmp_path, [numbered([8, 8, 8])]))
    for cursor in (0, 8, 16, 24):
        sample = pack(stream, cursor, 8)
        assert sample.boundaries.tolist() == [0, 8]
        assert sample.labels[-1] == IGNORE_INDEX


def test_boundaries_are_not_guessed_from_the_eos_id(tmp_path: Path) -> None:
    """An end-of-text id inside a document is a token like any other, and documents without one still end."""
    stream = stream_of(write_corpus(tmp_path, [[[9, EOS, 8, EOS], [7, 6]]]))
    sample = pack(stream, 0, 6)
    assert sample.boundaries.tolist() in ([0, 4, 6], [0, 2, 6])
    labels = dict(zip(sample.input_ids.tolist(), sample.labels.tolist()))
    assert (labels[9], labels[8], labels[7], labels[6]) == (EOS, EOS, 6, IGNORE_INDEX)


def test_epochs_differ_and_are_pure(tmp_path: Path) -> None:
    store = write_corpus(tmp_path, [numbered([1] * 50)])
    epochs = [stream_of(store).epoch(number).documents.tolist() for number in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    backwards = stream_of(store)
    assert [backwards.epoch(number).documents.tolist() for number in (2, 1, 0)] == epochs[::-1]
    assert stream_of(store, key=8).epoch(0).documents.tolist() != epochs[0]


def test_a_sample_longer_than_several_epochs(tmp_path: Path) -> None:
    sample = pack(stream_of(write_corpus(tmp_path, [numbered([1, 2])])), 1, 11)
    assert np.bincount(sample.input_ids).sum() == 11
    assert sample.boundaries[-1] == 11
    assert (np.diff(sample.boundaries) > 0).all()
