"""KDA: the recurrence against values computed elsewhere, the chunked form against the recurrence.

Outputs, final states and every gradient, in fp64 unless a test is about fp32 or bf16.
"""

import functools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import normalize

from model.kernels import kda_algebra
from model.kernels.kda_chunk import kda_chunk
from model.kernels.kda_plan import CHUNK, Plans
from model.kernels.kda_reference import kda_reference

ORACLES = Path(__file__).parents[2] / "oracles"
NAMES = ("q", "k", "v", "g", "beta", "initial_state")
CPU = torch.device("cpu")
Kernel = Callable[..., tuple[Tensor, Tensor]]
# What a K3 layer calls: the gate's bound is known.
BOUNDED = functools.partial(kda_chunk, gate_bound=-5.0)
FORMS = pytest.mark.parametrize("kernel", [kda_reference, kda_chunk], ids=["reference", "chunk"])


def draw(
    *,
    batch: int = 1,
    length: int,
    heads: int = 2,
    key: int = 8,
    value: int = 6,
    documents: int | None = None,
    gate: float = -5.0,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Inputs as a KDA layer makes them: unit q and k, log decays from 0 down to ``gate``."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    inputs = {
        "q": normalize(normal(batch, length, heads, key), dim=-1),
        "k": normalize(normal(batch, length, heads, key), dim=-1),
        "v": normal(batch, length, heads, value),
        "g": gate * torch.sigmoid(2 * normal(batch, length, heads, key) - 2),
        "beta": torch.sigmoid(normal(batch, length, heads)),
        "initial_state": normal(documents or batch, heads, key, value),
    }
    return {name: x.to(dtype) for name, x in inputs.items()}


def run(
    kernel: Kernel,
    inputs: dict[str, Tensor],
    *,
    cu_seqlens: Tensor | None = None,
    cotangents: tuple[Tensor, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Outputs, and gradients of <cotangents, outputs>, by name."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    o, state = kernel(
        *(leaves[name] for name in NAMES[:5]), initial_state=leaves["initial_state"], cu_seqlens=cu_seqlens
    )
    if cotangents is None:
        generator = torch.Generator().manual_seed(1)
        cotangents = (
            torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype),
            torch.randn(state.shape, generator=generator, dtype=torch.float64).to(state.dtype),
        )
    grads = torch.autograd.grad((o, state), tuple(leaves.values()), cotangents, materialize_grads=True)
    return {"o": o, "final_state": state} | {f"grad_{n}": grad for n, grad in zip(leaves, grads)}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], *, rtol: float = 1e-11) -> None:
    """Relative to the largest magnitude of each expected tensor (with the floor of unit-sized inputs)."""
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        got = found[name]
        assert got.shape == want.shape, name
        assert bool(got.isfinite().all()), f"{name} is not finite"
        if want.numel():
            error = (got.double() - want.double()).abs().max().item()
            assert error <= rtol * max(want.abs().max().item(), 1e-2), (name, error)


# --- values computed elsewhere ---


@FORMS
@pytest.mark.parametrize("case", range(6))
def test_oracle(kernel: Kernel, case: int) -> None:
    tensors = {
        name.removeprefix(f"{case}."): x
        for name, x in load_file(ORACLES / "kda.safetensors").items()
        if name.startswith(f"{case}.")
    }
    cotangents = tensors.pop("cotangent_o"), tensors.pop("cotangent_state")
    found = run(kernel, {name: tensors.pop(name) for name in NAMES}, cotangents=cotangents)
    assert_close(found, {name: tensors[name] for name in found}, rtol=1e-12)


