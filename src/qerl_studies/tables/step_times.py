"""Where the time of a run's steps goes, for `qerl-bench figure step_times`."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from qerl_studies.runs.load import Run
from qerl_studies.runs.measure import warm_steps
from qerl_studies.tables.paper import Table

KEYS = {
    "model": "model.name",
    "format": "quant.name",
    "rank": "lora.rank",
    "kernel": "kernel",
    "recompute": "train.recompute",
}
TIMES = {part: f"time/{part}_s" for part in ("step", "rollout", "reward", "sync", "train", "idle")}
RATES = {f"{part}_tok_s": f"speed/{part}_tok_s" for part in ("rollout", "train")}
MEANS = {
    "completion_tokens": "completions/tokens",
    "micro_batches": "train/micro_batches",
    "taught_frac": "train/taught_frac",
}
PEAKS = {f"{part}_gib": f"memory/{part}_gib" for part in ("rollout", "train", "rollout_reserved", "train_reserved")}


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


def step_times(runs: Iterable[Run]) -> Table:
    """Median, 20 % and 80 % over the steps of each run that trained: times of the phases, and the peak of memory."""
    table = pd.DataFrame([row(run) for run in runs]).sort_values(
        [*KEYS, "completion_tokens", "seed"], ignore_index=True
    )
    shown = pd.DataFrame(table[[*KEYS, "seed"]]).astype(str)
    shown["tokens"] = [f"{tokens:.0f}" for tokens in table["completion_tokens"]]
    for part in ("step", "rollout", "train"):
        columns = (table[f"{part}{end}"] for end in ("", "_p20", "_p80"))
        shown[f"{part} (s)"] = [
            f"{middle:.3g} [{low:.3g}, {high:.3g}]" for middle, low, high in zip(*columns, strict=True)
        ]
    for name, column in (("sampled", "rollout_tok_s"), ("trained", "train_tok_s")):
        shown[f"{name} (tokens/s)"] = [f"{rate:.0f}" for rate in table[column]]
    shown["peak (GiB)"] = [f"{peak:.1f}" for peak in table[["rollout_gib", "train_gib"]].max(axis=1)]
    caption = (
        "Time of a step with so many completion tokens, and of its phases: median over n = "
        f"{', '.join(str(n) for n in sorted(set(table['steps'])))} steps of one run. Brackets: from the 20 % to the "
        "80 % quantile of these steps, not an interval of the median. "
        f"{', '.join(sorted(set(table['device'])))}."
    )
    return Table(
        "step_times", table.map(lambda value: f"{value:.6g}" if isinstance(value, float) else value), shown, caption
    )
