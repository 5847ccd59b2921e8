"""Muon and AdamW against torch's own, against loops over blocks, and with zero or tiny gradients."""

import math

import pytest
import torch
from torch import Tensor, nn

import optim.distributed
import optim.muon
from model.params import ParamRole
from optim.distributed import ShardedOptimizer
from optim.groups import OptimConfig
from optim.newton_schulz import orthogonalize
from parallel.data import DataParallel
from parallel.mesh import Axis

MATRIX = ParamRole(kind="matrix")
VECTOR = ParamRole(kind="vector", decay=False)
EMBEDDING = ParamRole(kind="embedding")
LR = 0.02


def build(
    values: dict[str, Tensor], roles: dict[str, ParamRole], config: OptimConfig
) -> tuple[dict[str, nn.Parameter], ShardedOptimizer]:
    params = {name: nn.Parameter(value.clone()) for name, value in values.items()}
    dp = DataParallel(params, axis=Axis())
    return params, ShardedOptimizer(params, roles=roles, config=config, dp=dp)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(32, 32), (16, 48), (48, 16)], ids=str)
def test_equals_torch_muon(shape: tuple[int, int], nesterov: bool) -> None:
    start = random(*shape, seed=0, dtype=torch.float32)
    config = OptimConfig(weight_decay=0.1, momentum=0.95, nesterov=nesterov, ns_dtype="bf16")
    params, ours = build({"w": start}, {"w": MATRIX}, config)
    w = nn.Parameter(start.clone())
    theirs = torch.optim.Muon([w], lr=LR, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn="match_rms_adamw")
    for step in range(5):
        gradient = random(*shape, seed=step + 1, dtype=torch.float32)
        w.grad = gradient.clone()
        theirs.step()
        ours.step({"w": gradient}, lr=LR)
        # Often equal to the bit; a batched bf16 product may round otherwise. sqrt(48) is torch's largest scale.
        torch.testing.assert_close(params["w"].detach(), w.detach(), rtol=0, atol=LR * 0.2 * 48**0.5 * 2**-8)
    torch.testing.assert_close(ours.state_dict()["w/momentum"], theirs.state[w]["momentum_buffer"], rtol=0, atol=0)


