"""The page of part 4 of the fair test, as longer/protocol.md says it, written before its data.

    python studies/fair-2026/longer.py

Reads longer/data/SESSION, what `qerl-bench study ... out=` packed, and writes longer/results/words.md. Runs are read,
and contrasts fitted, as those of part 2.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from mechanism import MARGIN, read
from rates import SHARES, at, levels, numbers_of, require_whole, table_of
from rates_analysis.contrasts import Asked, Contrast, effect, has_trained, minus, tested

from qerl_core.exits import guarded
from qerl_core.options import user_options
from qerl_core.process.arguments import KeyValueParser
from qerl_core.rundir.durable import write_atomically
from qerl_studies.report.probe_page import points, times
from qerl_studies.tables.markdown import markdown_table

STUDY = Path(__file__).resolve().parent
HERE = STUDY / "longer"
FORMATS = {"bf16": "bf16", "four-six": "nvfp4+four-six", "four-six-noise": "nvfp4+four-six"}
LATE, EARLIER, COPIES = (112, 116, 120), (40, 80), 6
NOISY = slice(12, 24)  # steps of the second of ten stages, the first with noise
PAIRS = (("four-six", "bf16"), ("four-six-noise", "four-six"), ("four-six-noise", "bf16"))
FIRST_TABLE: Asked = {" - ".join(pair): (minus(*pair), "late") for pair in PAIRS}
SECOND_TABLE: Asked = {f"{' - '.join(pair)}, both in BF16": (minus(*pair), "sampled in bf16") for pair in PAIRS}
LONGER = 0.01  # that BF16 must gain after its first 40 steps


def main(arguments: list[str] | None = None) -> None:
    KeyValueParser(__doc__).parse_args(arguments)
    user_options.use([STUDY / "conf"])
    (HERE / "results").mkdir(exist_ok=True)
    write_atomically(HERE / "results" / "words.md", page(HERE))
    print(HERE / "results" / "words.md")


def page(here: Path) -> str:
    found = read(here)
    copies = found.design.bases
    lacking = ", ".join(str(copy) for copy in copies if any((arm, copy, 0) not in found.runs for arm in FORMATS))
    parts = [
        "# 120 steps, and noise that falls in ten stages: the protocol's words",
        "Brackets are 95 % intervals; differences are points.",
    ]
    if lacking:
        return "\n\n".join([*parts, f"Not whole, so no words: copies {lacking} lack a run."]) + "\n"
    require_whole("longer", found.runs)
    rows = []
    for (arm, copy, _), run in found.runs.items():
        row = {"arm": arm, "copy": copy, "session": run.path.parent.name} | numbers_of(FORMATS[arm], run, late=LATE)
        early = {f"after {step}": at(run, "eval/lenient_sampled", step) for step in EARLIER}
        rows.append(row | early | {"noisy": float(np.log(run.series("train", "entropy").iloc[NOISY].mean()))})
    return "\n\n".join([*parts, *words(pd.DataFrame(rows))]) + "\n"


def words(rows: Any) -> list[str]:
    noise = effect(rows, minus("four-six-noise", "four-six"), "noisy")
    first, second = (judged(rows, asked, noise.low > 0) for asked in (FIRST_TABLE, SECOND_TABLE))
    gained = rows.loc[rows["arm"] == "bf16", "late"].mean() - rows.loc[rows["arm"] == "bf16", "after 40"].mean()
    short = [] if gained >= LONGER else ["**Longer training was not tested: BF16 ends where it was after 40 steps.**"]
    failed = [arm for arm in FORMATS if not has_trained(rows, arm)]
    told = [f"Rewards did not rise: {', '.join(failed)}."] if failed else []
    beside = [
        [
            " - ".join(pair),
            *(points(effect(rows, minus(*pair), f"after {step}"), 2, True) for step in EARLIER),
            points(effect(rows, minus(*pair), "last"), 2, True),
            times(effect(rows, minus(*pair), "noisy")),
        ]
        for pair in PAIRS
    ]
    columns = [
        "contrast",
        *(f"after {step} steps" for step in EARLIER),
        "reward, last eight",
        "entropy, steps 13 to 24",
    ]
    return [
        *short,
        *told,
        table_of(first),
        "## All answered in BF16",
        table_of(second),
        "## Beside them, without words",
        markdown_table(columns, beside),
        levels(rows, SHARES),
    ]


def judged(rows: Any, asked: Asked, noise_shown: bool) -> dict[str, Contrast]:
    """The contrasts of a table; those of an arm with noise have no other word where its noise is not shown."""
    found = tested(rows, asked, MARGIN, COPIES, enough=any)
    lacks = {name for name, (weights, _) in asked.items() if "four-six-noise" in weights and not noise_shown}
    return {name: one._replace(word="noise not shown") if name in lacks else one for name, one in found.items()}


if __name__ == "__main__":
    guarded(main)
