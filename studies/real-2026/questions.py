"""What checkpoints answered beside the study's evaluations (protocol, amendment 8), a row for each copy.

    python studies/real-2026/questions.py

Reads questions.csv of each session of each size, and writes questions.md beside its study.yaml.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from qerl_bench.commands.exits import guarded
from qerl_bench.process.arguments import KeyValueParser
from qerl_bench.rundir.durable import write_atomically
from qerl_bench.studies.tables.markdown import markdown_table

STUDY = Path(__file__).parent
ARMS = ("bf16", "nvfp4", "nvfp4-noise")
ASKED = {  # name: what it is, and the metrics that its table has
    "t1": (
        "256 held-out questions of GSM8K, 8 answers each at temperature 1",
        {"lenient_sampled": "by the last number", "pass_at_k": "pass@8 by the boxed one"},
    ),
    "words": (
        "1,000 generated word problems, greedy and at temperature 0.6",
        {"accuracy_greedy": "greedy, boxed", "accuracy_sampled": "sampled, boxed"},
    ),
}


def page(rows: Any) -> str:
    """Markdown with a table for each kind of question: copies and steps by arms, per cent."""
    parts = ["# Questions to checkpoints"]
    for asked, (said, metrics) in ASKED.items():
        keys = ["copy", "step", "metric", "arm"]
        found = rows[rows.asked == asked].set_index(keys)["value"].to_dict()
        lines = []
        for copy, step in sorted({key[:2] for key in found}):
            values = [found.get((copy, step, metric, arm)) for metric in metrics for arm in ARMS]
            lines.append([str(copy), str(step), *("-" if value is None else f"{100 * value:.1f}" for value in values)])
        heads = ["copy", "step", *(f"{name}, {arm}" for name in metrics.values() for arm in ARMS)]
        parts += [f"## {said}", markdown_table(heads, lines)]
    return "\n\n".join(parts) + "\n"


def pages() -> dict[Path, str]:
    """By its file, the page of each size that has such answers."""
    found = {}
    for size in sorted(STUDY.glob("*/study.yaml")):
        files = sorted(size.parent.glob("data/*/questions.csv"))
        if files:
            rows = pd.concat([pd.read_csv(file) for file in files])
            found[size.with_name("questions.md")] = page(rows)
    return found


def main(arguments: list[str] | None = None) -> None:
    KeyValueParser(__doc__).parse_args(arguments)
    for file, text in pages().items():
        write_atomically(file, text)
        print(file)


if __name__ == "__main__":
    guarded(main)
