"""Accuracy before training by format and quantizer, each with its paired difference from round-to-nearest (rtn).

python studies/quantizers/accuracy.py runs/ --out figures/
"""

from __future__ import annotations

import math

import pandas as pd

from qerl_core.checks import require
from qerl_core.exits import guarded
from qerl_core.statistics import mean_ci_crossed, t_quantile
from qerl_studies.design.looks import shown_runs
from qerl_studies.runs.comparable import load_runs
from qerl_studies.runs.load import Run
from qerl_studies.runs.script import parser_for
from qerl_studies.tables.paper import Table, add_format, write_table

MODES = ("greedy", "sampled")


def main(arguments: list[str] | None = None) -> None:
    parser = parser_for(__doc__)
    add_format(parser)
    options = parser.parse_args(arguments)
    table = compare(load_runs(shown_runs(options.runs, options.without), options.mixed_code))
    write_table(for_paper(table), options.format, options.out)
    print(table.to_string(index=False, float_format=lambda value: f"{value:.3f}", na_rep="-"))


def compare(runs: list[Run]) -> pd.DataFrame:
    """One row per run: accuracy in per cent and its difference from rtn, each with its standard error over questions.

    Raises ConfigError if two runs have the same format and quantizer, if a run has no `layers.parquet` or no evaluation
    before training, and if a format has no run with rtn, or one on other questions.
    """
    answers_and_layers, names = {}, {}
    for run in runs:
        key = run.option("quant.name"), run.option("quantizer.name")
        both = f"{names.get(key)} and {run.name} are both quant={key[0]} quantizer={key[1]}"
        require(key not in names, f"{both}: leave one out")
        answers = {mode: run.answers(mode) for mode in MODES}
        require(all(0 in table for table in answers.values()), f"{run.name} was not evaluated before its first step")
        file = run.path / "layers.parquet"
        require(file.is_file(), f"{file} is missing: leave the run out, or run it again")
        answers_and_layers[key] = {mode: table[0] for mode, table in answers.items()}, pd.read_parquet(file)
        names[key] = run.name
    rows = []
    for (quant, quantizer), (correct, layers) in answers_and_layers.items():
        require((quant, "rtn") in names, f"quant={quant} has no run with quantizer=rtn to compare with: run it too")
        row = {"format": quant, "quantizer": quantizer, "questions": len(correct[MODES[0]])}
        for mode in MODES:
            difference = correct[mode] - answers_and_layers[quant, "rtn"][0][mode]
            both = f"{names[quant, quantizer]} and {names[quant, 'rtn']}"
            require(bool(difference.notna().all()), f"{both} were asked different questions: leave one out")
            for name, values in ((mode, correct[mode]), (f"{mode} - rtn", difference)):
                mean = mean_ci_crossed(values.to_numpy())
                row |= {name: 100 * mean.value, f"{name} se": 100 * mean.stderr}
        row |= {"weight error": layers["relative_error"].mean(), "output error": layers["output_error"].mean()}
        rows.append(row)
    return pd.DataFrame(rows).sort_values(["format", "quantizer"], ignore_index=True)


def for_paper(table: pd.DataFrame) -> Table:
    """The table with an interval for each difference."""
    half = t_quantile(0.975, min(table["questions"].tolist()) - 1)
    shown = pd.DataFrame(table[["format", "quantizer"]])
    for mode in MODES:
        shown[mode] = [f"{value:.1f}" for value in table[mode]]
        rows = zip(table["quantizer"], table[f"{mode} - rtn"], table[f"{mode} - rtn se"], strict=True)
        shown[f"{mode} - rtn"] = [
            "-" if name == "rtn" else f"{d:+.1f} [{d - half * se:+.1f}, {d + half * se:+.1f}]" for name, d, se in rows
        ]
    for error in ("weight error", "output error"):
        shown[error] = [f"{value:.3f}" if math.isfinite(value) else "-" for value in table[error]]
    caption = (
        f"Accuracy before training (%), and its difference from round-to-nearest on the same n = "
        f"{', '.join(map(str, sorted(set(table['questions']))))} questions. Brackets: 95 % interval (Student's t) "
        "over questions; one base model. Errors are relative, means over layers."
    )
    return Table("quantizers", table, shown, caption)


if __name__ == "__main__":
    guarded(main)
