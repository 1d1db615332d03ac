"""Which numbers of operations of task=dag bases can learn from: each, and several in a row.

    python studies/dag-2026/rungs.py studies/dag-2026/rungs.yaml [--widths 5 4 3]

Reads the probes that `qerl-bench gates` left of the bases of a design. Prints tables in Markdown:
each number of operations by itself, and each five consecutive ones as RL would draw them, equally
often. Of those that pass the gates of difficulty it names the one whose share of groups without
success is nearest to the middle of what is allowed, of two that are equally near the one with fewer
operations. If none passes, it looks at the next of --widths. Means are over bases; k of pass@k are
all samples of a probe.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from qerl_bench.conduct.probe_queue import probed
from qerl_bench.config import build, compose
from qerl_bench.task.dag import Dag, operations_needed
from qerl_core.checks import require
from qerl_core.exits import guarded
from qerl_core.seeding import derive
from qerl_studies.design.design import Design, read_design
from qerl_studies.design.limits import NO_SUCCESS, PASS_AT_1, PASS_AT_K
from qerl_studies.design.readings import Probe, pass_at
from qerl_studies.tables.markdown import markdown_table

Rung = Mapping[str, float]  # what a base does with problems of so many operations


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="a design of task=dag whose bases have been probed")
    help_of_widths = "how many consecutive numbers of operations, in the order in which to look (5)"
    parser.add_argument("--widths", nargs="+", type=int, default=[5], metavar="N", help=help_of_widths)
    args = parser.parse_args(arguments)
    require(min(args.widths) >= 1, f"--widths must be at least 1, got {args.widths}")
    design = read_design(args.study)
    missing = [base for base in design.bases if not probed(design, base, design.formats)]
    require(not missing, f"the bases {missing} were not probed; run qerl-bench gates {design.path}")
    probes = [json.loads(design.probe_file(base).read_text()) for base in design.bases]
    rungs = by_rung(design, probes)
    require(max(args.widths) <= len(rungs), f"--widths must be at most {len(rungs)}, the numbers of operations asked")
    print(report(rungs, len(probes), args.widths))


def by_rung(design: Design, probes: Sequence[Probe]) -> dict[int, Rung]:
    """By number of operations: the means over bases, and how many questions each base was asked."""
    task: Any = build(compose(design.base_words(design.reference, design.bases[0]))).task
    require(isinstance(task, Dag), f"{design.path} has task={task.name}; rungs are those of task=dag")
    asked = [operations_needed(one.question) for one in task.train_prompts(1, design.probe.questions, derive("probe"))]
    found = {}
    for rung in sorted(set(asked)):
        measured = [numbers(design, only(probe, [count == rung for count in asked])) for probe in probes]
        found[rung] = {key: fmean(one[key] for one in measured) for key in measured[0]}
        found[rung] |= {"questions": asked.count(rung)}
    return found


def only(probe: Probe, chosen: Sequence[bool]) -> Probe:
    """A probe as if only some of its questions had been asked."""
    formats = {
        name: {**counts, "correct": [n for n, keep in zip(counts["correct"], chosen, strict=True) if keep]}
        for name, counts in probe["formats"].items()
    }
    return {**probe, "formats": formats}


def numbers(design: Design, probe: Probe) -> dict[str, float]:
    """What the gates of difficulty look at, and what each other format costs."""
    reference, *others = design.formats
    once = pass_at(probe, reference, 1)
    found = {
        "pass@1": once,
        "pass@k": pass_at(probe, reference, design.probe.samples),
        "no success": 1 - pass_at(probe, reference, design.samples_per_group),
    }
    return found | {f"damage by {quant}": once - pass_at(probe, quant, 1) for quant in others}


def windows(rungs: Mapping[int, Rung], width: int) -> dict[tuple[int, ...], Rung]:
    """Means over each `width` consecutive numbers of operations."""
    together = [tuple(range(first, first + width)) for first in rungs]
    complete = [one for one in together if rungs.keys() >= {*one}]
    keys = [key for key in next(iter(rungs.values())) if key != "questions"]
    return {one: {key: fmean(rungs[rung][key] for rung in one) for key in keys} for one in complete}


def fits(window: Rung) -> bool:
    limits = {"pass@1": PASS_AT_1, "pass@k": (PASS_AT_K, 1.0), "no success": NO_SUCCESS}
    return all(low <= window[key] <= high for key, (low, high) in limits.items())


def chosen(together: Mapping[tuple[int, ...], Rung]) -> tuple[int, ...] | None:
    """The numbers of operations of the window that is taken, or None if none passes the gates of difficulty."""

    def distance(one: tuple[int, ...]) -> float:
        return round(abs(together[one]["no success"] - fmean(NO_SUCCESS)), 9)  # .30 and .40 are equally far from .35

    fitting = [one for one, window in together.items() if fits(window)]
    return min(fitting, key=lambda one: (distance(one), one), default=None)


def report(rungs: Mapping[int, Rung], bases: int, widths: Sequence[int]) -> str:
    parts = [f"{bases} base{'s' * (bases != 1)}", table("operations", {str(rung): one for rung, one in rungs.items()})]
    for width in widths:
        together = windows(rungs, width)
        parts.append(table("operations", {f"{one[0]} to {one[-1]}": window for one, window in together.items()}))
        if (best := chosen(together)) is not None:
            return "\n\n".join([*parts, f"task.operations={list(best)}".replace(" ", "")])
    return "\n\n".join([*parts, "none fits"])


def table(first: str, rows: Mapping[str, Rung]) -> str:
    keys = list(next(iter(rows.values()), {}))
    lines = [
        [name, *(f"{row[key]:.0f}" if key == "questions" else f"{row[key]:.3f}" for key in keys)]
        for name, row in rows.items()
    ]
    return markdown_table([first, *keys], lines)


if __name__ == "__main__":
    guarded(main)
