"""What is compared with what: runs grouped by setting, and the settings that differ in the factors of a question alone.

A folder of many runs answers many questions, and a figure of all of them would answer none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from qerl_core.checks import require
from qerl_studies.runs.environments import CLASS, is_reported
from qerl_studies.runs.load import Cell, Run


@dataclass(frozen=True, eq=False)
class Setting:
    """The runs of one setting, sorted by base model and seed: their configs differ in nothing else.

    setting["lora.rank"] is the value of a config key, None if the config has no such key.
    """

    runs: tuple[Run, ...]
    label: str = ""  # in a figure

    def __getitem__(self, key: str) -> Any:
        return self.runs[0].config_items.get(key)

    @property
    def name(self) -> str:
        """The name of its runs, with * for the seed."""
        return self.runs[0].name.replace(f"-s{self.runs[0].option('seed')}-", "-s*-")

    @property
    def noise(self) -> str:
        return self.runs[0].noise

    @cached_property
    def by_cell(self) -> dict[Cell, Run]:
        """Its runs by base model and seed. Raises ConfigError if two runs have the same."""
        cells: dict[Cell, Run] = {}
        for run in self.runs:
            other = cells.setdefault(run.cell, run)
            require(
                other is run,
                f"{other.path} and {run.path} are two runs of one setting, base model and seed: leave one out",
            )
        return cells


def group_by_setting(runs: Iterable[Run]) -> list[Setting]:
    groups: dict[frozenset[tuple[str, str]], list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.cell):
        groups.setdefault(run.setting_items, []).append(run)
    return [Setting(tuple(group)) for group in groups.values()]


@dataclass(frozen=True)
class Study:
    """Runs that a figure or table compares."""

    runs: Sequence[Run]

    @cached_property
    def settings(self) -> list[Setting]:
        """Raises ConfigError if two runs are of one setting, base model and seed."""
        settings = group_by_setting(self.runs)
        assert all(setting.by_cell for setting in settings)
        return settings

    def select(self, *factors: str) -> Study:
        """The largest set of runs that differ only in seed, base model and config keys that begin with one of
        `factors`.

        If aqn.name is a factor, so is aqn._target_. Keys that a run does not have, and `noise.*` of a run without
        noise, are ignored when comparing it. Ties are broken in favor of sets without noise, then of the learning rate
        closest to the model's default, then alphabetically. Raises ConfigError without runs, or if no set has two
        settings.
        """
        require(bool(self.runs), "no finished run to draw: pass folders that hold some")
        free = (*factors, *(f"{key.removesuffix('name')}_target_" for key in factors if key.endswith(".name")))
        by_rest: dict[frozenset[tuple[str, str]], list[Run]] = {}
        for run in self.runs:
            ignored = (*free, "noise.") if run.option("aqn.name") == "none" else free
            rest = frozenset(item for item in run.setting_items if not item[0].startswith(ignored))
            by_rest.setdefault(rest, []).append(run)
        sets = {rest: [run for fewer, group in by_rest.items() if fewer <= rest for run in group] for rest in by_rest}
        largest = sets[min(sets, key=lambda rest: (*_rank(sets[rest]), sorted(rest)))]
        several = f"no two of these {len(self.runs)} runs"
        require(
            len(group_by_setting(largest)) > 1,
            f"{several if len(self.runs) > 1 else f'{self.runs[0].name} is one run, and no two'} differ in "
            f"{' or '.join(factors)} (and the seed) alone, so there is nothing to compare: add the missing arm",
        )
        return Study(largest)

    def with_one_schedule(self) -> Study:
        """The runs without noise, and those of the noise schedule that most formats were run with; ties by name."""
        formats: dict[str, set[str]] = {}
        for run in self.runs:
            formats.setdefault(run.noise, set()).add(run.option("quant.name"))
        noisy = sorted(formats.keys() - {"none"}, key=lambda name: (-len(formats[name]), name))
        return Study([run for run in self.runs if run.noise in ("none", *noisy[:1])])

    def complete_settings(self, *crossed: str) -> list[Setting]:
        """The settings, each with the same seeds and, within a kind of model, the same bases: `gaps`.

        `crossed` are the keys of a factorial design, of which every combination of values must have been run. Raises
        ConfigError, with the list of missing runs, otherwise.
        """
        seeds = {run.option("seed") for run in self.runs}
        kinds: dict[str, list[Setting]] = {}
        for setting in self.settings:
            kinds.setdefault(_model(setting), []).append(setting)
        missing = [text for settings in kinds.values() for text in gaps(settings, seeds)]
        present = [tuple(setting[key] for key in crossed) for setting in self.settings]
        for values in product(*(dict.fromkeys(column) for column in zip(*present, strict=True))):
            if values not in present:
                pairs = zip(crossed, values, strict=True)
                name = " ".join(f"{key.removesuffix('.name')}={value}" for key, value in pairs)
                missing += missing_runs(name, (), {"": seeds})
        require_complete(missing)
        return self.settings


def _rank(runs: Sequence[Run]) -> tuple[int, int, bool, float]:
    noisy = all(run.option("aqn.name") != "none" for run in runs)
    return -len(group_by_setting(runs)), -len(runs), noisy, rate_distance(runs[0])


def rate_distance(run: Run) -> float:
    """How far the learning rate is from the model's default: the logarithm of their ratio, without its sign."""
    rate = run.config_items["optim.lr"]
    return abs(math.log(rate / run.config_items.get("model.lr", rate)))


