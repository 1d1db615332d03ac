"""The page of the two controls of the fair test, as controls/protocol.md says it, written before its data.

    python studies/fair-2026/controls.py

Reads controls/data/contamination/SIZE/probe.json, what `qerl-bench probe contamination=200` wrote, and
controls/data/random/SESSION beside rates/data/05b/SESSION, what `qerl-bench study` packed. Writes
controls/results/words.md. A part whose data is not whole has no words.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rates import LATE, REFERENCE, at
from scipy import stats

from qerl_core.exits import guarded
from qerl_core.options import user_options
from qerl_core.process.arguments import KeyValueParser
from qerl_core.rundir.durable import write_atomically
from qerl_core.statistics import Estimate, holm, mean_ci
from qerl_studies.design.design import read_design
from qerl_studies.design.sessions import Sessions, read_sessions
from qerl_studies.probes.page import contamination
from qerl_studies.report.probe_page import points
from qerl_studies.runs.load import Run
from qerl_studies.tables.markdown import markdown_table

STUDY = Path(__file__).resolve().parent
HERE = STUDY / "controls"
SIZES = {"0.5B": "05b", "1.5B": "15b"}
TRAIN, TEST, GENERATED = "training part", "test part", "generated, seen by nobody"  # the names of probe.json
AGAINST = ((TRAIN, GENERATED), (TEST, GENERATED), (TEST, TRAIN))
LEVEL, MARGIN = 0.05, 0.01
Completed = Mapping[str, Sequence[Mapping[str, int]]]


def main(arguments: list[str] | None = None) -> None:
    KeyValueParser(__doc__).parse_args(arguments)
    (HERE / "results").mkdir(exist_ok=True)
    write_atomically(HERE / "results" / "words.md", words_page(HERE / "data"))
    print(HERE / "results" / "words.md")


def words_page(data: Path) -> str:
    parts = ["# Two controls: the protocol's words", "Brackets are 95 % intervals."]
    parts += ["## Contamination", *by_heart(data / "contamination"), "## Random reward"]
    parts += at_random(data / "random", STUDY / "rates" / "data" / "05b")
    return "\n\n".join(parts) + "\n"


# --- contamination ---------------------------------------------------------------------------------------------------


def by_heart(data: Path) -> list[str]:
    files = {size: data / name / "probe.json" for size, name in SIZES.items()}
    lacking = [size for size, file in files.items() if not file.exists()]
    if lacking:
        return [f"Not run: {', '.join(lacking)}. Holm's correction is over both models, so there are no words."]
    found: dict[str, Completed] = {size: json.loads(file.read_text())["contamination"] for size, file in files.items()}
    p = [more_often(each[one], each[other]) for each in found.values() for one, other in AGAINST]
    adjusted = iter(holm(p).tolist())
    parts = []
    for size, each in found.items():
        lines = []
        for one, other in AGAINST:
            gap, after = share(each[one]) - share(each[other]), next(adjusted)
            lines.append([f"{one} - {other}", f"{100 * gap:+.1f}", f"{after:.4f}", f"**{word_of_shares(gap, after)}**"])
        words = markdown_table(["completed to the end", "difference", "p (Holm)", "word"], lines)
        parts += [f"### {size}", markdown_table(*contamination(each)), words]
    return parts


def share(questions: Sequence[Mapping[str, int]]) -> float:
    return whole(questions) / len(questions)


def whole(questions: Sequence[Mapping[str, int]]) -> int:
    return sum(one["first"] == one["left"] for one in questions)


def more_often(one: Sequence[Mapping[str, int]], other: Sequence[Mapping[str, int]]) -> float:
    """p of Fisher's exact test, two-sided, that both kinds are completed equally often."""
    table = [[whole(each), len(each) - whole(each)] for each in (one, other)]
    test: Any = stats.fisher_exact(table)
    return float(test.pvalue)


def word_of_shares(gap: float, p: float) -> str:
    return "not decided" if not p < LEVEL else "more often" if gap > 0 else "less often"


# --- random reward ---------------------------------------------------------------------------------------------------


def at_random(data: Path, true_data: Path) -> list[str]:
    words = user_options.search_path([STUDY / "conf"])
    user_options.use([STUDY / "conf"])
    random = read_of(HERE / "random" / "study.yaml", data, words)
    copies = read_design(HERE / "random" / "study.yaml", words).bases
    true = read_of(STUDY / "rates" / "05b" / "study.yaml", true_data, words)
    pairs = {
        copy: (run, other)
        for (_, copy, _), run in random.runs.items()
        if (other := true.runs.get((REFERENCE, copy, 0))) and run.path.parent.name == other.path.parent.name
    }
    lacking = [str(copy) for copy in copies if copy not in pairs]
    if lacking:
        return [f"Not whole, so no words: copies {', '.join(lacking)} lack a run, or have their two in two sessions."]
    runs = [pairs[copy] for copy in copies]
    asked = {
        "late - before, `random`": [late(run) - at(run, "eval/lenient_sampled", 0) for run, _ in runs],
        f"late, `{REFERENCE}` - `random`": [late(other) - late(run) for run, other in runs],
    }
    found = {name: mean_ci(np.array(values)) for name, values in asked.items()}
    adjusted = holm([one.p_outside(0.0) for one in found.values()]).tolist()
    lines = [
        [name, points(one, 2, True), f"{p:.4f}", f"**{word_of(one, p)}**"]
        for (name, one), p in zip(found.items(), adjusted, strict=True)
    ]
    trained = ("reward/mean", "accuracy")
    rewards, right = (np.concatenate([run.series("train", name) for run, _ in runs]) for name in trained)
    coin = f"Mean reward {rewards.mean():.3f}; its correlation with right answers, over {len(rewards)} steps"
    return [
        f"{len(runs)} copies of the 0.5B.",
        markdown_table(["contrast", "points", "p (Holm)", "word"], lines),
        f"{coin}: {np.corrcoef(rewards, right)[0, 1]:+.3f}.",
    ]


def read_of(design: Path, data: Path, words: list[str]) -> Sessions:
    return read_sessions(read_design(design, words), sorted(path.parent for path in data.glob("*/study.yaml")))


def late(run: Run) -> float:
    return float(np.mean([at(run, "eval/lenient_sampled", step) for step in LATE]))


def word_of(found: Estimate, p: float) -> str:
    if p < LEVEL:
        return "higher" if found.value > 0 else "lower"
    within = not math.isnan(found.low) and found.low >= -MARGIN and found.high <= MARGIN
    return "no difference beyond the margin" if within else "not decided"


if __name__ == "__main__":
    guarded(main)
