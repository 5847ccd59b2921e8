"""Compose a RunConfig from run.yaml, groups, an experiment and the command line; strict throughout."""

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.files import GIVEN, register_folder, register_given
from configs.overrides import GROUPS, keep_text, override_error, unknown_key, wrong_value
from configs.schema import register
from data.edges import place_error
from train.config import RunConfig, flatten

OPTIONS = {"--config-dir": "FOLDER", "--config": "FILE"}


class ConfigError(ValueError):
    """The configuration cannot be used; the message is one line per problem."""


def compose_config(arguments: Sequence[str]) -> RunConfig:
    """The effective configuration, its paths absolute.

    Args:
        arguments: as on the command line: overrides (``experiment=demo``, ``model=kimi_k3``, ``optim.lr=1e-3``),
            ``--config-dir FOLDER`` for choices of the user's own, ``--config FILE`` for a whole configuration to start
            from; see `configs.files`.

    Raises:
        ConfigError: a file that cannot be used, an unknown key or group option, a wrong type, or a malformed override;
            one line that names the nearest known key.
    """
    options, overrides = split_options(arguments)
    overrides = [keep_text(override) for override in overrides]
    register()
    try:
        groups = register_folder(options["--config-dir"], GROUPS) if "--config-dir" in options else GROUPS
        if "--config" in options:
            register_given(options["--config"])
    except ValueError as error:
        raise ConfigError(str(error)) from error
    for override in overrides:
        problem = override_error(override, groups={} if "--config" in options else groups)
        if problem is not None:
            raise ConfigError(problem.replace("\n", r"\n"))
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("configs", version_base="1.3"):
            composed = compose(GIVEN if "--config" in options else "run", overrides=overrides)
        refuse_unknown(flatten(OmegaConf.to_container(composed)))
        config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from error
    assert isinstance(config, RunConfig)
    return resolve_paths(config)


def split_options(arguments: Sequence[str]) -> tuple[dict[str, Path], list[str]]:
    """The options with their paths, and the overrides.

    Raises:
        ConfigError: an option without its path, or given twice.
    """
    options: dict[str, Path] = {}
    overrides, left = [], list(arguments)
    while left:
        argument = left.pop(0)
        name, equals, value = argument.partition("=")
        if name not in OPTIONS:
            overrides.append(argument)
            continue
        value = value if equals else (left.pop(0) if left else "")
        if not value:
            raise ConfigError(f"{name}: names nothing; write {name} {OPTIONS[name]}")
        if name in options:
            raise ConfigError(f"{name}={value}: is given twice; give one")
        if (problem := place_error(name, value)) is not None:
            raise ConfigError(problem)
        options[name] = Path(value).expanduser().absolute()
    return options, overrides


def resolve_paths(config: RunConfig) -> RunConfig:
    """The same configuration with every path absolute, so that it means the same from any folder."""
    for name in ("dir", "cache", "init_from"):
        setattr(config.run, name, absolute(getattr(config.run, name)))
    for source in config.data.sources:
        source.path = absolute(source.path)
    kind, colon, path = config.routing.force.partition("trace:")
    if not kind and colon:
        config.routing.force = f"trace:{absolute(path)}"
    return config


def absolute(path: str) -> str:
    """``path`` from the root, ``~`` expanded; as it is where it is empty or an address, which are refused as such."""
    return path if not path.strip() or place_error("", path) else os.path.abspath(os.path.expanduser(path))


def refuse_unknown(names: Iterable[str]) -> None:
    """Refuse keys that are not in the schema: ``+key=value`` adds them past Hydra's own check.

    Raises:
        ConfigError: naming the first such key and the nearest known one.
    """
    known = flatten(RunConfig())
    for name in names:
        if name not in known:
            raise ConfigError(unknown_key(name))


def explain(error: BaseException) -> str:
    """One line for an error of Hydra's or OmegaConf's, with the nearest known name."""
    messages = [str(error)]
    cause = error.__cause__ or error.__context__
    while cause is not None:
        messages.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    text = "\n".join(messages)
    # Hydra wraps OmegaConf's message, which says what is wrong, in one that only names the override.
    telling = [
        m.strip() for m in messages if m.strip() and not m.startswith(("Error merging", "Error parsing", "In '"))
    ]
    detail = (telling or messages)[0].splitlines()[0]
    full_key = re.search(r"full_key: (\S+)", text)
    unknown = re.search(r"Could not override '([^']+)'", text) or re.search(r"Key '([^']+)' (?:is )?not in", text)
    if unknown:
        return unknown_key(full_key[1] if full_key else unknown[1])
    override = re.search(r"Error merging override \+*(\S+?)=(.*)", text)
    key = full_key or override
    if key is None:
        return detail
    value = re.search(r"Value '(.*)' of type|Value '(.*)' is not|to string: '(.*)'$", detail)
    if value:
        return wrong_value(key[1], value[value.lastindex or 0], detail)
    if override and key[1] == override[1]:
        return wrong_value(key[1], override[2], detail)
    remedy = r"; ${KEY} takes the value of another key, and \${ is plain text" if "nterpolation" in detail else ""
    return f"{key[1]}: {detail}{remedy}"
