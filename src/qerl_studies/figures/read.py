"""What a figure is drawn of: runs that differ in its factors alone, all finished runs, or the layers of runs."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from qerl_core.checks import require
from qerl_core.process.arguments import printable
from qerl_core.rundir.read_files import read_table
from qerl_studies.design.looks import shown_runs
from qerl_studies.figures.error_decomposition import COLUMNS, one_of_each
from qerl_studies.runs.comparable import load_runs
from qerl_studies.runs.find import leave_out
from qerl_studies.runs.load import Run
from qerl_studies.runs.readable import readable
from qerl_studies.runs.settings import Study


@dataclass(frozen=True)
class Differing:
    """Reads the runs, those of them that `of` chooses, and selects those that differ in `factors` alone.

    Unfinished runs are left out, unless `unfinished`. Their names, and the number of runs selected, go to stderr.
    """

    factors: tuple[str, ...]
    unfinished: bool = False
    of: Callable[[Iterable[Run]], Iterable[Run]] = list

    def __call__(self, options: Namespace) -> Study:
        return self.among(all_runs(options), options.also)

    def among(self, runs: Sequence[Run], also: Sequence[str]) -> Study:
        keys = {key for run in runs for key in run.config_items}
        unknown = [key for key in also if not any(known.startswith(key) for known in keys)]
        require(
            not unknown,
            f"also={','.join(unknown)}: no config key of these runs begins so; it is a key such as optim.lr, or a "
            "group with a dot behind it, such as model.",
        )
        for run in runs:
            if not run.finished:
                effect = "its setting ends at the step that it has reached" if self.unfinished else "it is left out"
                print(printable(f"{run.name} is not finished: {effect}"), file=sys.stderr)
        chosen = self.of([run for run in runs if run.finished or self.unfinished])
        return select([*chosen], [*self.factors, *also])


def select(runs: Sequence[Run], factors: Sequence[str]) -> Study:
    """`Study.select`, which prints how many of the runs it selected to stderr, if not all."""
    study = Study(runs).select(*factors)
    if len(study.runs) < len(runs):
        what = f"the largest set that differs in {', '.join(factors)} alone"
        print(printable(f"compared: {len(study.runs)} of {len(runs)} runs, {what}"), file=sys.stderr)
    return study


def found_in(read: Callable[[Namespace], Any], runs: Sequence[Run], options: Namespace) -> Any:
    """What `read` finds in runs that are loaded, in place of the folders of `options`."""
    if isinstance(read, Differing):
        return read.among(runs, options.also)
    return runs if read is all_runs else read(Namespace(runs=[run.path for run in runs], without=[]))


def all_runs(options: Namespace) -> list[Run]:
    return load_runs(shown_runs(options.runs, options.without), options.mixed_code)


def layers(options: Namespace) -> pd.DataFrame:
    """The errors of packed layers in all layers.parquet below the folders. Raises ConfigError without any, and as
    `one_of_each`.
    """
    found = [file.parent for folder in options.runs for file in sorted(folder.rglob("layers.parquet"))]
    files = [folder / "layers.parquet" for folder in leave_out(found, options.without)]
    folders = ", ".join(map(str, options.runs))
    require(len(files) > 0, f"no layers.parquet in {folders}: give folders of runs, exports or a committed table")
    tables, _ = readable(files, lambda file: read_table(file, COLUMNS).assign(file=str(file)))
    table = pd.concat(tables)
    return one_of_each(table.query("relative_error > 0"))
