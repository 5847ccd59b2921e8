"""What has no gradient any more: a matrix only decays, a moment becomes zero, nothing moves on for ever."""

import pytest
import torch
from torch import Tensor, nn

from model.loss import chunked_cross_entropy
from model.params import ParamRole
from optim.distributed import ShardedOptimizer
from optim.groups import OptimConfig
from optim.muon import drop_denormals
from parallel.mesh import Mesh
from tests.model.tiny import tiny_model, tokens
from tests.optim.test_updates import EMBEDDING, LR, MATRIX, VECTOR, build, random, reference_muon
from train.build import build_optimizer

SCALES = [1e-30, 1e-12, 1e-6, 1.0, 1e6, 1e12]
STEPS = 2580

STACKS = {
    "matrix": (MATRIX, (12, 8), [(slice(None), slice(None))]),
    "wide": (MATRIX, (4, 16), [(slice(None), slice(None))]),
    "expert": (MATRIX, (3, 12, 8), [(1,)]),
    "head": (ParamRole(kind="matrix", heads=3), (12, 8), [(slice(4, 8),)]),
    "head of an output": (ParamRole(kind="matrix", heads=3, by_columns=True), (8, 12), [(slice(None), slice(4, 8))]),
    "keys of a head": (ParamRole(kind="matrix", heads=2, sections=(3, 2)), (10, 6), [(slice(5, 8),)]),
    "values of a head": (ParamRole(kind="matrix", heads=2, sections=(3, 2)), (10, 6), [(slice(8, 10),)]),
}
"""Role, shape, and the place of one of its matrices."""


def matrix_optimizer(weight: Tensor, role: ParamRole) -> tuple[nn.Parameter, ShardedOptimizer]:
    params, optimizer = build({"w": weight}, {"w": role}, OptimConfig(output_per_head=True))
    return params["w"], optimizer


CASES = [("expert", scale, STEPS) for scale in SCALES]
CASES += [(name, scale, 120) for name in STACKS for scale in (1e-12, 1.0, 1e12)]


@pytest.mark.parametrize(("name", "scale", "steps"), CASES)
def test_a_matrix_whose_gradient_has_ceased_only_decays(name: str, scale: float, steps: int) -> None:
    """Twenty steps with a gradient everywhere; then one of the matrices has none, and its neighbours go on."""
    role, shape, places = STACKS[name]
    weight = 0.02 * random(*shape, seed=0, dtype=torch.float32)
    param, optimizer = matrix_optimizer(weight, role)
    gradient = scale * random(*shape, seed=1, dtype=torch.float32)
    for _ in range(20):
        optimizer.step({"w": gradient.clone()}, lr=LR)
    (place,) = places
    expected, before = param.detach()[place].clone(), param.detach().clone()
    gradient[place] = 0
    for _ in range(steps - 20):
        optimizer.step({"w": gradient.clone()}, lr=LR)
        expected *= 1 - LR * 0.1
    assert torch.equal(param.detach()[place], expected)
    elsewhere = torch.ones(shape, dtype=torch.bool)
    elsewhere[place] = False
    moved = param.detach() - before * (1 - LR * 0.1) ** (steps - 20)
    assert not elsewhere.any() or moved[elsewhere].norm() > LR
    momentum = optimizer.state_dict()["w/momentum"]
    assert momentum[elsewhere].count_nonzero() == elsewhere.sum()
    # It is zero as soon as it is no normal number any more.
    left = momentum[place].abs().max()
    assert left < torch.finfo(torch.float32).tiny or scale * 0.95 ** (steps - 20) > 1e-37
    assert left == 0 or left > torch.finfo(torch.float32).tiny


