"""Table 2 of QeRL: accuracy on MATH-500, AIME 2024, AIME 2025 and AMC 2023 of each finished run, and their average.

python analysis/table2.py runs/ --out figures/

A run on BigMath is evaluated on MATH-500. The other sets are further evaluations of the finished run, one for each:

qerl-bench eval runs/NAME task=aime24 task.instruction=suffix

Sampled accuracy (pass@1) in per cent, before training (step 0) and after the last step. Each set counts a quarter,
whatever its size, as in the paper. No question is in two sets, so the squares of their standard errors add. Left out:
the error over seeds, which runs of several seeds show.
"""

import sys

import pandas as pd

from qerl_bench.checks import require
from qerl_bench.commands.exits import guarded
from qerl_bench.studies.runs.comparable import load_runs
from qerl_bench.studies.runs.script import parser_for
from qerl_bench.studies.tables.paper import add_format, write_table
from qerl_bench.study.four_sets import for_paper, rows, set_of


def main(arguments: list[str] | None = None) -> None:
    parser = parser_for(__doc__)
    add_format(parser)
    options = parser.parse_args(arguments)
    runs = load_runs(options.runs, options.mixed_code, options.without)
    chosen = [run for run in runs if run.finished and set_of(run.config) is not None]
    require(bool(chosen), "no finished run holds out one of the four sets: they are made by experiment=paper/table2 -m")
    if len(chosen) < len(runs):
        print(f"{len(runs) - len(chosen)} of {len(runs)} runs are unfinished or of other tasks", file=sys.stderr)
    table = pd.DataFrame([row for run in chosen for row in rows(run)])
    table = table.sort_values(["step", "model", "quant", "aqn", "lora_rank", "seed"], ignore_index=True)
    write_table(for_paper(table), options.format, options.out)
    print(table.to_string(index=False, float_format=lambda value: f"{value:.4g}", na_rep="-"))


if __name__ == "__main__":
    guarded(main)
