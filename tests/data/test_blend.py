import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.blend import MAX_BLOCK, MIN_BLOCK, Blend

WEIGHTS = st.lists(st.floats(min_value=0.01, max_value=100), min_size=1, max_size=6)


@given(weights=WEIGHTS, blocks=st.integers(0, 10**9))
@settings(max_examples=50, deadline=None)
def test_counts_are_within_one_of_the_share(weights: list[float], blocks: int) -> None:
    blend = Blend(weights, seed=0)
    counts = blend.counts(blocks)
    assert sum(counts) == blocks * blend.block
    for weight, count in zip(weights, counts):
        exact = weight / math.fsum(weights) * blocks * blend.block
        assert abs(count - exact) <= 1 + 1e-14 * exact


@given(weights=WEIGHTS, start=st.integers(0, 5000), count=st.integers(1, 3000), seed=st.integers(0, 3))
@settings(max_examples=12, deadline=None)
def test_random_access_equals_the_sequence(weights: list[float], start: int, count: int, seed: int) -> None:
    blend = Blend(weights, seed=seed)
    all_sources, all_ranks = blend.draw(0, start + count)
    sources, ranks = blend.draw(start, count)
    np.testing.assert_array_equal(sources, all_sources[start:])
    np.testing.assert_array_equal(ranks, all_ranks[start:])
    for source in range(len(weights)):
        np.testing.assert_array_equal(all_ranks[all_sources == source], np.arange((all_sources == source).sum()))


def deviation(weights: list[float], sources: np.ndarray) -> float:
    """How far any source is from its share, in samples, after any number of samples."""
    shares = [Fraction(str(weight)) / sum(Fraction(str(weight)) for weight in weights) for weight in weights]
    positions = np.arange(1, len(sources) + 1)
    return max(
        float(np.abs(np.cumsum(sources == source) - positions * float(share)).max())
        for source, share in enumerate(shares)
    )


@pytest.mark.parametrize(
    "weights",
    [
        [1, 1],
        [3, 1],
        [0.7, 0.2, 0.1],
        [0.55, 0.25, 0.1, 0.05, 0.03, 0.02],
        [1, 1, 1, 1, 1, 1, 1],
        [1000, 1],
        [0.3, 0, 0.7],
        [12.3456789, 0.987654321, 3.3333333],
    ],
    ids=str,
)
def test_weights_hold_after_any_number_of_samples(weights: list[float]) -> None:
    for seed in range(3):
        sources, _ = Blend(weights, seed=seed).draw(0, 5000)
        assert deviation(weights, sources) < 1.1


@given(weights=st.lists(st.integers(1, 400), min_size=1, max_size=8), seed=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_whole_weights_never_deviate_by_a_sample(weights: list[int], seed: int) -> None:
    sources, _ = Blend(weights, seed=seed).draw(0, 3 * MIN_BLOCK)
    assert deviation(list(weights), sources) < 1


@given(weights=WEIGHTS, block=st.integers(0, 10**7))
@settings(max_examples=8, deadline=None)
def test_any_weights_never_deviate_by_two_samples(weights: list[float], block: int) -> None:
    """Far into a run as well, and in all of a block."""
    blend = Blend(weights, seed=0)
    begun, sources = blend.counts(block), blend.block_sources(block)
    total = sum(Fraction(str(weight)) for weight in weights)
    positions = np.arange(1, len(sources) + 1)
    for source, weight in enumerate(weights):
        share = Fraction(str(weight)) / total
        before = float(begun[source] - share * block * blend.block)
        drawn = np.cumsum(sources == source)
        assert np.abs(before + drawn - positions * float(share)).max() < 2


def test_a_weight_of_zero_draws_nothing() -> None:
    blend = Blend([1, 0, 2], seed=1)
    assert 1 not in blend.draw(0, 5000)[0]
    np.testing.assert_array_equal(blend.draw(0, 5000)[0] > 0, Blend([1, 2], seed=1).draw(0, 5000)[0] > 0)
    with pytest.raises(ValueError, match=r"data.sources\[0\].weight=0: all weights are 0, and one must be above"):
        Blend([0, 0], seed=0)


@pytest.mark.parametrize("period", [2, 4, 8])
def test_no_place_in_a_step_always_has_the_same_source(period: int) -> None:
    """Weights 3 and 1 on four ranks: a pattern that repeats would give the rare source to one rank for ever."""
    sources, _ = Blend([3, 1], seed=0).draw(0, 4096)
    shares = sources.reshape(-1, period).mean(axis=0)
    assert (np.abs(shares - 0.25) < 0.15).all(), shares


def test_a_rare_source_gets_a_longer_block_and_never_a_negative_count() -> None:
    blend = Blend([1.0, 1e-5], seed=0)
    assert blend.block == 2**17
    draws = np.diff([blend.counts(block) for block in range(40)], axis=0)
    assert draws.min() >= 1


def test_equal_weights_and_common_blocks() -> None:
    blend = Blend([1, 1], seed=5)
    assert blend.block == MIN_BLOCK
    sources, _ = blend.draw(0, MIN_BLOCK)
    assert sources.sum() == MIN_BLOCK // 2
    assert sources.tolist() != sorted(sources.tolist())


def test_order_depends_on_seed_and_block() -> None:
    one, other = Blend([1, 2], seed=0), Blend([1, 2], seed=1)
    assert one.block_sources(0).tolist() != other.block_sources(0).tolist()
    assert one.block_sources(0).tolist() != one.block_sources(1).tolist()


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_bad_weight_is_named(weight: float) -> None:
    with pytest.raises(ValueError, match=rf"data.sources\[1\].weight={weight}: must be a finite number from 0 on"):
        Blend([1.0, weight], seed=0)


def test_no_source_and_a_vanishing_share_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one source"):
        Blend([], seed=0)
    with pytest.raises(ValueError, match=r"data.sources\[0\].weight=1e-09"):
        Blend([1e-9, 1.0], seed=0)
    assert Blend([1.0, MAX_BLOCK - 1], seed=0).block == MAX_BLOCK


def test_order_is_pinned() -> None:
    """Another order would give a resumed run samples that it has had."""
    first = "0011010100011000010110001001101000100101"
    assert "".join(map(str, Blend([3, 2], seed=0).draw(0, 40)[0])) == first
