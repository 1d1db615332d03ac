"""Which of many runs a figure shows: the largest set that differs in the factors of the figure, and in nothing else.

A folder that holds a whole study answers many questions; a figure that drew all of it would answer none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

from qerl_bench.errors import require
from qerl_bench.results.load import Run
from qerl_bench.results.match import facts_of
from qerl_bench.results.stats import require_complete

Row = dict[str, Any]  # a setting: dotted config keys, `runs`, and what a figure adds
BASE = "model.seed"  # what draws another base model of the same kind; runs that differ in it repeat a setting


def varying(runs: Sequence[Run], *factors: str) -> list[Run]:
    """The largest set of `runs` that differ only in seed, base and config keys that begin with one of `factors`.

    The class of an option goes with its name, such as aqn.name. A key that a setting does not have (sigma, or how noise
    is put in, without noise) does not tell it from others. Of sets with as many settings and runs the one without noise
    counts, then the one whose learning rate is nearest to its model's own, then the first by the text of its config.
    Raises BadInput if there is no run, or if no set has two settings.
    """
    require(bool(runs), "no finished run to draw: pass folders that hold some")
    free = (*factors, *(f"{key.removesuffix('name')}_target_" for key in factors if key.endswith(".name")), BASE)
    alike: dict[frozenset[tuple[str, str]], list[Run]] = {}
    for run in runs:
        idle = (*free, "inject.") if run.option("aqn.name") == "none" else free
        shared = {(key, repr(value)) for key, value in facts_of(run).items() if not key.startswith(idle)}
        alike.setdefault(frozenset(shared), []).append(run)
    sets = {keys: [run for fewer, group in alike.items() if fewer <= keys for run in group] for keys in alike}
    keys = min(sets, key=lambda keys: (*_order(sets[keys]), sorted(keys)))
    among = f"no two of these {len(runs)} runs" if len(runs) > 1 else f"{runs[0].name} is one run, and no two"
    require(
        len(by_setting(sets[keys])) > 1,
        f"{among} differ in {' or '.join(factors)} (and the seed) alone, so there is nothing to compare: add the "
        "missing arm",
    )
    return sets[keys]


def _order(group: list[Run]) -> tuple[int, int, bool, float]:
    facts = facts_of(group[0])
    away = abs(math.log(facts["optim.lr"] / facts.get("model.lr", facts["optim.lr"])))
    return -len(by_setting(group)), -len(group), all(run.option("aqn.name") != "none" for run in group), away


def unit(run: Run) -> tuple[str, int]:
    """What runs are paired by: the base model that was trained, and the seed."""
    return str(facts_of(run).get(BASE, "")), run.option("seed")


def by_setting(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that differ in nothing but seed and base, each setting in the order of these."""
    found: dict[frozenset[tuple[str, str]], list[Run]] = {}
    for run in sorted(runs, key=unit):
        key = frozenset((key, repr(value)) for key, value in facts_of(run).items() if key != BASE)
        found.setdefault(key, []).append(run)
    return [*found.values()]


def arms(runs: Sequence[Run], keys: Sequence[str], crossed: Sequence[str] = ()) -> list[Row]:
    """One row per setting: `keys`, dotted, of its config (None where it has none), and `runs`, one for each unit.

    `crossed` are the keys of a factorial design: every combination of their values must be there. Raises BadInput, with
    the list of missing runs, where one is not, or where a setting lacks a seed or a base that another has; and if a seed
    is there twice.
    """
    rows: list[Row] = []
    seeds: dict[str, list[int]] = {}
    bases = sorted({unit(run)[0] for run in runs})
    for group in by_setting(runs):
        facts, units = facts_of(group[0]), [unit(run) for run in group]
        require(len(set(units)) == len(units), f"{group[0].name} has several runs of one seed ({units})")
        rows.append({key: facts.get(key) for key in (*keys, *crossed)} | {"runs": group})
        name = group[0].name.replace(f"-s{units[0][1]}-", "-s*-")
        seeds |= {_of(base, name, bases): [seed for other, seed in units if other == base] for base in bases}
    there = [tuple(row[key] for key in crossed) for row in rows]
    for cell in product(*(dict.fromkeys(column) for column in zip(*there, strict=True))):
        name = " ".join(f"{key.removesuffix('.name')}={value}" for key, value in zip(crossed, cell, strict=True))
        seeds |= {_of(base, name, bases): [] for base in bases if crossed and cell not in there}
    require_complete(seeds)
    return rows


def _of(base: str, name: str, bases: Sequence[str]) -> str:
    return f"{name} {BASE}={base}" if len(bases) > 1 else name


def with_one_noise(runs: Sequence[Run]) -> list[Run]:
    """The runs without noise, and those of the schedule that most formats have; of several the first by name."""
    formats: dict[str, set[str]] = {}
    for run in runs:
        formats.setdefault(run.option("aqn.name"), set()).add(run.option("quant.name"))
    noisy = sorted(formats.keys() - {"none"}, key=lambda name: (-len(formats[name]), name))
    return [run for run in runs if run.option("aqn.name") in ("none", *noisy[:1])]
