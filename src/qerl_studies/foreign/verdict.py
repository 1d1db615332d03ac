"""What the runs of a reported study say about its arms: differences in pairs of seeds, with intervals and words.

Intervals and words are those of effects/; no second ones are made here. What is missing for a comparison is said in the
place of its number. Words are not adjusted for how many are looked at.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qerl_core.checks import require
from qerl_core.process.arguments import printable
from qerl_core.statistics import Estimate
from qerl_studies.effects.state import WORDS, State, of_interval
from qerl_studies.figures.headline import HEADLINES, mean_of, paired, value_of
from qerl_studies.foreign.definitions import UNREAD
from qerl_studies.runs.find import find_runs
from qerl_studies.runs.load import Cell, Run, load_run
from qerl_studies.runs.reported import ANSWERS, About, read_about
from qerl_studies.tables.markdown import markdown_table

LEVEL = 0.025  # one-sided, of the differences that so many pairs find
MARGINS = {one.metric: one.margin for one in HEADLINES}
NOTHING = {False: "One arm, which there is nothing to compare with.", True: "Nothing can be judged."}
NO_SEED = "runs whose seed is not known have no counterpart in another arm"
MOST_METRICS = 60  # of a page


@dataclass(frozen=True)
class Judged:
    """`first` minus `second` in one metric: their means, the difference with its interval, and the state."""

    first: str
    second: str
    metric: str
    means: tuple[float, float]
    difference: Estimate | None
    state: State

    @property
    def interval(self) -> str:
        if self.difference is None or not self.difference.stderr > 0:
            return "-"
        return f"[{self.difference.low:+.4g}, {self.difference.high:+.4g}]"

    @property
    def found(self) -> str:
        """The smallest true difference that these pairs find four times of five."""
        known = self.difference is not None and self.difference.stderr > 0
        return f"{self.difference.detectable(LEVEL):.3g}" if known and self.difference else "-"


def arms_of(folder: Path) -> dict[str, list[Run]]:
    """The runs of a reported study by arm, in the order of its table."""
    found: dict[str, list[Run]] = {}
    for path in find_runs(folder):
        run = load_run(path)
        found.setdefault(str(run.option("arm.name")), []).append(run)
    return found


def judge(folder: Path, control: str | None = None, margins: Mapping[str, float] | None = None) -> list[Judged]:
    """Each arm minus `control`, by default the first by name, in each metric; nothing if there is one arm alone.

    Raises ConfigError for a `control` that is no arm.
    """
    arms, about = arms_of(folder), read_about(folder)
    known = ", ".join(map(shown, sorted(arms)))
    require(control is None or control in arms, f"control={control} is no arm of these runs: there are {known}")
    second = control or min(arms)
    used = MARGINS | dict(margins or {})
    return [
        _judged(first, second, arms, kind, metric, about, used.get(metric, 0.0))
        for first in arms
        if first != second
        for kind, metric in _metrics([*arms[first], *arms[second]])
    ]


def _metrics(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Kind and name of each metric that any run has; those that one looks at first lead."""
    written = {
        (str(kind), str(name))
        for run in runs
        for kind, name in run.metrics[["kind", "metric"]].drop_duplicates().to_numpy()
    }
    leading = [(one.kind, one.metric) for one in HEADLINES if (one.kind, one.metric) in written]
    return [*leading, *sorted(written - {*leading})][:MOST_METRICS]


def _judged(
    first: str,
    second: str,
    arms: Mapping[str, Sequence[Run]],
    kind: str,
    metric: str,
    about: About,
    margin: float,
) -> Judged:
    """One comparison. Runs that are not to be judged have no part in it; where nothing is, means are of all runs."""
    known = [[run for run in arms[arm] if run.records(kind, metric)] for arm in (first, second)]
    one, other = ({run.cell: run for run in runs if run.finished} for runs in known)
    common = sorted(one.keys() & other.keys())
    without = [arm for arm, runs in zip((first, second), known, strict=True) if not runs]
    lacking = [arm for arm in without if any(run.finished for run in arms[arm])]
    reason = f"no run of {lacking[0]} has it" if lacking else why_not([one, other], common, kind, metric)
    if reason and not lacking:
        left_out = [about.unjudged.get(run.name, NO_SEED) for runs in known for run in runs if not run.finished]
        ends = [{run.last_step for run in runs} for runs in known]
        apart = [f"of other steps ({min(ends[0])} and {min(ends[1])})"] if all(ends) and ends[0] != ends[1] else []
        reason = "; ".join(dict.fromkeys([reason, *left_out, *apart]))
    difference = None if reason else paired(one, other, common, kind, metric)
    if not reason and not (difference is not None and difference.stderr > 0):
        reason = "the same difference in all pairs: copies of a run, or a number that no seed changes?"
    state = State(untested=reason) if reason or difference is None else of_interval(difference, margin)
    shown_arms = [{run.cell: run for run in runs} for runs in known] if reason else [one, other]
    levels = [mean_of(arm, lambda run: value_of(run, kind, metric)) for arm in shown_arms]
    return Judged(first, second, metric, (levels[0], levels[1]), difference, state)


