"""Which runs may be compared: those whose configs differ in one factor, and otherwise only in base model and seed.

A pair of runs has one base and one seed, and ran on one machine with one set of library versions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from qerl_studies.effects.pairs import mixed_machines
from qerl_studies.runs.load import Cell, Run
from qerl_studies.runs.settings import group_by_setting, missing_runs

Items = dict[str, Any]  # dotted config keys and the device
FrozenItems = tuple[tuple[str, Any], ...]
OWN = "own"
# Not in any config: the learning rate over the default of the model, and the completions of a step.
DERIVED: dict[str, Callable[[Items], Any]] = {
    "class": lambda items: items.get("class", OWN),  # or reported: made by others
    "arm.name": lambda items: items.get("arm.name"),  # of a reported study
    "lr_factor": lambda items: items["optim.lr"] / items.get("model.lr", math.nan),
    "completions": lambda items: items["rollout.prompts_per_step"] * items["rollout.group_size"],
}
NAME_KEYS = {"lora": "lora.rank"}  # the key that identifies a config group, if that is not GROUP.name


@dataclass(frozen=True)
class Filter:
    """A condition on one config key: one of `among`, none of `excluding`, between `low` and `high`.

    `excuse` says, of runs that fail this condition only, why they do not count.
    """

    key: str
    among: tuple[Any, ...] = ()
    excluding: tuple[Any, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    excuse: str = ""

    def value(self, items: Items) -> Any:
        return DERIVED[self.key](items) if self.key in DERIVED else items.get(self.key)

    def accepts(self, items: Items) -> bool:
        value = self.value(items)
        bounded = self.low > -math.inf or self.high < math.inf
        return (
            (not self.among or value in self.among)
            and value not in self.excluding
            and (not bounded or (isinstance(value, int | float) and self.low <= value <= self.high))
        )

    @property
    def asked(self) -> str:
        """The condition in words."""
        ends = [f" {word} {end:g}" for word, end in (("from", self.low), ("to", self.high)) if math.isfinite(end)]
        others = [f" other than {' or '.join(map(value_text, self.excluding))}"] if self.excluding else []
        values = [f"={' or '.join(map(value_text, self.among))}"] if self.among else []
        return self.key + "".join((*values, *ends, *others))


def all_accept(filters: Iterable[Filter], items: Items) -> bool:
    return all(one.accepts(items) for one in filters)


@dataclass(frozen=True)
class Side:
    """One side of a contrast; its number is multiplied by `sign`."""

    label: str
    sign: int
    where: tuple[Filter, ...]


@dataclass(frozen=True)
class Contrast:
    """Arms that differ only in config keys that begin with one of `factor`.

    `confounded` lists keys that also differ between the arms but are not the subject of the claim. Such a contrast
    compares whole recipes: it can show that they differ, not why. A contrast votes on its claim unless it is
    confounded, or is declared a robustness check.
    """

    label: str
    factor: tuple[str, ...]
    arms: tuple[Side, ...]
    confounded: tuple[str, ...] = ()
    robustness: bool = False

    @property
    def votes(self) -> bool:
        return not self.confounded and not self.robustness

    def may_differ_in(self, key: str) -> bool:
        return key.startswith(self.factor + self.confounded)


@dataclass(frozen=True)
class Stratum:
    """Matched runs: for each arm its runs by cell. All arms have the config items `shared`, each has its `variants`."""

    shared: Items
    variants: tuple[Items, ...]
    arms: tuple[dict[Cell, Run], ...]

    @cached_property
    def cells(self) -> list[Cell]:
        """The bases and seeds of all arms, sorted."""
        return sorted({cell for arm in self.arms for cell in arm})

    @property
    def runs(self) -> list[Run]:
        return [run for arm in self.arms for run in arm.values()]

    @property
    def mixed_machines(self) -> list[str]:
        """Machines and library versions that differ between the arms in some cell; empty if every pair has one."""
        return mixed_machines(self.arms)


def match(contrast: Contrast, where: Sequence[Filter], runs: Iterable[Run]) -> list[Stratum]:
    """Every setting in which each arm of `contrast` has a run, in order of their labels.

    If an arm has several variants (two noise levels, say), each variant forms its own stratum. With two arms, a variant
    of the first is paired with the variants of the second that differ from it in the fewest config keys. With four arms
    (a 2 x 2 design), only balanced combinations are kept. Contrasts declared as confounded are dropped if nothing
    confounds them. Raises ConfigError if a setting has two runs of one base and seed.
    """
    pools: dict[FrozenItems, list[dict[FrozenItems, dict[Cell, Run]]]] = {}
    for setting in group_by_setting(runs):
        items = setting.runs[0].config_items
        places = [place for place, arm in enumerate(contrast.arms) if all_accept((*where, *arm.where), items)]
        if places:
            shared = _frozen({key: value for key, value in items.items() if not contrast.may_differ_in(key)})
            variant = _frozen({key: value for key, value in items.items() if contrast.may_differ_in(key)})
            for place in places:
                pools.setdefault(shared, [{} for _ in contrast.arms])[place][variant] = setting.by_cell
    strata = []
    for shared, pool in pools.items():
        candidates = []
        for chosen in product(*(arm.items() for arm in pool)):
            variants = tuple(dict(variant) for variant, _ in chosen)
            if len(pool) == 2 or _balanced(contrast, variants):
                stratum = Stratum(dict(shared), variants, tuple(cells for _, cells in chosen))
                if bool(confounders(contrast, [stratum])) == bool(contrast.confounded):
                    candidates.append(stratum)
        strata += _closest(candidates) if len(pool) == 2 else candidates
    return [stratum for _, stratum in sorted(zip(labels(strata), strata, strict=True), key=lambda pair: pair[0])]


def _balanced(contrast: Contrast, variants: Sequence[Items]) -> bool:
    """Whether the effect of any single value cancels: it occurs in as many added arms as subtracted ones."""
    counts: dict[tuple[str, Any], int] = {}
    for arm, variant in zip(contrast.arms, variants, strict=True):
        for key in _keys(variants):
            pair = key, variant.get(key)
            counts[pair] = counts.get(pair, 0) + arm.sign
    return not any(counts.values())


def _closest(candidates: Sequence[Stratum]) -> list[Stratum]:
    """For each variant of the first arm, the strata whose second arm differs from it in the fewest keys."""
    counts = [sum(map(len, _differing_keys(stratum.variants).values())) for stratum in candidates]
    fewest: dict[FrozenItems, int] = {}
    for stratum, count in zip(candidates, counts, strict=True):
        first = _frozen(stratum.variants[0])
        fewest[first] = min(count, fewest.get(first, count))
    return [s for s, count in zip(candidates, counts, strict=True) if count == fewest[_frozen(s.variants[0])]]


def confounders(contrast: Contrast, strata: Sequence[Stratum]) -> list[str]:
    """The keys of `contrast.confounded` in which the arms differ, with their values.

    Of a config group whose name differs, only the name is listed; `noise.*` is left out if the schedule differs.
    """
    values: dict[str, dict[str, None]] = {}
    for stratum in strata:
        differing = _differing_keys(stratum.variants)
        for group, keys in differing.items():
            listed = [f"{group}.name"] if f"{group}.name" in keys else keys
            for key in listed if not (group == "noise" and "aqn" in differing) else ():
                if key.startswith(contrast.confounded):
                    values.setdefault(key, {})[_values(key, stratum.variants)] = None
    return [f"{key} ({' and '.join(texts)})" for key, texts in values.items()]


def _differing_keys(variants: Sequence[Items]) -> dict[str, list[str]]:
    """The keys in which `variants` differ, sorted, by config group."""
    groups: dict[str, list[str]] = {}
    for key in sorted(_keys(variants)):
        if len({value_text(variant.get(key)) for variant in variants}) > 1:
            groups.setdefault(key.split(".")[0], []).append(key)
    return groups


def _values(key: str, variants: Sequence[Items]) -> str:
    return " / ".join(dict.fromkeys(value_text(variant.get(key)) for variant in variants))


def _keys(variants: Sequence[Items]) -> set[str]:
    return {key for variant in variants for key in variant}


def labels(strata: Sequence[Stratum]) -> list[str]:
    """For each stratum the config keys in which it differs from the others.

    Keys that follow from the name of their group, or from the adapter's rank, are left out. A single stratum is
    labelled by the keys in which its arms differ, if these do not follow from a name: ranks, learning rates.
    """
    if len(strata) == 1:
        keys = [
            key
            for group, keys in _differing_keys(strata[0].variants).items()
            for key in ([NAME_KEYS[group]] if group in NAME_KEYS else keys if f"{group}.name" not in keys else ())
        ]
        return [", ".join(f"{key}={_values(key, strata[0].variants)}" for key in keys) or "all"]
    described = [
        stratum.shared
        | {
            f"{key} ({place})": value
            for place, variant in enumerate(stratum.variants)
            for key, value in variant.items()
        }
        for stratum in strata
    ]
    keys = list(dict.fromkeys(key for items in described for key in items))
    keys = [
        key for key in keys if len({value_text(items.get(key)) for items in described}) > 1 and "_target_" not in key
    ]
    keys = [key for key in keys if not any(_implies(other, key, described) for other in keys)]
    return [
        ", ".join(dict.fromkeys(f"{key.split(' (')[0]}={value_text(items[key])}" for key in keys if key in items))
        or "all"
        for items in described
    ]


def _implies(name: str, key: str, described: Sequence[Items]) -> bool:
    """Whether `name` is the name of the group of `key`, and each of its values occurs with a single value of `key`."""
    (plain_name, _, arm), (plain_key, _, arm_of_key) = name.partition(" ("), key.partition(" (")
    group = plain_key.split(".")[0]
    if name == key or arm != arm_of_key or plain_name != NAME_KEYS.get(group, f"{group}.name"):
        return False
    pairs = {(value_text(items.get(name)), value_text(items.get(key))) for items in described}
    return len(pairs) == len({value for value, _ in pairs})


def missing(contrast: Contrast, stratum: Stratum) -> list[str]:
    """The runs that each arm lacks of a full grid of all bases and all seeds, one text for each arm and base."""
    seeds = {seed for _, seed in stratum.cells}
    grid = {base: seeds for base, _ in stratum.cells}
    pairs = zip(contrast.arms, stratum.arms, strict=True)
    return [text for arm, runs in pairs for text in missing_runs(arm.label, runs, grid)]


def _frozen(items: Items) -> FrozenItems:
    return tuple(sorted((key, _hashable(value)) for key, value in items.items()))


def _hashable(value: Any) -> Any:
    """A value of a config with tuples in the place of lists and mappings, however deep."""
    if isinstance(value, dict):
        return tuple((key, _hashable(one)) for key, one in value.items())
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def value_text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
