"""QK-Clip: after it, the logits of a clipped head are exactly tau / S times what they were."""

import pytest
import torch
from torch import Tensor, nn

from model.params import ParamRole
from optim.distributed import ShardedOptimizer
from optim.groups import OptimConfig
from optim.qk_clip import QKClipTarget, qk_clip
from parallel.data import DataParallel
from parallel.mesh import Axis

HEADS, NOPE, ROPE, VALUE, RANK, TOKENS = 3, 4, 2, 5, 6, 11
TARGET = QKClipTarget(query="q", key_value="kv", heads=HEADS, nope=NOPE, rope=ROPE, value=VALUE)


def inputs() -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = {"q": random(HEADS * (NOPE + ROPE), RANK), "kv": random(HEADS * (NOPE + VALUE), RANK)}
    return weights, random(TOKENS, RANK), random(TOKENS, RANK), random(TOKENS, ROPE)


def logits_HTT(weights: dict[str, Tensor], x: Tensor, latent: Tensor, shared_key: Tensor) -> Tensor:
    query = (x @ weights["q"].T).view(TOKENS, HEADS, NOPE + ROPE)
    key = (latent @ weights["kv"].T).view(TOKENS, HEADS, NOPE + VALUE)[..., :NOPE]
    key = torch.cat([key, shared_key[:, None].expand(-1, HEADS, -1)], dim=-1)
    return torch.einsum("thd,shd->hts", query, key) * (NOPE + ROPE) ** -0.5


def test_the_largest_logit_becomes_tau() -> None:
    weights, *activations = inputs()
    before = logits_HTT(weights, *activations)
    largest_H = before.amax(dim=(1, 2))
    tau = float(largest_H.sort().values[1]) - 0.1  # above one head, below two
    value_rows = weights["kv"].unflatten(0, (HEADS, -1))[:, NOPE:].clone()
    qk_clip(weights, targets=[TARGET], max_logits=largest_H[None], tau=tau)
    after = logits_HTT(weights, *activations)
    assert (largest_H > tau).sum() == 2
    torch.testing.assert_close(after.amax(dim=(1, 2)), largest_H.clamp(max=tau), rtol=1e-12, atol=0)
    torch.testing.assert_close(after, before * (tau / largest_H).clamp(max=1.0)[:, None, None], rtol=1e-12, atol=1e-12)
    assert torch.equal(weights["kv"].unflatten(0, (HEADS, -1))[:, NOPE:], value_rows)


@pytest.mark.parametrize("largest", [-torch.inf, -500.0, 99.0, 100.0])
def test_heads_within_the_bound_keep_every_bit(largest: float) -> None:
    weights, *_ = inputs()
    before = {name: x.clone() for name, x in weights.items()}
    qk_clip(weights, targets=[TARGET], max_logits=torch.full((1, HEADS), largest), tau=100.0)
    assert all(torch.equal(weights[name], before[name]) for name in before)


@pytest.mark.parametrize("owned", ["q", "kv"])
def test_owners_of_either_part_need_not_meet(owned: str) -> None:
    weights, *_ = inputs()
    alone = {owned: weights[owned].clone()}
    maxima = torch.tensor([[150.0, 50.0, 400.0]])
    qk_clip(weights, targets=[TARGET], max_logits=maxima, tau=100.0)
    qk_clip(alone, targets=[TARGET], max_logits=maxima, tau=100.0)
    assert torch.equal(alone[owned], weights[owned])


@pytest.mark.parametrize("tau", [100.0, 0.5, 0.0], ids=["on", "below 1", "off"])
def test_the_optimizer_clips_after_its_update(tau: float) -> None:
    weights, *_ = inputs()
    params = {name: nn.Parameter(x.clone()) for name, x in weights.items()}
    optimizer = ShardedOptimizer(
        params,
        roles={name: ParamRole(kind="matrix", heads=HEADS) for name in params},
        config=OptimConfig(qk_clip=tau, weight_decay=0.5),
        dp=DataParallel(params, axis=Axis()),
        qk_targets=[TARGET],
    )
    maxima = torch.tensor([[150.0, 50.0, 400.0]])
    optimizer.step({name: torch.zeros_like(x) for name, x in weights.items()}, lr=0.1, max_logits=maxima)
    expected = {name: x * 0.95 for name, x in weights.items()}
    if tau:
        qk_clip(expected, targets=[TARGET], max_logits=maxima, tau=tau)
    for name, param in params.items():
        torch.testing.assert_close(param.detach(), expected[name], rtol=1e-14, atol=0)


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_rank_clips_by_the_maxima_of_its_own_heads(first: int) -> None:
    """One head of three, cut out with its rows."""
    weights, *_ = inputs()
    per_head = {name: x.unflatten(0, (HEADS, -1))[first].clone() for name, x in weights.items()}
    maxima = torch.tensor([[150.0, 50.0, 400.0]])
    own = QKClipTarget(query="q", key_value="kv", heads=1, nope=NOPE, rope=ROPE, value=VALUE, first=first)
    qk_clip(per_head, targets=[own], max_logits=maxima, tau=100.0)
    qk_clip(weights, targets=[TARGET], max_logits=maxima, tau=100.0)
    for name, x in weights.items():
        assert torch.equal(per_head[name], x.unflatten(0, (HEADS, -1))[first])


def test_each_layer_has_its_own_row_of_maxima() -> None:
    weights, *_ = inputs()
    layers = {f"{layer}.{name}": x.clone() for layer in (0, 1) for name, x in weights.items()}
    targets = [
        QKClipTarget(query=f"{i}.q", key_value=f"{i}.kv", heads=HEADS, nope=NOPE, rope=ROPE, value=VALUE)
        for i in (0, 1)
    ]
    maxima = torch.tensor([[1.0, 1.0, 1.0], [200.0, 200.0, 200.0]])
    qk_clip(layers, targets=targets, max_logits=maxima, tau=100.0)
    assert torch.equal(layers["0.q"], weights["q"])
    assert not torch.equal(layers["1.q"], weights["q"])
