"""Where the time of a step goes: median, 20 % and 80 % over the steps of each run that trained, as a CSV file.

python analysis/step_times.py runs/ --out figures/
"""

import pandas as pd

from qerl_bench.claims.measure import warm_steps
from qerl_bench.exits import guarded
from qerl_bench.study.load import Run, load_runs
from qerl_bench.study.script import parser_for

KEYS = {"model": "model.name", "format": "quant.name", "rank": "lora.rank", "recompute": "train.recompute"}
TIMES = {part: f"time/{part}_s" for part in ("step", "rollout", "reward", "sync", "train", "idle")}
RATES = {f"{part}_tok_s": f"speed/{part}_tok_s" for part in ("rollout", "train")}
MEANS = {
    "completion_tokens": "completions/tokens",
    "micro_batches": "train/micro_batches",
    "taught_frac": "train/taught_frac",
}
PEAKS = {f"{part}_gib": f"memory/{part}_gib" for part in ("rollout", "train", "rollout_reserved", "train_reserved")}


def main(arguments: list[str] | None = None) -> None:
    options = parser_for(__doc__).parse_args(arguments)
    rows = [row(run) for run in load_runs(options.runs, options.mixed_code, options.without)]
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "step_times.csv"
    pd.DataFrame(rows).sort_values([*KEYS, "seed"]).to_csv(file, index=False, float_format="%.6g")
    print(file)


def row(run: Run) -> dict[str, object]:
    """One line of the table; seconds, tokens a second, GiB. Raises ConfigError if no step trained."""
    found: dict[str, object] = {name: run.option(key) for name, key in KEYS.items()}
    found |= {"seed": run.option("seed"), "device": run.device}
    found["steps"] = len(warm_steps(run, "time/step_s"))
    found |= {name: warm_steps(run, metric).mean() for name, metric in MEANS.items()}
    for name, metric in (TIMES | RATES).items():
        low, middle, high = warm_steps(run, metric).quantile([0.2, 0.5, 0.8])
        found |= {name: middle, f"{name}_p20": low, f"{name}_p80": high}
    return found | {name: run.series("train", metric).max() for name, metric in PEAKS.items()}


if __name__ == "__main__":
    guarded(main)
