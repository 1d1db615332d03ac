"""Gather runs, unfinished ones too, into one long table: tidy.parquet and tidy.csv.

python analysis/collect.py runs/ --out figures/
"""

from qerl_bench.results.collect import write_tidy
from qerl_bench.results.load import find_runs
from qerl_bench.results.script import guarded, parser_for


def main(arguments: list[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--metrics", nargs="+", default=[], help="write these metrics only (default: all)")
    options = parser.parse_args(arguments)

    paths = [path for folder in options.runs for path in find_runs(folder)]
    runs, unfinished, rows = write_tidy(paths, options.out, options.mixed_code, options.metrics)
    print(f"{runs} runs, {unfinished} of them unfinished, {rows} numbers: {options.out / 'tidy.parquet'}, tidy.csv")


if __name__ == "__main__":
    guarded(main)
