"""Reward and entropy against completions sampled, by algorithm, and a table of held-out gains with standard errors.

python analysis/fig_algorithms.py runs/ --out figures/
"""

import sys

import pandas as pd

from qerl_bench.checks import ConfigError
from qerl_bench.commands.exits import guarded
from qerl_bench.studies.figures.algorithms import algorithm_curves, gain_table
from qerl_bench.studies.figures.script import read_study, write_figure
from qerl_bench.studies.tables.paper import Table, write_table

SMOOTH = 7  # steps


def main(arguments: list[str] | None = None) -> None:
    study, options = read_study(arguments, __doc__, ["algo"], table=True)
    write_figure(algorithm_curves(study, SMOOTH), options, "algorithms")
    try:
        table = gain_table(study)
    except ConfigError as reason:
        print(f"no table of gains: {reason}", file=sys.stderr)
        return
    write_table(for_paper(table), options.format, options.out)
    with pd.option_context("display.width", 200):
        print(table.to_string(index=False, float_format=lambda value: f"{value:.3f}"))


def for_paper(table: pd.DataFrame) -> Table:
    """The table of gains in per cent, with intervals."""
    shown = pd.DataFrame({"algorithm": table["algo"], "seeds": table["seeds"].astype(str)})
    for name, column in (("before", "start"), ("after", "final"), ("after, sampled", "sampled_final")):
        shown[name] = [f"{100 * value:.1f}" for value in table[column]]
    shown["gain"] = [
        f"{100 * gain:+.1f} [{100 * (gain - half):+.1f}, {100 * (gain + half):+.1f}]"
        for gain, half in zip(table["gain"], table["gain_half"], strict=True)
    ]
    seeds = ", ".join(str(n) for n in sorted(set(table["seeds"])))
    caption = (
        f"Held-out accuracy (%, greedy unless stated) before and after training, n = {seeds} seeds. Brackets: 95 % "
        "interval of the gain, paired by question, over questions and seeds."
    )
    return Table("algorithms", table.drop(columns="gain_half"), shown, caption)


if __name__ == "__main__":
    guarded(main)
