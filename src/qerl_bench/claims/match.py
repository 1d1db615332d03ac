"""Which runs may be compared: those whose configs differ in one factor, and in nothing else but base model and seed.

A pair of runs is made of one base and one seed, on one machine with one set of library versions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from qerl_bench.checks import require
from qerl_bench.study.load import Run

Facts = dict[str, Any]  # dotted config keys and the device
Cell = tuple[str, int]  # base model and seed: what arms are paired by
# Not written to any config, but said about a run: its learning rate over that of its model's YAML, and its batch.
DERIVED: dict[str, Callable[[Facts], float]] = {
    "lr_factor": lambda facts: facts["optim.lr"] / facts.get("model.lr", math.nan),
    "completions": lambda facts: facts["rollout.prompts_per_step"] * facts["rollout.group_size"],
}

HEADS = {"lora": "lora.rank"}  # what a group of keys is known by, if not by its name


@dataclass(frozen=True)
class Where:
    """A condition on one key: among these values, or none of those, or between `low` and `high`.

    `otherwise` says of runs that fail it, and it alone, why they cannot speak.
    """

    key: str
    among: tuple[Any, ...] = ()
    excluding: tuple[Any, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    otherwise: str = ""

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
    """Arms that differ in the config keys that begin with one of `factor`, and in no others.

    But for those of `confounded`: keys in which the arms differ too, although they are not what is asked about. A
    contrast that has any is one of recipes; it says what they make of each other, and not why. A contrast votes on its
    claim unless it is confounded, or was named as a check of robustness.
    """

    label: str
    factor: tuple[str, ...]
    arms: tuple[Arm, ...]
    confounded: tuple[str, ...] = ()
    robustness: bool = False

    @property
    def votes(self) -> bool:
        return not self.confounded and not self.robustness

    def varies(self, key: str) -> bool:
        return key.startswith(self.factor + self.confounded)


@dataclass(frozen=True)
class Stratum:
    """Matched runs: for each arm its runs by base and seed. `facts` they share, `variants` set the arms apart."""

    facts: Facts
    variants: tuple[Facts, ...]
    arms: tuple[dict[Cell, Run], ...]

    @property
    def cells(self) -> list[Cell]:
        """The bases and seeds of all arms, sorted."""
        return sorted({cell for arm in self.arms for cell in arm})

    @property
    def runs(self) -> list[Run]:
        return [run for arm in self.arms for run in arm.values()]

    @property
    def blocks(self) -> list[str]:
        """Machines and library versions between which its arms were torn, cell by cell; empty where pairs are whole."""
        torn: dict[str, None] = {}
        for cell in self.cells:
            blocks = dict.fromkeys(arm[cell].block for arm in self.arms if cell in arm)
            torn |= blocks if len(blocks) > 1 else {}
        return list(torn)


def facts_of(run: Run) -> Facts:
    return run.facts


def match(contrast: Contrast, where: Sequence[Where], runs: Iterable[Run]) -> list[Stratum]:
    """Every setting in which each arm of `contrast` has a run, in order of their labels.

    Raises ConfigError if a setting has two runs of one base and seed.
    Where an arm was run with several values of the factor (noise of two strengths, say), each gives a stratum. Of two
    arms, each variant of the first meets those of the second that are alike in most keys; where there are more, the
    values of each key are balanced, as in a design of two by two. Recipes that happen to be matched are none.
    """
    settings: dict[tuple[Any, ...], list[dict[tuple[Any, ...], dict[Cell, Run]]]] = {}
    for run in runs:
        facts = facts_of(run)
        if not all(condition.holds(facts) for condition in where):
            continue
        places = [i for i, arm in enumerate(contrast.arms) if all(condition.holds(facts) for condition in arm.where)]
        if not places:
            continue
        shared = _frozen({key: value for key, value in facts.items() if not contrast.varies(key)})
        variant = _frozen({key: value for key, value in facts.items() if contrast.varies(key)})
        for place in places:
            cells = settings.setdefault(shared, [{} for _ in contrast.arms])[place].setdefault(variant, {})
            other = cells.setdefault((run.base, run.option("seed")), run)
            require(other is run, f"{other.path} and {run.path} are two runs of one setting and seed: leave one out")
    found = []
    for shared, arms in settings.items():
        candidates = []
        for chosen in product(*(arm.items() for arm in arms)):
            variants = tuple(dict(variant) for variant, _ in chosen)
            if len(arms) == 2 or _balanced(contrast, variants):
                stratum = Stratum(dict(shared), variants, tuple(cells for _, cells in chosen))
                if bool(confounders(contrast, [stratum])) == bool(contrast.confounded):
                    candidates.append(stratum)
        found += _closest(candidates) if len(contrast.arms) == 2 else candidates
    return [found[place] for _, place in sorted(zip(labels(found), range(len(found)), strict=True))]


def _balanced(contrast: Contrast, variants: Sequence[Facts]) -> bool:
    """Whether what a value of a key does by itself cancels: it stands in as many arms that are added as subtracted."""
    counts: dict[tuple[str, Any], int] = {}
    for arm, variant in zip(contrast.arms, variants, strict=True):
        for key in _keys(variants):
            pair = key, variant.get(key)
            counts[pair] = counts.get(pair, 0) + arm.sign
    return not any(counts.values())


def _closest(candidates: Sequence[Stratum]) -> list[Stratum]:
    """For each variant of the first arm, the strata whose other arm differs from it in the fewest keys."""
    apart = [sum(map(len, _differing(stratum.variants).values())) for stratum in candidates]
    fewest: dict[tuple[Any, ...], int] = {}
    for stratum, count in zip(candidates, apart, strict=True):
        first = _frozen(stratum.variants[0])
        fewest[first] = min(count, fewest.get(first, count))
    return [s for s, count in zip(candidates, apart, strict=True) if count == fewest[_frozen(s.variants[0])]]


def confounders(contrast: Contrast, strata: Sequence[Stratum]) -> list[str]:
    """What else the arms differ in, with the value of each: keys of `contrast.confounded`, a named group by its name.

    How noise is put in (`noise.`) is left out where the noise itself differs.
    """
    found: dict[str, dict[str, None]] = {}
    for stratum in strata:
        different = _differing(stratum.variants)
        for group, keys in different.items():
            name = [f"{group}.name"] if f"{group}.name" in keys else keys
            for key in name if not (group == "noise" and "aqn" in different) else ():
                if key.startswith(contrast.confounded):
                    found.setdefault(key, {})[_values(key, stratum.variants)] = None
    return [f"{key} ({' and '.join(values)})" for key, values in found.items()]


def _differing(variants: Sequence[Facts]) -> dict[str, list[str]]:
    """The keys in which `variants` differ, sorted, by their first part."""
    groups: dict[str, list[str]] = {}
    for key in sorted(_keys(variants)):
        if len({_text(variant.get(key)) for variant in variants}) > 1:
            groups.setdefault(key.split(".")[0], []).append(key)
    return groups


def _values(key: str, variants: Sequence[Facts]) -> str:
    return " / ".join(dict.fromkeys(_text(variant.get(key)) for variant in variants))


def _keys(variants: Sequence[Facts]) -> set[str]:
    return {key for variant in variants for key in variant}


def labels(strata: Sequence[Stratum]) -> list[str]:
    """For each stratum what tells it from the others: the config keys in which they differ.

    A key that is settled by the name of its group, or by the rank of the adapter, is left out. A single stratum is told
    by what its arms differ in, if that has no name: ranks, rates.
    """
    if len(strata) == 1:
        nameless = [
            key
            for group, keys in _differing(strata[0].variants).items()
            for key in ([HEADS[group]] if group in HEADS else keys if f"{group}.name" not in keys else ())
        ]
        return [", ".join(f"{key}={_values(key, strata[0].variants)}" for key in nameless) or "all"]
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
    telling = [key for key in telling if not any(_settles(other, key, described) for other in telling)]
    return [
        ", ".join(dict.fromkeys(f"{key.split(' (')[0]}={_text(facts[key])}" for key in telling if key in facts))
        or "all"
        for facts in described
    ]


def _settles(head: str, key: str, described: Sequence[Facts]) -> bool:
    """Whether `head` names the group of `key`, and each of its values goes with a single one of `key`."""
    (name, _, arm), (own, _, its_arm) = head.partition(" ("), key.partition(" (")
    group = own.split(".")[0]
    if head == key or arm != its_arm or name != HEADS.get(group, f"{group}.name"):
        return False
    pairs = {(_text(facts.get(head)), _text(facts.get(key))) for facts in described}
    return len(pairs) == len({value for value, _ in pairs})


def missing(contrast: Contrast, stratum: Stratum) -> list[str]:
    """The runs that each arm lacks of a full grid of all bases and all seeds, as one text for each arm and base."""
    bases = list(dict.fromkeys(base for base, _ in stratum.cells))
    seeds = sorted({seed for _, seed in stratum.cells})
    lacking = []
    for arm, runs in zip(contrast.arms, stratum.arms, strict=True):
        for base in bases:
            gone = [seed for seed in seeds if (base, seed) not in runs]
            where = f" of base {base}" if len(bases) > 1 else ""
            lacking += [f"{arm.label}{where} seed={','.join(map(str, gone))}"] if gone else []
    return lacking


def _frozen(facts: Facts) -> tuple[Any, ...]:
    return tuple(sorted((key, tuple(value) if isinstance(value, list) else value) for key, value in facts.items()))


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
