"""Every command of the pages is tried, as its row in `HANDLERS` says; a command without a row fails.

run        as it stands, on a small corpus; a training run for one step of a few tokens
accepted   as far as the process group: more ranks than this machine should have, or machines of a cluster
parsed     its options are read and nothing more: it measures for minutes
exists     the suite runs the files that it names
CI         `.ci/run` does it
"""

import argparse
import itertools
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from omegaconf import OmegaConf

import launch.train
from configs.compose import compose_config
from launch.world import World
from tests.conftest import ROOT
from tests.dist.ranks import PATIENCE
from tests.train.report.test_page import full_run

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

PROGRAM = re.compile(
    r"(bash|cd|conda|docker|export|git|make|mypy|perilune|pip3?|poetry|pytest|python3?|ruff|sbatch|sh|srun|torchrun|uv)(\s+\S|$)"
)

SMALL = {
    "train.steps": "1",
    "batch.length": "64",
    "batch.sequences": "2",
    "batch.microbatch": "1",
    "evaluate.every": "0",
    "checkpoint.every": "0",
    "data.sources": "[{path: corpora/prepared}]",
}
"""Overrides of a training run that is only tried; what the command says itself stays."""


PERILUNE = [sys.executable, str(ROOT / "launch" / "cli.py")]
"""What the console script runs."""


class Command(NamedTuple):
    """One command of a document, without environment variables and comments."""

    document: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.document}: {shlex.join(self.words)}"

    @property
    def ranks(self) -> int:
        """Of a training run under torchrun, or of ``perilune train --ranks N``."""
        if "--ranks" in self.words:
            return int(self.words[self.words.index("--ranks") + 1])
        sizes = dict(word.split("=", 1) for word in self.words if word.startswith("--n"))
        return int(sizes.get("--nnodes", "1")) * int(sizes.get("--nproc-per-node", "1"))

    @property
    def arguments(self) -> list[str]:
        """What follows ``-m MODULE``, or ``perilune train`` and its ranks."""
        if self.words[0] == "perilune":
            return list(self.words[4 if "--ranks" in self.words else 2 :])
        return list(self.words[self.words.index("-m") + 2 :])


def read_commands(document: Path) -> Iterator[Command]:
    """The commands of a page: lines of fenced or indented blocks, and code within lines, that begin with a program."""
    text = document.read_text("utf-8").replace("\\\n", " ")
    fenced = False
    for line in text.splitlines():
        if line.startswith("```"):
            fenced = not fenced
            continue
        candidates = [line] if fenced or line.startswith("    ") else re.findall(r"`([^`]+ [^`]+)`", line)
        for candidate in candidates:
            bare = re.sub(r"^(\w+=\S+\s+)*", "", candidate.strip())
            if PROGRAM.match(bare):
                words = shlex.split(bare, comments=True)
                for is_and, part in itertools.groupby(words, key="&&".__eq__):
                    if not is_and:
                        yield Command(document.name, tuple(part))


COMMANDS: dict[tuple[str, ...], Command] = {}
"""By its words; where several pages have one, the first of them names it."""
for _command in itertools.chain.from_iterable(map(read_commands, DOCUMENTS)):
    COMMANDS.setdefault(_command.words, _command)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands are run: texts, a corpus and a run of each kind that they name."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "texts").mkdir()
    text = "".join(f"def add_{i}(x):\n    return x + {i}\n" for i in range(400))
    for index in range(8):
        (folder / "texts" / f"{index}.txt").write_text(text[index:], "utf-8")
    (folder / "more.jsonl").write_text('{"text": "x = 1"}\n{"text": "y = 2"}\n', "utf-8")
    tokenise = ["-m", "data.tokenize", "--source", "texts/", "--train-tokenizer", "400", "--out", "corpora/prepared"]
    run([sys.executable, *tokenise], folder)
    full_run(folder / "RUN_DIR")
    full_run(folder / "runs" / "demo")
    # A whole configuration, which the run above lacks, and files of the user's own.
    (folder / "runs" / "demo" / "config.yaml").write_text(OmegaConf.to_yaml(compose_config([])), "utf-8")
    for group in ("experiment", "model"):
        (folder / "mine" / group).mkdir(parents=True)
    long = "train: {steps: 1}\nschedule: {total_tokens: 100000}\n"
    (folder / "mine" / "experiment" / "long.yaml").write_text(long, "utf-8")
    shutil.copyfile(ROOT / "configs" / "model" / "kimi_k3_demo.yaml", folder / "mine" / "model" / "wide.yaml")
    return folder


