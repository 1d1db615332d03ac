"""How far a second run of a copy and format is from its first: right by the last number, sampled, late in the run.

    python studies/real-2026/again.py

Reads the studies 05b and 05b-more, 15b and 15b-again, and writes again.md: two runs of BF16 and of NVFP4 on each copy
that both have, and what they say about NVFP4.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from qerl_core.exits import guarded
from qerl_core.process.arguments import KeyValueParser
from qerl_core.rundir.durable import write_atomically
from qerl_core.statistics import mean_ci
from qerl_studies.design.sessions import read_study
from qerl_studies.report.probe_page import points
from qerl_studies.report.secondary import SAMPLED, values_of
from qerl_studies.tables.markdown import markdown_table

STUDY = Path(__file__).parent
PAIRS = {"0.5B": ("05b", "05b-more"), "1.5B": ("15b", "15b-again")}
ARMS = ("bf16", "nvfp4")
SAID = (
    "Per cent right by the last number, sampled at temperature 0.6, mean of steps 32, 36 and 40.\n"
    "First runs: 05b and 15b; second: 05b-more and 15b-again, on another machine, with other code and sampled\n"
    "completions. Gaps in points, intervals at 95 % over copies."
)


def main(arguments: list[str] | None = None) -> None:
    KeyValueParser(__doc__).parse_args(arguments)
    text = "\n\n".join(["# Second runs", SAID, *(section(size, *folders) for size, folders in PAIRS.items())])
    write_atomically(STUDY / "again.md", text + "\n")
    print(STUDY / "again.md")


def section(size: str, first: str, second: str) -> str:
    """The table of a size and what it comes to."""
    runs = [values_of(read_study(STUDY / name), ARMS, SAMPLED) for name in (first, second)]
    copies = sorted(set.intersection(*({*of[arm].index} for of in runs for arm in ARMS)))
    found = 100 * np.array([[[of[arm][copy] for copy in copies] for arm in ARMS] for of in runs])
    moved, gaps = found[1] - found[0], found[:, 1] - found[:, 0]  # of arm and copy, of run and copy
    heads = ["copy", *(f"{arm}, {run}" for arm in ARMS for run in ("first", "second")), "gap, first", "gap, second"]
    rows = [
        [str(copy), *(f"{value:.1f}" for value in found[:, :, at].T.ravel()), *(f"{gap:+.1f}" for gap in gaps[:, at])]
        for at, copy in enumerate(copies)
    ]
    said = [points(mean_ci(gap / 100), 1, signed=True) for gap in (*gaps, gaps.mean(axis=0))]
    lines = [
        f"- Second minus first, of all {moved.size}: {moved.min():+.1f} to {moved.max():+.1f}, root of the mean square "
        f"{float(np.sqrt((moved**2).mean())):.1f}.",
        f"- Gap, nvfp4 minus bf16: {said[0]} in the first runs, {said[1]} in the second, {said[2]} in their mean.",
    ]
    return "\n".join([f"## {size}", "", markdown_table(heads, rows), "", *lines])


if __name__ == "__main__":
    guarded(main)
