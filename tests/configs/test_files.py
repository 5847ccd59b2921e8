"""Settings in files of the user's own compose as the built-in ones do, and are read strictly."""

from dataclasses import asdict
from pathlib import Path

import pytest

from configs.compose import ConfigError, compose_config
from train.run_folder import write_config


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")
    return path


def test_an_experiment_of_the_users_own_composes(tmp_path: Path) -> None:
    write(tmp_path / "experiment" / "long.yaml", "# @package _global_\ntrain:\n  steps: 7\noptim:\n  lr: 1e-4\n")
    write(tmp_path / "model" / "wide.yaml", "hidden_dim: 320\n")
    for option in (["--config-dir", str(tmp_path)], [f"--config-dir={tmp_path}"]):
        config = compose_config([*option, "experiment=long", "model=wide", "batch.length=64"])
        found = config.train.steps, config.optim.lr, config.model.hidden_dim, config.batch.length
        assert found == (7, 1e-4, 320, 64)
    with pytest.raises(ConfigError, match="experiment=long: unknown choice; available: demo"):
        compose_config(["experiment=long"])


def test_text_in_a_file_stays_as_it_is_written(tmp_path: Path) -> None:
    write(
        tmp_path / "experiment" / "text.yaml",
        "run: {name: 1_0, dir: 2024_11}\nevaluate:\n  prompt: 010\ndata:\n  sources:\n  - path: 1e5\n    weight: 2\n",
    )
    config = compose_config(["--config-dir", str(tmp_path), "experiment=text"])
    assert (config.run.name, config.evaluate.prompt) == ("1_0", "010")
    assert [config.run.dir, config.data.sources[0].path] == [str(Path(name).absolute()) for name in ("2024_11", "1e5")]


@pytest.mark.parametrize(
    "given",
    [
        ["run.name=1_0", "run.dir=runs/1_0", "train.steps=3", "model=kimi_linear_small"],
        ["run.name=true", "evaluate.prompt='${run.seed} {x}: \\'y\\' #'", "data.sources=[{path: 7, weight: 0.5}]"],
        ["optim.betas=[0.5,0.25]", "parallel.layout=[1,2]", "optim.eps=1e-30", "model.mla.q_rank=null"],
    ],
    ids=["names", "text", "numbers"],
)
def test_a_runs_own_config_can_be_given_back(tmp_path: Path, given: list[str]) -> None:
    config = compose_config([override.replace("${", r"\${") for override in given])
    write_config(tmp_path, asdict(config))
    again = compose_config(["--config", str(tmp_path / "config.yaml")])
    assert again == config
    changed = compose_config(["--config", str(tmp_path / "config.yaml"), "train.steps=9"])
    assert (changed.train.steps, changed.run) == (9, config.run)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train:\n  steps: 1\n  steps: 2\n", ":3: steps is given twice, first in line 2; keep one"),
        ("train:\n  steps: 1\noptim:\n  lr: 1\ntrain:\n  steps: 2\n", ":5: train is given twice, first in line 1"),
        ("train:\n  steps: 1_000\n", ":2: train.steps=1_000: write 1000, without underscores"),
        ("train:\n  stpes: 1\n", ":2: train.stpes: unknown key; did you mean train.steps?"),
        ("tarin:\n  steps: 1\n", ":1: tarin: unknown key; did you mean train?"),
        ("train:\n  steps: many\n", "train.steps=many: must be a whole number"),
        ("train: 3\n", ":1: train: is a section and has no value of its own"),
        ("train: [\n", ":2: is not valid YAML"),
        ("- 1\n", "holds no keys and values"),
        ("a: &a [*a]\n", ""),
        ("? [1, 2]\n: 3\n", ""),
        ("train:\n\tsteps: 1\n", ":2: is not valid YAML"),
        ("run:\n  name: \x00\n", "is not valid YAML"),
    ],
    ids=[
        "twice",
        "section-twice",
        "underscore",
        "misspelt",
        "misspelt-section",
        "type",
        "no-section",
        "cut-off",
        "list",
        "recursive",
        "key-of-lists",
        "tab",
        "control-character",
    ],
)
@pytest.mark.parametrize("option", ["--config", "--config-dir"])
def test_a_wrong_file_is_one_line(tmp_path: Path, option: str, text: str, message: str) -> None:
    path = write(tmp_path / "experiment" / "mine.yaml", text)
    arguments = ["--config", str(path)] if option == "--config" else ["--config-dir", str(tmp_path), "experiment=mine"]
    with pytest.raises(ConfigError) as error:
        compose_config(arguments)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config"], "--config: names nothing; write --config FILE"),
        (["--config-dir="], "--config-dir: names nothing; write --config-dir FOLDER"),
        (["--config", "s3://b/x"], "--config=s3://b/x: must be a path of this machine and is a s3: address"),
        (["--config", "{root}/none.yaml"], "cannot be read (No such file or directory); name a YAML file"),
        (["--config", "{root}"], "cannot be read (Is a directory); name a YAML file"),
        (["--config", "{root}/latin.yaml"], "is not UTF-8 text; save it as UTF-8"),
        (["--config-dir", "{root}/none"], "is not a folder; name one that holds experiment/NAME.yaml"),
        (["--config-dir", "{root}/empty"], "holds no settings; put them into "),
        (["--config-dir", "{root}/taken"], "experiment=demo is there already; give the file another name"),
        (["--config", "{root}/fine.yaml", "model=kimi_k3"], "model=kimi_k3: --config gives the whole configuration"),
        (["--config", "{root}/fine.yaml", "--config", "x"], "--config=x: is given twice; give one"),
    ],
    ids=lambda value: "-".join(value).replace("/", "") if isinstance(value, list) else "",
)
def test_a_wrong_option_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    write(tmp_path / "fine.yaml", "train:\n  steps: 3\n")
    (tmp_path / "latin.yaml").write_bytes(b"run: {name: \xe9}")
    (tmp_path / "empty").mkdir()
    write(tmp_path / "taken" / "experiment" / "demo.yaml", "train: {steps: 3}\n")
    with pytest.raises(ConfigError) as error:
        compose_config([argument.format(root=tmp_path) for argument in arguments])
    assert message in str(error.value)
    assert "\n" not in str(error.value)
