"""What can be said of one override by itself, before Hydra composes; and what to say of names and values.

Hydra takes more than a run can use (sweeps, deletions, settings of its own), and its messages quote its grammar. Here
an override is parsed alone, so that a refusal is one line: key, value, rule, remedy.
"""

import dataclasses
import difflib
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from data.loader import SourceConfig
from train.config import RunConfig, flatten

GROUPS = {
    folder.name: sorted(path.stem for path in folder.glob("*.yaml"))
    for folder in sorted(Path(__file__).parent.iterdir())
    if any(folder.glob("*.yaml"))
}
"""Choices of every config group: a folder, and a file for each choice."""
CONVERTED = {
    "Integer": "a whole number",
    "Float": "a number",
    "bool": "true or false",
    "string": "text",
    "str": "text",
}
"""OmegaConf's names of types, in words."""
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list in brackets"}

TEXT_KEYS = {name for name, value in flatten(RunConfig()).items() if isinstance(value, str)} | {"data.sources[].path"}
"""Keys whose values are text, whatever they look like."""

UNDERSCORED = re.compile(r"[-+]?[\d.]*\d_[\d_.]*(e[-+]?\d+)?", re.IGNORECASE)


def keep_text(override: str) -> str:
    """The override with quotes where Hydra would take a text key's value for something else than the text it is.

    ``run.name=1_0`` would become "10", ``true`` "True", and ``routing.force=zipf(1.2)`` a function of Hydra's own.
    """
    name, _, text = override.partition("=")
    key, text = name.lstrip("+"), text.strip()
    if key == "data.sources" and text.startswith("["):
        return re.sub(r"""(\bpath\s*:\s*)(?!null\b)([\w./+~-]+)(?=\s*[,}])""", r'\1"\2"', override, flags=re.ASCII)
    if key not in TEXT_KEYS:
        return override
    # One word, which Hydra may take for a number or true; a rule; a folder of the user's. Not null, which is no text.
    rule = r"[a-z_]+\([^'\"]*\)" if key == "routing.force" else r"~[\w./-]*"
    plain = re.fullmatch(rf"(?!null$)[\w.+-]+|{rule}", text, re.ASCII | re.IGNORECASE)
    return f'{name}="{text}"' if plain else override


def override_error(override: str, *, groups: Mapping[str, Sequence[str]]) -> str | None:
    """What is wrong with ``override`` by itself, one line; None leaves the rest to Hydra and the schema.

    Args:
        groups: choices of every group; empty where a whole configuration is given instead.
    """
    if override.startswith("-"):
        return f"{override}: unknown option; --help lists them, and keys are set as KEY=VALUE"
    if override.startswith("~"):
        return f"{override}: keys and sections cannot be deleted; set keys to what they should be, as KEY=VALUE"
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException:
        return _malformed(override)
    except AttributeError:
        # Hydra's parser steps on inside of assertions.
        if __debug__:
            raise
        return f"{override}: Hydra reads no mapping under python -O; leave -O out and unset PYTHONOPTIMIZE"
    name, text = parsed.key_or_group, override.partition("=")[2]
    if not name:
        return f"{override}: names no key; write KEY=VALUE"
    if re.split("[./]", name)[0] == "hydra":
        remedy = "set run.dir" if name.endswith(".dir") else "leave it out"
        return f"{name}: is not used here, nor is any other setting of Hydra's own; {remedy}"
    if parsed.is_sweep_override():
        return _several(name, text)
    value = parsed.value()
    if parsed.is_add() and not parsed.is_force_add() and name in key_names():
        return f"{override}: {name} is there already and can only be changed; write {name}={text}"
    if name in GROUPS and not groups:
        return f"{name}={text}: --config gives the whole configuration, groups included; set the keys themselves"
    if name in GROUPS:
        choices = groups[name]
        return None if value in choices else f"{name}={text}: unknown choice; available: {', '.join(choices)}"
    inside = next((key for key in flatten(RunConfig()) if key.startswith(f"{name}.")), None)
    if inside is not None and not isinstance(value, dict):
        return f"{name}={text}: is a section and has no value of its own; set the keys in it, such as {inside}"
    if name in key_names() - TEXT_KEYS and (number := UNDERSCORED.search(re.sub(r"""(["']).*?\1""", "", text))):
        plain = text.replace(number[0], number[0].replace("_", ""))
        return f"{name}={text}: a number has no underscores; write {name}={plain}"
    return _sources_error(value, text) if name == "data.sources" else None


def unknown_key(name: str) -> str:
    """What to say of a key that does not exist."""
    near = _nearest(name)
    return f"{name}: unknown key" + (f"; did you mean {near}?" if near else "; --cfg prints all keys")


