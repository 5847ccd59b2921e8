"""Settings that users keep in files of their own: a folder of group files, or one whole configuration.

    mine/experiment/long.yaml    --config-dir mine experiment=long
    mine/model/wide.yaml         --config-dir mine model=wide
    runs/demo/config.yaml        --config runs/demo/config.yaml

Both become entries of Hydra's ConfigStore, so that they compose as the files of this folder do. They are read
strictly: a key given twice is refused, text stays as it is written, and a number is a decimal number.
"""

from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_store import ConfigStore

from configs.overrides import TEXT_KEYS, UNDERSCORED, key_names, unknown_key
from train.config import RunConfig, flatten

GIVEN = "given"
"""The name of a whole configuration in the ConfigStore."""


def register_folder(folder: Path, groups: dict[str, list[str]]) -> dict[str, list[str]]:
    """Make every ``<group>/<name>.yaml`` of the folder a choice; returns ``groups`` with these added.

    A file's keys are those of its group, and of the whole configuration for an experiment or where its first line is
    ``# @package _global_``, as Hydra writes it.

    Raises:
        ValueError: the folder holds no such file, one cannot be read, or its name is taken.
    """
    if not folder.is_dir():
        raise ValueError(f"--config-dir={folder}: is not a folder; name one that holds experiment/NAME.yaml")
    known, found = {name: list(choices) for name, choices in groups.items()}, 0
    for group in groups:
        for path in sorted((folder / group).glob("*.yaml")):
            if path.stem in groups[group]:
                raise ValueError(f"{path}: {group}={path.stem} is there already; give the file another name")
            whole = group == "experiment" or "@package _global_" in read_text(path).partition("\n")[0]
            content = load_yaml(path, prefix="" if whole else group)
            package = "_global_" if whole else group
            ConfigStore.instance().store(name=path.stem, node=content, group=group, package=package)
            known[group].append(path.stem)
            found += 1
    if not found:
        raise ValueError(
            f"--config-dir={folder}: holds no settings; put them into {folder}/experiment/NAME.yaml (or "
            f"{', '.join(group for group in groups if group != 'experiment')}/NAME.yaml)"
        )
    return known


def register_given(path: Path) -> None:
    """Make a whole configuration, such as a run's own config.yaml, what overrides start from, named `GIVEN`.

    Its values are taken as they stand: ``${`` is plain text in them.

    Raises:
        ValueError: it cannot be read.
    """
    content = _plain(load_yaml(path, prefix=""))
    ConfigStore.instance().store(name=GIVEN, node={"defaults": ["schema", "_self_"], **content})


def read_text(path: Path) -> str:
    """The file's text.

    Raises:
        ValueError: it cannot be read or is not UTF-8.
    """
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text; save it as UTF-8") from error
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); name a YAML file") from error


def load_yaml(path: Path, *, prefix: str) -> dict[str, Any]:
    """A file's keys and values.

    Args:
        prefix: the section whose keys they are; "" for the whole configuration.

    Raises:
        ValueError: naming file and line.
    """
    text, loader = read_text(path), None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return {}
        if not isinstance(node, yaml.MappingNode):
            raise ValueError(f"{path}: holds no keys and values; write KEY: VALUE lines")  # noqa: TRY004
        _check_node(node, prefix, path=path)
        content = loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f":{mark.line + 1}"
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ValueError(f"{path}{where}: is not valid YAML ({problem}); mend that line") from error
    except RecursionError as error:
        raise ValueError(f"{path}: is nested too deeply; mend it") from error
    finally:
        if loader is not None:
            loader.dispose()
    return content


def _check_node(node: yaml.Node, name: str, *, path: Path) -> None:
    """Refuse what a key of this name cannot be, and mark as text what is the value of a text key."""
    place = f"{path}:{node.start_mark.line + 1}"
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            line, word = key.start_mark.line + 1, str(key.value)
            if word in lines:
                raise ValueError(f"{path}:{line}: {word} is given twice, first in line {lines[word]}; keep one")
            lines[word], inner = line, f"{name}.{word}" if name else word
            if inner == "defaults":
                continue
            if "[]" not in inner and inner not in key_names():
                raise ValueError(f"{path}:{line}: {unknown_key(inner)}")
            _check_node(value, inner, path=path)
    elif "[]" not in name and name not in flatten(RunConfig()):
        raise ValueError(f"{place}: {name}: is a section and has no value of its own; write its keys below it")
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _check_node(value, f"{name}[]", path=path)
    elif name in TEXT_KEYS:
        node.tag = "tag:yaml.org,2002:str"
    elif UNDERSCORED.fullmatch(node.value):
        plain = node.value.replace("_", "")
        raise ValueError(f"{place}: {name}={node.value}: write {plain}, without underscores")


def _plain(tree: Any) -> Any:
    """The same values, with what OmegaConf would take for references marked as plain text."""
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_plain(value) for value in tree]
    return tree.replace("${", r"\${") if isinstance(tree, str) else tree
