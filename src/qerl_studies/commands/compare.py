"""Tell in which options and in which numbers two runs differ, or two arms of several seeds.

    qerl-bench compare runs/FIRST runs/SECOND
    qerl-bench compare 'runs/*-nvfp4-none-*' 'runs/*-bf16-none-*'     # two arms: quote the patterns
    qerl-bench compare runs/FIRST runs/SECOND format=latex out=paper    # writes paper/compare.tex

First the numbers that one looks at first, even if both arms have the same, then these by step, then all others that
differ. Numbers of training are means over the last fifth of the steps, those of evaluations the last ones. Differences
are taken between runs of one base model and seed; their 95 % interval is Student's t over bases, or over the seeds of
one base, and of held-out accuracies whose answers were kept for other questions too. From three pairs on, the
correlation of the two arms over them: pairs help where it is above 0. Of a single pair only these have
an interval, over questions.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Sequence
from glob import glob
from pathlib import Path

import numpy as np
import pandas as pd

from qerl_core.checks import require
from qerl_core.metrics.definitions import definitions
from qerl_core.options.fingerprint import ADDED_LATER, flat, scientific
from qerl_core.process.arguments import KeyValueParser, output_folder
from qerl_studies.design.looks import shown_runs
from qerl_studies.figures.headline import (
    HEADLINES,
    OF_TRAINING,
    Compared,
    Headline,
    by_step,
    common_cells,
    compared,
    headlines_of,
    written_by,
)
from qerl_studies.runs.committed import find_study, is_study, read_study
from qerl_studies.runs.comparable import check_comparable
from qerl_studies.runs.environments import is_reported
from qerl_studies.runs.load import Cell, Run
from qerl_studies.runs.readable import readable
from qerl_studies.tables.paper import Table, add_format, write_table

Arm = dict[Cell, Run]
KINDS = ("train", "eval")  # of records that have numbers to compare
SHOWN_STEPS = 6


def main(arguments: list[str] | None = None) -> None:
    parser = KeyValueParser(__doc__)
    for name in ("first", "second"):
        parser.add_argument(name, help="a run, a folder of runs, or a quoted pattern of runs")
    parser.add_argument("--mixed-code", action="store_true", help="accept runs of different versions of the code")
    add_format(parser, default=None)
    parser.add_argument("--out", type=output_folder, default="figures", help="its folder (default: figures)")
    options, more = parser.parse_known_args(arguments)
    require(
        not more,
        f"{2 + len(more)} words ({', '.join(more[:2])}, ...): compare takes two runs or two patterns. Quote a "
        "pattern, so that the shell does not expand it: 'runs/*-nvfp4-*' 'runs/*-bf16-*'",
    )
    patterns = (options.first, options.second)
    runs = [readable(paths(pattern))[0] for pattern in patterns]
    together = {run.path: run for arm in runs for run in arm}
    check_comparable([*together.values()], options.mixed_code)
    first, second = (arm_of(pattern, arm) for pattern, arm in zip(patterns, runs, strict=True))
    print(comparison(patterns, first, second))
    if options.format:
        print(f"\n{write_table(as_table(first, second), options.format, options.out)}")


def paths(pattern: str) -> list[Path]:
    """The runs at or below what `pattern` matches. Raises ConfigError if there are none."""
    matched = [Path(pattern)] if _holds_runs(Path(pattern)) else [*map(Path, sorted(glob(pattern)))]
    matched = matched or _in_study(Path(pattern))
    found = [path for match in matched if _holds_runs(match) for path in shown_runs([match])]
    require(bool(found), f"no run matches {pattern}: give a run, a folder of runs, or a quoted pattern: 'runs/*-s0-*'")
    return list(dict.fromkeys(found))


def _in_study(pattern: Path) -> list[Path]:
    """The runs of a committed study whose names fit; they are no files that the pattern of a path would find."""
    names = read_study(pattern.parent).runs if is_study(pattern.parent) else ()
    return [pattern.parent / name for name in fnmatch.filter(sorted(names), pattern.name)]


def _holds_runs(place: Path) -> bool:
    return place.is_dir() or find_study(place) is not None


def arm_of(pattern: str, runs: Sequence[Run]) -> Arm:
    """The runs by base and seed. Raises ConfigError if two have the same."""
    arm: Arm = {}
    for run in runs:
        other = arm.setdefault(run.cell, run)
        require(
            other is run,
            f"{pattern} matches two runs of one base model and seed, {other.name} and {run.name}, which belong to two "
            "arms: make the pattern narrower",
        )
    return arm


def comparison(names: tuple[str, str], first: Arm, second: Arm) -> str:
    """The tables, and what has to be known about them."""
    options = option_rows(first, second)
    parts = [f"first   {names[0]}  ({_count(first)})", f"second  {names[1]}  ({_count(second)})", ""]
    parts += [_table(("option", "first", "second"), options)] if options else ["no option differs"]
    rows = number_rows(first, second)
    header = ("number", "first", "second", "first - second", "95 % interval", *_correlated(rows))
    chosen, others = (
        [(row.number.metric, *row.texts)[: len(header)] for row in rows if (row.number in HEADLINES) == leading]
        for leading in (True, False)
    )
    parts += ["", _table(header, chosen)] if chosen else []
    parts += [f"\n{table}" for one in OF_TRAINING if (table := step_table(one, first, second))]
    parts += ["", _table(header, others), "", "what a number is: qerl-bench run --explain NAME"] if others else []
    if not others and all(row[1] == row[2] for row in chosen):
        parts += ["", "no number differs"]
    return "\n".join([*parts, *notes(first, second)])


def option_rows(first: Arm, second: Arm) -> list[tuple[str, ...]]:
    """Config keys that decide numbers, base, seed and machine, with their values where the arms differ.

    Keys that only one of two options has come with the option, and are left out, but for what was added to it.
    """
    columns = [_options(arm) for arm in (first, second)]
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [(key, *(", ".join(column.get(key, ("-",))) for column in columns)) for key in keys]
    differ = [row for row in rows if row[1] != row[2] and not row[0].endswith("_target_")]
    axes = {row[0].removesuffix("name") for row in differ if row[0].endswith(".name")}
    return [row for row in differ if row[0] in ADDED_LATER or "-" not in row[1:] or not row[0].startswith((*axes,))]


def _options(arm: Arm) -> dict[str, tuple[str, ...]]:
    values: dict[str, dict[str, None]] = {}
    for run in arm.values():
        items = flat(scientific(run.config)) | {"seed": run.option("seed"), "base": run.base}
        for key, value in (items | {"code": run.code, "machine": run.block}).items():
            values.setdefault(key, {})[f"{value:g}" if isinstance(value, float) else str(value)] = None
    return {key: tuple(sorted(texts)) for key, texts in values.items()}


def number_rows(first: Arm, second: Arm) -> list[Compared]:
    """Those of HEADLINES, and behind them other numbers that differ, in the order of their definitions."""
    order = {name: place for place, name in enumerate(definitions())}
    written = {one for one in written_by([*first.values(), *second.values()]) if _is_number(*one)}
    numbers = headlines_of(written, lambda pair: (pair[0] != "eval", order.get(pair[1], len(order)), pair))
    rows = [compared(first, second, number) for number in numbers]
    return [row for row in rows if row.number in HEADLINES or _differs(row)]


def _correlated(rows: Sequence[Compared]) -> list[str]:
    """The head of the column of correlations, if there are pairs enough for one."""
    return ["correlation of the arms"] if any(math.isfinite(row.correlation) for row in rows) else []


def _is_number(kind: str, name: str) -> bool:
    return kind in KINDS and name != "time" and "_stderr" not in name


def _differs(row: Compared) -> bool:
    first, second = row.means
    return first != second or (row.difference is not None and row.difference.value != 0)


def as_table(first: Arm, second: Arm) -> Table:
    """The numbers that one looks at first, for a paper, and for programs all that differ; options are in the caption.

    Of a pair without an interval the columns low and high are empty.
    """
    rows = number_rows(first, second)
    ends = [row.difference if row.difference and row.difference.has_interval else None for row in rows]
    numbers = pd.DataFrame({
        "number": [row.number.metric for row in rows],
        "first": [row.means[0] for row in rows],
        "second": [row.means[1] for row in rows],
        "difference": [row.difference.value if row.difference else math.nan for row in rows],
        "low": [one.low if one else math.nan for one in ends],
        "high": [one.high if one else math.nan for one in ends],
        "n": [row.difference.n if row.difference else 0 for row in rows],
        "correlation": [row.correlation for row in rows],
    })  # fmt: skip
    heads = ("number", "first", "second", "difference", "95 % interval", *_correlated(rows))
    leading = [row for row in rows if row.number in HEADLINES]
    shown = pd.DataFrame([(row.number.title, *row.texts)[: len(heads)] for row in leading], columns=heads)
    options = [f"{key} {one} (first) and {other} (second)" for key, one, other in option_rows(first, second)]
    caption = [
        f"Two arms of {_count(first)} and {_count(second)}, which differ in {'; '.join(options) or 'no option'}.",
        "Numbers of training are means over the last fifth of the steps, those of evaluations the last ones. "
        "Differences are of runs with one base model and seed; intervals are Student's t over bases, or over the "
        "seeds of one base, and of accuracies whose answers were kept for other questions too.",
        *filter(None, notes(first, second)),
    ]
    return Table("compare", numbers, shown, " ".join(caption))


def step_table(headline: Headline, first: Arm, second: Arm) -> str:
    """The means of both arms at some steps that both have; empty without one."""
    curves = [dict(by_step([*arm.values()], headline)) for arm in (first, second)]
    common = sorted(curves[0].keys() & curves[1].keys())
    if not common:
        return ""
    places = sorted({*np.linspace(0, len(common) - 1, SHOWN_STEPS).round().astype(int).tolist()})
    steps = [common[place] for place in places]
    rows = [
        (name, *(f"{curve[step].value:.4g}" for step in steps))
        for name, curve in zip(("first", "second"), curves, strict=True)
    ]
    return _table((f"{headline.metric} at step", *(f"{step:g}" for step in steps)), rows)


def notes(first: Arm, second: Arm) -> list[str]:
    """What keeps the two arms from being compared run by run."""
    common, alone = common_cells(first, second), first.keys() ^ second.keys()
    said = [""]
    if not common:
        said.append("The arms have no base model and seed in common, so there are no differences of pairs.")
    elif alone:
        pairs = "1 pair" if len(common) == 1 else f"{len(common)} pairs"
        said.append(f"Differences are of {pairs}. Without a counterpart, and in the means only: {len(alone)}.")
    elif len(common) == 1:
        said.append("One pair: other seeds may differ otherwise. Intervals are over questions alone.")
    if any(first[cell].block != second[cell].block for cell in common):
        said.append("Some pairs ran on different machines or library versions, which may add to their difference.")
    unfinished = sorted(run.name for run in (*first.values(), *second.values()) if not run.finished)
    if unfinished:
        said.append(f"Not finished: {', '.join(unfinished)}.")
    return said if len(said) > 1 else []


def _count(arm: Arm) -> str:
    marked = ", reported" if any(is_reported(run.environment) for run in arm.values()) else ""
    return ("1 run" if len(arm) == 1 else f"{len(arm)} runs") + marked


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[place]) for row in (header, *rows)) for place in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    return "\n".join(line.rstrip() for line in lines)
