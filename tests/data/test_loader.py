import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from data.loader import (
    PADDING,
    DataConfig,
    DataPosition,
    Loader,
    Microbatch,
    SourceConfig,
    open_loader,
    open_sources,
)
from data.pack import IGNORE_INDEX
from data.store import TokenStore
from data.tokenize import tokenize
from tests.data.corpora import byte_tokenizer, numbered, write_corpus
from tests.data.test_tokenize import lines, options, word_tokenizer

LENGTHS = [5, 17, 1, 40, 33, 8, 8, 16, 2, 29]


def make_loader(
    folder: Path,
    *,
    weights: Sequence[float] = (1.0,),
    fraction: float = 0.0,
    seed: int = 3,
    lengths: list[int] = LENGTHS,
) -> Loader:
    """A loader over sources whose tokens are all different, also between sources."""
    size = sum(lengths)
    stores = [
        write_corpus(folder / str(index), [numbered(lengths, first=index * size)], vocab_size=size * len(weights))
        for index in range(len(weights))
    ]
    return Loader(open_sources(stores, weights=weights, fraction=fraction, seed=seed), seed=seed)


def take(
    loader: Loader,
    position: DataPosition,
    *,
    sequences: int = 8,
    length: int = 16,
    rank: int = 0,
    ranks: int = 1,
    microbatch: int = 2,
) -> tuple[list[Microbatch], DataPosition, str]:
    return loader.step(position, sequences=sequences, length=length, rank=rank, ranks=ranks, microbatch=microbatch)


def tokens_of(batches: Sequence[Microbatch]) -> list[int]:
    return [int(token) for batch in batches for token in batch.input_ids.flatten()]


def ids_of(batches: Sequence[Microbatch]) -> list[list[int]]:
    return [row for batch in batches for row in batch.sample_ids.tolist()]


def test_microbatch_shapes_and_types(tmp_path: Path) -> None:
    batches, _, digest = take(make_loader(tmp_path), DataPosition(0, (0,)))
    assert len(batches) == 4
    for batch in batches:
        assert (batch.input_ids.shape, batch.input_ids.dtype) == ((1, 32), torch.int64)
        assert (batch.labels.shape, batch.labels.dtype) == ((1, 32), torch.int64)
        assert batch.cu_seqlens.dtype == torch.int32
        assert (batch.cu_seqlens[0], batch.cu_seqlens[-1]) == (0, 32)
        assert (batch.cu_seqlens.diff() > 0).all()
        assert 16 in batch.cu_seqlens
        assert (batch.sample_ids.shape, batch.sample_ids.dtype) == ((2, 3), np.int64)
    assert len(digest) == 16
    assert int(digest, 16) >= 0


def test_segments_are_documents_and_samples(tmp_path: Path) -> None:
    """Inside a segment tokens count up, and every step that does not is a boundary or a sample's edge."""
    batches, _, _ = take(make_loader(tmp_path), DataPosition(0, (0,)))
    for batch in batches:
        ids = batch.input_ids[0]
        breaks = [0, *(int(at) + 1 for at in (ids.diff() != 1).nonzero())]
        assert sorted({*breaks, 16}) == batch.cu_seqlens[:-1].tolist()
        labelled = batch.labels[0] != IGNORE_INDEX
        assert (batch.labels[0][labelled] == ids[labelled] + 1).all()


def test_samples_are_drawn_by_weight_and_follow_each_other_in_each_source(tmp_path: Path) -> None:
    loader = make_loader(tmp_path, weights=(3.0, 1.0))
    position, ids = loader.start(), []
    for _ in range(128):
        batches, position, _ = take(loader, position)
        ids += ids_of(batches)
    assert position == DataPosition(1024, (768 * 16, 256 * 16))
    for source in (0, 1):
        cursors = [cursor for drawn, cursor, _ in ids if drawn == source]
        assert cursors == list(range(0, len(cursors) * 16, 16))


@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_ranks_draws_the_same_samples_in_the_same_order(tmp_path: Path, ranks: int) -> None:
    loader = make_loader(tmp_path, weights=(2.0, 1.0))
    position = loader.start()
    for _ in range(5):
        alone, after, digest = take(loader, position)
        parts = [take(loader, position, rank=rank, ranks=ranks, microbatch=1) for rank in range(ranks)]
        assert [token for batches, _, _ in parts for token in tokens_of(batches)] == tokens_of(alone)
        assert [row for batches, _, _ in parts for row in ids_of(batches)] == ids_of(alone)
        assert {(part[1], part[2]) for part in parts} == {(after, digest)}
        position = after


