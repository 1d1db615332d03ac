"""Configs of tests in half the time: what Hydra and OmegaConf make again for each of thousands of them is made once.

A list of defaults with an interpolation, for which Hydra maps all choices anew at each file, ends in an AttributeError.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import omegaconf.base
from hydra._internal import defaults_list
from omegaconf import DictConfig, OmegaConf

from qerl_core.options.composer import Composer, plain_tree

QUICK = {  # module and name of a function: what is there instead
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
