import base64
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from data.encoded import REPLACEMENT
from data.manifest import Counts, Manifest
from data.readers import Piece, read_piece, record_batches, row_groups
from data.sources import plan_inputs
from data.store import TokenStore
from data.tokenize import Options, main, tokenize
from data.tokenizer import EOS, eos_id_of, load_tokenizer, read_tokenizer, train_bpe, vocab_size_of
from tests.data.corpora import byte_tokenizer


def lines(path: Path, *rows: object) -> str:
    """A .jsonl file; bytes are taken as they are, other values as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return str(path)


def options(*sources: str | Path, tokenizer: Path, **changes: object) -> Options:
    return replace(Options(sources=tuple(map(str, sources)), tokenizer=str(tokenizer)), **changes)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return byte_tokenizer(tmp_path / "tokenizer")


def word_tokenizer(path: Path, *, vocab: dict[str, int], added: list[str] | None = None) -> Path:
    """A tokenizer of words; one that it does not know is its first."""
    made = Tokenizer(models.WordLevel(vocab, unk_token=next(iter(vocab))))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken(name) for name in added or []])
    made.save(str(path))
    return path


def texts_of(out: Path) -> list[str]:
    """Decoded documents of a corpus; every one must end with the end-of-text token, which is left out."""
    store = TokenStore.open(out, verify="hash")
    tokenizer = load_tokenizer(store.tokenizer_file)
    eos = store.manifest.eos_id
    found = []
    for index in range(store.num_documents):
        ids = store.document(index).tolist()
        if eos is not None:
            assert ids[-1] == eos
            ids = ids[:-1]
        found.append(tokenizer.decode(ids, skip_special_tokens=False))
    return found


class TestBadText:
    @pytest.mark.parametrize(
        ("row", "counts", "text"),
        [
            pytest.param({"text": ""}, Counts(empty=1), None, id="empty"),
            pytest.param({"text": " \n\t "}, Counts(empty=1), None, id="white-space"),
            pytest.param({"body": "x"}, Counts(missing=1), None, id="missing-field"),
            pytest.param({"text": None}, Counts(missing=1), None, id="null"),
            pytest.param(b'{"text": "a\xacb"}', Counts(replaced=1), f"a{REPLACEMENT}b", id="invalid-utf-8"),
            pytest.param(b'{"text": "a\\ud800b"}', Counts(replaced=1), f"a{REPLACEMENT}b", id="lone-surrogate"),
            pytest.param(b'{"text": "\\ud83d\\ude00"}', Counts(), "\U0001f600", id="surrogate-pair"),
            pytest.param(b"", Counts(), None, id="blank-line"),
            pytest.param({"text": f"a{EOS}b"}, Counts(), f"a{EOS}b", id="name-of-a-special-token"),
        ],
    )
    @pytest.mark.parametrize("place", [0, 1, 2], ids=["first", "middle", "last"])
    def test_one_row_among_good_ones(
        self, tmp_path: Path, tokenizer: Path, row: object, counts: Counts, text: str | None, place: int
    ) -> None:
        rows: list[object] = [{"text": "one"}, {"text": "two"}]
        rows.insert(place, row)
        expected: list[str | None] = ["one", "two"]
        expected.insert(place, text)
        manifest = tokenize(options(lines(tmp_path / "in.jsonl", *rows), tokenizer=tokenizer), tmp_path / "out")
        kept = [text for text in expected if text is not None]
        assert manifest.counts == counts
        assert texts_of(tmp_path / "out") == kept
        assert manifest.documents == len(kept)
        # Every byte of the text is a token, and every document has its end besides.
        lengths = TokenStore.open(tmp_path / "out").document_lengths()
        assert manifest.tokens == lengths.sum() == sum(len(text.encode()) for text in kept) + len(kept)

    @pytest.mark.parametrize(
        ("row", "problem"),
        [
            (b'{"text": "cut', "Unterminated string"),
            (b"[1, 2]", "a row must be an object and is list"),
            (b'{"text": 5}', "text must be a string and is int"),
        ],
        ids=["truncated-line", "array", "number"],
    )
    def test_malformed_line_is_named_and_nothing_looks_final(
        self, tmp_path: Path, tokenizer: Path, row: bytes, problem: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = lines(tmp_path / "in.jsonl", *[{"text": "good"}] * 9, row)
        out = tmp_path / "out"
        arguments = ["--source", source, "--tokenizer", str(tokenizer), "--out", str(out), "--shard-tokens", "8"]
        assert main([*arguments, "--workers", "1"]) == 1
        errors = capsys.readouterr().err.strip().splitlines()[-1]
        assert errors.startswith(f"error: {source}:10: {problem}")
        assert not (out / "manifest.json").exists()
        assert not list(out.glob("**/.*.partial"))
        with pytest.raises(ValueError, match="not a finished tokenised corpus"):
            TokenStore.open(out)

    def test_byte_order_marks_are_dropped(self, tmp_path: Path, tokenizer: Path) -> None:
        bom = b"\xef\xbb\xbf"
        (tmp_path / "in").mkdir()
        (tmp_path / "in/a.txt").write_bytes(bom + b"text")
        lines(tmp_path / "in/b.jsonl", bom + b'{"text": "line"}')
        (tmp_path / "in/c.json").write_bytes(bom + b'[{"text": "element"}]')
        manifest = tokenize(options(tmp_path / "in", tokenizer=tokenizer), tmp_path / "out")
        assert texts_of(tmp_path / "out") == ["text", "line", "element"]
        assert manifest.counts == Counts()

    def test_damaged_text_file(self, tmp_path: Path, tokenizer: Path) -> None:
        (tmp_path / "in.txt").write_bytes("\u00e9t\u00e9 caf".encode() + b"\xe9")
        manifest = tokenize(options(tmp_path / "in.txt", tokenizer=tokenizer), tmp_path / "out")
        assert manifest.counts == Counts(replaced=1)
        assert texts_of(tmp_path / "out") == [f"\u00e9t\u00e9 caf{REPLACEMENT}"]

    def test_long_line(self, tmp_path: Path) -> None:
        """A 10 MB line, many times the size of a unit, is one document."""
        words = word_tokenizer(tmp_path / "t.json", vocab={"a": 0, "b": 1, "<|eos|>": 2})
        long = ("y" * 999_999 + " ") * 9 + "b " * 50_000
        source = lines(tmp_path / "in.jsonl", {"text": "a"}, {"text": long}, {"text": "b"})
        manifest = tokenize(options(source, tokenizer=words, shard_tokens=200_000), tmp_path / "out")
        lengths = TokenStore.open(tmp_path / "out").document_lengths()
        assert lengths.tolist() == [2, 9 + 50_000 + 1, 2]
        assert len(manifest.shards) == 2

    @pytest.mark.parametrize("rows", [[], [{"text": " "}], [{"body": "x"}]], ids=["none", "white-space", "no-field"])
    def test_empty_corpus(self, tmp_path: Path, tokenizer: Path, rows: list[object]) -> None:
        with pytest.raises(ValueError, match=r"there is no document in .* name other sources or another --text-field"):
            tokenize(options(lines(tmp_path / "in.jsonl", *rows), tokenizer=tokenizer), tmp_path / "out")
        assert not (tmp_path / "out/manifest.json").exists()


class TestTokenizer:
    def test_no_eos_is_an_error_before_any_work(self, tmp_path: Path) -> None:
        plain = word_tokenizer(tmp_path / "t.json", vocab={"a": 0, "b": 1})
        source = lines(tmp_path / "in.jsonl", {"text": "a b"})
        with pytest.raises(ValueError, match="append_eos: the tokenizer has no end-of-text token"):
            tokenize(options(source, tokenizer=plain), tmp_path / "out")
        assert not (tmp_path / "out").exists()
        manifest = tokenize(options(source, tokenizer=plain, append_eos=False), tmp_path / "out")
        assert (manifest.tokens, manifest.eos_id) == (2, None)

    def test_eos_by_name(self, tmp_path: Path) -> None:
        plain = word_tokenizer(tmp_path / "t.json", vocab={"a": 0}, added=["<stop>"])
        source = lines(tmp_path / "in.jsonl", {"text": "a"})
        manifest = tokenize(options(source, tokenizer=plain, eos_token="<stop>"), tmp_path / "out")
        assert TokenStore.open(tmp_path / "out").document(0).tolist() == [0, manifest.eos_id]

    @pytest.mark.parametrize(
        ("base", "dtype"), [(65535, "uint16"), (65536, "uint32")], ids=["added-token-is-65535", "added-token-is-65536"]
    )
    def test_id_type_counts_added_tokens(self, tmp_path: Path, base: int, dtype: str) -> None:
        plain = word_tokenizer(tmp_path / "t.json", vocab={f"w{i}": i for i in range(base)}, added=["<|eos|>"])
        source = lines(tmp_path / "in.jsonl", {"text": f"w1 w{base - 1}"})
        manifest = tokenize(options(source, tokenizer=plain), tmp_path / "out")
        assert (manifest.dtype, manifest.vocab_size) == (dtype, base + 1)
        assert TokenStore.open(tmp_path / "out").document(0).tolist() == [1, base - 1, base]

    def test_gaps_in_the_vocabulary(self, tmp_path: Path) -> None:
        plain = word_tokenizer(tmp_path / "t.json", vocab={"a": 0, "b": 70000, "<|eos|>": 5})
        source = lines(tmp_path / "in.jsonl", {"text": "b"})
        manifest = tokenize(options(source, tokenizer=plain), tmp_path / "out")
        assert (manifest.dtype, manifest.vocab_size, manifest.shards[0].max_id) == ("uint32", 70001, 70000)

    @pytest.mark.parametrize("workers", [1, 2])
    def test_words_without_a_token(self, tmp_path: Path, workers: int, capsys: pytest.CaptureFixture[str]) -> None:
        """The library raises a plain Exception, in whichever process."""
        made = Tokenizer(models.WordLevel({"a": 0, "<|eos|>": 1}, unk_token="<unk>"))
        made.save(str(tmp_path / "t.json"))
        source = lines(tmp_path / "in.jsonl", *({"text": "unknown"} for _ in range(9)))
        arguments = ["--source", source, "--tokenizer", str(tmp_path / "t.json"), "--out", str(tmp_path / "out")]
        assert main([*arguments, "--shard-tokens", "8", "--workers", str(workers)]) == 1
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("error: --tokenizer: cannot encode a document (WordLevel error")
        assert not (tmp_path / "out").exists()

    def test_settings_for_other_uses_are_off(self, tmp_path: Path, tokenizer: Path) -> None:
        """Truncation in the file would drop text silently, padding would add tokens."""
        made = Tokenizer.from_file(str(tokenizer))
        made.enable_truncation(4)
        made.enable_padding(length=16)
        made.save(str(tokenizer))
        source = lines(tmp_path / "in.jsonl", {"text": "abcdefgh"}, {"text": "ij"})
        tokenize(options(source, tokenizer=tokenizer), tmp_path / "out")
        assert texts_of(tmp_path / "out") == ["abcdefgh", "ij"]

    def test_trained_bpe(self) -> None:
        texts = ["def f(x):\n    return x\n"] * 3 + ["naïve ☃"]
        text = train_bpe(texts, vocab_size=300)
        assert text == train_bpe(texts, vocab_size=300)
        made = Tokenizer.from_str(text)
        assert [made.token_to_id(name) for name in ("<|bos|>", "<|eos|>", "<|pad|>")] == [0, 1, 2]
        assert eos_id_of(made) == 1
        assert vocab_size_of(made) <= 300
        unseen = "any text: \x00 \U0001f600 é\r\n"
        assert made.decode(made.encode(unseen).ids) == unseen

    def test_training_needs_room_for_the_bytes(self) -> None:
        with pytest.raises(ValueError, match="vocab_size=258: must be at least 259"):
            train_bpe([], vocab_size=258)

    @pytest.mark.parametrize("content", [None, "{}"], ids=["absent", "not-a-tokenizer"])
    def test_bad_file(self, tmp_path: Path, content: str | None) -> None:
        path = tmp_path / "t.json"
        if content is not None:
            path.write_text(content)
        with pytest.raises(ValueError, match=r"^--tokenizer=.*t.json: (cannot be read|is not a tokenizer.json)"):
            load_tokenizer(path)


TEN = list(map(str, range(10)))


def documents_of(table: pa.Table, folder: Path, *, reader: str, field: str) -> list[str | None]:
    """A table's texts, through one of the two columnar readers."""
    path = folder / f"in.{reader}"
    if reader == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=4)
        piece = Piece("parquet", str(path), 0, row_groups(str(path)), 0)
    else:
        with pa.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table, max_chunksize=4)
        piece = Piece("arrow", str(path), 0, record_batches(str(path)), 0)
    return [document.text for document in read_piece(piece, text_field=field)]


