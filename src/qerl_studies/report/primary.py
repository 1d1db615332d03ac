"""The page of a study's primary contrasts: what each look shows, and before the first of them no arm's number.

Until the first look the page shows progress alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from qerl_studies.claims.primary import Looked, Together, look, together
from qerl_studies.design.looks import counted, looks_reached
from qerl_studies.design.primary import MEASURES, Primary
from qerl_studies.design.sessions import Sessions
from qerl_studies.tables.markdown import markdown_table

POWER = 0.8


def primary_page(study: Sessions) -> str:
    """Markdown: the looks that are reached, or how far the study is."""
    primary = study.design.primary
    assert primary is not None
    have, reached = counted(study, primary), looks_reached(study, primary)
    measure, codes = MEASURES[primary.measure], sorted({run.code for run in study.runs.values()})
    parts = [
        "# Primary contrasts",
        f"{measure.name[0].upper()}{measure.name[1:]}. {len(have.bases)} bases have all arms; looks at "
        f"{' and '.join(map(str, primary.looks))}. Code {', '.join(codes)}.",
    ]
    if have.left_out:
        parts.append("\n".join(f"- Base {base} does not count: {reason}." for base, reason in have.left_out.items()))
    if not reached:
        parts.append("Arms are compared at the first look.")
    for count in reached:
        level, looked = primary.looks[count], look(study, primary, count)
        heads = [
            "contrast",
            "difference",
            "95 %, questions fixed",
            "95 %, questions drawn",
            f"{100 * (1 - level):g} %, questions fixed",
        ]
        heads += ["p (Holm)", "found with 80 %", "verdict", "in one vocabulary"]
        lines = [
            [
                f"{one.name}: {' - '.join(primary.contrasts[one.name])}",
                measure.text(one.over_bases.value),
                *(measure.interval_text(found.low, found.high) for found in (one.effect.fixed, one.effect.whole)),
                measure.interval_text(*one.over_bases.ends(level)),
                f"{one.p:.3f}",
                measure.size_text(one.over_bases.detectable(level / 2, POWER)),
                one.verdict,
                "; ".join(filter(None, (one.state.word, one.exploratory))),
            ]
            for one in looked
        ]
        parts += [
            f"## {count} bases, level {level:g}",
            markdown_table(heads, lines),
            _without_pairs(primary, count, looked),
            f"Bases {', '.join(map(str, sorted(have.bases[:count])))}. {_levels(primary, looked)}",
        ]
    if reached and (several := together(study)):
        parts += ["## All studies of this protocol", _of_several(primary, several)]
    return "\n\n".join(parts) + "\n"


def _without_pairs(primary: Primary, count: int, looked: Sequence[Looked]) -> str:
    """The same contrasts by least squares; exploratory, since no protocol asked for it."""
    measure, level = MEASURES[primary.measure], primary.looks[count]
    heads = ["without pairs, exploratory", "difference", "95 %, questions fixed", "df", "p (Holm)"]
    heads += [f"at {level:g}", "correlation of the arms"]
    lines = [
        [
            one.name,
            measure.text(one.by_runs.value),
            measure.interval_text(one.by_runs.low, one.by_runs.high) if one.by_runs.has_interval else "-",
            f"{one.by_runs.df:.0f}, in pairs {one.over_bases.df:.0f}",
            f"{one.p_by_runs:.3f}",
            one.state_by_runs.word if one.by_runs.has_interval else "-",
            f"{one.effect.correlation:+.2f}",
        ]
        for one in looked
    ]
    return markdown_table(heads, lines)


def _of_several(primary: Primary, several: Sequence[Together]) -> str:
    """A word only where each study has it at the level of its own look."""
    measure = MEASURES[primary.measure]
    heads = ["contrast", *several[0].each, "largest p", "all of them", "exploratory, by the gates of today"]
    lines = [
        [
            f"{one.name}: {' - '.join(primary.contrasts[one.name])}",
            *(
                "not tested" if study is None else f"{measure.text(study.over_bases.value)}, {study.state.word}"
                for study in one.each.values()
            ),
            f"{one.p:.3f}" if one.p == one.p else "-",
            one.state.word,
            one.by_gates_of_today.word if one.by_gates_of_today.word != one.state.word else "-",
        ]
        for one in several
    ]
    return markdown_table(heads, lines)


def _levels(primary: Primary, looked: Sequence[Looked]) -> str:
    show = MEASURES[primary.measure].level_text
    levels = dict(pair for one in looked for pair in zip(primary.contrasts[one.name], one.effect.levels, strict=True))
    return f"Levels: {', '.join(f'{arm} {show(level)}' for arm, level in levels.items())}."
