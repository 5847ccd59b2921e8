"""Writing on file systems as they are: files that are there whole or not at all, and locks where there are any.

Network and object storage lacks one thing or another. What only guards against rare cases (locks, fsync) is done
without, with a warning; what the format rests on (renaming a file) is asked for, and its lack is named.
"""

import errno
import fcntl
import os
import secrets
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_LACKING = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOLCK, errno.ENOTTY})
"""What systems say of a call that they do not have; EINVAL is fsync's word for it."""
_POLL_SECONDS = 0.05


class StorageWarning(UserWarning):
    """The storage lacks something that can be done without."""


class Held(Exception):
    """Another process holds the lock."""


def write_atomically(path: Path, content: Any) -> None:
    """Write a file that is there whole or not at all, even if the machine stops.

    Args:
        content: bytes, or the memory of a contiguous array.

    Raises:
        OSError: with the file's name; the partial file is removed.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content)  # not numpy's tofile, whose error does not say why
            file.flush()
            _sync(file.fileno(), path.parent)
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        if error.errno in _LACKING:
            raise OSError(error.errno, "this storage cannot rename files; write to another one", str(path)) from error
        raise OSError(error.errno, error.strerror, str(path)) from error


def _sync(descriptor: int, folder: Path) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _LACKING:
            raise
        _warn(f"{folder}: has no fsync ({error.strerror}); a file just written may be lost if the machine stops")


def remove(path: Path) -> None:
    """Remove a file that is in nobody's way; never fatal."""
    with suppress(OSError):
        path.unlink()


@contextmanager
def locked(path: Path, *, wait_seconds: float = 0.0) -> Iterator[None]:
    """Hold a lock file, which the system frees when its holder dies. Where there are no locks, go on with a warning:
    what is written beneath must be safe, if wasteful, with two writers that write the same.

    Raises:
        Held: another process held it for ``wait_seconds``.
        OSError: it cannot be opened.
    """
    descriptor = _open(path)
    try:
        deadline = time.monotonic() + wait_seconds
        while not _try_lock(descriptor, path):
            if time.monotonic() >= deadline:
                raise Held(str(path))
            time.sleep(_POLL_SECONDS)
        yield
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    """A descriptor of the lock file, its mode as the umask says; reading is enough to lock another user's."""
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except PermissionError:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _try_lock(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _LACKING:
            raise
        _warn(f"{path.parent}: has no file locks ({error.strerror}); start one process at a time that writes there")
    return True


def _warn(message: str) -> None:
    """Once for each message."""
    warnings.warn(message, StorageWarning, stacklevel=2)
