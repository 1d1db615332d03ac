"""Which of many runs a figure shows: the largest set that differs in the factors of the figure, and in nothing else.

A folder that holds a whole study answers many questions; a figure that drew all of it would answer none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from qerl_bench.errors import require
from qerl_bench.results.load import Run
from qerl_bench.results.match import facts_of
from qerl_bench.results.stats import require_complete

Row = dict[str, Any]  # a setting: dotted config keys, `runs`, and what a figure adds


def varying(runs: Sequence[Run], *factors: str) -> list[Run]:
    """The largest set of `runs` that differ only in the seed and in config keys that begin with one of `factors`.

    The class of an option goes with its name, such as aqn.name. A key that a setting does not have (sigma, or how noise
    is put in, without noise) does not tell it from others. Of sets with as many settings and runs the one without noise
    counts, then the one whose learning rate is nearest to its model's own, then the first by the text of its config.
    Raises BadInput if there is no run, or if no set has two settings.
    """
    require(bool(runs), "no finished run to draw: pass folders that hold some")
    free = (*factors, *(f"{key.removesuffix('name')}_target_" for key in factors if key.endswith(".name")))
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


def by_setting(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs by the fingerprint of their config, each in the order of seeds."""
    found: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.option("seed")):
        found.setdefault(run.identity()["fingerprint"], []).append(run)
    return found


def arms(runs: Sequence[Run], keys: Sequence[str]) -> list[Row]:
    """One row per setting: `keys`, dotted, of its config (None where it has none), and `runs`, one for each seed.

    Raises BadInput, with the list of missing runs, unless every setting has the same seeds, and if a seed is there
    twice.
    """
    rows: list[Row] = []
    seeds: dict[str, list[int]] = {}
    for group in by_setting(runs).values():
        facts, numbers = facts_of(group[0]), [run.option("seed") for run in group]
        require(len(set(numbers)) == len(numbers), f"{group[0].name} has several runs of one seed ({numbers})")
        seeds[group[0].name.replace(f"-s{numbers[0]}-", "-s*-")] = numbers
        rows.append({key: facts.get(key) for key in keys} | {"runs": group})
    require_complete(seeds)
    return rows


def with_one_noise(runs: Sequence[Run]) -> list[Run]:
    """The runs without noise, and those of the schedule that most formats have; of several the first by name."""
    formats: dict[str, set[str]] = {}
    for run in runs:
        formats.setdefault(run.option("aqn.name"), set()).add(run.option("quant.name"))
    noisy = sorted(formats.keys() - {"none"}, key=lambda name: (-len(formats[name]), name))
    return [run for run in runs if run.option("aqn.name") in ("none", *noisy[:1])]
