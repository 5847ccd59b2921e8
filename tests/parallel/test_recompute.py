"""Recomputation and offload change what is kept and no number: against the plain model, bit for bit."""

import copy
import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from configs.compose import compose_config
from configs.schema import validate
from launch.train import main
from model.attn_residual import ResidualState
from model.dispatch import LocalDispatcher
from model.documents import Documents
from model.generate import generate
from model.kimi import Block, KimiModel
from model.loss import chunked_cross_entropy
from model.moe import MoE
from model.router import select_experts
from model.stats import ForwardStats
from parallel import recompute
from parallel.recompute import POLICIES, RecomputeConfig, install_recompute
from tests.launch.tiny_run import make_corpus, overrides, read_metrics
from tests.model.tiny import FAMILIES, tiny_config, tiny_model, tokens
from train.config import differences, flatten
from train.step import update_router_biases

CPU = torch.device("cpu")
CHOICES = [
    pytest.param(RecomputeConfig(policy, offload), id=f"{policy}{'-offload' if offload else ''}")
    for policy in POLICIES
    for offload in (False, True)
    if policy != "none" or offload
]
OFFSETS = torch.tensor([0, 7, 30, 48], dtype=torch.int32)


def changed(model: KimiModel, config: RecomputeConfig) -> KimiModel:
    """``model`` with everything above a few numbers offloaded, where it offloads."""
    install_recompute(model, config, offload_bytes=64)
    return model


class Pass(NamedTuple):
    """One microbatch's loss, with its graph, and statistics."""

    loss: Tensor
    stats: ForwardStats


def forward(model: KimiModel, *, seed: int = 0) -> Pass:
    """Packed documents; one token in three counts for the statistics."""
    ids = tokens(1, 48, seed=seed)
    stats = ForwardStats(model.config, device=CPU, max_logits=True)
    stats.valid_BT = ids % 3 != 0
    hidden = model.hidden(ids, OFFSETS, stats=stats)
    return Pass(chunked_cross_entropy(hidden, model.head.weight, ids.roll(-1, 1)), stats)


def results(model: KimiModel) -> dict[str, Tensor]:
    """Everything that one microbatch and the update of the router biases leave."""
    loss, stats = forward(model)
    loss.backward()
    update_router_biases(model, stats)
    found = {"loss": loss.detach(), "load": stats.load, "histogram": stats.histogram, "logits": stats.max_logit}
    found |= {f"grad {name}": param.grad for name, param in model.named_parameters() if param.grad is not None}
    return found | {f"after {name}": buffer for name, buffer in model.named_buffers()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


@pytest.mark.parametrize("config", CHOICES)
@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, torch.float64) for family in FAMILIES), ("k3", torch.bfloat16)], ids=str
)
def test_every_number_is_that_of_the_plain_model(family: str, dtype: torch.dtype, config: RecomputeConfig) -> None:
    assert_same(results(changed(tiny_model(family, dtype=dtype), config)), results(tiny_model(family, dtype=dtype)))


def tied() -> KimiModel:
    """All scores equal, so that the choice is by index alone."""
    model = tiny_model()
    with torch.no_grad():
        for layer in model.config.moe_layers:
            router = model.layers[layer].ffn.router
            router.weight.zero_()
            router.bias.zero_()
    return model


@pytest.mark.parametrize("config", CHOICES)
def test_exact_ties(config: RecomputeConfig) -> None:
    expected = results(tied())
    assert ((expected["load"] > 0).sum(dim=1) == 2).all()
    assert_same(results(changed(tied(), config)), expected)


