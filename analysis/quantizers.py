"""Accuracy before any training, formats x quantizers, each with its paired difference to rounding to nearest.

python analysis/quantizers.py runs/ --out figures/
"""

import argparse
import sys
from pathlib import Path

import pandas as pd

from qerl_bench.errors import BadInput, require
from qerl_bench.results.load import find_runs, load_run


def questions(path: Path) -> pd.DataFrame:
    """The share of right answers (questions x greedy, sampled) of a run's step 0."""
    rows = pd.read_parquet(path / "samples.parquet").query("step == 0")
    return rows.pivot_table(index="question", columns="mode", values="correct", aggfunc="mean").astype(float)


def compare(runs: list[Path]) -> pd.DataFrame:
    """One row per run: accuracy in per cent, its standard error over questions, and both of the difference to rtn."""
    found = {}
    for path in runs:
        run = load_run(path)
        found[run.option("quant.name"), run.option("quantizer.name")] = (
            questions(path),
            pd.read_parquet(path / "layers.parquet"),
        )
    rows = []
    for (quant, quantizer), (right, layers) in found.items():
        require((quant, "rtn") in found, f"quant={quant} has no run with quantizer=rtn to compare with: run it too")
        row = {"format": quant, "quantizer": quantizer, "questions": len(right)}
        for mode in ("greedy", "sampled"):
            difference = right[mode] - found[quant, "rtn"][0][mode]
            row |= {mode: 100 * right[mode].mean(), f"{mode} se": 100 * right[mode].sem()}
            row |= {f"{mode} - rtn": 100 * difference.mean(), f"{mode} - rtn se": 100 * difference.sem()}
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
