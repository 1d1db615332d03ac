"""Which runs make a pair, and their differences: runs of one base and seed, on one machine, asked the same questions.

Such runs share prompts and random numbers, whose influence cancels. Tables have a column for each cell, a pair (base,
seed); their rows are questions, steps of a curve, or the one number of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from typing import Any

import pandas as pd

from qerl_core.checks import ConfigError, require
from qerl_studies.runs.load import Run

Number = Callable[[Run], "pd.Series | float"]  # of a run, or one for each question or step
Arm = Mapping[tuple[Any, int], Run]  # by base and seed


def arm_of(runs: Arm | Sequence[Run]) -> Arm:
    return runs if isinstance(runs, Mapping) else {run.cell: run for run in runs}


def by_cell(runs: Arm | Sequence[Run], number: Number) -> pd.DataFrame:
    """The numbers of each run, a column per cell; rows are the steps or questions that all runs have."""
    return _table({cell: number(run) for cell, run in arm_of(runs).items()})


def _table(columns: Mapping[tuple[Any, int], pd.Series | float]) -> pd.DataFrame:
    heads = pd.MultiIndex.from_tuples(columns, names=["base", "seed"])
    if not any(isinstance(one, pd.Series) for one in columns.values()):
        return pd.DataFrame([[*columns.values()]], columns=heads)
    table = pd.concat([*map(pd.Series, columns.values())], axis=1, join="inner")
    table.columns = heads
    return table


def average_seeds(table: pd.DataFrame) -> pd.DataFrame:
    """One column per base, the mean over its seeds; with a single base, one column per seed."""
    bases = table.columns.get_level_values("base").unique()
    if len(bases) == 1:
        return table
    return pd.DataFrame({base: table.xs(base, axis="columns", level="base").mean(axis="columns") for base in bases})


def by_unit(runs: Arm | Sequence[Run], number: Number) -> pd.Series:
    """The mean of each base over its questions and seeds; with a single base, of each seed."""
    return average_seeds(by_cell(runs, number)).mean(skipna=False)


def shared(treated: pd.Series, control: pd.Series) -> pd.Series:
    """The difference of two arms, each a number by unit, on the units that both have; what is NaN in one stays so."""
    both = treated.index.intersection(control.index, sort=False)
    return treated.reindex(both) - control.reindex(both)


def mean_of_runs(runs: Arm | Sequence[Run], number: Number) -> float:
    """Over bases, or over the seeds of one."""
    return float(by_unit(runs, number).mean(skipna=False))


def mixed_machines(arms: Iterable[Arm]) -> list[str]:
    """Machines and library versions that differ between the arms in some cell; empty if every pair has one."""
    arms, mixed = [*arms], dict[str, None]()
    for cell in sorted({cell for arm in arms for cell in arm}):
        blocks = dict.fromkeys(arm[cell].block for arm in arms if cell in arm)
        mixed |= blocks if len(blocks) > 1 else {}
    return [*mixed]


def paired(
    arms: Sequence[Arm | Sequence[Run]], number: Number, by_step: bool = False, any_machine: bool = False
) -> list[pd.DataFrame]:
    """The numbers of each arm, all with the same cells and rows.

    Rows are the questions, which all runs must have, or `by_step` the steps that all have. Raises ConfigError for a
    cell that an arm lacks, for one whose runs are of several machines or library versions unless `any_machine` may do,
    and for different questions.
    """
    of_arms = [arm_of(arm) for arm in arms]
    first = of_arms[0]
    names = " and ".join(next(iter(arm.values())).name for arm in of_arms)
    unpaired = sorted({cell for arm in of_arms for cell in first.keys() ^ arm.keys()})
    require(not unpaired, f"{names} do not have the same bases and seeds: not all have {unpaired}")
    mixed = [] if any_machine else mixed_machines(of_arms)
    require(
        not mixed,
        f"{names} ran on different machines or library versions ({'; '.join(mixed)}), so other causes may add to their "
        "difference: run all on one",
    )
    numbers = [{cell: number(arm[cell]) for cell in first} for arm in of_arms]
    tables = [_table(columns) for columns in numbers]
    rows = reduce(pd.Index.intersection, [table.index for table in tables])
    series = [one for columns in numbers for one in columns.values() if isinstance(one, pd.Series)]
    if not by_step and any(len(one) > len(rows) for one in series):
        asked = ", ".join(sorted({run.name for arm in of_arms for run in arm.values()}))
        raise ConfigError(f"these runs were asked different questions: {asked}")
    return [table.loc[rows] for table in tables]


def difference_by_step(treated: Arm | Sequence[Run], control: Arm | Sequence[Run], number: Number) -> pd.DataFrame:
    """The difference of two arms on each unit, at the steps that all runs have."""
    first, second = paired([treated, control], number, by_step=True)
    return average_seeds(first - second)