def test_equals_torch_adamw() -> None:
    start = {"a": random(7, 5, seed=0), "b": random(9, seed=1)}
    roles = {"a": EMBEDDING, "b": VECTOR}
    params, ours = build(start, roles, OptimConfig(weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8))
    a, b = (nn.Parameter(x.clone()) for x in start.values())
    groups = [{"params": [a], "weight_decay": 0.1}, {"params": [b], "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    for step in range(5):
        gradients = {"a": random(7, 5, seed=10 + step), "b": random(9, seed=20 + step)}
        a.grad, b.grad = gradients["a"].clone(), gradients["b"].clone()
        theirs.step()
        ours.step(gradients, lr=LR)
        torch.testing.assert_close(params["a"], a, rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(params["b"], b, rtol=1e-13, atol=1e-14)


def reference_muon(weight: Tensor, gradients: list[Tensor]) -> Tensor:
    """Muon on one matrix, written out."""
    momentum = torch.zeros_like(weight)
    for gradient in gradients:
        momentum = 0.95 * momentum + 0.05 * gradient
        update = 0.05 * gradient + 0.95 * momentum
        direction = orthogonalize(update[None])[0]
        weight = weight * (1 - LR * 0.1) - LR * 0.2 * math.sqrt(max(weight.shape)) * direction
    return weight


def run_muon(role: ParamRole, weight: Tensor, gradients: list[Tensor], **options: bool) -> Tensor:
    params, optimizer = build({"w": weight}, {"w": role}, OptimConfig(**options))
    for gradient in gradients:
        optimizer.step({"w": gradient.clone()}, lr=LR)
    return params["w"].detach()


def test_heads_equal_a_loop_over_heads() -> None:
    weight, gradients = random(12, 5, seed=0), [random(12, 5, seed=s) for s in (1, 2, 3)]
    got = run_muon(ParamRole(kind="matrix", heads=3), weight, gradients)
    loop = [reference_muon(weight[i : i + 4], [g[i : i + 4] for g in gradients]) for i in range(0, 12, 4)]
    torch.testing.assert_close(got, torch.cat(loop), rtol=1e-10, atol=1e-12)


def test_output_heads_equal_a_loop_over_columns() -> None:
    weight, gradients = random(5, 12, seed=0), [random(5, 12, seed=s) for s in (1, 2, 3)]
    role = ParamRole(kind="matrix", heads=3, by_columns=True)
    got = run_muon(role, weight, gradients, output_per_head=True)
    loop = [reference_muon(weight[:, i : i + 4], [g[:, i : i + 4] for g in gradients]) for i in range(0, 12, 4)]
    torch.testing.assert_close(got, torch.cat(loop, dim=1), rtol=1e-10, atol=1e-12)
    whole = run_muon(role, weight, gradients)
    torch.testing.assert_close(whole, reference_muon(weight, gradients), rtol=1e-10, atol=1e-12)


def test_key_and_value_rows_of_a_head_are_matrices_of_their_own() -> None:
    weight, gradients = random(10, 6, seed=0), [random(10, 6, seed=s) for s in (1, 2)]
    got = run_muon(ParamRole(kind="matrix", heads=2, sections=(3, 2)), weight, gradients)
    cuts = [(0, 3), (3, 5), (5, 8), (8, 10)]
    loop = [reference_muon(weight[i:j], [g[i:j] for g in gradients]) for i, j in cuts]
    torch.testing.assert_close(got, torch.cat(loop), rtol=1e-10, atol=1e-12)


def test_experts_equal_a_loop_and_an_unused_one_only_decays() -> None:
    weight, gradients = random(4, 6, 3, seed=0), [random(4, 6, 3, seed=s) for s in (1, 2, 3)]
    for gradient in gradients:
        gradient[2] = 0
    got = run_muon(MATRIX, weight, gradients)
    loop = torch.stack([reference_muon(weight[e], [g[e] for g in gradients]) for e in range(4)])
    torch.testing.assert_close(got, loop, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(got[2], weight[2] * (1 - LR * 0.1) ** 3, rtol=1e-14, atol=0)


def test_batching_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, gradients = random(5, 6, 3, seed=0), [random(5, 6, 3, seed=s) for s in (1, 2)]
    got = run_muon(MATRIX, weight, gradients)
    monkeypatch.setattr(optim.distributed, "batch_elements", lambda device: 2 * 6 * 3)
    torch.testing.assert_close(run_muon(MATRIX, weight, gradients), got, rtol=1e-12, atol=1e-13)


def test_one_newton_schulz_for_each_logical_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    def counting(x: Tensor, *, steps: int, dtype: torch.dtype | None) -> Tensor:
        calls.append(tuple(x.shape))
        return orthogonalize(x, steps=steps, dtype=dtype)

    monkeypatch.setattr(optim.muon, "orthogonalize", counting)
    heads = ParamRole(kind="matrix", heads=2)
    roles = {"q1": heads, "q2": heads, "kv": ParamRole(kind="matrix", heads=2, sections=(4, 2)), "up": MATRIX}
    roles |= {"experts1": MATRIX, "experts2": MATRIX, "norm": VECTOR, "embedding": EMBEDDING}
    shapes = {
        "q1": (8, 6),
        "q2": (8, 6),
        "kv": (12, 6),
        "up": (4, 6),
        "experts1": (3, 5, 6),
        "experts2": (3, 5, 6),
    }
    shapes |= {"norm": (6,), "embedding": (9, 6)}
    values = {name: random(*shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    _, optimizer = build(values, roles, OptimConfig())
    optimizer.step({name: value.clone() for name, value in values.items()}, lr=LR)
    # [4, 6]: two heads of q1, two of q2, two key parts, up. [2, 6]: two value parts. [5, 6]: six experts.
    assert sorted(calls) == [(2, 2, 6), (6, 5, 6), (7, 4, 6)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_zero_gradient_only_decays(dtype: torch.dtype) -> None:
    weight = random(64, 64, seed=0, dtype=dtype)
    params, optimizer = build({"w": weight}, {"w": MATRIX}, OptimConfig(weight_decay=0.1))
    optimizer.step({"w": torch.zeros_like(weight)}, lr=LR)
    assert torch.equal(params["w"].detach(), weight * (1 - LR * 0.1))
    assert optimizer.state_dict()["w/momentum"].count_nonzero() == 0


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-10, 1e-12, 1e-30])
def test_a_tiny_gradient_moves_as_far_as_a_large_one(scale: float) -> None:
    weight = torch.zeros(64, 64)
    params, optimizer = build({"w": weight}, {"w": MATRIX}, OptimConfig())
    optimizer.step({"w": random(64, 64, seed=0, dtype=torch.float32) * scale}, lr=LR)
    distance = params["w"].detach().norm().item() / (LR * 0.2 * 8)
    # Close to sqrt(64), the norm of an orthogonal matrix: the polynomial leaves singular values below one.
    assert 6.0 < distance < 8.0


def test_clip_scales_what_the_state_sees() -> None:
    gradients = {"w": random(4, 4, seed=0), "b": random(4, seed=1)}
    _, optimizer = build(gradients, {"w": MATRIX, "b": VECTOR}, OptimConfig(momentum=0.9, betas=(0.8, 0.9)))
    optimizer.step({name: g.clone() for name, g in gradients.items()}, lr=LR, clip=0.25)
    state = optimizer.state_dict()
    torch.testing.assert_close(state["w/momentum"], 0.1 * 0.25 * gradients["w"])
    torch.testing.assert_close(state["b/exp_avg"], 0.2 * 0.25 * gradients["b"])


def test_bf16_parameters_have_fp32_masters() -> None:
    start = random(16, 16, seed=0, dtype=torch.bfloat16)
    params, optimizer = build({"w": start}, {"w": MATRIX}, OptimConfig(weight_decay=0.0, ns_dtype="fp32"))
    # Each step is far below half an ulp of the weights; the master adds them up.
    for _ in range(20):
        optimizer.step({"w": torch.ones(16, 16)}, lr=1e-4)
    master = optimizer.state_dict()["w/master"]
    assert master.dtype == torch.float32
    assert optimizer.state_dict()["w/momentum"].dtype == torch.float32
    assert (master - start.float()).abs().min() > 1e-5
    assert torch.equal(params["w"].detach(), master.bfloat16())
    assert params["w"].dtype == torch.bfloat16


def test_fp32_parameters_are_their_own_masters() -> None:
    _, optimizer = build({"w": torch.zeros(4, 4)}, {"w": MATRIX}, OptimConfig())
    assert set(optimizer.state_dict()) == {"w/momentum", "step"}


def test_state_exists_from_the_start_as_zeros() -> None:
    values = {"w": random(4, 4, seed=0, dtype=torch.bfloat16), "b": random(4, seed=1, dtype=torch.float32)}
    _, optimizer = build(values, {"w": MATRIX, "b": VECTOR}, OptimConfig())
    state = optimizer.state_dict()
    assert optimizer.state_names() == {
        "w/momentum": (torch.Size([4, 4]), torch.float32),
        "b/exp_avg": (torch.Size([4]), torch.float32),
        "b/exp_avg_sq": (torch.Size([4]), torch.float32),
        "w/master": (torch.Size([4, 4]), torch.float32),
        "step": (torch.Size([]), torch.int64),
    }
    assert torch.equal(state.pop("w/master"), values["w"].float())
    assert all(x.count_nonzero() == 0 for x in state.values())


def test_no_parameters_at_all() -> None:
    _, optimizer = build({}, {}, OptimConfig())
    optimizer.step({}, lr=LR, clip=0.5)
    assert {key: x.item() for key, x in optimizer.state_dict().items()} == {"step": 1}


class TestLoad:
    def make(self) -> ShardedOptimizer:
        values = {"w": random(4, 4, seed=0), "b": random(4, seed=1)}
        _, optimizer = build(values, {"w": MATRIX, "b": VECTOR}, OptimConfig())
        optimizer.step({name: value.clone() for name, value in values.items()}, lr=LR)
        return optimizer

    def copy(self, optimizer: ShardedOptimizer) -> dict[str, Tensor]:
        return {key: x.clone() for key, x in optimizer.state_dict().items()}

    def test_round_trip(self) -> None:
        saved = self.copy(self.make())
        values = {"w": torch.zeros(4, 4, dtype=torch.float64), "b": torch.zeros(4, dtype=torch.float64)}
        _, fresh = build(values, {"w": MATRIX, "b": VECTOR}, OptimConfig())
        fresh.load_state_dict(saved)
        loaded = fresh.state_dict()
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[key], saved[key]) for key in saved)
        assert fresh.steps == 1

    @pytest.mark.parametrize("key", ["w/momentum", "b/exp_avg", "b/exp_avg_sq", "step"])
    def test_a_missing_key_is_named_and_nothing_changes(self, key: str) -> None:
        optimizer = self.make()
        state = {name: torch.zeros_like(x) for name, x in self.copy(optimizer).items()}
        before = self.copy(optimizer)
        del state[key]
        with pytest.raises(ValueError, match=f"1 missing keys \\['{key}'\\]"):
            optimizer.load_state_dict(state)
        assert all(torch.equal(x, before[name]) for name, x in optimizer.state_dict().items())

    def test_an_extra_key_is_named(self) -> None:
        optimizer = self.make()
        with pytest.raises(ValueError, match=r"1 unexpected keys \['new/momentum'\]"):
            optimizer.load_state_dict(self.copy(optimizer) | {"new/momentum": torch.zeros(1)})

    @pytest.mark.parametrize(
        "wrong", [torch.zeros(4, 3, dtype=torch.float64), torch.zeros(4, 4)], ids=["shape", "dtype"]
    )
    def test_another_shape_or_dtype_is_named(self, wrong: Tensor) -> None:
        optimizer = self.make()
        with pytest.raises(ValueError, match=r"w/momentum: is torch.float.*must be torch.float64 \[4, 4\]"):
            optimizer.load_state_dict(self.copy(optimizer) | {"w/momentum": wrong})
