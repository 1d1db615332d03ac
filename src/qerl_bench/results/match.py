"""Which runs may be compared: those whose configs differ in one factor, and in nothing else but the seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from qerl_bench.config import scientific
from qerl_bench.errors import require
from qerl_bench.results.load import Run
from qerl_bench.results.stats import missing_seeds
from qerl_bench.rundir import flat

Facts = dict[str, Any]  # dotted config keys, the device, and what is derived from them
# Not written to any config, but said about a run: its learning rate over that of its model's YAML.
DERIVED: dict[str, Callable[[Facts], float]] = {"lr_factor": lambda facts: facts["optim.lr"] / facts["model.lr"]}


@dataclass(frozen=True)
class Where:
    """A condition on one key: among these values, or none of those, or between `low` and `high`."""

    key: str
    among: tuple[Any, ...] = ()
    excluding: tuple[Any, ...] = ()
    low: float = -math.inf
    high: float = math.inf

    def holds(self, facts: Facts) -> bool:
        value = DERIVED[self.key](facts) if self.key in DERIVED else facts.get(self.key)
        bounded = self.low > -math.inf or self.high < math.inf
        return (
            (not self.among or value in self.among)
            and value not in self.excluding
            and (not bounded or (value is not None and self.low <= value <= self.high))
        )


@dataclass(frozen=True)
class Arm:
    """One side of a contrast; `sign` is what its number counts with."""

    label: str
    sign: int
    where: tuple[Where, ...]


@dataclass(frozen=True)
class Contrast:
    """Arms that differ in the config keys that begin with one of `factor`, and in no others."""

    label: str
    factor: tuple[str, ...]
    arms: tuple[Arm, ...]

    def varies(self, key: str) -> bool:
        return key.startswith(self.factor)


@dataclass(frozen=True)
class Stratum:
    """Matched runs: for each arm its runs by seed. `facts` is what they share, `variants` what sets the arms apart."""

    facts: Facts
    variants: tuple[Facts, ...]
    arms: tuple[dict[int, Run], ...]


def facts_of(run: Run) -> Facts:
    """The config of a run as far as it decides its numbers, flat, with the device that it ran on."""
    return flat(scientific(run.config)) | {"device": run.device}


def match(contrast: Contrast, where: Sequence[Where], runs: Iterable[Run]) -> list[Stratum]:
    """Every setting in which each arm of `contrast` has a run, in order of their labels.

    Raises BadInput if a setting has two runs of one seed.
    Where an arm was run with several values of the factor (noise of two strengths, say), each gives a stratum; where
    there are more than two arms, a key of the factor takes two values at most, as in a design of two by two.
    """
    settings: dict[tuple[Any, ...], list[dict[tuple[Any, ...], dict[int, Run]]]] = {}
    for run in runs:
        facts = facts_of(run)
        if not all(condition.holds(facts) for condition in where):
            continue
        shared = _frozen({key: value for key, value in facts.items() if not contrast.varies(key)})
        variant = _frozen({key: value for key, value in facts.items() if contrast.varies(key)})
        for place, arm in enumerate(contrast.arms):
            if all(condition.holds(facts) for condition in arm.where):
                seeds = settings.setdefault(shared, [{} for _ in contrast.arms])[place].setdefault(variant, {})
                other = seeds.setdefault(run.option("seed"), run)
                require(
                    other is run, f"{other.path} and {run.path} are two runs of one setting and seed: leave one out"
                )
    found = []
    for shared, arms in settings.items():
        for chosen in product(*(arm.items() for arm in arms)):
            variants = tuple(dict(variant) for variant, _ in chosen)
            keys = {key for variant in variants for key in variant}
            if all(len({variant.get(key) for variant in variants}) <= 2 for key in keys):
                found.append(Stratum(dict(shared), variants, tuple(seeds for _, seeds in chosen)))
    return [found[place] for _, place in sorted(zip(labels(found), range(len(found)), strict=True))]


def labels(strata: Sequence[Stratum]) -> list[str]:
    """For each stratum what tells it from the others: the config keys in which they differ."""
    described = [
        stratum.facts
        | {
            f"{key} ({place})": value
            for place, variant in enumerate(stratum.variants)
            for key, value in variant.items()
        }
        for stratum in strata
    ]
    keys = list(dict.fromkeys(key for facts in described for key in facts))
    telling = [key for key in keys if len({_text(facts.get(key)) for facts in described}) > 1 and "_target_" not in key]
    return [
        ", ".join(dict.fromkeys(f"{key.split(' (')[0]}={_text(facts[key])}" for key in telling if key in facts))
        or "all"
        for facts in described
    ]


def missing(contrast: Contrast, strata: Sequence[Stratum]) -> list[str]:
    """The runs without which arms would be compared that have different seeds, as one text for each setting."""
    names = [
        f"{arm.label}{'' if len(strata) == 1 else f' at {label}'}" for label in labels(strata) for arm in contrast.arms
    ]
    seeds = [list(arm) for stratum in strata for arm in stratum.arms]
    lacking = missing_seeds(dict(zip(names, seeds, strict=True)))
    return [f"{name} seed={','.join(map(str, seeds))}" for name, seeds in lacking.items()]


def _frozen(facts: Facts) -> tuple[Any, ...]:
    return tuple(sorted((key, tuple(value) if isinstance(value, list) else value) for key, value in facts.items()))


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
