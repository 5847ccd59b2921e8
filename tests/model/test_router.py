"""Routing, its ties, and both rules that move the selection bias."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.config import MoEConfig
from model.router import (
    Chosen,
    Decisions,
    Router,
    bias_from_histogram,
    bias_from_load,
    quantile_bias,
    required_bias_histogram,
    select_experts,
)

ORACLE = Path(__file__).parents[1] / "oracles" / "quantile_balancing.npz"


@pytest.fixture(scope="module")
def oracle() -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.asarray(value)) for name, value in np.load(ORACLE).items()}


def test_quantile_bias_equals_the_definition(oracle: dict[str, torch.Tensor]) -> None:
    k = int(oracle["k"])
    bias = quantile_bias(oracle["scores"], oracle["bias0"], k=k)
    torch.testing.assert_close(bias, oracle["bias_histogram"], rtol=0, atol=1e-14)
    second = quantile_bias(oracle["scores"], bias, k=k)
    torch.testing.assert_close(second, oracle["bias_histogram2"], rtol=0, atol=1e-14)


def test_cutoff_histogram_and_loads_equal_the_definition(oracle: dict[str, torch.Tensor]) -> None:
    k = int(oracle["k"])
    chosen, cutoff = select_experts(oracle["scores"], oracle["bias0"], k=k)
    assert torch.equal(cutoff, oracle["cutoff"])
    counts = required_bias_histogram(oracle["scores"], cutoff, oracle["bias0"], bins=1000)
    assert torch.equal(counts.long(), oracle["histogram"])
    assert torch.equal(torch.bincount(chosen.flatten(), minlength=64), oracle["load0"])
    chosen, _ = select_experts(oracle["scores"], oracle["bias_histogram"], k=k)
    assert torch.equal(torch.bincount(chosen.flatten(), minlength=64), oracle["load_histogram"])


def test_histogram_of_microbatches_adds_up_but_mean_of_their_quantiles_does_not(
    oracle: dict[str, torch.Tensor],
) -> None:
    scores, bias, k = oracle["scores"], oracle["bias0"], int(oracle["k"])
    whole = quantile_bias(scores, bias, k=k)
    parts = scores.split([100, 2000, 1996])
    counts = sum(required_bias_histogram(part, select_experts(part, bias, k=k)[1], bias, bins=1000) for part in parts)
    assert torch.equal(bias_from_histogram(counts, bias, k=k), whole)
    averaged = torch.stack([quantile_bias(part, bias, k=k) for part in parts]).mean(dim=0)
    assert float((averaged - whole).abs().max()) > 1e-4


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 300),
    experts=st.integers(2, 24),
    data=st.data(),
    seed=st.integers(0, 10_000),
)
def test_quantile_bias_is_centred_finite_and_near_the_exact_quantile(
    tokens: int, experts: int, data: st.DataObject, seed: int
) -> None:
    k = data.draw(st.integers(1, experts - 1))
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator, dtype=torch.float64)
    bias = 0.3 * torch.randn(experts, generator=generator, dtype=torch.float64)
    new = quantile_bias(scores, bias, k=k)
    assert bool(torch.isfinite(new).all())
    assert abs(float(new.mean())) < 1e-12
    _, cutoff = select_experts(scores, bias, k=k)
    required = (cutoff.unsqueeze(1) - scores).sort(dim=0).values
    rank = int(np.ceil(tokens * k / experts))
    width = float((bias.max() - bias.min() + 2) / 1000)
    exact = required[rank - 1]
    # The histogram knows each value up to its bin, and interpolates inside the bin that holds the exact one.
    uncentred = new - new[0] - (exact - exact[0])
    assert float(uncentred.abs().max()) <= 2 * width + 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ties_go_to_the_lowest_expert(dtype: torch.dtype) -> None:
    chosen, _ = select_experts(torch.full((5, 8), 0.5, dtype=dtype), torch.zeros(8), k=3)
    assert chosen.tolist() == [[0, 1, 2]] * 5
    chosen, _ = select_experts(torch.tensor([[0.1, 0.9, 0.4, 0.9, 0.4]], dtype=dtype), torch.zeros(5), k=3)
    assert chosen.tolist() == [[1, 3, 2]]


@settings(max_examples=60)
@given(
    tokens=st.integers(0, 9),
    experts=st.integers(2, 20),
    steps=st.integers(1, 30),
    data=st.data(),
    seed=st.integers(0, 99),
)
def test_the_choice_is_that_of_a_stable_sort(
    tokens: int, experts: int, steps: int, data: st.DataObject, seed: int
) -> None:
    """With few distinct scores and a missing one, so that there are ties at every place."""
    k = data.draw(st.integers(1, experts - 1))
    generator = torch.Generator().manual_seed(seed)
    scores, bias = (
        torch.randint(steps, shape, generator=generator) / steps for shape in ((tokens, experts), (experts,))
    )
    scores[torch.rand(scores.shape, generator=generator) < 0.05] = torch.nan
    before = scores.clone()
    chosen, cutoff = select_experts(scores, bias, k=k)
    values, order = torch.sort(scores + bias, dim=1, descending=True, stable=True)
    assert torch.equal(chosen, order[:, :k])
    assert torch.equal(cutoff.nan_to_num(9), values[:, k].nan_to_num(9))
    assert torch.equal(scores.nan_to_num(9), before.nan_to_num(9))


def test_zero_router_weight_gives_equal_weights_and_counts_that_add_up() -> None:
    router = Router(16, MoEConfig(experts=8, top_k=3))
    torch.nn.init.zeros_(router.weight)
    routing = router(torch.randn(10, 16), stats=None)
    assert routing.expert_TK.tolist() == [[0, 1, 2]] * 10
    torch.testing.assert_close(routing.weight_TK, torch.full((10, 3), 1 / 3))


def test_bias_moves_the_choice_and_never_the_weights() -> None:
    router = Router(16, MoEConfig(experts=8, top_k=2, routed_scaling=2.5))
    torch.nn.init.normal_(router.weight)
    x = torch.randn(40, 16)
    free = router(x, stats=None)
    router.bias.copy_(torch.tensor([9.0, 9.0] + [0.0] * 6))
    forced = router(x, stats=None)
    assert not torch.equal(free.expert_TK, forced.expert_TK)
    assert set(forced.expert_TK.flatten().tolist()) == {0, 1}
    scores = torch.sigmoid(x @ router.weight.T).gather(1, forced.expert_TK)
    torch.testing.assert_close(forced.weight_TK, 2.5 * scores / scores.sum(dim=1, keepdim=True))
    assert router.bias.grad is None
    assert not router.bias.requires_grad


def test_sign_step_closed_form() -> None:
    bias = bias_from_load(torch.tensor([6, 2, 0, 0]), torch.zeros(4), step=0.001)
    torch.testing.assert_close(bias, torch.tensor([-0.00125, -0.00025, 0.00075, 0.00075]))


def test_sign_step_is_exact_where_bf16_counts_would_not_be() -> None:
    loads = torch.tensor([40840, 41080], dtype=torch.int64)
    assert torch.sign(bias_from_load(loads, torch.zeros(2), step=0.001)).tolist() == [1.0, -1.0]


def test_quantile_balancing_evens_out_a_skewed_router() -> None:
    generator = torch.Generator().manual_seed(0)
    skew = torch.linspace(-1.5, 1.5, 16)
    bias = torch.zeros(16)
    spread = []
    for _ in range(4):
        scores = torch.sigmoid(torch.randn(4000, 16, generator=generator) + skew)
        chosen, _ = select_experts(scores, bias, k=2)
        load = torch.bincount(chosen.flatten(), minlength=16).double()
        spread.append(float(load.max() / load.mean()))
        bias = quantile_bias(scores, bias, k=2)
    assert spread[0] > 3
    assert spread[-1] < 1.2


def test_a_step_without_tokens_leaves_the_bias() -> None:
    bias = torch.tensor([0.3, -0.1, -0.2])
    nothing = torch.zeros(3, 1000, dtype=torch.int32)
    assert torch.equal(bias_from_histogram(nothing, bias, k=1), bias)
    still = bias_from_load(torch.zeros(3, dtype=torch.int64), bias, step=0.001)
    torch.testing.assert_close(still, bias, rtol=0, atol=1e-7)


def test_a_decision_is_made_once_and_each_kind_by_itself() -> None:
    class Other(NamedTuple):
        number: int

    decisions, made = Decisions(), []
    chosen = Chosen(torch.tensor([[1, 0]]))
    for _ in range(2):
        assert decisions.once(Chosen, lambda: made.append("chosen") or chosen) is chosen
        assert decisions.once(Other, lambda: made.append("other") or Other(3)) == Other(3)
    assert made == ["chosen", "other"]


def test_a_decision_of_another_kind_than_was_asked_for_is_noticed() -> None:
    with pytest.raises(AssertionError, match="Chosen expected, int was decided"):
        Decisions().once(Chosen, lambda: 3)


def test_required_biases_at_the_borders_have_the_first_and_the_last_bin() -> None:
    """A saturated sigmoid is 0 or 1, so a required bias can be the range's very end, which belongs to the last bin."""
    scores, bias = torch.tensor([[1.0, 0.0], [0.5, 0.0], [0.0, 1.0]]), torch.zeros(2)
    counts = required_bias_histogram(scores, torch.tensor([0.0, 0.5, 1.0]), bias, bins=4)
    assert counts.dtype == torch.int32
    # Required: -1, 0, 1 and 0, 0.5, 0 in bins [-1, -0.5), [-0.5, 0), [0, 0.5), [0.5, 1].
    assert counts.tolist() == [[1, 0, 1, 1], [0, 0, 2, 1]]


