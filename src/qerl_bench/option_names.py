"""What a run is called is what it is: an option keeps the `name` and the `_target_` of its own file.

Run names, tables, figures and claims go by these names. Values of an option may be overridden, since they go into the
run's fingerprint; its name and its class may not. Left out: whether a file under the name of a model holds that model.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra.conf import RuntimeConf
from omegaconf import DictConfig, OmegaConf

from qerl_bench.checks import ConfigError, require

LABELS = ("name", "_target_")
GLOBAL = "@package _global_"  # Hydra's mark of files that set several axes, such as experiments
# Its name is that of one of its generators, and decides what runs.
NAMED_BY_VALUE = "qerl_bench.task.reasoning_gym.ReasoningGym"


def is_label(key: str, target: object) -> bool:
    """Whether `key` of a node with that `_target_` is what its file alone decides."""
    return key == "_target_" or (key == "name" and target != NAMED_BY_VALUE)


def check_labels(cfg: DictConfig, runtime: RuntimeConf) -> None:
    """Raise ConfigError unless every option in `cfg`, the nested ones too, has the name and class of the file chosen.

    `cfg` still has its interpolations; `runtime` is the node hydra.runtime of the same composition. An option's name is
    that of its file: quant/nvfp4.yaml says nvfp4, model/shape/7b.yaml says shape-7b.
    """
    folders = [Path(source.path) for source in runtime.config_sources if source.schema == "file"]
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


def _check_option(node: Any, file: Path, place: str, option: str, options: list[str]) -> None:
    written, given = (OmegaConf.to_container(source, resolve=False) for source in (OmegaConf.load(file), node))
    assert isinstance(written, dict) and isinstance(given, dict)
    target, expected = written.get("_target_"), _name_of(option)
    require(target is not None, f"{file} must say by _target_ which class it is an option of")
    require(
        not is_label("name", target) or written.get("name") == expected,
        f"{file} says name: {written.get('name')}, and runs and tables are named by it; it must be that of the file: "
        f"{expected}",
    )
    for label in LABELS:
        if is_label(label, target) and given.get(label) != written[label]:
            wanted = given.get(label)
            other = (
                f"Choose {place}={wanted} instead" if wanted in options else f"Leave it out; {_choices(place, options)}"
            )
            raise ConfigError(
                f"{place.rpartition('@')[2]}.{label}={given.get(label)} cannot be set: runs, tables and figures go by "
                f"it, and with {place}={option} it is {written[label]}. {other}"
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


@lru_cache
def _classes(folder: Path, key: str) -> dict[object, str]:
    """The class of each option of an axis by the option's name."""
    options = _options([folder], key)
    files = {_name_of(option): OmegaConf.load(folder / key / f"{option}.yaml") for option in options}
    return {name: OmegaConf.select(file, "_target_") for name, file in files.items()}
