"""Every edge of the data, fed with every kind of failure: one line with the place and a remedy, never a traceback."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data import encoded, manifest, readers, store, tokenizer
from data.edges import InputError, edge, place_error
from data.loader import DataConfig, SourceConfig, open_loader
from data.manifest import canonical
from data.store import TokenStore
from data.tokenize import main
from tests.data.corpora import byte_tokenizer, write_corpus
from tests.data.test_tiktoken_file import write as write_ranks

ERRORS: dict[str, Callable[[], BaseException]] = {
    "OSError": lambda: OSError(errno.EIO, os.strerror(errno.EIO)),
    "PermissionError": lambda: PermissionError(errno.EACCES, os.strerror(errno.EACCES)),
    "ENAMETOOLONG": lambda: OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG)),
    "bare-OSError": lambda: OSError(),
    "ValueError": lambda: ValueError("first line\nsecond line"),
    "UnicodeDecodeError": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    "RecursionError": lambda: RecursionError("maximum recursion depth exceeded"),
    "MemoryError": MemoryError,
    "EOFError": lambda: EOFError("Compressed file ended before the end-of-stream marker was reached"),
    "KeyError": lambda: KeyError("name"),
    "TypeError": lambda: TypeError("'NoneType' object is not subscriptable"),
    "AttributeError": lambda: AttributeError("no such thing"),
    "NotImplementedError": lambda: pa.ArrowNotImplementedError("no such encoding"),
    "ArrowInvalid": lambda: pa.ArrowInvalid("bad footer\nmore"),
    "StopIteration": StopIteration,
    "RuntimeError": lambda: RuntimeError(""),
    "Exception": lambda: Exception("a parser's own"),
    "panic": lambda: type("PanicException", (BaseException,), {})("called `Option::unwrap()` on a `None` value"),
}


def one_line(error: str, *, place: str) -> None:
    """What a user must see."""
    assert len(error.strip().splitlines()) == 1, error
    assert place in error, error
    assert "; " in error, error
    assert "Traceback" not in error


def raising(make: Callable[[], BaseException]) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise make()

    return fail


@pytest.mark.parametrize("make", ERRORS.values(), ids=ERRORS)
class TestWhateverIsRaised:
    """Each edge's parser, library or system call raises each kind of error."""

    def test_by_an_edge(self, make: Callable[[], BaseException]) -> None:
        with pytest.raises(InputError) as caught, edge("file.txt", remedy="copy it again"):
            raise make()
        one_line(str(caught.value), place="file.txt: cannot be read (")
        assert str(caught.value).endswith("); copy it again")

    @pytest.mark.parametrize(
        ("name", "target", "attribute"),
        [
            ("in.jsonl", readers.json, "loads"),
            ("in.json", readers.json, "loads"),
            ("in.jsonl.gz", readers.json, "loads"),
            ("in.txt", encoded, "check_utf8"),
            ("in.txt", readers, "decode_text"),
            ("in.txt.gz", encoded.gzip, "GzipFile"),
            ("in.txt.zst", pa, "CompressedInputStream"),
            ("in.zip", encoded.zipfile, "ZipFile"),
            ("in.parquet", pyarrow.parquet, "ParquetFile"),
            ("in.parquet", readers, "_column_documents"),
        ],
    )
    def test_by_a_source(
        self,
        tmp_path: Path,
        make: Callable[[], BaseException],
        name: str,
        target: Any,
        attribute: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        write_source(tmp_path / name)
        monkeypatch.setattr(target, attribute, raising(make))
        assert main(command(tmp_path, source=tmp_path / name)) == 1
        one_line(capsys.readouterr().err.splitlines()[-1], place=str(tmp_path / name))
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("kind", ["tokenizer.json", "tiktoken.model"])
    def test_by_a_tokenizer(
        self,
        tmp_path: Path,
        make: Callable[[], BaseException],
        kind: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        given_path = byte_tokenizer(tmp_path)
        write_source(tmp_path / "in.txt")
        arguments = command(tmp_path, source=tmp_path / "in.txt")
        if kind == "tiktoken.model":
            given_path = write_ranks(tmp_path, {bytes([byte]): byte for byte in range(256)})
            monkeypatch.setattr(tokenizer, "tokenizer_of_ranks", raising(make))
        else:
            monkeypatch.setattr(tokenizer, "Tokenizer", type("Failing", (), {"from_str": raising(make)}))
        assert main([*arguments, "--tokenizer", str(given_path)]) == 1
        one_line(capsys.readouterr().err.splitlines()[-1], place=f"--tokenizer={given_path}")

    @pytest.mark.parametrize(
        ("file", "target", "attribute"),
        [
            ("manifest.json", manifest.json, "loads"),
            ("manifest.json", manifest, "Shard"),
            ("shard-00000.tokens", store.np, "memmap"),
            ("shard-00000.index", store.np, "frombuffer"),
        ],
    )
    def test_by_a_corpus(
        self,
        tmp_path: Path,
        make: Callable[[], BaseException],
        file: str,
        target: Any,
        attribute: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        write_corpus(tmp_path, [[[1, 2], [3]]])
        monkeypatch.setattr(target, attribute, raising(make))
        with pytest.raises(InputError) as caught:
            TokenStore.open(tmp_path).document_lengths()
        one_line(str(caught.value), place=str(tmp_path / file))


def write_source(path: Path) -> None:
    """A good file of the kind that its name says."""
    import gzip
    import zipfile

    row = b'{"text": "\xc3\xa9"}\n'
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pa.table({"text": ["a", "b"]}), path)
    elif path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.txt", "a")
    elif path.suffix == ".zst":
        path.write_bytes(pa.compress(b"text", codec="zstd", asbytes=True))
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(row))
    else:
        path.write_bytes(b'[{"text": "a"}]' if path.suffix == ".json" else row)


def command(folder: Path, *, source: Path) -> list[str]:
    tokenizer_file = byte_tokenizer(folder / "tokenizer")
    return ["--tokenizer", str(tokenizer_file), "--source", str(source), "--out", str(folder / "out"), "--workers", "1"]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good files, for being spoilt."""
    folder = tmp_path_factory.mktemp("good")
    for name in ("in.jsonl", "in.json", "in.txt", "in.parquet", "in.jsonl.gz", "in.txt.zst", "in.zip"):
        write_source(folder / name)
    byte_tokenizer(folder)
    write_ranks(folder, {bytes([byte]): byte for byte in range(256)} | {b"ab": 256})
    write_corpus(folder / "corpus", [[[1, 2], [3], [1, 2]]])
    return folder


@st.composite
def spoilt(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """A way to spoil bytes: cut, replace a stretch, insert, repeat, or something else altogether."""
    how = draw(st.sampled_from(["cut", "replace", "insert", "repeat", "other"]))
    at, size = draw(st.floats(0, 1)), draw(st.integers(0, 8))
    raw = draw(st.one_of(st.binary(min_size=1, max_size=12), st.sampled_from(NASTY)))

    def spoil(content: bytes) -> bytes:
        place = int(at * len(content))
        return {
            "cut": content[:place],
            "replace": content[:place] + raw + content[place + len(raw) :],
            "insert": content[:place] + raw + content[place:],
            "repeat": content + content[place : place + 64] * size,
            "other": raw * (size + 1),
        }[how]

    return spoil


NASTY = [
    b"[" * 100_000,
    b'{"text": ' * 50_000,
    b'{"text": "\\ud800"}',
    b'{"text": 1e999}',
    b"9" * 5000,
    b"\xff\xfe\x00\xd8",
    b"PK\x03\x04",
    b"\x1f\x8b\x08",
    b"\x28\xb5\x2f\xfd",
    b"BZh91AY&SY",
    b"\xfd7zXZ\x00",
    b"\x00" * 64,
    b"NaN",
    b"null",
    b"[]",
    b"{}",
    b'{"text": {"text": []}}',
]
FUZZ = settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.mark.parametrize("name", ["in.jsonl", "in.json", "in.txt", "in.parquet", "in.jsonl.gz", "in.txt.zst", "in.zip"])
@given(spoil=spoilt())
@FUZZ
def test_spoilt_sources(
    tmp_path: Path, good: Path, capsys: pytest.CaptureFixture[str], name: str, spoil: Callable[[bytes], bytes]
) -> None:
    """They give a corpus, or one line that names them."""
    with fresh(tmp_path) as folder:
        (folder / name).write_bytes(spoil((good / name).read_bytes()))
        status = main(command(folder, source=folder / name))
        shown = capsys.readouterr().err
        if status == 0:
            TokenStore.open(folder / "out", verify="hash").document_lengths()
            return
        assert status == 1
        one_line(shown.splitlines()[-1], place=str(folder / name))
        assert not (folder / "out").exists()


@pytest.mark.parametrize("name", ["bytes.json", "tiktoken.model"])
@given(spoil=spoilt())
@FUZZ
def test_spoilt_tokenizers(
    tmp_path: Path, good: Path, capsys: pytest.CaptureFixture[str], name: str, spoil: Callable[[bytes], bytes]
) -> None:
    with fresh(tmp_path) as folder:
        (folder / "in.txt").write_text("text")
        (folder / name).write_bytes(spoil((good / name).read_bytes()))
        status = main([*command(folder, source=folder / "in.txt"), "--tokenizer", str(folder / name)])
        shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert status in (0, 1)
        if status:
            (line,) = shown
            assert str(folder / name) in line or line.startswith("error: append_eos: the tokenizer has no end-of-text")


@pytest.mark.parametrize(
    "name", ["manifest.json", "tokenizer.json", "shard-00000.tokens", "shard-00000.index", "shard-00000.hashes"]
)
@given(spoil=spoilt())
@FUZZ
def test_spoilt_corpora(tmp_path: Path, good: Path, name: str, spoil: Callable[[bytes], bytes]) -> None:
    with fresh(tmp_path) as folder:
        shutil.copytree(good / "corpus", folder / "corpus")
        path = folder / "corpus" / name
        before = path.read_bytes()
        path.write_bytes(spoil(before))
        try:
            read_all(folder / "corpus")
        except InputError as error:
            one_line(str(error), place=str(folder / "corpus"))
            return
        # White space in the manifest says nothing else.
        assert path.read_bytes() == before or json.loads(path.read_bytes()) == json.loads(before)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KEYS = [
    "tokenizer_sha256",
    "vocab_size",
    "dtype",
    "eos_id",
    "shards",
    "counts",
    "format",
    "made_from",
    "copies",
    "other",
]


@pytest.mark.parametrize("key", [*KEYS, "shards.0.tokens", "shards.0.name", "shards.0.bytes", "shards.0.index_sha256"])
@given(value=VALUES)
@FUZZ
def test_manifests_of_other_types(tmp_path: Path, good: Path, key: str, value: object) -> None:
    """Even if the hash is right, as another program may have written it."""
    with fresh(tmp_path) as folder:
        shutil.copytree(good / "corpus", folder / "corpus")
        path = folder / "corpus/manifest.json"
        raw = json.loads(path.read_bytes())
        inner = raw
        *way, last = key.split(".")
        for step in way:
            inner = inner[int(step) if step.isdigit() else step]
        inner[last] = value
        raw["content_hash"] = rehash(raw)
        path.write_text(json.dumps(raw))
        try:
            read_all(folder / "corpus")
        except InputError as error:
            one_line(str(error), place=str(folder / "corpus"))


def rehash(raw: dict[str, Any]) -> str:
    import hashlib

    content = {name: value for name, value in raw.items() if name not in ("made_from", "copies", "content_hash")}
    if isinstance(content["shards"], list):
        content["shards"] = [
            {name: value for name, value in shard.items() if name != "hashes_sha256"}
            if isinstance(shard, dict)
            else shard
            for shard in content["shards"]
        ]
    return hashlib.blake2b(canonical(content), digest_size=16).hexdigest()


def read_all(folder: Path) -> None:
    """Everything that training reads of a corpus."""
    opened = TokenStore.open(folder)
    opened.document_lengths()
    opened.document_hashes()
    opened.unigram_counts()
    for document in range(opened.num_documents):
        opened.document(document)


class fresh:
    """A folder for one example: hypothesis runs many in one test."""

    def __init__(self, root: Path) -> None:
        self.folder = root / "example"

    def __enter__(self) -> Path:
        self.folder.mkdir()
        return self.folder

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.folder)


class TestOfTraining:
    """The same corpora, as a run opens them."""

    def test_a_folder_that_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for place in (tmp_path / "nowhere", tmp_path / "file", tmp_path / "file/inside", tmp_path):
            with pytest.raises(InputError, match=r"has no manifest.json, so it is not a finished tokenised corpus"):
                open_config(tmp_path, str(place))

    def test_an_address(self) -> None:
        (problem,) = DataConfig(sources=[SourceConfig("s3://bucket/tok", 1.0)]).errors()
        assert problem == (
            "data.sources[0].path=s3://bucket/tok: must be a path of this machine and is a s3: address; "
            "mount or copy it, and name that folder"
        )


def open_config(cache: Path, path: str) -> None:
    open_loader(DataConfig(sources=[SourceConfig(path, 1.0)]), cache=cache, vocab_size=300, seed=0)


@pytest.mark.parametrize(
    ("value", "scheme"),
    [
        ("s3://bucket/x", "s3"),
        ("S3://bucket/x", "s3"),
        ("s3:/bucket/x", "s3"),
        ("gs://b", "gs"),
        ("file:///tmp/x", "file"),
        ("dbfs:/mnt/x", "dbfs"),
        ("abfss://c@a.net/x", "abfss"),
        (Path("https://h/x"), "https"),
        ("runs/x", None),
        ("/data/s3:/x", None),
        ("C:/x", None),
        ("a:b", None),
        ("./s3://x", None),
        ("", None),
    ],
    ids=str,
)
def test_place_error(value: str | Path, scheme: str | None) -> None:
    problem = place_error("run.dir", value)
    if scheme is None:
        assert problem is None
    else:
        assert problem is not None
        assert problem.startswith(f"run.dir={value}: must be a path of this machine and is a {scheme}: address; ")


def test_what_ends_a_process_passes() -> None:
    for error in (KeyboardInterrupt, SystemExit, GeneratorExit):
        with pytest.raises(error), edge("x", remedy="y"):
            raise error


def test_an_edge_inside_an_edge_says_it_once() -> None:
    def inner() -> None:
        with edge("inner", remedy="mend it"):
            raise ValueError("why")

    with pytest.raises(InputError, match=r"^inner: cannot be read \(why\); mend it$"), edge("outer", remedy="no"):
        inner()


def test_a_generator_may_stand_inside() -> None:
    def numbers() -> Iterator[int]:
        with edge("x", remedy="y"):
            yield 1

    made = numbers()
    next(made)
    made.close()
