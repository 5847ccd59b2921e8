"""Recorded routing: what a run counted, whole after a stop, and good for the simulator and for forced routing."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from launch.train import main
from parallel.expert.trace import load_trace
from tests.bench import experts
from tests.launch.tiny_run import make_corpus, overrides, read_metrics
from train.routing_trace import RoutingRecorder


def recorder(folder: Path, *, resume_step: int = 0) -> RoutingRecorder:
    return RoutingRecorder(folder / "routing.npz", layers=(1, 2), top_k=2, resume_step=resume_step)


def record(target: RoutingRecorder, *steps: int) -> None:
    for step in steps:
        target.add(torch.full((2, 4), step))
    target.write()


def steps_of(folder: Path) -> list[int]:
    return load_trace(folder / "routing.npz").counts[:, 0, 0].tolist()


def test_a_resumed_recording_is_as_if_never_stopped(tmp_path: Path) -> None:
    record(recorder(tmp_path), 1, 2, 3, 4)
    record(recorder(tmp_path, resume_step=2), 3, 4, 5)
    trace = load_trace(tmp_path / "routing.npz")
    assert steps_of(tmp_path) == [1, 2, 3, 4, 5]
    assert (trace.layers.tolist(), trace.top_k, trace.after) == ([1, 2], 2, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["routing.npz"]


def test_recording_may_begin_late(tmp_path: Path) -> None:
    record(recorder(tmp_path, resume_step=10), 11, 12, 13)
    record(recorder(tmp_path, resume_step=10), 11, 12)
    record(recorder(tmp_path, resume_step=12), 13, 14)
    assert (steps_of(tmp_path), load_trace(tmp_path / "routing.npz").after) == ([11, 12, 13, 14], 10)


@pytest.mark.parametrize("resume_step", [3, 9, 14])
def test_a_gap_begins_the_recording_anew_and_says_so(
    tmp_path: Path, resume_step: int, caplog: pytest.LogCaptureFixture
) -> None:
    record(recorder(tmp_path, resume_step=10), 11, 12, 13)
    record(recorder(tmp_path, resume_step=resume_step), resume_step + 1)
    assert steps_of(tmp_path) == [resume_step + 1]
    assert f"begins after step {resume_step} or ends before it; recording begins anew" in caplog.text


def test_a_torn_file_begins_anew_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record(recorder(tmp_path), 1, 2)
    path = tmp_path / "routing.npz"
    path.write_bytes(path.read_bytes()[:100])
    record(recorder(tmp_path, resume_step=2), 3)
    assert steps_of(tmp_path) == [3]
    assert "is no archive of arrays, or cut off" in caplog.text


def test_a_full_disk_leaves_the_old_file_and_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target = recorder(tmp_path)
    record(target, 1)

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("train.routing_trace.save_trace", fail)
        record(target, 2)
    assert steps_of(tmp_path) == [1]
    assert "No space left on device" in caplog.text
    record(target, 3)
    assert steps_of(tmp_path) == [1, 2, 3]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def test_a_run_records_what_its_metrics_count_also_when_stopped(tmp_path: Path, corpus: Path) -> None:
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    options = ["routing.trace=true", "train.detail_every=1"]
    for folder, steps in ((straight, 3), (stopped, 2), (stopped, 3)):
        assert main(overrides(folder, corpus, f"train.steps={steps}", *options)) == 0
    one, other = (load_trace(folder / "routing.npz") for folder in (straight, stopped))
    assert np.array_equal(one.counts, other.counts)
    assert one.counts[:, 0].tolist() == [record["expert_load"]["1"] for record in read_metrics(straight)]
    assert (one.layers.tolist(), one.top_k, one.after) == ([1], 2, 0)


def test_without_being_asked_nothing_is_recorded(tmp_path: Path, corpus: Path) -> None:
    assert main(overrides(tmp_path, corpus, "train.steps=1")) == 0
    assert not (tmp_path / "routing.npz").exists()


def test_a_recording_drives_the_simulator_and_another_run(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    path = first / "routing.npz"
    options = ["train.steps=2", "routing.trace=true"]
    assert main(overrides(first, corpus, "routing.force=zipf(2)", *options)) == 0
    assert main(overrides(second, corpus, f"routing.force=trace:{path}", *options)) == 0
    # Four microbatches a step, in each of which every expert has its share to within a row.
    found, recorded = (load_trace(folder / "routing.npz").counts for folder in (second, first))
    assert np.abs(found - recorded).max() <= 4
    assert recorded.max() > 2 * recorded.mean()
    monkeypatch.setattr(sys, "argv", ["experts", "--loads", f"trace:{path}", "--ranks", "2"])
    capsys.readouterr()
    experts.main()
    shown = capsys.readouterr().out
    assert f"trace:{path}"[:20] in shown
    assert "balanced" in shown
