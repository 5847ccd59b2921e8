"""What a user or a machine can do wrong, end to end: one clear line and a status, and no rank left waiting.

Hostile routings are where experts are tested: a rank with no tokens and experts with no rows
(`test_ranks_without_tokens_and_experts_without_rows`), all tokens to the same experts and exact ties
(`test_all_tokens_to_the_same_experts`) in tests/dist/test_expert.py, test_tensor.py and test_balanced.py; microbatches
from all to no labelled tokens in tests/dist/test_meshes.py; tied embeddings across stages in tests/dist/test_tied.py.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

from launch.train import main
from tests.dist.ranks import PATIENCE
from tests.launch.tiny_run import make_corpus, overrides, read_metrics

pytestmark = pytest.mark.slow  # whole runs

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


# --- before any process group starts ---

REFUSED = {
    "length over cp": (
        ["parallel.cp=4", "batch.length=30"],
        "batch.length=30: must be a multiple of parallel.cp x parallel.tp = 4 x 1, so that every rank gets equally "
        "many tokens; use 28 or 32, or another parallel.cp",
    ),
    "length over cp x tp": (["parallel.cp=2", "parallel.tp=2", "batch.length=30"], "parallel.tp = 2 x 2"),
    "length below cp": (["parallel.cp=4", "batch.length=3"], "batch.length=3: must be a multiple of"),
    "more stages than layers": (
        ["parallel.pp=4"],
        "parallel.pp x parallel.vpp=4 x 1: more virtual stages than the 2 layers of model.layers; lower parallel.vpp "
        "or parallel.pp",
    ),
    "more virtual stages than layers": (["parallel.pp=2", "parallel.vpp=2"], "2 x 2: more virtual stages than the 2"),
    "KDA heads": (["parallel.tp=4", "model.mla.heads=4"], "model.kda.heads=2: must be divisible by parallel.tp=4"),
    "MLA heads": (["parallel.tp=4", "model.kda.heads=4"], "model.mla.heads=2: must be divisible by parallel.tp=4"),
    "vocabulary": (
        ["parallel.tp=2", "model.vocab_size=321"],
        "model.vocab_size=321: must be divisible by parallel.tp=2, which splits it; use 322 or another parallel.tp",
    ),
    "experts": (
        ["parallel.ep=4", "model.moe.experts=10"],
        "model.moe.experts=10: must be divisible by parallel.ep=4, so that every rank holds as many; change "
        "one of them",
    ),
    "experts over ranks": (["parallel.tp=2", "parallel.ep=4"], "parallel.ep=4: must divide dp x cp = 2"),
    "layout of too few layers": (
        ["parallel.pp=2", "parallel.layout=[1,2]"],
        "parallel.layout=[1, 2]: sums to 3, must be the 2 layers of model.layers; change one of the counts, or leave "
        "parallel.layout=[] for an automatic cut",
    ),
    "layout of too few stages": (["parallel.pp=2", "parallel.layout=[2]"], "parallel.layout=[2]: has 1 entries for"),
    "layout with nothing on a stage": (["parallel.pp=2", "parallel.layout=[2,0]"], "needs at least 1 layer; take it"),
    "schedule": (
        ["parallel.pp=2", "parallel.schedule=zerobubble"],
        "parallel.schedule=zerobubble: must be one of auto, gpipe, 1f1b, interleaved, zero_bubble",
    ),
    "schedule for virtual stages": (
        ["parallel.pp=2", "parallel.vpp=2", "model.layers=KM*2", "parallel.schedule=1f1b"],
        "parallel.schedule=1f1b: contradicts parallel.vpp=2, since it runs one stage per rank; set",
    ),
    "evaluation of nothing": (
        ["evaluate.every=1", "data.validation_fraction=0"],
        "evaluate.every=1: contradicts data.validation_fraction=0, which holds out no text to evaluate on; set "
        "evaluate.every=0 or raise data.validation_fraction",
    ),
    "no run folder": (["run.dir="], "run.dir='': must not be empty; name one, such as run.dir=runs/mine"),
    "a number that is none": (["optim.lr=inf"], "optim.lr=inf: must be a finite number; give one"),
    "Hydra's run folder": (["hydra.run.dir=x"], "hydra.run.dir: is not used here"),
    "deletion": (["~train"], "~train: keys and sections cannot be deleted"),
    "ranks": (["parallel.dp=3", "batch.sequences=3"], "parallel.dp=3: contradicts the 4 launched rank(s)"),
}


@pytest.fixture
def four_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The environment of a rank of four, with a launcher's store, in which no process group may be made."""

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a process group was started")

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setattr(dist, "init_process_group", refuse)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    yield monkeypatch
    # Until now the store had to be there.
    del store


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_work_is_one_line_before_any_process_group(
    tmp_path: Path,
    corpus: Path,
    capsys: pytest.CaptureFixture[str],
    four_ranks: pytest.MonkeyPatch,
    case: str,
) -> None:
    options, message = REFUSED[case]
    arguments = overrides(tmp_path / "run", corpus, *options)
    for turn, rank in enumerate((3, 0)):
        four_ranks.setenv("RANK", str(rank))
        assert main(arguments) == 2
        lines = capsys.readouterr().err.splitlines()
        # Said once, by the first rank to find it.
        assert len(lines) == (1 if turn == 0 else 0), lines
        if lines:
            assert lines[0].startswith("error: rank 3: ")
            assert message in lines[0]
    assert not (tmp_path / "run").exists()