@FORMS
@pytest.mark.parametrize("value_dtype", [torch.float32, torch.bfloat16], ids=["v-fp32", "v-bf16"])
def test_slow_decay_survives_bf16_inputs(kernel: Kernel, value_dtype: torch.dtype) -> None:
    """alpha = 0.99992 for 4096 tokens keeps 0.72058; in bf16 alpha would be 1 and nothing would fade."""
    length = 4097
    unit = torch.zeros(1, length, 1, 4, dtype=torch.bfloat16)
    unit[..., 0] = 1
    v = torch.ones(1, length, 1, 4, dtype=value_dtype)
    g = torch.full((1, length, 1, 4), math.log(0.99992))
    beta = torch.zeros(1, length, 1)
    beta[:, 0] = 1
    o, state = kernel(unit, unit, v, g, beta, scale=1.0)
    assert o.dtype == value_dtype
    assert state.dtype == torch.float32
    assert state[0, 0, 0, 0].item() == pytest.approx(0.99992**4096, rel=1e-4)
    # o itself is rounded to v's dtype: half a unit in the last place of bf16 is 2^-9.
    tolerance = 1e-4 if value_dtype == torch.float32 else 2**-8
    assert (o[0, 4096, 0, 0] / o[0, 0, 0, 0]).item() == pytest.approx(0.72058, rel=tolerance)


@FORMS
def test_without_writes_the_initial_states_gradient_is_a_decayed_sum(kernel: Kernel) -> None:
    """beta = 0: o_t = (alpha_1 ... alpha_t S_0)^T q_t, so dS_0 is known in closed form."""
    inputs = draw(length=70) | {"beta": torch.zeros(1, 70, 2, dtype=torch.float64)}
    grad_o = torch.randn(1, 70, 2, 6, dtype=torch.float64)
    grad_state = torch.randn(1, 2, 8, 6, dtype=torch.float64)
    found = run(kernel, inputs, cotangents=(grad_o, grad_state))
    decay = inputs["g"].cumsum(1).exp()
    expected = torch.einsum("bthk,bthk,bthv->bhkv", decay, inputs["q"] * 8**-0.5, grad_o)
    expected += decay[:, -1].unsqueeze(-1) * grad_state
    torch.testing.assert_close(found["grad_initial_state"], expected, rtol=1e-12, atol=1e-12)


# --- the chunked form against the recurrence ---


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 130])
def test_chunk_equals_reference(length: int) -> None:
    inputs = draw(batch=2, length=length, heads=3, key=8, value=5)
    assert_close(run(kda_chunk, inputs), run(kda_reference, inputs))


@pytest.mark.parametrize(("batch", "length"), [(3, 1100), (70, 40)], ids=["many-steps", "many-rows"])
def test_chunk_equals_reference_across_segments(batch: int, length: int) -> None:
    inputs = draw(batch=batch, length=length, heads=1, key=4, value=3)
    assert_close(run(kda_chunk, inputs), run(kda_reference, inputs))


@FORMS
def test_defaults_are_a_zero_state_and_the_root_of_the_key_dim(kernel: Kernel) -> None:
    inputs = draw(length=40)
    state = torch.zeros_like(inputs.pop("initial_state"))
    default = kernel(*inputs.values())
    explicit = kernel(*inputs.values(), scale=8**-0.5, initial_state=state)
    torch.testing.assert_close(default, explicit, rtol=0, atol=0)


def test_gradcheck() -> None:
    leaves = [x.requires_grad_() for x in draw(length=5, heads=1, key=3, value=2).values()]
    torch.autograd.gradcheck(lambda *x: kda_chunk(*x[:5], initial_state=x[5]), leaves)


@pytest.mark.parametrize("output", ["o", "final_state"])
def test_one_output_alone_may_be_differentiated(output: str) -> None:
    inputs = draw(length=37)
    grads = []
    for kernel in (kda_reference, kda_chunk):
        leaves = [x.clone().requires_grad_() for x in inputs.values()]
        o, state = kernel(*leaves[:5], initial_state=leaves[5])
        loss = (o if output == "o" else state).square().sum()
        # q does not reach the final state: autograd says None, the chunked form zero.
        grads.append(torch.autograd.grad(loss, leaves, allow_unused=True))
    for want, got in zip(*grads):
        torch.testing.assert_close(got, torch.zeros_like(got) if want is None else want)


# --- documents ---


