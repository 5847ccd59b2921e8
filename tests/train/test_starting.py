"""A new run from other weights: the same numbers on any mesh and in any precision, everything else anew."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from configs.compose import compose_config
from launch.train import main
from model.hf_map import from_hf, to_hf
from parallel.mesh import build_mesh
from tests.dist.ranks import RankPool
from tests.launch.tiny_run import make_corpus, overrides
from train.build import Run, build_run
from train.checkpoint import CheckpointStore
from train.proof.parity import held, join

pytestmark = pytest.mark.slow  # whole runs


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def origin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A run of three steps with checkpoints of steps 2 and 3."""
    folder = tmp_path_factory.mktemp("origin") / request.param
    more = [f"train.precision={request.param}", "train.steps=3", "checkpoint.every=2", "optim.lr=1e-2"]
    assert main(overrides(folder, corpus, *more)) == 0
    return folder


def weights_of(folder: Path, step: int) -> dict[str, Tensor]:
    """The weights in a checkpoint in fp32: masters where there are some."""
    store = CheckpointStore(folder / "checkpoints", asynchronous=False)
    names = store.names(step)
    tensors = {name: torch.empty(x.shape, dtype=x.dtype) for name, x in names.items() if not name.startswith("rng/")}
    store.load(step, tensors=tensors, ignore=("rng/",))
    found = {name.removeprefix("model/"): x.float() for name, x in tensors.items() if name.startswith("model/")}
    for name in found:
        if (master := f"optim/{name}/master") in tensors:
            found[name] = tensors[master]
    return found


def build(arguments: list[str]) -> Run:
    config = compose_config(arguments)
    Path(config.run.dir).mkdir(parents=True, exist_ok=True)
    return build_run(config, mesh=build_mesh(config.parallel), device=torch.device("cpu"))


def close(run: Run) -> None:
    run.trackers.close()
    run.checkpoints.close()


@pytest.mark.parametrize("step", [None, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_are_taken_and_nothing_else(
    tmp_path: Path, corpus: Path, origin: Path, step: int | None, precision: str
) -> None:
    source = origin if step is None else origin / "checkpoints" / f"step-{step:08d}"
    more = [f"run.init_from={source}", f"train.precision={precision}", "optim.lr=5e-4", "run.seed=7"]
    run = build(overrides(tmp_path, corpus, *more))
    expected = weights_of(origin, step or 3)
    for name, param in [*run.model.named_parameters(), *run.model.named_buffers()]:
        assert torch.equal(param.detach(), expected[name].to(param.dtype)), name
    state = run.optimizer.state_dict()
    for name, value in state.items():
        if name.endswith("/master"):
            assert torch.equal(value, expected[name.removesuffix("/master")]), name
        else:
            assert not value.any(), name
    assert (run.progress.step, run.progress.tokens) == (0, 0)
    assert run.progress.origin == run.facts["init_from"] == f"{source}, step {step or 3}"
    close(run)


def test_a_run_from_other_weights_resumes_as_its_own(
    tmp_path: Path, corpus: Path, origin: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*overrides(tmp_path, corpus, f"run.init_from={origin}", "train.precision=fp32", "train.steps=2")]
    assert main(arguments) == 0
    assert f"from the weights of {origin}, step 3" in capsys.readouterr().out
    first = weights_of(tmp_path, 2)
    assert main([*arguments[:-1], "train.steps=2"]) == 0
    assert "already done" in capsys.readouterr().out
    assert all(torch.equal(x, first[name]) for name, x in weights_of(tmp_path, 2).items())
    assert json.loads((tmp_path / "facts.json").read_text())["init_from"] == f"{origin}, step 3"
    other = [argument for argument in arguments if not argument.startswith("run.init_from")]
    assert main(other) == 2
    assert "run.init_from" in capsys.readouterr().err


def test_an_exported_model_is_a_beginning(tmp_path: Path, corpus: Path) -> None:
    first = build(overrides(tmp_path / "a", corpus, "train.precision=fp32", "run.seed=3"))
    config, tensors = to_hf(first.model)
    exported = tmp_path / "exported"
    exported.mkdir()
    (exported / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    for part in range(2):
        save_file({name: tensors[name].contiguous() for name in names[part::2]}, exported / f"model-{part}.safetensors")
    again = from_hf(config, tensors, dtype=torch.float32)
    run = build(overrides(tmp_path / "b", corpus, "train.precision=fp32", "run.seed=4", f"run.init_from={exported}"))
    for name, x in run.model.state_dict().items():
        assert torch.equal(x, again.state_dict()[name]), name
    close(first)
    close(run)


def weights_on_rank(arguments: list[str]) -> dict:
    run = build(arguments)
    parts = {name: part for name, part in held(run).items() if name.startswith("model/")}
    close(run)
    run.mesh.close()
    return parts


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as ranks:
        yield ranks


@pytest.mark.parametrize("axis", ["tp", "pp", "ep", "cp"])
def test_weights_are_the_same_on_every_mesh(
    tmp_path: Path, corpus: Path, origin: Path, pool: RankPool, axis: str
) -> None:
    more = [f"run.init_from={origin}", "train.precision=fp32", f"parallel.{axis}=2", "batch.sequences=8"]
    found = join(pool.run(weights_on_rank, overrides(tmp_path, corpus, *more)))
    assert found.faults == []
    expected = weights_of(origin, 3)
    assert {name.removeprefix("model/") for name in found.whole} == expected.keys()
    for name, value in found.whole.items():
        assert torch.equal(value, expected[name.removeprefix("model/")]), name


BEGINNINGS = {
    "nothing there": ("{root}/absent", "is not a folder; name a run folder"),
    "an empty folder": ("{root}/empty", "has no checkpoint and no exported model; name a run folder"),
    "an address": ("s3://bucket/run", "must be a path of this machine"),
    "no weights": ("{root}/bare", "has config.json and no *.safetensors"),
    "no config": ("{root}/torn", "cannot be read"),
}


@pytest.mark.parametrize("case", BEGINNINGS)
def test_what_is_no_beginning_is_refused_by_name(
    tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    for name, text in (("bare", "{}"), ("torn", "{")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    (tmp_path / "torn" / "model.safetensors").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    source, said = BEGINNINGS[case]
    assert main(overrides(tmp_path / "run", corpus, f"run.init_from={source.format(root=tmp_path)}")) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: run.init_from=")
    assert said in line


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model.hidden_dim=48", "embed.weight is [320, 32] there and [320, 48] here"),
        ("model.layers=KMK", "is absent there and"),
        ("model.layers=K", "there and absent here"),
    ],
)
def test_weights_of_another_model_are_refused(
    tmp_path: Path, corpus: Path, origin: Path, capsys: pytest.CaptureFixture[str], change: str, said: str
) -> None:
    assert main(overrides(tmp_path, corpus, f"run.init_from={origin}", change)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "holds another model" in line
    assert said in line


def test_other_settings_of_the_same_shapes_are_said(
    tmp_path: Path, corpus: Path, origin: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(overrides(tmp_path, corpus, f"run.init_from={origin}", "model.moe.top_k=1", "train.steps=1")) == 0
    shown = capsys.readouterr()
    assert "was made with another model.moe.top_k (" in shown.out + shown.err
