"""SIGTERM and Ctrl-C while steps are done: the run stops after the present step, with a checkpoint.

The signals are read by a thread, because the main thread may be inside a collective or a kernel and sees no signal
until that returns. A second Ctrl-C ends the process at once, whatever the main thread waits for: everything in the run
folder is whole at any moment, and the next start cleans up.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from launch.failures import INTERRUPTED, say

SIGNALS = (signal.SIGTERM, signal.SIGINT)

SAME = 2.0
"""Seconds within which signals are one request: a terminal sends Ctrl-C to every rank, and torchrun passes it on."""


@contextmanager
def stopping_at_signals(request: Callable[[str], None], *, speaks: bool) -> Iterator[None]:
    """Inside, SIGTERM and Ctrl-C call ``request`` with the signal's name, from another thread.

    Args:
        speaks: say that the signal has come; one rank does.
    """
    if threading.current_thread() is not threading.main_thread():
        # Python leaves signals to the main thread, whose owner then decides.
        yield
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    # Python's own action would interrupt the main thread; the byte in the socket is all that is wanted.
    handlers = {number: signal.signal(number, lambda number, frame: None) for number in SIGNALS}
    thread = threading.Thread(target=_read, args=(ours, request, speaks), name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        theirs.close()
        thread.join()
        ours.close()


def _read(signals: socket.socket, request: Callable[[str], None], speaks: bool) -> None:
    """Take signal numbers, a byte each, until the other end is closed."""
    first: float | None = None
    while number := signals.recv(1):
        if number[0] not in SIGNALS:
            continue
        name = "Ctrl-C" if number[0] == signal.SIGINT else "SIGTERM"
        if first is None:
            first = time.monotonic()
            request(name)
            if speaks:
                print(f"{name}: stopping after this step, with a checkpoint; Ctrl-C again ends at once", flush=True)
        elif number[0] == signal.SIGINT and time.monotonic() - first > SAME:
            if speaks:
                say("interrupted: ended at once; the same command goes on from the last checkpoint, if there is one")
            sys.stdout.flush()
            os._exit(INTERRUPTED)
