"""Metrics: valid JSON, exact rewind, declared reductions; trackers that never stop a run; the display."""

import importlib.util
import io
import json
import math
import os
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

import train.metrics
from data.output import Output
from parallel.mesh import Axis
from tests.dist.ranks import RankPool
from train.metrics import (
    JsonlTracker,
    StepMetrics,
    TrackerConfig,
    TrackerSet,
    WandbTracker,
    load_run_id,
    make_trackers,
    parse_step,
    reduce_over_ranks,
    reversed_lines,
    rewind,
)
from train.progress import ProgressDisplay, format_duration


def make_metrics(step: int, **changes: Any) -> StepMetrics:
    values: dict[str, Any] = {
        "step": step,
        "loss": 5.0 / step,
        "grad_norm": 0.5,
        "tokens": step * 2048,
        "tokens_per_second": 12_480.0,
        "learning_rate": 1e-3,
        "samples_hash": f"{step:08x}",
    }
    return StepMetrics(**(values | changes))


def read_lines(path: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text("utf-8").splitlines()]


def log_steps(path: Path, first: int, last: int, *, resume_step: int) -> None:
    tracker = JsonlTracker(path, resume_step=resume_step)
    for step in range(first, last + 1):
        tracker.log(make_metrics(step))
    tracker.close()


def test_a_step_is_written_as_what_was_measured() -> None:
    plain = make_metrics(3).as_json()
    assert list(plain) == [
        "step",
        "loss",
        "grad_norm",
        "tokens",
        "tokens_per_second",
        "learning_rate",
        "samples_hash",
    ]
    evaluated = make_metrics(3, validation_loss=2.5, sample="def f():", expert_load={"1": [3, 1]}).as_json()
    assert evaluated == plain | {"validation_loss": 2.5, "sample": "def f():", "expert_load": {"1": [3, 1]}}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf], ids=str)
def test_numbers_that_json_lacks_become_null(tmp_path: Path, value: float) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl", resume_step=0)
    tracker.log(make_metrics(1, loss=value, skipped=True, sample_ids=[4, 5]))
    tracker.log(make_metrics(2))
    tracker.close()
    bad, good = read_lines(tmp_path / "metrics.jsonl")
    assert bad["loss"] is None
    assert bad["finite"] is False
    assert bad["sample_ids"] == [4, 5]
    assert "finite" not in good


def _reduce(unused: None) -> dict[str, Any]:
    rank = dist.get_rank()
    mine = make_metrics(
        7,
        loss=3.25,
        step_seconds=1.0 + rank,
        peak_memory=2**40 + rank,
        mfu=0.25 if rank == 0 else None,
        max_logit=None if rank == 0 else -3.0,
        validation_loss=2.0 if rank == 0 else None,
    )
    return reduce_over_ranks(mine, axis=Axis("world", dist.group.WORLD, rank, 2)).as_json()


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


def test_ranks_reduce_by_declaration_even_if_they_measured_different_things(pool: RankPool) -> None:
    expected = make_metrics(
        7, loss=3.25, step_seconds=2.0, peak_memory=2**40 + 1, mfu=0.25, max_logit=-3.0, validation_loss=2.0
    )
    assert pool.run(_reduce, None) == [expected.as_json()] * 2


def test_resuming_rewinds_so_that_the_file_is_as_if_never_stopped(tmp_path: Path) -> None:
    straight, stopped = tmp_path / "straight.jsonl", tmp_path / "stopped.jsonl"
    log_steps(straight, 1, 40, resume_step=0)
    log_steps(stopped, 1, 27, resume_step=0)
    for resume_step, last in ((20, 30), (8, 12), (8, 12), (8, 40)):
        log_steps(stopped, resume_step + 1, last, resume_step=resume_step)
    assert stopped.read_bytes() == straight.read_bytes()


def test_a_fresh_start_keeps_nothing_of_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log_steps(path, 1, 5, resume_step=0)
    log_steps(path, 1, 2, resume_step=0)
    assert [line["step"] for line in read_lines(path)] == [1, 2]


@given(cut=st.integers(min_value=0, max_value=600), step=st.integers(min_value=0, max_value=5))
def test_rewinding_a_file_cut_at_any_byte_keeps_whole_lines(
    tmp_path_factory: pytest.TempPathFactory, cut: int, step: int
) -> None:
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    log_steps(path, 1, 4, resume_step=0)
    content = path.read_bytes()[:cut]
    path.write_bytes(content)
    rewind(path, step=step)
    whole = content.count(b"\n")
    assert [line["step"] for line in read_lines(path)] == list(range(1, min(whole, step) + 1))


