"""What a command prints: one writer for standard output and standard error, which nothing can stop.

    print, logging, warnings, rich ──> LineStream ──> screen   whole lines, at once
                                            └───────> run.log  the same lines, each with its time

Output only shows what a command does, so a closed pipe, a full disk, a missing terminal or an encoding without some
character must not end the command: such text is dropped, and an unprintable character is written as its escape. Text
goes to the file descriptor without a buffer in between, so that a log is never behind, and nothing is left over that
could fail again when Python ends.

It stands at the bottom of the import order because every command prints.
"""

import io
import logging
import os
import select
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import TextIO

ROOMS = ("data", "model", "parallel", "optim", "train", "configs", "launch")
"""Packages whose loggers may also say what is going on; of others only warnings are shown."""

MOST_KEPT = 1000
"""Lines that wait for a log file at most."""

PATIENCE = 1.0
"""Seconds for a reader of a non-blocking pipe to make room, before text is dropped."""


class SafeStream(io.TextIOBase):
    """Text to one of the process's own streams, at once; what cannot be written is dropped.

    Args:
        stream: `sys.stdout` or `sys.stderr`; None where the process was started without it.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        try:
            self._descriptor = None if stream is None else stream.fileno()
        except (OSError, ValueError, AttributeError):
            # One that was put in the place of the real one, as by a test.
            self._descriptor = None

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """As the stream's own: what its reader expects."""
        return self._encoding

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        try:
            return self._stream is not None and self._stream.isatty()
        except (OSError, ValueError):
            return False

    def fileno(self) -> int:
        if self._descriptor is None:
            raise io.UnsupportedOperation("fileno")
        return self._descriptor

    def write(self, text: str) -> int:
        data = text.encode(self._encoding, "backslashreplace")
        # Whoever reads may have gone, or the disk be full: then the log is lost, and the run is not.
        with suppress(OSError, ValueError):
            if self._descriptor is not None:
                self._write_bytes(self._descriptor, data)
            elif self._stream is not None:
                self._stream.write(data.decode(self._encoding))
                self._stream.flush()
        return len(text)

    @staticmethod
    def _write_bytes(descriptor: int, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:
                if not select.select([], [descriptor], [], PATIENCE)[1]:
                    return


class LineStream(SafeStream):
    """A `SafeStream` that passes on whole lines, so that those of several processes do not mix.

    Args:
        output: gets every line as well, for the log file, and knows whether a bar must stay below the lines.
    """

    def __init__(self, stream: TextIO | None, *, output: "Output") -> None:
        super().__init__(stream)
        self._output = output
        self._open = ""
        self._lock = RLock()

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._open = (self._open + text).split("\n")
            if lines:
                self._pass_on(lines)
        return len(text)

    def flush(self) -> None:
        with self._lock:
            text, self._open = self._open, ""
            if text and self._output.printer is not None:
                self._pass_on([text])
            elif text:
                # Its line is not complete, so the log has to wait for what comes next.
                self._output.record(text, complete=False)
                super().write(text)

    def _pass_on(self, lines: Sequence[str]) -> None:
        self._output.record("\n".join(lines))
        if self._output.printer is not None:
            self._output.printer("\n".join(lines))
        else:
            super().write("\n".join(lines) + "\n")


class Output:
    """Stands in for `sys.stdout` and `sys.stderr`, and for logging's output, while a command runs.

    Attributes:
        screen: standard output itself, past the log file: for a live bar.
        printer: where lines go instead of the screen, while a bar is live.
    """

    def __init__(self) -> None:
        self.screen = SafeStream(None)
        self.printer: Callable[[str], None] | None = None
        self._handler = _Handler()
        self._log = LogFile()
        self._stack = ExitStack()

    def __enter__(self) -> "Output":
        open_missing_streams()
        out, err = sys.stdout, sys.stderr
        self.screen = SafeStream(out)
        for stream in (out, err):
            _flush(stream)
        with ExitStack() as stack:
            stack.callback(self._log.close)
            # Around the streams: logging and warnings look up sys.stderr whenever they have something to say.
            for redirect, stream in ((redirect_stdout, out), (redirect_stderr, err)):
                safe = LineStream(stream, output=self)
                stack.enter_context(redirect(safe))
                stack.callback(safe.flush)
            stack.enter_context(_logging(self._handler))
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("default", category=UserWarning, module="train")
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def quiet(self) -> None:
        """From now on loggers only warn: another process says what is going on."""
        self._handler.setLevel(logging.WARNING)

    def log_to(self, path: Path) -> None:
        """From the next line on everything goes to ``path`` too, also what was printed before."""
        self._log.attach(path)

    def record(self, text: str, *, complete: bool = True) -> None:
        """Lines for the log file alone.

        Args:
            complete: the last line ends here.
        """
        if (problem := self._log.write(text, complete=complete)) is not None:
            print(problem, file=sys.stderr)

    @contextmanager
    def above(self, printer: Callable[[str], None]) -> Iterator[None]:
        """Inside, lines are handed to ``printer``, which shows them above a live bar."""
        self.printer = printer
        try:
            yield
        finally:
            self.printer = None


class LogFile:
    """Lines with their times, appended to a file; until it is known where, they are kept.

    Several processes may append to one file: each line is one write.
    """

    def __init__(self) -> None:
        self._kept: list[str] = []
        self._open = ""
        self._path: Path | None = None
        self._file: int | None = None
        self._failed = False

    def attach(self, path: Path) -> None:
        """Write to ``path``, beginning with what was kept."""
        self._path = path

    def write(self, text: str, *, complete: bool) -> str | None:
        """Append lines; what to say to the user where that fails for the first time."""
        *lines, self._open = (self._open + text + ("\n" if complete else "")).split("\n")
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        self._kept = [*self._kept, *(f"{stamp}  {line}\n" for line in lines)][-MOST_KEPT:]
        if self._path is None or not self._kept:
            return None
        content, self._kept = "".join(self._kept), []
        try:
            if self._file is None:
                self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.write(self._file, content.encode("utf-8", "backslashreplace"))
        except OSError as error:
            failed, self._failed = self._failed, True
            return None if failed else f"{self._path}: {error.strerror or error}; the run goes on, lines are lost here"
        return None

    def close(self) -> None:
        """Complete the last line and close the file, if it was opened."""
        if self._open:
            self.write("", complete=True)
        if self._file is not None:
            os.close(self._file)
            self._file = None


class _Handler(logging.Handler):
    """What is going on to standard output, warnings to standard error; whatever these are at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            stream = sys.stderr if record.levelno >= logging.WARNING else sys.stdout
            print(self.format(record), file=stream, flush=True)
        except Exception:
            self.handleError(record)


@contextmanager
def _logging(handler: logging.Handler) -> Iterator[None]:
    """Inside, loggers of the `ROOMS` also say what is going on, and others only warn."""
    levels = {logging.getLogger(room): logging.getLogger(room).level for room in ROOMS}
    logging.getLogger().addHandler(handler)
    for logger in levels:
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        for logger, before in levels.items():
            logger.setLevel(before)


def open_missing_streams() -> None:
    """Put the null device where standard input, output or error is closed, or the next file opened takes its place."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _flush(stream: TextIO | None) -> None:
    # Closed, or nobody reads any more: what is left in its buffer has no way out.
    with suppress(OSError, ValueError):
        if stream is not None:
            stream.flush()


def run_command(main: Callable[[list[str]], int], arguments: list[str]) -> int:
    """``main(arguments)`` with its output made safe; returns its exit status."""
    with Output():
        return main(arguments)
