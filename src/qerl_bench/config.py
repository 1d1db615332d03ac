"""From command-line words to validated specs.

`compose` makes a config of words and YAML files (composer.py), `build` an `Experiment` of it (experiment_spec.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from qerl_bench.experiment_spec import Experiment
from qerl_core.checks import ConfigError, require
from qerl_core.options.composer import Composer
from qerl_core.options.files import plain_keys
from qerl_core.options.fingerprint import as_dict, plain
from qerl_core.options.names import check_class, make_option
from qerl_core.options.renamed_keys import outdated
from qerl_core.process.installation import CONF_DIR


def compose(overrides: list[str] | None = None) -> DictConfig:
    """The resolved config of `python src/run.py OVERRIDES`, for checks, notebooks and tests."""
    return OmegaConf.create(Composer().tree(overrides or []))


def build(cfg: DictConfig) -> Experiment:
    """Turn a composed config into validated specs.

    Raises ConfigError with the reason if a value or a combination of options cannot work.
    """
    tree = as_dict(cfg)
    old = outdated(tree)
    require(not old, "; ".join(old))
    nodes = {key: spec(tree, key) for key in tree}
    known = {field.name for field in fields(Experiment)}
    unknown, missing = nodes.keys() - known, known - nodes.keys()
    require(not unknown, f"there is no option {', '.join(sorted(unknown))}. All options: python src/run.py --cfg job")
    require(not missing, lacks(missing))
    for field in fields(Experiment):
        require(
            field.name in plain_keys() or is_dataclass(nodes[field.name]),
            f"{field.name} is a group of keys, got {nodes[field.name]!r}; set its keys, {field.name}.KEY=..., or leave "
            "it out",
        )
    return Experiment(**nodes)


def lacks(keys: Iterable[str]) -> str:
    """What is said of a config without `keys`."""
    return (
        f"the config lacks {', '.join(sorted(keys))}, which every run needs; leave ~ overrides out. If a run of an "
        "earlier version has it, use that version (env.json names its commit), or run it again"
    )


def spec(cfg: DictConfig | dict[str, Any], key: str) -> Any:
    """The spec under `key`, or the plain value if the node has no `_target_`."""
    node = plain(cfg, key)
    if not (isinstance(node, dict) and "_target_" in node):
        return node
    check_class(CONF_DIR, key, node)
    try:
        return make_option(key, node)
    except ConfigError:
        raise
    except Exception as error:  # of a class that does not check its fields itself
        given = {name: value for name, value in node.items() if name != "_target_"}
        if foreign := re.search(r"unexpected keyword argument '(\w+)'", str(error)):
            reason = f"{key}={given.get('name')} has no option {key}.{foreign[1]}"
            raise ConfigError(f"{reason}; leave it out, or the experiment that sets it") from error
        if "required keyword-only argument" in str(error):
            raise ConfigError(lacks(f"{key}.{name}" for name in re.findall(r"'(\w+)'", str(error)))) from error
        raise ConfigError(f"{key} does not work with {given}: {error}") from error
