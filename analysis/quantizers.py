"""Accuracy before training by format and quantizer, each with its paired difference from round-to-nearest (rtn).

python analysis/quantizers.py runs/ --out figures/
"""

from qerl_bench.commands.exits import guarded
from qerl_bench.studies.runs.comparable import load_runs
from qerl_bench.studies.runs.script import parser_for
from qerl_bench.studies.tables.paper import add_format, write_table
from qerl_bench.study.quantizer_table import compare, for_paper


def main(arguments: list[str] | None = None) -> None:
    parser = parser_for(__doc__)
    add_format(parser)
    options = parser.parse_args(arguments)
    table = compare(load_runs(options.runs, options.mixed_code, options.without))
    write_table(for_paper(table), options.format, options.out)
    print(table.to_string(index=False, float_format=lambda value: f"{value:.3f}", na_rep="-"))


if __name__ == "__main__":
    guarded(main)
