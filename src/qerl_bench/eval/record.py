"""Writes evaluations to the run directory: eval.json and samples.parquet, with one entry per evaluated step."""

from __future__ import annotations

import json
from dataclasses import asdict

import pandas as pd

from qerl_bench.eval.base import Evaluation, Score
from qerl_bench.eval.paired import gains
from qerl_core.rundir.environment import versions
from qerl_core.rundir.read_files import read_table
from qerl_core.rundir.run_dir import RunDir


def record_evaluation(run: RunDir, task: str, step: int, evaluation: Evaluation) -> list[Score]:
    """Add the evaluation at `step`, or replace it after a resume.

    Returns its scores and, after step 0, the gains over step 0: the quantized base on the same questions.
    """
    run.mend()
    path = run.path / "samples.parquet"
    rows = pd.DataFrame([{"step": step, **row} for row in evaluation.samples])
    scores = list(evaluation.scores)
    if path.exists() and step > 0:
        before = read_table(path)
        base = before.loc[before["step"] == 0]
        scores += gains(base, rows) if len(base) else []
        rows = pd.concat([before[before["step"] != step], rows], ignore_index=True)
    with run.replacing("samples.parquet") as file:
        rows.to_parquet(file, index=False)

    path = run.path / "eval.json"
    others = (
        [entry for entry in json.loads(path.read_text()) if entry["step"] != step] if path.exists() and step > 0 else []
    )
    entries = [
        {"task": task, "step": step, **asdict(score), "settings": evaluation.settings, "versions": versions()}
        for score in scores
    ]
    run.write("eval.json", json.dumps(others + entries, indent=1))
    return scores