@pytest.mark.parametrize("config", CHOICES)
@pytest.mark.parametrize("make", [tiny_model, tied])
def test_nothing_is_chosen_planned_or_counted_twice(
    make: object, config: RecomputeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that would break ties, or round, in another way in backward changes nothing: it is not asked."""
    expected = results(make())
    model = changed(make(), config)
    calls: Counter[str] = Counter()

    def choose(scores: Tensor, bias: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
        calls["choose"] += 1
        chosen, cutoff = select_experts(scores, bias, k=k)
        return (scores.shape[1] - 1 - chosen, cutoff) if calls["backward"] else (chosen, cutoff)

    layers = [layer.ffn for layer in model.layers if isinstance(layer.ffn, MoE)]
    for layer in layers:
        layer.router.select = choose
    plan = LocalDispatcher._plan

    def count(*args: object, experts: int) -> object:
        calls["plan"] += 1
        return plan(*args, experts=experts)

    monkeypatch.setattr(LocalDispatcher, "_plan", count)
    loss, stats = forward(model)
    before = stats.load.clone(), stats.histogram.clone()
    calls["backward"] = 1
    loss.backward()
    assert calls == {"choose": len(layers), "plan": len(layers), "backward": 1}
    assert torch.equal(stats.load, before[0])
    assert torch.equal(stats.histogram, before[1])
    assert all(torch.equal(p.grad, expected[f"grad {n}"]) for n, p in model.named_parameters() if p.grad is not None)


@pytest.mark.parametrize("config", CHOICES)
def test_the_routing_weights_are_repeated_with_their_gradient(config: RecomputeConfig) -> None:
    model = changed(tiny_model(), config)
    results(model)
    assert all(model.layers[layer].ffn.router.weight.grad.norm() > 0 for layer in model.config.moe_layers)


@pytest.mark.parametrize("config", CHOICES)
def test_microbatches_under_way_together_keep_their_own(config: RecomputeConfig) -> None:
    """As in a pipeline: three forwards, then their backwards; each has its own routing."""
    found = []
    for model in (tiny_model(), changed(tiny_model(), config)):
        passes = [forward(model, seed=seed) for seed in range(3)]
        assert not torch.equal(passes[0].stats.load, passes[1].stats.load)
        for one in passes:
            one.loss.backward()
        found.append({name: param.grad for name, param in model.named_parameters() if param.grad is not None})
    assert_same(found[1], found[0])


@pytest.mark.parametrize("config", CHOICES)
def test_a_graph_may_be_gone_through_twice(config: RecomputeConfig) -> None:
    found = []
    for model in (tiny_model(), changed(tiny_model(), config)):
        loss, _ = forward(model)
        loss.backward(retain_graph=True)
        loss.backward()
        found.append({name: param.grad for name, param in model.named_parameters() if param.grad is not None})
    assert_same(found[1], found[0])


@pytest.mark.parametrize("config", CHOICES)
def test_only_training_passes_change(config: RecomputeConfig) -> None:
    plain, model = tiny_model(), changed(tiny_model(), config)
    assert model.state_dict().keys() == plain.state_dict().keys()
    ids = tokens(2, 9)
    with torch.no_grad():
        assert torch.equal(model(ids), plain(ids))
    texts = [list(generate(m, ids[0], tokens=5, temperature=0.0, seed=0)) for m in (model, plain)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("config", CHOICES)
def test_a_copy_of_the_model_stands_on_its_own(config: RecomputeConfig) -> None:
    model = changed(tiny_model(), config)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert_same(results(twin), results(tiny_model()))


# --- what is kept ---

LENGTH = 256


def make_block(kind: str, config: RecomputeConfig, *, offload_bytes: int = 64) -> tuple[Block, ResidualState]:
    """A layer of the tiny K3 in fp64, KDA or MLA with experts, and what enters it: a prefix and two bank rows."""
    model = tiny_model()
    install_recompute(model, config, offload_bytes=offload_bytes)
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randn(1, LENGTH, 32, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3)]
    return model.layers["KKKMM".index(kind) or 1], ResidualState(rows[0], tuple(rows[1:]))


def bytes_kept(block: Block, state: ResidualState) -> int:
    """Memory that a forward pass leaves allocated, its output included. KDA keeps its plan from the first."""
    documents = Documents.of(1, LENGTH, None, CPU)
    block(state, documents=documents)
    gc.collect()
    gc.disable()  # what an earlier test left would count as freed here
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            out = block(state, documents=documents)
    finally:
        gc.enable()
    assert out.prefix is not None
    return sum(event.self_cpu_memory_usage for event in recorded.events())


FP64 = INT64 = 8
SMALL = 4096
"""Scalars and offsets, whatever the length."""


def plan_bytes() -> int:
    """Indices at most: each choice's expert, its padded row, and each padded row's token."""
    moe = tiny_config().moe
    choices = LENGTH * moe.top_k
    return INT64 * (2 * choices + choices + 15 * moe.experts)


@pytest.mark.parametrize("kind", ["K", "M"])
def test_full_keeps_the_layers_output_and_the_plan(kind: str) -> None:
    kept = bytes_kept(*make_block(kind, RecomputeConfig("full")))
    assert kept <= FP64 * LENGTH * tiny_config().hidden_dim + plan_bytes() + SMALL


@pytest.mark.parametrize("kind", ["K", "M"])
def test_selective_saves_at_least_every_result_that_it_repeats(kind: str) -> None:
    config = tiny_config()
    moe, mla, width = config.moe, config.mla, config.kda.heads * config.kda.head_dim
    numbers = 4 * config.hidden_dim  # two mixes, two norms
    # Three streams, the decay, the norm of the heads; or the norms of both latents.
    numbers += 5 * width if kind == "K" else mla.q_rank + mla.kv_rank
    numbers += moe.latent_dim + (moe.top_k + moe.shared_experts) * moe.expert_dim
    none, selective = (bytes_kept(*make_block(kind, RecomputeConfig(policy))) for policy in ("none", "selective"))
    assert none - selective >= FP64 * LENGTH * numbers - SMALL
    assert bytes_kept(*make_block(kind, RecomputeConfig("full"))) < selective


@pytest.mark.parametrize("kind", ["K", "M"])
def test_offload_sees_every_tensor_once_but_parameters_rows_of_the_bank_and_small_ones(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = FP64 * LENGTH * 8
    block, state = make_block(kind, RecomputeConfig())
    stay = {x.untyped_storage().data_ptr() for x in (*block.parameters(), *state.bank)}
    saved: dict[int, Tensor] = {}

    def see(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.nbytes() >= least and storage.data_ptr() not in stay:
            saved[storage.data_ptr()] = x
        return x

    with saved_tensors_hooks(see, lambda x: x):
        out = block(state, documents=Documents.of(1, LENGTH, None, CPU))
    assert state.prefix.untyped_storage().data_ptr() in saved
    assert any(x.nbytes >= least for x in block.parameters())

    moved: list[int] = []
    plain = recompute._Offloaded.__init__

    def spy(self: object, x: Tensor) -> None:
        plain(self, x)
        moved.append(self.host.nbytes)
        assert self.host.data_ptr() != x.data_ptr()

    monkeypatch.setattr(recompute._Offloaded, "__init__", spy)
    block, state = make_block(kind, RecomputeConfig(offload=True), offload_bytes=least)
    block(state, documents=Documents.of(1, LENGTH, None, CPU))
    assert Counter(moved) == Counter(x.untyped_storage().nbytes() for x in saved.values())
    assert out.prefix is not None


@pytest.mark.parametrize("kind", ["K", "M"])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_went_to_the_host_is_gone_here(policy: str, kind: str) -> None:
    """In sum, no more than without offload and a copy of the prefix, which the caller holds too."""
    here, there = (bytes_kept(*make_block(kind, RecomputeConfig(policy, offload))) for offload in (False, True))
    assert there <= here + FP64 * LENGTH * tiny_config().hidden_dim + SMALL


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("config", CHOICES)
@pytest.mark.usefixtures("no_collector")
def test_what_is_kept_goes_with_the_graph(config: RecomputeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """By reference counts alone: a cycle would keep a step's activations until the collector comes."""
    model, made = changed(tiny_model(), config), []
    plain = recompute._Shared.__init__

    def spy(self: recompute._Shared) -> None:
        plain(self)
        made.append(weakref.ref(self))

    monkeypatch.setattr(recompute._Shared, "__init__", spy)
    loss, _ = forward(model)
    assert any(ref() is not None for ref in made)
    del loss
    forward(model).loss.backward()
    assert len(made) > 2
    assert not any(ref() is not None for ref in made)


# --- the config ---


def test_an_unknown_policy_is_one_line() -> None:
    config = compose_config(["recompute.policy=some"])
    rule = "must be one of none, selective, full; none keeps everything"
    assert validate(config, world_size=1) == [f"recompute.policy=some: {rule}"]


def test_a_resumed_run_may_change_it() -> None:
    saved = compose_config([])
    assert flatten(saved)["recompute.policy"] == "none"
    now = compose_config(["recompute.policy=full", "recompute.offload=true"])
    allowed, refused = differences({"recompute": {"policy": "none", "offload": False}}, now, steps=1)
    assert [line for line in allowed if line.startswith("recompute.")] == [
        "recompute.offload: False -> True",
        "recompute.policy: none -> full",
    ]
    assert not any(line.startswith("recompute.") for line in refused)


def test_a_run_that_changes_it_midway_is_the_run_that_did_not(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    runs = {"straight": [[]], "changed": [["recompute.policy=selective"], ["recompute.policy=full"]]}
    ends = []
    for name, legs in runs.items():
        for index, leg in enumerate(legs, start=1):
            steps = f"train.steps={6 * index // len(legs)}"
            assert main(overrides(tmp_path / name, corpus, steps, "train.precision=bf16", *leg)) == 0
        ends.append(read_metrics(tmp_path / name))
    assert len(ends[0]) == 6
    assert ends[0] == ends[1]
