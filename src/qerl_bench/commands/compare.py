"""Tell in which options and in which numbers two runs differ, or two arms of several seeds.

    qerl-bench compare runs/FIRST runs/SECOND
    qerl-bench compare 'runs/*-nvfp4-none-*' 'runs/*-bf16-none-*'     # two arms: quote the patterns

Numbers of training are means over the last fifth of the steps, those of evaluations the last ones. Differences are
taken between runs of one base model and seed; their 95 % interval is Student's t over bases, or over the seeds of one
base. Of a single pair only held-out accuracies have an interval, over questions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from glob import glob
from pathlib import Path

import numpy as np
import pandas as pd

from qerl_bench.checks import ConfigError, require
from qerl_bench.metrics import definitions
from qerl_bench.options.fingerprint import flat, scientific
from qerl_bench.process.arguments import KeyValueParser
from qerl_bench.statistics import Estimate, mean_ci, mean_ci_crossed
from qerl_bench.studies.figures.paired import average_seeds, by_cell
from qerl_bench.studies.runs.committed import find_study
from qerl_bench.studies.runs.comparable import check_comparable
from qerl_bench.studies.runs.find import find_runs
from qerl_bench.studies.runs.load import Cell, Run, load_run
from qerl_bench.studies.runs.measure import last_fifth_mean

Arm = dict[Cell, Run]
KINDS = ("train", "eval")  # of records that have numbers to compare


def main(arguments: list[str] | None = None) -> None:
    parser = KeyValueParser(__doc__)
    for name in ("first", "second"):
        parser.add_argument(name, help="a run, a folder of runs, or a quoted pattern of runs")
    parser.add_argument("--mixed-code", action="store_true", help="accept runs of different versions of the code")
    options, more = parser.parse_known_args(arguments)
    require(
        not more,
        f"{2 + len(more)} words ({', '.join(more[:2])}, ...): compare takes two runs or two patterns. Quote a "
        "pattern, so that the shell does not expand it: 'runs/*-nvfp4-*' 'runs/*-bf16-*'",
    )
    patterns = (options.first, options.second)
    runs = [[load_run(path) for path in paths(pattern)] for pattern in patterns]
    together = {run.path: run for arm in runs for run in arm}
    check_comparable([*together.values()], options.mixed_code)
    print(comparison(patterns, *(arm_of(pattern, arm) for pattern, arm in zip(patterns, runs, strict=True))))


def paths(pattern: str) -> list[Path]:
    """The runs at or below what `pattern` matches. Raises ConfigError if there are none."""
    matched = [Path(pattern)] if _holds_runs(Path(pattern)) else [*map(Path, sorted(glob(pattern)))]
    found = [path for match in matched if _holds_runs(match) for path in find_runs(match)]
    require(bool(found), f"no run matches {pattern}: give a run, a folder of runs, or a quoted pattern: 'runs/*-s0-*'")
    return list(dict.fromkeys(found))


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
    """Both tables, and what has to be known about them."""
    numbers = number_rows(first, second)
    options = option_rows(first, second)
    parts = [f"first   {names[0]}  ({_count(first)})", f"second  {names[1]}  ({_count(second)})", ""]
    parts += [_table(("option", "first", "second"), options)] if options else ["no option differs"]
    header = ("number", "first", "second", "first - second", "95 % interval")
    parts += ["", _table(header, numbers) if numbers else "no number differs", *notes(first, second)]
    return "\n".join(parts)


def option_rows(first: Arm, second: Arm) -> list[tuple[str, ...]]:
    """Config keys that decide numbers, base, seed and machine, with their values where the arms differ."""
    columns = [_options(arm) for arm in (first, second)]
    keys = dict.fromkeys(key for column in columns for key in column)
    rows = [(key, *(", ".join(column.get(key, ("-",))) for column in columns)) for key in keys]
    return [row for row in rows if row[1] != row[2] and not row[0].endswith("_target_")]


def _options(arm: Arm) -> dict[str, tuple[str, ...]]:
    values: dict[str, dict[str, None]] = {}
    for run in arm.values():
        items = flat(scientific(run.config)) | {"seed": run.option("seed"), "base": run.base}
        for key, value in (items | {"code": run.code, "machine": run.block}).items():
            values.setdefault(key, {})[f"{value:g}" if isinstance(value, float) else str(value)] = None
    return {key: tuple(sorted(texts)) for key, texts in values.items()}


def number_rows(first: Arm, second: Arm) -> list[tuple[str, ...]]:
    """The numbers that differ, in the order of metrics.py; those that only one arm has stand there with a dash."""
    written = {(kind, str(name)) for arm in (first, second) for run in arm.values() for kind, name in _written(run)}
    order = {name: place for place, name in enumerate(definitions())}
    common = sorted(first.keys() & second.keys())
    rows = []
    for kind, name in sorted(written, key=lambda pair: (pair[0] != "eval", order.get(pair[1], len(order)), pair)):
        means = [fmean(arm, lambda run, kind=kind, name=name: value_of(run, kind, name)) for arm in (first, second)]
        difference = paired(first, second, common, kind, name)
        if means[0] == means[1] and (difference is None or difference.value == 0):
            continue
        shown = [f"{mean:.4g}" if math.isfinite(mean) else "-" for mean in means]
        rows.append((name, *shown, *_difference(difference)))
    return rows


def _written(run: Run) -> set[tuple[str, str]]:
    pairs = run.metrics[["kind", "metric"]].drop_duplicates().astype(str).itertuples(index=False)
    return {(kind, name) for kind, name in pairs if kind in KINDS and name != "time" and "_stderr" not in name}


def value_of(run: Run, kind: str, name: str) -> float:
    """A number of a run; NaN if it has none."""
    series = run.series(kind, name).dropna()
    if series.empty:
        return math.nan
    return last_fifth_mean(name)(run) if kind == "train" else float(series.iloc[-1])


def fmean(arm: Arm, value: Callable[[Run], float]) -> float:
    """The mean over bases, or over the seeds of one; the runs without the number are left out."""
    runs = [run for run in arm.values() if math.isfinite(value(run))]
    return float(average_seeds(by_cell(runs, value)).to_numpy().mean()) if runs else math.nan


def paired(first: Arm, second: Arm, common: Sequence[Cell], kind: str, name: str) -> Estimate | None:
    """The difference within base and seed; None without a pair that has the number."""
    if len(common) == 1 and name.startswith("eval/accuracy_"):
        over_questions = _by_question(first[common[0]], second[common[0]], name.removeprefix("eval/accuracy_"))
        if over_questions is not None:
            return over_questions
    gaps = {cell: value_of(first[cell], kind, name) - value_of(second[cell], kind, name) for cell in common}
    known = {cell: gap for cell, gap in gaps.items() if math.isfinite(gap)}
    if not known:
        return None
    table = pd.DataFrame([known.values()], columns=pd.MultiIndex.from_tuples(known, names=["base", "seed"]))
    return mean_ci(average_seeds(table).to_numpy()[0])


def _by_question(first: Run, second: Run, mode: str) -> Estimate | None:
    """The difference of one pair of runs with an interval over questions; None if answers to the same were not kept."""
    try:
        answers = [run.answers(mode).iloc[:, -1] for run in (first, second)]
    except ConfigError:
        return None
    gaps = (answers[0] - answers[1]).dropna()
    return mean_ci_crossed(np.asarray(gaps)) if len(gaps) == len(answers[0]) == len(answers[1]) > 1 else None


def _difference(difference: Estimate | None) -> tuple[str, str]:
    if difference is None:
        return "-", "-"
    interval = f"[{difference.low:+.4g}, {difference.high:+.4g}]" if difference.stderr > 0 else "-"
    return f"{difference.value:+.4g}", interval


def notes(first: Arm, second: Arm) -> list[str]:
    """What keeps the two arms from being compared run by run."""
    common, alone = first.keys() & second.keys(), first.keys() ^ second.keys()
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
    return "1 run" if len(arm) == 1 else f"{len(arm)} runs"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[place]) for row in (header, *rows)) for place in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    return "\n".join(line.rstrip() for line in lines)
