import hashlib
import json
import math
import os
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data import store as store_module
from data.manifest import dtype_name, read_manifest
from data.store import SCAN_SHARDS, TokenStore, unigram_entropy
from tests.data.corpora import write_corpus

SHARDS = [[[1, 2, 3], [4]], [[5, 6]], [[7], [8, 9, 10], [11]]]


def test_documents_through_shards(tmp_path: Path) -> None:
    store = write_corpus(tmp_path, SHARDS)
    documents = [document for shard in SHARDS for document in shard]
    assert (store.num_documents, store.num_tokens) == (6, 11)
    assert store.document_lengths().dtype == np.int64
    assert store.document_lengths().tolist() == [len(document) for document in documents]
    assert [store.document(index).tolist() for index in range(6)] == documents
    assert store.read(4, 1, 3).tolist() == [9, 10]
    shards, starts = store.locate(np.array([5, 0, 2, 1]))
    assert (shards.tolist(), starts.tolist()) == ([2, 0, 1, 0], [4, 0, 0, 3])


def test_no_such_document(tmp_path: Path) -> None:
    with pytest.raises(IndexError, match="document 6 of 6"):
        write_corpus(tmp_path, SHARDS).document(6)


@pytest.mark.parametrize("verify", ["auto", "size"])
def test_2500_shards_are_opened_without_being_mapped(tmp_path: Path, verify: str) -> None:
    manifest = write_corpus(tmp_path, [[[5, 1]]]).manifest
    names = [f"shard-{index:05d}" for index in range(2500)]
    for name in names[1:]:
        os.link(tmp_path / "shard-00000.tokens", tmp_path / f"{name}.tokens")
        os.link(tmp_path / "shard-00000.index", tmp_path / f"{name}.index")
        os.link(tmp_path / "shard-00000.hashes", tmp_path / f"{name}.hashes")
    shards = tuple(replace(manifest.shards[0], name=name) for name in names)
    replace(manifest, shards=shards).write(tmp_path)
    store = TokenStore.open(tmp_path, verify=verify)
    assert mapped_shards(tmp_path) <= 2 * SCAN_SHARDS
    assert store.document(2499).tolist() == [5, 1]