def test_torch_moves_on_until_its_epsilon() -> None:
    """What the rule is compared with: torch's Muon drifts until the momentum has fallen below an absolute number."""
    drifts = []
    for scale in (1e-3, 1.0):
        w = nn.Parameter(torch.zeros(12, 8))
        theirs = torch.optim.Muon([w], lr=LR, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        gradient = scale * random(12, 8, seed=1, dtype=torch.float32)
        for _ in range(20):
            w.grad = gradient.clone()
            theirs.step()
        before = w.detach().clone()
        assert w.grad is not None
        w.grad.zero_()
        for _ in range(600):
            theirs.step()
        drifts.append((w.detach() - before).square().mean().sqrt().item())
    assert drifts[1] > 1.3 * drifts[0] > 100 * 0.1 * LR


@pytest.mark.parametrize("scale", SCALES)
def test_a_pause_leaves_the_momentum_to_decay(scale: float) -> None:
    """After a pause the gradient meets what is left of the old momentum, as if the steps between had had no update."""
    weight = random(6, 4, seed=0)
    gradients = [scale * random(6, 4, seed=s) for s in (1, 2, 3)]
    param, optimizer = matrix_optimizer(weight, MATRIX)
    momentum = torch.zeros_like(weight)
    for gradient in (gradients[0], gradients[1], None, None, None, gradients[2]):
        optimizer.step({"w": torch.zeros_like(weight) if gradient is None else gradient.clone()}, lr=LR)
        momentum = 0.95 * momentum + (0 if gradient is None else 0.05 * gradient)
    torch.testing.assert_close(optimizer.state_dict()["w/momentum"], momentum, rtol=1e-12, atol=0)
    before = reference_muon(weight, gradients[:2]) * (1 - LR * 0.1) ** 3
    # One more step from that momentum: the reference run with the pause inside.
    old = (0.95 * 0.05 * gradients[0] + 0.05 * gradients[1]) * 0.95**3
    expected = step_from(before, old, gradients[2])
    torch.testing.assert_close(param.detach(), expected, rtol=1e-10, atol=1e-12)


def step_from(weight: Tensor, momentum: Tensor, gradient: Tensor) -> Tensor:
    """One step of Muon from a momentum, by a gradient in which that momentum is already contained."""
    param, optimizer = matrix_optimizer(weight, MATRIX)
    optimizer.load_state_dict({"w/momentum": momentum, "step": torch.tensor(2)})
    optimizer.step({"w": gradient.clone()}, lr=LR)
    return param.detach()


@pytest.mark.parametrize("scale", SCALES)
def test_a_gradient_that_ceases_on_resume(scale: float) -> None:
    weight = random(3, 6, 4, seed=0, dtype=torch.float32)
    param, optimizer = matrix_optimizer(weight, MATRIX)
    optimizer.step({"w": scale * random(3, 6, 4, seed=1, dtype=torch.float32)}, lr=LR)
    saved = {key: value.clone() for key, value in optimizer.state_dict().items()}
    resumed, fresh = matrix_optimizer(param.detach(), MATRIX)
    fresh.load_state_dict(saved)
    gradient = scale * random(3, 6, 4, seed=2, dtype=torch.float32)
    gradient[1] = 0
    for _ in range(3):
        optimizer.step({"w": gradient.clone()}, lr=LR)
        fresh.step({"w": gradient.clone()}, lr=LR)
    assert torch.equal(resumed, param)
    assert (resumed[0] - param[0]).count_nonzero() == 0


def test_one_element_is_a_gradient() -> None:
    """Whatever its size: the rule asks whether there is a gradient, not how much of one."""
    param, optimizer = matrix_optimizer(torch.zeros(2, 6, 4), MATRIX)
    optimizer.step({"w": random(2, 6, 4, seed=1, dtype=torch.float32)}, lr=LR)
    before = param.detach().clone()
    gradient = torch.zeros(2, 6, 4)
    gradient[1, 5, 3] = -1e-40
    optimizer.step({"w": gradient}, lr=LR)
    assert torch.equal(param[0], before[0] * (1 - LR * 0.1))
    assert (param[1] - before[1]).norm() > LR / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_running_means_reach_zero(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    mean = torch.tensor([tiny, 2 * tiny, -4 * tiny, 1.0, -1.0], dtype=dtype)
    stuck = mean.clone()
    for _ in range(1000):
        stuck.lerp_(torch.zeros_like(stuck), 0.05)
        mean.lerp_(torch.zeros_like(mean), 0.05)
        drop_denormals([mean])
    assert mean[:3].count_nonzero() == 0 < stuck[:3].count_nonzero()
    assert torch.equal(mean[3:], stuck[3:])


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.81), (0.0, 0.5), (0.95, 0.999)], ids=str)
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_adamw_comes_to_rest(scale: float, betas: tuple[float, float]) -> None:
    """Of a vector, and of one row of an embedding whose other rows go on."""
    values = {"b": torch.zeros(9), "e": torch.zeros(4, 5)}
    config = OptimConfig(weight_decay=0.0, betas=betas)
    assert config.errors() == []
    params, optimizer = build(values, {"b": VECTOR, "e": EMBEDDING}, config)
    gradients = {"b": scale * random(9, seed=1, dtype=torch.float32), "e": torch.full((4, 5), scale)}
    for _ in range(20):
        optimizer.step({name: g.clone() for name, g in gradients.items()}, lr=LR)
    gradients["b"].zero_()
    gradients["e"][2] = 0
    # With betas on the border each step moves as far as the one before, until eps outweighs the second moment.
    for _ in range(STEPS):
        optimizer.step({name: g.clone() for name, g in gradients.items()}, lr=LR)
    rest = {name: param.detach().clone() for name, param in params.items()}
    optimizer.step({name: g.clone() for name, g in gradients.items()}, lr=LR)
    assert torch.equal(params["b"], rest["b"])
    assert torch.equal(params["e"][2], rest["e"][2])
    state = optimizer.state_dict()
    assert state["b/exp_avg"].count_nonzero() == 0
    assert state["e/exp_avg"][2].count_nonzero() == 0
    assert state["e/exp_avg"].count_nonzero() == 15


