"""Gloo ranks on this machine, without torchrun: processes started once, then called again and again.

``with RankPool(4) as pool: pool.run(function, *args)`` calls ``function(*args)`` on every rank, inside an
initialised default process group with one thread per rank, and returns the results in rank order.
Functions travel by name, so they must stand at the top of a module; tensors travel by value. The ranks meet in a
file, so no port is taken. No call hangs: a rank that fails takes the others down, and its error is the one shown.
"""

import multiprocessing
import multiprocessing.connection
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist


class RankError(RuntimeError):
    """A function failed on a rank; the message holds the rank's traceback, the cause its exception."""


class RankPool:
    """``size`` processes that form one default process group.

    Args:
        size: ranks.
        timeout: seconds that one call may take, collectives included.
        grace: seconds that the other ranks have to answer once one has failed; those that do not are killed.
        preload: modules that are imported once for all ranks of all pools; the first pool of a program decides.
    """

    def __init__(
        self,
        size: int,
        *,
        timeout: float = 60.0,
        grace: float = 2.0,
        preload: Sequence[str] = ("torch.distributed",),
    ) -> None:
        self.size = size
        self.timeout = timeout
        self.grace = grace
        # A fork server imports torch once for all, and has no threads to fork wrongly.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(preload))
        self._folder = tempfile.TemporaryDirectory()
        store = Path(self._folder.name) / "store"
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, str(store), rank, size, timeout), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(*args)`` on every rank; results in rank order.

        Raises:
            RankError: the first failure to arrive. If other ranks hang then, all are killed for good.
        """
        call = pickle.dumps((function, args))
        for pipe in self._pipes:
            pipe.send_bytes(call)
        results: dict[int, Any] = {}
        failure: tuple[int, BaseException | None, str] | None = None
        deadline = time.monotonic() + self.timeout
        waiting = dict(enumerate(self._pipes))
        while waiting:
            ready = multiprocessing.connection.wait(
                list(waiting.values()), timeout=max(0.0, deadline - time.monotonic())
            )
            if not ready:
                break
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                ok, value, trace = _receive(waiting.pop(rank))
                results[rank] = value
                if not ok and failure is None:
                    failure = (rank, value, trace)
                    # Peers may be waiting for the failed rank in a collective: do not wait long for them.
                    deadline = min(deadline, time.monotonic() + self.grace)
        if waiting:
            for process in self._processes:
                process.kill()
        if failure is not None:
            rank, cause, trace = failure
            raise RankError(f"rank {rank}:\n{trace}") from cause
        if waiting:
            raise RankError(f"ranks {sorted(waiting)} did not answer within {self.timeout} s")
        return [results[rank] for rank in range(self.size)]

    def close(self) -> None:
        """End all ranks: politely, and after a while by force."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=5.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _receive(pipe: Connection) -> tuple[bool, Any, str]:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError as error:
        return False, error, "the process died"


def _serve(pipe: Connection, store: str, rank: int, size: int, timeout: float) -> None:
    """A rank's life: answer calls until the pipe closes."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )
    while True:
        try:
            call = pipe.recv_bytes()
        except EOFError:
            break
        try:
            function, args = pickle.loads(call)
            answer = pickle.dumps((True, function(*args), ""))
        except Exception as error:
            answer = pickle.dumps((False, error, traceback.format_exc()))
        pipe.send_bytes(answer)
    # Without the barrier a rank may close its connections while another still uses them.
    dist.barrier()
    dist.destroy_process_group()
