"""Gather runs, unfinished ones too, into a study: files that can be committed and are read like the runs themselves.

    qerl-bench collect runs/ out=studies/NAME/data

Writes settings.json (configs and environments), tidy.parquet (one row per number) and, if answers to held-out questions
were kept, answers.parquet. --metrics study, the default, writes the metrics of all claims and figures; --metrics all
writes all.
"""

from __future__ import annotations

from pathlib import Path

from qerl_core.checks import require
from qerl_studies.design.looks import shown_runs
from qerl_studies.runs.collect import write_study
from qerl_studies.runs.load import load_run
from qerl_studies.runs.readable import readable, whole_run
from qerl_studies.runs.script import parser_for


def main(arguments: list[str] | None = None) -> None:
    parser = parser_for(__doc__)
    chosen = "metrics to write: names, study, or all (default: study)"
    parser.add_argument("--metrics", nargs="+", default=["study"], help=chosen)
    parser.add_argument("--csv", action="store_true", help="write tidy.csv too, about twenty times as large")
    options = parser.parse_args(arguments)

    paths, _ = readable(shown_runs(options.runs, options.without), _read)
    metrics = [] if "all" in options.metrics else options.metrics
    if named := {*metrics} - {"study"}:
        named -= {str(name) for path in paths for name in load_run(path).metrics["metric"].unique()}
        require(not named, f"no run has {' or '.join(sorted(named))}: metrics= takes names, study, or all")
    study = write_study(paths, options.out, options.mixed_code, metrics, options.csv)
    print(f"{study.runs} runs, {study.unfinished} of them unfinished, {study.rows} numbers: {options.out}")
    print(f"cost of the finished runs: {study.cost}")


def _read(path: Path) -> Path:
    """The path of a run that can be read, and not its numbers: many runs do not fit in memory."""
    whole_run(path)
    return path
