"""Compares two evaluations of the same questions, question by question, so that the questions' difficulty cancels.

Used for the gain of a run over its own quantized base, and to compare two runs:

    paired(read_samples("runs/a"), read_samples("runs/b"), "sampled")
"""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd

from qerl_bench.eval.base import Score
from qerl_core.checks import require
from qerl_core.rundir.read_files import read_table
from qerl_core.statistics import Estimate, paired_difference


def read_samples(folder: str | os.PathLike[str], step: int | None = None) -> pd.DataFrame:
    """The rows of samples.parquet at one step, by default the last, of a run or of a later evaluation of it."""
    path = Path(folder) / "samples.parquet"
    require(path.is_file(), f"{folder} has no samples.parquet, so nothing was evaluated (eval=none writes none)")
    rows = read_table(path)
    steps = sorted(set(rows["step"]))
    wanted = steps[-1] if step is None else step
    require(wanted in steps, f"{path} has the steps {', '.join(map(str, steps))}, not {wanted}")
    return rows.loc[rows["step"] == wanted]


def paired(first: pd.DataFrame, second: pd.DataFrame, mode: str, column: str = "correct") -> Estimate:
    """Accuracy of `second` minus that of `first`, with the standard error of the difference; `column` may be lenient.

    Raises ConfigError unless both have the same questions in `mode` (greedy or sampled).
    """
    before, after = (_answers(rows, mode, column) for rows in (first, second))
    unpaired = sorted(set(before) ^ set(after))
    require(
        bool(before) and not unpaired,
        f"only the same questions can be compared, but {len(set(before) & set(after))} {mode} questions are in both "
        f"and {len(unpaired)} in one alone ({', '.join(unpaired[:3])}); evaluate both with the same eval.questions: "
        "qerl-bench eval RUN_DIR eval=...",
    )
    return paired_difference([before[question] for question in before], [after[question] for question in before])


def gains(first: pd.DataFrame, second: pd.DataFrame) -> list[Score]:
    """The paired difference in each mode of `second`: eval/gain_<mode>, and gain_lenient_<mode> where both have it."""
    lenient = all("lenient" in rows and rows["lenient"].notna().all() for rows in (first, second))
    columns = {"": "correct"} | ({"lenient_": "lenient"} if lenient else {})
    return [
        Score.from_estimate(f"eval/gain_{prefix}{mode}", paired(first, second, mode, column))
        for mode in second["mode"].unique()
        for prefix, column in columns.items()
    ]


def _answers(rows: pd.DataFrame, mode: str, column: str) -> dict[str, list[float]]:
    """For each question, 1 for each sample that is right by `column` and 0 for others."""
    chosen = rows.loc[rows["mode"] == mode].sort_values("sample", kind="stable")
    grouped = chosen.groupby("question", sort=False)[column]
    return {str(question): [float(value) for value in values] for question, values in grouped}
