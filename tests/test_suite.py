"""The suite's own rules: the same examples every time, ranks of two modules never at once, no verdict by the clock."""

import ast
from pathlib import Path

import pytest
from hypothesis import settings

from tests.conftest import ROOT, starts_ranks

MODULES = sorted(
    path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py") if path.parent.name != "data"
)
CLOCKS = {"time", "monotonic", "perf_counter", "process_time", "thread_time", "now"}


@pytest.mark.parametrize(
    ("module", "ranks"),
    [
        ("tests/dist/test_meshes.py", True),
        ("tests/certify/test_mutations.py", True),
        ("tests/launch/test_hostile.py", True),
        ("tests/train/test_metrics.py", True),
        ("tests/optim/test_updates.py", False),
        ("tests/model/test_kimi.py", False),
    ],
)
def test_modules_that_start_ranks_are_known(module: str, ranks: bool) -> None:
    assert starts_ranks(module) == ranks


def test_examples_are_the_same_every_time_and_may_take_their_time() -> None:
    assert settings().derandomize
    assert settings().deadline is None


def is_duration(node: ast.AST) -> bool:
    """Whether the node is ``clock() - something``."""
    clock = node.left if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) else None
    return isinstance(clock, ast.Call) and isinstance(clock.func, ast.Attribute) and clock.func.attr in CLOCKS


@pytest.mark.parametrize("module", MODULES)
def test_no_verdict_is_a_duration(module: str) -> None:
    """Time says how busy the machine is. Work is counted: calls, bytes, records read."""
    tree = ast.parse((ROOT / module).read_text("utf-8"))
    guilty = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert) and any(is_duration(inner) for inner in ast.walk(node))
    ]
    assert not guilty, f"{Path(module).name}: asserts in lines {guilty} judge by the clock; wait for the event"
