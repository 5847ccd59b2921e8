"""Composition is strict, and every shipped config is sound."""

import math
from pathlib import Path

import pytest
import torch

from configs.compose import ConfigError, compose_config
from configs.overrides import TEXT_KEYS
from configs.schema import validate
from model.hf_map import config_from_hf, config_to_hf
from model.kimi import build_on_meta
from model.precision import set_precision
from train.config import flatten

MODELS = sorted(path.stem for path in (Path(__file__).parents[2] / "configs" / "model").glob("*.yaml"))
EXPERIMENTS = sorted(path.stem for path in (Path(__file__).parents[2] / "configs" / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes_and_has_no_contradiction(experiment: str) -> None:
    config = compose_config([f"experiment={experiment}"])
    assert validate(config, world_size=2) == []


@pytest.mark.parametrize("model", MODELS)
def test_every_model_counts_what_it_holds(model: str) -> None:
    config = compose_config([f"model={model}"]).model
    assert config.errors() == []
    total, active = config.count_parameters()
    built = build_on_meta(config)
    assert total == sum(p.numel() for p in built.parameters())
    unused = config.moe.experts - config.moe.top_k
    inactive = sum(p.numel() * unused // p.shape[0] for n, p in built.named_parameters() if ".experts." in n)
    assert active == total - inactive - built.embed.weight.numel()


@pytest.mark.parametrize(
    ("model", "total", "active"),
    [
        ("kimi_k3", 2.7795e12, 104.19e9),
        ("kimi_linear_48b", 49.1e9, 3.1e9),
        ("kimi_k2_1t", 1.026e12, 31.7e9),
    ],
)
def test_released_sizes(model: str, total: float, active: float) -> None:
    found = compose_config([f"model={model}"]).model.count_parameters()
    assert found == (pytest.approx(total, rel=2e-3), pytest.approx(active, rel=2e-2))


def test_kimi_k3_is_2_7795_trillion_with_104_19_billion_active() -> None:
    total, active = compose_config(["model=kimi_k3"]).model.count_parameters()
    assert (f"{total / 1e12:.4f}T", f"{active / 1e9:.2f}B") == ("2.7795T", "104.19B")


def test_kimi_k3_keeps_fp32_where_the_checkpoint_does() -> None:
    built = build_on_meta(compose_config(["model=kimi_k3"]).model)
    set_precision(built, torch.bfloat16)
    kept = {name.split(".", 2)[-1] for name, p in built.named_parameters() if p.dtype == torch.float32}
    assert kept == {f"mixer.{x}_conv.weight" for x in "qkv"} | {
        "mixer.decay.A_log", "mixer.decay.dt_bias", "mixer.norm.weight"
    }  # fmt: skip
    assert all(buffer.dtype == torch.float32 for buffer in built.buffers())


@pytest.mark.parametrize("model", MODELS)
def test_every_model_survives_the_hugging_face_config_and_back(model: str) -> None:
    config = compose_config([f"model={model}"]).model
    back = config_from_hf(config_to_hf(config))
    assert back.mixers == config.mixers
    back.layers = config.layers
    # What only training knows is not in a checkpoint's config.
    back.moe.balancing, back.init_std = config.moe.balancing, config.init_std
    if config.moe.latent_dim is None:
        back.moe.latent_norm = config.moe.latent_norm
    if not config.mla.rotary:
        back.mla.rope_theta = config.mla.rope_theta
    if "K" not in config.mixers:
        back.kda = config.kda
    assert back == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.wramup=5", "optim.wramup: unknown key"),
        ("+optim.wramup=5", "optim.wramup: unknown key"),
        ("optim.momentm=0.9", "did you mean optim.momentum?"),
        ("+train.stesp=3", "did you mean train.steps?"),
        ("nonsense=1", "nonsense: unknown key"),
        ("optim.lr=3e4x", "optim.lr=3e4x: must be a number, such as optim.lr=0.001"),
        ("parallel.tp=2.5", "parallel.tp=2.5: must be a whole number, such as parallel.tp=1"),
        ("train.steps=many", "train.steps=many: must be a whole number, such as train.steps=1000"),
        ("model=kimi_k9", "model=kimi_k9: unknown choice; available: kimi_k2_1t"),
        ("experiment=none_such", "experiment=none_such: unknown choice"),
        ("steps=1_000", "steps: unknown key"),
        ("model.moe.experts=[1,2]", "model.moe.experts=[1, 2]: must be a whole number"),
        ("optim.lr=null", "optim.lr=null: must be a number, such as optim.lr=0.001"),
        ("optim.betas=3", "optim.betas=3: must be a list in brackets, such as optim.betas=[0.9,0.95]"),
        ("optim.betas=[a,b]", "optim.betas[0]=a: must be a number, such as optim.betas=[0.9,0.95]"),
        ("optim.betas={a: 1}", "optim.betas={a: 1}: must be a list in brackets"),
        ("parallel.layout=3", "parallel.layout=3: must be a list in brackets, such as parallel.layout=[1,2]"),
        ("model.residual_block=x", "model.residual_block=x: must be a whole number"),
        ("run.dir=null", "run.dir=null: must be text"),
        ("run.name=[1]", "run.name=[1]: must be text"),
        ("trackers.wandb=3x", "trackers.wandb=3x: must be true or false"),
        ("evaluate.prompt=${nope}", r"evaluate.prompt: Interpolation key 'nope' not found; ${KEY} takes the value of"),
        ("train={stesp: 3}", "train.stesp: unknown key; did you mean train.steps?"),
        ("train.steps=", "train.steps=: must be a whole number"),
        ("optim.lr", "optim.lr: is not KEY=VALUE; give it a value"),
        ("--config", "--config: names nothing; write --config FILE"),
        ("--confg", "--confg: unknown option; --help lists them"),
    ],
)
def test_a_wrong_override_is_one_line_that_names_it(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose_config([override])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


HEADS = ["model.kda.heads=4", "model.mla.heads=4"]


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["model.moe.top_k=99"], ["model.moe.top_k=99"]),
        (["optim.lr=-1", "model.layers=KKX"], ["optim.lr=-1.0", "model.layers='KKX'"]),
        (
            [
                "parallel.tp=2",
                "batch.length=127",
                "model.vocab_size=8193",
                "model.dense_dim=7",
                "model.moe.expert_dim=9",
            ],
            [
                "batch.length=127: must be a multiple of parallel.cp x parallel.tp = 1 x 2",
                *("model.kda.heads=3: must be", "model.mla.heads=3: must be", "model.vocab_size=8193: must be"),
                "model.dense_dim=7: must be divisible by parallel.tp=2, which splits it; use 8 or",
                "model.moe.expert_dim=9: must be",
            ],
        ),
        (["parallel.tp=2", "model.layers=K*4", "model.kda.heads=4"], []),
        # 20 elements of bf16 are a multiple of 16 bytes neither whole nor cut; 24 are whole only.
        ([*HEADS, "parallel.tp=2", "train.precision=bf16", "model.moe.expert_dim=20"], []),
        ([*HEADS, "parallel.tp=2", "train.precision=bf16", "model.moe.expert_dim=24"], ["use 32 or another parallel"]),
        (["batch.microbatch=3"], ["batch.microbatch=3"]),
        (["schedule.warmup_tokens=10000000"], ["schedule.warmup_tokens=10000000"]),
        (["model.vocab_size=4096"], ["model.vocab_size=4096"]),
        (["model.mla.rotary=true", "model.mla.rope_dim=15"], ["model.mla.rope_dim=15"]),
        (["train.precision=fp8", "evaluate.every=-1"], ["train.precision=fp8", "evaluate.every=-1"]),
        (["parallel.dp=1"], ["parallel.dp=1"]),
        (["parallel.cp=4"], ["parallel.cp=4: contradicts the 2 launched rank(s), since pp x dp x cp x tp = 1 x 1 x 4"]),
        (["model.moe.experts=1"], ["model.moe.experts=1: must be at least 2"]),
        (
            ["evaluate.every=5", "data.validation_fraction=0"],
            [
                "evaluate.every=5: contradicts data.validation_fraction=0, which holds out no text to evaluate on; set "
                "evaluate.every=0 or raise data.validation_fraction"
            ],
        ),
        (["evaluate.every=0", "data.validation_fraction=0"], []),
        (
            ["run.dir=", "run.cache=' '"],
            ["run.dir='': must not be empty; name one", "run.cache=' ': must not be empty"],
        ),
        (["run.name="], ["run.name='': must not be empty"]),
        (["model.moe.experts=0"], ["model.moe.experts=0: must be at least 1", "model.moe.top_k=2: must lie in"]),
        (["parallel.cp=0"], ["parallel.cp=0: must be at least 1; use 1"]),
        (["routing.force=zipf(x)"], ["routing.force=zipf(x): s of zipf(s) must be a number"]),
        (["parallel.zero=3", "train.replica_check_every=-1"], ["parallel.zero=3: must be 1", "replica_check_every=-1"]),
        (["parallel.pp=2", "model.layers=K"], ["parallel.pp x parallel.vpp=2 x 1: more virtual stages than the 1"]),
        (["parallel.pp=2", "parallel.layout=[2,1]"], ["parallel.layout=[2, 1]: sums to 3, must be the"]),
        (["parallel.pp=2", "parallel.schedule=gpip"], ["parallel.schedule=gpip: must be one of"]),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else None,
)
def test_contradictions_are_all_reported_at_once(overrides: list[str], names: list[str]) -> None:
    problems = validate(compose_config(overrides), world_size=2)
    for name in names:
        assert any(name in problem for problem in problems), problems
    assert len(problems) == len(names)


