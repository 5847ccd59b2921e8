"""The one writer: whatever its reader does, the command goes on, and what can be shown is shown at once."""

import io
import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from data.output import MOST_KEPT, LogFile, Output, SafeStream

ROOT = Path(__file__).parents[2]
COMMAND = """
import logging, sys, warnings
from data.output import run_command

def main(arguments):
    for _ in range(3):
        print("a line with \\ufffd and \\udcff")
        print("unfinished", end="")
        print(" error", file=sys.stderr)
        logging.getLogger("train").warning("a warning")
        logging.getLogger("train").info("what is going on")
        warnings.warn("another one")
    return 7

sys.exit(run_command(main, []))
"""


def run_python(source: str, **streams: object) -> subprocess.CompletedProcess[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": str(streams.pop("encoding", "utf-8"))}
    return subprocess.run([sys.executable, "-c", source], env=environment, check=False, **streams)  # type: ignore[call-overload]


def test_a_full_disk_ends_nothing() -> None:
    with open("/dev/full", "wb") as full:
        assert run_python(COMMAND, stdout=full, stderr=full).returncode == 7
        told = run_python(COMMAND, stdout=full, stderr=subprocess.PIPE)
    assert told.returncode == 7
    assert told.stderr.splitlines().count(b"a warning") == 3
    assert b"UserWarning: another one" in told.stderr
    assert b"Errno" not in told.stderr


def test_a_closed_pipe_ends_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert run_python(COMMAND, stdout=writer, stderr=writer).returncode == 7
    finally:
        os.close(writer)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_streams_that_are_not_there_end_nothing(tmp_path: Path, closed: str) -> None:
    (tmp_path / "command.py").write_text(COMMAND)
    shell = f'PYTHONPATH="{ROOT}" "{sys.executable}" "{tmp_path / "command.py"}" {closed}'
    assert subprocess.run(shell, shell=True, capture_output=True).returncode == 7


def test_a_file_opened_later_does_not_become_a_missing_standard_output(tmp_path: Path) -> None:
    """Its descriptor would be 1, and what anything prints would be written into it."""
    source = f"""
import os
from data.output import run_command
def main(arguments):
    file = os.open({str(tmp_path / "precious")!r}, os.O_CREAT | os.O_WRONLY)
    os.write(1, b"printed from elsewhere")
    return 0
run_command(main, [])
"""
    (tmp_path / "command.py").write_text(source)
    shell = f'PYTHONPATH="{ROOT}" "{sys.executable}" "{tmp_path / "command.py"}" >&- 2>&- <&-'
    assert subprocess.run(shell, shell=True).returncode == 0
    assert (tmp_path / "precious").read_bytes() == b""


@pytest.mark.parametrize("encoding", ["gbk", "ascii", "latin-1", "utf-8"])
def test_a_character_that_cannot_be_printed_is_written_as_its_escape(encoding: str) -> None:
    found = run_python(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding=encoding)
    assert found.returncode == 7
    first = found.stdout.decode(encoding).splitlines()[0]
    assert first == ("a line with \ufffd and \\udcff" if encoding == "utf-8" else "a line with \\ufffd and \\udcff")


def test_lines_are_there_at_once_and_whole() -> None:
    reader, writer = os.pipe()
    with open(writer, "w", encoding="utf-8") as stream:
        before = sys.stdout
        sys.stdout = stream
        try:
            with Output():
                print("half a ", end="")
                os.set_blocking(reader, False)
                with pytest.raises(BlockingIOError):
                    os.read(reader, 100)
                print("line")
                assert os.read(reader, 100) == b"half a line\n"
                print("a question? ", end="", flush=True)
                assert os.read(reader, 100) == b"a question? "
        finally:
            sys.stdout = before
    os.close(reader)


def test_a_reader_that_makes_no_room_loses_text_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data.output.PATIENCE", 0.0)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with open(writer, "w", encoding="utf-8") as stream:
        safe = SafeStream(stream)
        for _ in range(100):
            safe.write("x" * 10_000)
    assert os.read(reader, 10) == b"x" * 10
    os.close(reader)


def test_a_stream_that_was_closed_meanwhile_loses_text_and_stops_nothing() -> None:
    stream = io.StringIO()
    safe = SafeStream(stream)
    safe.write("seen")
    stream.close()
    assert safe.write("not seen") == len("not seen")
    assert not safe.isatty()


def read_log(path: Path) -> list[str]:
    """Lines of a log without their times, each of which must have one."""
    lines = path.read_text("utf-8").splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}  ", line) for line in lines), lines
    return [line[26:] for line in lines]


def test_the_log_has_every_line_also_those_from_before_it_was_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.log"
    with Output() as output:
        print("early")
        output.log_to(path)
        print("out", end="")
        print("put")
        print("an error", file=sys.stderr)
        logging.getLogger("train.somewhere").info("going on")
        logging.getLogger("elsewhere").info("not ours")
        output.record("for the log alone")
        with output.above(lambda text: print(f"above: {text}", file=before)):
            print("beside a bar")
        print("the end", end="")
    found = read_log(path)
    assert found == [
        "early",
        "output",
        "an error",
        "going on",
        "for the log alone",
        "beside a bar",
        "the end",
    ]
    printed = capsys.readouterr()
    assert printed.out == "early\noutput\ngoing on\nthe end"
    assert "an error\n" in printed.err


before = io.StringIO()
"""A screen of its own, as that of a live bar."""


def test_another_process_only_warns(capsys: pytest.CaptureFixture[str]) -> None:
    with Output() as output:
        output.quiet()
        logging.getLogger("train").info("going on")
        logging.getLogger("train").warning("careful")
    assert capsys.readouterr() == ("", "careful\n")


def test_afterwards_everything_is_as_it_was() -> None:
    streams, handlers = (sys.stdout, sys.stderr), list(logging.getLogger().handlers)
    level, filters = logging.getLogger("train").level, list(warnings.filters)
    with pytest.raises(RuntimeError), Output():
        raise RuntimeError
    assert (sys.stdout, sys.stderr) == streams
    assert logging.getLogger().handlers == handlers
    assert (logging.getLogger("train").level, list(warnings.filters)) == (level, filters)


def test_a_log_that_cannot_be_written_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.log"
    path.symlink_to("/dev/full")
    with Output() as output:
        output.log_to(path)
        for line in ("one", "two", "three"):
            print(line)
    out, err = capsys.readouterr()
    assert out == "one\ntwo\nthree\n"
    assert err == f"{path}: No space left on device; the run goes on, lines are lost here\n"


def test_a_log_that_is_never_known_keeps_a_bounded_number_of_lines() -> None:
    log = LogFile()
    for line in range(MOST_KEPT + 10):
        log.write(str(line), complete=True)
    assert len(log._kept) == MOST_KEPT
