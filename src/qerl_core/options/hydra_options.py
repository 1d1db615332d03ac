"""Hydra's own options: those that cannot do here what they say, and the words for what it leaves unsaid."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import OmegaConf

from qerl_core.checks import ConfigError, require
from qerl_core.process.installation import CONF_DIR

PLACES = (  # where a run and its log lie, which its files ask `root` for
    *("run.dir", "sweep.dir", "sweep.subdir", "job.chdir", "output_subdir", "job_logging.handlers.file.filename"),
    "runtime.choices.hydra/job_logging",
)
LAUNCHER = "hydra.launcher."
LAUNCHERS = ("process", "slurm")


def refuse_unusable(hydra: Any) -> None:
    """Raise ConfigError if the node `hydra` would copy variables of the environment, such as tokens, into files of the
    run, or has Hydra write anywhere but in the run's folder."""
    copied = hydra.job.env_copy
    require(
        not copied,
        f"hydra.job.env_copy={list(copied or [])} would write these variables to multirun.yaml; leave it out: a run "
        "inherits the environment as it is",
    )
    given = OmegaConf.to_container(hydra, resolve=False)
    for key in PLACES:
        value, ours = (_at(tree, key) for tree in (given, _written()))
        require(
            value == ours,
            f"hydra.{key}={value} would part what Hydra writes from the files of the run: leave it, or what leads to "
            "it, out; root=DIR says where runs lie (DIR/runs/NAME), name=NAME what one is called; -q prints less",
        )


def _at(tree: Any, key: str) -> Any:
    """The value of a dotted key; None if there is none."""
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


@lru_cache(maxsize=1)
def _written() -> Any:
    """The node `hydra` of the root config, with its interpolations."""
    tree = OmegaConf.to_container(OmegaConf.load(CONF_DIR / "run.yaml").hydra, resolve=False)
    return tree | {"runtime": {"choices": {"hydra/job_logging": "default"}}}  # type: ignore[operator]


def unknown_hydra_key(key: str) -> str:
    """Say that Hydra and the chosen launcher have no option `key`, and which launcher has it or one like it."""
    name = key.removeprefix(LAUNCHER)
    if not key.startswith(LAUNCHER):
        return f"there is no option {key}. --cfg hydra prints those of Hydra"
    fields = {one: [*map(str, ConfigStore.instance().load(f"hydra/launcher/{one}.yaml").node)] for one in LAUNCHERS}
    known = {field for of_one in fields.values() for field in of_one} - {"_target_"}
    if name in known:
        owners = " or ".join(f"hydra/launcher={one}" for one in LAUNCHERS if name in fields[one])
        return f"{key} belongs to {owners}, which is not chosen: add {owners}"
    near = difflib.get_close_matches(name, known, n=1)
    meant = f" Did you mean {LAUNCHER}{near[0]}?" if near else ""
    return f"there is no option {key}.{meant} docs/cluster.md lists them"


def refuse_unlisted(overrides: Iterable[Override]) -> None:
    """Raise ConfigError if one of the words of a sweep names no values: an interval, or a pattern of no option."""
    for override in overrides:
        value, word = override.value(), override.input_line
        if isinstance(value, IntervalSweep):
            raise ConfigError(no_values(override))
        if override.is_sweep_override() and not any(True for _ in override.sweep_iterator()):
            kind = "no option is called so" if isinstance(value, Glob) else "it is empty"
            raise ConfigError(f"{word} gives this sweep no point, {kind}: list values, as in seed=0,1,2")


def no_values(interval: Override) -> str:
    """What is said of a word of the form KEY=interval(START,END)."""
    key, value = interval.get_key_element(), interval.value()
    assert isinstance(value, IntervalSweep)
    return (
        f"{interval.input_line} names no values, and a sweep makes a run for each: list them, "
        f"-m {key}={value.start},{value.end}"
    )


def of_several(word: str) -> str:
    """What is said of a word with several values without -m."""
    override = OverridesParser.create().parse_override(word)
    if isinstance(override.value(), IntervalSweep):
        return no_values(override)
    return f"{word} has several values: -m runs them all; one is {_first_value(word)}"


def first_values(words: Iterable[str]) -> list[str]:
    """`words` with the first value of each that sweeps over several: what shows one run of a sweep."""
    return [_first_value(word) for word in words]


def _first_value(word: str) -> str:
    try:
        override = OverridesParser.create().parse_override(word)
        if not override.is_sweep_override():
            return word
        if not override.is_discrete_sweep() or isinstance(override.value(), Glob):
            return f"{override.get_key_element()}=VALUE"
        return f"{override.get_key_element()}={next(override.sweep_string_iterator())}"
    except (HydraException, StopIteration):
        return word
