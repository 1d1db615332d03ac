"""The page of part 8 of the fair test, as mechanism/protocol.md says it, written before its data.

    python studies/fair-2026/mechanism.py

Reads mechanism/temperatures/data/SESSION and mechanism/data/SESSION, what `qerl-bench study ... out=` packed of the two
designs, and writes mechanism/results/words.md and, once all runs are there, arms.svg. Runs are read, and contrasts
fitted, as those of part 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rates import ASKED, FIRST, SHARES, gaps, gaps_figure, levels, numbers_of, require_whole, table_of
from rates_analysis.contrasts import Asked, Contrast, Table, effect, minus, tested

from qerl_core.checks import require
from qerl_core.exits import guarded
from qerl_core.options import user_options
from qerl_core.process.arguments import KeyValueParser
from qerl_core.rundir.durable import write_atomically
from qerl_studies.design.design import read_design
from qerl_studies.design.sessions import Sessions, read_sessions
from qerl_studies.figures.noise import entropies, matched_temperature
from qerl_studies.figures.style import save
from qerl_studies.report.probe_page import times
from qerl_studies.tables.markdown import markdown_table

STUDY = Path(__file__).resolve().parent
HERE = STUDY / "mechanism"
FORMATS = {"bf16": "bf16", "nvfp4": "nvfp4", "bf16-hot": "bf16", "nvfp4-cool": "nvfp4", "random": "random-error"}
ENTROPY = "more entropy, in both formats"
FIRST_TABLE: Asked = {
    "nvfp4 - bf16": (minus("nvfp4", "bf16"), "late"),
    ENTROPY: ({"bf16-hot": 0.5, "bf16": -0.5, "nvfp4": 0.5, "nvfp4-cool": -0.5}, "late"),
    "random - bf16": (minus("random", "bf16"), "late"),
    "random - nvfp4": (minus("random", "nvfp4"), "late"),
}
SECOND_TABLE: Asked = {
    "bf16-hot - bf16": (minus("bf16-hot", "bf16"), "late"),
    "nvfp4-cool - nvfp4": (minus("nvfp4-cool", "nvfp4"), "late"),
    "nvfp4 - bf16, both in BF16": (minus("nvfp4", "bf16"), "sampled in bf16"),
    "random - bf16, both in BF16": (minus("random", "bf16"), "sampled in bf16"),
}
SHOWN = {"BF16, hotter": "bf16-hot", "NVFP4": "nvfp4", "NVFP4, cooler": "nvfp4-cool", "random error": "random"}
BESIDE = (("nvfp4", "bf16"), ("random", "bf16"), ("random", "nvfp4"), ("bf16-hot", "bf16"), ("nvfp4-cool", "nvfp4"))
MARGIN = 0.023  # half of what NVFP4 cost before
CLOSED, KL = (0.5, 1.5), (0.8, 1.25)  # of the gap in entropy, by a temperature; of NVFP4's KL, by the random error
ACTS = {"higher": True, "lower": True, "no difference beyond the margin": False}
SENTENCES: Mapping[tuple[bool | None, bool], str] = {  # by whether entropy acts, None if undecided, and damage
    (True, True): "Entropy acts, and damage does",
    (True, False): "Entropy acts; that damage does is not shown",
    (False, True): "Damage acts, and entropy by itself makes less than half of what NVFP4 cost before",
    (None, True): "Damage acts; whether entropy does is not decided",
}


def main(arguments: list[str] | None = None) -> None:
    KeyValueParser(__doc__).parse_args(arguments)
    (HERE / "results").mkdir(exist_ok=True)
    page = words_page(HERE)  # refuses runs that are not the protocol's
    if not lacking(runs := read(HERE)):
        save(gaps_figure(rows_of(runs), "bf16", SHOWN, MARGIN, "0.5B"), HERE / "results" / "arms")
    write_atomically(HERE / "results" / "words.md", page)
    print(HERE / "results" / "words.md")


def words_page(here: Path) -> str:
    user_options.use([STUDY / "conf"])
    pair, runs = matched(read(here / "temperatures")), read(here)
    told = f"BF16 has NVFP4's entropy at {pair[0]:g}, NVFP4 that of BF16 at {pair[1]:g}." if pair else "Not measured."
    parts = [
        "# Does entropy act, or damage? The protocol's words",
        "Brackets are 95 % intervals; differences are points.",
    ]
    return "\n\n".join([*parts, "## The two temperatures", told, "## The contrasts", *contrasts(runs, pair)]) + "\n"


def read(part: Path, data: Path | None = None) -> Sessions:
    """The runs of a design, of which the sessions lie in `data`, that of the part if None."""
    design = read_design(part / "study.yaml", user_options.search_path([STUDY / "conf"]))
    return read_sessions(design, sorted(path.parent for path in (data or part / "data").glob("*/study.yaml")))


def matched(read: Sessions) -> tuple[float, float] | None:
    """The temperatures that give BF16 the entropy of NVFP4 and NVFP4 that of BF16; None unless all runs are there.

    Raises ConfigError as `matched_temperature`, which takes the mean entropy of step 1 as linear between temperatures.
    """
    if len(read.runs) < len(read.design.arms) * len(read.design.bases):
        return None
    table: Any = entropies(read.runs.values(), 1)
    means = table[table["temperature"] == 1].groupby("quant")["entropy"].mean()
    hot, cool = (matched_temperature(table, *one) for one in (("bf16", means["nvfp4"]), ("nvfp4", means["bf16"])))
    return round(hot, 3), round(cool, 3)


def contrasts(read: Sessions, pair: tuple[float, float] | None) -> list[str]:
    missing = ", ".join(map(str, lacking(read)))
    if missing or pair is None:
        return [f"Not whole, so no words: {f'copies {missing} lack a run' if missing else 'no temperatures'}."]
    require_whole("mechanism", read.runs)
    for (arm, _, _), run in read.runs.items():
        own, given = {"bf16-hot": pair[0], "nvfp4-cool": pair[1]}.get(arm, 1.0), run.option("rollout.temperature")
        require(
            given == own, f"{run.name} has rollout.temperature={given} where the protocol has {own:g}: leave it out"
        )
    kl = {
        form: float(np.mean([read.probes[copy]["formats"][form]["kl"]["of_reference"] for copy in read.design.bases]))
        for form in ("nvfp4", "random-error")
    }
    return words_of(rows_of(read), kl["random-error"] / kl["nvfp4"])


def lacking(read: Sessions) -> list[int]:
    """Copies without a run of each arm."""
    return [copy for copy in read.design.bases if any((arm, copy, 0) not in read.runs for arm in FORMATS)]


def rows_of(read: Sessions) -> Table:
    """What is compared of each run; `early` is the logarithm of its entropy in the first steps."""
    rows = []
    for (arm, copy, _), run in read.runs.items():
        early = math.log(run.series("train", "entropy").iloc[:FIRST].mean())
        rows.append({"arm": arm, "copy": copy, "session": run.path.parent.name, "early": early})
        rows[-1] |= numbers_of(FORMATS[arm], run)
    return pd.DataFrame(rows)


def words_of(rows: Table, kl: float) -> list[str]:
    """What the page says of all runs; `kl` is that of the random error, before training, beside NVFP4's."""
    raised = closed(rows, "early")
    shares = {arm: (raised[arm], CLOSED) for arm in ("bf16-hot", "nvfp4-cool")} | {"random": (kl, KL)}
    rise = times(effect(rows, minus("nvfp4", "bf16"), "early"))
    last = {arm: f"{share:.2f}" for arm, share in closed(rows, "entropy").items()}
    missed = {arm for arm, (share, (low, high)) in shares.items() if not low <= share <= high}
    lines = [
        [arm, f"{share:.2f}", f"{low} to {high}", last.get(arm, "")] for arm, (share, (low, high)) in shares.items()
    ]
    first = judged(rows, FIRST_TABLE, missed)
    return [
        table_of(first),
        f"**{verdict(first)}.**",
        "### Each by itself, and what learning costs",
        table_of(judged(rows, SECOND_TABLE, missed)),
        "### Whether arms are what they are called",
        markdown_table(["arm", "share", "limits", "last 8 steps"], lines),
        "Of a temperature: the share of NVFP4's rise of entropy, in the first four steps; in the last 8 it has no "
        "limit. Of `random`: KL beside NVFP4's; of the rise it has "
        f"{raised['random']:.2f} at first. NVFP4's entropy at first is {rise} of BF16's.",
        "### Without words",
        gaps(rows, [minus(arm, other) for arm, other in BESIDE]),
        levels(rows, SHARES),
        levels(rows, {name: name for name in ASKED}),
    ]


