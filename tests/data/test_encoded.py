"""Inputs are what they seem, or are refused: compression, encodings, archives, links and special files."""

import bz2
import gzip
import json
import lzma
import os
import socket
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest

from data.manifest import Counts
from data.sources import plan_inputs, say_left_out
from data.tokenize import main, tokenize
from tests.data.corpora import byte_tokenizer
from tests.data.test_tokenize import lines, options, texts_of

TEXTS = [f"row {i} with some words" for i in range(40)]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return byte_tokenizer(tmp_path / "tokenizer")


def arrow(codec: str) -> Callable[[bytes], bytes]:
    def pack(raw: bytes) -> bytes:
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, codec) as stream:
            stream.write(raw)
        return sink.getvalue().to_pybytes()

    return pack


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": arrow("zstd"),
    ".lz4": arrow("lz4"),
}


def rows() -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in TEXTS)


def read(tmp_path: Path, tokenizer: Path, *sources: Path | str, **changes: object) -> list[str]:
    tokenize(options(*sources, tokenizer=tokenizer, **changes), tmp_path / "out")
    return texts_of(tmp_path / "out")


@pytest.mark.parametrize("suffix", PACKERS)
class TestCompressed:
    def test_is_read_through(self, tmp_path: Path, tokenizer: Path, suffix: str) -> None:
        path = tmp_path / f"in.jsonl{suffix}"
        path.write_bytes(PACKERS[suffix](rows()))
        assert read(tmp_path, tokenizer, path) == TEXTS

    def test_content_decides_and_not_the_name(self, tmp_path: Path, tokenizer: Path, suffix: str) -> None:
        for name in ("a.jsonl", "b.txt", "c.json"):
            content = rows() if name != "c.json" else json.dumps([{"text": "element"}]).encode()
            (tmp_path / name).write_bytes(PACKERS[suffix](content))
        found = read(tmp_path, tokenizer, *(tmp_path / name for name in ("a.jsonl", "b.txt", "c.json")))
        assert found == [*TEXTS, rows().decode(), "element"]

    def test_in_a_folder_by_the_name_inside(self, tmp_path: Path, tokenizer: Path, suffix: str) -> None:
        folder = tmp_path / "in"
        folder.mkdir()
        for name, text in (("a.txt", "a"), ("b.md", "b"), ("c.bin", "no")):
            (folder / f"{name}{suffix}").write_bytes(PACKERS[suffix](text.encode()))
        assert read(tmp_path, tokenizer, folder) == ["a", "b"]
        assert plan_inputs([str(folder)], unit_bytes=2**20).left_out == {suffix: (1, str(folder / f"c.bin{suffix}"))}
        for suffixes in ((suffix,), (".bin",)):
            units = plan_inputs([str(folder)], unit_bytes=2**20, suffixes=suffixes).units
            assert sum(len(unit.pieces) for unit in units) == (3 if suffixes == (suffix,) else 1)

    def test_several_streams_in_one_file(self, tmp_path: Path, tokenizer: Path, suffix: str) -> None:
        (tmp_path / f"in.txt{suffix}").write_bytes(PACKERS[suffix](b"one ") + PACKERS[suffix](b"two"))
        assert read(tmp_path, tokenizer, tmp_path / f"in.txt{suffix}") == ["one two"]

    @pytest.mark.parametrize("how", ["cut", "damaged", "not-compressed", "twice", "parquet"])
    def test_what_cannot_be_read_is_named(
        self, tmp_path: Path, tokenizer: Path, suffix: str, how: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        packed = PACKERS[suffix](rows() * 50)
        content = {
            "cut": packed[: len(packed) // 2],
            "damaged": packed[:30] + bytes(byte ^ 0x55 for byte in packed[30:60]) + packed[60:],
            "not-compressed": rows(),
            "twice": PACKERS[suffix](packed),
            "parquet": packed,
        }[how]
        path = tmp_path / f"in.{'parquet' if how == 'parquet' else 'jsonl'}{suffix}"
        path.write_bytes(content)
        assert main(["--source", str(path), "--tokenizer", str(tokenizer), "--out", str(tmp_path / "out")]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {path}")
        assert not (tmp_path / "out").exists()


class TestZip:
    def test_members_of_known_kinds(self, tmp_path: Path, tokenizer: Path) -> None:
        path = tmp_path / "in.zip"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("b.txt", "b")
            archive.writestr("folder/a.jsonl", rows())
            archive.writestr("picture.png", b"\x89PNG")
            archive.writestr(".hidden.txt", "no")
        assert read(tmp_path, tokenizer, path) == ["b", *TEXTS]
        left_out = plan_inputs([str(path)], unit_bytes=2**20).left_out
        assert {why: number for why, (number, _) in left_out.items()} == {".png": 1, "hidden": 1}

    @pytest.mark.parametrize("name", ["in.txt", "in.docx"])
    def test_by_another_name_is_refused(self, tmp_path: Path, tokenizer: Path, name: str) -> None:
        with zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("a.txt", "a")
        with pytest.raises(ValueError, match=rf"{name}: is a zip archive .*; unpack it"):
            read(tmp_path, tokenizer, tmp_path / name)

    def test_damaged(self, tmp_path: Path, tokenizer: Path) -> None:
        (tmp_path / "in.zip").write_bytes(b"PK\x03\x04" + bytes(100))
        with pytest.raises(ValueError, match=r"in.zip: cannot be read \(.*\); copy it again"):
            read(tmp_path, tokenizer, tmp_path / "in.zip")


SENTENCE = "Größe, déjà vu, naïveté: ça coûte 5 £."


class TestEncodings:
    @pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32", "utf-8"])
    @pytest.mark.parametrize("kind", ["txt", "jsonl", "json", "txt.gz"])
    def test_a_byte_order_mark_says_it(self, tmp_path: Path, tokenizer: Path, encoding: str, kind: str) -> None:
        texts = [SENTENCE] if kind.startswith("txt") else [f"{SENTENCE} {i}" for i in range(20)]
        content = {
            "txt": SENTENCE,
            "txt.gz": SENTENCE,
            "jsonl": "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts),
            "json": json.dumps([{"text": text} for text in texts], ensure_ascii=False),
        }[kind]
        raw = content.encode(encoding)
        (tmp_path / f"in.{kind}").write_bytes(gzip.compress(raw) if kind == "txt.gz" else raw)
        assert read(tmp_path, tokenizer, tmp_path / f"in.{kind}") == texts

    @pytest.mark.parametrize(
        ("encoding", "problem"),
        [
            ("latin-1", r"is text but not UTF-8 \(byte 0xf6\); name its encoding with --encoding"),
            ("cp1252", r"is text but not UTF-8"),
            ("utf-16-le", r"is UTF-16 without a byte order mark; name it with --encoding utf-16-le"),
            ("utf-16-be", r"is UTF-16 without a byte order mark; name it with --encoding utf-16-be"),
        ],
    )
    @pytest.mark.parametrize("kind", ["txt", "jsonl", "json"])
    def test_others_are_named_and_read_when_told(
        self, tmp_path: Path, tokenizer: Path, encoding: str, problem: str, kind: str
    ) -> None:
        content = SENTENCE if kind == "txt" else json.dumps({"text": SENTENCE}, ensure_ascii=False) + "\n"
        path = tmp_path / f"in.{kind}"
        path.write_bytes(content.encode(encoding))
        with pytest.raises(ValueError, match=rf"in.{kind}: {problem}"):
            read(tmp_path, tokenizer, path)
        assert not (tmp_path / "out").exists()
        assert read(tmp_path, tokenizer, path, encoding=encoding) == [SENTENCE]

    def test_a_named_encoding_leaves_utf_8_alone(self, tmp_path: Path, tokenizer: Path) -> None:
        (tmp_path / "in").mkdir()
        (tmp_path / "in/a.txt").write_bytes(SENTENCE.encode("utf-8"))
        (tmp_path / "in/b.txt").write_bytes(SENTENCE.encode("latin-1"))
        row = json.dumps({"text": SENTENCE}, ensure_ascii=False) + "\n"
        (tmp_path / "in/c.jsonl").write_bytes(row.encode("utf-8") + row.encode("latin-1"))
        assert read(tmp_path, tokenizer, tmp_path / "in", encoding="latin-1") == [SENTENCE] * 4

    def test_other_bytes_far_from_the_beginning(self, tmp_path: Path, tokenizer: Path) -> None:
        (tmp_path / "in.txt").write_bytes(b"word " * 50_000 + SENTENCE.encode("latin-1"))
        with pytest.raises(ValueError, match=r"in.txt: is text but not UTF-8"):
            read(tmp_path, tokenizer, tmp_path / "in.txt")

    def test_a_sequence_that_the_first_look_cuts_is_no_sign(self, tmp_path: Path, tokenizer: Path) -> None:
        for shift in range(4):
            text = "x" * (2**16 - shift) + "\U0001f600"
            (tmp_path / f"{shift}.txt").write_text(text)
            assert read(tmp_path / str(shift), tokenizer, tmp_path / f"{shift}.txt") == [text]

    @pytest.mark.parametrize("name", ["nonsense", "base64", ""])
    def test_unknown_encoding(self, tmp_path: Path, tokenizer: Path, name: str) -> None:
        with pytest.raises(ValueError, match=rf"--encoding={name}: is not known"):
            read(tmp_path, tokenizer, __file__, encoding=name)


BINARY = {
    "nul": b"text \0 text",
    "program": b"\x7fELF" + bytes(range(256)),
    "picture": b"\x89PNG\r\n\x1a\n" + bytes(range(256)),
    "pdf": b"%PDF-1.7\n",
    "parquet": b"PAR1" + bytes(30),
    "tar": b"name".ljust(257, b"\0") + b"ustar\0",
    "7z": b"7z\xbc\xaf\x27\x1c" + bytes(9),
    "control": bytes(range(1, 32)) * 9,
}


@pytest.mark.parametrize("content", BINARY.values(), ids=BINARY)
class TestBinary:
    def test_by_name_is_refused(self, tmp_path: Path, tokenizer: Path, content: bytes) -> None:
        for name in ("in.txt", "in", "in.jsonl"):
            (tmp_path / name).write_bytes(content)
            with pytest.raises(ValueError, match=rf"{name}: is .*(convert|leave it out|unpack)"):
                read(tmp_path, tokenizer, tmp_path / name)

    def test_in_a_folder_is_left_out_and_told(
        self, tmp_path: Path, tokenizer: Path, content: bytes, capsys: pytest.CaptureFixture[str]
    ) -> None:
        folder = tmp_path / "in"
        folder.mkdir()
        (folder / "a.txt").write_text("text")
        (folder / "b.txt").write_bytes(content)
        arguments = ["--source", str(folder), "--tokenizer", str(tokenizer), "--out", str(tmp_path / "out")]
        assert main(arguments) == 0
        assert f"left out: 1 binary ({folder}/b.txt)" in capsys.readouterr().err
        assert texts_of(tmp_path / "out") == ["text"]


class TestFolders:
    def test_linked_folders_are_read_once_and_loops_end(self, tmp_path: Path, tokenizer: Path) -> None:
        folder, outside = tmp_path / "in", tmp_path / "outside"
        (folder / "sub").mkdir(parents=True)
        outside.mkdir()
        (folder / "a.txt").write_text("a")
        (folder / "sub/b.txt").write_text("b")
        for index in range(9):
            (outside / f"{index}.txt").write_text(str(index))
        (folder / "part1").symlink_to(outside)
        (folder / "part2").symlink_to(outside)
        (folder / "sub/up").symlink_to(folder)
        (folder / "self").symlink_to(folder / "self")
        (folder / "nowhere").symlink_to(tmp_path / "nowhere")
        assert read(tmp_path, tokenizer, folder) == ["a", *map(str, range(9)), "b"]
        left_out = plan_inputs([str(folder)], unit_bytes=2**20).left_out
        assert {why: number for why, (number, _) in left_out.items()} == {
            "broken links": 2,
            "folders reached twice": 2,
        }

    def test_linked_files_are_read_once(self, tmp_path: Path, tokenizer: Path) -> None:
        folder = tmp_path / "in"
        folder.mkdir()
        (folder / "a.txt").write_text("a")
        (folder / "b.txt").symlink_to("a.txt")
        (tmp_path / "c.txt").write_text("c")
        (folder / "c.txt").symlink_to(tmp_path / "c.txt")
        assert read(tmp_path, tokenizer, folder) == ["a", "c"]

    def test_only_links(self, tmp_path: Path, tokenizer: Path) -> None:
        (tmp_path / "in").mkdir()
        (tmp_path / "there").mkdir()
        (tmp_path / "there/a.txt").write_text("a")
        (tmp_path / "in/part").symlink_to(tmp_path / "there")
        assert read(tmp_path, tokenizer, tmp_path / "in") == ["a"]

    def test_whatever_is_left_out_is_counted(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = tmp_path / "in"
        (folder / ".git").mkdir(parents=True)
        for name in ("a.txt", ".hidden", "x.png", "y.png", "Makefile"):
            (folder / name).write_text("text")
        os.mkfifo(folder / "pipe.txt")
        left_out = plan_inputs([str(folder)], unit_bytes=2**20).left_out
        assert {why: number for why, (number, _) in left_out.items()} == {
            ".png": 2,
            "hidden": 1,
            "hidden folders": 1,
            "Makefile": 1,
            "special files": 1,
        }
        assert say_left_out(left_out).startswith(f"2 .png (as in {folder}/x.png), 1 ")

    @pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
    def test_special_files_by_name_are_refused(
        self, tmp_path: Path, tokenizer: Path, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "special"
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "socket":
            monkeypatch.chdir(tmp_path)  # the path of a socket must be short
            with socket.socket(socket.AF_UNIX) as made:
                made.bind("special")
        else:
            path = Path("/dev/null")
        with pytest.raises(ValueError, match=rf"--source={path}: is neither file nor folder but a .*{kind};"):
            read(tmp_path, tokenizer, path)

    def test_globs(self, tmp_path: Path, tokenizer: Path) -> None:
        for name in ("b.txt", "a.txt", "c.md", "deep/d.txt"):
            (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "in" / name).write_text(name)
        assert read(tmp_path, tokenizer, f"{tmp_path}/in/*.txt") == ["a.txt", "b.txt"]
        assert len(plan_inputs([f"{tmp_path}/in/**/*.txt"], unit_bytes=1).files) == 3
        with pytest.raises(ValueError, match=r"in/\*.none: matches no file or folder; name others"):
            plan_inputs([f"{tmp_path}/in/*.none"], unit_bytes=1)
        (tmp_path / "in/[x].txt").write_text("a name like a pattern")
        assert len(plan_inputs([f"{tmp_path}/in/[x].txt"], unit_bytes=1).files) == 1


@pytest.mark.parametrize("address", ["s3://bucket/x", "gs://b/x", "https://h/x", "hf://datasets/x", "abfss://c@a/x"])
class TestAddresses:
    """They are no paths of this machine; as such they would name folders nobody looks into."""

    @pytest.mark.parametrize("option", ["--source", "--tokenizer", "--out"])
    def test_are_refused_by_name(
        self,
        tmp_path: Path,
        tokenizer: Path,
        address: str,
        option: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        given = {"--source": lines(tmp_path / "in.jsonl", {"text": "a"}), "--tokenizer": str(tokenizer), "--out": "out"}
        given[option] = address
        assert main([part for pair in given.items() for part in pair]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(
            f"error: {option}={address}: must be a path of this machine and is a {address.split(':')[0]}"
        )
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "tokenizer"]


def test_file_addresses(tmp_path: Path, tokenizer: Path) -> None:
    with pytest.raises(ValueError, match=r"is a file: address; write the path alone"):
        read(tmp_path, tokenizer, f"file://{tmp_path}")


@pytest.mark.parametrize("foreign", [1, 30])
def test_lines_of_another_encoding_far_from_the_beginning(
    tmp_path: Path, tokenizer: Path, foreign: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beyond what is looked at first they are replaced and counted, and many are warned of."""
    row = json.dumps({"text": SENTENCE}, ensure_ascii=False).encode("latin-1")
    source = lines(tmp_path / "in.jsonl", *({"text": "x" * 1000} for _ in range(100)), *[row] * foreign)
    assert main(["--source", source, "--tokenizer", str(tokenizer), "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr()
    assert f"replaced invalid text in {foreign};" in shown.out
    assert ("warning: 30 of 130 documents had bytes that are not UTF-8" in shown.err) == (foreign == 30)


def test_damage_among_lines_is_replaced_and_counted(tmp_path: Path, tokenizer: Path) -> None:
    source = lines(tmp_path / "in.jsonl", *([b'{"text": "a\xacb"}'] * 3), *({"text": text} for text in TEXTS))
    manifest = tokenize(options(source, tokenizer=tokenizer), tmp_path / "out")
    assert manifest.counts == Counts(replaced=3)