def mapped_shards(folder: Path) -> int:
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("file", ["shard-00001.tokens", "shard-00001.index"])
class TestDamage:
    def test_truncated(self, tmp_path: Path, file: str) -> None:
        write_corpus(tmp_path, SHARDS)
        path = tmp_path / file
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(ValueError, match=rf"{file}: is \d+ bytes and must be \d+, so it is truncated"):
            TokenStore.open(tmp_path)

    def test_altered_byte_is_found_by_hash(self, tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
        write_corpus(tmp_path, SHARDS)
        path = tmp_path / file
        content = bytearray(path.read_bytes())
        content[0] ^= 1
        path.write_bytes(content)
        TokenStore.open(tmp_path, verify="size")
        for verify in ("hash", "auto"):
            with pytest.raises(ValueError, match=f"{file}: its SHA-256 is not the manifest's"):
                TokenStore.open(tmp_path, verify=verify)
        # 11 tokens of 2 bytes and 6 + 3 offsets of 8: one byte more than is hashed unasked.
        monkeypatch.setattr(store_module, "HASH_BYTES", 93)
        TokenStore.open(tmp_path, verify="auto")
        with pytest.raises(ValueError, match=f"{file}: its SHA-256 is not the manifest's"):
            TokenStore.open(tmp_path, verify="hash")

    def test_missing(self, tmp_path: Path, file: str) -> None:
        write_corpus(tmp_path, SHARDS)
        (tmp_path / file).unlink()
        with pytest.raises(ValueError, match=f"{file}: is missing"):
            TokenStore.open(tmp_path)


@pytest.mark.parametrize("verify", ["auto", "size", "hash"])
class TestTokenizerFile:
    """It is needed first when text is generated, long after the start."""

    def test_missing(self, tmp_path: Path, verify: str) -> None:
        write_corpus(tmp_path, SHARDS)
        (tmp_path / "tokenizer.json").unlink()
        with pytest.raises(ValueError, match=r"/tokenizer.json: is missing; copy it again, or remove its folder"):
            TokenStore.open(tmp_path, verify=verify)

    def test_altered(self, tmp_path: Path, verify: str) -> None:
        write_corpus(tmp_path, SHARDS)
        (tmp_path / "tokenizer.json").write_text("[]")
        with pytest.raises(ValueError, match=r"/tokenizer.json: its SHA-256 is not the manifest's.*; copy it again"):
            TokenStore.open(tmp_path, verify=verify)

    def test_unreadable(self, tmp_path: Path, verify: str) -> None:
        write_corpus(tmp_path, SHARDS)
        (tmp_path / "tokenizer.json").unlink()
        (tmp_path / "tokenizer.json").mkdir()
        with pytest.raises(ValueError, match=r"/tokenizer.json: cannot be read \(Is a directory\); copy it again"):
            TokenStore.open(tmp_path, verify=verify)


def test_intact_corpus_passes_hash(tmp_path: Path) -> None:
    write_corpus(tmp_path, SHARDS)
    assert TokenStore.open(tmp_path, verify="hash").num_tokens == 11


@pytest.mark.parametrize("offsets", [[0, 3, 3], [0, 2, 4, 5], [1, 3, 4], [0, 5, 4], []], ids=str)
def test_index_that_contradicts_the_manifest(tmp_path: Path, offsets: list[int]) -> None:
    """Even with the right hash: a manifest may have been made by another program."""
    manifest = write_corpus(tmp_path, SHARDS).manifest
    index = np.array(offsets, dtype="<i8").tobytes()
    (tmp_path / "shard-00000.index").write_bytes(index)
    altered = replace(manifest.shards[0], index_sha256=hashlib.sha256(index).hexdigest())
    store = TokenStore(tmp_path, replace(manifest, shards=(altered, *manifest.shards[1:])), maps=1)
    with pytest.raises(ValueError, match=r"shard-00000.index: must rise from 0 to 4"):
        store.document_lengths()


@pytest.mark.parametrize("verify", ["auto", "size"])
def test_inner_offsets_that_were_altered_are_noticed_at_any_size(
    tmp_path: Path, verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They still rise from 0 to the end; a source above the size that is hashed whole stands for 1 GiB."""
    write_corpus(tmp_path, [[[1, 2, 3], [4, 5]]])
    np.array([0, 2, 5], dtype="<i8").tofile(tmp_path / "shard-00000.index")
    monkeypatch.setattr(store_module, "HASH_BYTES", 0)
    store = TokenStore.open(tmp_path, verify=verify)
    with pytest.raises(ValueError, match=r"shard-00000.index: its SHA-256 is not the manifest's, so it was altered"):
        store.document_lengths()


class TestHashes:
    """Of documents, to find copies."""

    def test_equal_exactly_for_equal_documents(self, tmp_path: Path) -> None:
        hashes = write_corpus(tmp_path, [[[1, 2], [3], [1, 2]], [[2, 1], [3], [1], [2, 3]]]).document_hashes()
        assert hashes is not None
        assert hashes.dtype == np.uint64
        assert hashes[0] == hashes[2]
        assert hashes[1] == hashes[4]
        assert len(set(hashes.tolist())) == 5

    def test_of_a_corpus_from_before_they_were_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        new = write_corpus(tmp_path, SHARDS)
        kept = new.document_hashes()
        raw = json.loads((tmp_path / "manifest.json").read_text())
        del raw["copies"]
        for shard in raw["shards"]:
            del shard["hashes_sha256"]
            (tmp_path / f"{shard['name']}.hashes").unlink()
        (tmp_path / "manifest.json").write_text(json.dumps(raw))
        old = TokenStore.open(tmp_path)
        assert old.manifest.content_hash == new.manifest.content_hash
        np.testing.assert_array_equal(old.document_hashes(), kept)
        monkeypatch.setattr(store_module, "HASH_BYTES", 0)
        assert TokenStore.open(tmp_path).document_hashes() is None

    def test_altered(self, tmp_path: Path) -> None:
        store = write_corpus(tmp_path, SHARDS)
        path = tmp_path / "shard-00001.hashes"
        path.write_bytes(bytes(8))
        with pytest.raises(ValueError, match=r"shard-00001.hashes: its SHA-256 is not the manifest's"):
            store.document_hashes()
        path.unlink()
        with pytest.raises(ValueError, match=r"shard-00001.hashes: is missing"):
            TokenStore.open(tmp_path)


class TestOpenFiles:
    """A map holds a descriptor, and a process may have only so many."""

    def test_maps_are_let_go(self, tmp_path: Path) -> None:
        write_corpus(tmp_path, [[[i, i + 1]] for i in range(300)], vocab_size=400)
        _, hard = limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(64, 2 * room), hard))
        try:
            store = TokenStore.open(tmp_path)
            other = TokenStore.open(tmp_path, stores=2)
            for _ in range(2):
                for shard in range(300):
                    assert store.shard_tokens(shard).tolist() == [shard, shard + 1]
                    assert other.document(299 - shard).tolist() == [299 - shard, 300 - shard]
            assert mapped_shards(tmp_path) <= max(64, 2 * room) // 4 * 3 // 2
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    def test_what_is_used_again_stays_mapped(self, tmp_path: Path) -> None:
        manifest = write_corpus(tmp_path, [[[i]] for i in range(4)]).manifest
        store = TokenStore(tmp_path, manifest, maps=2)
        first = store.shard_tokens(0)
        store.shard_tokens(1)
        assert store.shard_tokens(0) is first
        store.shard_tokens(2)
        assert store.shard_tokens(0) is first
        assert mapped_shards(tmp_path) == 2


def test_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no manifest.json, so it is not a finished tokenised corpus"):
        TokenStore.open(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 299}, "content_hash=.*: does not match"),
        ({"tokens": 12}, "content_hash=.*: does not match"),
        ({"format": 2}, "format=2: must be 1"),
        ({"colour": "red"}, "a manifest of format 1"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_altered_manifest(tmp_path: Path, change: dict[str, object], message: str) -> None:
    write_corpus(tmp_path, SHARDS)
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        TokenStore.open(tmp_path)


def test_half_a_manifest(tmp_path: Path) -> None:
    write_corpus(tmp_path, SHARDS)
    path = tmp_path / "manifest.json"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="must be JSON"):
        TokenStore.open(tmp_path)


def test_content_hash_covers_tokens_but_not_where_they_came_from(tmp_path: Path) -> None:
    one = write_corpus(tmp_path / "one", SHARDS).manifest
    other = write_corpus(tmp_path / "other", [*SHARDS[:2], [[7], [8, 9, 10], [12]]]).manifest
    assert one.content_hash != other.content_hash
    elsewhere = replace(one, made_from={"sources": ["elsewhere"]})
    assert elsewhere.content_hash == one.content_hash


class TestIdType:
    """Ids must not wrap modulo 65,536."""

    @pytest.mark.parametrize(
        ("vocab_size", "name"),
        [(65535, "uint16"), (65536, "uint16"), (65537, "uint32"), (129280, "uint32")],
    )
    def test_chosen_by_the_largest_id(self, vocab_size: int, name: str) -> None:
        assert dtype_name(vocab_size) == name

    def test_larger_than_any_id_type(self) -> None:
        with pytest.raises(ValueError, match="vocab_size=4294967297: ids must fit uint32"):
            dtype_name(2**32 + 1)

    def test_large_ids_survive(self, tmp_path: Path) -> None:
        ids = [0, 65535, 65536, 70000]
        store = write_corpus(tmp_path, [[ids]], vocab_size=129280)
        assert store.document(0).tolist() == ids

    def test_uint32_file_is_not_read_as_uint16(self, tmp_path: Path) -> None:
        manifest = write_corpus(tmp_path, [[[0, 65535, 65536, 70000]]], vocab_size=129280).manifest
        replace(manifest, dtype="uint16", vocab_size=65536).write(tmp_path)
        with pytest.raises(ValueError, match=r"shard-00000.tokens: 16 bytes for 4 tokens of 2 bytes"):
            TokenStore.open(tmp_path)

    @pytest.mark.parametrize("vocab_size", [65537, 70000])
    def test_vocabulary_beyond_the_id_type(self, tmp_path: Path, vocab_size: int) -> None:
        manifest = write_corpus(tmp_path, SHARDS).manifest
        replace(manifest, vocab_size=vocab_size).write(tmp_path)
        with pytest.raises(ValueError, match=rf"vocab_size={vocab_size}: its ids do not fit dtype=uint16"):
            TokenStore.open(tmp_path)
        replace(manifest, vocab_size=65536).write(tmp_path)
        assert TokenStore.open(tmp_path).num_tokens == 11

    def test_unknown_id_type(self, tmp_path: Path) -> None:
        manifest = write_corpus(tmp_path, SHARDS).manifest
        replace(manifest, dtype="int8").write(tmp_path)
        with pytest.raises(ValueError, match="dtype=int8: must be one of uint16, uint32"):
            read_manifest(tmp_path)

    def test_tokenizer_larger_than_the_model(self, tmp_path: Path) -> None:
        write_corpus(tmp_path, SHARDS, vocab_size=300)
        with pytest.raises(ValueError, match=r"its tokenizer has 300 ids, which must fit into model.vocab_size=299"):
            TokenStore.open(tmp_path, vocab_size=299)
        assert TokenStore.open(tmp_path, vocab_size=300).num_documents == 6

    @pytest.mark.parametrize("vocab_size", [300, 5000], ids=["model-as-tokenizer", "larger-model"])
    def test_foreign_ids_are_found_by_the_scan(self, tmp_path: Path, vocab_size: int) -> None:
        write_corpus(tmp_path, [[[7] * 100_000]], vocab_size=300)
        np.full(100_000, 300, dtype="<u2").tofile(tmp_path / "shard-00000.tokens")
        with pytest.raises(ValueError, match=r"shard-00000.tokens: has the id 300, which must be below 300"):
            TokenStore.open(tmp_path, verify="size", vocab_size=vocab_size)

    def test_foreign_ids_that_the_scan_misses(self, tmp_path: Path) -> None:
        write_corpus(tmp_path, [[[7] * 100_000]], vocab_size=348)
        ids = np.full(100_000, 7, dtype="<u2")
        ids[1000] = 65033
        ids.tofile(tmp_path / "shard-00000.tokens")
        store = TokenStore.open(tmp_path, verify="size", vocab_size=8192)
        foreign = r"shard-00000.tokens: has the id 65033, which must be below 348, .*; it was altered; copy it again"
        with pytest.raises(ValueError, match=foreign):
            store.unigram_counts()

    def test_foreign_ids_in_the_manifest(self, tmp_path: Path) -> None:
        manifest = write_corpus(tmp_path, SHARDS).manifest
        replace(manifest, vocab_size=11).write(tmp_path)
        with pytest.raises(ValueError, match=r"shard-00002.tokens: has the id 11, which must be below 11"):
            TokenStore.open(tmp_path, verify="size")


def test_unigram_entropy_closed_form(tmp_path: Path) -> None:
    store = write_corpus(tmp_path, [[[1, 1]], [[2, 3]]])
    assert unigram_entropy(store.unigram_counts()) == pytest.approx(1.5 * math.log(2), rel=1e-12)


def test_unigram_counts_of_a_sample(tmp_path: Path) -> None:
    store = write_corpus(tmp_path, [[[1, 2] * 50_000] for _ in range(4)])
    counts = store.unigram_counts(most_tokens=20_000)
    assert 10_000 < counts.sum() <= 20_000
    assert counts[1] == counts[2]