def test_betas_that_let_an_update_grow_are_refused() -> None:
    betas = (0.99, 0.5)
    params, optimizer = build({"b": torch.zeros(3)}, {"b": VECTOR}, OptimConfig(betas=betas))
    moved = []
    for gradient in (1e-3, 0.0):
        before = params["b"].detach().clone()
        for _ in range(60):
            optimizer.step({"b": torch.full((3,), gradient)}, lr=LR)
        moved.append((params["b"].detach() - before).abs().max().item())
    assert moved[1] > 100 * moved[0]
    (error,) = OptimConfig(betas=betas).errors()
    assert error.startswith("optim.betas=[0.99, 0.5]")
    assert error.endswith("raise the second")
    assert OptimConfig(betas=(0.5, 0.25)).errors() == []
    assert OptimConfig(betas=(0.95, 0.9)).errors() != []


def test_an_expert_of_a_model_that_gets_no_more_tokens_only_decays() -> None:
    """Chosen by none from the third step on, by its router's bias: all of its matrices rest."""
    net = tiny_model("k3", dtype=torch.float32)
    dp, optimizer = build_optimizer(net, OptimConfig(), mesh=Mesh())
    layers = [net.layers[index].ffn for index in net.config.moe_layers]
    ids, labels = tokens(2, 32), tokens(2, 32, seed=1)
    moved = []
    for step in range(6):
        if step == 2:
            for layer in layers:
                layer.router.bias[3] = -100.0
        before = [weight.detach().clone() for layer in layers for weight in layer.experts.parameters()]
        dp.zero_gradients()
        with dp.backward(last=True):
            chunked_cross_entropy(net.hidden(ids), net.head.weight, labels).backward()
        dp.finish()
        optimizer.step(dp.owned_gradients(), lr=LR)
        after = [weight.detach() for layer in layers for weight in layer.experts.parameters()]
        decayed = [weight * (1 - LR * 0.1) for weight in before]
        moved.append([[not torch.equal(a[e], d[e]) for e in range(8)] for a, d in zip(after, decayed)])
    # Some other expert may happen to get no tokens either.
    assert all(sum(experts) >= 6 for step in moved for experts in step)
    assert all(any(experts[3] for experts in step) for step in moved[:2])
    assert not any(experts[3] for step in moved[2:] for experts in step)
