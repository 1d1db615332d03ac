"""A run is called what it is: an option keeps the `name` and the `_target_` of its own YAML file.

Runs, tables, figures and claims go by these names. Other values of an option may be overridden, because they are part
of the run's fingerprint. Left out: whether a file under the name of a model holds that model.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from functools import lru_cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from hydra.conf import RuntimeConf
from omegaconf import DictConfig, OmegaConf

from qerl_bench.checks import ConfigError, require

GLOBAL = "@package _global_"  # Hydra's mark of files that set several axes, such as experiments
# The `name` of this class is one of its generators, and decides what runs.
NAMED_BY_VALUE = "qerl_bench.task.reasoning_gym.ReasoningGym"


def is_fixed(key: str, target: object) -> bool:
    """Whether only its file may set `key` of a node with that `_target_`."""
    return key == "_target_" or (key == "name" and target != NAMED_BY_VALUE)


def check_option_names(cfg: DictConfig, runtime: RuntimeConf) -> None:
    """Raise ConfigError unless every option in `cfg`, nested ones included, has the name and class of its file.

    `cfg` still has its interpolations; `runtime` is the node hydra.runtime of the same composition. An option is named
    after its file: quant/nvfp4.yaml says nvfp4, model/shape/7b.yaml says shape-7b.
    """
    folders = search_folders(runtime)
    choices = {str(place): choice for place, choice in runtime.choices.items()}
    for key in map(str, cfg):
        by_hand = any((folder / key).is_dir() for folder in folders) and choices.get(key) is None
        require(not by_hand, f"{key} is one option: {_choices(key, _options(folders, key))}")
    for place, choice in choices.items():
        group, _, package = place.partition("@")
        option = str(choice).removesuffix(".yaml")
        file = next((file for folder in folders if (file := folder / group / f"{option}.yaml").is_file()), None)
        node = OmegaConf.select(cfg, package or group)
        if file is not None and OmegaConf.is_dict(node) and GLOBAL not in file.read_text():
            _check_option(node, file, place, option, _options(folders, place))


def search_folders(runtime: RuntimeConf) -> list[Path]:
    """The folders in which Hydra found options: conf/ and those of hydra.searchpath, file:// or pkg://, in order."""
    folders = []
    for source in runtime.config_sources:
        if source.schema == "file":
            folders.append(Path(source.path))
        elif source.schema == "pkg" and source.provider != "hydra":
            folders.append(Path(str(files(source.path))))
    return folders


def _check_option(node: Any, file: Path, place: str, option: str, options: list[str]) -> None:
    written, given = (OmegaConf.to_container(source, resolve=False) for source in (OmegaConf.load(file), node))
    assert isinstance(written, dict) and isinstance(given, dict)
    target, expected = written.get("_target_"), _name_of(option)
    require(target is not None, f"{file} must name the class of the option in _target_")
    require(
        not is_fixed("name", target) or written.get("name") == expected,
        f"{file} says name: {written.get('name')}; runs and tables are named by it, so it must be the name of the "
        f"file: {expected}",
    )
    for key in ("name", "_target_"):
        value = given.get(key)
        if is_fixed(key, target) and value != written[key]:
            remedy = (
                f"Choose {place}={value} instead" if value in options else f"Leave it out; {_choices(place, options)}"
            )
            raise ConfigError(
                f"{place.rpartition('@')[2]}.{key}={value} cannot be set: runs, tables and figures go by it, and with "
                f"{place}={option} it is {written[key]}. {remedy}"
            )


def _name_of(option: str) -> str:
    return option.replace("/", "-")


def _options(folders: list[Path], place: str) -> list[str]:
    groups = [folder / place.partition("@")[0] for folder in folders]
    return sorted({str(file.relative_to(group).with_suffix("")) for group in groups for file in group.rglob("*.yaml")})


def _choices(place: str, options: list[str]) -> str:
    return f"choose {place}={'|'.join(options)}"


def check_class(folder: Path, key: str, node: Any) -> None:
    """Raise ConfigError if a node has the name of an option in `folder`/`key` and the class of another.

    For configs without Hydra's record of what was chosen, such as the config.yaml of a run.
    """
    target = _classes(folder, key).get(node.get("name"))
    require(
        target in (None, node._target_),
        f"the config calls {key} {node.get('name')}, which is {target}, but its {key}._target_ is {node._target_}. A "
        f"run is named by what it is: leave {key}.name and {key}._target_ as {key}={node.get('name')} has them",
    )


def make_option(place: str, node: Any) -> Any:
    """The object that the container `node` describes: a dict with `_target_` is an instance of that class.

    The class may be in any installed module. Raises ConfigError if it cannot be imported, or is no dataclass, as every
    option is, and whatever the class raises.
    """
    if isinstance(node, list):
        return [make_option(f"{place}[{number}]", part) for number, part in enumerate(node)]
    if not isinstance(node, dict):
        return node
    values = {key: make_option(f"{place}.{key}", part) for key, part in node.items()}
    if "_target_" not in values:
        return values
    target = str(values.pop("_target_"))
    module, _, name = target.rpartition(".")
    try:
        option = getattr(import_module(module), name)
    except Exception as error:  # whatever a user's module raises
        raise ConfigError(
            f"{place}._target_={target} cannot be imported: {error}. Is its package installed?"
        ) from error
    require(
        isinstance(option, type) and is_dataclass(option),
        f"{place}._target_ must name a dataclass, as every option is, got {target!r}",
    )
    return option(**values)


@lru_cache
def _classes(folder: Path, key: str) -> dict[object, str]:
    """The class of each option of an axis by the option's name."""
    options = _options([folder], key)
    nodes = {_name_of(option): OmegaConf.load(folder / key / f"{option}.yaml") for option in options}
    return {name: OmegaConf.select(node, "_target_") for name, node in nodes.items()}
