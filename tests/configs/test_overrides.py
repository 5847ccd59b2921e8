"""One override that cannot be used is one line: key, value, rule, remedy."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from configs.compose import ConfigError, compose_config
from configs.overrides import GROUPS, unknown_key


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+hydra.foo=3", "hydra.foo: is not used here, nor is any other setting of Hydra's own; leave it out"),
        ("hydra.run.dir=x", "hydra.run.dir: is not used here, nor is any other setting of Hydra's own; set run.dir"),
        (
            "hydra.sweep.dir=x",
            "hydra.sweep.dir: is not used here, nor is any other setting of Hydra's own; set run.dir",
        ),
        ("hydra/launcher=x", "hydra/launcher: is not used here"),
        ("hydra=3", "hydra: is not used here"),
        ("~train", "~train: keys and sections cannot be deleted; set keys to what they should be, as KEY=VALUE"),
        ("~train.steps", "~train.steps: keys and sections cannot be deleted"),
        ("~optim.lr=1", "~optim.lr=1: keys and sections cannot be deleted"),
        ("~experiment", "~experiment: keys and sections cannot be deleted"),
        ("evaluate.prompt=def f(x)", """; write 'evaluate.prompt="def f(x)"'"""),
        ("evaluate.prompt=[a", """; close all brackets and quote such text in them, as in 'data.sources=[{path: "my"""),
        ("data.sources[0].weight=2", "data.sources[0].weight=2: is not KEY=VALUE; KEY is names joined by dots"),
        ("=3", "=3: names no key; write KEY=VALUE"),
        ("", ": is not KEY=VALUE"),
        ("train.steps=1,2", "train.steps=1,2: must be one value; give one"),
        ("train.steps=range(1,3)", "train.steps=range(1,3): must be one value; give one"),
        (
            "parallel.layout=1,2",
            "parallel.layout=1,2: must be one value; a list stands in brackets: 'parallel.layout=[1",
        ),
        (
            "evaluate.prompt=a,b",
            """evaluate.prompt=a,b: must be one value; such text needs quotes: 'evaluate.prompt="a""",
        ),
        ("experiment=demo,demo", "experiment=demo,demo: must be one value; give one"),
        ("model=null", "model=null: unknown choice; available: kimi_k2_1t"),
        ("model=3", "model=3: unknown choice; available: "),
        ("model=[kimi_k3,kimi_k2_1t]", "model=[kimi_k3,kimi_k2_1t]: unknown choice; available: "),
        ("experiment=null", "experiment=null: unknown choice; available: demo"),
        (
            "+experiment=demo",
            "+experiment=demo: experiment is there already and can only be changed; write experiment=demo",
        ),
        ("+optim.lr=2", "+optim.lr=2: optim.lr is there already and can only be changed; write optim.lr=2"),
        (
            "model.moe=3",
            "model.moe=3: is a section and has no value of its own; set the keys in it, such as model.moe.",
        ),
        ("model.moe=null", "model.moe=null: is a section"),
        ("train=", "train=: is a section"),
        ("optim=muon", "optim=muon: is a section and has no value of its own; set the keys in it, such as optim.lr"),
        ("data.sources=x", "data.sources=x: must be a list of sections; write 'data.sources=[{path: x}]'"),
        ("data.sources=null", "data.sources=null: must be a list of sections; write 'data.sources=[{path: FOLDER}]'"),
        ("data.sources={path: x}", "must be a list of sections; write 'data.sources=[{path: x}]'"),
        ("data.sources=[/a/b]", "data.sources[0]=/a/b: must be a section; write 'data.sources=[{path: /a/b}]'"),
        ("data.sources=[{path: x}, null]", "data.sources[1]=null: must be a section"),
        ("data.sources=[{wieght: 1, path: x}]", "data.sources[0].wieght: unknown key; did you mean weight?"),
        ("data.sources=[{zzz: 1}]", "data.sources[0].zzz: unknown key; known are path, weight"),
        ("data.sources=[{path: x}, {path: y, weight: abc}]", "data.sources[1].weight=abc: must be a number"),
    ],
)
def test_what_cannot_be_used_is_one_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose_config([override])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "def f(x)",
        "a=b",
        "日本",
        "don't (",
        'say "hi" (',
        "${",
        "a,b",
        "range(3)",
        '(\\"',
        "a\\b ends in (\\",
        "$(x) `y` !",
    ],
)
def test_the_quotes_that_are_proposed_give_the_text(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        compose_config([f"evaluate.prompt={text}"])
    proposed = re.split(r"; write |needs quotes: ", str(error.value), maxsplit=1)[1]
    assert compose_config(shlex.split(proposed)).evaluate.prompt == text


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("modell", "model"),
        ("experimen", "experiment"),
        ("optim.learning_rate", "optim.lr"),
        ("optim.weigth_decay", "optim.weight_decay"),
        ("steps", "train.steps"),
        ("optim.warmup_tokens", "schedule.warmup_tokens"),
        ("model.kda.head", "model.kda.heads"),
        ("paralel.tp", "parallel.tp"),
    ],
)
def test_the_nearest_name_is_proposed(name: str, meant: str) -> None:
    assert unknown_key(name) == f"{name}: unknown key; did you mean {meant}?"


@pytest.mark.parametrize("name", ["nonsense", "train.foo", "batch.ramp"])
def test_no_name_is_proposed_that_is_not_near(name: str) -> None:
    assert unknown_key(name) == f"{name}: unknown key; --cfg prints all keys"


def test_what_can_be_used_is_left_alone() -> None:
    overrides = ["++optim.lr=1", "train={steps: 3}", "data.sources=[{path: x}]", "data.sources.0.weight=2"]
    config = compose_config([*overrides, "evaluate.prompt=a b", "parallel.layout=[1,2]"])
    assert (config.optim.lr, config.train.steps, config.evaluate.prompt) == (1.0, 3, "a b")
    assert (config.data.sources[0].path, config.data.sources[0].weight) == (str(Path("x").absolute()), 2.0)
    assert set(GROUPS) == {"model", "experiment"}


def test_a_mapping_under_python_o_is_one_line() -> None:
    code = "from configs.compose import compose_config; compose_config(['data.sources=[{path: /corpus}]'])"
    root = Path(__file__).resolve().parents[2]
    found = subprocess.run([sys.executable, "-O", "-c", code], cwd=root, capture_output=True, text=True, check=False)
    line = found.stderr.splitlines()[-1]
    assert line.endswith(": Hydra reads no mapping under python -O; leave -O out and unset PYTHONOPTIMIZE")
