"""`perilune train --ranks`: signals reach every rank, and the ranks' exit status comes back."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.cli import ROOT
from launch.start_ranks import status_of

PATIENCE = 120.0

RANK = """
import os, signal, sys, time
signals = (signal.SIGTERM, signal.SIGINT)
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
print("ready", flush=True)
end = sys.argv[1]
if end == "signal":
    sys.exit(3 if signal.sigwait(signals) in signals else 1)
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL) if end == "killed" else sys.exit(int(end))
time.sleep(0 if end == "0" else 600)
"""
"""A rank that ends as its argument says; under "signal" it stops with status 3 once it got one."""


def start(folder: Path, end: str) -> subprocess.Popen[str]:
    """The launcher over two ranks that end as told, whose output is piped."""
    (folder / "rank.py").write_text(RANK)
    launcher = ["-m", "launch.start_ranks", "--standalone", "--nproc-per-node=2", "--shutdown-timeout=1"]
    return subprocess.Popen(
        [sys.executable, *launcher, str(folder / "rank.py"), end],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("0", 0, ""),
        ("3", 3, ""),
        ("killed", 137, "error: rank 1 was ended by SIGKILL, as the system does where memory runs out; the same"),
    ],
)
def test_the_status_of_the_rank_that_ended_first_comes_back(tmp_path: Path, end: str, status: int, said: str) -> None:
    process = start(tmp_path, end)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == status, errors
    assert errors.startswith(said)
    assert len(errors.splitlines()) == (1 if said else 0), errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_reaches_every_rank_and_their_status_comes_back(tmp_path: Path, number: signal.Signals) -> None:
    process = start(tmp_path, "signal")
    assert process.stdout is not None
    for _ in range(2):
        assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE)
    assert (process.returncode, errors) == (3, "")


def test_a_rank_ended_by_sigterm_was_asked_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(1, -signal.SIGTERM) == 143
    assert capsys.readouterr().err == ""
