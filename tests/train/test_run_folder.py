"""The run folder: its config is there and readable or is missed in one line, and storage that fails is named."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from train.run_folder import RunLock, explained, read_config, write_config

CONFIG = {"optim": {"lr": 0.001}, "run": {"dir": "runs/größer"}}


def test_a_config_comes_back(tmp_path: Path) -> None:
    assert read_config(tmp_path) is None
    write_config(tmp_path, CONFIG)
    assert read_config(tmp_path) == CONFIG


@pytest.mark.parametrize("progress", ["checkpoints/step-00000003/state.json", "metrics.jsonl"])
def test_a_config_that_is_missing_beside_progress_is_missed(tmp_path: Path, progress: str) -> None:
    file = tmp_path / progress
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("{}\n")
    with pytest.raises(ValueError, match=r"config.yaml: is missing beside steps or checkpoints.*restore it or set"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds no keys and values"),
        (b"[]", "holds no keys and values"),
        (b"3", "holds no keys and values"),
        (b"a: 1\nb: [1,\nc: }", "is not valid YAML in line 3"),
        (b"a: \x00", "is not valid YAML"),
        (b"a: \xff", "is not UTF-8 text"),
    ],
    ids=repr,
)
def test_a_config_that_is_none_is_refused_in_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=said) as refused:
        read_config(tmp_path)
    (line,) = str(refused.value).splitlines()
    assert line.startswith(f"{tmp_path / 'config.yaml'}: ")
    assert line.endswith("; restore it or set another run.dir")


@pytest.mark.parametrize("below", ["", "/run"])
def test_a_folder_that_cannot_be_made_names_field_path_and_remedy(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("precious")
    folder = Path(f"{tmp_path / 'file'}{below}")
    with pytest.raises(ValueError, match=f"^run.dir={folder}: cannot be made a folder .*; set run.dir to a folder"):
        RunLock(folder)
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), " No space left on device; free disk space, or set"),
        (PermissionError(errno.EACCES, "Permission denied", "x/y"), " x/y: Permission denied; make the folder writ"),
        (OSError(errno.EIO, os.strerror(errno.EIO)), " Input/output error; mend the folder, or set another run.dir"),
    ],
    ids=repr,
)
def test_what_the_system_refuses_is_said_with_path_and_remedy(tmp_path: Path, error: OSError, said: str) -> None:
    with pytest.raises(OSError, match=f"^run.dir={tmp_path}:{said}"), explained(tmp_path):
        raise error


def _errors_of_a_lock() -> list[int]:
    """Every errno that there is but those that say that somebody else holds the lock."""
    return sorted(code for code in errno.errorcode if not isinstance(OSError(code, ""), BlockingIOError))


def test_storage_without_locks_is_a_warning_whatever_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for code in _errors_of_a_lock():

        def refuse(handle: int, operation: int, *, code: int = code) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(fcntl, "flock", refuse)
        caplog.clear()
        with RunLock(tmp_path):
            (line,) = [record.getMessage() for record in caplog.records]
        assert line.startswith(f"run.dir={tmp_path}: this file system has no locks ({os.strerror(code)})")


def test_a_lock_that_is_held_is_refused_all_the_same(tmp_path: Path) -> None:
    with RunLock(tmp_path), pytest.raises(ValueError, match="another run is using this folder"):
        RunLock(tmp_path)


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o664), (0o022, 0o644), (0o077, 0o600)], ids=oct)
def test_the_lock_file_has_the_rights_that_the_umask_leaves(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        with RunLock(tmp_path):
            assert (tmp_path / ".lock").stat().st_mode & 0o777 == mode
    finally:
        os.umask(before)


def test_a_lock_file_that_another_user_made_for_reading_only_still_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".lock").touch()
    open_file = os.open

    def read_only(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return open_file(path, flags, mode)

    monkeypatch.setattr(os, "open", read_only)
    with RunLock(tmp_path), pytest.raises(ValueError, match="another run is using this folder"):
        RunLock(tmp_path)