def _nearest(name: str) -> str | None:
    """The key, section or group that ``name`` was probably meant to be."""
    section, _, leaf = name.rpartition(".")
    for key in flatten(RunConfig()):
        if key.rpartition(".")[2] == leaf:
            return key  # in another section
    beside = {known.rpartition(".")[2]: known for known in key_names() if known.rpartition(".")[0] == section}
    initials = "".join(word[:1] for word in leaf.split("_"))
    if initials in beside:
        return beside[initials]  # learning_rate for lr
    if near := difflib.get_close_matches(leaf, beside, n=1):
        return beside[near[0]]
    return next(iter(difflib.get_close_matches(name, key_names(), n=1, cutoff=0.8)), None)


def wrong_value(name: str, text: str, message: str) -> str:
    """What to say of a value that its key cannot take.

    Args:
        name: the key, or an entry of a list, as in ``optim.betas[0]``.
        text: the value as it was written.
        message: OmegaConf's, which names the type where the default (null, an entry) does not.
    """
    key = re.sub(r"\[\d+\]$", "", name)
    default = flatten(RunConfig()).get(key)
    found = re.search(r"converted to (Integer|Float)|not a valid (bool)|to (string)|field of type '(str)'", message)
    kind = CONVERTED[found[found.lastindex or 0]] if found else KINDS.get(type(default))
    if kind is None:
        return f"{name}={text}: {message}"
    if isinstance(default, list):
        example = f", such as {key}=[{','.join(map(str, default or (1, 2)))}]"
    else:
        example = f", such as {key}={default}" if isinstance(default, float | int) and "number" in kind else ""
    return f"{name}={text}: must be {kind}{example}"


def key_names() -> set[str]:
    """All keys, sections and groups."""
    keys = flatten(RunConfig()).keys()
    return {*keys, *GROUPS, *(key.rsplit(".", depth)[0] for key in keys for depth in range(1, key.count(".") + 1))}


def _several(name: str, text: str) -> str:
    """What to say of several values, which Hydra takes for a sweep."""
    default = flatten(RunConfig()).get(name)
    remedy = "give one"
    if isinstance(default, list):
        remedy = f"a list stands in brackets: {shlex.quote(f'{name}=[{text}]')}"
    elif isinstance(default, str):
        remedy = f"such text needs quotes: {_quote(name, text)}"
    return f"{name}={text}: must be one value; {remedy}"


def _malformed(override: str) -> str:
    """What to say of an override that Hydra's grammar does not take."""
    name, equals, text = override.partition("=")
    if not equals:
        return f"{override}: is not KEY=VALUE; give it a value"
    if not re.fullmatch(r"\+{0,2}[\w./@]+", name):
        return f"{override}: is not KEY=VALUE; KEY is names joined by dots, such as train.steps"
    if text.startswith(("[", "{")):
        remedy = """close all brackets and quote such text in them, as in 'data.sources=[{path: "my text"}]'"""
    else:
        remedy = f"write {_quote(name, text)}"
    return f"{override}: special characters in a value need quotes; {remedy}"


def _quote(name: str, text: str) -> str:
    """The override that means just ``text``, as a shell takes it: quotes for Hydra within quotes for the shell."""
    # Hydra halves backslashes only before a quote, and OmegaConf would read ${ as a reference.
    escaped = re.sub(r'(\\*)("|\Z)', lambda found: found[1] * 2 + found[2].replace('"', '\\"'), text)
    escaped = escaped.replace("${", r"\${")
    return shlex.quote(f'{name}="{escaped}"')


def _sources_error(value: Any, text: str) -> str | None:
    """As `override_error`, for the one list of sections; Hydra's message would not say which entry is wrong."""
    if not isinstance(value, list):
        entry = text if isinstance(value, dict) else f"{{path: {value or 'FOLDER'}}}"
        return f"data.sources={text}: must be a list of sections; write 'data.sources=[{entry}]'"
    fields = [field.name for field in dataclasses.fields(SourceConfig)]
    for index, entry in enumerate(value):
        place = f"data.sources[{index}]"
        if not isinstance(entry, dict):
            shown = "null" if entry is None else entry
            return f"{place}={shown}: must be a section; write 'data.sources=[{{path: {entry or 'FOLDER'}}}]'"
        for name in entry:
            if name not in fields:
                near = difflib.get_close_matches(str(name), fields, n=1)
                meant = f"did you mean {near[0]}?" if near else f"known are {', '.join(fields)}"
                return f"{place}.{name}: unknown key; {meant}"
        try:
            OmegaConf.merge(OmegaConf.structured(SourceConfig), entry)
        except OmegaConfBaseException as error:
            return wrong_value(f"{place}.{error.key}", str(entry[error.key]), str(error.msg))
    return None
