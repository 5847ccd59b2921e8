"""Tensor and sequence parallel against one rank: families of models, options of the optimizer, the loss, decoding.

Other axes beside it are in test_meshes.py, checkpoints across meshes in test_checkpoint_grid.py.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from data.loader import Microbatch
from model.config import ModelConfig
from model.generate import Decoder, generate
from model.kimi import KimiModel
from model.loss import IGNORE_INDEX, chunked_cross_entropy
from model.products import DENSE
from optim.groups import OptimConfig
from parallel.config import ParallelConfig
from parallel.mesh import Axis, Mesh, make_mesh
from parallel.pipeline.runtime import Pipeline
from parallel.recompute import RecomputeConfig
from parallel.sharding import parameter_specs
from parallel.tensor import head_loss, whole_sequence
from tests.dist.parity import Case, check_parity, run_alone, run_on_mesh
from tests.dist.ranks import RankError, RankPool
from tests.dist.test_expert import OPTIM, make_case, routed
from tests.model.tiny import tiny_config, tiny_model, tokens
from train.build import build_model
from train.evaluate import sample_text, validation_loss

CPU = torch.device("cpu")
MESHES = {
    "tp2": ParallelConfig(tp=2),
    "tp4": ParallelConfig(tp=4),
    "tp2-dp2": ParallelConfig(tp=2, dp=2),
    "tp2-dp2-zero2": ParallelConfig(tp=2, dp=2, zero=2),
    "tp2-ep2": ParallelConfig(tp=2, dp=2, ep=2),
    "tp2-cp2": ParallelConfig(tp=2, cp=2),
}


def ranks_of(mesh: str) -> int:
    return 2 if mesh == "tp2" else 4


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, RankPool]]:
    with RankPool(2) as two, RankPool(4) as four:
        yield {2: two, 4: four}


def pair(heads: int = 4) -> ModelConfig:
    """One KDA layer with a dense feed-forward and one MLA layer with experts; heads for four ranks."""
    config = tiny_config()
    config.layers, config.residual_block = "KM", 2
    config.kda.heads = config.mla.heads = heads
    return config


@functools.cache
def model_of(name: str) -> KimiModel:
    if name == "pair":
        return tiny_model(pair())
    if name == "padded":
        # The padding row is on the last rank, and has ids around it.
        return tiny_model(dataclasses.replace(pair(), padding_id=70))
    return tiny_model(name)


@functools.cache
def case_of(name: str, steps: int) -> Case:
    return make_case(model_of(name), steps=steps)


@functools.cache
def alone(name: str, steps: int) -> object:
    return run_alone(case_of(name, steps))


@pytest.mark.parametrize("family", ["k3_full", "linear", "k2", "padded"])
def test_every_family_equals_one_rank(pools: dict[int, RankPool], family: str) -> None:
    check_parity(run_on_mesh(pools[2], case_of(family, 1), MESHES["tp2"]), alone(family, 1))


# With k3's two heads, a tp rank holds one that cp cannot share: attention takes its gather form.
@pytest.mark.parametrize("mesh", ["tp2-dp2-zero2", "tp2-cp2"])
def test_two_heads_equal_one_rank(pools: dict[int, RankPool], mesh: str) -> None:
    check_parity(run_on_mesh(pools[4], case_of("k3", 1), MESHES[mesh]), alone("k3", 1))


def test_two_steps_on_four_ranks_equal_one_rank(pools: dict[int, RankPool]) -> None:
    # Newton-Schulz multiplies what rounding leaves of the first step's difference by up to 3.4445^5.
    check_parity(run_on_mesh(pools[4], case_of("pair", 2), MESHES["tp4"]), alone("pair", 2), tolerance=1e-9)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("tp4", {"per_head": False}),
        ("tp2-dp2", {"output_per_head": True}),
        ("tp4", {"qk_clip": 0.05}),
        ("tp2-dp2", {"qk_clip": 0.05}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_optimizer_options(pools: dict[int, RankPool], mesh: str, options: dict[str, float]) -> None:
    case = dataclasses.replace(case_of("pair", 1), optim=dataclasses.replace(OPTIM, **options))
    expected = run_alone(case)
    usual = alone("pair", 1)
    assert any(not torch.equal(usual.updates[name], x) for name, x in expected.updates.items())
    check_parity(run_on_mesh(pools[4], case, MESHES[mesh]), expected)


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_recomputed_layers(pools: dict[int, RankPool], policy: str) -> None:
    case = dataclasses.replace(case_of("pair", 1), recompute=RecomputeConfig(policy=policy))
    check_parity(run_on_mesh(pools[4], case, MESHES["tp2-ep2"]), alone("pair", 1))


@pytest.mark.parametrize("kind", ["one expert pair", "ties"])
def test_all_tokens_to_the_same_experts(pools: dict[int, RankPool], kind: str) -> None:
    case = make_case(routed(kind), steps=1)
    check_parity(run_on_mesh(pools[4], case, MESHES["tp2-ep2"]), run_alone(case))


def test_several_rows(pools: dict[int, RankPool]) -> None:
    """Rows of one document each, every one of them cut; one row has no labels."""
    labels = tokens(3, 8, seed=1)
    labels[1] = IGNORE_INDEX
    batch = Microbatch(input_ids=tokens(3, 8), labels=labels, cu_seqlens=None, sample_ids=torch.zeros(3, 3).numpy())
    case = dataclasses.replace(case_of("pair", 1), steps=((batch,),))
    for mesh in ("tp2", "tp4"):
        check_parity(run_on_mesh(pools[ranks_of(mesh)], case, MESHES[mesh]), run_alone(case))


def test_bf16_differs_from_the_truth_as_one_rank_does(pools: dict[int, RankPool]) -> None:
    """In the median of nine models: near ties send single tokens to other experts, a tenth of a tiny model's norm."""
    found, expected = [], []
    for seed in range(9):
        exact = make_case(tiny_model(pair(), seed=seed), steps=2)
        case = dataclasses.replace(exact, dtype=torch.bfloat16, optim=OptimConfig(ns_dtype="bf16"))
        truth = run_alone(exact)
        for errors, outcome in ((found, run_on_mesh(pools[4], case, MESHES["tp2-ep2"])), (expected, run_alone(case))):
            pairs = zip([*outcome.losses, *outcome.norms], [*truth.losses, *truth.norms], strict=True)
            errors.append([abs(number / true - 1) for number, true in pairs])
    # Losses and norms before and after an update in bf16, Newton-Schulz too.
    for of_mesh, of_one in zip(zip(*found), zip(*expected), strict=True):
        assert statistics.median(of_mesh) <= 1.5 * statistics.median(of_one)