def test_what_one_rank_alone_has_is_said_by_that_rank(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], four_ranks: pytest.MonkeyPatch
) -> None:
    """As where an environment variable gives one machine another config."""
    for rank, override in ((0, "optim.lrr=1"), (1, "optim.lrr=1"), (2, "optim.lr=-1"), (3, "optim.lr=-1")):
        four_ranks.setenv("RANK", str(rank))
        assert main(overrides(tmp_path / "run", corpus, override)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("error: optim.lrr: unknown key")
    assert lines[1].startswith("error: rank 2: optim.lr=-1")


def test_what_can_work_gets_as_far_as_the_process_group(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], four_ranks: pytest.MonkeyPatch
) -> None:
    """So that the cases above are refused for what they change."""
    assert main(overrides(tmp_path, corpus, "parallel.tp=2", "parallel.ep=2")) == 1
    assert "a process group was started" in capsys.readouterr().err


# --- in the middle of a run ---

# Imported by every Python process of the run; a rank fails in the forward pass of its third step.
INJECTION = """
import os
if os.environ.get("RANK") == "{rank}":
    import signal
    import model.moe
    forward, calls = model.moe.MoE.forward, []
    def failing(*arguments, **options):
        calls.append(None)
        if len(calls) == 5:
            {fault}
        return forward(*arguments, **options)
    model.moe.MoE.forward = failing
"""


