"""What the runs of a reported study say about its arms: differences in pairs of seeds, with intervals and words.

Intervals and words are those of effects/; no second ones are made here. What is missing for a comparison is said in the
place of its number. Words are not adjusted for how many are looked at.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qerl_core.checks import require
from qerl_core.process.arguments import printable
from qerl_studies.effects.state import WORDS
from qerl_studies.figures.headline import Arm, Compared, Headline, common_cells, compared, headlines_of, written_by
from qerl_studies.foreign.definitions import UNREAD
from qerl_studies.runs.find import find_runs
from qerl_studies.runs.load import Run, load_run
from qerl_studies.runs.reported import ANSWERS, About, read_about
from qerl_studies.tables.markdown import markdown_table

LEVEL = 0.025  # one-sided, of the differences that so many pairs find
NOTHING = {False: "One arm, which there is nothing to compare with.", True: "Nothing can be judged."}
ALIKE = "the same difference in all pairs: copies of a run, or a number that no seed changes?"
NO_SEED = "runs whose seed is not known have no counterpart in another arm"
MOST_METRICS = 60  # of a page


@dataclass(frozen=True)
class Judged(Compared):
    """`first` minus `second`, names of arms, in one number."""

    first: str = ""
    second: str = ""

    @property
    def metric(self) -> str:
        return self.number.metric

    @property
    def found(self) -> str:
        """The smallest true difference that these pairs find four times of five."""
        known = self.difference is not None and self.difference.has_interval
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
    given = dict(margins or {})
    return [
        _judged(first, second, arms, replace(number, margin=given.get(number.metric, number.margin)), about)
        for first in arms
        if first != second
        for number in headlines_of(written_by([*arms[first], *arms[second]]))[:MOST_METRICS]
    ]


def _judged(first: str, second: str, arms: Mapping[str, Sequence[Run]], number: Headline, about: About) -> Judged:
    """One comparison. Runs that are not to be judged have no part in it; where nothing is, means are of all runs."""
    known = [[run for run in arms[arm] if run.records(number.kind, number.metric)] for arm in (first, second)]
    one, other = ({run.cell: run for run in runs if run.finished} for runs in known)
    without = [arm for arm, runs in zip((first, second), known, strict=True) if not runs]
    lacking = [arm for arm in without if any(run.finished for run in arms[arm])]
    reason = f"no run of {lacking[0]} has it" if lacking else why_not(one, other, number)
    if reason:
        left_out = [about.unjudged.get(run.name, NO_SEED) for runs in known for run in runs if not run.finished]
        ends = [{run.last_step for run in runs} for runs in known]
        apart = [f"of other steps ({min(ends[0])} and {min(ends[1])})"] if all(ends) and ends[0] != ends[1] else []
        reason = reason if lacking else "; ".join(dict.fromkeys([reason, *left_out, *apart]))
        means = tuple(number.mean({run.cell: run for run in runs}) for runs in known)
        return Judged(number, means, None, reason, first, second)
    comparison = compared(one, other, number)
    alike = "" if comparison.difference is not None and comparison.difference.has_interval else ALIKE
    return Judged(number, comparison.means, comparison.effect, alike, first, second)


def why_not(first: Arm, second: Arm, number: Headline) -> str:
    """Why two arms cannot be compared in a number; empty if they can."""
    arms, common, (kind, metric) = (first, second), common_cells(first, second), (number.kind, number.metric)
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
    heads = (
        "first - second",
        "number",
        "first",
        "second",
        "difference",
        "95 % interval",
        "correlation",
        "finds",
        "word",
    )
    rows = [
        (
            f"{shown(one.first)} - {shown(one.second)}",
            shown(one.metric),
            *one.texts,
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
            "*Correlation*: of the two arms over seeds; pairs help where it is above 0. "
            "*Finds*: the smallest true difference that so many pairs find four times of five. "
            f"{words}. Nothing is adjusted for how many numbers one looks at."
        )
    if others:
        heads = ("first - second", "number", "first", "second", "why not")
        rows = [
            (f"{shown(one.first)} - {shown(one.second)}", shown(one.metric), *one.texts[:2], shown(one.state.untested))
            for one in others
        ]
        parts += ["## What was reported and is not judged", markdown_table(heads, rows)]
    if unread:
        parts.append(f"Imported and not compared, since nobody here read their definition: {', '.join(unread)}.")
    parts += ["## What is known of the runs", _known(about, arms)]
    return "\n\n".join(parts) + "\n"


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