@FORMS
@pytest.mark.parametrize(
    "offsets",
    [[0, 5, 12], [0, 0, 12], [0, 5, 5, 12], [0, 1, 2, 66], [0, 64, 128], [0, 3, 133, 133]],
    ids=str,
)
def test_packed_equals_separate(kernel: Kernel, offsets: list[int]) -> None:
    count = len(offsets) - 1
    inputs = draw(length=offsets[-1], documents=count)
    cotangents = (
        torch.randn_like(inputs["v"]),
        torch.randn(count, 2, 8, 6, dtype=torch.float64),
    )
    packed = run(kernel, inputs, cu_seqlens=torch.tensor(offsets), cotangents=cotangents)
    for n, (start, stop) in enumerate(zip(offsets, offsets[1:])):
        one = {name: inputs[name][:, start:stop] for name in NAMES[:5]}
        one["initial_state"] = inputs["initial_state"][n : n + 1]
        alone = run(kda_reference, one, cotangents=(cotangents[0][:, start:stop], cotangents[1][n : n + 1]))
        part = {name: x[n : n + 1] if name.endswith("state") else x[:, start:stop] for name, x in packed.items()}
        assert_close(part, alone)
        if start == stop:
            assert torch.equal(part["final_state"], one["initial_state"])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=6))
def test_any_packing_equals_the_reference(lengths: list[int]) -> None:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    inputs = draw(length=sum(lengths), heads=1, key=4, value=3, documents=len(lengths))
    found = run(kda_chunk, inputs, cu_seqlens=offsets)
    assert_close(found, run(kda_reference, inputs, cu_seqlens=offsets))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("kernel", "gate"), [(kda_chunk, -300.0), (BOUNDED, -5.0)], ids=["chunk", "bounded"])
def test_document_two_does_not_see_document_one(kernel: Kernel, gate: float, dtype: torch.dtype) -> None:
    offsets = torch.tensor([0, 75, 150])
    inputs = draw(length=150, documents=2, dtype=dtype)
    other = draw(length=150, documents=2, dtype=dtype, gate=gate, seed=1)
    mixed = {
        name: torch.cat([other[name][:, :75], x[:, 75:]], 1) if x.dim() > 2 and x.shape[1] == 150 else x
        for name, x in inputs.items()
    }
    before = run(kernel, inputs, cu_seqlens=offsets)
    after = run(kernel, mixed, cu_seqlens=offsets)
    assert not torch.equal(before["o"][:, :75], after["o"][:, :75])
    assert torch.equal(before["o"][:, 75:], after["o"][:, 75:])
    assert torch.equal(before["final_state"][1], after["final_state"][1])
    for name in NAMES[:5]:
        assert torch.equal(before[f"grad_{name}"][:, 75:], after[f"grad_{name}"][:, 75:]), name


@FORMS
@pytest.mark.parametrize("cut", [37, 64, 96])
def test_two_runs_through_the_state_are_one_run(kernel: Kernel, cut: int) -> None:
    def chained(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, initial_state: Tensor, cu_seqlens: None
    ) -> tuple[Tensor, Tensor]:
        first = (x[:, :cut] for x in (q, k, v, g, beta))
        second = (x[:, cut:] for x in (q, k, v, g, beta))
        o_first, state = kernel(*first, initial_state=initial_state, cu_seqlens=cu_seqlens)
        o_second, state = kernel(*second, initial_state=state, cu_seqlens=cu_seqlens)
        return torch.cat([o_first, o_second], 1), state

    inputs = draw(batch=2, length=130)
    assert_close(run(chained, inputs), run(kernel, inputs))


@pytest.mark.parametrize("offsets", [None, [0, 45, 100]], ids=["rows", "packed"])
def test_memory_around_the_inputs_is_not_read(offsets: list[int] | None) -> None:
    cu_seqlens = None if offsets is None else torch.tensor(offsets)
    inputs = draw(batch=1 if offsets else 2, length=100, documents=2)
    expected = run(kda_chunk, inputs, cu_seqlens=cu_seqlens)
    poisoned = {name: in_nan(x).requires_grad_() for name, x in inputs.items()}
    o, state = kda_chunk(
        *(poisoned[name] for name in NAMES[:5]),
        initial_state=poisoned["initial_state"],
        cu_seqlens=cu_seqlens,
    )
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in (o, state)]
    grads = torch.autograd.grad((o, state), tuple(poisoned.values()), [in_nan(x) for x in cotangents])
    found = {"o": o, "final_state": state} | {f"grad_{n}": grad for n, grad in zip(poisoned, grads)}
    assert_close(found, expected, rtol=0)


