"""Whatever goes wrong at an edge is one line, whoever raised it and of whatever class; and who says it."""

import copy
import getpass
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
import yaml
from hydra.errors import HydraException

import launch.session
import train.build
import train.resuming
from configs.compose import ConfigError, compose_config
from configs.schema import RunConfig
from launch.failures import EdgeError, Failures, edge, is_ours, was_interrupted
from launch.record import describe_start
from launch.train import main
from launch.world import World
from tests.launch.tiny_run import make_corpus, overrides
from train.checkpoint import CheckpointError
from train.loop import TrainingFailed


class Panic(BaseException):
    """As a library in another language raises it."""


class Strange(Exception):
    """Of a library, with nothing to say."""

    def __str__(self) -> str:
        return ""


CLASSES: list[BaseException] = [
    OSError(13, "Permission denied", "somewhere"),
    OSError(),
    OSError("words alone"),
    FileNotFoundError(2, "No such file or directory", "somewhere"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    UnicodeEncodeError("ascii", "\ufffd", 0, 1, "ordinal not in range(128)"),
    ValueError("month must be in 1..12"),
    ValueError(),
    KeyError("getpwuid(): uid not found: 4242"),
    IndexError("list index out of range"),
    LookupError("unknown encoding"),
    TypeError("unhashable type: 'dict'"),
    RecursionError("maximum recursion depth exceeded"),
    MemoryError(),
    RuntimeError("several\nlines"),
    OverflowError("int too large"),
    ZeroDivisionError("division by zero"),
    AttributeError("'NoneType' object has no attribute 'get'"),
    ImportError("cannot import name"),
    AssertionError(),
    EOFError(),
    StopIteration(),
    NotImplementedError(),
    yaml.YAMLError("while parsing"),
    HydraException("no"),
    Strange(),
    Panic("called `Option::unwrap()` on a `None` value"),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def config(corpus: Path, folder: Path) -> RunConfig:
    return compose_config(overrides(folder, corpus, "train.steps=1"))


# Each edge: what is replaced by something that raises, and what must then be named.
EDGES: dict[str, tuple[str, str]] = {
    "command line": ("launch.session.compose_config", "configuration: "),
    "checks of the config": ("launch.session.validate", "configuration: "),
    "config.yaml of the folder": ("yaml.safe_load", "config.yaml"),
    "differences to it": ("train.resuming.differences", "config.yaml"),
    "run folder": ("launch.session.RunLock", "run.dir="),
    "data": ("train.build.open_loader", "train/build.py, line "),
    "checkpoints": ("train.build.resume", "train/build.py, line "),
    "metrics.jsonl of before": ("train.metrics.rewind", "train/metrics.py, line "),
    "config.yaml": ("launch.session.write_config", "run.dir="),
    "facts.json": ("launch.session.write_facts", "run.dir="),
}


@pytest.mark.parametrize("name", EDGES)
def test_any_exception_at_an_edge_is_one_line_with_a_status(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path, config: RunConfig, name: str
) -> None:
    target, place = EDGES[name]
    monkeypatch.setattr(launch.session, "compose_config", lambda arguments: config)
    (folder / "config.yaml").write_text("run: {}\n")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    if not target.startswith(("train.resuming.differences", "yaml")):
        monkeypatch.setattr(train.resuming, "read_config", lambda folder: None)
    monkeypatch.setattr(train.build, "matmul_rate", lambda *arguments, **options: 1.0)
    if target.startswith("launch.session.write"):
        monkeypatch.setattr(launch.session, "build_run", lambda *parts, **places: SimpleNamespace(facts={}))
        monkeypatch.setattr(launch.session, "rehearse", lambda run: None)
        # It asks git.
        monkeypatch.setattr(launch.session, "describe_start", dict)
    for error in CLASSES:

        def fail(*arguments: object, error: BaseException = error, **options: object) -> None:
            # A new one, since an error keeps the traceback of where it was raised before.
            raise copy.copy(error)

        with monkeypatch.context() as patch:
            patch.setattr(target, fail)
            assert main([]) in (1, 2), repr(error)
        err = capsys.readouterr().err
        assert len(err.splitlines()) == 1, f"{error!r}: {err}"
        assert err.startswith("error: ")
        # What the system says has its own path.
        assert place in err or isinstance(error, OSError | MemoryError), f"{error!r}: {err}"


@pytest.mark.parametrize(
    ("module", "name"),
    [(getpass, "getuser"), (platform, "node"), (os, "getcwd"), (importlib.metadata, "version"), (subprocess, "run")],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_the_system_does_not_tell_is_not_recorded_and_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str
) -> None:
    for error in CLASSES:
        if not isinstance(error, Exception):
            continue

        def fail(*arguments: object, error: Exception = error, **options: object) -> None:
            raise error

        monkeypatch.setattr(module, name, fail)
        assert None in [*(start := describe_start()).values(), *start["versions"].values()]


@pytest.mark.parametrize("error", CLASSES, ids=repr)
def test_an_edge_names_place_reason_and_remedy_in_one_line(error: BaseException) -> None:
    with pytest.raises(EdgeError) as found, edge("file.yaml", remedy="write it again"):
        raise error.__class__(*error.args)
    text = str(found.value)
    assert text.startswith("file.yaml: ")
    assert text.endswith("; write it again")
    assert "\n" not in text


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), GeneratorExit()], ids=repr)
def test_an_edge_lets_through_what_ends_a_process_on_purpose(error: BaseException) -> None:
    with pytest.raises(type(error)), edge("file.yaml", remedy="write it again"):
        raise error


