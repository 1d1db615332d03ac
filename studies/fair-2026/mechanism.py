"""The page of part 8 of the fair test, as mechanism/protocol.md says it, written before its data.

    python studies/fair-2026/mechanism.py

Reads mechanism/temperatures/data/SESSION and mechanism/data/SESSION, what `qerl-bench study ... out=` packed of the two
designs, and writes mechanism/results/words.md. The temperatures come from the first, the words from the second, which
must have been trained at these temperatures. Contrasts are fitted as those of part 2 (rates_analysis/contrasts.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from rates import FIRST, LAST, LATE, at, per_cent
from rates_analysis.contrasts import COPIES, LEVEL, Asked, Table, effect, has_trained, minus, named

from qerl_core.checks import require
from qerl_core.exits import guarded
from qerl_core.options import user_options
from qerl_core.process.arguments import KeyValueParser
from qerl_core.rundir.durable import write_atomically
from qerl_core.statistics import Estimate, holm
from qerl_studies.design.design import read_design
from qerl_studies.design.sessions import Sessions, read_sessions
from qerl_studies.report.probe_page import points, times
from qerl_studies.runs.load import Run
from qerl_studies.tables.markdown import markdown_table

STUDY = Path(__file__).resolve().parent
HERE = STUDY / "mechanism"
BF16, NVFP4, HOT, COOL, RANDOM = ARMS = ("bf16", "nvfp4", "bf16-hot", "nvfp4-cool", "random")
FORMATS = {BF16: "bf16", NVFP4: "nvfp4", HOT: "bf16", COOL: "nvfp4", RANDOM: "random-error"}  # of each arm
COST, ENTROPY, MOVED, ALIKE = "nvfp4 - bf16", "more entropy, in both formats", "random - bf16", "random - nvfp4"
PRIMARY: Asked = {
    COST: (minus(NVFP4, BF16), "late"),
    ENTROPY: ({HOT: 0.5, BF16: -0.5, NVFP4: 0.5, COOL: -0.5}, "late"),
    MOVED: (minus(RANDOM, BF16), "late"),
    ALIKE: (minus(RANDOM, NVFP4), "late"),
}
SECOND: Asked = {
    "bf16-hot - bf16": (minus(HOT, BF16), "late"),
    "nvfp4-cool - nvfp4": (minus(COOL, NVFP4), "late"),
    "nvfp4 - bf16, both in BF16": (minus(NVFP4, BF16), "in bf16"),
    "random - bf16, both in BF16": (minus(RANDOM, BF16), "in bf16"),
}
SHOWN = ((NVFP4, BF16), (HOT, BF16), (COOL, NVFP4), (RANDOM, BF16), (RANDOM, NVFP4), (HOT, NVFP4), (COOL, BF16))
MARGIN = 0.023  # half of what NVFP4 cost before
CLOSED, KL = (0.5, 1.5), (0.8, 1.25)  # of the gap in entropy, by a temperature; of NVFP4's KL, by the random error
SAME = "no difference beyond the margin"
SENTENCES: Mapping[tuple[bool | None, bool], str] = {  # by whether entropy acts, None if undecided, and damage
    (True, True): "entropy acts, and damage does",
    (True, False): "entropy acts; that damage does is not shown",
    (False, True): "damage acts, and entropy by itself makes less than half of what NVFP4 cost before",
    (None, True): "damage acts; whether entropy does is not decided",
}
LEVELS = {"late": "late", "greedy": "greedy, at the end", "in bf16": "in BF16, at the end", "first": "reward, first 4"}
LEVELS |= {"last": "reward, last 8"}


class Word(NamedTuple):
    """`p` is before Holm, `adjusted` after it; both are NaN where nothing was tested."""

    found: Estimate
    p: float
    adjusted: float
    word: str


def main(arguments: list[str] | None = None) -> None:
    KeyValueParser(__doc__).parse_args(arguments)
    (HERE / "results").mkdir(exist_ok=True)
    write_atomically(HERE / "results" / "words.md", words_page(HERE / "temperatures" / "data", HERE / "data"))
    print(HERE / "results" / "words.md")


def words_page(temperatures: Path, data: Path) -> str:
    user_options.use([STUDY / "conf"])
    pair = matched(read(HERE / "temperatures", temperatures))
    parts = [
        "# Does entropy act, or damage? The protocol's words",
        "Brackets are 95 % intervals. Differences are points.",
    ]
    parts += ["## The two temperatures", "Not measured." if pair is None else told(pair)]
    parts += ["## The contrasts", *contrasts(read(HERE, data), pair)]
    return "\n\n".join(parts) + "\n"


def read(design: Path, data: Path) -> Sessions:
    words = user_options.search_path([STUDY / "conf"])
    return read_sessions(
        read_design(design / "study.yaml", words), sorted(one.parent for one in data.glob("*/study.yaml"))
    )


# --- the two temperatures --------------------------------------------------------------------------------------------


def matched(read: Sessions) -> tuple[float, float] | None:
    """The temperatures that give BF16 the entropy of NVFP4 and NVFP4 that of BF16; None unless all runs are there.

    From the logarithm of the entropy of step 1, whose mean over copies is taken as linear between temperatures.
    """
    arms, copies = [arm.name for arm in read.design.arms], read.design.bases
    if any((arm, copy, 0) not in read.runs for arm in arms for copy in copies):
        return None
    curves: dict[str, dict[float, float]] = {"bf16": {}, "nvfp4": {}}
    for arm in arms:
        first = [float(run.series("train", "entropy").loc[1]) for run in read.of_arm(arm)]
        kind, _, temperature = arm.rpartition("-")
        curves[kind][float(temperature)] = float(np.mean(np.log(first)))
    bf16, nvfp4 = curves.values()
    return temperature_of(bf16, nvfp4[1.0]), temperature_of(nvfp4, bf16[1.0])


def temperature_of(curve: Mapping[float, float], target: float) -> float:
    """Where `curve`, log entropies by temperature, has the value `target`, to three digits after the point.

    Beyond its ends the nearest two points are extended. Raises ConfigError if it does not rise.
    """
    places = sorted(curve)
    values = [curve[place] for place in places]
    require(
        values == sorted({*values}), f"entropy does not rise with temperature: {dict(curve)}; measure further copies"
    )
    upper = min(max(int(np.searchsorted(values, target)), 1), len(values) - 1)
    (low, high), (below, above) = places[upper - 1 : upper + 1], values[upper - 1 : upper + 1]
    return round(low + (high - low) * (target - below) / (above - below), 3)


def told(pair: tuple[float, float]) -> str:
    return f"BF16 has NVFP4's entropy at {pair[0]:.3f}, and NVFP4 that of BF16 at {pair[1]:.3f}."


# --- the contrasts ---------------------------------------------------------------------------------------------------


def contrasts(read: Sessions, pair: tuple[float, float] | None) -> list[str]:
    copies = [copy for copy in read.design.bases if all((arm, copy, 0) in read.runs for arm in ARMS)]
    lacking = ", ".join(str(copy) for copy in read.design.bases if copy not in copies)
    if lacking or pair is None:
        why = f"copies {lacking} lack a run" if lacking else "the temperatures were not measured"
        return [f"Not whole, so no words: {why}."]
    rows: Table = pd.DataFrame([row_of(arm, copy, read.runs[arm, copy, 0], pair) for copy in copies for arm in ARMS])
    for one, other in (("copy", "session"), ("session", "card")):
        several = rows.groupby(one)[other].nunique()
        require(several.max() == 1, f"a {one} with several {other}s: {[*several.index[several > 1]]}; leave it out")
    kl = np.array(
        [[read.probes[copy]["formats"][form]["kl"]["of_reference"] for form in FORMATS.values()] for copy in copies]
    )
    return words_of(rows, dict(zip(ARMS, kl.T, strict=True)))


def row_of(arm: str, copy: int, run: Run, pair: tuple[float, float]) -> dict[str, Any]:
    """What is compared of a run: shares of right answers, rewards, logarithms of entropies in nats."""
    own = {HOT: pair[0], COOL: pair[1]}.get(arm, 1.0)
    given = run.option("rollout.temperature")
    require(given == own, f"{run.name} has rollout.temperature={given} where the protocol has {own:g}: leave it out")
    reward, entropy = (run.series("train", name) for name in ("reward/mean", "entropy"))
    require(len(reward) == len(entropy) == LATE[-1], f"{run.name} has not {LATE[-1]} steps: leave its copy out")
    inside = "" if FORMATS[arm] == "bf16" else "in/bf16/"
    return {
        **{"arm": arm, "copy": copy, "session": run.path.parent.name, "card": run.device},
        "late": float(np.mean([at(run, "eval/lenient_sampled", step) for step in LATE])),
        "greedy": at(run, "eval/lenient_greedy", LATE[-1]),
        "in bf16": at(run, f"eval/{inside}lenient_sampled", LATE[-1]),
        "first": float(reward.iloc[:FIRST].mean()),
        "last": float(reward.iloc[-LAST:].mean()),
        "early": float(np.log(entropy.iloc[:FIRST].mean())),
        "ended": float(np.log(entropy.iloc[-LAST:].mean())),
    }


def words_of(rows: Table, kl: Mapping[str, np.ndarray]) -> list[str]:
    """What the page says of all runs; `kl` is from BF16 before training, of each arm's format in each copy."""
    early = rows.groupby("arm")["early"].mean()
    gap, size = early[NVFP4] - early[BF16], kl[RANDOM].mean() / kl[NVFP4].mean()
    closed = {HOT: (early[HOT] - early[BF16]) / gap, COOL: (early[NVFP4] - early[COOL]) / gap}
    missed = {arm for arm, share in closed.items() if not CLOSED[0] <= share <= CLOSED[1]}
    missed |= set() if KL[0] <= size <= KL[1] else {RANDOM}
    first = tested(rows, PRIMARY, missed)
    shares = [[arm, f"{share:.2f}", f"{CLOSED[0]} to {CLOSED[1]}"] for arm, share in closed.items()]
    measures = ("late", "greedy", "in bf16", "early", "ended")
    heads = ["contrast", "late", "greedy", "in BF16", "entropy, first 4", "entropy, last 8"]
    return [
        table_of(first),
        f"**{verdict(first)}.**",
        "### Each by itself, and what learning costs",
        table_of(tested(rows, SECOND, missed)),
        "### Whether the arms are what they are called",
        markdown_table(
            ["arm", "of what it should match", "limits"], [*shares, [RANDOM, f"{size:.2f}", f"{KL[0]} to {KL[1]}"]]
        ),
        "Of a temperature: the share of NVFP4's rise of entropy, in the first four steps. Of `random`: its KL, as a "
        "ratio to NVFP4's, before training.",
        "### Each arm, without words",
        markdown_table(["arm", *LEVELS.values()], [level(rows, arm) for arm in ARMS]),
        "### Differences, without words",
        markdown_table(heads, [[named(minus(*one)), *(shown(rows, one, name) for name in measures)] for one in SHOWN]),
    ]


