"""Options and their classes: a run is called what it is, so an option keeps the `name` and `_target_` of its YAML file.

Runs, tables, figures and claims go by these names. Classes from outside of the project are refused unless a YAML file
names them. Other values of an option may be overridden, because they are part of the run's fingerprint. A `name` that
is an interpolation follows another key, as a model's follows its id.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import lru_cache
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

from hydra.conf import RuntimeConf
from omegaconf import DictConfig, OmegaConf

from qerl_core.checks import ConfigError, require
from qerl_core.file_state import FileState, file_state
from qerl_core.options import user_options
from qerl_core.options.files import alternatives, find_option, options_of

OWN = "qerl_bench."  # how the names of the project's own classes begin
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
        if choices.get(key) is None and any((folder / key).is_dir() for folder in folders):
            raise ConfigError(f"{key} is one option: {_choices(key, _options(folders, key))}")
    for place, choice in choices.items():
        group, _, package = place.partition("@")
        option = str(choice).removesuffix(".yaml")
        file = find_option(folders, group, option)
        node = OmegaConf.select(cfg, package or group)
        if file.is_file() and OmegaConf.is_dict(node) and GLOBAL not in file.read_text():
            _check_option(node, ChainMap(*reversed(layers(folders, group, option))), file, place, option, folders)
    refuse_foreign_classes(OmegaConf.to_container(cfg, resolve=False), "", folders)


def format_name(quant: str, quantizer: str) -> str:
    """What a weight format is called among others: nvfp4, or nvfp4+gptq if its codes are not the nearest ones."""
    return quant if quantizer == "rtn" else f"{quant}+{quantizer}"


def format_words(name: str) -> list[str]:
    """The words of a run in the format that `format_name` calls so."""
    quant, _, quantizer = name.partition("+")
    return [f"quant={quant}", *([f"quantizer={quantizer}"] if quantizer else [])]


def search_folders(runtime: RuntimeConf) -> list[Path]:
    """The folders in which Hydra found options: conf/ and those of hydra.searchpath, file:// or pkg://, in order."""
    folders = []
    for source in runtime.config_sources:
        if source.schema == "file":
            folders.append(Path(source.path))
        elif source.schema == "pkg" and source.provider != "hydra":
            folders.append(Path(str(files(source.path))))
    return folders


def refuse_foreign_classes(node: Any, place: str, folders: Sequence[Path], had: Sequence[str] = ()) -> None:
    """Raise ConfigError if a `_target_` anywhere in the container `node` is no class that an option may have.

    These are the project's own, and those that a YAML file in one of `folders` names. Nothing is imported. `had` are
    the folders that a run with this class had, which the message names.
    """
    if isinstance(node, list):
        node = dict(enumerate(node))
    if not isinstance(node, dict):
        return
    for key, part in node.items():
        refuse_foreign_classes(part, f"{place}.{key}".lstrip("."), folders, had)
    if "_target_" in node and not str(node["_target_"]).startswith(OWN):
        named = (found for folder in folders for file in folder.rglob("*.yaml") for found in _targets(_read(file)))
        require(
            node["_target_"] in named,
            f"{place}._target_={node['_target_']} is no option of this project, and no YAML file in "
            f"{', '.join(map(str, folders)) or 'a folder of options'} names it. If you trust it, add the folder of its "
            f"YAML file: {' '.join(f'--config-dir {folder}' for folder in had or ['DIR'])}",
        )


def _targets(node: Any) -> Iterator[Any]:
    """Every `_target_` in a container."""
    if isinstance(node, dict):
        yield from (part for key, part in node.items() if key == "_target_")
        node = [*node.values()]
    if isinstance(node, list):
        for part in node:
            yield from _targets(part)


def _read(file: Path) -> Any:
    return _content(file, file_state(file))


@lru_cache(maxsize=1024)
def _content(file: Path, state: FileState) -> Any:
    """What the file holds in this state, in containers that must not be changed."""
    return OmegaConf.to_container(OmegaConf.load(file), resolve=False)


