"""Configs of tests in half the time: what Hydra and OmegaConf make again for each of thousands of them is made once.

A list of defaults with an interpolation, for which Hydra maps all choices anew at each file, ends in an AttributeError.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import omegaconf.base
from hydra._internal import defaults_list
from hydra._internal.config_repository import ConfigRepository
from omegaconf import DictConfig, OmegaConf

from qerl_core.options.composer import Composer, plain_tree
from qerl_core.process.installation import CONF_DIR

OURS = {str(CONF_DIR), "hydra.conf", ""}  # places of YAML files that no test changes


def read_once(load_config: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """Fresh copies of what each YAML file held at first, where nobody's own folders are searched."""
    read: dict[Any, bytes] = {}

    def load(repository: Any, config_path: str) -> Any:
        places = tuple(source.path for source in repository.sources)
        if not OURS.issuperset(places):
            return load_config(repository, config_path)
        if (config_path, places) not in read:
            read[config_path, places] = pickle.dumps(load_config(repository, config_path))
        return pickle.loads(read[config_path, places])

    return load


QUICK: dict[tuple[Any, str], Callable[[Any], Any]] = {  # module or class and name of a function: what is there instead
    (ConfigRepository, "load_config"): read_once,
    (omegaconf.base, "parse"): lru_cache(4096),  # an interpolation, into a tree that is only read
    (defaults_list, "_create_interpolation_map"): lambda _: lambda *_, **__: None,
}
GENUINE = {place: getattr(*place) for place in QUICK if hasattr(*place)}
for place, function in GENUINE.items():
    setattr(*place, QUICK[place](function))


def config(composer: Composer, words: list[str]) -> DictConfig:
    """OmegaConf.create(composer.tree(words)), without making each of 500 nodes again."""
    cfg, _ = composer.unresolved(words)
    OmegaConf.set_struct(cfg, None)
    _fill(cfg, plain_tree(cfg))
    return cfg


def _fill(node: Any, tree: Any) -> None:
    """Put what `tree` has in the place of each interpolation in `node`."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if OmegaConf.is_interpolation(node, key):
            node[key] = value
        elif isinstance(value, dict | list):
            _fill(node[key], value)
