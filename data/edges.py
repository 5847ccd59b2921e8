"""Edges: where files of others come in. Whatever goes wrong there becomes one line with the place and a remedy.

Parsers, libraries and the system raise what they like: a parquet reader an `OSError`, a JSON parser a
`RecursionError`, a tokenizer written in Rust a `PanicException`, which is not even an `Exception`. So an edge does
not list classes of errors; it names whatever came.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
_REMEDIES = {
    "file": "write the path alone",
    "hf": "write hub:NAME for a dataset of the Hugging Face hub, or download it and name the folder",
    "http": "download it and name the file",
    "https": "download it and name the file",
}


class InputError(ValueError):
    """A line of ours: it names the place, the rule and the remedy, and no edge wraps it again."""


@contextmanager
def edge(place: str | Path, *, remedy: str, what: str = "cannot be read") -> Iterator[None]:
    """What reads ``place`` stands inside; every error that is not yet a line of ours becomes one: place, ``what`` is
    wrong with it, the error's own reason and the remedy.

    Raises:
        InputError: instead of whatever was raised, except what ends a process on purpose.
    """
    try:
        yield
    except (InputError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of a Rust library is no Exception
        raise InputError(f"{place}: {what} ({reason(error)}); {remedy}") from error


def reason(error: BaseException) -> str:
    """Why, in a few words: the first line of an error, or what kind it is if it has none."""
    if isinstance(error, OSError) and error.strerror:
        return " ".join(error.strerror.split())
    if isinstance(error, MemoryError):
        return "it does not fit into memory"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def place_error(name: str, value: str | Path) -> str | None:
    """What is wrong with a path that is the address of another machine's storage, or None.

    Args:
        name: the field or option, such as ``run.dir`` or ``--out``.
        value: as it was given; a `Path` has one slash where the address had two.
    """
    if (found := _SCHEME.match(str(value))) is None:
        return None
    scheme = found.group(1).lower()
    remedy = _REMEDIES.get(scheme, "mount or copy it, and name that folder")
    return f"{name}={value}: must be a path of this machine and is a {scheme}: address; {remedy}"