def test_stopping_after_any_step_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """Three epochs; after every step a new process goes on from the saved position, twice in a row, even with
    another number of ranks."""
    loader = make_loader(tmp_path, weights=(1.0, 1.0))
    straight, saved, position = [], [], loader.start()
    steps = -(-3 * 2 * sum(LENGTHS) // (8 * 16))
    for _ in range(steps + 2):
        saved.append(json.dumps(position.to_json()))
        batches, position, digest = take(loader, position)
        straight.append((tokens_of(batches), digest))
    for step in range(steps):
        fresh = make_loader(tmp_path, weights=(1.0, 1.0))
        first, after, digest = take(fresh, DataPosition.from_json(json.loads(saved[step])))
        assert (tokens_of(first), digest) == straight[step]
        fresh = make_loader(tmp_path, weights=(1.0, 1.0))
        halves = [take(fresh, after, rank=rank, ranks=2) for rank in (0, 1)]
        assert tokens_of(halves[0][0]) + tokens_of(halves[1][0]) == straight[step + 1][0]


def test_changing_the_length_loses_and_repeats_nothing(tmp_path: Path) -> None:
    loader = make_loader(tmp_path, lengths=[100, 3, 25])
    position, seen = loader.start(), []
    for length, sequences in [(8, 2), (16, 2), (32, 2), (8, 2)]:
        batches, position, _ = take(loader, position, length=length, sequences=sequences)
        seen += tokens_of(batches)
    assert sorted(seen) == list(range(128))


def test_a_source_smaller_than_a_batch_wraps_into_its_next_epoch(tmp_path: Path) -> None:
    loader = make_loader(tmp_path, lengths=[3, 2, 4, 1])
    batches, position, _ = take(loader, loader.start(), sequences=4, length=10)
    epochs = np.array(tokens_of(batches)).reshape(4, 10)
    assert (np.sort(epochs, axis=1) == np.arange(10)).all()
    assert len({tuple(epoch) for epoch in epochs.tolist()}) > 1
    assert position.tokens == (40,)


def test_the_hash_tells_data_seed_and_length_apart(tmp_path: Path) -> None:
    loaders = [
        make_loader(tmp_path / "a"),
        make_loader(tmp_path / "b", seed=4),
        make_loader(tmp_path / "c", lengths=[*LENGTHS, 1]),
    ]
    digests = [take(loader, loader.start())[2] for loader in loaders]
    digests.append(take(loaders[0], loaders[0].start(), length=8)[2])
    digests.append(take(loaders[0], DataPosition(8, (128,)))[2])
    assert len(set(digests)) == 5
    assert take(make_loader(tmp_path / "d"), loaders[0].start())[2] == digests[0]


def test_the_prepared_step_is_the_asked_one(tmp_path: Path) -> None:
    """Asking in another order than the background expects gives the same as asking a loader that prepared nothing."""
    loader = make_loader(tmp_path)
    for cursor in (0, 1, 2, 7, 3, 0):
        position = DataPosition(8 * cursor, (128 * cursor,))
        expected = take(make_loader(tmp_path), position)
        found = take(loader, position)
        assert (tokens_of(found[0]), found[1:]) == (tokens_of(expected[0]), expected[1:])


@given(
    weights=st.lists(st.sampled_from([0, 1, 2, 3, 0.5, 0.25]), min_size=1, max_size=4).filter(any),
    stop=st.integers(0, 6),
    ranks=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 5),
)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_blend_is_the_same_wherever_it_is_resumed_and_on_any_ranks(
    tmp_path: Path, weights: list[float], stop: int, ranks: int, seed: int
) -> None:
    """Weights hold after every sample, whatever the ranks and wherever a run stopped."""
    straight = make_loader(tmp_path, weights=weights, seed=seed)
    position, expected, saved = straight.start(), [], {}
    for step in range(8):
        saved[step] = json.dumps(position.to_json())
        batches, position, digest = take(straight, position)
        expected.append((ids_of(batches), digest))
    resumed = make_loader(tmp_path, weights=weights, seed=seed)
    position = DataPosition.from_json(json.loads(saved[stop]))
    for step in range(stop, 8):
        parts = [take(resumed, position, rank=rank, ranks=ranks, microbatch=1) for rank in range(ranks)]
        assert [row for batches, _, _ in parts for row in ids_of(batches)] == expected[step][0]
        assert {digest for _, _, digest in parts} == {expected[step][1]}
        position = parts[0][1]
    drawn = np.array([row[0] for ids, _ in expected for row in ids])
    for source, weight in enumerate(weights):
        share = weight / sum(weights)
        assert np.abs(np.cumsum(drawn == source) - share * np.arange(1, len(drawn) + 1)).max() < 1 + 1e-9


