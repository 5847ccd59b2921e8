"""The simulator's loads and arithmetic, by hand and on small machines."""

import sys
from pathlib import Path

import numpy as np
import pytest

from parallel.expert.trace import RoutingTrace, save_trace
from tests.bench import experts
from tests.bench.experts import SHAPES, Machine, cost_of, draw, recorded, synthetic
from tests.bench.placement import Outcome, homes

SMALL = Machine(experts=32, top_k=4, width=8, inner=16, tokens=64)


@pytest.mark.parametrize("kind", SHAPES)
def test_a_token_chooses_an_expert_at_most_once(kind: str) -> None:
    steps = synthetic(kind, SMALL, ranks=8, steps=3, drift=0.1)
    assert steps.shape == (3, 32)
    assert (steps.sum(axis=1) == 8 * 64 * 4).all()
    assert steps.max() <= 8 * 64
    if kind == "empty rank":
        assert not steps[:, homes(32, 8) == 0].any()


def test_an_expert_that_everybody_wants_gets_every_token_once() -> None:
    share = np.array([0.97, 0.01, 0.01, 0.01])
    assert draw(share, 200, most=100, rng=np.random.default_rng(0))[0] == 100


def test_cost_by_hand() -> None:
    machine = Machine(experts=4, top_k=1, width=10, inner=20, tokens=50, link=1e-6, rate=1e-6)
    outcome = Outcome(rows=np.array([60, 40]), lent=np.array([0, 1]), borrowed=np.array([1, 0]))
    cost = cost_of(outcome, machine, numbers_bytes=8, moved=4)
    assert (cost.imbalance, cost.copies, cost.busiest) == (1.2, 1, 1)
    # 600 numbers an expert; a link of 1000 bytes/s, products of 10^6 operations/s.
    assert cost.products == pytest.approx(60 * 6 * 600 / 1e6)
    assert cost.tokens == pytest.approx(4 * 60 / 2 * 20 / 1e3)
    assert cost.weights == pytest.approx(600 * (8 + 4 / 2 * 2) / 1e3)
    assert cost.bytes == 600 * (8 + 4 * 2)


def test_a_trace_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = np.random.default_rng(0).integers(1, 50, (6, 2, 8))
    counts[:, 1] = 0
    save_trace(tmp_path / "a.npz", RoutingTrace(counts, np.array([1, 2]), 2))
    layers, top_k = recorded(tmp_path / "a.npz", steps=4)
    assert top_k == 2
    assert len(layers) == 1
    assert np.array_equal(layers[0], counts[2:, 0])
    with pytest.raises(ValueError, match="at least 2"):
        recorded(tmp_path / "a.npz", steps=1)
    monkeypatch.setattr(sys, "argv", ["experts", "--loads", f"trace:{tmp_path}/a.npz", "--ranks", "2", "4", "16"])
    experts.main()
    rows = [line for line in capsys.readouterr().out.splitlines() if "balanced" in line]
    # 16 ranks are more than the recorded experts.
    assert len(rows) == 2
