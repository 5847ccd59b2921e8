"""Before the first step: what the first evaluation and the first save need is tried, and refused with its reason."""

import dataclasses
import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

import train.rehearse
from data.loader import Loader, open_sources
from parallel.mesh import Mesh
from tests.data.corpora import write_corpus
from train.rehearse import (
    PREFIX,
    RehearsalFailed,
    agree,
    format_bytes,
    rehearse_saving,
    room_problem,
)
from train.settings import RunSettings


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a rehearsal of saving needs of a run: its folder and its ranks."""
    monkeypatch.setattr(train.rehearse, "bytes_to_save", lambda run: 1000)
    return SimpleNamespace(folder=tmp_path, mesh=Mesh())


@pytest.mark.parametrize("inside", ["", "checkpoints"], ids=["new run", "resumed run"])
def test_a_rehearsal_leaves_nothing_behind_and_takes_away_what_a_killed_one_left(run: Any, inside: str) -> None:
    folder = run.folder / inside
    (folder / f"{PREFIX}0123").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("kept")
    rehearse_saving(run)
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]


def refuse(number: int, *, named: bool = True) -> Callable[..., None]:
    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError(number, os.strerror(number), *([str(arguments[0])] if named else []))

    return fail


FAULTS = {
    "no folder can be made": (Path, "mkdir", errno.EROFS, "Read-only file system; mount it writable"),
    "no file can be made": (Path, "open", errno.EACCES, "Permission denied; make the folder writable for this user"),
    "no room": (os, "fsync", errno.ENOSPC, "No space left on device; free disk space"),
    "over quota": (os, "fsync", errno.EDQUOT, "Disk quota exceeded; free disk space"),
    "no file can be made durable": (os, "fsync", errno.EIO, "Input/output error; mend the folder"),
    "nothing can be renamed": (Path, "rename", errno.EPERM, "Operation not permitted; make the folder writable"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_the_file_system_refuses_is_one_line_with_path_and_remedy(
    run: Any, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    owner, name, number, said = FAULTS[fault]
    # A full disk is not told with a name.
    monkeypatch.setattr(owner, name, refuse(number, named=owner is Path))
    with pytest.raises(RehearsalFailed) as found:
        rehearse_saving(run)
    assert str(found.value).startswith(f"before the first step: {run.folder}/{PREFIX}")
    assert said in str(found.value)
    assert str(found.value).endswith("or set another run.dir")
    monkeypatch.undo()
    monkeypatch.setattr(train.rehearse, "bytes_to_save", lambda run: 1000)
    rehearse_saving(run)
    assert list(run.folder.iterdir()) == []


def test_what_cannot_be_removed_is_said_and_stays(
    run: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As the file of an uploader that still reads it, on a network file system."""
    monkeypatch.setattr(shutil, "rmtree", refuse(errno.ENOTEMPTY))
    with caplog.at_level(logging.WARNING):
        rehearse_saving(run)
    assert "cannot be removed (Directory not empty); remove it by hand" in caplog.text


def test_a_checkpoint_that_has_no_room_is_refused(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(run.folder)
    for free, total, fits in ((1000, 10**6, True), (999, 10**6, False), (0, 0, True)):
        found = usage._replace(free=free, total=total)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, found=found: found)
        assert (room_problem(run.folder, 1000) is None) is fits
    monkeypatch.setattr(shutil, "disk_usage", refuse(errno.ENOSYS))
    assert room_problem(run.folder, 1000) is None
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage._replace(free=5, total=10**6))
    with pytest.raises(RehearsalFailed, match="has 5 bytes free and one checkpoint takes 1 kB; free disk space"):
        rehearse_saving(run)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (3_210_000, "3.21 MB"), (2e13, "20 TB")]
)
def test_sizes_are_said_in_the_unit_that_disks_are_read_in(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_the_ranks_of_each_reason_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train.rehearse, "share", lambda run, value: [None, "disk full", "read-only", "disk full"])
    run = SimpleNamespace(mesh=SimpleNamespace(world=SimpleNamespace(size=4)))
    with pytest.raises(RehearsalFailed) as found:
        agree(run, None)
    assert str(found.value) == ("before the first step: rank 1, 3: disk full\nbefore the first step: rank 2: read-only")


def word_loader(folder: Path, *, eos_id: int | None) -> Loader:
    """A loader whose tokenizer knows two words and has no token for white space."""
    tokenizer = Tokenizer(models.WordLevel({"<|eos|>": 0, "one": 1, "two": 2}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    store = write_corpus(folder, [[[1, 2, 1, 2]] * 4], vocab_size=3, tokenizer=tokenizer.to_str())
    store.manifest = dataclasses.replace(store.manifest, eos_id=eos_id)
    return Loader([open_sources([store], weights=[1.0], fraction=0.0, seed=0)[0]], seed=0)


@pytest.mark.parametrize("prompt", ["", " ", "\n\t"])
def test_a_prompt_without_tokens_begins_with_the_end_of_a_text(tmp_path: Path, prompt: str) -> None:
    assert word_loader(tmp_path, eos_id=0).encode_prompt(prompt) == [0]
    assert word_loader(tmp_path, eos_id=0).encode_prompt("two one") == [2, 1]


@pytest.mark.parametrize(("prompt", "eos_id"), [("", None), ("three", 0)])
def test_a_prompt_that_the_tokenizer_cannot_begin_is_refused_by_name(
    tmp_path: Path, prompt: str, eos_id: int | None
) -> None:
    with pytest.raises(ValueError, match=f"evaluate.prompt='{prompt}': has no tokens"):
        word_loader(tmp_path, eos_id=eos_id).encode_prompt(prompt)


@pytest.mark.parametrize(
    ("seed", "fits"), [(-(2**63) - 1, False), (-(2**63), True), (-1, True), (2**64 - 1, True), (2**64, False)]
)
def test_a_seed_is_refused_where_torch_would_not_take_it(seed: int, fits: bool) -> None:
    assert (RunSettings(dir="runs/x", seed=seed).errors() == []) is fits
    if fits:
        torch.Generator().manual_seed(seed)
        return
    with pytest.raises((RuntimeError, ValueError, OverflowError)):
        torch.Generator().manual_seed(seed)
