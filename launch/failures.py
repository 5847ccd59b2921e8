"""Saying why a command fails: at once, in one line where the user can mend it, and by one rank.

Every rank ends when one fails, and the launcher soon ends those that do not end by themselves. So whoever meets an
error says it before anything else is done. What all ranks meet alike (a contradiction in the config, a checkpoint that
failed on some rank) is said by the first to meet it; what one rank alone meets, by that rank; and what the others run
into because it has gone is not told as an error.
"""

import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from data.output import ROOMS
from launch.world import World

DONE, FAILED, UNUSABLE, STOPPED, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit statuses: all steps done; failed, what was saved is intact; config or data cannot be used; stopped by a signal
or by run.max_minutes with a checkpoint, the same command goes on; ended at once by Ctrl-C."""


LOST = r"Connection (closed|reset) by peer|Broken pipe|remote process exited"
"""What gloo and NCCL say where another rank's process has ended."""


class EdgeError(ValueError):
    """A line of ours about something that came from outside: the place, what is wrong with it, a remedy."""


@contextmanager
def edge(place: str | Path, *, remedy: str) -> Iterator[None]:
    """What comes from outside is read inside: whatever a parser, a library or the system raises becomes one line.

    Raises:
        EdgeError: instead of anything that is not a line of ours already.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # libraries in other languages raise what is no Exception
        if is_ours(error):
            raise
        raise EdgeError(f"{place}: {reason(error)}; {remedy}") from error


def is_ours(error: BaseException) -> bool:
    """Whether the error is a line of ours: its class is, or it is a ValueError or OSError that our own code raised."""
    if type(error).__module__.split(".")[0] in ROOMS:
        return True
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_by = frames[-1].f_globals.get("__name__", "") if frames else ""
    return type(error) in (ValueError, OSError) and raised_by.split(".")[0] in ROOMS


def reason(error: BaseException) -> str:
    """Why, in one line: what the system says, or the error's class and its own first line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}{': ' + lines[0].strip() if lines else ''}"


class Failures:
    """Says this process's errors, each once.

    Attributes:
        training: steps are being done; an unexpected error then is a fault of the program, and its traceback is shown.
    """

    def __init__(self, world: World | None = None, *, record: Callable[[str], None] = lambda text: None) -> None:
        """
        Args:
            world: the ranks; alone by default.
            record: takes the traceback of an error that is said in one line.
        """
        self.training = False
        self._world = World() if world is None else world
        self._record = record
        self._said: BaseException | None = None

    def say(self, error: BaseException) -> None:
        """Say what ends this process, unless that was done already."""
        if self._said is error:
            return
        self._said = error
        short = too_little_memory(error)
        if short is None and is_ours(error):
            self._say_worded(error)
        elif self._world.is_first("failed"):
            self._say_first(short or error)
        else:
            line = str(error).strip().splitlines()[:1]
            say(f"rank {self._world.rank} ends because another failed first: {''.join(line) or type(error).__name__}")
            return
        self._record("".join(traceback.format_exception(error)).rstrip())

    def status(self, error: BaseException) -> int:
        """Exit status for what ended the process; asked last."""
        # The error holds the frames that it came from, and these hold this object and open files.
        self._said = None
        return UNUSABLE if isinstance(error, ValueError) and not self.training else FAILED

    def _say_worded(self, error: BaseException) -> None:
        """A line of ours; all ranks may have it alike, and the first says it."""
        first = self._world.is_first("failed")
        if self._world.is_first(str(error)) and (first or not isinstance(error, OSError)):
            # A RuntimeError of ours is raised by all ranks alike, and names those that matter itself.
            complain(error, rank=0 if isinstance(error, RuntimeError) else self._world.rank)

    def _say_first(self, error: BaseException) -> None:
        where = "" if self._world.size == 1 else f"rank {self._world.rank}: "
        if isinstance(error, OSError | MemoryError):
            say(f"error: {where}{reason(error) if isinstance(error, OSError) else error}")
        elif lost_connection(error):
            say(
                f"error: {where}another rank has gone without a word, as one that the system killed or whose machine "
                "failed; the same command goes on from the last checkpoint, if there is one"
            )
        elif self.training:
            say(f"error: {where.rstrip()}\n{''.join(traceback.format_exception(error)).rstrip()}")
        else:
            say(f"error: {where}{reason(error)} ({last_line_of_ours(error)}); nothing was trained yet")


def last_line_of_ours(error: BaseException) -> str:
    """File and line of our code from which the error came."""
    found = "outside of the program"
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = frame.f_globals.get("__name__", "")
        if module.split(".")[0] in ROOMS:
            found = f"{module.replace('.', '/')}.py, line {line}"
    return found


def complain(error: BaseException, *, rank: int = 0) -> None:
    """Print an error once, in its own words; a message of several lines is several problems.

    Args:
        rank: who has it, which is told above 0.
    """
    where = f"rank {rank}: " if rank else ""
    lines = [line for line in str(error).splitlines() if line] or [type(error).__name__]
    say("\n".join(line if line[0] == " " else f"error: {where}{line}" for line in lines))


def say(text: str) -> None:
    """Print a message on standard error, in one piece and at once."""
    print(text, file=sys.stderr, flush=True)


def was_interrupted(error: BaseException) -> bool:
    """Whether the error came up while the end after Ctrl-C was under way, as where other ranks have gone already."""
    link: BaseException | None = error
    while link is not None and not isinstance(link, KeyboardInterrupt):
        link = link.__cause__ or link.__context__
    return link is not None


def lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because the process at its other end is not there any more."""
    return isinstance(error, RuntimeError) and re.search(LOST, str(error)) is not None


def too_little_memory(error: BaseException) -> MemoryError | None:
    """One line for what torch says at length where an allocation fails; None for another error."""
    wanted = re.search(r"ried to allocate ([\d.]+ \w+)", str(error))
    if wanted is None or not isinstance(error, RuntimeError):
        return None
    device = "cuda" if "CUDA" in str(error) else "cpu"
    return MemoryError(
        f"{device}: not enough memory: {wanted[1]} more were asked for at once; lower batch.microbatch or "
        "batch.length, choose a smaller model or more recompute, or spread it over more ranks"
    )
