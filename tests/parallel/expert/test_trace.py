"""Routing traces: what is written is read, and a wrong file says what is wrong."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parallel.expert.trace import RoutingTrace, load_trace, save_trace

COUNTS = np.arange(24).reshape(2, 3, 4)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    save_trace(tmp_path / "a.npz", RoutingTrace(COUNTS, np.array([1, 2, 4]), 2))
    trace = load_trace(tmp_path / "a.npz")
    assert np.array_equal(trace.counts, COUNTS)
    assert trace.layers.tolist() == [1, 2, 4]
    assert trace.top_k == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layers": None}, "lacks layers"),
        ({"counts": COUNTS[0]}, r"int64 \[3, 4\]; must be int64"),
        ({"counts": COUNTS - 1}, "none negative"),
        ({"counts": COUNTS * 1.0}, "float64"),
        ({"counts": COUNTS[:0]}, r"\[0, 3, 4\]"),
        ({"layers": np.array([1, 2])}, "2 layers for counts of 3"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, wrong: dict[str, np.ndarray | None], message: str) -> None:
    arrays = {"counts": COUNTS, "layers": np.arange(3), "top_k": np.int64(2)} | wrong
    kept: dict[str, Any] = {name: value for name, value in arrays.items() if value is not None}
    np.savez(tmp_path / "a.npz", **kept)
    with pytest.raises(ValueError, match=message):
        load_trace(tmp_path / "a.npz")
