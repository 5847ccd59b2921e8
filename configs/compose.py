"""Compose a RunConfig from run.yaml, groups, an experiment and the command line; strict throughout."""

import difflib
import re
from collections.abc import Iterable, Sequence

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.schema import RunConfig, flatten, register


class ConfigError(ValueError):
    """The configuration cannot be used; the message is one line per problem."""


def compose_config(overrides: Sequence[str]) -> RunConfig:
    """The effective configuration.

    Args:
        overrides: as on the command line: ``experiment=demo``, ``model=kimi_k3``, ``optim.lr=1e-3``.

    Raises:
        ConfigError: an unknown key or group option, a wrong type, or a malformed override; one line that names
            the nearest known key.
    """
    for override in overrides:
        if override.startswith("-"):
            raise ConfigError(f"{override}: unknown option; --help lists them, and keys are set as KEY=VALUE")
    register()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("configs", version_base="1.3"):
            composed = compose("run", overrides=[quote_rule(override) for override in overrides])
        refuse_unknown(flatten(OmegaConf.to_container(composed)))
        config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from error
    assert isinstance(config, RunConfig)
    return config


def quote_rule(override: str) -> str:
    """``routing.force=zipf(1.2)`` as Hydra must read it, or it would look for a function of its own of that name."""
    return re.sub(r"^(routing\.force=)([a-z_]+\([^'\"]*\))$", r"\1'\2'", override)


def refuse_unknown(names: Iterable[str]) -> None:
    """Refuse keys that are not in the schema: ``+key=value`` adds them past Hydra's own check.

    Raises:
        ConfigError: naming the first such key and the nearest known one.
    """
    known = flatten(RunConfig())
    for name in names:
        if name not in known:
            raise ConfigError(unknown_key(name))


def unknown_key(name: str) -> str:
    """What to say of a key that does not exist."""
    near = difflib.get_close_matches(name, flatten(RunConfig()), n=1, cutoff=0.5)
    return f"{name}: unknown key" + (f"; did you mean {near[0]}?" if near else "; --cfg prints all keys")


def explain(error: BaseException) -> str:
    """One line for an error of Hydra's or OmegaConf's, with the nearest known name."""
    messages = [str(error)]
    cause = error.__cause__ or error.__context__
    while cause is not None:
        messages.append(str(cause))
        cause = cause.__cause__ or cause.__context__
    text = "\n".join(messages)
    # Hydra wraps OmegaConf's message, which says what is wrong, in one that only names the override.
    telling = [m.strip() for m in messages if m.strip() and not m.startswith(("Error merging", "Error parsing"))]
    detail = (telling or messages)[0].splitlines()[0]
    full_key = re.search(r"full_key: (\S+)", text)
    unknown = re.search(r"Could not override '([^']+)'", text) or re.search(r"Key '([^']+)' (?:is )?not in", text)
    if unknown:
        return unknown_key(full_key[1] if full_key else unknown[1])
    malformed = re.search(r"Error parsing override '(.*)'", text)
    if malformed:
        return f"{malformed[1]}: is not KEY=VALUE ({detail}); quote values with spaces or brackets"
    option = re.search(r"Could not find '([^']+)'.*?Available options in '[^']+':(.*?)(?:Config search|$)", text, re.S)
    if option:
        choices = ", ".join(sorted(set(option[2].split())))
        return f"{option[1].replace('/', '=', 1)}: unknown choice; available: {choices}"
    override = re.search(r"Error merging override (\S+)=", text)
    key = full_key or override
    return f"{key[1]}: {detail}" if key else detail
