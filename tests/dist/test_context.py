"""Context parallel on two and four ranks against one process, in fp64: cores, then whole models.

Every rank returns the gradients of its own inputs, which joined must be those of the whole, and of the replicated
weights, which summed must be. The group of two is the last two of four, so group ranks differ from global ranks.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from model.documents import Documents
from model.generate import generate
from model.kimi import KimiModel
from model.loss import IGNORE_INDEX, chunked_cross_entropy
from model.kda import LocalKDA
from model.mla import LocalAttention
from model.products import DENSE
from model.seams import AttentionCore, ConvWeights, KDACore
from model.stats import ForwardStats, LayerStats
from parallel.context import install_context
from parallel.context.kda import ContextKDA
from parallel.context.layout import slice_tokens
from parallel.context.mla import ContextMLA
from parallel.config import ParallelConfig
from parallel.mesh import Axis, Mesh
from parallel.pipeline.runtime import Pipeline
from tests.bench import long_context
from tests.dist.parity import check_parity, run_alone, run_on_mesh
from tests.dist.ranks import RankPool
from tests.model.tiny import tiny_model, tokens
from train.evaluate import validation_loss

LENGTH = 48
# Slices are 24 or 12 tokens long.
CASES = {
    "one_document": [0, 48],
    "at_the_borders": [0, 12, 24, 36, 48],
    "just_before": [0, 11, 23, 35, 48],
    "just_after": [0, 13, 25, 37, 48],
    "three_ranks": [0, 5, 30, 48],
    "inside_only": [0, 3, 12, 17, 24, 30, 36, 40, 48],
    "shorter_than_the_halo": [0, 10, 11, 12, 13, 15, 22, 23, 24, 25, 26, 28, 34, 35, 37, 38, 47, 48],
}
SIZES = [2, 4]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


def axis_of(size: int) -> Axis | None:
    """The last ``size`` of the four ranks; None on the others. Collective."""
    first = dist.get_world_size() - size
    group = dist.new_group(list(range(first, dist.get_world_size())))
    rank = dist.get_rank() - first
    return Axis("cp", group, rank, size) if rank >= 0 else None


def close(found: Tensor, expected: Tensor, name: str = "") -> None:
    """Equal but for the order of sums, measured against the largest element."""
    scale = float(expected.abs().max().clamp(min=1e-30)) if expected.numel() else 1.0
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10 * max(scale, 1.0), msg=lambda m: f"{name}: {m}")


# --- the cores ---


def draw(shapes: dict[str, Sequence[int]], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(*shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}


def kda_inputs(length: int = LENGTH, *, width: int = 4, heads: int = 3, key: int = 5, value: int = 4) -> dict:
    per_token = {"q": heads * key, "k": heads * key, "v": heads * value}
    inputs = {name: (1, length, size) for name, size in per_token.items()}
    filters = {f"{name}_filter": (size, width) for name, size in per_token.items()}
    gates = {"g": (1, length, heads, key), "beta": (1, length, heads), "grad": (1, length, heads, value)}
    drawn = draw(inputs | filters | gates, seed=0)
    drawn["g"] = -0.3 * drawn["g"].abs()
    drawn["beta"] = torch.sigmoid(drawn["beta"])
    return drawn


def run_kda(core: KDACore, x: dict[str, Tensor], documents: Documents) -> Tensor:
    filters = ConvWeights(x["q_filter"], x["k_filter"], x["v_filter"])
    return core((x["q"], x["k"], x["v"]), filters, x["g"], x["beta"], documents=documents, cache=None)


def mla_inputs(length: int = LENGTH, *, heads: int = 4, nope: int = 5, rope: int = 3, value: int = 4) -> dict:
    rank = 6
    shapes = {
        "q": (1, length, heads, nope + rope),
        "latent": (1, length, rank),
        "shared_key": (1, length, rope),
        "up_weight": (heads * (nope + value), rank),
        "grad": (1, length, heads, value),
    }
    return draw(shapes, seed=1)


def run_mla(core: AttentionCore, x: dict[str, Tensor], documents: Documents, stats: LayerStats | None = None) -> Tensor:
    return core(
        x["q"],
        x["latent"],
        x["shared_key"],
        x["up_weight"],
        product=DENSE,
        value_dim=x["grad"].shape[-1],
        documents=documents,
        stats=stats,
        cache=None,
    )


def logit_stats(heads: int) -> LayerStats:
    return LayerStats(None, None, torch.full((heads,), -torch.inf), None)


def backward(run: Callable[..., Tensor], core: object, x: dict[str, Tensor], *rest: object) -> dict[str, Tensor]:
    """Output, and gradients of every input for the output's gradient ``x["grad"]``."""
    leaves = {name: value.clone().requires_grad_() for name, value in x.items() if name != "grad"}
    o = run(core, leaves | {"grad": x["grad"]}, *rest)
    o.backward(x["grad"])
    grads = {f"grad of {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    assert len(grads) == len(leaves)
    return {"o": o.detach()} | grads


def on_slice(size: int, kind: str, x: dict[str, Tensor], offsets: list[int]) -> dict[str, Tensor] | None:
    """`backward` of a context core on this rank's slice."""
    axis = axis_of(size)
    if axis is None:
        return None
    length = x["grad"].shape[1]
    ids = torch.zeros(1, length, dtype=torch.int64)
    documents = slice_tokens(ids, ids, torch.tensor(offsets), axis=axis).documents
    part = length // size
    own = {
        name: value[:, axis.rank * part : (axis.rank + 1) * part] if value.shape[:2] == (1, length) else value
        for name, value in x.items()
    }
    if kind == "kda":
        return backward(run_kda, ContextKDA(LocalKDA(), axis), own, documents)
    stats = logit_stats(x["q"].shape[2])
    found = backward(run_mla, ContextMLA(LocalAttention(), axis), own, documents, stats)
    assert stats.max_logit_H is not None
    return found | {"max_logit": stats.max_logit_H}


def check_core(pool: RankPool, size: int, kind: str, x: dict[str, Tensor], offsets: list[int]) -> None:
    documents = Documents.of(1, x["grad"].shape[1], torch.tensor(offsets), torch.device("cpu"))
    parts = ranks(pool, size, kind, x, offsets)
    if kind == "kda":
        expected = backward(run_kda, LocalKDA(), x, documents)
    else:
        stats = logit_stats(x["q"].shape[2])
        expected = backward(run_mla, LocalAttention(), x, documents, stats)
        torch.testing.assert_close(torch.stack([part["max_logit"] for part in parts]).amax(0), stats.max_logit_H)
    for name, value in expected.items():
        found = [part[name] for part in parts]
        whole = torch.cat(found, 1) if value.shape[:2] == x["grad"].shape[:2] else torch.stack(found).sum(0)
        close(whole, value, name)


def ranks(pool: RankPool, size: int, kind: str, x: dict[str, Tensor], offsets: list[int]) -> list[dict[str, Tensor]]:
    return [part for part in pool.run(on_slice, size, kind, x, offsets) if part is not None]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_kda_equals_one_rank(pool: RankPool, case: str, size: int) -> None:
    check_core(pool, size, "kda", kda_inputs(), CASES[case])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_mla_equals_one_rank(pool: RankPool, case: str, size: int) -> None:
    check_core(pool, size, "mla", mla_inputs(), CASES[case])


@pytest.mark.parametrize("heads", [1, 3, 6])
@pytest.mark.parametrize("case", CASES)
def test_mla_with_heads_that_do_not_divide(pool: RankPool, case: str, heads: int) -> None:
    check_core(pool, 4, "mla", mla_inputs(heads=heads), CASES[case])


def test_query_tiles_of_the_gather_form(pool: RankPool) -> None:
    check_core(pool, 2, "mla", mla_inputs(2304, heads=1), [0, 700, 2304])


@pytest.mark.parametrize("width", [1, 2, 6])
def test_halo_of_any_width(pool: RankPool, width: int) -> None:
    check_core(pool, 4, "kda", kda_inputs(16, width=width), [0, 3, 16])


def test_a_document_inside_its_slice_depends_on_no_other(pool: RankPool) -> None:
    """Poison all documents but the third, which lies on rank 1 alone."""
    offsets = [0, 10, 15, 22, 40, 48]
    for kind, x in [("kda", kda_inputs()), ("mla", mla_inputs())]:
        clean = ranks(pool, 4, kind, x, offsets)[1]["o"][:, 3:10]
        poisoned = dict(x)
        for name, value in x.items():
            if value.shape[:2] == (1, LENGTH) and name != "grad":
                poisoned[name] = value.clone()
                poisoned[name][:, :15] = torch.nan
                poisoned[name][:, 22:] = torch.nan
        assert torch.equal(ranks(pool, 4, kind, poisoned, offsets)[1]["o"][:, 3:10], clean)


def test_no_gradient_crosses_a_document_boundary(pool: RankPool) -> None:
    """A NaN in the gradient of the last documents stays there: the reverse hand-over stops where the forward does."""
    offsets = [0, 30, 48]
    x = kda_inputs()
    clean = ranks(pool, 4, "kda", x, offsets)
    x["grad"][:, 30:] = torch.nan
    poisoned = ranks(pool, 4, "kda", x, offsets)
    for name in ("q", "k", "v", "g", "beta"):
        one, other = (torch.cat([part[f"grad of {name}"] for part in parts], 1)[:, :30] for parts in (clean, poisoned))
        assert torch.equal(one, other), name


# --- whole models ---


def model_loss(model: KimiModel, batch: SimpleNamespace, axis: Axis) -> tuple[Tensor, dict, ForwardStats]:
    """The loss of one microbatch as `train.step` takes it, this rank's part; gradients and statistics."""
    stats = ForwardStats(model.config, device=torch.device("cpu"), max_logits=True)
    ids, labels, documents = slice_tokens(batch.input_ids, batch.labels, batch.cu_seqlens, axis=axis)
    hidden = model.hidden(ids, documents=documents, stats=stats)
    count = int((batch.labels != IGNORE_INDEX).sum())
    loss = chunked_cross_entropy(hidden, model.head.weight, labels, chunk=7) / count
    loss.backward()
    return loss.detach(), {name: param.grad for name, param in model.named_parameters()}, stats


def model_on_slice(size: int, name: str, batch: SimpleNamespace) -> tuple | None:
    axis = axis_of(size)
    if axis is None:
        return None
    model = tiny_model(name)
    install_context(model, axis)
    loss, grads, stats = model_loss(model, batch, axis)
    validation = validation_loss(Pipeline(model, mesh=Mesh(cp=axis, dense=axis), loss_chunk=7), [batch])
    return loss, grads, stats.load, stats.histogram, stats.max_logit, validation


def make_batch(length: int, offsets: list[int]) -> SimpleNamespace:
    """Labels shifted on the whole row, none at the end of a document: what the loader serves."""
    ids = tokens(1, length)
    labels = ids.roll(-1, dims=1)
    labels[0, torch.tensor(offsets[1:]) - 1] = IGNORE_INDEX
    return SimpleNamespace(input_ids=ids, labels=labels, cu_seqlens=torch.tensor(offsets, dtype=torch.int32))


MODELS = [
    pytest.param("k3", make_batch(48, CASES["three_ranks"]), id="k3-three_ranks"),
    pytest.param("k3", make_batch(48, CASES["shorter_than_the_halo"]), id="k3-shorter_than_the_halo"),
    pytest.param("k3_full", make_batch(48, CASES["just_before"]), id="k3_full-just_before"),
    pytest.param("linear", make_batch(48, CASES["just_after"]), id="linear-just_after"),
    pytest.param("k2", make_batch(48, CASES["three_ranks"]), id="k2-three_ranks"),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("name", "batch"), MODELS)
def test_models_equal_one_rank(pool: RankPool, name: str, batch: SimpleNamespace, size: int) -> None:
    model = tiny_model(name)
    loss, grads, stats = model_loss(model, batch, Axis())
    validation = validation_loss(Pipeline(model, mesh=Mesh(), loss_chunk=7), [batch])
    parts = [part for part in pool.run(model_on_slice, size, name, batch) if part is not None]
    losses, rank_grads, loads, histograms, logits, validations = zip(*parts)
    close(torch.stack(losses).sum(), loss, "loss")
    for key, grad in grads.items():
        if grad is None:
            assert all(part[key] is None for part in rank_grads), key
        else:
            close(torch.stack([part[key] for part in rank_grads]).sum(0), grad, key)
    assert torch.equal(torch.stack(loads).sum(0), stats.load)
    assert torch.equal(torch.stack(histograms).sum(0).to(torch.int32), stats.histogram)
    torch.testing.assert_close(torch.stack(logits).amax(0), stats.max_logit)
    assert validations == pytest.approx([validation] * size, rel=1e-12)


def decode_after_install(size: int) -> list[int] | None:
    axis = axis_of(size)
    if axis is None or axis.rank:
        return None
    model = tiny_model("k3")
    install_context(model, axis)
    return list(generate(model, tokens(1, 9)[0], tokens=5, temperature=0.0, seed=0))


def test_one_rank_alone_may_decode(pool: RankPool) -> None:
    expected = list(generate(tiny_model("k3"), tokens(1, 9)[0], tokens=5, temperature=0.0, seed=0))
    assert [found for found in pool.run(decode_after_install, 2) if found is not None] == [expected]


# --- a long one ---


def test_a_long_row_equals_one_rank(pool: RankPool) -> None:
    """What `tests.bench.long_context` trains, on fewer tokens: every gradient, and what the step made of it."""
    case = long_context.make_case(2048, document=700, dtype=torch.float64)
    check_parity(run_on_mesh(pool, case, ParallelConfig(cp=4)), run_alone(case))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "document"),
    [
        pytest.param("K", long_context.LENGTH, id="KDA-one_document"),
        # Attention is quadratic in the document.
        pytest.param("KM", 10_000, id="pair-packed"),
    ],
)
def test_262144_tokens_over_four_ranks(layers: str, document: int) -> None:
    case = long_context.make_case(long_context.LENGTH, document=document, layers=layers)
    with RankPool(4) as patient:
        results = patient.run(long_context.train_step, case)
    assert len({(result.loss, result.grad_norm) for result in results}) == 1
    assert 3.0 < results[0].loss < 12.0
    assert 0 < results[0].grad_norm < math.inf
