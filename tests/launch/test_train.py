"""Whole runs on one rank: resuming, refusing, surviving."""

import json
import os
import pty
import shlex
import shutil
import signal
import subprocess
import sys
import time
import types
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import train.loop
import train.rehearse
import train.stopping
from data.manifest import read_manifest
from launch.failures import STOPPED, too_little_memory
from launch.train import main
from tests.data.corpora import write_corpus
from tests.dist.ranks import PATIENCE
from tests.launch.tiny_run import make_corpus, overrides, read_metrics
from train.checkpoint import CheckpointStore, staging
from train.run_folder import RunLock

pytestmark = pytest.mark.slow  # whole runs


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def saved(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by name."""
    store = CheckpointStore(folder / "checkpoints", asynchronous=False)
    tensors = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in store.names(step).items()}
    store.load(step, tensors=tensors)
    return tensors


def state(folder: Path, step: int) -> dict:
    """What a checkpoint holds besides tensors."""
    return CheckpointStore(folder / "checkpoints", asynchronous=False).load(step, tensors={}, ignore=("",))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_stop_at_20_and_resume_equals_40_straight_steps_bit_for_bit(
    tmp_path: Path, corpus: Path, precision: str
) -> None:
    options = [f"train.precision={precision}", "evaluate.every=20"]
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    assert main(overrides(straight, corpus, "train.steps=40", *options)) == 0
    assert main(overrides(stopped, corpus, "train.steps=20", *options)) == 0
    assert main(overrides(stopped, corpus, "train.steps=40", *options)) == 0
    assert read_metrics(stopped) == read_metrics(straight)
    assert state(stopped, 40) == state(straight, 40)
    assert state(straight, 40)["learning_rate"] == read_metrics(straight)[-1]["learning_rate"] > 0
    one, other = saved(straight, 40), saved(stopped, 40)
    assert one.keys() == other.keys()
    assert {name.split("/")[0] for name in one} == {"model", "optim", "rng"}
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_metrics_hold_one_object_per_step_with_the_promised_keys(tmp_path: Path, corpus: Path) -> None:
    assert main(overrides(tmp_path, corpus, "train.steps=6", "evaluate.every=3")) == 0
    records = read_metrics(tmp_path, timings=True)
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["tokens"] for record in records] == [128 * n for n in range(1, 7)]
    promised = {"step", "loss", "grad_norm", "tokens", "tokens_per_second", "learning_rate", "samples_hash", "mfu"}
    assert all(promised <= record.keys() for record in records)
    assert [r["step"] for r in records if "validation_loss" in r] == [3, 6]
    assert [r["step"] for r in records if "sample" in r] == [3, 6]
    assert records[0]["learning_rate"] == pytest.approx(4e-3 * 128 / 640)
    for name in ("config.yaml", "facts.json", "report.html"):
        assert (tmp_path / name).stat().st_size > 0


def test_evaluating_and_saving_change_nothing_in_training(tmp_path: Path, corpus: Path) -> None:
    quiet, busy = tmp_path / "quiet", tmp_path / "busy"
    assert main(overrides(quiet, corpus, "train.steps=8")) == 0
    assert main(overrides(busy, corpus, "train.steps=8", "evaluate.every=1", "checkpoint.every=1")) == 0
    losses = [[record["loss"] for record in read_metrics(folder)] for folder in (quiet, busy)]
    assert losses[0] == losses[1]
    one, other = saved(quiet, 8), saved(busy, 8)
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_the_cut_into_microbatches_hardly_shows(tmp_path: Path, corpus: Path) -> None:
    runs = []
    for microbatch in (1, 2, 4):
        folder = tmp_path / str(microbatch)
        assert main(overrides(folder, corpus, "train.steps=5", f"batch.microbatch={microbatch}")) == 0
        runs.append(read_metrics(folder))
    for records in runs[1:]:
        for record, first in zip(records, runs[0], strict=True):
            assert record["samples_hash"] == first["samples_hash"]
            assert record["loss"] == pytest.approx(first["loss"], rel=2e-5)
            assert record["grad_norm"] == pytest.approx(first["grad_norm"], rel=2e-4)


def test_a_finished_run_started_again_says_so_and_changes_nothing(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(overrides(tmp_path, corpus, "train.steps=3")) == 0
    before = (tmp_path / "metrics.jsonl").read_bytes()
    assert main(overrides(tmp_path, corpus, "train.steps=3")) == 0
    assert "already done: 3 of train.steps=3" in capsys.readouterr().out
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_a_folder_made_by_another_config_is_refused_with_a_classified_difference(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(overrides(tmp_path, corpus, "train.steps=2")) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main(overrides(tmp_path, corpus, "train.steps=2", "model.moe.experts=4", "optim.lr=1e-3")) == 2
    error = capsys.readouterr().err
    assert "this folder was made by another config; set another run.dir" in error
    assert "model.moe.experts: 8 -> 4  (another model" in error
    assert (
        "optim.lr: 0.004 -> 0.001  (another learning rate: step 1 was done at 0.0008 and would have been at 0.0002)"
        in error
    )
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def replace_data(folder: Path) -> None:
    """Put another corpus of the same tokenizer in a corpus' place."""
    tokenizer = (folder / "tokenizer.json").read_text()
    shutil.rmtree(folder)
    write_corpus(folder, [[[7 + i, 8, 9] * 40 for i in range(60)]], tokenizer=tokenizer)


def test_other_data_at_the_same_path_is_refused_in_one_line(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, folder = tmp_path / "data", tmp_path / "run"
    shutil.copytree(corpus, data)
    before = read_manifest(data).content_hash
    assert main(overrides(folder, data, "train.steps=3")) == 0
    assert state(folder, 3)["data"] == [before]
    metrics = (folder / "metrics.jsonl").read_bytes()
    replace_data(data)
    after = read_manifest(data).content_hash
    assert main(overrides(folder, data, "train.steps=6")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"step 3 was trained on other data than is now in {data} (content_hash {before} -> {after})" in line
    assert line.endswith("restore the data, or set another run.dir to begin anew")
    assert (folder / "metrics.jsonl").read_bytes() == metrics
    shutil.rmtree(data)
    shutil.copytree(corpus, data)
    assert main(overrides(folder, data, "train.steps=6")) == 0


def test_a_checkpoint_from_before_the_data_was_named_still_loads(tmp_path: Path, corpus: Path) -> None:
    assert main(overrides(tmp_path, corpus, "train.steps=3")) == 0
    folder = tmp_path / "checkpoints" / "step-00000003"
    old = json.loads((folder / "state.json").read_text())
    del old["data"]
    (folder / "state.json").write_text(json.dumps(old))
    sealed = json.loads((folder / staging.MANIFEST).read_text())["files"]
    staging.seal(folder, step=3, files={name: staging.describe_file(folder / name) for name in sealed})
    assert main(overrides(tmp_path, corpus, "train.steps=4")) == 0
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4]
    assert state(tmp_path, 4)["data"] == [read_manifest(corpus).content_hash]


def test_a_checkpoint_of_an_older_order_of_samples_is_refused(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before orders had versions: its position would point at other samples."""
    assert main(overrides(tmp_path, corpus, "train.steps=2")) == 0
    folder = tmp_path / "checkpoints" / "step-00000002"
    old = json.loads((folder / "state.json").read_text())
    del old["position"]["order"]
    (folder / "state.json").write_text(json.dumps(old))
    sealed = json.loads((folder / staging.MANIFEST).read_text())["files"]
    staging.seal(folder, step=2, files={name: staging.describe_file(folder / name) for name in sealed})
    assert main(overrides(tmp_path, corpus, "train.steps=4")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is of order 1, and this version draws samples in order 2" in line
    assert line.endswith("set another run.dir to begin anew")


def test_a_folder_whose_config_is_gone_is_refused(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(overrides(tmp_path, corpus, "train.steps=2")) == 0
    config = tmp_path / "config.yaml"
    for content in (None, "[]", "a: [", "alien: 1"):
        config.unlink() if content is None else config.write_text(content)
        assert main(overrides(tmp_path, corpus, "train.steps=4", "optim.lr=1e-3")) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: {config}: "), line
        assert line.endswith("; restore it or set another run.dir"), line
    assert len(read_metrics(tmp_path)) == 2


def test_torch_is_seeded_from_run_seed(tmp_path: Path, corpus: Path) -> None:
    random = []
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        torch.manual_seed(len(random))  # not what the process happens to have
        assert main(overrides(tmp_path / name, corpus, "train.steps=1", f"run.seed={seed}")) == 0
        random.append(saved(tmp_path / name, 1)["rng/0/cpu"])
    assert torch.equal(random[0], random[1])
    assert not torch.equal(random[0], random[2])


def test_a_flipped_byte_falls_back_to_the_checkpoint_before_and_says_so(
    tmp_path: Path, corpus: Path, recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    assert main(overrides(folder, corpus, "train.steps=6", "checkpoint.every=3")) == 0
    expected = read_metrics(folder)
    largest = max((folder / "checkpoints" / "step-00000006").glob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    assert main(overrides(folder, corpus, "train.steps=6", "checkpoint.every=3")) == 0
    said = caplog.text + "".join(str(warning.message) for warning in recwarn)
    assert "step-00000006" in said
    assert largest.name in said
    assert read_metrics(folder) == expected


def test_no_valid_checkpoint_is_an_error_and_no_fresh_start(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(overrides(tmp_path, corpus, "train.steps=2")) == 0
    metrics = (tmp_path / "metrics.jsonl").read_bytes()
    shutil.rmtree(next((tmp_path / "checkpoints").glob("step-*")) / "missing", ignore_errors=True)
    (tmp_path / "checkpoints" / "step-00000002" / "manifest.json").unlink()
    assert main(overrides(tmp_path, corpus, "train.steps=4")) == 1
    assert "step-00000002" in capsys.readouterr().err
    assert (tmp_path / "metrics.jsonl").read_bytes() == metrics


def test_two_runs_in_one_folder_are_refused(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunLock(tmp_path):
        assert main(overrides(tmp_path, corpus, "train.steps=1")) == 2
    assert "another run is using this folder" in capsys.readouterr().err
    assert main(overrides(tmp_path, corpus, "train.steps=1")) == 0


def test_updates_that_are_never_finite_stop_the_run_and_name_the_samples(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # An update this large makes every later loss overflow.
    options = ["optim.lr=1e30", "schedule.warmup_tokens=0", "train.max_skipped=3", "checkpoint.every=1"]
    assert main(overrides(tmp_path, corpus, "train.steps=50", *options)) == 1
    error = capsys.readouterr().err
    assert "3 updates in a row had a non-finite loss or gradient (train.max_skipped=3); look at the samples" in error
    assert "with a lower optim.lr in another run.dir, since this one keeps its optimizer" in error
    assert len(error.splitlines()) == 1
    assert "updates" in (tmp_path / "report.html").read_text()
    skipped = [record for record in read_metrics(tmp_path) if record.get("skipped")]
    assert len(skipped) == 3
    assert all(len(record["sample_ids"]) == 3 * 4 for record in skipped)
    assert all(record["finite"] is False for record in skipped)


def test_an_altered_shard_is_refused(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(corpus, copy)
    shard = max((path for path in copy.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-2])
    assert main(overrides(tmp_path / "run", copy, "train.steps=1")) == 2
    error = capsys.readouterr().err
    assert shard.name in error
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.moe.top_k=8", "model.moe.top_k=8: must lie in 1..7, below model.moe.experts=8"),
        ("optim.lrr=1", "optim.lrr: unknown key; did you mean optim.lr?"),
        ("+optim.lrr=1", "optim.lrr: unknown key; did you mean optim.lr?"),
        ("optim.lr=fast", "optim.lr=fast: must be a number"),
        ("data.sources=[{path: /nowhere}]", "/nowhere"),
        ("data.sources=[{path: /nowhere, weight: 0}]", "data.sources[0].weight=0"),
        ("data.sources=[{path: /nowhere, weight: -1.5}]", "data.sources[0].weight=-1.5"),
        ("model.vocab_size=100", "100"),
        ("trackers.mode=loud", "trackers.mode=loud: must be one of"),
    ],
)
def test_bad_input_is_one_clear_line_and_leaves_nothing_behind(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    assert main(overrides(tmp_path / "run", corpus, override)) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_run_folder_that_cannot_be_one_names_field_path_and_remedy(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("precious")
    for folder in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/foo")):
        assert main(overrides(folder, corpus, "train.steps=1")) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: run.dir={folder}: cannot be made a folder (")
        assert line.endswith("; set run.dir to a folder that can be made and written")


def start(arguments: list[str], **options: object) -> subprocess.Popen[str]:
    """`launch.train` as a process of its own, which a test must end."""
    command = [sys.executable, "-m", "launch.train", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]


def wait_for_line(process: subprocess.Popen[str], beginning: str) -> str:
    """Read what a process prints until a line begins so."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(beginning):
            return line
    raise AssertionError(f"it ended: {process.communicate()[1]}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "Ctrl-C"])
def test_a_signal_stops_the_run_after_a_step_with_a_checkpoint_and_a_status_of_its_own(
    tmp_path: Path, corpus: Path, number: signal.Signals
) -> None:
    process = start(overrides(tmp_path, corpus, "train.steps=100000"))
    try:
        wait_for_line(process, "step ")
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    steps = len(read_metrics(tmp_path))
    name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
    assert process.returncode == STOPPED == 3
    assert err == ""
    assert f"{name}: stopping after this step, with a checkpoint; Ctrl-C again ends at once\n" in out
    assert f"stopped after step {steps} ({name}): the same command goes on from its checkpoint\n" in out
    assert [path.name for path in (tmp_path / "checkpoints").glob("*")] == [f"step-{steps:08d}"]
    assert (tmp_path / "report.html").exists()
    assert [entry["event"] for entry in read_record(tmp_path)] == ["start", "end"]
    assert read_record(tmp_path)[-1]["how"] == "stopped"
    # Where it stopped does not show.
    assert main(overrides(tmp_path, corpus, f"train.steps={steps + 2}")) == 0
    assert main(overrides(tmp_path / "straight", corpus, f"train.steps={steps + 2}")) == 0
    assert read_metrics(tmp_path) == read_metrics(tmp_path / "straight")


HANGING_STEP = """
import time
import train.step
def hang(*arguments, **options):
    print("hanging", flush=True)
    time.sleep(1000)
train.step.Stepper.step = hang
import launch.signals
launch.signals.SAME = 0.0
from launch.train import main
import sys
sys.exit(main(sys.argv[1:]))
"""


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path: Path, corpus: Path) -> None:
    command = [sys.executable, "-c", HANGING_STEP, *overrides(tmp_path, corpus, "train.steps=3")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for_line(process, "hanging")
        process.send_signal(signal.SIGINT)
        wait_for_line(process, "Ctrl-C: stopping after this step")
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 130
    assert said == ("interrupted: ended at once; the same command goes on from the last checkpoint, if there is one\n")
    assert main(overrides(tmp_path, corpus, "train.steps=1")) == 0


def test_a_run_stops_by_itself_before_its_time_is_up(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that is a day later whenever it is asked, which is once a step."""
    days = iter(range(10_000))
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + 86400.0 * next(days))
    monkeypatch.setattr(train.stopping, "time", clock)
    # Three and a half days.
    assert main(overrides(tmp_path, corpus, "train.steps=50", "run.max_minutes=5040")) == STOPPED
    out = capsys.readouterr().out
    assert "(run.max_minutes=5040): the same command goes on from its checkpoint" in out
    steps = len(read_metrics(tmp_path))
    assert steps == 5
    assert main(overrides(tmp_path, corpus, f"train.steps={steps + 1}")) == 0
    assert len(read_metrics(tmp_path)) == steps + 1


def read_record(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]


def test_the_folder_says_how_the_run_was_run(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for steps in (2, 3):
        assert main(overrides(tmp_path, corpus, f"train.steps={steps}")) == 0
    printed = capsys.readouterr().out
    first, ended, second, again = read_record(tmp_path)
    assert (first["event"], first["step"], ended["event"], ended["step"], ended["how"]) == (
        "start",
        0,
        "end",
        2,
        "done",
    )
    assert (second["step"], again["step"]) == (2, 3)
    for entry in (first, second):
        assert {"started", "host", "user", "pid", "folder", "command", "versions", "commit", "ranks"} <= entry.keys()
        assert entry["versions"]["torch"] == torch.__version__
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert (facts["started"], facts["commit"], facts["command"]) == (
        second["started"],
        second["commit"],
        second["command"],
    )
    log = [line[26:] for line in (tmp_path / "run.log").read_text().splitlines()]
    assert log == printed.splitlines()


def test_the_first_line_comes_before_torch(tmp_path: Path) -> None:
    source = (
        "import sys; import launch.train; sys.modules['launch.session'] = None; "
        "status = launch.train.main([]); print('torch' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    first, last = found.stdout.splitlines()
    assert first.startswith("perilune ")
    assert first.endswith(": loading torch")
    assert last == "False"


@pytest.mark.parametrize("streams", [">/dev/full 2>/dev/full", ">&- 2>&- <&-"])
def test_a_log_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, corpus: Path, streams: str) -> None:
    command = shlex.join([sys.executable, "-m", "launch.train", *overrides(tmp_path, corpus, "train.steps=2")])
    assert subprocess.run(f"{command} {streams}", shell=True).returncode == 0
    assert len(read_metrics(tmp_path)) == 2


def test_an_encoding_without_the_characters_of_a_sample_does_not_end_the_run(tmp_path: Path, corpus: Path) -> None:
    options = ["train.steps=2", "evaluate.every=1", "evaluate.sample_tokens=40"]
    process = start(overrides(tmp_path, corpus, *options), env=os.environ | {"PYTHONIOENCODING": "ascii"})
    out, err = process.communicate()
    assert (process.returncode, err) == (0, "")
    assert "\\ufffd" in out
    assert "\ufffd" in read_metrics(tmp_path)[0]["sample"] + read_metrics(tmp_path)[1]["sample"]


def test_a_bar_on_a_terminal_keeps_what_is_printed_above_it_and_out_of_the_log(tmp_path: Path, corpus: Path) -> None:
    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "200"}
    process = subprocess.Popen(
        [sys.executable, "-m", "launch.train", *overrides(tmp_path, corpus, "train.steps=3", "evaluate.every=2")],
        stdout=slave,
        stderr=slave,
        env=environment,
    )
    os.close(slave)
    shown = b""
    # Linux answers EIO where the last process has closed the other end.
    with suppress(OSError):
        while part := os.read(master, 4096):
            shown += part
    os.close(master)
    assert process.wait() == 0
    assert b"step 3/3" in shown
    assert b"step 2: validation loss" in shown
    log = (tmp_path / "run.log").read_text()
    assert "\x1b" not in log
    assert "step 1/3  loss" in log
    assert "step 2: validation loss" in log


def test_a_value_error_in_the_middle_of_a_run_is_no_bad_configuration(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise ValueError("shard-3: truncated")

    assert main(overrides(tmp_path, corpus, "train.steps=2", "checkpoint.every=1")) == 0
    capsys.readouterr()
    monkeypatch.setattr(train.loop, "check_health", fail)
    assert main(overrides(tmp_path, corpus, "train.steps=4", "checkpoint.every=1")) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "error: after step 3: shard-3: truncated; the last checkpoint is intact"
    assert read_record(tmp_path)[-1]["how"].startswith("failed: after step 3: shard-3: truncated")
    assert "in fail\n" in (tmp_path / "run.log").read_text()


@pytest.mark.parametrize("target", ["train.loop.write_report", "train.progress.describe"])
def test_what_only_shows_the_run_does_not_end_it(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device", "report.html")

    monkeypatch.setattr(target, fail)
    assert main(overrides(tmp_path, corpus, "train.steps=3", "evaluate.every=2")) == 0
    assert len(read_metrics(tmp_path)) == 3
    assert "No space left on device" in capsys.readouterr().err


def test_the_reason_is_said_before_anything_else_is_done(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever started the ranks may end this one while it cleans up."""

    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("the device is gone")

    said = []
    monkeypatch.setattr(train.loop, "check_health", fail)
    monkeypatch.setattr(train.loop, "close", lambda run: said.append(capsys.readouterr().err))
    assert main(overrides(tmp_path, corpus, "train.steps=2")) == 1
    assert "RuntimeError: the device is gone" in said[0]
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("error", "amount"),
    [
        (
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)\nframe #0: c10::",
            "4000000000000 bytes",
        ),
        ("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79 GiB", "20.00 GiB"),
        ("mat1 and mat2 shapes cannot be multiplied", None),
    ],
)
def test_too_little_memory_is_one_line_with_the_amount(error: str, amount: str | None) -> None:
    found = too_little_memory(RuntimeError(error))
    device = "cuda" if "CUDA" in error else "cpu"
    expected = (
        f"{device}: not enough memory: {amount} more were asked for at once; lower batch.microbatch or batch.length, "
    )
    assert found is None if amount is None else str(found).startswith(expected)


def test_a_model_too_large_for_the_memory_is_one_line(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A matrix of 2^45 elements: more than any machine's address space has.
    options = ["model.dense_dim=1099511627776", "train.steps=1"]
    assert main(overrides(tmp_path, corpus, *options)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: cpu: not enough memory: ")


def test_a_command_that_failed_does_not_claim_the_folder(tmp_path: Path, corpus: Path) -> None:
    assert main(overrides(tmp_path, corpus, "data.sources=[{path: /nowhere}]")) == 2
    assert main(overrides(tmp_path, corpus, "train.steps=1")) == 0


def test_a_disk_that_fills_while_saving_stops_the_run_and_keeps_what_was_saved(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.decode().strip()}")
    try:
        assert main(overrides(folder, corpus, "train.steps=2")) == 0
        (folder / "ballast").write_bytes(bytes(shutil.disk_usage(folder).free - 2**18))
        assert main(overrides(folder, corpus, "train.steps=4")) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"error: before the first step: {folder / 'checkpoints'}: has ")
        assert " free and one checkpoint takes " in line
        # It fills later.
        with monkeypatch.context() as patch:
            patch.setattr(train.rehearse, "room_problem", lambda *arguments: None)
            assert main(overrides(folder, corpus, "train.steps=4")) == 1
        assert "No space left on device" in capsys.readouterr().err
        # So full that the rehearsal of a save is refused.
        (folder / "more").write_bytes(bytes(shutil.disk_usage(folder).free))
        assert main(overrides(folder, corpus, "train.steps=4")) == 1
        error = capsys.readouterr().err
        assert "No space left on device; free disk space, or set another run.dir" in error
        assert f"{folder}" in error
        (folder / "ballast").unlink()
        (folder / "more").unlink()
        assert main(overrides(folder, corpus, "train.steps=4")) == 0
        assert [record["step"] for record in read_metrics(folder)] == [1, 2, 3, 4]
    finally:
        # A failed run's error may still hold files of its checkpoint.
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_cfg_prints_the_effective_config(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cfg", *overrides(tmp_path, corpus, "optim.lr=0.125")]) == 0
    assert "lr: 0.125" in capsys.readouterr().out
