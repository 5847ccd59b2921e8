"""``perilune train --ranks N``: torch's own launcher, which passes signals on and the ranks' exit status back.

    SIGTERM, Ctrl-C ──> this process ──> every rank, which all stop after a step ──> this process has their status

torchrun by itself ends its ranks by force 30 seconds after a signal, whatever they are saving, and returns 1 for every
status but 0, under a traceback of its own.
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from launch.failures import DONE, FAILED, say

PASSED_ON = (signal.SIGTERM, signal.SIGINT)
LEFT_TO_TORCH = "SIGHUP,SIGQUIT"


def main(arguments: Sequence[str]) -> int:
    """Run torch's launcher with its arguments; returns the exit status of the rank that ended first."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # The ranks say themselves what ended them.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logging.getLogger("torch.distributed.elastic.multiprocessing").setLevel(logging.CRITICAL)
    try:
        run(parse_args(["--signals-to-handle", LEFT_TO_TORCH, *arguments]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return status_of(rank, failure.exitcode)
    except SignalException as error:
        return 128 + error.sigval
    return DONE


def status_of(rank: int, code: int) -> int:
    """This process's exit status for that of a rank; a rank that was killed could not say so itself."""
    if code >= 0:
        return code or FAILED
    name = signal.Signals(-code).name
    if code != -signal.SIGTERM:
        why = ", as the system does where memory runs out" if code == -signal.SIGKILL else ""
        say(f"error: rank {rank} was ended by {name}{why}; the same command goes on from the last checkpoint")
    return 128 - code


def pass_on(number: int, frame: FrameType | None) -> None:
    """Send a signal to every rank; without any yet, end at once: nothing was begun."""
    ranks = children()
    for rank in ranks:
        try:
            os.kill(rank, number)
        except ProcessLookupError:
            continue
    if not ranks:
        os._exit(128 + number)


def children() -> list[int]:
    """Processes that this one started."""
    return [int(child) for path in Path("/proc/self/task").glob("*/children") for child in path.read_text().split()]


if __name__ == "__main__":
    for passed in PASSED_ON:
        signal.signal(passed, pass_on)
    sys.exit(main(sys.argv[1:]))
