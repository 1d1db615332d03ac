"""The page of part 9 of the fair test, as alone/protocol.md says it, written before its data.

    python studies/fair-2026/alone.py

Reads alone/05b/data/SESSION and alone/15b/data/SESSION, what `qerl-bench study ... out=` packed, a session a machine,
and writes alone/results/words.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from mechanism import read
from rates import require_whole

from qerl_core.checks import require
from qerl_core.exits import guarded
from qerl_core.options import user_options
from qerl_core.process.arguments import KeyValueParser
from qerl_core.rundir.durable import write_atomically
from qerl_core.statistics import Estimate, holm, mean_ci
from qerl_studies.report.probe_page import times
from qerl_studies.runs.load import Run
from qerl_studies.tables.markdown import markdown_table

STUDY = Path(__file__).resolve().parent
HERE = STUDY / "alone"
SIZES = {"0.5B": "05b", "1.5B": "15b"}
BATCHES = (8, 64, 256)  # completions a step; the first has words
ASKED = {
    "rollouts, NVFP4 / BF16": ("nvfp4", "bf16", "rollouts"),
    "rollouts, NVFP4 / NF4": ("nvfp4", "nf4", "rollouts"),
    "step, NVFP4 / BF16": ("nvfp4", "bf16", "step"),
    "memory, NVFP4 / BF16": ("nvfp4", "bf16", "memory"),
}
MACHINES, LEVEL, MARGIN, SKIPPED, STEPS, UNEVEN = 3, 0.05, 1.05, 2, 10, 1.1


def main(arguments: list[str] | None = None) -> None:
    KeyValueParser(__doc__).parse_args(arguments)
    user_options.use([STUDY / "conf"])
    (HERE / "results").mkdir(exist_ok=True)
    write_atomically(HERE / "results" / "words.md", page(HERE))
    print(HERE / "results" / "words.md")


def page(here: Path) -> str:
    parts = ["# Alone on a card: the protocol's words", "Ratios, with 95 % intervals over machines."]
    for size, folder in SIZES.items():
        found = read(here / folder)
        names = [arm.name for arm in found.design.arms]
        lacking = [str(one) for one in found.design.bases if any((arm, one, 0) not in found.runs for arm in names)]
        parts.append(f"## {size}")
        if lacking:
            parts.append(f"Not whole, so no words: machines {', '.join(lacking)} lack a run.")
            continue
        require_whole(f"alone, {size}", found.runs)
        rows = [{"arm": arm, "machine": copy} | measures(run) for (arm, copy, _), run in found.runs.items()]
        parts += words(pd.DataFrame(rows))
    return "\n\n".join(parts) + "\n"


def measures(run: Run) -> dict[str, float]:
    """Medians of the steps after the first two: tokens/s sampled, seconds for 1,000 tokens, GiB; and of two halves."""
    series = {
        name: run.series("train", name).to_numpy()
        for name in ("speed/rollout_tok_s", "time/step_s", "completions/tokens", "memory/peak_gib")
    }
    lacking = [name for name, values in series.items() if len(values) != STEPS]
    require(not lacking, f"{run.name} has not {STEPS} steps of {', '.join(lacking)}: leave its machine out")
    tokens, seconds, peak = (
        series[name][SKIPPED:] for name in ("completions/tokens", "time/step_s", "memory/peak_gib")
    )
    steps = 1000 * seconds / tokens
    early, late = np.array_split(steps, 2)
    return {
        "rollouts": float(np.median(series["speed/rollout_tok_s"][SKIPPED:])),
        "step": float(np.median(steps)),
        "memory": float(np.median(peak)),
        "halves": float(np.median(late) / np.median(early)),
    }


def ratio(rows: Any, batch: int, asked: tuple[str, str, str]) -> Estimate:
    """The mean over machines of the logarithm of a ratio."""
    over, under, measure = asked
    by_machine = {arm: rows[rows["arm"] == f"{arm}-{batch}"].set_index("machine")[measure] for arm in (over, under)}
    return mean_ci(np.log(by_machine[over] / by_machine[under]).to_numpy())


def words(rows: Any) -> list[str]:
    found = {name: ratio(rows, BATCHES[0], asked) for name, asked in ASKED.items()}
    adjusted = holm([one.p_outside(0.0) for one in found.values()])
    table = [
        [name, times(one), f"{p:.4f}", f"**{word_of(one, float(p))}**"]
        for (name, one), p in zip(found.items(), adjusted, strict=True)
    ]
    others = [[name, *(times(ratio(rows, batch, asked)) for batch in BATCHES[1:])] for name, asked in ASKED.items()]
    uneven = int(((rows["halves"] > UNEVEN) | (rows["halves"] < 1 / UNEVEN)).sum())
    return [
        f"### {BATCHES[0]} completions a step",
        markdown_table(["ratio", "", "p (Holm)", "word"], table),
        "### More completions, without words",
        markdown_table(["ratio", *(f"{batch} completions" for batch in BATCHES[1:])], others),
        levels(rows),
        f"Runs whose halves differ by more than a tenth: {uneven} of {len(rows)}.",
    ]


def word_of(found: Estimate, p: float) -> str:
    """The protocol's word."""
    if found.n < MACHINES:
        return "not decided"
    if p < LEVEL:
        return "more" if found.value > 0 else "less"
    reach = math.log(MARGIN)
    return "no difference beyond the margin" if -reach <= found.low and found.high <= reach else "not decided"


def levels(rows: Any) -> str:
    """Means over machines of each arm."""
    shown: Mapping[str, str] = {"rollouts": "tokens/s", "step": "s for 1,000 tokens", "memory": "GiB"}
    lines = [
        [arm, *(f"{of[name].mean():,.{0 if name == 'rollouts' else 2}f}" for name in shown)]
        for arm, of in rows.groupby("arm", sort=False)
    ]
    return markdown_table(["arm", *shown.values()], lines)


if __name__ == "__main__":
    guarded(main)
