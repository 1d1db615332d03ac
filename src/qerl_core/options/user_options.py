"""--config-dir DIR: options of one's own, YAML files DIR/<axis>/NAME.yaml and the Python modules in DIR that they name.

The flag becomes the override hydra.searchpath=[...], which sweeps hand to their runs, runs to their warm start, and
env.json to whoever repeats the command. Hydra's own flag does none of this.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from qerl_core.checks import ConfigError, require
from qerl_core.process.installation import CONF_DIR

FLAGS = ("--config-dir", "-cd")
KEY = "hydra.searchpath="

_in_use: list[Path] = []  # as sys.path, of this process
_loaded: dict[Path, ModuleType] = {}  # files that options name


def with_search_path(words: Sequence[str]) -> list[str]:
    """`words` with every --config-dir DIR gathered in one override at the end. Raises ConfigError unless DIR is a
    folder."""
    folders: list[Path] = []
    others: list[str] = []
    remaining = iter(words)
    for word in remaining:
        flag, equals, value = word.partition("=")
        if flag not in FLAGS:
            others.append(word)
            continue
        place = value if equals else next(remaining, "")
        require(Path(place).is_dir() and place != "", f"--config-dir {place}: give a folder with AXIS/NAME.yaml in it")
        folders.append(Path(place))
    given = " ".join(word for word in others if word.startswith(KEY))
    require(
        not (folders and given), f"--config-dir and {given} cannot be combined: give every folder as --config-dir DIR"
    )
    return [*others, *search_path(folders)]


def folders_in(words: Iterable[str]) -> list[Path]:
    """The folders that the override of `search_path` among `words` names."""
    given = " ".join(split_search_path(words)[0]).replace(r"\'", "\0")
    return [Path(place.replace("\0", "'")) for place in re.findall(r"file://([^',\]]+)", given)]


def split_search_path(words: Iterable[str]) -> tuple[list[str], list[str]]:
    """The overrides among `words` that say where else options lie, and the other words."""
    every = [*words]
    return [word for word in every if word.startswith(KEY)], [word for word in every if not word.startswith(KEY)]


def search_path(folders: Iterable[Path]) -> list[str]:
    """The override that has Hydra look for options in `folders` too; none without."""
    places = [str(folder.absolute()).replace("'", r"\'") for folder in folders]
    listed = ",".join(f"'file://{place}'" for place in places)
    return [f"{KEY}[{listed}]"] if places else []


def use(folders: Iterable[Path]) -> None:
    """Let Python find modules in those of `folders` that are not the project's, behind every installed package.

    Raises ConfigError if a YAML file in them has the place of one of the project's, which Hydra would take instead.
    """
    for folder in folders:
        if folder in (CONF_DIR, *_in_use):
            continue
        for file in folder.rglob("*.yaml"):
            taken = (CONF_DIR / file.relative_to(folder)).is_file()
            require(not taken, f"{file} would never be read, because the project has an option of that name: rename it")
        _in_use.append(folder)
        sys.path.append(str(folder))


def folders() -> list[Path]:
    """The folders of options of this process."""
    return [CONF_DIR, *_in_use]


def words_in_use() -> list[str]:
    """The override that gives a process of its own the folders of this one; none without."""
    return search_path(_in_use)


def load_file(key: str, file: Path) -> ModuleType:
    """The Python file that `key` names, executed once in a process. Raises ConfigError if that fails."""
    if file not in _loaded:
        spec = spec_from_file_location(file.stem, file)
        require(
            file.is_file() and spec is not None, f"{key}: there is no Python file {file}; give the path of one, *.py"
        )
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:  # whatever a user's file raises
            raise ConfigError(f"{key}: {file} cannot be executed: {type(error).__name__}: {error}") from error
        _loaded[file] = module
    return _loaded[file]


def loaded_files() -> list[Path]:
    """The files of `load_file` in this process."""
    return [*_loaded]
