"""The page of part 2 of the fair test, as rates/protocol.md says it, written before its data.

    python studies/fair-2026/rates.py
    python studies/fair-2026/rates.py ended=true   # fewer copies: no run will follow

Reads rates/data/DESIGN/SESSION, what `qerl-bench study ... out=` packed, and writes
rates/results/words.md, and of each model that is whole rates/results/SIZE.svg.

Where the protocol is silent, beside what rates_analysis/contrasts.py says:
- A session is a folder of data. All runs in it must be of one kind of card, and all runs of a
  copy and design in one.
- A copy is whole by design: without all of its third rate it is left out of 6e-4 alone.
- Older references were trained at 2e-4, so the sensitivity analysis compares at 2e-4, by
  Welch's t test.
- Collapses are counted by two of the harness's three signs; the third, garbled completions, is
  not packed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from rates_analysis.contrasts import (
    COPIES,
    MARGIN,
    PAIRS,
    RATES,
    Contrast,
    Table,
    Weights,
    at_other_rates,
    by_chance,
    costs,
    effect,
    kind_of,
    minus,
    named,
    own_best,
    primary,
    rewards,
    tested,
)
from scipy import stats

from qerl_bench.train.collapse import collapse
from qerl_core.checks import require
from qerl_core.exits import guarded
from qerl_core.options import user_options
from qerl_core.process.arguments import KeyValueParser
from qerl_core.rundir.durable import write_atomically
from qerl_core.statistics import mean_ci
from qerl_studies.design.design import read_design
from qerl_studies.design.sessions import read_sessions, read_study
from qerl_studies.figures.style import FULL_WIDTH, GRAY, color, panels, paper_style, save
from qerl_studies.report.probe_page import points, times
from qerl_studies.runs.load import Run
from qerl_studies.tables.markdown import markdown_table

STUDY = Path(__file__).resolve().parent
HERE = STUDY / "rates"
DESIGNS = {"0.5B": ("05b",), "1.5B": ("15b", "15b-high")}
AT_TWO_RATES = [designs[0] for designs in DESIGNS.values()]
OLDER = {"0.5B": ("05b", "05b-more"), "1.5B": ("15b", "15b-again")}  # of ../real-2026, whose bf16 had 2e-4
FORMATS = {"bf16": "bf16", "nvfp4": "nvfp4", "four-six": "nvfp4+four-six"}  # of each arm
THIRD = "6e-4"
LATE, FIRST, LAST = (32, 36, 40), 4, 8  # evaluations, steps of reward
VOCABULARY = 151_665  # tokens of Qwen2.5
REFERENCE = "bf16-2e-4"  # that older studies have too
ASKED = {f"{mode} in {form}": (mode, form) for mode in ("sampled", "greedy") for form in FORMATS.values()}
TRAINED = ("reward/mean", "entropy", "accuracy", "entropy_clean")  # series of training
SHARES = {
    "before": "before",
    "first": "reward, first 4",
    "last": "reward, last 8",
    "late": "late",
    "greedy": "greedy, at the end",
}
SENTENCES = {
    "lower": "NVFP4 ends lower even where its codes are chosen better and each arm has its own rate",
    "not decided": "the old headline is neither confirmed nor refuted for this model",
    "not tested": "nothing, since an arm did not train",
}
FALLS = "the old headline was of nearest rounding and one rate, and falls for this model"
SENTENCES |= dict.fromkeys(("higher", "no difference beyond the margin"), FALLS)
SHOWN = {"NVFP4, nearest": "nvfp4", "NVFP4, four-six": "four-six"}  # arms of the figure
ANSWERED = {"late": "each in its own format, steps 32, 36, 40", "sampled in bf16": "all in BF16, step 40"}
GAPS = ("before", "gain", "late", "greedy")
OLDER_HEADS = ("contrast", "least squares", "with older references")


def main(arguments: list[str] | None = None) -> None:
    parser = KeyValueParser(__doc__)
    parser.add_argument("--ended", action="store_true", help="read fewer than eight copies: no run will follow")
    options = parser.parse_args(arguments)
    sizes = {size: read_size(size, HERE / "data") for size in DESIGNS}
    page = words_page(sizes, options.ended)
    (HERE / "results").mkdir(exist_ok=True)
    for size, read in sizes.items():
        if is_whole(read, options.ended):
            treated = {name: own_best(read.rows, kind) for name, kind in SHOWN.items()}
            figure = gaps_figure(read.rows, own_best(read.rows, "bf16"), treated, MARGIN, size)
            save(figure, HERE / "results" / DESIGNS[size][0])
    write_atomically(HERE / "results" / "words.md", page)
    print(HERE / "results" / "words.md")


# --- runs ------------------------------------------------------------------------------------------------------------


class Size(NamedTuple):
    """The runs of a model: `rows` as `read_size` makes them, copies that are not whole, and the late shares of right
    answers of older references on the same questions, (n,).
    """

    rows: Table
    left_out: Sequence[str]
    older: np.ndarray


def read_size(size: str, data: Path) -> Size:
    """A row for each run of a whole copy: arm (with its rate), copy, session, and what `numbers_of` gives.

    Raises ConfigError as `read_sessions`, or if a session has several cards, or a copy of a design several sessions.
    """
    rows, left_out, questions = [], [], pd.Index([])
    user_options.use([STUDY / "conf"])
    for name in DESIGNS[size]:
        design = read_design(HERE / name / "study.yaml", user_options.search_path([STUDY / "conf"]))
        runs = read_sessions(design, sorted(path.parent for path in (data / name).glob("*/study.yaml"))).runs
        require_whole(name, runs)
        made = Counter(copy for _, copy, _ in runs)
        left_out += [f"{copy} of {name}" for copy in design.bases if made[copy] < len(design.arms)]
        for (arm, copy, _), run in runs.items():
            if made[copy] == len(design.arms):
                rows.append(
                    {"arm": arm, "copy": copy, "session": run.path.parent.name} | numbers_of(FORMATS[kind_of(arm)], run)
                )
                questions = run.answers("sampled", "lenient").index
    return Size(pd.DataFrame(rows), left_out, older_references(size, questions) if rows else np.array([]))


def require_whole(name: str, runs: Mapping[tuple[str, int, int], Run]) -> None:
    """Raise ConfigError if a session has several cards, or a copy several sessions."""
    homes = {(copy, run.path.parent.name) for (_, copy, _), run in runs.items()}
    cards = {(run.path.parent.name, run.device) for run in runs.values()}
    for what, pairs in (("a copy in several sessions", homes), ("a session of several cards", cards)):
        require(len(pairs) == len(dict(pairs)), f"{name} has {what}: {sorted(pairs)}; leave one out")


def numbers_of(own: str, run: Run, others: bool = True, late: Sequence[int] = LATE) -> dict[str, float]:
    """What is compared of a run in the format `own`: shares of answers, rewards, the logarithm of entropy in nats.

    Without `others` it has answered in no other format. The mean of the evaluations `late` is compared, of which the
    last is after the last step.
    """
    asked = {
        name: at(run, f"eval/{'' if form == own else f'in/{form}/'}lenient_{mode}", late[-1])
        for name, (mode, form) in ASKED.items()
        if others or form == own
    }
    series = {name: run.series("train", name) for name in TRAINED}
    lacking = [name for name, values in series.items() if len(values) != late[-1]]
    require(not lacking, f"{run.name} has not {late[-1]} steps of {', '.join(lacking)}: leave its copy out")
    train = pd.DataFrame(series)
    steps: Any = train.assign(kind="train").to_dict("records")
    before, end = at(run, "eval/lenient_sampled", 0), np.mean([at(run, "eval/lenient_sampled", step) for step in late])
    return asked | {
        "before": before,
        "late": float(end),
        "gain": float(end) - before,
        "greedy": at(run, "eval/lenient_greedy", late[-1]),
        "answering": asked["sampled in bf16"] - at(run, "eval/lenient_sampled", late[-1]),
        "first": float(train["reward/mean"].iloc[:FIRST].mean()),
        "last": float(train["reward/mean"].iloc[-LAST:].mean()),
        "entropy": math.log(train["entropy"].iloc[-LAST:].mean()),
        "collapsed": float(collapse(steps, math.log(VOCABULARY)) is not None),
    }


def at(run: Run, metric: str, step: int) -> float:
    values = run.series("eval", metric)
    require(step in values.index, f"{run.name} has no {metric} after step {step}: leave its copy out")
    return float(values.loc[step])


def older_references(size: str, questions: pd.Index) -> np.ndarray:
    """Late shares of right answers to `questions` of the references that earlier studies trained at 2e-4."""
    runs = [run for name in OLDER[size] for run in read_study(STUDY.parent / "real-2026" / name).of_arm("bf16")]
    return np.array([run.answers("sampled", "lenient").loc[questions, [*LATE]].to_numpy().mean() for run in runs])


# --- words.md --------------------------------------------------------------------------------------------------------


def words_page(sizes: Mapping[str, Size], ended: bool = False) -> str:
    parts = [
        "# Each arm at its own best rate: the protocol's words",
        "Right answers are those whose last number is right, per cent, and differences points. *Late* is the mean of "
        "steps 32, 36 and 40 at temperature 0.6. Brackets are 95 % intervals.",
    ]
    for size, read in sizes.items():
        parts += [f"## {size}, {copies_of(read)} copies"]
        parts += [f"Not whole, so not read: {', '.join(read.left_out) or 'none'}."]
        none = ["No contrast is computed before all copies are whole at two rates."]
        parts += words_of(read) if is_whole(read, ended) else none
    return "\n\n".join(parts) + "\n"


def copies_of(read: Size) -> int:
    return int((read.rows["arm"] == REFERENCE).sum()) if len(read.rows) else 0


def is_whole(read: Size, ended: bool) -> bool:
    """Whether contrasts may be computed: of all copies at two rates, or of at least two if no run will follow."""
    return (ended or not waits_for(read)) and copies_of(read) > 1


def waits_for(read: Size) -> list[str]:
    """Copies that lack a run at one of two rates, as `left_out` names them."""
    return [one for one in read.left_out if one.split()[-1] in AT_TWO_RATES]


def words_of(read: Size) -> list[str]:
    """What one size says."""
    rows, first = read.rows, tested(read.rows, primary(read.rows))
    chance = ", ".join(kind for kind in FORMATS if by_chance(rows, kind)) or "of no arm"
    four_six = own_best(rows, "four-six")
    best = [[kind, *map(per_cent, rewards(rows, kind)), own_best(rows, kind)] for kind in FORMATS]
    pairs = [minus(f"{one}-{rate}", f"{two}-{rate}") for rate in (*RATES, THIRD) for one, two in PAIRS]
    pairs.append(minus(*(own_best(rows, kind) for kind in PAIRS[2])))
    pairs = [one for one in {named(one): one for one in pairs}.values() if {*one} <= {*rows["arm"]}]
    other = [[named(one), points(effect(rows, one), 2, True)] for one in at_other_rates(rows)]
    return [
        "### Reward in the last eight steps, and each arm's own best rate",
        markdown_table(["arm", *RATES, "own best"], best),
        f"Two rates that differ by less than the error of their difference: {chance}.",
        "### The primary contrasts",
        table_of(first),
        f"Of this model the page says: {SENTENCES[next(iter(first.values())).word]}.",
        "### What answering and learning cost",
        table_of(tested(rows, costs(rows))),
        f"Without a word: {four_six} in BF16 minus in its own format, "
        f"{points(effect(rows, {four_six: 1.0}, 'answering'), 2, True)}.",
        "### The primary contrasts at such rates, without words",
        markdown_table(["contrast", "late"], other) if other else "None.",
        "### Each arm and rate, without words",
        levels(rows, SHARES),
        "### The same policies in each format, after the last step, without words",
        levels(rows, {name: name for name in ASKED}),
        "### Differences, without words",
        gaps(rows, pairs, (*GAPS, "sampled in bf16")),
        "*Before*: the same questions before the first step. *Gain*: late minus before.",
        "### Older references, without words",
        f"Both arms at 2e-4; Welch's t test with {len(read.older)} more runs of `bf16`, on the same questions.",
        markdown_table(OLDER_HEADS, [with_older(read, pair[0]) for pair in PAIRS[:2]]),
        "### If one copy is left out",
        "No test was planned for it. The words are those of seven copies.",
        without_single_copies(rows),
    ]


def without_single_copies(rows: Table) -> str:
    """The contrasts of both tables, each arm at the rate that is its own best with all copies."""
    asked, lines = (primary(rows), costs(rows)), []
    for copy in sorted({*rows["copy"]}):
        rest = rows[rows["copy"] != copy]
        found = [one for table in asked for one in tested(rest, table, copies=COPIES - 1).values()]
        lines.append([str(copy), *(f"{100 * one.found.value:+.2f} **{one.word}**" for one in found)])
    return markdown_table(["without", *(name for table in asked for name in table)], lines)


def table_of(found: Mapping[str, Contrast]) -> str:
    lines = [
        [name, points(one.found, 2, True), *(f"{p:.4f}" for p in (one.p, one.adjusted)), f"**{one.word}**"]
        for name, one in found.items()
    ]
    return markdown_table(["contrast", "difference", "p", "p (Holm)", "word"], lines)


def levels(rows: Table, shares: Mapping[str, str]) -> str:
    """Means over copies of each arm and rate."""
    lines = []
    for arm, of in rows.groupby("arm", sort=False):
        entropy, collapsed = f"{math.exp(of['entropy'].mean()):.3f}", f"{of['collapsed'].sum():.0f}"
        lines.append([arm, f"{len(of)}", *(per_cent(of[name]) for name in shares), entropy, collapsed])
    return markdown_table(["arm", "copies", *shares.values(), "entropy, last 8, nats", "collapsed"], lines)


def gaps(rows: Table, pairs: Sequence[Weights], shares: Sequence[str] = GAPS) -> str:
    """Differences of arms, and ratios of their entropies in the last steps."""
    lines = []
    for one in pairs:
        found = [points(effect(rows, one, name), 2, True) for name in shares]
        lines.append([named(one), *found, times(effect(rows, one, "entropy"))])
    return markdown_table(["contrast", *shares, "entropy, last 8"], lines)


def with_older(read: Size, kind: str) -> list[str]:
    """An arm minus the reference at 2e-4, by both analyses."""
    weights = minus(f"{kind}-2e-4", REFERENCE)
    here, there = (read.rows[read.rows["arm"] == arm]["late"].to_numpy() for arm in weights)
    found: Any = stats.ttest_ind(here, pooled := [*there, *read.older], equal_var=False)
    ends = ", ".join(f"{100 * end:+.2f}" for end in found.confidence_interval())
    both = f"{100 * (here.mean() - np.mean(pooled)):+.2f} [{ends}]"
    return [named(weights), points(effect(read.rows, weights), 2, True), both]


def per_cent(values: np.ndarray) -> str:
    return points(mean_ci(values), 2)


# --- figure ----------------------------------------------------------------------------------------------------------


def gaps_figure(rows: Table, control: str, treated: Mapping[str, str], margin: float, size: str) -> Figure:
    """Arms `treated`, by their labels, minus the `control`, of a model, answering in their own formats and in BF16."""
    with paper_style():
        figure, (axes,) = panels(1, 2, height=1 + 0.4 * len(treated), width=FULL_WIDTH, sharex=True, sharey=True)
        for ax, (measure, label) in zip(axes, ANSWERED.items(), strict=True):
            shares = rows.pivot(index="copy", columns="arm", values=measure)
            for y, arm in enumerate(treated.values()):
                found, of = effect(rows, minus(arm, control), measure), color("nvfp4")
                pairs = 100 * (shares[arm] - shares[control])
                ax.plot(pairs, [y + 0.25] * len(pairs), ".", color=of, alpha=0.5, markersize=3)
                error = 100 * np.array([[found.value - found.low], [found.high - found.value]])
                ax.errorbar(100 * found.value, y, xerr=error, color=of, marker="o", markersize=4)
            ax.axvline(0, color=GRAY, linewidth=0.8)
            ax.axvspan(-100 * margin, 100 * margin, color=GRAY, alpha=0.12, linewidth=0)
            ax.set_title(f"{size}, {label}")
            ax.set_xlabel("right answers minus BF16's, points")
        axes[0].set_yticks(range(len(treated)), [*treated])
        axes[0].set_ylim(len(treated) - 0.4, -0.5)
        figure.supxlabel("small dot: a copy; bar: 95 %; shaded: the margin", fontsize="small")
        return figure


if __name__ == "__main__":
    guarded(main)
