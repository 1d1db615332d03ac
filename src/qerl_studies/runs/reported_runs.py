"""The runs of a reported study as every reader takes them: configs, metrics and answers, as of a committed study.

What nobody reported is called so, and is nowhere a default. Everything in which arms may differ stands under `arm`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from qerl_core.checks import require
from qerl_core.metrics.definitions import definitions
from qerl_core.options.fingerprint import fingerprint, flat
from qerl_studies.runs.environments import CLASS
from qerl_studies.runs.parse import first_names, long_table
from qerl_studies.runs.reported import ANSWERS, REMEDY, REPORTED, About, Row, read_about, read_rows

UNKNOWN = "not reported"  # an option that no file of the others says
DECIDED = ("quant", "aqn", "quantizer", "algo")  # axes whose names pages show, and that foreign files do not have


@dataclass(frozen=True)
class ReportedParts:
    """What `committed.CommittedStudy` is made of."""

    configs: dict[str, dict[str, Any]]
    environments: list[dict[str, Any]]
    runs: dict[str, dict[str, Any]]
    metrics: dict[str, pd.DataFrame]
    answers: dict[str, pd.DataFrame]


def parts_of(folder: Path) -> ReportedParts:
    """The runs of a reported study. Raises ConfigError for two rows of one number, for runs of one name, and as
    `read_rows` and `read_about`."""
    about = read_about(folder)
    by_run: dict[tuple[str, int | None, str], list[Row]] = {}
    for row in read_rows(folder / REPORTED):
        by_run.setdefault((row.arm, row.seed, row.source if row.seed is None else ""), []).append(row)
    require(bool(by_run), f"{folder / REPORTED} has no row. {REMEDY}")
    configs: dict[str, dict[str, Any]] = {}
    parts = ReportedParts(configs, [_environment(about, by_run)], {}, {}, {})
    for number, ((arm, seed, source), rows) in enumerate(by_run.items(), start=1):
        name = run_name(arm, seed, source)
        require(name not in parts.runs, f"{folder / REPORTED}: two runs are called {name}: name arms apart. {REMEDY}")
        config = _config(rows, about.arms.get(arm, {}))
        listed = fingerprint(config)
        configs[listed] = flat(config)
        unknown = -number  # of no other run, so that it is in no pair
        parts.runs[name] = {
            "fingerprint": listed,
            "seed": unknown if seed is None else seed,
            "environment": 0,
            "finished": seed is not None and name not in about.unjudged,
        }
        parts.metrics[name] = _metrics(rows, f"{folder / REPORTED}: {name}")
        answers = _answers(rows)
        if not answers.empty:
            parts.answers[name] = answers
    return parts


def run_name(arm: str, seed: int | None, source: str) -> str:
    """How a run is called here; one whose seed is not known by the file that it was read from."""
    return f"{safe(arm)}-{f's{seed}' if seed is not None else f'from-{safe(source)}'}"


def safe(name: str) -> str:
    """`name` as it can be part of the name of a run, and of a path: letters, digits and few signs, no dot in front."""
    return re.sub(r"[^\w.+=-]", "_", name)[:120].lstrip(".") or "_"


def _environment(about: About, by_run: Mapping[Any, Sequence[Row]]) -> dict[str, Any]:
    """What env.json says of runs of ours; `metrics` has the definitions of numbers that have no name here."""
    texts: dict[str, dict[str, None]] = {}
    for rows in by_run.values():
        for row in rows:
            texts.setdefault(row.metric, {})[row.definition] = None
    mixed = [metric for metric, found in texts.items() if len(found) > 1]
    require(
        not mixed,
        f"{first_names(mixed)} has several definitions in {REPORTED}: give each its own name in the column metric",
    )
    own = {metric: next(iter(found)) for metric, found in texts.items() if metric not in definitions()}
    return {"class": CLASS, "tool": about.tool, "code": about.tool, "metrics": own}


def _config(rows: Sequence[Row], options: Mapping[str, Any]) -> dict[str, Any]:
    """The tree of a run's config: what was reported, and UNKNOWN for what pages show besides."""
    first = rows[0]
    models, tasks = ({getattr(row, key) for row in rows} for key in ("model", "task"))
    require(len(models) == len(tasks) == 1, f"{REPORTED}: the arm {first.arm} has several models or tasks in one run")
    return {
        "class": CLASS,
        "steps": max(row.step for row in rows),
        "model": {"name": first.model, "id": first.model},
        "task": {"name": first.task},
        "optim": {"lr": math.nan},
        "lora": {"name": UNKNOWN, "rank": UNKNOWN},
        **{axis: {"name": UNKNOWN} for axis in DECIDED},
        "arm": {"name": first.arm, **{_key(key): value for key, value in options.items()}},
    }


def _key(key: str) -> str:
    return key.replace(".", "_")


def _metrics(rows: Sequence[Row], where: str) -> pd.DataFrame:
    """The long table of the numbers of whole runs; by question their means, where no row has that mean."""
    lines: dict[tuple[str, int, str], float] = {}
    for row in rows:
        if not row.question:
            key = ("eval" if row.metric.startswith("eval/") else "train", row.step, row.metric)
            require(key not in lines, f"{where}: two rows have {row.metric} at step {row.step}. {REMEDY}")
            lines[key] = row.value
    by_question: dict[tuple[str, int, str], list[float]] = {}
    for row in rows:
        if row.question:
            by_question.setdefault(("eval", row.step, row.metric), []).append(row.value)
    lines |= {key: sum(values) / len(values) for key, values in by_question.items() if key not in lines}
    steps: dict[tuple[str, ...], list[int]] = {}
    values: dict[tuple[str, ...], list[Any]] = {}
    for (kind, step, metric), value in lines.items():
        steps.setdefault((kind, metric), []).append(step)
        values.setdefault((kind, metric), []).append([value])
    return long_table(steps, values)


def _answers(rows: Sequence[Row]) -> pd.DataFrame:
    kept = [
        (ANSWERS[row.metric], row.question, row.step, round(row.value * row.n), row.n)
        for row in rows
        if row.question and row.n is not None
    ]
    table = pd.DataFrame(kept, columns=pd.Index(["mode", "question", "step", "correct", "samples"]))
    twice = table.duplicated(["mode", "question", "step"])
    require(not bool(twice.any()), f"{REPORTED}: a question was answered twice at one step. {REMEDY}")
    return table