def closed(rows: Table, measure: str) -> dict[str, float]:
    """What each arm makes of NVFP4's rise of log entropy, or takes away from it: 1 is all of it."""
    mean = rows.groupby("arm")[measure].mean()
    rises = {arm: mean[arm] - mean["bf16"] for arm in ("bf16-hot", "random")}
    rises["nvfp4-cool"] = mean["nvfp4"] - mean["nvfp4-cool"]
    return {arm: rise / (mean["nvfp4"] - mean["bf16"]) for arm, rise in rises.items()}


def judged(rows: Table, asked: Asked, missed: set[str]) -> dict[str, Contrast]:
    """The contrasts of one table; Holm counts none with an arm that `missed` what it is called."""
    kept = {name: one for name, one in asked.items() if not missed & {*one[0]}}
    found = tested(rows, kept, MARGIN)
    return {
        name: found.get(name) or Contrast(effect(rows, *one), math.nan, math.nan, "not matched")
        for name, one in asked.items()
    }


def verdict(found: Mapping[str, Any]) -> str:
    if found["nvfp4 - bf16"].word != "lower":
        return "These copies do not show that NVFP4 costs answers, so there is nothing to explain"
    key = ACTS.get(found[ENTROPY].word), found["random - bf16"].word == "lower"
    return SENTENCES.get(key, "Which of the two acts is not decided")


if __name__ == "__main__":
    guarded(main)
