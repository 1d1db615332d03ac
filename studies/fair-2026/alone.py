"""The page of part 9 of the fair test, as alone/protocol.md says it, written before its data.

    python studies/fair-2026/alone.py

Reads alone/data/MACHINE, what `qerl-bench collect` packed and cards.txt beside it, and writes alone/results/words.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from qerl_core.checks import require
from qerl_core.exits import guarded
from qerl_core.process.arguments import KeyValueParser
from qerl_core.rundir.durable import write_atomically
from qerl_core.statistics import Estimate, holm, mean_ci
from qerl_studies.report.probe_page import times
from qerl_studies.runs.comparable import load_runs
from qerl_studies.runs.load import Run
from qerl_studies.tables.markdown import markdown_table

HERE = Path(__file__).resolve().parent / "alone"
MODELS = {"0.5B": "qwen2.5-coder-0.5b-instruct.gguf", "1.5B": "qwen2.5-coder-1.5b-instruct.gguf"}
FORMATS = ("bf16", "nvfp4", "nf4")
BATCHES = {8: 2, 64: 1, 256: 1}  # completions a step, and seeds; the first has words
WANTED = Counter({(form, batch): seeds for form in FORMATS for batch, seeds in BATCHES.items()})  # runs of a model
ASKED = {
    "rollouts, NVFP4 / BF16": ("nvfp4", "bf16", "rollouts"),
    "rollouts, NVFP4 / NF4": ("nvfp4", "nf4", "rollouts"),
    "step, NVFP4 / BF16": ("nvfp4", "bf16", "step"),
    "memory, NVFP4 / BF16": ("nvfp4", "bf16", "memory"),
}
MACHINES, LEVEL, MARGIN, SKIPPED, STEPS, UNEVEN = 3, 0.05, 1.05, 2, 8, 1.1


def main(arguments: list[str] | None = None) -> None:
    KeyValueParser(__doc__).parse_args(arguments)
    (HERE / "results").mkdir(exist_ok=True)
    write_atomically(HERE / "results" / "words.md", page(HERE / "data"))
    print(HERE / "results" / "words.md")


def page(data: Path) -> str:
    """The page of the machines in `data`. Raises ConfigError if two of them are one, or a run is not as asked."""
    machines = {folder.name: load_runs([folder]) for folder in sorted(data.iterdir())} if data.is_dir() else {}
    require_apart(data, machines)
    parts = ["# Alone on a card: the protocol's words", "Ratios, with 95 % intervals over machines."]
    for size, file in MODELS.items():
        parts.append(f"## {size}")
        of_size = {
            name: [run for run in runs if Path(run.option("model.id")).name == file] for name, runs in machines.items()
        }
        whole = [name for name, runs in of_size.items() if Counter(map(cell_of, runs)) == WANTED]
        if len(whole) < MACHINES:
            parts.append(f"Not whole, so no words: {len(whole)} of {MACHINES} machines have all runs.")
            continue
        rows = [row_of(run) | {"machine": name} for name in whole for run in of_size[name]]
        parts += words(pd.DataFrame(rows))
    return "\n\n".join(parts) + "\n"


def require_apart(data: Path, machines: Mapping[str, list[Run]]) -> None:
    """Raise ConfigError if a card is in two sessions, or kinds of cards differ."""
    seen = [(card, name) for name in machines for card in (data / name / "cards.txt").read_text().split()]
    twice = [card for card, count in Counter(card for card, _ in seen).items() if count > 1]
    require(not twice, f"cards {', '.join(twice)} are in two sessions, which are one machine: leave one out")
    kinds = {run.device for runs in machines.values() for run in runs}
    require(len(kinds) <= 1, f"these ran on {', '.join(sorted(kinds))}: keep one kind of card")


def cell_of(run: Run) -> tuple[str, int]:
    return run.option("quant.name"), run.option("rollout.prompts_per_step") * run.option("rollout.group_size")


def row_of(run: Run) -> dict[str, Any]:
    """Medians of the steps after the first two: tokens/s sampled, seconds, GiB; and of two halves."""
    names = ("speed/rollout_tok_s", "time/step_s", "memory/peak_gib", "train/taught_frac")
    series = {name: run.series("train", name).to_numpy() for name in names}
    lacking = [name for name, values in series.items() if len(values) != STEPS]
    require(not lacking, f"{run.name} has not {STEPS} steps of {', '.join(lacking)}: leave its machine out")
    rollouts, seconds, peak, taught = (values[SKIPPED:] for values in series.values())
    require(bool((taught == 1).all()), f"{run.name} has steps that taught less than all completions: leave it out")
    early, late = np.array_split(seconds, 2)
    form, batch = cell_of(run)
    return {
        "format": form,
        "completions": batch,
        "rollouts": float(np.median(rollouts)),
        "step": float(np.median(seconds)),
        "memory": float(np.median(peak)),
        "halves": float(np.median(late) / np.median(early)),
    }


def ratio(rows: Any, batch: int, asked: tuple[str, str, str]) -> Estimate:
    """The mean over machines of the logarithm of a ratio, whose seeds are averaged."""
    over, under, measure = asked
    of_batch = rows[rows["completions"] == batch]
    logs = np.log(of_batch[measure]).groupby([of_batch["format"], of_batch["machine"]]).mean()
    return replace(mean_ci((logs[over] - logs[under]).to_numpy()), exact=measure == "memory")


def words(rows: Any) -> list[str]:
    first, *others = BATCHES
    found = {name: ratio(rows, first, asked) for name, asked in ASKED.items()}
    adjusted = holm([one.p_outside(0.0) for one in found.values()])
    table = [
        [name, times(one), f"{p:.4f}", f"**{word_of(one, float(p))}**"]
        for (name, one), p in zip(found.items(), adjusted, strict=True)
    ]
    more = [[name, *(times(ratio(rows, batch, asked)) for batch in others)] for name, asked in ASKED.items()]
    uneven = int(((rows["halves"] > UNEVEN) | (rows["halves"] < 1 / UNEVEN)).sum())
    return [
        f"### {first} completions a step",
        markdown_table(["ratio", "", "p (Holm)", "word"], table),
        "### More completions, without words",
        markdown_table(["ratio", *(f"{batch} completions" for batch in others)], more),
        levels(rows),
        f"Runs whose halves differ by more than a tenth: {uneven} of {len(rows)}.",
    ]


def word_of(found: Estimate, p: float) -> str:
    """The protocol's word."""
    if p < LEVEL:
        return "more" if found.value > 0 else "less"
    reach = math.log(MARGIN)
    return "no difference beyond the margin" if -reach <= found.low and found.high <= reach else "not decided"


def levels(rows: Any) -> str:
    """Means over machines of each format and number of completions."""
    shown: Mapping[str, str] = {"rollouts": "tokens/s", "step": "s a step", "memory": "GiB"}
    lines = [
        [f"{form}, {batch}", *(f"{of[name].mean():,.{0 if name == 'rollouts' else 2}f}" for name in shown)]
        for batch in BATCHES
        for form in FORMATS
        for of in [rows[(rows["format"] == form) & (rows["completions"] == batch)]]
    ]
    return markdown_table(["format, completions", *shown.values()], lines)


if __name__ == "__main__":
    guarded(main)
