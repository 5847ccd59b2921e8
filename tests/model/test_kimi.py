"""The whole model: documents apart, decoding equal to the forward pass, layers in ranges, statistics."""

import pytest
import torch
from torch import Tensor

from model.attn_residual import ResidualState
from model.config import ModelConfig
from model.documents import Documents
from model.generate import Decoder, generate
from model.kimi import KimiModel
from model.params import initialize
from model.precision import set_precision
from model.stats import ForwardStats
from tests.model.tiny import FAMILIES, tiny_config, tiny_model, tokens


def gradients(model: KimiModel) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_equal_separate_ones_with_gradients(family: str) -> None:
    model = tiny_model(family)
    ids = tokens(1, 60)
    bounds = [0, 20, 21, 60]
    weight = torch.randn(1, 60, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    packed = model(ids, torch.tensor(bounds))
    (packed * weight).sum().backward()
    packed_grads = gradients(model)
    model.zero_grad()
    apart = [model(ids[:, a:b]) for a, b in zip(bounds, bounds[1:])]
    (torch.cat(apart, dim=1) * weight).sum().backward()
    torch.testing.assert_close(packed, torch.cat(apart, dim=1), rtol=1e-11, atol=1e-11)
    for name, grad in gradients(model).items():
        torch.testing.assert_close(packed_grads[name], grad, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_changing_one_document_leaves_the_other_bitwise_unchanged(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, dtype=dtype)
    bounds = torch.tensor([0, 70, 150])
    with torch.no_grad():
        for seed in range(8):
            ids = tokens(1, 150, seed=seed)
            before = model(ids, bounds)
            ids[:, :70] = tokens(1, 70, seed=100 + seed)
            after = model(ids, bounds)
            assert torch.equal(before[:, 70:], after[:, 70:])
            assert not torch.equal(before[:, :70], after[:, :70])


@pytest.mark.parametrize("family", FAMILIES)
def test_future_tokens_change_nothing_before_them(family: str) -> None:
    model = tiny_model(family)
    ids = tokens(2, 40)
    with torch.no_grad():
        before = model(ids)
        ids[:, 25:] = tokens(2, 15, seed=9)
        after = model(ids)
    torch.testing.assert_close(before[:, :25], after[:, :25], rtol=1e-12, atol=1e-12)


def test_a_batch_row_equals_the_row_alone() -> None:
    model = tiny_model()
    ids = tokens(3, 33)
    with torch.no_grad():
        torch.testing.assert_close(model(ids)[1:2], model(ids[1:2]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_token_by_token_equals_the_forward_pass(family: str) -> None:
    model = tiny_model(family)
    ids = tokens(2, 30)
    with torch.no_grad():
        full = model(ids)
        decoder = Decoder(model, batch=2)
        steps = torch.cat([decoder.feed(ids[:, t : t + 1]) for t in range(30)], dim=1)
        torch.testing.assert_close(steps, full, rtol=1e-11, atol=1e-11)
        decoder = Decoder(model, batch=2)
        pieces = torch.cat([decoder.feed(part) for part in ids.split([2, 17, 1, 10], dim=1)], dim=1)
        torch.testing.assert_close(pieces, full, rtol=1e-11, atol=1e-11)


def test_greedy_generation_is_the_argmax_of_the_forward_pass() -> None:
    model = tiny_model()
    prompt = tokens(1, 5)[0]
    out = list(generate(model, prompt, tokens=12, temperature=0.0, seed=0))
    ids = prompt.tolist()
    for token in out:
        with torch.no_grad():
            assert token == int(model(torch.tensor([ids]))[0, -1].argmax())
        ids.append(token)


def test_sampling_repeats_by_seed_and_leaves_the_global_stream_alone() -> None:
    model, prompt = tiny_model(), tokens(1, 3)[0]
    state = torch.get_rng_state()
    first = list(generate(model, prompt, tokens=10, temperature=1.0, seed=7))
    assert first == list(generate(model, prompt, tokens=10, temperature=1.0, seed=7))
    assert first != list(generate(model, prompt, tokens=10, temperature=1.0, seed=8))
    assert torch.equal(state, torch.get_rng_state())


def test_generation_refuses_an_empty_prompt() -> None:
    with pytest.raises(ValueError, match="prompt: must hold at least one token"):
        next(generate(tiny_model(), torch.empty(0, dtype=torch.int64), tokens=1, temperature=1.0, seed=0))


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_run_in_ranges_equal_all_at_once(family: str) -> None:
    model = tiny_model(family)
    ids = tokens(1, 20)
    documents = Documents.of(1, 20, None, ids.device)
    with torch.no_grad():
        whole = model.run_layers(ResidualState(model.embed(ids)), 0, len(model.layers), documents=documents)
        state = ResidualState(model.embed(ids))
        for first, last in [(0, 2), (2, 2), (2, len(model.layers))]:
            state = model.run_layers(state, first, last, documents=documents)
    assert torch.equal(whole.prefix, state.prefix)
    assert len(whole.bank) == len(state.bank)


def test_statistics_count_each_forward_once_and_only_when_asked() -> None:
    model = tiny_model()
    ids = tokens(2, 30)
    stats = ForwardStats(model.config, device=ids.device, max_logits=True)
    model(ids, stats=stats)
    model(ids)
    assert stats.load.sum(dim=1).tolist() == [60 * 2] * 4
    assert stats.histogram.sum(dim=(1, 2)).tolist() == [60 * 8] * 4
    assert bool(torch.isfinite(stats.max_logit).all())
    model(ids, stats=stats)
    assert stats.load.sum(dim=1).tolist() == [2 * 60 * 2] * 4


def test_padding_tokens_do_not_count() -> None:
    model = tiny_model()
    ids = tokens(1, 30)
    stats, short = (ForwardStats(model.config, device=ids.device, max_logits=False) for _ in range(2))
    stats.valid_BT = torch.arange(30).unsqueeze(0) < 22
    model(ids, stats=stats)
    model(ids[:, :22], stats=short)
    assert torch.equal(stats.load, short.load)
    assert torch.equal(stats.histogram, short.histogram)


def test_max_logit_is_the_largest_of_the_documents_attention_logits() -> None:
    model = tiny_model("k2")
    ids, bounds = tokens(1, 40), torch.tensor([0, 13, 40])
    stats, apart = (ForwardStats(model.config, device=ids.device, max_logits=True) for _ in range(2))
    model(ids, bounds, stats=stats)
    for a, b in [(0, 13), (13, 40)]:
        model(ids[:, a:b], stats=apart)
    torch.testing.assert_close(stats.max_logit, apart.max_logit)


def test_first_layer_reads_the_embedding_and_later_ones_the_uniform_mean_at_init() -> None:
    """Pseudo-queries start at zero, so every mix is the plain mean of its sources."""
    model = KimiModel(tiny_config("k3_full"))
    initialize(model, seed=0, std=0.2)
    set_precision(model, torch.float64)
    seen = []
    for layer in model.layers:
        layer.ffn_mix.register_forward_hook(lambda mod, args, out: seen.append((args[0], out)))
    with torch.no_grad():
        model(tokens(1, 9))
    for state, mixed in seen:
        expected = torch.stack([*state.bank, state.prefix]).mean(dim=0)
        torch.testing.assert_close(mixed, expected, rtol=1e-12, atol=1e-12)


def test_initialisation_depends_on_seed_and_name_alone() -> None:
    a, b = KimiModel(tiny_config()), KimiModel(tiny_config())
    initialize(a, seed=5, std=0.02)
    with torch.no_grad():
        torch.randn(7)
    initialize(b, seed=5, std=0.02)
    for (name, x), (_, y) in zip(a.named_parameters(), b.named_parameters()):
        assert torch.equal(x, y), name
    deeper = tiny_config()
    deeper.layers = "KKKM*2"
    c = KimiModel(deeper)
    initialize(c, seed=5, std=0.02)
    for name in ("embed.weight", "layers.1.mixer.q.weight", "head.weight"):
        assert torch.equal(a.get_parameter(name), c.get_parameter(name))


@pytest.mark.parametrize(
    ("bounds", "rows", "message"),
    [
        ([0, 5, 9], 1, "must rise from 0 to the number of tokens, 10"),
        ([1, 10], 1, "must rise from 0"),
        ([0, 7, 5, 10], 1, "must rise from 0"),
        ([0, 5, 10], 2, "packed documents need one row"),
    ],
    ids=["short", "late", "falling", "two-rows"],
)
def test_malformed_boundaries_are_refused(bounds: list[int], rows: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_model()(tokens(rows, 10), torch.tensor(bounds))


def test_empty_documents_are_dropped() -> None:
    model, ids = tiny_model(), tokens(1, 12)
    with torch.no_grad():
        assert torch.equal(model(ids, torch.tensor([0, 5, 5, 12])), model(ids, torch.tensor([0, 5, 12])))


def test_bf16_policy_keeps_the_fp32_tensors() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    kept = {
        name.rsplit(".", 2)[-2] + "." + name.rsplit(".", 1)[-1]
        for name, p in model.named_parameters()
        if p.dtype == torch.float32
    }
    assert kept == {"decay.A_log", "decay.dt_bias", "q_conv.weight", "k_conv.weight", "v_conv.weight", "norm.weight"}
    wide = [name for name, p in model.named_parameters() if p.dtype == torch.float32 and name.endswith(".norm.weight")]
    assert all(name.endswith("mixer.norm.weight") for name in wide)
    assert all(buffer.dtype == torch.float32 for buffer in model.buffers())


def test_bf16_model_errs_like_its_rounded_weights() -> None:
    """bf16 compute may add about as much error as rounding the weights does, not an order more."""
    # Dense throughout: a rounded score may choose another expert, which is no small difference.
    config = tiny_config()
    config.dense_layers = config.num_layers
    exact, narrow, rounded = tiny_model(config), tiny_model(config, dtype=torch.bfloat16), tiny_model(config)
    ids = tokens(1, 64)
    with torch.no_grad():
        for wide, short in zip(rounded.parameters(), narrow.parameters()):
            wide.copy_(short)
        compute_error, weight_error = ((model(ids).double() - exact(ids)).norm() for model in (narrow, rounded))
    assert 0 < compute_error < 4 * weight_error


@pytest.mark.parametrize("name", ["kimi_k3"])
def test_default_config_is_the_released_size(name: str) -> None:
    total, active = ModelConfig().count_parameters()
    assert f"{total / 1e12:.4f}" == "2.7795"
    assert f"{active / 1e9:.2f}" == "104.19"


def test_a_tied_head_is_the_embedding_and_both_uses_give_it_gradient() -> None:
    config = tiny_config()
    config.tie_embeddings = True
    tied, plain = tiny_model(config), tiny_model(tiny_config())
    names = {name for name, _ in plain.named_parameters()}
    assert {name for name, _ in tied.named_parameters()} == names - {"head.weight"}
    assert config.count_parameters()[0] == sum(p.numel() for p in tied.parameters())
    with torch.no_grad():
        for name, param in plain.named_parameters():
            param.copy_(tied.get_parameter(name))
    ids = tokens(1, 12)
    gradients = []
    for model in (tied, plain):
        logits = model(ids)
        torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
        gradients.append({name: param.grad for name, param in model.named_parameters()})
    for name, gradient in gradients[0].items():
        expected = gradients[1][name]
        expected = expected + gradients[1]["head.weight"] if name == "embed.weight" else expected
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14, msg=name)