def test_the_optimizer_moves_missing_parts_alone(pools: dict[int, RankPool]) -> None:
    """Of each cut matrix without heads, (n - 1) / n of its elements there and back, and nothing of the others."""
    config = pair()
    dim, inner, latent = config.hidden_dim, config.moe.expert_dim, config.moe.latent_dim
    width = config.kda.heads * config.kda.head_dim + config.mla.heads * config.mla.value_dim
    elements = width * dim + 3 * dim * config.dense_dim + 3 * dim * inner + config.moe.experts * 3 * latent * inner
    for mesh, n in (("tp2", 2), ("tp4", 4)):
        # Buckets large enough for all of them in one round.
        case = dataclasses.replace(case_of("pair", 1), optim=dataclasses.replace(OPTIM, bucket_mb=1.0))
        found = run_on_mesh(pools[n], case, MESHES[mesh])
        assert found.traffic["tp all_to_all"].sent == 2 * elements * 8 * (n - 1) // n
        assert found.traffic["tp all_to_all"].calls == 2 * n


# --- the loss ---


def loss_inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [2, 12, 8], head [40, 8], labels; unlabelled tokens, and every rank's edges."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2, 12, 8, generator=g), torch.randn(40, 8, generator=g)
    labels = torch.randint(0, 40, (2, 12), generator=g)
    labels[0, :6] = torch.tensor([0, 9, 10, 20, 30, 39])
    labels[1, 3:8] = IGNORE_INDEX
    # Far from zero, so that a normaliser without its largest logit would overflow.
    return (hidden * 100).to(dtype), weight.to(dtype), labels