@pytest.mark.parametrize(
    ("counts", "k", "quantiles"),
    [
        ([[4, 0, 0, 0], [0, 0, 0, 4]], 1, [-0.75, 0.75]),
        ([[2, 2, 0, 0], [0, 0, 2, 2]], 1, [-0.5, 0.5]),
        ([[1, 3, 0, 0], [0, 0, 1, 3]], 1, [-0.5 + 0.5 / 3, 0.5 + 0.5 / 3]),
        ([[1, 0, 0, 0], [0, 0, 1, 0]], 1, [-0.75, 0.25]),
    ],
    ids=["outermost bins", "rank ends a bin", "rank inside a bin", "one token"],
)
def test_the_quantile_is_linear_inside_its_bin(counts: list[list[int]], k: int, quantiles: list[float]) -> None:
    """Four bins of width 0.5 over [-1, 1]; by hand."""
    expected = torch.tensor(quantiles, dtype=torch.float64)
    new = bias_from_histogram(torch.tensor(counts, dtype=torch.int32), torch.zeros(2, dtype=torch.float64), k=k)
    torch.testing.assert_close(new, expected - expected.mean(), rtol=0, atol=1e-15)


def test_bins_follow_the_lowest_and_the_highest_bias() -> None:
    """Biases -1 and 2 make the range [-2, 3]: five bins of width 1."""
    bias = torch.tensor([-1.0, 2.0])
    counts = required_bias_histogram(torch.tensor([[0.5, 0.5]]), torch.tensor([-0.5]), bias, bins=5)
    assert counts.tolist() == [[0, 1, 0, 0, 0]] * 2
    counts = torch.tensor([[2, 0, 0, 0, 0], [0, 0, 0, 0, 2]])
    assert bias_from_histogram(counts, bias, k=1).tolist() == [-2.0, 2.0]


@pytest.mark.parametrize("renormalize", [True, False])
def test_weights_are_the_scores_scaled(renormalize: bool) -> None:
    torch.manual_seed(0)
    router = Router(4, MoEConfig(experts=5, top_k=2, routed_scaling=3.0, renormalize=renormalize))
    torch.nn.init.normal_(router.weight)
    x = torch.randn(6, 4)
    routing = router(x, stats=None)
    scores = torch.sigmoid(x @ router.weight.T).gather(1, routing.expert_TK)
    expected = 3.0 * (scores / scores.sum(dim=1, keepdim=True) if renormalize else scores)
    torch.testing.assert_close(routing.weight_TK, expected)


def test_an_expert_at_the_mean_load_stays() -> None:
    bias = bias_from_load(torch.tensor([3, 1, 2]), torch.zeros(3), step=0.5)
    assert bias.tolist() == [-0.5, 0.5, 0.0]
