"""`perilune` works from any folder, whatever lies there, and says at once what there is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.overrides import GROUPS
from launch.cli import COMMANDS, command_line, environment, main, usage
from tests.launch.tiny_run import make_corpus, overrides, read_metrics

ROOT = Path(__file__).parents[2]
CLI = [sys.executable, str(ROOT / "launch" / "cli.py")]


def run(command: list[str], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TORCHELASTIC"))}
    given = inherited | {"OMP_NUM_THREADS": "1"} | more
    return subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, timeout=400, check=False)


@pytest.fixture
def crowded(tmp_path: Path) -> Path:
    """A folder in which every name of ours is a file or a package of the user's own."""
    folder = tmp_path / "mine"
    for name in ("train", "data", "launch", "torch", "yaml"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.py").write_text("raise SystemExit('a file of the user was run')\n")
    for name in ("model", "configs", "optim"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise SystemExit('a package of the user was imported')\n")
    (folder / "parallel").mkdir()
    return folder


def test_help_lists_everything_and_imports_nothing_heavy(tmp_path: Path) -> None:
    found = run([sys.executable, "-X", "importtime", *CLI[1:], "--help"], tmp_path)
    assert (found.returncode, found.stdout) == (0, usage())
    for name in [*COMMANDS, *GROUPS["model"], *GROUPS["experiment"]]:
        assert f"\n  {name} " in found.stdout, name
    modules = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in found.stderr.splitlines() if "|" in line}
    assert modules.isdisjoint({"torch", "numpy", "hydra", "omegaconf", "yaml", "datasets", "tokenizers", "rich"})
    assert max(map(len, found.stdout.splitlines())) <= 120


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["trian"], "trian: unknown command; known are train, certify, plan, tokenize, report"),
        (["train", "--ranks"], "--ranks=: must be a whole number from 1; such as --ranks 2"),
        (["train", "--ranks=0"], "--ranks=0: must be a whole number from 1"),
        (["train", "--ranks=-1"], "--ranks=-1: must be a whole number from 1"),
        (["train", "--ranks", "two"], "--ranks=two: must be a whole number from 1"),
        (["train", "--ranks=2", "--ranks=2"], "--ranks=2: is given twice; give one"),
        (["certify", "--ranks=2"], "--ranks=2: only train takes it; leave it out"),
    ],
    ids="-".join,
)
def test_a_wrong_command_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")


def test_what_python_is_given() -> None:
    assert command_line(["tokenize", "--out", "x"]) == ["-P", "-m", "data.tokenize", "--out", "x"]
    launched = command_line(["train", "optim.lr=1", "--ranks", "4", "--cfg"])
    assert launched[:3] == ["-P", "-m", "launch.start_ranks"]
    assert launched[-5:] == ["--nproc-per-node=4", "-m", "launch.train", "optim.lr=1", "--cfg"]


def test_a_users_own_environment_is_kept() -> None:
    given = {"PYTHONPATH": "/mine", "OMP_NUM_THREADS": "3", "HOME": "/me"}
    made = environment(given, ranks=True)
    assert made == given | {"PYTHONPATH": f"{ROOT}{os.pathsep}/mine", "PYTHONSAFEPATH": "1"}
    assert environment({}, ranks=True)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in environment({}, ranks=False)


def test_commands_work_where_every_name_is_taken(crowded: Path) -> None:
    found = run([*CLI, "train", "--cfg", "run.name=1_0"], crowded)
    assert (found.returncode, found.stderr) == (0, "")
    assert f"dir: {crowded}/runs/1_0" in found.stdout


def test_the_module_works_beside_a_train_of_the_users_own(crowded: Path) -> None:
    for name in ("launch.py", "torch.py", "yaml.py"):
        (crowded / name).unlink()
    found = run([sys.executable, "-m", "launch.train", "--cfg"], crowded, PYTHONPATH=str(ROOT))
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.slow
def test_ranks_and_workers_start_where_every_name_is_taken(crowded: Path, tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    folder = crowded / "runs" / "two"
    found = run([*CLI, "train", "--ranks", "2", *overrides(folder, corpus, "train.steps=2")], crowded)
    assert found.returncode == 0, found.stderr
    assert len(read_metrics(folder)) == 2
    (crowded / "texts").mkdir()
    (crowded / "texts" / "a.txt").write_text("some text\n" * 50)
    tokenised = ["tokenize", "--source", "texts", "--tokenizer", str(corpus / "tokenizer.json"), "--out", "tokens"]
    found = run([*CLI, *tokenised, "--workers", "2"], crowded)
    assert found.returncode == 0, found.stderr
    assert (crowded / "tokens" / "manifest.json").exists()