@given(lines=st.lists(st.text("ab", max_size=9), max_size=12), end=st.booleans(), block=st.integers(1, 20))
def test_lines_are_read_from_the_end(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], end: bool, block: int
) -> None:
    path = tmp_path_factory.mktemp("lines") / "file"
    content = ("\n".join(lines) + "\n" * end).encode()
    path.write_bytes(content)
    found = list(reversed_lines(path, block=block))
    assert [line for _, line in found][::-1] == content.splitlines(keepends=True)
    assert all(content[start:].startswith(line) for start, line in found)
    assert sum(len(line) for _, line in found) == len(content)


def test_rewinding_reads_no_more_than_it_drops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    log_steps(path, 1, 500, resume_step=0)
    parsed: list[int] = []

    def counting(line: bytes) -> dict[str, Any] | None:
        found = parse_step(line)
        parsed.append(found["step"] if found else 0)
        return found

    monkeypatch.setattr(train.metrics, "parse_step", counting)
    rewind(path, step=497)
    assert parsed == [500, 499, 498, 497]
    assert [line["step"] for line in read_lines(path)] == list(range(1, 498))


def test_a_full_disk_delays_lines_but_loses_and_tears_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path, resume_step=0)
    write = os.pwrite
    full = False

    def short_or_full(handle: int, data: bytes, offset: int) -> int:
        if full and len(data) < 100:
            raise OSError(28, "No space left on device")
        return write(handle, data[:60], offset)

    monkeypatch.setattr(os, "pwrite", short_or_full)
    tracker.log(make_metrics(1))
    full = True
    tracker.log(make_metrics(2))
    assert [line["step"] for line in read_lines(path)] == [1]
    assert "No space left on device" in caplog.text
    full = False
    tracker.log(make_metrics(3))
    tracker.close()
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3]


def test_the_run_id_is_drawn_once(tmp_path: Path) -> None:
    first = load_run_id(tmp_path)
    assert first.isalnum()
    assert load_run_id(tmp_path) == first
    assert [path.name for path in tmp_path.iterdir()] == ["run_id"]


class BrokenTracker:
    def __init__(self, *, good: int = 0) -> None:
        self.good = good
        self.calls = 0

    def log(self, metrics: StepMetrics) -> None:
        self.calls += 1
        if self.calls > self.good:
            raise ConnectionError("unreachable")

    def close(self) -> None:
        raise AssertionError("closed after it was dropped")


def test_a_failing_tracker_is_reported_once_and_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken = BrokenTracker(good=1)
    trackers = TrackerSet([broken, JsonlTracker(tmp_path / "m.jsonl", resume_step=0)])
    for step in range(1, 6):
        trackers.log(make_metrics(step))
    trackers.close()
    assert broken.calls == 2
    assert [line["step"] for line in read_lines(tmp_path / "m.jsonl")] == [1, 2, 3, 4, 5]
    assert [r.getMessage() for r in caplog.records] == [
        "BrokenTracker failed (ConnectionError: unreachable); training goes on without it"
    ]


def test_only_rank_0_tracks(tmp_path: Path) -> None:
    config = TrackerConfig(tensorboard=True, wandb=True)
    trackers = make_trackers(config, run_dir=tmp_path, run_id="a", config_dict={}, rank=1)
    trackers.log(make_metrics(1))
    trackers.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["wandb", "tensorboard"])
