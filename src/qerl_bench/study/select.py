"""Which of many runs a figure shows: the largest set that differs in the factors of the figure, and in nothing else.

A folder that holds a whole study answers many questions; a figure that drew all of it would answer none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

from qerl_bench.checks import require
from qerl_bench.claims.match import Cell
from qerl_bench.statistics import require_complete
from qerl_bench.study.load import Run

Row = dict[str, Any]  # a setting: dotted config keys, `runs`, and what a figure adds


def varying(runs: Sequence[Run], *factors: str) -> list[Run]:
    """The largest set of `runs` that differ only in seed, base and config keys that begin with one of `factors`.

    The class of an option goes with its name, such as aqn.name. A key that a setting does not have (sigma, or how noise
    is put in, without noise) does not tell it from others. Of sets with as many settings and runs the one without noise
    counts, then the one whose learning rate is nearest to its model's own, then the first by the text of its config.
    Raises ConfigError if there is no run, or if no set has two settings.
    """
    require(bool(runs), "no finished run to draw: pass folders that hold some")
    free = (*factors, *(f"{key.removesuffix('name')}_target_" for key in factors if key.endswith(".name")))
    alike: dict[frozenset[tuple[str, str]], list[Run]] = {}
    for run in runs:
        idle = (*free, "noise.") if run.option("aqn.name") == "none" else free
        shared = {(key, repr(value)) for key, value in run.facts.items() if not key.startswith(idle)}
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
    facts = group[0].facts
    away = abs(math.log(facts["optim.lr"] / facts.get("model.lr", facts["optim.lr"])))
    return -len(by_setting(group)), -len(group), all(run.option("aqn.name") != "none" for run in group), away


def cell(run: Run) -> Cell:
    """What runs are paired by: the base model that was trained, and the seed."""
    return run.base, run.option("seed")


def by_setting(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that differ in nothing but seed and base model, each setting in the order of these."""
    found: dict[frozenset[tuple[str, str]], list[Run]] = {}
    for run in sorted(runs, key=cell):
        found.setdefault(frozenset((key, repr(value)) for key, value in run.facts.items()), []).append(run)
    return [*found.values()]


def arms(runs: Sequence[Run], keys: Sequence[str], crossed: Sequence[str] = ()) -> list[Row]:
    """One row per setting: `keys`, dotted, of its config (None where it has none), and `runs`, one for each cell.

    `crossed` are the keys of a factorial design: every combination of their values must be there. Raises ConfigError, with
    the list of missing runs, where one is not, or where a setting lacks a seed or a base that another with this kind of
    model has; and if a seed is there twice.
    """
    rows: list[Row] = []
    bases: dict[str, dict[str, None]] = {}  # by kind of model
    for group in by_setting(runs):
        cells = [cell(run) for run in group]
        require(len(set(cells)) == len(cells), f"{group[0].name} has several runs of one seed ({cells})")
        rows.append({key: group[0].facts.get(key) for key in (*keys, *crossed)} | {"runs": group})
        bases.setdefault(_kind(group[0]), {}).update((base, None) for base, _ in cells)
    seeds: dict[str, list[int]] = {}
    for row in rows:
        first, of_kind = row["runs"][0], bases[_kind(row["runs"][0])]
        name = first.name.replace(f"-s{first.option('seed')}-", "-s*-")
        for base in of_kind:
            own = f"{name} of base {base}" if len(of_kind) > 1 else name
            seeds[own] = [seed for other, seed in map(cell, row["runs"]) if other == base]
    there = [tuple(row[key] for key in crossed) for row in rows]
    for values in product(*(dict.fromkeys(column) for column in zip(*there, strict=True))):
        if values not in there:
            chosen = zip(crossed, values, strict=True)
            seeds[" ".join(f"{key.removesuffix('.name')}={value}" for key, value in chosen)] = []
    require_complete(seeds)
    return rows


def _kind(run: Run) -> str:
    return repr(sorted((key, value) for key, value in run.facts.items() if key.startswith("model.")))


def with_one_noise(runs: Sequence[Run]) -> list[Run]:
    """The runs without noise, and those of the schedule that most formats have; of several the first by name."""
    formats: dict[str, set[str]] = {}
    for run in runs:
        formats.setdefault(run.option("aqn.name"), set()).add(run.option("quant.name"))
    noisy = sorted(formats.keys() - {"none"}, key=lambda name: (-len(formats[name]), name))
    return [run for run in runs if run.option("aqn.name") in ("none", *noisy[:1])]