def loss_on_rank(dtype: torch.dtype, chunk: int, poison: float | None) -> list[Tensor]:
    axis = make_mesh(ParallelConfig(tp=dist.get_world_size()), dist.get_world_size()).tp
    hidden, weight, labels = loss_inputs(dtype)
    if poison is not None:
        hidden[1, 5] = hidden[1, 7, 2] = poison
    hidden = hidden.chunk(axis.size, dim=1)[axis.rank].clone().requires_grad_()
    weight = weight.chunk(axis.size)[axis.rank].clone().requires_grad_()
    loss = head_loss(hidden, weight, labels, axis=axis, chunk=chunk, product=DENSE)
    (loss / 7).backward()
    with torch.no_grad():
        assert torch.equal(head_loss(hidden, weight, labels, axis=axis, chunk=chunk, product=DENSE), loss)
    return [loss.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize("chunk", [5, 24, 100])
@pytest.mark.parametrize("size", [2, 4])
def test_loss_over_a_cut_vocabulary(pools: dict[int, RankPool], size: int, chunk: int) -> None:
    hidden, weight, labels = loss_inputs(torch.float64)
    hidden.requires_grad_()
    weight.requires_grad_()
    expected = chunked_cross_entropy(hidden, weight, labels, chunk=chunk)
    (expected / 7).backward()
    losses, hiddens, weights = zip(*pools[size].run(loss_on_rank, torch.float64, chunk, None))
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    torch.testing.assert_close(losses[0], expected.detach(), rtol=1e-13, atol=0)
    torch.testing.assert_close(torch.cat(hiddens, dim=1), hidden.grad, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(torch.cat(weights), weight.grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e308], ids=str)
def test_what_an_unlabelled_token_holds_reaches_no_rank(pools: dict[int, RankPool], poison: float) -> None:
    clean = pools[2].run(loss_on_rank, torch.float64, 5, None)
    poisoned = pools[2].run(loss_on_rank, torch.float64, 5, poison)
    for one, other in zip(clean, poisoned, strict=True):
        for expected, found in zip(one, other, strict=True):
            assert bool(expected.isfinite().all())
            assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_an_axis_of_one_is_the_plain_loss_to_the_bit(dtype: torch.dtype) -> None:
    hidden, weight, labels = loss_inputs(dtype)
    assert torch.equal(
        head_loss(hidden, weight, labels, axis=Axis(), chunk=5, product=DENSE),
        chunked_cross_entropy(hidden, weight, labels, chunk=5)
    )


# --- the model as evaluation and decoding use it ---


def placed(name: str, config: ParallelConfig) -> tuple[KimiModel, Mesh]:
    """The named model's slices on this rank."""
    mesh = make_mesh(config, dist.get_world_size())
    whole = model_of(name)
    model = build_model(whole.config, seed=0, dtype=torch.float64, device=CPU, mesh=mesh)
    with torch.no_grad():
        for key, spec in parameter_specs(model, mesh=mesh).items():
            model.get_parameter(key).copy_(spec.take(whole.get_parameter(key), mesh))
        for key, buffer in model.named_buffers():
            buffer.copy_(whole.get_buffer(key))
    return model, mesh


def evaluation_batch() -> SimpleNamespace:
    labels = tokens(1, 24, seed=5)
    labels[0, :9] = IGNORE_INDEX
    return SimpleNamespace(input_ids=tokens(1, 24), labels=labels, cu_seqlens=torch.tensor([0, 7, 24]))


def evaluate_on_rank(name: str, config: ParallelConfig) -> tuple[Tensor, Tensor, list[Tensor], list[int], str, float]:
    model, mesh = placed(name, config)
    ids = tokens(2, 8)
    hidden = model.hidden(ids).detach() if mesh.cp.size == 1 else torch.empty(0)
    with torch.no_grad():
        logits = model(ids) if mesh.cp.size == 1 else torch.empty(0)
    with whole_sequence(model):
        decoder = Decoder(model, batch=1)
        fed = [decoder.feed(tokens(1, 9)[:, part]) for part in (slice(0, 5), slice(5, 6), slice(6, 9))]
        drawn = list(generate(model, tokens(1, 5)[0], tokens=6, temperature=1.0, seed=1))
    pipeline = Pipeline(model, mesh=mesh, loss_chunk=7)
    text = sample_text(pipeline, [3, 1, 4], decode=str, tokens=6, temperature=0.0, seed=0, stop=None)
    # All dp ranks have the same batch, so its mean is that of one.
    return hidden, logits, fed, drawn, text, validation_loss(pipeline, [evaluation_batch()])


@pytest.mark.parametrize("mesh", ["tp2", "tp4", "tp2-cp2", "tp2-ep2"])
def test_evaluation_and_decoding_equal_one_rank(pools: dict[int, RankPool], mesh: str) -> None:
    model = model_of("pair")
    decoder = Decoder(model, batch=1)
    with torch.no_grad():
        fed = torch.cat([decoder.feed(tokens(1, 9)[:, i : i + 1]) for i in range(9)], dim=1)
        hidden, logits = model.hidden(tokens(2, 8)), model(tokens(2, 8))
    drawn = list(generate(model, tokens(1, 5)[0], tokens=6, temperature=1.0, seed=1))
    alone = Pipeline(model, mesh=Mesh(), loss_chunk=7)
    text = sample_text(alone, [3, 1, 4], decode=str, tokens=6, temperature=0.0, seed=0, stop=None)
    loss = validation_loss(alone, [evaluation_batch()])
    config = MESHES[mesh]
    ranks = pools[ranks_of(mesh)].run(evaluate_on_rank, "pair", config)
    for number, (own_hidden, own_logits, own_fed, own_drawn, own_text, own_loss) in enumerate(ranks):
        assert (own_drawn, own_text) == (drawn, text)
        assert own_loss == pytest.approx(loss, rel=1e-12)
        torch.testing.assert_close(torch.cat(own_fed, dim=1), fed, rtol=1e-10, atol=1e-10)
        if config.cp == 1:
            slice_of_it = hidden.chunk(config.tp, dim=1)[number % config.tp]
            torch.testing.assert_close(own_hidden, slice_of_it, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(own_logits, logits, rtol=1e-10, atol=1e-10)


def train_on_logits() -> None:
    model, _ = placed("pair", MESHES["tp2"])
    model(tokens(1, 8))


def odd_length() -> None:
    model, _ = placed("pair", MESHES["tp2"])
    model.hidden(tokens(1, 7))


def test_mistakes_are_refused(pools: dict[int, RankPool]) -> None:
    with pytest.raises(RankError, match="train with head_loss"):
        pools[2].run(train_on_logits)
    with pytest.raises(RankError, match=r"input_ids with 7 tokens a row .*: must be a multiple of parallel.tp=2"):
        pools[2].run(odd_length)
    mesh = Mesh(tp=Axis("tp", None, 0, 3))
    with pytest.raises(ValueError, match=r"model.kda.heads=4: must be divisible by parallel.tp=3.*; use 6 or") as error:
        build_model(pair(), seed=0, dtype=torch.float32, device=CPU, mesh=mesh)
    assert "model.moe.expert_dim=16" in str(error.value)
    assert "model.dense_dim" not in str(error.value)
