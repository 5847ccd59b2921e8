"""Compose a RunConfig from run.yaml, groups, an experiment and the command line; strict throughout."""

import re
from collections.abc import Iterable, Sequence

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from configs.overrides import override_error, unknown_key, wrong_value
from configs.schema import register
from train.config import RunConfig, flatten


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
    overrides = [quote_rule(override) for override in overrides]
    for override in overrides:
        if (problem := override_error(override)) is not None:
            raise ConfigError(problem.replace("\n", r"\n"))
    register()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("configs", version_base="1.3"):
            composed = compose("run", overrides=overrides)
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