def test_a_position_of_an_older_order_is_refused(tmp_path: Path) -> None:
    """What a checkpoint from before the order had a version says: the samples there are others now."""
    loader = make_loader(tmp_path)
    old = DataPosition.from_json({"samples": 8, "tokens": [128]})
    assert DataPosition.from_json(loader.start().to_json()) == loader.start()
    with pytest.raises(ValueError, match=r"after 8 samples is of order 1, .* in order 2, .* set another run"):
        take(loader, old)
    with pytest.raises(ValueError, match="is of order 1"):
        loader.check_order(old)


@pytest.mark.parametrize(("sequences", "ranks", "microbatch"), [(8, 3, 1), (8, 2, 3), (0, 1, 1), (8, 1, 0)], ids=str)
def test_batches_that_do_not_divide(tmp_path: Path, sequences: int, ranks: int, microbatch: int) -> None:
    loader = make_loader(tmp_path)
    with pytest.raises(ValueError, match=f"batch.sequences={sequences}: must be a positive multiple of {ranks} ranks"):
        take(loader, loader.start(), sequences=sequences, ranks=ranks, microbatch=microbatch)


def test_position_of_another_blend(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the position is of 2 sources and the blend has 1"):
        take(make_loader(tmp_path), DataPosition(0, (0, 0)))


class TestValidation:
    @pytest.mark.parametrize("ranks", [1, 2, 3, 5])
    def test_every_token_once_over_the_ranks(self, tmp_path: Path, ranks: int) -> None:
        """An uneven tail, more ranks than batches: same number everywhere, every label counted once."""
        loader = make_loader(tmp_path, weights=(1.0, 2.0), fraction=0.5)
        shares = [
            loader.validation_batches(length=16, microbatch=2, max_tokens=10**6, rank=rank, ranks=ranks)
            for rank in range(ranks)
        ]
        assert len({len(share) for share in shares}) == 1
        batches = [batch for share in shares for batch in share]
        labels = [int(label) for batch in batches for label in batch.labels[batch.labels != IGNORE_INDEX]]
        expected = [
            int(label)
            for source in loader.sources
            for document in held_out(source.store, loader)
            for label in source.store.document(document)[1:]
        ]
        assert sorted(labels) == sorted(expected)
        assert all((batch.cu_seqlens.diff() > 0).all() and batch.cu_seqlens[-1] == 32 for batch in batches)

    def test_nothing_is_both_trained_on_and_held_out(self, tmp_path: Path) -> None:
        loader = make_loader(tmp_path, fraction=0.3)
        source = loader.sources[0]
        assert source.validation is not None
        training = set(source.training.epoch(0).documents.tolist())
        validation = set(source.validation.epoch(0).documents.tolist())
        assert training | validation == set(range(len(LENGTHS)))
        assert not training & validation

    def test_the_tail_is_filled_with_a_segment_of_its_own(self, tmp_path: Path) -> None:
        loader = make_loader(tmp_path, lengths=[20, 20], fraction=0.5)
        (batch,) = loader.validation_batches(length=16, microbatch=3, max_tokens=100, rank=0, ranks=1)
        assert batch.cu_seqlens.tolist() == [0, 16, 20, 32, 48]
        assert (batch.labels[0, 20:] == IGNORE_INDEX).all()
        assert (batch.input_ids[0, 20:] == 0).all()
        assert batch.sample_ids.tolist() == [[0, 0, 16], [0, 16, 16], [PADDING, PADDING, 16]]

    def test_the_limit_is_shared_by_weight_in_whole_samples(self, tmp_path: Path) -> None:
        loader = make_loader(tmp_path, weights=(3.0, 1.0), lengths=[100] * 8, fraction=0.5)
        batches = loader.validation_batches(length=16, microbatch=1, max_tokens=130, rank=0, ranks=1)
        assert [row[0] for row in ids_of(batches)] == [0] * 6 + [1] * 2

    def test_always_the_same(self, tmp_path: Path) -> None:
        one, other = make_loader(tmp_path, fraction=0.5), make_loader(tmp_path, fraction=0.5)
        take(other, other.start())
        first, again = (
            loader.validation_batches(length=16, microbatch=2, max_tokens=64, rank=0, ranks=1)
            for loader in (one, other)
        )
        assert tokens_of(first) == tokens_of(again)

    def test_a_source_that_is_not_drawn_from_is_not_validated_on(self, tmp_path: Path) -> None:
        loader = make_loader(tmp_path, weights=(1.0, 0.0), lengths=[100] * 8, fraction=0.5)
        batches = loader.validation_batches(length=16, microbatch=1, max_tokens=64, rank=0, ranks=1)
        assert {row[0] for row in ids_of(batches)} == {0}
        assert loader.num_tokens() == 400

    @pytest.mark.parametrize("sources", [1, 2])
    def test_copies_are_on_one_side_and_told_of(self, tmp_path: Path, sources: int) -> None:
        """A corpus with every document twice, alone and beside a part of itself."""
        documents = [[3 * i + 1, 3 * i + 2, 3 * i] for i in range(100)]
        stores = [write_corpus(tmp_path / "twice", [documents, documents], vocab_size=400)]
        if sources == 2:
            stores.append(write_corpus(tmp_path / "part", [documents[:50]], vocab_size=400))
        opened = open_sources(stores, weights=[1.0] * sources, fraction=0.1, seed=0)
        trained, held = set(), set()
        for source in opened:
            assert source.validation is not None
            for stream, texts in ((source.training, trained), (source.validation, held)):
                texts |= {tuple(source.store.document(int(i)).tolist()) for i in stream.epoch(0).documents}
        assert not trained & held
        assert len(held) == 10
        assert len(trained) == 90
        notes = Loader(opened, seed=0).notes()
        assert len(notes) == sources
        assert "twice: 100 of 200 documents are copies of others, on one side of the split" in notes[0]

    def test_nothing_held_out(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"data.validation_fraction=0: there is no held-out text"):
            make_loader(tmp_path).validation_batches(length=16, microbatch=2, max_tokens=64, rank=0, ranks=1)


def held_out(store: TokenStore, loader: Loader) -> list[int]:
    (source,) = (source for source in loader.sources if source.store is store)
    assert source.validation is not None
    return [int(document) for document in source.validation.epoch(0).documents]


class TestConfig:
    def test_all_problems_at_once(self) -> None:
        config = DataConfig(
            sources=[SourceConfig("", -1.0), SourceConfig("s3://there", float("nan"))],
            vocab_size=10,
            validation_fraction=1.5,
            verify="maybe",
        )
        assert [line.split(":")[0] for line in config.errors()] == [
            "data.sources[0].path",
            "data.sources[1].path=s3",
            "data.sources[0].weight=-1.0",
            "data.sources[1].weight=nan",
            "data.vocab_size=10",
            "data.validation_fraction=1.5",
            "data.verify=maybe",
        ]

    def test_defaults_are_right_and_structured(self) -> None:
        assert DataConfig().errors() == []
        assert DataConfig().default_corpus
        config = OmegaConf.merge(OmegaConf.structured(DataConfig), {"sources": [{"path": "mine", "weight": 2}]})
        assert OmegaConf.to_object(config) == DataConfig(sources=[SourceConfig("mine", 2.0)])


class TestOpen:
    def test_blend_of_folders_with_tokenizer(self, tmp_path: Path) -> None:
        text = byte_tokenizer(tmp_path).read_text()
        for name, first in (("a", 0), ("b", 100)):
            write_corpus(tmp_path / name, [numbered([10] * 10, first=first)], vocab_size=259, tokenizer=text)
        config = DataConfig(sources=[SourceConfig(str(tmp_path / name), 1.0) for name in "ab"], validation_fraction=0.2)
        loader = open_loader(config, cache=tmp_path / "cache", vocab_size=259, seed=0)
        assert loader.num_tokens() == 160
        assert loader.start() == DataPosition(0, (0, 0))
        assert loader.decode(loader.encode_prompt("def f")) == "def f"
        assert loader.decode(loader.encode_prompt("")) == "\n"
        assert loader.unigram_entropy() == pytest.approx(np.log(200), rel=1e-12)

    @pytest.mark.parametrize("prompt", ["", " ", "\n\n"])
    def test_a_prompt_without_tokens_begins_with_the_end_of_a_text(self, tmp_path: Path, prompt: str) -> None:
        """A tokenizer that splits at white space has no ids for it, and generation begins with one."""
        words = word_tokenizer(tmp_path / "t.json", vocab={"a": 0, "<|eos|>": 1})
        source = lines(tmp_path / "in.jsonl", {"text": "a a"}, {"text": "a"})
        tokenize(options(source, tokenizer=words), tmp_path / "corpus")
        config = DataConfig(sources=[SourceConfig(str(tmp_path / "corpus"), 1.0)], validation_fraction=0)
        loader = open_loader(config, cache=tmp_path, vocab_size=2, seed=0)
        assert loader.encode_prompt(prompt) == [1]
        assert loader.encode_prompt("a a") == [0, 0]

    def test_sources_with_different_tokenizers(self, tmp_path: Path) -> None:
        write_corpus(tmp_path / "a", [[[1], [2]]])
        write_corpus(tmp_path / "b", [[[1], [2]]], tokenizer="{ }")
        config = DataConfig(sources=[SourceConfig(str(tmp_path / name), 1.0) for name in "ab"])
        with pytest.raises(ValueError, match=r"data.sources\[1\].path=.*b: has another tokenizer than"):
            open_loader(config, cache=tmp_path, vocab_size=300, seed=0)