def run(words: list[str], folder: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"


def run_python(command: Command, folder: Path) -> None:
    run([sys.executable, *command.words[1:]], folder)


def run_one_case(command: Command, folder: Path) -> None:
    run(
        [
            sys.executable,
            *command.words[1:3],
            *re.sub(r"--cases \d+", "--cases 1", " ".join(command.arguments)).split(),
        ],
        ROOT,
    )


def run_perilune(command: Command, folder: Path) -> None:
    run([*PERILUNE, *command.words[1:]], folder)


def run_small(command: Command, folder: Path) -> None:
    given = {argument.split("=", 1)[0] for argument in command.arguments}
    # Beside what other commands leave where nothing is said.
    elsewhere = {"run.dir": f"runs/{len(list((folder / 'runs').iterdir()))}"}
    small = [f"{key}={value}" for key, value in (SMALL | elsewhere).items() if key not in given]
    if command.words[0] == "perilune":
        run([*PERILUNE, *command.words[1:], *small], folder)
        return
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={command.ranks}"]
    run([sys.executable, *launcher, "-m", "launch.train", *command.arguments, *small], folder)


class Joined(Exception):
    """The ranks would meet now."""


def accept(command: Command, folder: Path) -> None:
    """On rank 0 of as many as the command starts."""

    joined: list[object] = []

    def join(world: World, backend: str, **options: object) -> None:
        joined.append(world)
        raise Joined

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "join", join)
        patch.setenv("WORLD_SIZE", str(command.ranks))
        patch.setenv("RANK", "0")
        patch.chdir(folder)
        here = [argument for argument in command.arguments if not argument.startswith("run.dir=")]
        launch.train.main([*here, "run.dir=runs/elsewhere"])
    assert joined, "the ranks never meet"


def parse(command: Command, folder: Path) -> None:
    parse_args = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser) -> None:
        parse_args(parser)
        raise Joined

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        patch.setattr(sys, "argv", ["bench", *command.arguments])
        # Not as something imported twice.
        patch.delitem(sys.modules, command.words[2], raising=False)
        with pytest.raises(Joined):
            runpy.run_module(command.words[2], run_name="__main__")


def exists(command: Command, folder: Path) -> None:
    for word in command.words[1:]:
        names = re.fullmatch(r"(.*)\{(.*)\}(.*)", word)
        paths = [f"{names[1]}{name}{names[3]}" for name in names[2].split(",")] if names else [word]
        missing = [path for path in paths if not (ROOT / path).exists()]
        assert not missing, f"no such tests: {missing}"


def is_in_ci(command: Command, folder: Path) -> None:
    wanted = {"pip": "pip install", "pytest": "pytest"}.get(command.words[0], shlex.join(command.words))
    assert wanted in (ROOT / ".ci" / "run").read_text("utf-8")


Handler = Callable[[Command, Path], None]

HANDLERS: list[tuple[str, Handler]] = [
    (r"pip install -e \S+", is_in_ci),
    (r"pytest( -m 'not slow')?", is_in_ci),
    (r"(ruff|mypy).*", is_in_ci),
    (r"pytest '?tests/.*", exists),
    (r"python -m tests\.bench\..*", parse),
    (r"python -m tests\.fuzz .*", run_one_case),
    (r"python -m (data\.tokenize|train\.report) .*", run_python),
    (r"python -m launch\.(certify|plan).*", run_python),
    (r"python -m launch\.train --cfg", run_python),
    (r"perilune train --cfg", run_perilune),
    (r"perilune train( .*)?", run_small),
    (r"perilune .*", run_perilune),
    (r"torchrun .*--nnodes=.* -m launch\.train.*", accept),
    (r"(python|torchrun --nproc-per-node=[12]) -m launch\.train.*", run_small),
    (r"torchrun --nproc-per-node=\d+ -m launch\.train.*", accept),
]
"""Pattern of the whole command, and what is done with it; the first that matches."""

SLOW = (run_python, run_perilune, run_one_case, run_small)


def handler_of(command: Command) -> Handler | None:
    return next((handle for pattern, handle in HANDLERS if re.fullmatch(pattern, shlex.join(command.words))), None)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=[pytest.mark.slow] if handler_of(command) in SLOW else [], id=str(command))
        for command in COMMANDS.values()
    ],
)
def test_a_documented_command_works(command: Command, folder: Path) -> None:
    handle = handler_of(command)
    assert handle is not None, "a command that no row of HANDLERS knows: add one"
    handle(command, folder)


def test_the_commands_are_found() -> None:
    assert len(COMMANDS) > 25
    found = {shlex.join(words) for words in COMMANDS}
    assert {"pytest -m 'not slow'", "perilune train --cfg", "pip install -e ."} <= found
    assert any("--nnodes=4" in command and command.endswith("run.dir=/shared/runs/big") for command in found)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("`torchrun x`", ["torchrun x"]),
        ("```\nA=1 B=2 python -m a  # why\nb.py\n```\npython -m c", ["python -m a"]),
        ("    pip install a && pytest\n\ntext `make it`", ["pip install a", "pytest", "make it"]),
        ("```\npython -m a \\\n  b=1\n```", ["python -m a b=1"]),
    ],
)
def test_what_is_a_command(tmp_path: Path, text: str, expected: list[str]) -> None:
    (tmp_path / "page.md").write_text(text)
    assert [shlex.join(command.words) for command in read_commands(tmp_path / "page.md")] == expected


def test_a_command_that_cannot_work_is_found(folder: Path) -> None:
    with pytest.raises(AssertionError, match="never meet"):
        accept(Command("page.md", ("torchrun", "--nproc-per-node=8", "-m", "launch.train", "parallel.pp=3")), folder)
    with pytest.raises(AssertionError, match="no such tests"):
        exists(Command("page.md", ("pytest", "tests/test_none.py")), folder)
    assert handler_of(Command("page.md", ("sbatch", "job.sh"))) is None