class TestSources:
    def test_folder_in_order_of_names(self, tmp_path: Path, tokenizer: Path) -> None:
        root = tmp_path / "in"
        (root / "b").mkdir(parents=True)
        (root / ".hidden").mkdir()
        for name, text in [
            ("z.py", "3"),
            ("b/y.md", "4"),
            ("a.txt", "1"),
            ("image.png", "no"),
            (".hidden/a.txt", "no"),
        ]:
            (root / name).write_text(text)
        lines(root / "m.jsonl", {"text": "2"}, {"text": "2b"})
        tokenize(options(root, tokenizer=tokenizer), tmp_path / "out")
        assert texts_of(tmp_path / "out") == ["1", "2", "2b", "3", "4"]

    def test_only_some_suffixes(self, tmp_path: Path, tokenizer: Path) -> None:
        root = tmp_path / "in"
        root.mkdir()
        for name, text in [("a.PY", "1"), ("b.txt", "no"), ("c.odd", "2"), ("package.json", "{\n}")]:
            (root / name).write_text(text)
        with pytest.raises(ValueError, match=r"package.json:1: .* leave such files out with --suffix"):
            tokenize(options(root, tokenizer=tokenizer), tmp_path / "all")
        tokenize(options(root, tokenizer=tokenizer, suffixes=(".py", ".odd")), tmp_path / "out")
        assert texts_of(tmp_path / "out") == ["1", "2"]

    def test_other_field_and_json_forms(self, tmp_path: Path, tokenizer: Path) -> None:
        array = tmp_path / "array.json"
        array.write_text(json.dumps([{"body": "1"}, {"body": "2"}], indent=1))
        as_lines = lines(tmp_path / "lines.json", {"body": "3"}, {"body": "4"})
        tokenize(options(array, as_lines, tokenizer=tokenizer, text_field="body"), tmp_path / "out")
        assert texts_of(tmp_path / "out") == ["1", "2", "3", "4"]

    @pytest.mark.parametrize(("name", "rows"), [("in.json", {"text": "1"}), ("in.jsonl", [{"text": "1"}])])
    def test_json_over_several_lines(self, tmp_path: Path, tokenizer: Path, name: str, rows: object) -> None:
        (tmp_path / name).write_text(json.dumps(rows, indent=1))
        problem = (
            rf"{name}:1: Expecting .*; JSON is read as one object a line, or a .json file as one list, and never as"
        )
        with pytest.raises(ValueError, match=problem):
            tokenize(options(tmp_path / name, tokenizer=tokenizer), tmp_path / "out")

    def test_bad_element_of_a_json_array(self, tmp_path: Path, tokenizer: Path) -> None:
        (tmp_path / "in.json").write_text('[{"text": "1"}, 2]')
        with pytest.raises(ValueError, match=r"in.json: element 1: a row must be an object"):
            tokenize(options(tmp_path / "in.json", tokenizer=tokenizer), tmp_path / "out")

    @pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())], ids=str)
    def test_parquet_row_groups(self, tmp_path: Path, tokenizer: Path, kind: pa.DataType) -> None:
        column = pa.array([*map(str, range(10)), None, "", "last"]).cast(kind)
        pyarrow.parquet.write_table(pa.table({"text": column}), tmp_path / "in.parquet", row_group_size=3)
        manifest = tokenize(options(tmp_path / "in.parquet", tokenizer=tokenizer, shard_tokens=1), tmp_path / "out")
        assert texts_of(tmp_path / "out") == [*map(str, range(10)), "last"]
        assert manifest.counts == Counts(empty=1, missing=1)
        assert len(manifest.shards) == 5

    def test_parquet_with_invalid_utf8(self, tmp_path: Path, tokenizer: Path) -> None:
        column = pa.Array.from_buffers(pa.string(), 1, pa.array([b"a\xacb"]).buffers())
        pyarrow.parquet.write_table(pa.table({"text": column}), tmp_path / "in.parquet")
        manifest = tokenize(options(tmp_path / "in.parquet", tokenizer=tokenizer), tmp_path / "out")
        assert manifest.counts == Counts(replaced=1)

    @pytest.mark.parametrize(
        ("column", "problem"), [("body", "has no column text but body"), ("text", "column text is int64")]
    )
    def test_parquet_without_text(self, tmp_path: Path, tokenizer: Path, column: str, problem: str) -> None:
        pyarrow.parquet.write_table(pa.table({column: [1]}), tmp_path / "in.parquet")
        with pytest.raises(ValueError, match=problem):
            tokenize(options(tmp_path / "in.parquet", tokenizer=tokenizer), tmp_path / "out")

    def test_damaged_parquet(self, tmp_path: Path, tokenizer: Path) -> None:
        (tmp_path / "in.parquet").write_bytes(b"PAR1 no")
        with pytest.raises(ValueError, match=r"in.parquet: is not a parquet file"):
            tokenize(options(tmp_path / "in.parquet", tokenizer=tokenizer), tmp_path / "out")

    @pytest.mark.parametrize(
        "column",
        [
            pa.array([*TEN, None]).cast(pa.string_view()),
            pa.array([*TEN, None]).cast(pa.dictionary(pa.int8(), pa.large_string())),
            pa.array([json.dumps(text) for text in TEN] + [None], pa.json_()),
            pa.chunked_array([pa.array(TEN[:5]), pa.array([*TEN[5:], None])]),
        ],
        ids=["string_view", "dictionary-of-large", "json-extension", "chunks"],
    )
    @pytest.mark.parametrize("reader", ["parquet", "arrow"])
    def test_newer_arrow_types(self, tmp_path: Path, tokenizer: Path, column: pa.Array, reader: str) -> None:
        table = pa.table({"other": list(range(11)), "text": column})
        assert documents_of(table, tmp_path, reader=reader, field="text") == [
            *(json.dumps(text) if isinstance(column.type, pa.JsonType) else text for text in TEN),
            None,
        ]

    def test_run_end_encoded_and_null_columns(self, tmp_path: Path) -> None:
        runs = pa.compute.run_end_encode(pa.array(["a", "a", None, "b"]))
        table = pa.table({"text": runs, "none": pa.nulls(4)})
        assert documents_of(table, tmp_path, reader="arrow", field="text") == ["a", "a", None, "b"]
        assert documents_of(table.select(["none"]), tmp_path, reader="parquet", field="none") == [None] * 4

    @pytest.mark.parametrize("reader", ["parquet", "arrow"])
    def test_fields_inside_columns(self, tmp_path: Path, reader: str) -> None:
        inside = pa.array([{"text": "a", "n": 1}, None, {"text": None, "n": 2}, {"text": "b", "n": 3}])
        table = pa.table({"data": inside, "data.text": ["c", "d", "e", "f"]})
        alone = table.select(["data"])
        assert documents_of(alone, tmp_path, reader=reader, field="data.text") == ["a", None, None, "b"]
        assert documents_of(table, tmp_path, reader=reader, field="data.text") == ["c", "d", "e", "f"]
        with pytest.raises(ValueError, match=r"has no column data.body but data.text, data.n; choose one"):
            documents_of(alone, tmp_path, reader=reader, field="data.body")
        with pytest.raises(ValueError, match=r"column data is struct<.*>, and must be text"):
            documents_of(table, tmp_path, reader=reader, field="data")

    def test_fields_inside_rows(self, tmp_path: Path, tokenizer: Path) -> None:
        rows = [{"data": {"text": "a"}}, {"data.text": "b", "data": {"text": "no"}}, {"data": "x"}, {"data": {}}]
        manifest = tokenize(
            options(lines(tmp_path / "in.jsonl", *rows), tokenizer=tokenizer, text_field="data.text"), tmp_path / "out"
        )
        assert texts_of(tmp_path / "out") == ["a", "b"]
        assert manifest.counts == Counts(missing=2)

    def test_hub_name_through_datasets(self, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A local folder stands for a dataset of the hub: `datasets` loads both, by the same call."""
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hub-cache")
        folder = tmp_path / "dataset"
        lines(folder / "train.jsonl", *({"text": f"row {i}"} for i in range(5)))
        tokenize(options(f"hub:{folder}::train", tokenizer=tokenizer), tmp_path / "out")
        assert texts_of(tmp_path / "out") == [f"row {i}" for i in range(5)]

    @pytest.mark.parametrize(
        ("source", "problem"),
        [
            ("nowhere", "is no file or folder; for a dataset of the hub, write hub:nowhere"),
            ("hub:", "must be hub:NAME"),
            ("hub:a:b:c:d", "must be hub:NAME"),
        ],
    )
    def test_no_such_source(self, tmp_path: Path, tokenizer: Path, source: str, problem: str) -> None:
        with pytest.raises(ValueError, match=problem):
            tokenize(options(source, tokenizer=tokenizer), tmp_path / "out")

    def test_folder_without_text(self, tmp_path: Path, tokenizer: Path) -> None:
        (tmp_path / "in").mkdir()
        (tmp_path / "in/data.bin").write_bytes(b"\0")
        with pytest.raises(ValueError, match="has no file of a kind that is read"):
            tokenize(options(tmp_path / "in", tokenizer=tokenizer), tmp_path / "out")


def test_small_inputs_are_shared_out_alike(tmp_path: Path) -> None:
    """Far less text than a shard holds still makes units for several processes, none twice as large as another."""
    for index in range(160):
        (tmp_path / f"{index}.txt").write_bytes(b"x" * 200_000)
    sizes = [unit.size for unit in plan_inputs([str(tmp_path)], unit_bytes=2**24).units]
    assert sum(sizes) == 160 * 200_000
    assert 16 <= len(sizes) <= 20
    assert max(sizes) <= 2 * sorted(sizes)[1]


@pytest.mark.parametrize("shard_tokens", [1, 3, 10, 1000])
def test_lines_fall_into_units_once(tmp_path: Path, tokenizer: Path, shard_tokens: int) -> None:
    """Wherever the bytes are cut: before, inside and after a line."""
    texts = [f"{i}" * (i % 7 + 1) for i in range(40)]
    source = lines(tmp_path / "in.jsonl", *({"text": text} for text in texts))
    tokenize(options(source, tokenizer=tokenizer, shard_tokens=shard_tokens), tmp_path / "out")
    assert texts_of(tmp_path / "out") == texts


class TestGivenTokenizer:
    """By file, by folder and by name on the hub."""

    def test_folder(self, tmp_path: Path, tokenizer: Path) -> None:
        folder = tmp_path / "model"
        folder.mkdir()
        with pytest.raises(ValueError, match=r"--tokenizer=.*model: has no tokenizer.json or tiktoken.model"):
            read_tokenizer(str(folder))
        shutil.copy(tokenizer, folder / "tokenizer.json")
        assert read_tokenizer(str(folder)) == tokenizer.read_text()

    @pytest.mark.parametrize("name", ["gpt2", "owner/name", "hub:owner/name.json"])
    @pytest.mark.parametrize("file", ["tokenizer.json", "tiktoken.model"])
    def test_hub(self, tmp_path: Path, tokenizer: Path, name: str, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The hub's two calls are stood in for: what is asked of them, and what is made of their answer."""
        content = tokenizer.read_text() if file == "tokenizer.json" else RANKS
        asked = []

        def download(repo: str, wanted: str) -> str:
            asked.append((repo, wanted))
            path = tmp_path / wanted
            path.write_text(content if wanted == file else '{"added_tokens_decoder": {"258": {"content": "[EOS]"}}}')
            return str(path)

        monkeypatch.setattr("huggingface_hub.list_repo_files", lambda repo: ["a", file, "tokenizer_config.json"])
        monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
        made = Tokenizer.from_str(read_tokenizer(name))
        assert {repo for repo, _ in asked} == {name.removeprefix("hub:")}
        if file == "tiktoken.model":
            assert made.token_to_id("[EOS]") == 258
            assert made.encode("ab").ids == [256]
        else:
            assert made.to_str() == Tokenizer.from_file(str(tokenizer)).to_str()

    @pytest.mark.parametrize("error", [OSError("no network"), RuntimeError("401\nmore"), KeyError("x")], ids=str)
    def test_hub_that_fails(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(repo: str) -> list[str]:
            raise error

        monkeypatch.setattr("huggingface_hub.list_repo_files", fail)
        with pytest.raises(ValueError, match=r"^--tokenizer=owner/name: cannot be read \(.*\); name a .*network$"):
            read_tokenizer("owner/name")
        monkeypatch.setattr("huggingface_hub.list_repo_files", lambda repo: ["model.safetensors"])
        with pytest.raises(ValueError, match=r"--tokenizer=owner/name: has no tokenizer.json or tiktoken.model on the"):
            read_tokenizer("owner/name")

    @pytest.mark.parametrize(
        ("name", "content", "problem"),
        [
            ("t.json", b"\xff\xfe{\0}\0", "is binary or compressed and must be a tokenizer.json"),
            ("t.model", b"\n\x0e\n\x05<unk>\x15\xff\x00", "seems to be a SentencePiece model"),
            ("t.json", b'{"version": "1.0"', "is not a tokenizer.json"),
        ],
        ids=["utf-16", "sentencepiece", "cut"],
    )
    def test_other_files(self, tmp_path: Path, name: str, content: bytes, problem: str) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"^--tokenizer=.*{name}: {problem}.*$"):
            read_tokenizer(str(tmp_path / name))

    def test_byte_order_mark(self, tmp_path: Path, tokenizer: Path) -> None:
        marked = tmp_path / "t.json"
        marked.write_bytes(b"\xef\xbb\xbf" + tokenizer.read_bytes())
        source = lines(tmp_path / "in.jsonl", {"text": "a"})
        tokenize(options(source, tokenizer=marked), tmp_path / "out")
        assert (tmp_path / "out/tokenizer.json").read_bytes() == tokenizer.read_bytes()


RANKS = "".join(
    f"{base64.b64encode(token).decode()} {rank}\n"
    for rank, token in enumerate([*(bytes([byte]) for byte in range(256)), b"ab", b"abc"])
)


class TestNothingWritten:
    """A try that came to no shard does not keep its folder from the next one."""

    @pytest.mark.parametrize("existed", [False, True], ids=["new-folder", "folder-of-the-user"])
    @pytest.mark.parametrize("row", [{"text": " "}, b"bad"], ids=["empty", "malformed"])
    def test_another_command_may_follow(self, tmp_path: Path, tokenizer: Path, row: object, existed: bool) -> None:
        out = tmp_path / "out"
        if existed:
            out.mkdir()
            (out / "notes.txt").write_text("mine")
        with pytest.raises(ValueError, match=r"in.jsonl"):
            tokenize(options(lines(tmp_path / "in.jsonl", row), tokenizer=tokenizer), out)
        assert out.exists() == existed
        tokenize(options(lines(tmp_path / "in.jsonl", {"text": "good"}), tokenizer=tokenizer, append_eos=False), out)
        assert texts_of(out) == ["good"]
        assert (out / "notes.txt").exists() == existed

    def test_files_of_the_user_are_left_alone(self, tmp_path: Path, tokenizer: Path) -> None:
        """In a folder that holds the given tokenizer itself, and files with names like ours."""
        out = tokenizer.parent
        given_file = shutil.copy(tokenizer, out / "tokenizer.json")
        (out / "shard-list.txt").write_text("mine")
        bad = lines(tmp_path / "in.jsonl", b"bad")
        with pytest.raises(ValueError, match=r"in.jsonl:1"):
            tokenize(options(bad, tokenizer=given_file), out)
        assert sorted(path.name for path in out.iterdir()) == [
            "bytes.json",
            "shard-list.txt",
            "tokenizer.json",
            "unfinished",
        ]
        with pytest.raises(ValueError, match=r"tokenizer.json: is there already and is another one; move it away"):
            tokenize(Options(sources=(bad,), train_vocab_size=300), out)

    def test_also_after_a_kill(self, tmp_path: Path, tokenizer: Path) -> None:
        """What cleans up did not run: the plan, a record without a document and a trained tokenizer are left."""
        out = tmp_path / "out"
        (out / "unfinished").mkdir(parents=True)
        (out / "unfinished/plan.json").write_text('{"format": 1, "tokenizer": "train 300"}')
        record = {"shard": None, "counts": {"empty": 1, "replaced": 0, "missing": 0}}
        (out / "unfinished/shard-00000.json").write_text(json.dumps(record))
        (out / "unfinished/own-tokenizer").touch()
        (out / "tokenizer.json").write_text("{}")
        tokenize(options(lines(tmp_path / "in.jsonl", {"text": "good"}), tokenizer=tokenizer), out)
        assert texts_of(out) == ["good"]


class TestResume:
    def test_killed_in_the_middle(self, tmp_path: Path, tokenizer: Path) -> None:
        """SIGKILL between shards, twice; the same command ends with the files of an undisturbed run."""
        source = lines(tmp_path / "in.jsonl", *({"text": f"document {i} " * 20} for i in range(1500)))
        arguments = ["--source", source, "--tokenizer", str(tokenizer), "--shard-tokens", "2000"]
        out = tmp_path / "out"
        command = [sys.executable, "-m", "data.tokenize", *arguments, "--out", str(out)]
        for workers, enough in (("1", 3), ("2", 10)):
            process = held_command(*command[3:], "--workers", workers, after=enough, folder=tmp_path)
            helpers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
            while any(is_running(pid) for pid in helpers):
                time.sleep(0.01)  # one that outlives its killed parent never ends
            assert not (out / "manifest.json").exists()
        written = (out / "shard-00000.tokens").stat().st_mtime_ns
        (out / ".shard-00002.tokens.1.partial").write_bytes(b"leftover")
        assert subprocess.run([*command, "--workers", "2"], check=False).returncode == 0
        assert (out / "shard-00000.tokens").stat().st_mtime_ns == written
        undisturbed = tmp_path / "undisturbed"
        assert main([*arguments, "--out", str(undisturbed), "--workers", "1"]) == 0
        assert files_of(out) == files_of(undisturbed)

    def test_interrupted_by_hand(self, tmp_path: Path, tokenizer: Path) -> None:
        """An interrupt reaches all processes of a terminal; one line says what to do."""
        source = lines(tmp_path / "in.jsonl", *({"text": f"document {i} " * 20} for i in range(1500)))
        out = tmp_path / "out"
        arguments = ["--source", source, "--tokenizer", str(tokenizer), "--out", str(out), "--shard-tokens", "2000"]
        process = held_command(*arguments, "--workers", "2", after=3, folder=tmp_path)
        os.killpg(process.pid, signal.SIGINT)
        (tmp_path / "go").touch()
        errors = process.communicate()[1]
        assert process.returncode == 130
        assert errors.strip().splitlines()[-1] == "stopped; the same command goes on from here"
        assert "Traceback" not in errors
        assert not (out / "manifest.json").exists()

    def test_a_lost_shard_is_made_again(self, tmp_path: Path, tokenizer: Path) -> None:
        source = lines(tmp_path / "in.jsonl", *({"text": "good"} for _ in range(9)), b"bad")
        given = options(source, tokenizer=tokenizer, shard_tokens=8)
        with pytest.raises(ValueError, match=r"in.jsonl:10"):
            tokenize(given, tmp_path / "out")
        (tmp_path / "out/shard-00000.tokens").write_bytes(b"")
        with pytest.raises(ValueError, match=r"in.jsonl:10"):
            tokenize(given, tmp_path / "out")
        assert (tmp_path / "out/shard-00000.tokens").stat().st_size > 0

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"text_field": "body"}, "text_field: text -> body"),
            ({"append_eos": False}, "append_eos: True -> False"),
            ({"shard_tokens": 16}, "shard_tokens: 8 -> 16"),
        ],
        ids=["field", "eos", "size"],
    )
    @pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
    def test_other_options_are_refused(
        self, tmp_path: Path, tokenizer: Path, changes: dict[str, object], named: str, finished: bool
    ) -> None:
        rows: list[object] = [{"text": "good", "body": "better"}] * 5
        source = lines(tmp_path / "in.jsonl", *rows, *([] if finished else [b"bad"]))
        given = options(source, tokenizer=tokenizer, shard_tokens=8)
        try_to(given, tmp_path / "out")
        with pytest.raises(ValueError, match=rf"was made from other inputs or options \({named}\)"):
            tokenize(replace(given, **changes), tmp_path / "out")

    @pytest.mark.parametrize("finished", [True, False], ids=["finished", "unfinished"])
    def test_changed_inputs_are_refused(self, tmp_path: Path, tokenizer: Path, finished: bool) -> None:
        rows: list[object] = [{"text": "good"}] * 3 + ([] if finished else [b"bad"])
        given = options(lines(tmp_path / "in.jsonl", *rows), tokenizer=tokenizer, shard_tokens=8)
        try_to(given, tmp_path / "out")
        lines(tmp_path / "in.jsonl", {"text": "other"}, {"text": "text"})
        with pytest.raises(ValueError, match=r"was made from other inputs or options \(inputs: "):
            tokenize(given, tmp_path / "out")

    def test_a_finished_corpus_is_left_alone(self, tmp_path: Path, tokenizer: Path) -> None:
        given = options(lines(tmp_path / "in.jsonl", {"text": "good"}), tokenizer=tokenizer)
        first = tokenize(given, tmp_path / "out")
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
        assert tokenize(given, tmp_path / "out") == first
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before

    def test_two_writers(self, tmp_path: Path, tokenizer: Path) -> None:
        out = tmp_path / "out"
        (out / "unfinished").mkdir(parents=True)
        given = options(lines(tmp_path / "in.jsonl", {"text": "good"}), tokenizer=tokenizer)
        with (out / "unfinished/lock").open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            with pytest.raises(ValueError, match="another process is writing there"):
                tokenize(given, out)