def test_a_line_of_ours_is_not_explained_again() -> None:
    for error in (ConfigError("optim.lr=-1: must be positive"), CheckpointError("checkpoint x: torn")):
        with pytest.raises(type(error), match=str(error)), edge("file.yaml", remedy="write it again"):
            raise error


def raised(error: BaseException) -> BaseException:
    """The error with the traceback of being raised in a file of the tests, which counts as somebody else's."""
    try:
        raise error
    except BaseException as caught:
        return caught


def test_a_value_error_is_ours_if_our_code_raised_it() -> None:
    with pytest.raises(ValueError, match="RANK='x'") as found:
        World.from_environment({"RANK": "x"})
    assert is_ours(found.value)
    assert not is_ours(raised(ValueError("a library's")))


@pytest.mark.parametrize(
    ("error", "training", "status", "said"),
    [
        (ConfigError("optim.lr=-1: must be positive"), False, 2, "error: rank 5: optim.lr=-1: must be positive\n"),
        (CheckpointError("save failed on rank 1"), True, 1, "error: save failed on rank 1\n"),
        (TrainingFailed("10 updates in a row"), True, 1, "error: 10 updates in a row\n"),
        (OSError(5, "Input/output error", "shard-7"), True, 1, "error: rank 5: shard-7: Input/output error\n"),
        (MemoryError("too much"), True, 1, "error: rank 5: too much\n"),
    ],
    ids=repr,
)
def test_what_a_user_can_mend_is_one_line(
    capsys: pytest.CaptureFixture[str], error: Exception, training: bool, status: int, said: str
) -> None:
    recorded: list[str] = []
    store, failures = two_of_many(record=recorded.append)
    failures[0].training = training
    failures[0].say(raised(error))
    assert capsys.readouterr().err == said
    # Once.
    failures[0].say(error)
    assert capsys.readouterr().err == ""
    assert failures[0].status(error) == status
    assert len(recorded) == 1
    assert recorded[0].startswith("Traceback")


def two_of_many(record: Callable[[str], None] = lambda text: None) -> tuple[dist.TCPStore, list[Failures]]:
    """A launcher's store, and what ranks 5 and 6 of eight say their failures with."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    worlds = [World(rank, 8, address="127.0.0.1", port=store.port) for rank in (5, 6)]
    return store, [Failures(world, record=record) for world in worlds]


def test_what_all_ranks_meet_alike_is_said_by_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    store, (one, other) = two_of_many()
    one.say(CheckpointError("save failed on rank 6"))
    other.say(CheckpointError("save failed on rank 6"))
    assert capsys.readouterr().err == "error: save failed on rank 6\n"


def test_what_others_run_into_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    store, (one, other) = two_of_many()
    one.training = other.training = True
    one.say(raised(RuntimeError("a bug")))
    first = capsys.readouterr().err
    assert first.startswith("error: rank 5:\nTraceback")
    assert first.endswith("RuntimeError: a bug\n")
    other.say(raised(RuntimeError("Connection closed\nby peer")))
    assert capsys.readouterr().err == "rank 6 ends because another failed first: Connection closed\n"
    other.say(raised(OSError(104, "Connection reset by peer")))
    assert "rank 6 ends because another failed first: " in capsys.readouterr().err


def test_another_contradiction_of_another_rank_is_said_too(capsys: pytest.CaptureFixture[str]) -> None:
    store, (one, other) = two_of_many()
    one.say(ConfigError("optim.lr=-1: must be positive"))
    other.say(ConfigError("optim.lr=-2: must be positive"))
    assert capsys.readouterr().err.splitlines() == [
        "error: rank 5: optim.lr=-1: must be positive",
        "error: rank 6: optim.lr=-2: must be positive",
    ]


@pytest.mark.parametrize(
    "text",
    ["[pair.cc:553] Connection closed by peer [127.0.0.1]:27823. GLHF!", "Broken pipe", "remote process exited"],
    ids=["closed", "pipe", "nccl"],
)
def test_a_rank_that_has_gone_without_a_word_is_one_line(capsys: pytest.CaptureFixture[str], text: str) -> None:
    failures = Failures()
    failures.training = True
    failures.say(RuntimeError(f"{text}\nand more"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: another rank has gone without a word")
    assert "the same command goes on" in line


def test_ctrl_c_is_found_behind_what_it_led_to() -> None:
    def end() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("a thread was gone")

    with pytest.raises(RuntimeError) as found:
        end()
    assert was_interrupted(found.value)
    assert not was_interrupted(RuntimeError("a bug"))