FLOATS = [name for name, value in flatten(compose_config([])).items() if isinstance(value, float)]


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
def test_every_number_must_be_finite(value: str) -> None:
    assert {"optim.lr", "model.init_std", "model.moe.routed_scaling", "evaluate.temperature"} <= set(FLOATS)
    problems = validate(compose_config([f"{name}={value}" for name in FLOATS]), world_size=2)
    assert sorted(problems) == sorted(f"{name}={value}: must be a finite number; give one" for name in FLOATS)


def test_numbers_in_lists_must_be_finite() -> None:
    overrides = [f"optim.betas=[{math.nan},0.9]", "data.sources=[{path: x}, {path: y, weight: inf}]"]
    problems = validate(compose_config(overrides), world_size=2)
    for name in ("optim.betas[0]=nan", "data.sources[1].weight=inf"):
        assert [problem for problem in problems if name in problem] == [f"{name}: must be a finite number; give one"]


def test_a_group_chosen_on_the_command_line_wins_over_the_experiment() -> None:
    assert compose_config(["experiment=demo", "model=kimi_k2_small"]).model.mla.rotary


TEXTS = ["1_0", "1e-3", "1.50", "1e5", ".5", "true", "False", "none", "nan", "007", "0x10", "2024_11", "-1", "+3", "1."]


