"""Gather finished runs into one long table: tidy.parquet and tidy.csv.

python analysis/collect.py runs/ --out figures/
"""

import argparse
import sys
from pathlib import Path

from qerl_bench.errors import BadInput
from qerl_bench.results.load import find_runs, load_run, tidy


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write tidy.parquet and tidy.csv, one row per number of each run.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders that hold runs, or single runs")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder to write to (default: figures)")
    options = parser.parse_args(arguments)

    table = tidy(load_run(run) for folder in options.runs for run in find_runs(folder))
    options.out.mkdir(parents=True, exist_ok=True)
    table.to_parquet(options.out / "tidy.parquet", index=False)
    table.to_csv(options.out / "tidy.csv", index=False)
    print(f"{table['run'].nunique()} runs, {len(table)} numbers: {options.out / 'tidy.parquet'}, tidy.csv")


if __name__ == "__main__":
    try:
        main()
    except BadInput as error:
        print(error, file=sys.stderr)
        sys.exit(2)