def _check_option(
    node: Any, written: Mapping[str, Any], file: Path, place: str, option: str, folders: list[Path]
) -> None:
    given = OmegaConf.to_container(node, resolve=False)
    assert isinstance(given, dict)
    target, expected = written.get("_target_"), _name_of(option)
    follows = str(written.get("name")).startswith("${")
    require(target is not None, f"{file} must name the class of the option in _target_")
    require(
        follows or not is_fixed("name", target) or written.get("name") == expected,
        f"{file} says name: {written.get('name')}; runs and tables are named by it, so it must be the name of the "
        f"file: {expected}",
    )
    for key in ("name", "_target_"):
        value = given.get(key)
        if is_fixed(key, target) and value != written[key]:
            options = _options(folders, place)
            remedy = (
                f"Choose {place}={value} instead" if value in options else f"Leave it out; {_choices(place, options)}"
            )
            raise ConfigError(
                f"{place.rpartition('@')[2]}.{key}={value} cannot be set: runs, tables and figures go by it, and with "
                f"{place}={option} it is {written[key]}. {remedy}"
            )


def load_option(folders: Sequence[Path], group: str, option: str) -> Any:
    """The content of an option's file, on top of the options from which a preset takes its other values."""
    return OmegaConf.merge({}, *layers(folders, group, option))


def layers(folders: Sequence[Path], group: str, option: str) -> list[dict[str, Any]]:
    """What the files of an option hold, its own last."""
    files = layer_files(folders, group, option)
    return [{key: part for key, part in _read(file).items() if key != "defaults"} for file in files]


def layer_files(folders: Sequence[Path], group: str, option: str) -> list[Path]:
    """The files from which an option takes its values, its own last."""
    file = find_option(folders, group, option)
    node = _read(file)
    require(isinstance(node, dict), f"{file} must have lines KEY: VALUE, got {node!r}")
    place = option.rpartition("/")[0]
    named = [name for name in node.get("defaults", []) if isinstance(name, str) and name != "_self_"]
    bases = [base for name in named for base in layer_files(folders, group, f"{place}/{name}".lstrip("/"))]
    return [*bases, file]


def _name_of(option: str) -> str:
    return option.replace("/", "-")


def _options(folders: list[Path], place: str) -> list[str]:
    return sorted(options_of(folders, place.partition("@")[0]))


def _choices(place: str, options: list[str]) -> str:
    return f"choose {alternatives(place, options)}"


def check_class(folder: Path, key: str, node: Mapping[str, Any]) -> None:
    """Raise ConfigError if a node has the name of an option in `folder`/`key` and the class of another.

    For configs without Hydra's record of what was chosen, such as the config.yaml of a run.
    """
    name, given = node.get("name"), node["_target_"]
    target = _class(folder, key, name)
    require(
        target in (None, given),
        f"the config calls {key} {name}, which is {target}, but its {key}._target_ is {given}. A run is named by what "
        f"it is: leave {key}.name and {key}._target_ as {key}={name} has them",
    )


def make_option(place: str, node: Any) -> Any:
    """The object that the container `node` describes: a dict with `_target_` is an instance of that class.

    The class may be in any installed module, so `refuse_foreign_classes` comes first for what others wrote.
    Raises ConfigError if it cannot be imported, or is no dataclass, as every option is, and whatever the class raises.
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
        isinstance(option, type)
        and is_dataclass(option)
        and (option.__module__.startswith(OWN) or not target.startswith(OWN)),
        f"{place}._target_ must name a dataclass, as every option is, got {target!r}",
    )
    return option(**values)


def option(axis: str, name: str) -> Any:
    """The spec of an option with its defaults."""
    return make_option(axis, OmegaConf.to_container(load_option(user_options.folders(), axis, name), resolve=True))


def choice_of(folders: Sequence[Path], axis: str, name: object) -> str | None:
    """The word that chooses the option called `name`: small/25m for small-25m. None if no file in `folders` has it."""
    return next((option for option in _options([*folders], axis) if _name_of(option) == name), None)


@lru_cache(maxsize=1024)
def _class(folder: Path, key: str, name: object) -> object:
    """The class of the option of that name; None if there is none."""
    option = choice_of([folder], key, name)
    return None if option is None else load_option([folder], key, option).get("_target_")
