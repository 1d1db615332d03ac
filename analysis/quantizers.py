"""Accuracy before any training, formats x quantizers, each with its paired difference to rounding to nearest.

python analysis/quantizers.py runs/ --out figures/
"""

import argparse
import sys
from pathlib import Path

import pandas as pd

from qerl_bench.errors import BadInput, require
from qerl_bench.results.load import find_runs, load_run
from qerl_bench.results.stats import crossed

MODES = ("greedy", "sampled")


def compare(runs: list[Path]) -> pd.DataFrame:
    """One row per run: accuracy in per cent, its standard error over questions, and both of the difference to rtn."""
    found = {}
    for path in runs:
        run = load_run(path)
        right = {mode: run.answers(mode)[0] for mode in MODES}  # of each question, before any training
        found[run.option("quant.name"), run.option("quantizer.name")] = right, pd.read_parquet(path / "layers.parquet")
    rows = []
    for (quant, quantizer), (right, layers) in found.items():
        require((quant, "rtn") in found, f"quant={quant} has no run with quantizer=rtn to compare with: run it too")
        row = {"format": quant, "quantizer": quantizer, "questions": len(right[MODES[0]])}
        for mode in MODES:
            difference = right[mode] - found[quant, "rtn"][0][mode]
            for name, values in ((mode, right[mode]), (f"{mode} - rtn", difference)):
                mean = crossed(values.to_numpy())
                row |= {name: 100 * mean.mean, f"{name} se": 100 * mean.error}
        row |= {"weight error": layers["relative_error"].mean(), "output error": layers["output_error"].mean()}
        rows.append(row)
    return pd.DataFrame(rows).sort_values(["format", "quantizer"], ignore_index=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write quantizers.csv and print it.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders that hold runs, or single runs")
    parser.add_argument("--out", type=Path, default=Path("figures"), help="folder to write to (default: figures)")
    options = parser.parse_args(arguments)
    table = compare([run for folder in options.runs for run in find_runs(folder)])
    options.out.mkdir(parents=True, exist_ok=True)
    table.to_csv(options.out / "quantizers.csv", index=False)
    print(table.to_string(index=False, float_format=lambda value: f"{value:.3f}", na_rep="-"))


if __name__ == "__main__":
    try:
        main()
    except BadInput as error:
        sys.exit(str(error))