def in_nan(x: Tensor) -> Tensor:
    """A copy of ``x`` that is a slice of a larger buffer of NaN."""
    buffer = torch.full([size + 14 for size in x.shape], torch.nan, dtype=x.dtype)
    inner = buffer[tuple(slice(7, 7 + size) for size in x.shape)]
    return inner.copy_(x)


# --- causality ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("kernel", "gate"),
    [(kda_chunk, -5.0), (kda_chunk, -400.0), (BOUNDED, -5.0)],
    ids=["bounded", "unbounded", "known-bound"],
)
def test_outputs_are_causal_to_the_bit(kernel: Kernel, gate: float, dtype: torch.dtype) -> None:
    length = 150
    inputs = draw(length=length, key=16, value=16, dtype=dtype)
    other = draw(length=length, key=16, value=16, dtype=dtype, gate=gate, seed=1)
    expected, _ = kernel(*(inputs[name] for name in NAMES[:5]))
    for cut in [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 127, 128, 129, 149]:
        changed = [torch.cat([inputs[name][:, :cut], other[name][:, cut:]], 1) for name in NAMES[:5]]
        o, _ = kernel(*changed)
        assert torch.equal(o[:, :cut], expected[:, :cut]), cut
        assert not torch.equal(o[:, cut:], expected[:, cut:]), cut


# --- extreme gates and keys ---


def at_gate(gate: float | Tensor, length: int, dtype: torch.dtype) -> dict[str, Tensor]:
    inputs = draw(length=length, key=16, value=16)
    inputs["g"] = torch.zeros_like(inputs["g"]) + gate
    return {name: x.to(dtype) for name, x in inputs.items()}


@pytest.mark.parametrize("gate", [-5.0, -50.0, -1000.0, -math.inf, -1e-6, 0.0])
def test_any_gate_at_every_token(gate: float) -> None:
    expected = run(kda_reference, at_gate(gate, 512, torch.float64))
    assert_close(run(kda_chunk, at_gate(gate, 512, torch.float64)), expected)
    # Without decay the sums are long; fp32 against fp64 then needs their length in the bound.
    assert_close(run(kda_chunk, at_gate(gate, 512, torch.float32)), expected, rtol=2e-5)


@pytest.mark.parametrize("reset", [-40.0, -1e4, -1e30, -math.inf])
def test_strong_resets_leave_the_small_decays_around_them_exact(reset: float) -> None:
    """A chunk-wide sum of g would lose the small gates beside a large one in fp32."""
    inputs = draw(length=200, key=16, value=16, gate=-0.05)
    inputs["g"][:, [3, 4, 40, 63, 64, 101, 160]] = reset
    narrow = {name: x.float() for name, x in inputs.items()}
    wide = {name: x.double() for name, x in narrow.items()}
    expected = run(kda_reference, wide)
    assert_close(run(kda_chunk, wide), expected)
    assert_close(run(kda_chunk, narrow), expected, rtol=1e-5)


@pytest.mark.parametrize("gate", [0.0, -1e-3])
def test_equal_keys_with_full_steps(gate: float) -> None:
    """The triangular system is all ones: a power series for its inverse would cancel 2^C-sized terms."""
    inputs = at_gate(gate, 256, torch.float64)
    inputs["k"] = inputs["k"][:, :1].expand_as(inputs["k"]).contiguous()
    inputs["beta"] = torch.ones_like(inputs["beta"])
    expected = run(kda_reference, inputs)
    assert_close(run(kda_chunk, inputs), expected)
    narrow = {name: x.float() for name, x in inputs.items()}
    assert_close(run(kda_chunk, narrow), expected, rtol=2e-5)