def why_not(arms: Sequence[Mapping[Cell, Run]], common: Sequence[Cell], kind: str, metric: str) -> str:
    """Why two arms cannot be compared in a metric; empty if they can."""
    if any(arm[cell].environment["metrics"].get(metric) == UNREAD for arm in arms for cell in common):
        return UNREAD
    if not all(arms):
        return "only one arm has runs that are judged" if any(arms) else "neither arm has runs that are judged"
    if not common:
        return "no seed that both arms have"
    if len(common) == 1:
        return "one pair of runs: a single seed decides nothing"
    pairs = [[arm[cell] for arm in arms] for cell in common]
    for runs in pairs:
        steps = [[*run.series(kind, metric).dropna().index] for run in runs]
        if not all(steps):
            lacking = next(run.name for run, found in zip(runs, steps, strict=True) if not found)
            return f"no number of {metric} in {lacking}"
        if steps[0] != steps[1]:
            ends = " and ".join(f"{len(found)} up to {found[-1]}" for found in steps)
            return f"other steps in each arm ({ends}, seed {runs[0].option('seed')})"
    if metric in ANSWERS:
        return _other_questions(pairs, ANSWERS[metric])
    return ""


def _other_questions(pairs: Sequence[Sequence[Run]], mode: str) -> str:
    """Why answers cannot be paired by question; empty if they can, or if no run has any by question."""
    kept = [run.kept_answers is not None for runs in pairs for run in runs]
    if not any(kept):
        return ""
    if not all(kept):
        return "answers by question in some runs alone"
    asked = [{*run.answers(mode).iloc[:, -1].dropna().index} for runs in pairs for run in runs]
    union, shared = set.union(*asked), set.intersection(*asked)
    return "" if union == shared else f"{len(union - shared)} of {len(union)} questions are missing in some runs"


def shown(text: str) -> str:
    """A text of somebody else on a page in Markdown: nothing in it is markup, and no control character is left."""
    plain = html.escape(printable(text).replace("\n", " "), quote=False)
    return plain.replace("|", "/").replace("`", "'").replace("[", "\\[").replace("*", "\\*")


def markdown(folder: Path, judged: Sequence[Judged]) -> str:
    """The page: how many runs, what was found, what is not judged and why, and what arms differ in."""
    about, arms = read_about(folder), arms_of(folder)
    parts = [f"# {shown(folder.resolve().name)}: reported", _introduction(about, arms)]
    tested = [one for one in judged if one.state.tested]
    unread = dict.fromkeys(shown(one.metric) for one in judged if one.state.untested == UNREAD)
    others = [one for one in judged if not one.state.tested and one.state.untested != UNREAD]
    heads = ("first - second", "number", "first", "second", "difference", "95 % interval", "finds", "word")
    rows = [
        (
            f"{shown(one.first)} - {shown(one.second)}",
            shown(one.metric),
            *_means(one),
            f"{one.difference.value:+.4g}" if one.difference else "-",
            one.interval,
            one.found,
            one.state.of_pair,
        )
        for one in tested
    ]
    parts += ["## What these runs show", markdown_table(heads, rows) if rows else NOTHING[len(arms) > 1]]
    if rows:
        words = "; ".join(f"*{word}*: {WORDS[word]}" for word in ("not decided", "no difference beyond the margin"))
        parts.append(
            "Numbers of training are means over the last fifth of the steps, others the last ones. Intervals are "
            "Student's t over pairs of seeds, and where answers are known by question for other questions too. "
            "*Finds*: the smallest true difference that so many pairs find four times of five. "
            f"{words}. Nothing is adjusted for how many numbers one looks at."
        )
    if others:
        heads = ("first - second", "number", "first", "second", "why not")
        rows = [
            (f"{shown(one.first)} - {shown(one.second)}", shown(one.metric), *_means(one), shown(one.state.untested))
            for one in others
        ]
        parts += ["## What was reported and is not judged", markdown_table(heads, rows)]
    if unread:
        parts.append(f"Imported and not compared, since nobody here read their definition: {', '.join(unread)}.")
    parts += ["## What is known of the runs", _known(about, arms)]
    return "\n\n".join(parts) + "\n"


def _means(one: Judged) -> list[str]:
    return [f"{mean:.4g}" if math.isfinite(mean) else "-" for mean in one.means]


def _introduction(about: About, arms: Mapping[str, Sequence[Run]]) -> str:
    counts = ", ".join(f"{shown(arm)} {sum(run.finished for run in runs)} of {len(runs)}" for arm, runs in arms.items())
    return (
        f"Runs that others made with {shown(about.tool)}; nothing of them was repeated here. Runs that are judged, by "
        f"arm: {counts}. Whether they are all that were made, nobody but their authors can say."
    )


def _known(about: About, arms: Mapping[str, Sequence[Run]]) -> str:
    options = {key: None for values in about.arms.values() for key in values}
    lines = []
    if options:
        rows = [(shown(key), *(shown(str(about.arms.get(arm, {}).get(key, "-"))) for arm in arms)) for key in options]
        lines.append(markdown_table(("option", *map(shown, arms)), rows))
    texts: dict[str, str] = next(iter(arms.values()))[0].environment["metrics"]
    lines += ["\n".join(f"- {shown(note)}" for note in about.notes)] if about.notes else []
    lines += ["\n".join(f"- {shown(name)} is left out: {shown(why)}" for name, why in about.unjudged.items())]
    if texts:
        rows = [(shown(metric), shown(text)) for metric, text in sorted(texts.items()) if text != UNREAD]
        lines += ["Numbers that are defined otherwise than ours:", markdown_table(("number", "definition"), rows)]
    return "\n\n".join(filter(None, lines)) or "Nothing besides the numbers."
