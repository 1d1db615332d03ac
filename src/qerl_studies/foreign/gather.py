"""From the runs that an importer read to the rows of a reported study, and what of them is not to be judged.

Nothing here knows TRL or verl: their modules read a run into a ForeignRun, whose files may come from anybody.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from qerl_core.checks import require
from qerl_core.options.fingerprint import flat
from qerl_studies.foreign.definitions import definition_of
from qerl_studies.runs.private import Private
from qerl_studies.runs.reported import LARGEST, MAX_TEXT, About, Row
from qerl_studies.runs.reported_runs import run_name

MOST_RUNS = 3_000
SEED = re.compile(r"^(?P<arm>.*?)[-_./ ]*(?:seed[-_ ]?|(?<![A-Za-z])s)(?P<seed>\d{1,18})$")  # bs8 is a batch
NEAR = 1e-3  # of a mean that was logged in FP32, relative, from the same mean of its completions
PLACES = re.compile(
    r"(?:^|[._])(?:dir|root|token|key|(?:run|group|job)_name|id|url|seed|host|port|user|project\w*|experiment\w*)$"
)
PATH = re.compile(r"(?:^|[._])path$")  # whose last part decides: of a model, of a function
OF_MACHINE = re.compile(r"tim(?:e|ing)|perf/|speed|throughput|memory|per_sec")  # numbers that a rerun has anew
ALL_ALIKE = 4  # different values, all of which no two seeds have in common


@dataclass
class ForeignRun:
    """One run: the folder or file it was read from, its numbers by step and key, what its config says with dotted keys,
    right answers by step and question as (right, answers), and why it is not judged, if so."""

    name: str  # as the others called it: ARM-sSEED
    source: str
    logged: dict[int, dict[str, float]]
    options: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    counts: dict[str, int] = field(default_factory=dict)  # completions of a step, by key
    answers: dict[tuple[str, int, str], tuple[int, int]] = field(default_factory=dict)
    extra: dict[tuple[int, str], tuple[float, str]] = field(default_factory=dict)  # numbers that were computed here
    refused: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def arm(self) -> str:
        found = SEED.match(self.name)
        return found["arm"] if found and found["arm"] else self.name


def named_seed(name: str) -> int | None:
    """The seed in a name like nvfp4-s3, nvfp4_seed_3 or nvfp4/seed3; None without one."""
    found = SEED.match(name)
    return int(found["seed"]) if found else None


def study_of(tool: str, study: str, model: str, task: str, runs: Sequence[ForeignRun]) -> tuple[list[Row], About]:
    """The rows and what is said about them. Raises ConfigError without runs, and for more than MOST_RUNS."""
    require(bool(runs), "no run was found")
    require(len(runs) <= MOST_RUNS, f"{len(runs):,} runs, more than the {MOST_RUNS:,} of a study")
    program = tool.partition(" ")[0].lower()
    unjudged: dict[str, str] = {}
    twice = Counter((run.arm, run.seed) for run in runs)
    settings = _settings(runs)
    reasons = [[*run.refused, *_why_not(run, twice[run.arm, run.seed], settings[run.arm])] for run in runs]
    runs = [replace(run, seed=None) if twice[run.arm, run.seed] > 1 else run for run in runs]
    for run, told in zip(runs, reasons, strict=True):
        if told:
            unjudged[run_name(run.arm, run.seed, run.source)] = "; ".join(told)
    rows = [row for run in runs for row in _rows(program, study, model, task, run)]
    notes = dict.fromkeys(note for run in runs for note in run.notes)
    return rows, About(tool, _arms(runs), unjudged, [*notes])


def with_copies(rows: Sequence[Row], about: About) -> About:
    """`about` with runs that have the numbers of another one. Of one arm they count once, of two nobody knows whose
    they are."""
    numbers: dict[tuple[str, str], set[tuple[Any, ...]]] = {}
    for row in rows:
        if math.isfinite(row.value) and not OF_MACHINE.search(row.metric):
            known = numbers.setdefault((run_name(row.arm, row.seed, row.source), row.arm), set())
            known.add((row.step, row.metric, row.question, row.value, row.n))
    first: dict[frozenset[tuple[Any, ...]], tuple[str, str]] = {}
    copies = {}
    for (name, arm), known in numbers.items():
        if name not in about.unjudged and len({value for *_, value, _ in known}) >= ALL_ALIKE:
            other, of = first.setdefault(frozenset(known), (name, arm))
            for one, twin in ((name, other), *([(other, name)] if of != arm else [])):
                if one != twin:
                    copies[one] = f"it has the numbers of {twin}, all of them: a copy, or a seed that changed nothing?"
    return replace(about, unjudged={**about.unjudged, **copies})


def _settings(runs: Sequence[ForeignRun]) -> dict[str, list[dict[str, Any]]]:
    """The different settings of the runs of each arm."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        known, own = found.setdefault(run.arm, []), _deciding(run.options)
        if own not in known:
            known.append(own)
    return found


