"""Compose a RunConfig from run.yaml, groups, an experiment and the command line; strict throughout."""

import difflib
import re
from collections.abc import Sequence

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
    register()
    GlobalHydra.instance().clear()
    try:
        with initialize_config_module("configs", version_base="1.3"):
            composed = compose("run", overrides=list(overrides))
        config = OmegaConf.to_object(composed)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(explain(error)) from error
    assert isinstance(config, RunConfig)
    return config


def explain(error: BaseException) -> str:
    """One line for an error of Hydra's or OmegaConf's, with the nearest known name."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    text = " ".join(str(cause) for cause in causes)
    lines = [line.strip() for line in str(causes[-1]).splitlines() if line.strip()]
    full_key = re.search(r"full_key: (\S+)", text)
    unknown = re.search(r"Could not override '([^']+)'", text) or re.search(r"Key '([^']+)' (?:is )?not in", text)
    if unknown:
        key = full_key[1] if full_key else unknown[1]
        near = difflib.get_close_matches(key, flatten(RunConfig()), n=1, cutoff=0.5)
        return f"{key}: unknown key" + (f"; did you mean {near[0]}?" if near else "; see configs/run.yaml")
    option = re.search(
        r"Could not find '([^']+)'.*?Available options in '[^']+':\s*(.*?)(?:Config search path|$)",
        text,
        re.S,
    )
    if option:
        choices = ", ".join(sorted(set(option[2].split()))[:30])
        return f"{option[1].replace('/', '=', 1)}: unknown choice; available: {choices}"
    return f"{full_key[1]}: {lines[0]}" if full_key else lines[0]
