"""File systems as they are: what each system call of a save may refuse, and what that does to the save."""

import errno
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.dist.ranks import RankPool
from tests.train.test_checkpoint import blank, folder, opened, opened_on_rank, owned, sample_tensors, save_steps
from tests.train.test_checkpoint_faults import BROKEN_FILE
from train.checkpoint import CheckpointError, CheckpointStore, staging, store, verify
from train.checkpoint.staging import FileEntry

CODES = sorted(errno.errorcode.keys() - {errno.EINTR})


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that are read in order to be hashed."""
    names: list[str] = []
    describe = staging.describe_file

    def noted(path: Path) -> FileEntry:
        names.append(path.name)
        return describe(path)

    monkeypatch.setattr(staging, "describe_file", noted)
    return names


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "PAUSE", 0.0)


def test_no_file_is_read_to_be_hashed_while_saving(tmp_path: Path, hashed: list[str]) -> None:
    with opened(tmp_path, keep=2) as opened_store:
        for step in range(1, 5):
            opened_store.save(step, tensors=sample_tensors(step), state={})
        opened_store.wait()
        assert BROKEN_FILE not in hashed
        assert opened_store.latest() == 4
        assert BROKEN_FILE not in hashed, "what this store has written it trusts"
    with opened(tmp_path) as again:
        assert again.latest() == 4
        again.load(4, tensors=blank(sample_tensors()))
        assert again.latest() == 4
    assert hashed.count(BROKEN_FILE) == 1, "once by a process that has not written it"


def test_the_hashes_of_the_writer_are_those_of_the_files(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    entries = staging.read_files(folder(tmp_path, 10))
    assert {BROKEN_FILE, ".metadata", "state.json"} <= entries.keys()
    for name, entry in entries.items():
        described = staging.describe_file(folder(tmp_path, 10) / name)
        assert (entry.size, entry.sha256) == (described.size, described.sha256)
    pieces = entries[BROKEN_FILE].pieces
    assert len(pieces) == len(sample_tensors())
    assert sum(piece.size for piece in pieces) == entries[BROKEN_FILE].size


def test_a_trusted_checkpoint_that_was_written_to_is_hashed_again(tmp_path: Path) -> None:
    with opened(tmp_path) as opened_store:
        for step in (1, 2):
            opened_store.save(step, tensors=sample_tensors(step), state={})
        assert opened_store.latest() == 2
        path = folder(tmp_path, 2) / BROKEN_FILE
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        assert opened_store.latest() == 1


@pytest.mark.parametrize("name", [BROKEN_FILE, ".metadata", "state.json"])
def test_a_bit_that_flips_after_verification_is_found_at_the_load(tmp_path: Path, name: str) -> None:
    """The file system says nothing of it: time, size and inode stay."""
    save_steps(tmp_path, 1)
    path = folder(tmp_path, 1) / name
    with opened(tmp_path) as opened_store:
        assert opened_store.latest() == 1
        stat = path.stat()
        content = path.read_bytes()
        middle = 600 if name == BROKEN_FILE else len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        with pytest.raises(CheckpointError, match=f"{re.escape(name)} was altered after it had been verified"):
            opened_store.load(1, tensors=blank(sample_tensors()))


def test_verification_is_dealt_out_by_bytes() -> None:
    files = {f"__{rank}_0.distcp": FileEntry(size=100 + rank, sha256="") for rank in range(16)}
    files["state.json"] = FileEntry(size=3, sha256="")
    parts = verify.deal(files, ranks=4)
    assert {name for part in parts for name in part} == files.keys()
    sizes = [sum(entry.size for entry in part.values()) for part in parts]
    assert sum(sizes) == sum(entry.size for entry in files.values())
    assert max(sizes) - min(sizes) <= 5
    assert verify.deal(files, ranks=1) == [files]


def test_an_fsync_that_the_file_system_lacks_is_a_warning_and_one_that_loses_data_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refused = []
    for code in CODES:
        with pytest.MonkeyPatch.context() as patch, opened(tmp_path / str(code), asynchronous=False) as opened_store:
            patch.setattr(os, "fsync", lambda handle, code=code: (_ for _ in ()).throw(OSError(code, "no")))
            try:
                opened_store.save(1, tensors={"w": torch.zeros(3)}, state={})
                assert opened_store.latest() == 1
            except CheckpointError:
                refused.append(code)
    assert refused == sorted((errno.EIO, errno.ENOSPC, errno.EDQUOT))
    assert "cannot fsync a folder" in caplog.text


REMOVERS = [(shutil, "rmtree"), (os, "unlink"), (os, "rmdir")]


@pytest.mark.parametrize(("owner", "name"), REMOVERS, ids=["rmtree", "unlink", "rmdir"])
def test_what_cannot_be_removed_never_ends_a_save(
    tmp_path: Path,
    owner: object,
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for code in (errno.ENOTEMPTY, errno.EBUSY, errno.EACCES, errno.EIO, errno.ESTALE):
        root = tmp_path / str(code)
        with pytest.MonkeyPatch.context() as patch, opened(root, keep=1, asynchronous=False) as opened_store:

            def stuck(path: object, *rest: object, code: int = code, **named: object) -> None:
                raise OSError(code, os.strerror(code), str(path))

            patch.setattr(owner, name, stuck)
            for step in (1, 2, 2, 3, 4):
                opened_store.save(step, tensors={"w": torch.full((3,), step)}, state={})
            assert opened_store.latest() == 4
        assert "is tried again at the next save" in caplog.text
        with opened(root, keep=1) as opened_store:
            opened_store.save(5, tensors={"w": torch.zeros(3)}, state={})
        assert [path.name for path in root.iterdir()] == ["step-00000005"], "once it can be, it is"


def test_a_failure_after_publishing_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(tmp_path, keep=1, asynchronous=False) as opened_store:
        opened_store.save(1, tensors={"w": torch.zeros(3)}, state={})
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verify.Verifier, "obsolete", lambda self, **_: (_ for _ in ()).throw(RuntimeError("gone")))
            patch.setattr(verify.Verifier, "trust", lambda self, _: (_ for _ in ()).throw(OSError(5, "gone")))
            opened_store.save(2, tensors={"w": torch.zeros(3)}, state={})
        assert "removing old ones failed (gone)" in caplog.text
        assert opened_store.latest() == 2


def test_a_save_that_the_storage_refuses_is_tried_again_and_then_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries: list[int] = []
    write = CheckpointStore._write_tensors

    def flaky(self: CheckpointStore, *arguments: object) -> object:
        tries.append(len(tries))
        if len(tries) in (1, 3, 4, 5):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(CheckpointStore, "_write_tensors", flaky)
    with caplog.at_level(logging.WARNING):
        flaky_store = CheckpointStore(tmp_path, retries=2)
        flaky_store.save(1, tensors={"w": torch.ones(3)}, state={})
        flaky_store.wait()
        assert len(tries) == 2
        assert "rank 0: No space left on device" in caplog.text
        flaky_store.check()
        flaky_store.save(2, tensors={"w": torch.ones(3)}, state={})
        assert flaky_store._pending is not None
        assert flaky_store._pending.exception(30) is not None
        with pytest.raises(CheckpointError, match="step-00000002: save failed on rank 0: No space left"):
            flaky_store.check()
        flaky_store.check()
        assert len(tries) == 5
        assert flaky_store.latest() == 1
        flaky_store.close()


CALLS = [(os, "open"), (os, "fsync"), (os, "mkdir"), (os, "rename"), (os, "stat"), (os, "listdir"), (Path, "open")]


@pytest.mark.parametrize(("owner", "name"), CALLS, ids=[f"{owner.__name__}.{name}" for owner, name in CALLS])
def test_any_call_that_fails_once_costs_at_most_this_save(tmp_path: Path, owner: object, name: str) -> None:
    """The first, the second, ... call of the second save fails, until there are no more calls."""
    call = getattr(owner, name)
    for failing in range(60):
        root, made = tmp_path / str(failing), [0]
        with opened(root, keep=1, asynchronous=False) as opened_store:
            opened_store.save(1, tensors={"w": torch.ones(3)}, state={})

            def sometimes(*arguments: Any, failing: int = failing, made: list[int] = made, **named: Any) -> Any:
                made[0] += 1
                if made[0] == failing + 1:
                    raise OSError(errno.EIO, os.strerror(errno.EIO), str(arguments[0]))
                return call(*arguments, **named)

            error = None
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(owner, name, sometimes)
                try:
                    opened_store.save(2, tensors={"w": torch.ones(3)}, state={})
                except CheckpointError as caught:
                    error = str(caught)
            assert error is None or re.match(rf"(checkpoint|reading back) {root}[^\n]*$", error), error
            found = opened_store.latest()
            assert found == 2 or (error is not None and found == 1)
            opened_store.save(3, tensors={"w": torch.ones(3)}, state={})
        assert [path.name for path in root.iterdir()] == ["step-00000003"]
        if made[0] <= failing:
            return
    raise AssertionError("the save makes more calls than were tried")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


def _notice_at_the_same_check(root: Path) -> None:
    """Each step is a collective, as in training: a rank that raised a step early would leave the other in it."""
    with opened_on_rank(root) as (opened_store, rank):
        # Rank 0 must not wait within dcp for a rank that never gets there.
        opened_store._write_tensors = _refuse if rank == 1 else _write_nothing  # type: ignore[method-assign]
        opened_store.save(1, tensors=owned(rank), state={})
        with pytest.raises(CheckpointError, match="save failed on rank 1: "):
            _train(opened_store)
        counts = [None, None]
        dist.all_gather_object(counts, opened_store._checks)
        assert counts[0] == counts[1]


def _train(checked: CheckpointStore) -> None:
    for _ in range(100_000):
        dist.all_reduce(torch.ones(1))
        checked.check()


def _write_nothing(*_: object) -> dict[str, FileEntry]:
    return {}


def _refuse(*_: object) -> dict[str, FileEntry]:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_ranks_notice_a_failed_save_at_the_same_step(tmp_path: Path, pool: RankPool) -> None:
    pool.run(_notice_at_the_same_check, tmp_path)


def _name_the_rank_within_dcp(root: Path) -> None:
    """The write of rank 1 fails within torch's own collectives, which tell both ranks."""
    with opened_on_rank(root) as (opened_store, rank), pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(staging, "sync", _refuse)
        opened_store.save(1, tensors=owned(rank), state={})
        with pytest.raises(CheckpointError, match="step-00000001: save failed on rank 1: No space left on device"):
            opened_store.wait()


def test_the_rank_that_failed_is_named_not_the_first(tmp_path: Path, pool: RankPool) -> None:
    pool.run(_name_the_rank_within_dcp, tmp_path)
