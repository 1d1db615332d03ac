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
from rates_analysis.contrasts import Asked, effect, minus, tested

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
STAGES = slice(12, 36)  # steps of the second and third of ten stages, the first with noise
PAIRS = (("four-six", "bf16"), ("four-six-noise", "four-six"), ("four-six-noise", "bf16"))
FIRST_TABLE: Asked = {" - ".join(pair): (minus(*pair), "late") for pair in PAIRS}
SECOND_TABLE: Asked = {f"{' - '.join(pair)}, both in BF16": (minus(*pair), "sampled in bf16") for pair in PAIRS[:2]}
SAYS = {
    "higher": "The paper's recipe ends higher than BF16, as the paper says",
    "lower": "The paper's recipe ends lower than BF16, the opposite of what the paper says",
    "no difference beyond the margin": "The paper's recipe and BF16 differ by less than half of what NVFP4 cost before",
}


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
        "# 120 steps, and noise in the paper's stages: the protocol's words",
        "Brackets are 95 % intervals; differences are points.",
    ]
    if lacking:
        return "\n\n".join([*parts, f"Not whole, so no words: copies {lacking} lack a run."]) + "\n"
    require_whole("longer", found.runs)
    rows = []
    for (arm, copy, _), run in found.runs.items():
        row = {"arm": arm, "copy": copy, "session": run.path.parent.name} | numbers_of(FORMATS[arm], run, late=LATE)
        early = {f"after {step}": at(run, "eval/lenient_sampled", step) for step in EARLIER}
        rows.append(row | early | {"stages": float(np.log(run.series("train", "entropy").iloc[STAGES].mean()))})
    return "\n\n".join([*parts, *words(pd.DataFrame(rows))]) + "\n"


def words(rows: Any) -> list[str]:
    first, second = (tested(rows, asked, MARGIN, COPIES) for asked in (FIRST_TABLE, SECOND_TABLE))
    said = SAYS.get(first[" - ".join(PAIRS[2])].word, "Which of the two ends higher is not decided")
    beside = [
        [
            " - ".join(pair),
            *(points(effect(rows, minus(*pair), f"after {step}"), 2, True) for step in EARLIER),
            points(effect(rows, minus(*pair), "last"), 2, True),
            times(effect(rows, minus(*pair), "stages")),
        ]
        for pair in PAIRS
    ]
    columns = [
        "contrast",
        *(f"after {step} steps" for step in EARLIER),
        "reward, last eight",
        "entropy, steps 13 to 36",
    ]
    return [
        table_of(first),
        f"**{said}.**",
        "## All answered in BF16",
        table_of(second),
        "## Beside them, without words",
        markdown_table(columns, beside),
        levels(rows, SHARES),
    ]


if __name__ == "__main__":
    guarded(main)
