"""File systems as they are: without locks, fsync or rename, and shared by several users."""

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from data.corpus import prepare_default_corpus
from data.files import Held, StorageWarning, locked, write_atomically
from data.store import TokenStore
from data.tokenize import main
from tests.data.corpora import byte_tokenizer
from tests.data.test_corpus import small_library
from tests.data.test_tokenize import files_of, lines

LACKING = [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP]


def failing(code: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


@pytest.fixture
def umask() -> Iterator[Callable[[int], None]]:
    before = os.umask(0)
    os.umask(before)
    yield lambda mask: os.umask(mask) and None
    os.umask(before)


def arguments(tmp_path: Path) -> list[str]:
    source = lines(tmp_path / "in.jsonl", *({"text": "good"} for _ in range(9)))
    tokenizer = byte_tokenizer(tmp_path / "tokenizer")
    shards = ["--shard-tokens", "8", "--workers", "1"]
    return ["--source", source, "--tokenizer", str(tokenizer), *shards, "--out", str(tmp_path / "out")]


@pytest.mark.parametrize("call", ["flock", "fsync"])
@pytest.mark.parametrize("code", LACKING, ids=[errno.errorcode[code] for code in LACKING])
class TestWithout:
    def test_tokenise(
        self, tmp_path: Path, call: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """It goes on, says so once, and makes the same files."""
        given = arguments(tmp_path)
        assert main([*given[:-1], str(tmp_path / "usual")]) == 0
        capsys.readouterr()
        monkeypatch.setattr(fcntl if call == "flock" else os, call, failing(code))
        assert main(given) == 0
        warned = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: ")]
        assert len(warned) == (1 if call == "flock" else 2)  # fsync of two folders
        assert len(set(warned)) == len(warned)
        assert str(tmp_path / "out") in warned[0]
        assert ("has no file locks" if call == "flock" else "has no fsync") in warned[0]
        assert files_of(tmp_path / "out") == files_of(tmp_path / "usual")

    def test_default_corpus(self, tmp_path: Path, call: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
        library = small_library(tmp_path / "library")
        monkeypatch.setattr(fcntl if call == "flock" else os, call, failing(code))
        with pytest.warns(StorageWarning, match="has no"):
            folder = prepare_default_corpus(tmp_path / "cache", vocab_size=300, library=library)
        assert TokenStore.open(folder, verify="hash").num_documents == 80


def test_two_builders_without_locks_write_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One begins while the other is in the middle: what each finds half written it writes over, to the byte."""
    from data import corpus

    library, cache = small_library(tmp_path / "library"), tmp_path / "cache"
    write = corpus.write_shard
    nested: list[Path] = []

    def write_twice(*args: object, **options: object) -> object:
        if not nested:
            nested.append(tmp_path)
            prepare_default_corpus(cache, vocab_size=300, library=library)
        return write(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOSYS))
    monkeypatch.setattr(corpus, "write_shard", write_twice)
    with pytest.warns(StorageWarning):
        folder = prepare_default_corpus(cache, vocab_size=300, library=library)
    assert TokenStore.open(folder, verify="hash").num_documents == 80
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_what_cannot_be_done_without_is_named(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No rename is a storage that cannot be written to; a failing disk is no lack of a call."""
    code = errno.ENOSYS if call == "replace" else errno.EIO
    monkeypatch.setattr(os, call, failing(code))
    assert main(arguments(tmp_path)) == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith(f"error: {tmp_path}/out/unfinished/plan.json: ")
    assert ("this storage cannot rename files" if call == "replace" else "Input/output error") in line
    assert not list(tmp_path.glob("out/**/.*.partial"))


class TestLock:
    def test_held_by_another(self, tmp_path: Path) -> None:
        with locked(tmp_path / "lock"), pytest.raises(Held), locked(tmp_path / "lock"):
            pass
        with locked(tmp_path / "lock", wait_seconds=60):
            pass

    @pytest.mark.parametrize("mask", [0o002, 0o022, 0o077], ids=oct)
    def test_mode_follows_the_umask(self, tmp_path: Path, mask: int, umask: Callable[[int], None]) -> None:
        umask(mask)
        with locked(tmp_path / "lock"):
            pass
        write_atomically(tmp_path / "file", b"content")
        for name in ("lock", "file"):
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o666 & ~mask

    def test_of_another_user_that_may_only_be_read(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "lock").touch()
        usual = os.open

        def refuse_writing(path: Path, flags: int, *rest: int) -> int:
            if flags & os.O_RDWR:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return usual(path, flags, *rest)

        monkeypatch.setattr(os, "open", refuse_writing)
        with locked(tmp_path / "lock"), pytest.raises(Held), locked(tmp_path / "lock"):
            pass


class TestCleaningUp:
    """It is never fatal: what is made is made."""

    def test_after_the_corpus_is_made(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "rmdir", failing(errno.ENOTEMPTY))
        monkeypatch.setattr(shutil.os, "unlink", failing(errno.EBUSY))
        given = arguments(tmp_path)
        assert main(given) == 0
        assert TokenStore.open(tmp_path / "out").num_documents == 9
        assert main(given) == 0

    def test_of_leftovers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "out/unfinished").mkdir(parents=True)
        (tmp_path / "out/.shard-00002.tokens.1.partial").touch()
        monkeypatch.setattr(Path, "unlink", failing(errno.EBUSY))
        assert main(arguments(tmp_path)) == 0


def test_a_cache_that_another_user_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = small_library(tmp_path / "library")
    folder = prepare_default_corpus(tmp_path / "cache", vocab_size=300, library=library)

    def exists(path: Path) -> bool:
        if folder in path.parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return True

    monkeypatch.setattr(Path, "exists", exists)
    with pytest.raises(ValueError, match=r"run.cache=.*cache: must be writable .* \(Permission denied\); set another"):
        prepare_default_corpus(tmp_path / "cache", vocab_size=300, library=library)
