import math

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
@settings(max_examples=40, deadline=None)
def test_random_access_equals_the_sequence(weights: list[float], start: int, count: int, seed: int) -> None:
    blend = Blend(weights, seed=seed)
    all_sources, all_ranks = blend.draw(0, start + count)
    sources, ranks = blend.draw(start, count)
    np.testing.assert_array_equal(sources, all_sources[start:])
    np.testing.assert_array_equal(ranks, all_ranks[start:])
    for source in range(len(weights)):
        np.testing.assert_array_equal(all_ranks[all_sources == source], np.arange((all_sources == source).sum()))


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
