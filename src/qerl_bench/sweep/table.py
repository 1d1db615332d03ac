"""What every launcher of sweeps says at its end: one table of all runs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from qerl_core.checks import ConfigError
from qerl_core.options.fingerprint import flat, with_effect


def sweep_table(run_dirs: Sequence[Path]) -> str:
    """One table of all runs of a sweep, in the given order, and where they are.

    Below it are the runs without numbers to show, such as those that failed before their first step. Takes a second
    for the imports, and some 10 ms per run.
    """
    import pandas as pd  # takes a second, which no run waits for

    from qerl_studies.runs.load import load_run
    from qerl_studies.tables.terminal import differences, render, row_of

    rows, configs, others = [], [], []
    with warnings.catch_warnings(action="ignore"):  # the half-written last line of a run that goes on elsewhere
        for folder in run_dirs:
            try:
                run = load_run(folder)
                rows.append(row_of(run))
                configs.append(flat(with_effect(run.config)))
            except ConfigError as error:
                others.append(f"no numbers: {folder}: {str(error).partition('. ')[0]}")
    common = os.path.commonpath([folder.absolute().parent for folder in run_dirs])
    places = f"{len(run_dirs)} runs in {common}; the curves of each are in NAME/figures"
    table = [render(pd.DataFrame(rows), differences(configs))] if rows else []
    return "\n".join([*table, *others, places])