def test_a_missing_package_is_one_clear_error_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    expected = rf"trackers.{package}=true: the package {package} is not installed; pip install 'perilune\[{package}\]'"
    config = TrackerConfig(wandb=package == "wandb", tensorboard=package == "tensorboard")
    find_spec = importlib.util.find_spec
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
        (error,) = config.errors()
    with pytest.raises(ValueError, match=expected):
        raise ValueError(error)
    for module in ("wandb", "tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    with pytest.raises(ValueError, match=expected):
        make_trackers(config, run_dir=tmp_path, run_id="a", config_dict={})


def test_config_errors_name_field_value_rule_and_remedy() -> None:
    assert TrackerConfig().errors() == []
    (error,) = TrackerConfig(mode="onlin").errors()
    assert error.startswith("trackers.mode=onlin: must be one of online, offline, disabled")


class StubRun:
    """Keeps what a wandb client is told, with wandb's rule that a built-in step must grow."""

    def __init__(self) -> None:
        self.legs: list[dict[str, Any]] = []
        self.axes: list[tuple[str, str | None]] = []
        self.rows: list[dict[str, Any]] = []

    def init(self, **arguments: Any) -> "StubRun":
        self.legs.append(arguments)
        return self

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        assert step is None, "the built-in step drops replayed points"
        self.rows.append(values)

    def finish(self) -> None:
        self.rows.append({"finished": True})


def test_wandb_logs_replayed_steps_again_under_the_same_id(tmp_path: Path) -> None:
    client = StubRun()
    for first, last in ((1, 12), (9, 12), (9, 12), (9, 20)):
        tracker = WandbTracker(
            tmp_path, project="p", run_id=load_run_id(tmp_path), mode="offline", config={"a": 1}, client=client
        )
        for step in range(first, last + 1):
            tracker.log(make_metrics(step, sample="text" if step == 12 else None))
        tracker.close()
    assert {leg["id"] for leg in client.legs} == {load_run_id(tmp_path)}
    assert {leg["resume"] for leg in client.legs} == {"allow"}
    assert set(client.axes) == {("step", None), ("*", "step")}
    logged = [row["step"] for row in client.rows if "step" in row]
    assert logged == [*range(1, 13), *range(9, 13), *range(9, 13), *range(9, 21)]
    assert [row["sample"] for row in client.rows if "sample" in row] == ["text"] * 4


def test_a_wandb_that_cannot_start_is_one_line_with_a_remedy(tmp_path: Path) -> None:
    class Keyless(StubRun):
        def init(self, **arguments: Any) -> StubRun:
            raise RuntimeError("api_key not configured (no-tty)\ncall wandb.login(key=[your_api_key])")

    said = r"^trackers.wandb=true: wandb could not start \(api_key not configured \(no-tty\)\); run `wandb login` or"
    with pytest.raises(ValueError, match=said) as refused:
        WandbTracker(tmp_path, project="p", run_id="1", mode="online", config={}, client=Keyless())
    assert "\n" not in str(refused.value)


def test_wandb_offline_needs_no_network_or_account(tmp_path: Path) -> None:
    if importlib.util.find_spec("wandb") is None:
        pytest.skip("wandb is not installed (an extra)")
    config = TrackerConfig(wandb=True, mode="offline")
    trackers = make_trackers(config, run_dir=tmp_path, run_id="abcd1234", config_dict={"a": 1})
    trackers.log(make_metrics(1))
    trackers.close()
    legs = list((tmp_path / "wandb").glob("offline-run-*-abcd1234"))
    assert len(legs) == 1
    assert list(legs[0].glob("*.wandb"))


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume_step, last in ((0, 12), (8, 14)):
        trackers = make_trackers(
            TrackerConfig(tensorboard=True), run_dir=tmp_path, run_id="a", config_dict={}, resume_step=resume_step
        )
        for step in range(resume_step + 1, last + 1):
            trackers.log(make_metrics(step, mfu=0.2, sample="text"))
        trackers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(1, 15))
    assert {"mfu", "tokens_per_second"} <= set(events.Tags()["scalars"])
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == list(range(1, 15))


class Screen(io.StringIO):
    """Standard output, a terminal or not."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def shown(*, terminal: bool, steps: int, start: int = 0) -> str:
    screen = Screen(terminal=terminal)
    with (
        patch.dict(os.environ, {"TERM": "xterm", "COLUMNS": "130"}),
        redirect_stdout(screen),
        Output() as output,
        ProgressDisplay(25, output=output, start_step=start, plain_every=10) as display,
    ):
        for step in range(start + 1, steps + 1):
            evaluated = {"validation_loss": 2.0, "sample": "a [b]\nc"} if step == 13 else {}
            display.update(make_metrics(step, mfu=0.213, **evaluated))
    return screen.getvalue()


def test_without_a_terminal_plain_lines_come_now_and_then() -> None:
    lines = shown(terminal=False, steps=25).splitlines()
    assert "\x1b" not in "".join(lines)
    numbered = [line for line in lines if "/25" in line]
    assert [line.split("/")[0].split()[1] for line in numbered] == ["1", "10", "13", "20", "25"]
    assert numbered[1].startswith("step 10/25  loss 0.5000  12,480 tok/s  MFU 21.3%  lr 1.00e-03  |g| 0.5  ETA 0:0")
    assert "step 13: validation loss 2.0000 nats/token" in lines
    assert lines[lines.index("step 13: sample") + 1 :][:2] == ["  | a [b]", "  | c"]


def test_on_a_terminal_a_bar_shows_the_last_step() -> None:
    text = shown(terminal=True, steps=25)
    last = text[text.rindex("step") :]
    assert "25/25" in last
    for word in ("loss 0.2000", "12,480 tok/s", "MFU 21.3%", "lr 1.00e-03", "|g| 0.5", "ETA 0:00"):
        assert word in last
    assert "validation loss 2.0000" in text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3661, "1:01:01")])
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