def _why_not(run: ForeignRun, namesakes: int, settings: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What keeps a run from being compared: of its arm, how many runs have its seed, and all settings."""
    if run.seed is None:
        yield "its seed is not known, so it has no counterpart in another arm"
    elif namesakes > 1:
        yield f"two runs of the arm have seed {run.seed}: which of them counts is not known"
    if len(settings) > 1:
        own = _deciding(run.options)
        keys = sorted({key for other in settings for key in {**own, **other} if own.get(key) != other.get(key)})
        yield f"runs of its arm have other options ({', '.join(keys[:5])}): no arm of one setting"


def _arms(runs: Sequence[ForeignRun]) -> dict[str, dict[str, Any]]:
    """Of each arm the options that not all runs share; those of its first run."""
    private = Private.here()
    first = {run.arm: run for run in reversed(runs)}
    varying = {
        key
        for one in first.values()
        for key in {*_deciding(one.options)}
        if len({json.dumps(other.options.get(key), default=str) for other in first.values()}) > 1
    }
    return {
        arm: {key: private.hidden(_short(_deciding(run.options).get(key))) for key in sorted(varying)}
        for arm, run in first.items()
    }


def _deciding(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options without names, places and seeds, which belong to one run and change no setting."""
    return {
        key: PurePath(str(value)).name if value and PATH.search(key) else value
        for key, value in options.items()
        if not PLACES.search(key)
    }


def _short(value: Any) -> Any:
    return value if isinstance(value, int | float | bool | None) else str(value)[:MAX_TEXT]


def _rows(program: str, study: str, model: str, task: str, run: ForeignRun) -> Iterator[Row]:
    def row(step: int, metric: str, value: float, n: int | None, text: str, question: str = "") -> Row:
        return Row(study, run.arm, run.seed, model, task, step, metric, question, value, n, text, run.source)

    for step, numbers in sorted(run.logged.items()):
        for key, value in numbers.items():
            found = definition_of(program, key, run.options)
            count = run.counts.get(str(step)) if found.mean in ("completions", "spread") else None
            yield row(step, found.named(program, key), value, count, found.text)
    for (step, metric), (value, text) in sorted(run.extra.items()):
        yield row(step, metric, value, run.counts.get(str(step)), text)
    for (metric, step, question), (right, count) in sorted(run.answers.items()):
        yield row(step, metric, right / count, count, "share of its answers that are right", question)


def check_against(run: ForeignRun, key: str, computed: Mapping[int, float]) -> None:
    """Refuse a run whose log says another mean than its completions, or that has completions of steps it never logged.

    Both are what a rerun leaves behind that wrote into the folder of an earlier run.
    """
    later = sorted({*computed} - {*run.logged})
    if later:
        run.refused.append(
            f"completions of {len(later)} steps that its log does not have, the first {later[0]}: a rerun?"
        )
    for step in sorted({*computed} & {*run.logged}):
        said, found = run.logged[step].get(key, math.nan), computed[step]
        if math.isfinite(said) and abs(said - found) > NEAR * max(1.0, abs(said)):
            run.refused.append(f"step {step}: {key} is {said:g} in its log and {found:g} of its completions: a rerun?")
            return


def check_order(run: ForeignRun, steps: Sequence[int]) -> None:
    """Refuse a run whose log goes back, or has a step twice: two runs wrote into it."""
    twice = [step for step, count in Counter(steps).items() if count > 1]
    if twice or [*steps] != sorted(steps):
        run.refused.append(f"its log has step {(twice or steps)[0]} twice or goes back: a rerun wrote into it")


def flat_options(content: Any) -> dict[str, Any]:
    return flat(content) if isinstance(content, dict) else {}


def numbers_of(entry: Mapping[str, Any]) -> dict[str, float]:
    """What of an entry of a log is a number; NaN for null and for what is not finite, or larger than LARGEST."""
    return {
        str(key): float(value) if value is not None and -LARGEST <= value <= LARGEST else math.nan
        for key, value in entry.items()
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    }
