"""The table of `beside_trl.py`: accuracy before and after, seconds and memory of TRL's runs and of ours.

Accuracies are in %, with half of a 95 % interval over questions, which says nothing of other seeds. Times and tokens
are medians of the steps after the first, and `peak_gib` is the most memory that tensors took in a step.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from timing import write_rows

from qerl_bench.eval.paired import paired, read_samples
from qerl_bench.experiment_spec import Experiment
from qerl_core.rundir.environment import versions
from qerl_core.statistics import Estimate
from qerl_studies.tables.markdown import markdown_table

MODES = ("greedy", "sampled")
LIBRARIES = ("trl", "transformers", "peft", "torch")
NAMES = {  # in metrics.jsonl
    "step_s": "time/step_s",
    "rollout_s": "time/rollout_s",
    "tokens": "completions/tokens",
    "peak_gib": "memory/peak_gib",
}


def write_table(folder: Path, pairs: Sequence[tuple[Experiment, Path]]) -> None:
    """Write table.csv and table.md to `folder`, and print it: of our runs and the folders of TRL's, by seed."""
    rows: list[dict[str, Any]] = []
    differences = []
    for experiment, peer in pairs:
        run, rollout, about = experiment.run_dir, experiment.rollout, {"seed": experiment.seed}
        theirs = steps_of_trl(peer, rollout.prompts_per_step * rollout.group_size)
        for name, evaluated, steps in (("ours", run, steps_of_run(run)), ("TRL", peer / "eval", theirs)):
            assert len(steps) == experiment.steps, (name, len(steps))
            numbers = {key: median(one[key] for one in steps[1:]) for key in NAMES}
            numbers["peak_gib"] = max(one["peak_gib"] for one in steps)
            rows.append({"trainer": name} | about | accuracies(evaluated, experiment.steps) | numbers)
        before, after = read_samples(peer / "eval"), read_samples(run)
        found = ", ".join(f"{mode} {in_percent(paired(before, after, mode))}" for mode in MODES)
        differences.append(f"ours - TRL after training, seed {experiment.seed}: {found}")
    write_rows(rows, folder / "table.csv")
    shown = [[f"{one:.4g}" if isinstance(one, float) else str(one) for one in row.values()] for row in rows]
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    about = ", ".join([where, *(f"{name} {version}" for name, version in versions(LIBRARIES).items())])
    text = "\n".join([markdown_table([*rows[0]], shown), "", *differences, "", about, ""])
    (folder / "table.md").write_text(text)
    print(text)


def steps_of_run(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: one[name] for key, name in NAMES.items()} for one in lines if one["kind"] == "train"]


def steps_of_trl(folder: Path, completions: int) -> list[dict[str, float]]:
    """The same numbers of TRL's steps of so many `completions`."""
    logged = [one for one in json.loads((folder / "log.json").read_text()) if "completions/mean_length" in one]
    with (folder / "steps.csv").open() as file:
        timed = [{key: float(row[key]) for key in NAMES if key in row} for row in csv.DictReader(file)]
    return [
        step | {"tokens": completions * one["completions/mean_length"]} for step, one in zip(timed, logged, strict=True)
    ]


def accuracies(folder: Path, steps: int) -> dict[str, str]:
    """Held-out accuracy before and after, and the gain, for each mode."""
    entries = {(one["step"], one["metric"]): one for one in json.loads((folder / "eval.json").read_text())}
    found = {}
    for mode in MODES:
        for name, step, metric in (("before", 0, "accuracy"), ("after", steps, "accuracy"), ("gain", steps, "gain")):
            one = entries[step, f"eval/{metric}_{mode}"]
            found[f"{mode}_{name}"] = in_percent(Estimate(one["value"], one["stderr"], one["n"], one["n"] - 1))
    return found


def in_percent(found: Estimate) -> str:
    return f"{100 * found.value:.1f} ± {100 * found.half_width:.1f}"