# --- a known bound of the gate ---


@pytest.mark.parametrize("bound", [-0.1, -1.0, -5.0, -40.0, -1000.0])
@pytest.mark.parametrize("offsets", [[0, 130], [0, 5, 5, 12, 75, 130]], ids=["one", "packed"])
def test_a_known_bound_changes_rounding_only(bound: float, offsets: list[int]) -> None:
    """Tiles of 32, 32, 16, 2 and 1 tokens."""
    inputs = draw(length=130, documents=len(offsets) - 1, gate=bound)
    cu_seqlens = torch.tensor(offsets)
    expected = run(kda_reference, inputs, cu_seqlens=cu_seqlens)
    assert_close(run(functools.partial(kda_chunk, gate_bound=bound), inputs, cu_seqlens=cu_seqlens), expected)


@pytest.mark.parametrize("scale", [1e12, 1.0, 1e-12], ids="gradients-of-{:g}".format)
@pytest.mark.parametrize("pattern", ["always", "burst-then-none", "none"])
def test_a_known_bound_is_exact_in_fp32_at_the_bound(pattern: str, scale: float) -> None:
    """1/Gamma is largest after a tile at the bound; what a decay of nearly 1 then carries must not be lost."""
    inputs = at_gate(-5.0, 256, torch.float32)
    if pattern != "always":
        inputs["g"][:] = -1e-6
    if pattern == "burst-then-none":
        inputs["g"][:, torch.arange(256) % 16 < 14] = -5.0
    wide = {name: x.double() for name, x in inputs.items()}
    generator = torch.Generator().manual_seed(2)
    cotangents = [torch.randn(shape, generator=generator) * scale for shape in ((1, 256, 2, 16), (1, 2, 16, 16))]
    found = run(BOUNDED, inputs, cotangents=(cotangents[0], cotangents[1]))
    expected = run(kda_reference, wide, cotangents=(cotangents[0].double(), cotangents[1].double()))
    for results in (found, expected):
        for name in NAMES:
            results[f"grad_{name}"] = results[f"grad_{name}"].double() / scale
    # Where every decay is e^-5, what g gets is a small difference of large sums.
    assert_close(found, expected, rtol=2e-5 if pattern == "always" else 2e-6)


def test_large_queries_and_keys_at_the_bound_stay_finite() -> None:
    """Above a tile's diagonal, where nothing is kept, e^75 times a product of 1e7 is beyond fp32."""
    inputs = at_gate(-5.0, 64, torch.float32)
    for name in "qk":
        inputs[name] *= 3e3
    inputs["beta"][:] *= 1e-7  # so that the delta rule itself stays tame
    expected = run(kda_reference, {name: x.double() for name, x in inputs.items()})
    assert_close(run(BOUNDED, inputs), expected, rtol=2e-5)


def test_a_plan_made_for_inference_serves_training() -> None:
    """The constants are kept from one call to the next, and the plan of the documents where the caller keeps it."""
    inputs = draw(length=77)
    plans = Plans()
    kda_algebra._constants.cache_clear()
    kernel = functools.partial(BOUNDED, plans=plans)
    with torch.inference_mode():
        kernel(*(inputs[name] for name in NAMES[:5]))
    assert_close(run(kernel, inputs), run(kda_reference, inputs))


def test_a_plan_is_made_once_for_equal_documents_and_never_shared_by_others() -> None:
    plans = Plans()
    first = plans.get((0, 40, 77), heads=2, device=CPU)
    assert plans.get((0, 40, 77), heads=2, device=CPU) is first
    assert plans.get((0, 40, 77), heads=3, device=CPU) is not first
    assert plans.get((0, 41, 77), heads=2, device=CPU) is not first
    assert plans.get((0, 40, 77), heads=2, device=torch.device("meta")) is not first
    assert Plans().get((0, 40, 77), heads=2, device=CPU) is not first


@pytest.mark.parametrize("bound", [0.1, -math.inf, math.nan])
def test_bad_bound(bound: float) -> None:
    inputs = draw(length=12)
    with pytest.raises(ValueError, match="gate_bound"):
        kda_chunk(*(inputs[name] for name in NAMES[:5]), gate_bound=bound)