@pytest.mark.parametrize("text", TEXTS)
def test_text_that_looks_like_something_else_stays_as_it_is(text: str) -> None:
    keys = sorted(TEXT_KEYS - {"data.sources[].path"})
    found = flatten(compose_config([f"{key}={text}" for key in keys] + [f"data.sources=[{{path: {text}, weight: 2}}]"]))
    here = str(Path(text).absolute())
    paths = ("run.dir", "run.cache", "run.init_from")
    assert {key: found[key] for key in keys} == {key: here if key in paths else text for key in keys}
    assert found["data.sources"] == [{"path": here, "weight": 2.0}]


def test_paths_are_absolute_wherever_they_come_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    config = compose_config(
        ["run.dir=~/mine", "data.sources=[{path: ../x}, {path: ~/y}]", "routing.force='trace:t.npz'", "run.name=a"]
    )
    assert (config.run.dir, config.run.cache) == ("/home/me/mine", f"{tmp_path}/runs/cache")
    assert [source.path for source in config.data.sources] == [str(tmp_path.parent / "x"), "/home/me/y"]
    assert config.routing.force == f"trace:{tmp_path}/t.npz"
    assert compose_config(["run.name=a"]).run.dir == f"{tmp_path}/runs/a"


@pytest.mark.parametrize(
    "address", ["s3://bucket/x", "gs://b", "hdfs:///x", "s3:/bucket", "https://host/x", "file:///x"]
)
def test_addresses_are_no_folders(address: str) -> None:
    config = compose_config([f"run.dir='{address}'", f"run.cache='{address}'", f"data.sources=[{{path: '{address}'}}]"])
    problems = validate(config, world_size=2)
    assert sorted(problem.split(":")[0].split("=")[0] for problem in problems) == [
        "data.sources[0].path",
        "run.cache",
        "run.dir",
    ]
    assert all(f"={address}: must be a path of this machine and is a " in problem for problem in problems)


@pytest.mark.parametrize("seed", [-(2**63), 2**64 - 1])
def test_seeds_that_a_generator_takes_are_fine(seed: int) -> None:
    assert validate(compose_config([f"run.seed={seed}"]), world_size=2) == []
    torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**64, 10**30])
def test_other_seeds_are_refused(seed: int) -> None:
    (problem,) = validate(compose_config([f"run.seed={seed}"]), world_size=2)
    assert problem.startswith(f"run.seed={seed}: must lie in -2^63..2^64-1")
