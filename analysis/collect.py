"""Gather runs, unfinished ones too, into one long table: tidy.parquet and tidy.csv.

python analysis/collect.py runs/ --out figures/
"""

import argparse
from pathlib import Path

from qerl_bench.results.collect import write_tidy
from qerl_bench.results.load import find_runs
from qerl_bench.results.script import run


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write tidy.parquet and tidy.csv, one row per number of each run.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders that hold runs, or single runs")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder to write to (default: figures)")
    parser.add_argument("--metrics", nargs="+", default=[], help="write these metrics only (default: all)")
    parser.add_argument("--mixed-code", action="store_true", help="accept runs of different versions of the code")
    options = parser.parse_args(arguments)

    paths = [path for folder in options.runs for path in find_runs(folder)]
    runs, unfinished, rows = write_tidy(paths, options.out, options.mixed_code, options.metrics)
    print(f"{runs} runs, {unfinished} of them unfinished, {rows} numbers: {options.out / 'tidy.parquet'}, tidy.csv")


if __name__ == "__main__":
    run(main)
