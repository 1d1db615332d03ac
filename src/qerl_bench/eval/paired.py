"""Two evaluations of the same questions, compared question by question: what is hard for both cancels.

Used for the gain of a run over its own quantized base, and for two runs against each other:

    paired(read_samples("runs/a"), read_samples("runs/b"), "sampled")
"""

from __future__ import annotations

import os
from pathlib import Path

import pandas as pd

from qerl_bench.checks import require
from qerl_bench.eval.base import Score
from qerl_bench.statistics import Estimate, paired_difference


def read_samples(folder: str | os.PathLike[str], step: int | None = None) -> pd.DataFrame:
    """The rows of samples.parquet of one step, by default the last, of a run or of a later evaluation of it."""
    path = Path(folder) / "samples.parquet"
    require(path.is_file(), f"{folder} holds no evaluated questions: it has no samples.parquet (eval=none writes none)")
    rows = pd.read_parquet(path)
    steps = sorted(set(rows["step"]))
    wanted = steps[-1] if step is None else step
    require(wanted in steps, f"{path} holds the steps {', '.join(map(str, steps))}, not {wanted}")
    return rows.loc[rows["step"] == wanted]


def paired(first: pd.DataFrame, second: pd.DataFrame, mode: str) -> Estimate:
    """Accuracy of `second` minus that of `first`, with the error of the difference. Raises ConfigError unless both asked
    the same questions in that mode (greedy or sampled)."""
    before, after = (_answers(rows, mode) for rows in (first, second))
    only = sorted(set(before) ^ set(after))
    require(
        bool(before) and not only,
        f"only answers to the same questions can be paired, but of the {mode} ones {len(set(before) & set(after))} are "
        f"in both and {len(only)} in one alone ({', '.join(only[:3])}); evaluate both with the same eval.questions: "
        "python -m qerl_bench.eval RUN_DIR eval=...",
    )
    return paired_difference([before[question] for question in before], [after[question] for question in before])


def gains(first: pd.DataFrame, second: pd.DataFrame) -> list[Score]:
    """The paired difference in every mode, as eval/gain_<mode>."""
    return [Score.of(f"eval/gain_{mode}", paired(first, second, mode)) for mode in first["mode"].unique()]


def _answers(rows: pd.DataFrame, mode: str) -> dict[str, list[float]]:
    """For each question, whether each of its samples is right."""
    chosen = rows.loc[rows["mode"] == mode].sort_values("sample", kind="stable")
    grouped = chosen.groupby("question", sort=False)["correct"]
    return {str(question): [float(value) for value in values] for question, values in grouped}
