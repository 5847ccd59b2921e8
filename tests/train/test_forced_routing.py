"""Forced routing: rules do what they say, repeat themselves, and cannot be mistaken for training."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from configs.compose import compose_config
from configs.schema import validate
from launch.train import main
from model.router import select_experts
from model.stats import ForwardStats
from parallel.expert.trace import RoutingTrace, save_trace
from parallel.mesh import Axis
from parallel.recompute import RecomputeConfig, install_recompute
from tests.launch.tiny_run import make_corpus, overrides, read_metrics
from tests.model.tiny import tiny_config, tiny_model, tokens
from train.forced_routing import (
    Balanced,
    ForcedRouting,
    OneExpert,
    Pass,
    Replay,
    RoutingSettings,
    Rule,
    Zipf,
    parse_rule,
)

CPU = torch.device("cpu")
AT = Pass(seed=3, layer=2, step=5, call=0, rank=0, ranks=1)


def choose(rule: Rule, at: Pass, *, tokens: int, experts: int = 8, k: int = 2) -> Tensor:
    chosen = rule.choose(tokens, at, experts=experts, k=k, device=CPU)
    assert (chosen.dtype, chosen.shape) == (torch.int64, (tokens, k))
    assert (chosen >= 0).all()
    assert (chosen < experts).all()
    assert (chosen.sort(dim=1).values.diff(dim=1) > 0).all(), "a token has an expert twice"
    return chosen


def counts(chosen: Tensor, experts: int = 8) -> Tensor:
    return torch.bincount(chosen.flatten(), minlength=experts)


def trace(counts: list[list[list[int]]], *, layers: list[int], top_k: int = 2) -> RoutingTrace:
    return RoutingTrace(np.array(counts, dtype=np.int64), np.array(layers), top_k)


REPLAY = Replay(trace([[[20, 2, 8, 0, 5, 5, 0, 0]], [[5] * 8]], layers=[2]))
RULES = {"balanced": Balanced(), "zipf": Zipf(1.2), "one_expert": OneExpert(), "replay": REPLAY}


@pytest.mark.parametrize("experts", [8, 7])
def test_balanced_is_balanced_over_all_ranks_of_every_pass(experts: int) -> None:
    for call in range(3):
        passes = [dataclasses.replace(AT, call=call, rank=rank, ranks=4) for rank in range(4)]
        total = sum(counts(choose(Balanced(), at, tokens=13, experts=experts), experts) for at in passes)
        assert int(total.max() - total.min()) == (0 if experts == 8 else 1)


def test_one_expert_has_every_token() -> None:
    assert choose(OneExpert(), AT, tokens=5, k=3).tolist() == [[0, 1, 2]] * 5


def test_zipf_falls_with_popularity_in_an_order_of_the_layers_own() -> None:
    order = AT.shuffled(8)
    one = counts(choose(Zipf(1.0), AT, tokens=40_000, k=1))[order] / 40_000
    weight = 1 / torch.arange(1, 9)
    torch.testing.assert_close(one, weight / weight.sum(), atol=0.01, rtol=0)
    several = counts(choose(Zipf(1.0), AT, tokens=40_000, k=3))[order]
    assert (several.diff() < 0).all()
    flat = counts(choose(Zipf(0.0), AT, tokens=40_000, k=3))
    assert float(flat.max() / flat.min()) < 1.05
    orders = {tuple(dataclasses.replace(AT, layer=layer).shuffled(8).tolist()) for layer in range(10)}
    assert len(orders) == 10


@pytest.mark.parametrize("name", ["zipf", "replay"])
def test_a_choice_is_a_function_of_where_it_is_made(name: str) -> None:
    rule = RULES[name]
    state = torch.get_rng_state()
    first = choose(rule, AT, tokens=64)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(choose(rule, AT, tokens=64), first)
    # Step 7 replays the same recorded counts as step 5, with another draw.
    for change in ({"seed": 4}, {"step": 7}, {"call": 1}, {"rank": 1}):
        assert not torch.equal(choose(rule, dataclasses.replace(AT, **change), tokens=64), first), change


@settings(max_examples=200, deadline=None)
@given(data=st.data(), k=st.integers(1, 4), rows=st.integers(1, 300), seed=st.integers(0, 1000))
def test_a_replayed_pass_has_the_recorded_shares_to_within_a_row(
    data: st.DataObject, k: int, rows: int, seed: int
) -> None:
    recorded = data.draw(st.integers(1, 50))
    generator = torch.Generator().manual_seed(seed)
    popular = torch.randn(8, generator=generator) * 3
    chosen = (popular + torch.randn(recorded, 8, generator=generator)).topk(k, dim=1).indices
    count = counts(chosen)
    rule = Replay(trace([[count.tolist()]], layers=[2], top_k=k))
    found = counts(choose(rule, dataclasses.replace(AT, seed=seed), tokens=rows, k=k))
    assert ((found - count * rows / recorded).abs() <= 1).all()


def test_a_trace_is_replayed_by_layer_and_step_and_wraps() -> None:
    rule = Replay(trace([[[4, 4, 0, 0], [0, 0, 4, 4]], [[0, 4, 4, 0], [4, 0, 0, 4]]], layers=[1, 3]))
    for step, layer, expected in [(0, 1, [0, 1]), (1, 1, [1, 2]), (4, 3, [2, 3]), (7, 3, [0, 3])]:
        at = dataclasses.replace(AT, step=step, layer=layer)
        chosen = choose(rule, at, tokens=6, experts=4)
        assert chosen.sort(dim=1).values.tolist() == [expected] * 6


@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_a_model_is_forced_in_a_step_only_and_once_a_pass(policy: str) -> None:
    model = tiny_model()
    install_recompute(model, RecomputeConfig(policy=policy))
    forced = ForcedRouting(Zipf(2.0), seed=1, axis=Axis())
    forced.install(model)
    ids = tokens(1, 32)

    def run() -> tuple[Tensor, Tensor]:
        stats = ForwardStats(model.config, device=CPU, max_logits=False)
        hidden = model.hidden(ids, stats=stats)
        hidden.square().sum().backward()
        gradient = model.layers[1].ffn.experts.gate.grad
        model.zero_grad(set_to_none=True)
        return stats.load, gradient

    own, _ = run()
    with forced.during(0):
        first, gradient = run()
        second, _ = run()
    with forced.during(0):
        again, same = run()
    after, _ = run()
    assert torch.equal(after, own)
    assert not torch.equal(first, own)
    assert torch.equal(again, first)
    assert not torch.equal(second, first)
    assert torch.equal(gradient, same)
    # Experts without rows get no gradient: the one that backward went through is the forced choice, also repeated.
    assert torch.equal(gradient.flatten(1).abs().sum(dim=1) > 0, first[0] > 0)
    at = Pass(seed=1, layer=1, step=0, call=0, rank=0, ranks=1)
    assert torch.equal(first[0], counts(choose(Zipf(2.0), at, tokens=32)))


def test_quantile_balancing_still_gets_the_routers_cutoff() -> None:
    model = tiny_model()
    forced = ForcedRouting(OneExpert(), seed=0, axis=Axis())
    forced.install(model)
    router = model.layers[1].ffn.router
    scores = torch.rand(6, 8)
    _, expected = select_experts(scores, router.bias, k=2)
    with forced.during(0):
        chosen, cutoff = router.select(scores, router.bias, k=2)
    assert torch.equal(cutoff, expected)
    assert chosen.tolist() == [[0, 1]] * 6


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", None),
        ("balanced", Balanced()),
        ("one_expert", OneExpert()),
        ("zipf(1.2)", Zipf(1.2)),
        ("zipf:0", Zipf(0.0)),
    ],
)
def test_rules_by_name(text: str, rule: Rule | None) -> None:
    assert parse_rule(text) == rule
    assert compose_config([f"routing.force={text}"]).routing.force == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("blanced", "routing.force=blanced: must be balanced, zipf(s), one_expert or trace:FILE; leave it empty"),
        ("zipf", "routing.force=zipf: must be balanced, zipf(s)"),
        ("zipf(x)", "routing.force=zipf(x): s of zipf(s) must be a number from 0; use zipf(1)"),
        ("zipf()", "routing.force=zipf(): s of zipf(s) must be a number from 0"),
        ("zipf(-1)", "routing.force=zipf(-1): s of zipf(s) must be a number from 0"),
        ("zipf:inf", "routing.force=zipf:inf: s of zipf(s) must be a number from 0"),
        ("trace:", "routing.force=trace:: trace .: cannot be read (Is a directory)"),
        ("trace:none.npz", "routing.force=trace:none.npz: trace none.npz: cannot be read (No such file or directory)"),
    ],
)
def test_a_wrong_rule_is_one_line(text: str, message: str) -> None:
    (error,) = RoutingSettings(force=text).errors()
    assert error.startswith(message)
    assert "\n" not in error


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        (trace([[[4] * 4] * 5], layers=[1, 2, 3, 4, 5]), "recorded 4 experts, 2 a token; the model has 8, 2 a token"),
        (trace([[[4] * 8] * 5], layers=[1, 2, 3, 4, 5], top_k=1), "recorded 8 experts, 1 a token"),
        (trace([[[4] * 8]], layers=[1]), "recorded layers [1]; the model has experts in layers [1, 2, 3, 4]"),
        (trace([[[0] * 8] * 4], layers=[1, 2, 3, 4]), "some layer has a step without rows"),
        (trace([[[9, 1] + [0] * 6] * 4], layers=[1, 2, 3, 4]), "or an expert that a token chose twice"),
        (None, "is no archive of arrays, or cut off; write it with save_trace"),
    ],
    ids=["experts", "top-k", "layers", "empty", "twice", "torn"],
)
def test_a_trace_that_does_not_fit_is_one_line(tmp_path: Path, recorded: RoutingTrace | None, message: str) -> None:
    path = tmp_path / "t.npz"
    if recorded is None:
        save_trace(path, trace([[[4] * 8] * 4], layers=[1, 2, 3, 4]))
        path.write_bytes(path.read_bytes()[:200])
    else:
        save_trace(path, recorded)
    config = compose_config([])
    config.model, config.routing = tiny_config(), RoutingSettings(force=f"trace:{path}")
    (error,) = [error for error in validate(config, world_size=1) if error.startswith("routing.")]
    assert error.startswith(f"routing.force=trace:{path}: ")
    assert message in error
    assert "\n" not in error


def test_a_model_without_experts_cannot_be_forced() -> None:
    config = dataclasses.replace(tiny_config(), dense_layers=5)
    assert not config.moe_layers
    errors = RoutingSettings(force="balanced", trace=True).model_errors(config)
    assert [error.split(":")[0] for error in errors] == ["routing.force=balanced", "routing.trace=True"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def test_a_forced_run_says_so_everywhere_and_saves_nothing(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["train.steps=2", "train.detail_every=1", "routing.force=zipf(1.5)"]
    assert main(overrides(tmp_path, corpus, *options)) == 0
    records = read_metrics(tmp_path)
    assert [record["forced_routing"] for record in records] == ["zipf(1.5)"] * 2
    assert records[0]["expert_load"] != records[1]["expert_load"]
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "FORCED ROUTING" in line]
    assert line.startswith("FORCED ROUTING zipf(1.5): a benchmark")
    assert "no checkpoint is saved" in line
    assert "<b>Forced routing: zipf(1.5).</b>" in (tmp_path / "report.html").read_text("utf-8")
    assert not list((tmp_path / "checkpoints").glob("*"))
    # Nothing to resume from, so the same command does the same again.
    assert main(overrides(tmp_path, corpus, *options)) == 0
    assert read_metrics(tmp_path) == records


def test_forced_and_unforced_steps_never_share_a_folder(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forced, plain = ["routing.force=balanced"], ["routing.trace=true"]
    for folder, first, others in (
        (tmp_path / "forced", forced, (plain, ["routing.force=one_expert"])),
        (tmp_path / "plain", plain, (forced,)),
    ):
        assert main(overrides(folder, corpus, "train.steps=1", *first)) == 0
        before = (folder / "metrics.jsonl").read_bytes()
        for other in others:
            assert main(overrides(folder, corpus, "train.steps=2", *other)) == 2
            assert "(experts chosen by another rule: its steps do not belong" in capsys.readouterr().err
            assert (folder / "metrics.jsonl").read_bytes() == before


def test_checkpoints_of_a_forced_run_must_be_asked_for(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["routing.force=zipf(1.5)", "checkpoint.every=1", "train.detail_every=1"]
    assert main(overrides(tmp_path / "no", corpus, "train.steps=1", *options)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: checkpoint.every=1: must be 0 with routing.force=zipf(1.5)")
    assert "routing.save=true" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "no").exists()
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    for folder, steps in ((straight, 2), (stopped, 1), (stopped, 2)):
        assert main(overrides(folder, corpus, f"train.steps={steps}", "routing.save=true", *options)) == 0
    assert (straight / "checkpoints" / "step-00000002").is_dir()
    # Also what was drawn after resuming.
    assert read_metrics(stopped) == read_metrics(straight)
