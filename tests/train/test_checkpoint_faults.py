"""Checkpoints survive what tears them: damage on disk, failing writes, kills, and readers in between.

Processes that are killed come from a fork server, which has no threads to fork wrongly.
"""

import itertools
import logging
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import Tensor

from parallel.sharding import TensorSlice
from tests.dist.ranks import PATIENCE
from tests.train.test_checkpoint import blank, folder, opened, sample_tensors, save_steps
from train.checkpoint import CheckpointError, CheckpointStore, staging
from train.checkpoint.agreement import Agreement
from train.checkpoint.verify import Verifier

FORKSERVER = multiprocessing.get_context("forkserver")
BROKEN_FILE = "__0_0.distcp"


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("train.")]


def latest(root: Path) -> int | None:
    with opened(root) as store:
        return store.latest()


def flip_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGES = [
    pytest.param(lambda f: flip_byte(f / BROKEN_FILE), f"{BROKEN_FILE} does not have its SHA-256", id="flip"),
    pytest.param(lambda f: truncate(f / BROKEN_FILE), rf"{BROKEN_FILE} has \d+ bytes, the manifest", id="cut"),
    pytest.param(lambda f: (f / BROKEN_FILE).unlink(), f"{BROKEN_FILE} is missing", id="file-missing"),
    pytest.param(lambda f: flip_byte(f / ".metadata"), ".metadata does not have its SHA-256", id="flip-metadata"),
    pytest.param(lambda f: flip_byte(f / "state.json"), "state.json does not have its SHA-256", id="flip-state"),
    pytest.param(lambda f: (f / "manifest.json").unlink(), "manifest.json is missing", id="manifest-missing"),
    pytest.param(lambda f: flip_byte(f / "manifest.json"), "manifest.json does not have the SHA", id="flip-manifest"),
    pytest.param(lambda f: (f / "COMMIT").unlink(), "COMMIT is missing", id="commit-missing"),
    pytest.param(lambda f: truncate(f / "COMMIT"), "", id="commit-cut-of-newline-only"),
    pytest.param(lambda f: (f / "COMMIT").write_text(""), "manifest.json does not have the SHA", id="commit-empty"),
    pytest.param(lambda f: shutil.rmtree(f) or f.mkdir(), "COMMIT is missing", id="empty-folder"),
    pytest.param(lambda f: shutil.rmtree(f) or f.write_text("x"), "it is not a folder", id="file-for-folder"),
    pytest.param(lambda f: f.rename(f.with_name("gone")) and f.symlink_to("nowhere"), "not a folder", id="dangling"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES)
def test_falls_back_to_the_previous_verified_one_and_says_why(
    tmp_path: Path, damage: Callable[[Path], object], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    save_steps(tmp_path, 10, 20)
    damage(folder(tmp_path, 20))
    with caplog.at_level(logging.WARNING):
        found = latest(tmp_path)
    lines = warnings_of(caplog)
    if not reason:
        assert (found, lines) == (20, [])
        return
    assert found == 10
    assert len(lines) == 1
    assert str(folder(tmp_path, 20)) in lines[0]
    assert lines[0].endswith("falling back to step-00000010")
    assert re.search(reason, lines[0]), lines[0]
    with opened(tmp_path) as store, pytest.raises(CheckpointError, match=reason):
        store.load(20, tensors={})


def test_a_renamed_checkpoint_does_not_pass_for_another_step(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    folder(tmp_path, 10).rename(folder(tmp_path, 30))
    assert latest(tmp_path) == 20


def test_no_valid_checkpoint_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    flip_byte(folder(tmp_path, 10) / BROKEN_FILE)
    (folder(tmp_path, 20) / "COMMIT").unlink()
    with (
        opened(tmp_path) as store,
        pytest.raises(CheckpointError, match="none of the 2 checkpoints is valid") as caught,
    ):
        store.latest()
    assert "COMMIT is missing" in str(caught.value)
    assert f"{BROKEN_FILE} does not have its SHA-256" in str(caught.value)


def test_stale_staging_goes_and_foreign_names_stay(tmp_path: Path) -> None:
    save_steps(tmp_path, 10)
    stale = tmp_path / "step-00000020.tmp-0123abcd"
    shutil.copytree(folder(tmp_path, 10), stale)
    foreign = ["step-best", "my-copy", "step-00000010.bak", "latest"]
    for name in foreign[:3]:
        shutil.copytree(folder(tmp_path, 10), tmp_path / name)
    (tmp_path / "latest").symlink_to("nowhere")
    assert latest(tmp_path) == 10
    assert stale.exists(), "reading cleans nothing"
    save_steps(tmp_path, 30, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*foreign, "step-00000030"])


def test_retention_counts_only_verified_checkpoints(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20, 30)
    flip_byte(folder(tmp_path, 30) / BROKEN_FILE)
    save_steps(tmp_path, 40, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000030", "step-00000040"]
    save_steps(tmp_path, 50, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000040", "step-00000050"]


def test_a_rewound_run_keeps_what_it_has_just_saved(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 40)
    save_steps(tmp_path, 20, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000020", "step-00000040"]


@pytest.mark.parametrize("valid", [True, False], ids=["valid", "broken"])
def test_saving_a_step_again_replaces_it(tmp_path: Path, valid: bool) -> None:
    save_steps(tmp_path, 20)
    if not valid:
        flip_byte(folder(tmp_path, 20) / BROKEN_FILE)
    with opened(tmp_path) as store:
        store.save(20, tensors={"w": torch.arange(4)}, state={"second": True})
        loaded = {"w": torch.zeros(4, dtype=torch.int64)}
        assert store.load(20, tensors=loaded) == {"second": True}
    assert torch.equal(loaded["w"], torch.arange(4))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000020"]


def test_a_crash_between_setting_aside_and_replacing_loses_nothing(tmp_path: Path) -> None:
    save_steps(tmp_path, 10, 20)
    folder(tmp_path, 20).rename(tmp_path / "step-00000020.replaced")
    with opened(tmp_path) as store:
        assert store.latest() == 20
        assert store.load(20, tensors=blank(sample_tensors())) == {"tokens": 2000}
    save_steps(tmp_path, 20, 30)
    assert latest(tmp_path) == 30
    assert not (tmp_path / "step-00000020.replaced").exists()


def test_the_only_checkpoint_survives_a_blocked_and_then_failing_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_steps(tmp_path, 10, keep=1)
    gate = threading.Event()
    write = CheckpointStore._write_tensors

    def write_and_fail(self: CheckpointStore, staged: Path, tensors: dict[str, TensorSlice]) -> None:
        write(self, staged, tensors)
        assert gate.wait(10)
        raise PermissionError(13, "Permission denied")

    with opened(tmp_path, keep=1) as store:
        with monkeypatch.context() as patch:
            patch.setattr(CheckpointStore, "_write_tensors", write_and_fail)
            store.save(20, tensors=sample_tensors(20), state={})
            assert latest(tmp_path) == 10
            gate.set()
            with pytest.raises(CheckpointError, match=r"step-00000020.*rank 0: Permission denied; make the folder"):
                store.wait()
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"], "staging is gone, 10 is not"
        store.wait()
        store.save(21, tensors=sample_tensors(21), state={"tokens": 2100})
        assert store.latest() == 21
        assert store.load(21, tensors=blank(sample_tensors())) == {"tokens": 2100}


def test_the_next_save_reports_the_failure_of_the_last(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("in the way")
    with opened(tmp_path / "checkpoints") as store:
        store.save(1, tensors={"w": torch.zeros(3)}, state={})
        with pytest.raises(CheckpointError, match="step-00000001: save failed on rank 0: File exists"):
            store.save(2, tensors={"w": torch.zeros(3)}, state={})


def test_a_write_that_does_not_read_back_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(tmp_path, 10, keep=1)
    seal = staging.seal

    def seal_and_rot(path: Path, *, step: int, files: dict[str, staging.FileEntry]) -> None:
        seal(path, step=step, files=files)
        truncate(path / BROKEN_FILE)

    monkeypatch.setattr(staging, "seal", seal_and_rot)
    with opened(tmp_path, keep=1) as store:
        store.save(20, tensors=sample_tensors(20), state={})
        with pytest.raises(CheckpointError, match=r"reading back .* bytes, the manifest says"):
            store.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MiB of its own, where this user may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no small file system can be mounted here: {getattr(error, 'stderr', None) or error}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_is_one_clear_error_and_loses_nothing(small_disk: Path) -> None:
    root = small_disk / "checkpoints"
    with opened(root, keep=1) as store:
        store.save(1, tensors={"w": torch.zeros(100_000)}, state={})
        store.save(2, tensors={"w": torch.zeros(1_000_000)}, state={})
        with pytest.raises(CheckpointError) as caught:
            store.wait()
        assert str(caught.value) == (
            f"checkpoint {folder(root, 2)}: save failed on rank 0: No space left on device; free disk space or "
            f"lower checkpoint.keep (older checkpoints are untouched)"
        )
        assert [path.name for path in root.iterdir()] == ["step-00000001"]
        store.save(3, tensors={"w": torch.ones(100_000)}, state={})
        assert store.latest() == 3


def _save_beyond_the_file_size_limit(root: Path, answer: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    with opened(root, keep=1) as store:
        store.save(1, tensors={"w": torch.zeros(1000)}, state={})
        store.wait()
        try:
            store.save(2, tensors={"w": torch.zeros(1_000_000)}, state={})
            store.wait()
        except CheckpointError as error:
            answer.send((str(error), store.latest()))


def test_a_file_size_limit_is_one_clear_error_and_loses_nothing(tmp_path: Path) -> None:
    receiver, sender = FORKSERVER.Pipe(duplex=False)
    process = FORKSERVER.Process(target=_save_beyond_the_file_size_limit, args=(tmp_path, sender))
    process.start()
    sender.close()
    process.join()
    message, found = receiver.recv()
    assert "step-00000002: save failed on rank 0: File too large; raise the file size limit" in message
    assert found == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


FILE_OPERATIONS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"}


def _fork_savers(root: Path, requests: Connection) -> None:
    """Fork a process that saves, once per request, a number; answer whether the save came to its end."""
    torch.set_num_threads(1)
    while True:
        try:
            point = requests.recv()
        except EOFError:
            return
        pid = os.fork()
        if pid == 0:
            _save_until_killed(root, point)
        requests.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0)


def _save_until_killed(root: Path, point: int) -> None:
    """Save the step after the newest one; the process is killed before operation ``point`` on files of ``root``."""
    operations = itertools.count()

    def kill_at_point(event: str, arguments: tuple[object, ...]) -> None:
        if event in FILE_OPERATIONS and str(arguments[0]).startswith(str(root)) and next(operations) == point:
            os.kill(os.getpid(), signal.SIGKILL)

    with opened(root, keep=1) as store:
        step = (store.latest() or 0) + 1
        sys.addaudithook(kill_at_point)
        store.save(step, tensors=weights(step), state={"step": step})
    os._exit(0)


def weights(step: int) -> dict[str, Tensor]:
    return {f"w{index}": torch.full((50_000,), float(step)) for index in range(4)}


def test_killed_before_any_operation_of_a_save_every_restart_finds_a_whole_checkpoint(tmp_path: Path) -> None:
    requests, theirs = FORKSERVER.Pipe()
    forker = FORKSERVER.Process(target=_fork_savers, args=(tmp_path, theirs))
    forker.start()
    theirs.close()
    newest, leftovers, ended = 0, 0, False
    for point in itertools.count():
        requests.send(point)
        ended = requests.recv()
        leftovers += any(".tmp-" in path.name for path in tmp_path.iterdir())
        with opened(tmp_path, keep=1) as store:
            found = store.latest()
            assert (found or 0) in (newest, newest + 1)
            if found is not None:
                loaded = {name: torch.zeros_like(tensor) for name, tensor in weights(found).items()}
                assert store.load(found, tensors=loaded) == {"step": found}
                assert all(bool((tensor == found).all()) for tensor in loaded.values())
            newest = found or 0
        if ended:
            break
    requests.close()
    forker.join()
    assert point > 20
    assert leftovers > 10, "the kills must hit saves under way"


def test_a_reader_never_sees_a_partial_checkpoint_or_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_steps(tmp_path, 1, keep=1)
    seen: list[int] = []
    stop = threading.Event()
    polled = threading.Semaphore(0)
    failures: list[BaseException] = []

    def poll() -> None:
        verifier = Verifier(tmp_path, agreement=Agreement(rank=0, ranks=1, group=None))
        try:
            while not stop.is_set():
                found = verifier.find()
                assert found is not None
                seen.append(found.step)
                polled.release()
        except BaseException as error:
            failures.append(error)

    reader = threading.Thread(target=poll)
    with caplog.at_level(logging.WARNING), opened(tmp_path, keep=1) as store:
        reader.start()
        for step in range(2, 77):
            # Every third step is saved twice: replacing must not open a gap either.
            for _ in range(1 + (step % 3 == 0)):
                store.save(step, tensors={"w": torch.full((2000,), step)}, state={})
            if step % 4 == 0:
                # The second of the next two began after the save before this one was published.
                while polled.acquire(blocking=False):
                    pass
                assert polled.acquire(timeout=PATIENCE)
                assert polled.acquire(timeout=PATIENCE)
        store.wait()
        stop.set()
        reader.join()
    assert failures == []
    assert seen == sorted(seen)
    assert len(set(seen)) > 10
    assert warnings_of(caplog) == [], "no checkpoint looked broken on the way"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_stays_flat_over_fifty_saves(tmp_path: Path) -> None:
    tensors = {f"w{index}": torch.randn(250_000) for index in range(4)}
    total = sum(tensor.nbytes for tensor in tensors.values())
    with opened(tmp_path, keep=1) as store:
        for step in range(50):
            store.save(step, tensors=tensors, state={})
            store.wait()
            if step == 9:
                settled = resident_bytes()
    assert resident_bytes() - settled < total, "less than one snapshot more after 40 saves"


@pytest.mark.parametrize(("newest", "removed"), [(30, []), (20, [10]), (10, [])], ids=["broken", "before it", "oldest"])
def test_nothing_is_obsolete_unless_the_newest_step_verifies(tmp_path: Path, newest: int, removed: list[int]) -> None:
    with opened(tmp_path, keep=9) as store:
        for step in (10, 20, 30):
            store.save(step, tensors=sample_tensors(), state={})
    flip_byte(folder(tmp_path, 30) / BROKEN_FILE)
    with opened(tmp_path) as store:
        found = store._verifier.obsolete(newest=newest, keep=1)
    assert found == [folder(tmp_path, step) for step in removed]