def test_a_gate_below_its_bound() -> None:
    inputs = draw(length=12)
    inputs["g"][0, 7, 1, 3] = -5.1
    with pytest.raises(ValueError, match=r"g: -5\.1 is below gate_bound=-5\.0"):
        kda_chunk(*(inputs[name] for name in NAMES[:5]), gate_bound=-5.0)


# --- dtypes and memory ---


def test_states_need_not_be_contiguous() -> None:
    inputs = draw(batch=2, length=40)
    inputs["initial_state"] = inputs["initial_state"].transpose(0, 1).contiguous().transpose(0, 1)
    cotangents = torch.ones_like(inputs["v"]), torch.randn(2, 2, 6, 8, dtype=torch.float64).transpose(2, 3)
    assert_close(run(kda_chunk, inputs, cotangents=cotangents), run(kda_reference, inputs, cotangents=cotangents))


@FORMS
def test_bf16_inputs(kernel: Kernel) -> None:
    inputs = draw(length=100, key=16, value=16)
    narrow = {name: x.bfloat16() if name in "qkv" else x.float() for name, x in inputs.items()}
    wide = {name: x.double() for name, x in narrow.items()}
    found, expected = run(kernel, narrow), run(kda_reference, wide)
    for name in NAMES:
        assert found[f"grad_{name}"].dtype == narrow[name].dtype
    rounded = {"o", "grad_q", "grad_k", "grad_v"}
    assert_close({n: found[n] for n in rounded}, {n: expected[n] for n in rounded}, rtol=2**-8)
    exact = found.keys() - rounded
    assert_close({n: found[n] for n in exact}, {n: expected[n] for n in exact}, rtol=2e-2)


@FORMS
def test_autocast_does_not_reach_the_recurrence(kernel: Kernel) -> None:
    inputs = draw(length=100, dtype=torch.float32)
    expected = run(kernel, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        found = run(kernel, inputs)
    for name in ("o", "final_state"):
        assert torch.equal(found[name], expected[name]), name


def test_backward_keeps_inputs_and_chunks_but_not_a_state_per_token() -> None:
    kept: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    length, heads, key, value = 1600, 2, 64, 64
    inputs = draw(length=length, heads=heads, key=key, value=value, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in inputs.values()]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        kda_chunk(*leaves[:5], initial_state=leaves[5])
    found = sum(x.numel() for x in kept)
    per_token = 3 * key + value + 1
    # A chunk's starting state; its scores of q and k and its inverse; its errors.
    per_token += key * value // CHUNK + 3 * CHUNK + value
    assert found <= length * heads * per_token
    assert found < length * heads * key * value * 0.15


# --- what a caller can get wrong ---


@FORMS
@pytest.mark.parametrize(
    "offsets",
    [[0, 5], [1, 12], [0, 7, 5, 12], [12], [[0, 12]], [0.0, 12.0]],
    ids=["end", "start", "falling", "short", "2-D", "float"],
)
def test_bad_offsets(kernel: Kernel, offsets: list[int]) -> None:
    inputs = draw(length=12)
    with pytest.raises(ValueError, match="cu_seqlens"):
        kernel(*(inputs[name] for name in NAMES[:5]), cu_seqlens=torch.tensor(offsets))


@FORMS
def test_packing_needs_one_row(kernel: Kernel) -> None:
    inputs = draw(batch=2, length=12)
    with pytest.raises(ValueError, match="one row"):
        kernel(*(inputs[name] for name in NAMES[:5]), cu_seqlens=torch.tensor([0, 12]))


@FORMS
@pytest.mark.parametrize("name", NAMES[1:])
def test_bad_shapes(kernel: Kernel, name: str) -> None:
    inputs = draw(length=12)
    inputs[name] = inputs[name][:, :1]
    with pytest.raises(ValueError, match=f"{name}.*shape"):
        kernel(*(inputs[n] for n in NAMES[:5]), initial_state=inputs["initial_state"])
