"""A known mistake and how it is put into the running code; the tables of them are `mutations` and its parts."""

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

Mutate = Callable[..., Any]


@dataclass
class Reach:
    """How often the mutated code ran, by target."""

    calls: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """One known mistake; `tests.certify.mutations` says what the fields are."""

    id: str
    sentence: str
    source: str
    mesh: tuple[str, ...]
    target: str
    mutate: Mutate
    shows: str
    also: tuple[tuple[str, Mutate], ...] = ()

    @contextmanager
    def injected(self) -> Iterator[Reach]:
        """Inside, this process makes the mistake."""
        reach = Reach()
        with ExitStack() as stack:
            for target, mutate in ((self.target, self.mutate), *self.also):
                stack.enter_context(replaced(target, mutate, reach))
            yield reach


@contextmanager
def replaced(target: str, mutate: Mutate, reach: Reach) -> Iterator[None]:
    """``mutate(original, ...)`` in place of the function or method that ``target`` names."""
    module, _, path = target.partition(":")
    *classes, name = path.split(".")
    owner = functools.reduce(getattr, classes, importlib.import_module(module))
    original = getattr(owner, name)
    reach.calls[target] = 0

    @functools.wraps(original)
    def stand_in(*args: Any, **options: Any) -> Any:
        reach.calls[target] += 1
        return mutate(original, *args, **options)

    static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    with patch.object(owner, name, staticmethod(stand_in) if static else stand_in):
        yield


ONE = ("parallel.dp=1",)
DP = ("parallel.dp=2",)
EP = (*DP, "parallel.ep=2")
BALANCED = (*EP, "parallel.experts.dispatcher=balanced")
CP = (*ONE, "parallel.cp=2")
TP = (*ONE, "parallel.tp=2")
PP = (*ONE, "parallel.pp=2")