def held_command(*arguments: str, after: int, folder: Path) -> "subprocess.Popen[str]":
    """The command, once it has stopped between shards; it goes on when ``folder/go`` is there."""
    held = folder / "held"
    held.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.data.held_tokenize", str(after), str(folder), *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not held.exists():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    return process


def is_running(pid: str) -> bool:
    """Whether the process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def try_to(given: Options, out: Path) -> Manifest | None:
    """Tokenise as far as it goes."""
    try:
        return tokenize(given, out)
    except ValueError:
        return None


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class TestCommand:
    def test_trains_a_tokenizer_first(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "in.txt").write_text("the cat and the hat and the bat\n" * 20)
        out = tmp_path / "out"
        arguments = [
            "--source",
            str(tmp_path / "in.txt"),
            "--train-tokenizer",
            "280",
            "--out",
            str(out),
            "--workers",
            "1",
        ]
        assert main(arguments) == 0
        assert "1 documents" in capsys.readouterr().out
        store = TokenStore.open(out)
        assert store.num_tokens < 32 * 20 / 2
        assert texts_of(out) == [(tmp_path / "in.txt").read_text()]

    @pytest.mark.parametrize(
        ("arguments", "problems"),
        [
            ([], ["--source: at least one", "--tokenizer: must be given"]),
            (["--source", "x", "--tokenizer", "t", "--train-tokenizer", "300"], ["--tokenizer: must be given"]),
            (["--source", "x", "--train-tokenizer", "300", "--eos-token", "e"], ["--eos-token: is for a tokenizer"]),
            (["--source", "x", "--train-tokenizer", "100"], ["--train-tokenizer=100: must be at least 259"]),
            (["--source", __file__, "--tokenizer", "/nope"], ["--tokenizer=/nope: cannot be read"]),
            (["--source", "x", "--tokenizer", "t", "--workers", "0"], ["--workers=0: must be at least 1"]),
            (["--source", "x", "--tokenizer", "t", "--suffix", "py"], ["--suffix=py: must begin with a dot"]),
            (["--source", "x", "--tokenizer", "t", "--shard-tokens", "0"], ["--shard-tokens=0: must be at least 1"]),
        ],
        ids=["nothing", "both", "eos-of-trained", "small", "no-such-tokenizer", "workers", "suffix", "shards"],
    )
    def test_wrong_options(
        self, tmp_path: Path, arguments: list[str], problems: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main([*arguments, "--out", str(tmp_path / "out")]) == 1
        shown = capsys.readouterr().err
        assert all(problem in shown for problem in problems)
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("out", ["", " "])
    def test_no_folder(self, tokenizer: Path, out: str, capsys: pytest.CaptureFixture[str]) -> None:
        """The present folder is a folder too, and nobody has named it."""
        assert main(["--source", __file__, "--tokenizer", str(tokenizer), "--out", out]) == 1
        assert capsys.readouterr().err == "error: --out: is empty; name a folder for the corpus\n"

    def test_folder_that_cannot_be_written(
        self, tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        source = lines(tmp_path / "in.jsonl", {"text": "good"})
        assert main(["--source", source, "--tokenizer", str(tokenizer), "--out", str(Path(source) / "out")]) == 1
        assert "in.jsonl/out" in capsys.readouterr().err.splitlines()[-1]

    def test_full_disk(
        self, tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """The shards before stay, nothing looks final, and the same command goes on once there is room."""
        source = lines(tmp_path / "in.jsonl", *({"text": "good"} for _ in range(9)))
        out = tmp_path / "out"
        arguments = ["--source", source, "--tokenizer", str(tokenizer), "--out", str(out)]
        arguments += ["--shard-tokens", "8", "--workers", "1"]
        flushed = 0

        def full(descriptor: int) -> None:
            nonlocal flushed
            flushed += 1
            if flushed > 12:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            assert main(arguments) == 1
        assert "No space left on device; put that right" in capsys.readouterr().err
        assert not (out / "manifest.json").exists()
        assert (out / "shard-00000.tokens").exists()
        assert main(arguments) == 0
        assert texts_of(out) == ["good"] * 9
        assert not list(out.glob(".*"))


@pytest.mark.parametrize(
    ("module", "never"),
    [
        ("data.tokenize", ["torch", "datasets", "pyarrow"]),
        ("data.loader", ["datasets", "pyarrow", "pandas"]),
    ],
)
def test_what_is_not_imported(module: str, never: list[str]) -> None:
    """`datasets` takes seconds to import; training never needs it, and tokenising only for the hub."""
    code = f"import sys, {module}; print([name for name in {never} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_ids_are_what_the_tokenizer_says(tmp_path: Path, tokenizer: Path) -> None:
    text = "plain text"
    tokenize(options(lines(tmp_path / "in.jsonl", {"text": text}), tokenizer=tokenizer), tmp_path / "out")
    made = Tokenizer.from_file(str(tokenizer))
    np.testing.assert_array_equal(
        TokenStore.open(tmp_path / "out").document(0), [*made.encode(text).ids, eos_id_of(made)]
    )
