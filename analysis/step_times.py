"""Where the time of a step goes: median, 20 % and 80 % over the steps of each run that trained, as a CSV file.

python analysis/step_times.py runs/ --out figures/
"""

import pandas as pd

from qerl_bench.commands.exits import guarded
from qerl_bench.studies.runs.comparable import load_runs
from qerl_bench.studies.runs.script import parser_for
from qerl_bench.studies.tables.paper import add_format, write_table
from qerl_bench.studies.tables.step_times import KEYS, for_paper, row


def main(arguments: list[str] | None = None) -> None:
    parser = parser_for(__doc__)
    add_format(parser)
    options = parser.parse_args(arguments)
    rows = [row(run) for run in load_runs(options.runs, options.mixed_code, options.without)]
    table = pd.DataFrame(rows).sort_values([*KEYS, "seed"], ignore_index=True)
    print(write_table(for_paper(table), options.format, options.out))


if __name__ == "__main__":
    guarded(main)