def tested(rows: Table, asked: Asked, missed: set[str]) -> dict[str, Word]:
    """The contrasts of one table. Those with an arm that did not train, or of `missed`, are not counted by Holm."""
    found = {name: effect(rows, *one) for name, one in asked.items()}
    reasons = {name: reason(rows, weights, missed) for name, (weights, _) in asked.items()}
    raw = [math.nan if reasons[name] else one.p_outside(0.0) for name, one in found.items()]
    each = zip(found.items(), raw, holm(raw).tolist(), strict=True)
    return {name: Word(one, p, after, reasons[name] or word_of(one, after)) for (name, one), p, after in each}


def reason(rows: Table, arms: Iterable[str], missed: set[str]) -> str:
    """Why a contrast of these arms has no word of its own."""
    arms = {*arms}
    if not all(has_trained(rows, arm) for arm in arms):
        return "not tested"
    return "not matched" if missed & arms else ""


def word_of(found: Estimate, p: float) -> str:
    if found.n < COPIES:
        return "not decided"
    if p < LEVEL:
        return "higher" if found.value > 0 else "lower"
    return SAME if found.low >= -MARGIN and found.high <= MARGIN else "not decided"


def verdict(found: Mapping[str, Word]) -> str:
    """The sentence of the page about the mechanism."""
    if found[COST].word != "lower":
        return "These copies do not show that NVFP4 costs answers, so there is nothing to explain"
    acts = {"higher": True, "lower": True, SAME: False}.get(found[ENTROPY].word)
    sentence = SENTENCES.get((acts, found[MOVED].word == "lower"), "which of the two acts is not decided")
    return sentence[0].upper() + sentence[1:]


def table_of(words: Mapping[str, Word]) -> str:
    lines = [
        [name, points(one.found, 2, True), *(f"{p:.4f}" for p in (one.p, one.adjusted)), f"**{one.word}**"]
        for name, one in words.items()
    ]
    return markdown_table(["contrast", "difference", "p", "p (Holm)", "word"], lines)


def level(rows: Table, arm: str) -> list[str]:
    of = rows[rows["arm"] == arm]
    return [arm, *(per_cent(of[name].to_numpy()) for name in LEVELS)]


def shown(rows: Table, pair: tuple[str, str], measure: str) -> str:
    found = effect(rows, minus(*pair), measure)
    return times(found) if measure in ("early", "ended") else points(found, 2, True)


if __name__ == "__main__":
    guarded(main)