def _model(setting: Setting) -> str:
    return repr(sorted(item for item in setting.runs[0].setting_items if item[0].startswith("model.")))


def gaps(settings: Sequence[Setting], seeds: Collection[int] = ()) -> list[str]:
    """The runs that settings of one kind of model lack of a design that all share, with all of `seeds`.

    The design is the cells that any of them has if these give each base equally many seeds, which may be its own, as
    the copies of a released model have; else all seeds of each base.
    """
    cells = sorted({cell for one in settings for cell in one.by_cell})
    known = {seed for _, seed in cells}
    seeds_of = {base: {seed for other, seed in cells if other == base} | ({*seeds} - known) for base, _ in cells}
    if len({len(own) for own in seeds_of.values()}) > 1:
        seeds_of = dict.fromkeys(seeds_of, {*seeds} | known)
    return [text for one in settings for text in missing_runs(one.name, one.by_cell, seeds_of)]


def missing_runs(name: str, cells: Collection[Cell], seeds_of: Mapping[str, Iterable[int]]) -> list[str]:
    """The runs that `name` lacks of the seeds of each base, one text per base."""
    missing = []
    for base, seeds in seeds_of.items():
        lacking = sorted(seed for seed in seeds if (base, seed) not in cells)
        where = f" of base {base}" if len(seeds_of) > 1 else ""
        missing += [f"{name}{where} seed={','.join(map(str, lacking))}"] if lacking else []
    return missing


def require_complete(missing: Sequence[str]) -> None:
    """Raise ConfigError with the list of `missing` runs, if there are any."""
    require(
        not missing,
        "the grid is incomplete, so that settings would be compared over different seeds or bases. Missing: "
        f"{'; '.join(missing)}. Run these, or leave their seeds out everywhere",
    )


def unit_count(runs: Sequence[Run]) -> int:
    """Over how many units runs of one setting are averaged: bases if there are several, else seeds."""
    bases, seeds = _repeats(runs)
    return bases if bases > 1 else seeds


def _repeats(runs: Sequence[Run]) -> tuple[int, int]:
    """The number of bases, and of seeds of the base that has most."""
    seeds = Counter(base for base, _ in {run.cell for run in runs})
    return len(seeds), max(seeds.values())


def describe_repeats(runs: Sequence[Run]) -> str:
    """How often a setting was repeated, of which model, on what task: the units of an interval over these runs."""
    bases, seeds = _repeats(runs)
    models, tasks = (", ".join(sorted({run.option(key) for run in runs})) for key in ("model.name", "task.name"))
    if bases > 1:
        each = f"the mean of {seeds} seeds" if seeds > 1 else "one seed"
        return f"{bases} base models ({models}) on {tasks}, {each} each"
    return f"{seeds} seeds of one base model ({models}) on {tasks}" if seeds > 1 else f"a seed of {models} on {tasks}"


def by_scope(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs of each model on each task, which claims are decided by; sorted. Those of others are marked."""
    scopes: dict[str, list[Run]] = {}
    for run in runs:
        marked = f", {CLASS}" if is_reported(run.environment) else ""
        scopes.setdefault(f"{run.option('model.name')} on {run.option('task.name')}{marked}", []).append(run)
    return dict(sorted(scopes.items()))


def steps_around(runs: Sequence[Run], wanted: int) -> int:
    """How many steps a mean around each step takes, an odd number: `wanted`, at most a fifth of the shortest run."""
    fifth = min(run.last_step for run in runs) // 5
    return max(1, min(wanted, fifth - 1 + fifth % 2))
