"""Tell whether runs in a format end where BF16 does, within a tolerance that was fixed beforehand: pass, fail, too few.

    qerl-bench conform studies/real-2026/05b reference=qwen2.5-coder-0.5b-gsm8k
    qerl-bench conform runs/ reference=qwen2.5-coder-0.5b-gsm8k
    qerl-bench conform STUDY reference=NAME control=bf16 measures=final     # a reported study

STUDY needs BF16 runs of its own, in pairs with those of the format: same base, seed and machine. The reference
(studies/references.yaml) says which model, task and setting, which measures, how large a difference conforms, and where
BF16 is to be expected. Exit code 1 if an arm fails, 0 otherwise: too few runs prove nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from qerl_core.process.arguments import KeyValueParser, printable
from qerl_studies.conform.equivalence import Conformity, conformity, place_of_control
from qerl_studies.conform.reference import MEASURES, Bf16Reference, read_reference
from qerl_studies.design.looks import shown_runs
from qerl_studies.runs.load import load_run
from qerl_studies.tables.markdown import markdown_table

HEADS = ("arm", "measure", "units", "arm's mean", "BF16's", "difference, 95 %", "tolerance", "runs needed", "")
FAILED = 1


def main(words: list[str]) -> None:
    parser = KeyValueParser(__doc__)
    parser.add_argument("studies", nargs="+", type=Path, help="folders of runs, committed or reported studies")
    parser.add_argument("--reference", required=True, help="a name in studies/references.yaml, or FILE.yaml:NAME")
    parser.add_argument("--control", help="the BF16 arm of a reported study")
    asked = "measures that decide, in the place of the reference's own"
    parser.add_argument("--measures", nargs="+", choices=[*MEASURES], metavar="NAME", default=[], help=asked)
    given = parser.parse_args(words)
    reference = read_reference(given.reference)
    runs = [load_run(path) for path in shown_runs(given.studies)]
    found = conformity(reference, runs, given.measures, given.control)
    print(printable(page(reference, found)), end="")
    if any(one.word == "fail" for one in found):
        sys.exit(FAILED)


def page(reference: Bf16Reference, arms: list[Conformity]) -> str:
    """Markdown: the word on each arm, and every number behind it."""
    lines = []
    for one in arms:
        for part in one.asked:
            effect, measure = part.effect, part.measure
            needed = "-" if effect is None else str(part.needed or "over 4,096")
            lines.append((
                one.arm,
                measure.name + ("" if part.decides else " (beside)"),
                str(effect.n) if effect else "-",
                *([measure.level_text(level) for level in part.levels] or ["-", "-"]),
                measure.estimate_text(effect) if effect else part.reason,
                measure.size_text(part.tolerance),
                needed,
                "within" if part.within else "beyond" if part.outside(1) else "open",
            ))  # fmt: skip
    notes = {one.arm: "; ".join(filter(None, (one.reason, one.left_out))) for one in arms}
    words = "\n".join(f"- {one.arm}: **{one.word}**{f' ({notes[one.arm]})' if notes[one.arm] else ''}" for one in arms)
    name = reference.asked[0]
    control = next((part.levels[1] for one in arms for part in one.asked if part.levels and part.decides), None)
    places = {MEASURES[key].name: key for key in reference.tolerances}
    first = next((part for one in arms for part in one.asked if part.levels and part.decides), None)
    name = places[first.measure.name] if first else name
    expected = "" if control is None else f"BF16: {place_of_control(reference, name, control)}.\n\n"
    return (
        f"# Against {reference.name}\n\n{words}\n\n{expected}{markdown_table(HEADS, lines)}\n\n"
        "*pass*: the whole interval lies within the tolerance, in each measure that decides. *fail*: the difference is "
        "shown to be larger. *too few*: neither. *Runs needed*: pairs with which a format without any difference would "
        f"pass four times of five. Tolerances are asked since {reference.since}; of older runs a word is exploratory.\n"
    )