def train_on_two_ranks(
    folder: Path, arguments: list[str], *, fault: str, rank: int = 1, launcher: Sequence[str] = ()
) -> tuple[int, list[str]]:
    """Exit status and lines on stderr of `launch.train` on two ranks, one of which does ``fault``.

    Args:
        rank: the one that does.
        launcher: further options of torchrun.
    """
    (folder / "sitecustomize.py").write_text(INJECTION.format(fault=fault, rank=rank))
    environment = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    torchrun = ["torch.distributed.run", "--nproc-per-node=2", "--standalone", *launcher, "-m"]
    process = subprocess.Popen(
        [sys.executable, "-m", *torchrun, "launch.train", *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"a rank still waits after {PATIENCE} s: {process.communicate()[1]}")
    return process.returncode, errors.splitlines()


def test_a_rank_that_fails_takes_the_other_down_and_its_error_is_the_one_shown(tmp_path: Path, corpus: Path) -> None:
    """As where one machine cannot read its storage: no other rank sees more than a closed connection."""
    arguments = overrides(tmp_path / "run", corpus, "train.steps=8")
    status, lines = train_on_two_ranks(tmp_path, arguments, fault='raise OSError(5, "Input/output error", "shard-7")')
    assert status != 0
    said = [line for line in lines if line.startswith(("error: ", "rank 0 ends"))]
    error = "error: rank 1: shard-7: Input/output error"
    assert error in said
    said.remove(error)
    # Its peer has no time to say more, or says that it follows.
    assert all(line.startswith("rank 0 ends because another failed first: ") for line in said)
    assert not any("Traceback" in line for line in lines[: lines.index(error)])


def test_a_killed_rank_takes_the_other_down_and_the_run_goes_on_from_its_checkpoint(
    tmp_path: Path, corpus: Path
) -> None:
    options = ["train.steps=4", "checkpoint.every=1", "checkpoint.asynchronous=false"]
    arguments = overrides(tmp_path / "run", corpus, *options)
    status, lines = train_on_two_ranks(tmp_path, arguments, fault="os.kill(os.getpid(), signal.SIGKILL)")
    assert status != 0
    assert any("Signal 9 (SIGKILL) received" in line for line in lines)
    assert not any(line.startswith("error: rank 1") for line in lines)
    assert main(arguments) == 0
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_a_signal_stops_all_ranks_after_the_same_step_with_a_checkpoint(
    tmp_path: Path, corpus: Path, number: str
) -> None:
    """torchrun passes the signal on to all ranks."""
    arguments = overrides(tmp_path / "run", corpus, "train.steps=1000")
    status, lines = train_on_two_ranks(tmp_path, arguments, fault=f"os.kill(os.getppid(), signal.{number})")
    assert status != 0
    assert not any(line.startswith(("error: ", "interrupted: ", "rank ")) for line in lines)
    check_stopped(tmp_path / "run", arguments)


def test_a_signal_to_one_rank_alone_stops_all_after_the_same_step(tmp_path: Path, corpus: Path) -> None:
    arguments = overrides(tmp_path / "run", corpus, "train.steps=1000")
    status, lines = train_on_two_ranks(tmp_path, arguments, fault="os.kill(os.getpid(), signal.SIGTERM)")
    assert status != 0
    assert any("exitcode  : 3 " in line for line in lines)
    check_stopped(tmp_path / "run", arguments)
    assert "(asked of another rank): the same command goes on" in (tmp_path / "run" / "run.log").read_text()


def check_stopped(folder: Path, arguments: list[str]) -> None:
    """The run stopped with a checkpoint of its last step, from which the same command goes on."""
    steps = len(read_metrics(folder))
    # The signal came in the third step; the rank that got it may have told in the next one only.
    assert 3 <= steps <= 5
    assert [path.name for path in (folder / "checkpoints").glob("*")] == [f"step-{steps:08d}"]
    more = [argument.replace("train.steps=1000", f"train.steps={steps + 1}") for argument in arguments]
    assert main(more) == 0
    assert [record["step"] for record in read_metrics(folder)] == [*range(1, steps + 2)]


def test_a_disk_that_fills_on_two_ranks_says_why(tmp_path: Path, corpus: Path) -> None:
    """The launcher ends rank 0 soon after rank 1, whatever rank 0 still has to do."""
    options = ["train.steps=8", "checkpoint.every=1", "checkpoint.asynchronous=false"]
    fault = """import train.checkpoint.staging
            def full(path, text):
                raise OSError(28, "No space left on device", str(path))
            train.checkpoint.staging.write_durable = full
            import train.loop, time
            train.loop.write_report = lambda folder: time.sleep(1000)"""
    arguments = overrides(tmp_path / "run", corpus, *options)
    status, lines = train_on_two_ranks(tmp_path, arguments, fault=fault, rank=0)
    assert status != 0
    said = [line for line in lines if line.startswith("error: ")]
    assert len(said) == 1
    assert "No space left on device" in said[0]
    assert "rank 0" in said[0]


def test_a_rank_that_was_killed_is_started_again_by_the_launcher(tmp_path: Path, corpus: Path) -> None:
    """The launcher's store still has the addresses of the ranks that died."""
    options = ["train.steps=6", "checkpoint.every=1", "checkpoint.asynchronous=false"]
    arguments = overrides(tmp_path / "run", corpus, *options)
    fault = "os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.kill(os.getpid(), signal.SIGKILL)"
    status, lines = train_on_two_ranks(tmp_path, arguments, fault=fault, launcher=["--max-restarts=1"])
    assert status == 0, lines
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == [*range(1, 7)]


def test_a_rank_that_hangs_ends_the_run_after_the_timeout(tmp_path: Path, corpus: Path) -> None:
    arguments = overrides(tmp_path / "run", corpus, "train.steps=8", "run.timeout=20")
    status, lines = train_on_two_ranks(tmp_path, arguments, fault="import time; time.sleep(1000)")
    assert status != 0
    assert any(line.startswith("error: rank 0:") for line in lines)
