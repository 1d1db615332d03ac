"""Verdicts as data: a record for each contrast that votes on a claim and has an effect, of any number of studies.

Effects are in the unit of their measure, ratios as ratios; `margin` is the smallest one that matters, in the same unit.
Studies with primary contrasts of their own have a record for each of these alone, from the last look that was reached,
and none before the first. `questions` is the number that an interval draws, null if those that were asked are fixed;
`correlation` is that of two arms over units, null of four arms and below three units.
Left out: robustness checks, and claims without an effect.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from qerl_core.checks import require
from qerl_core.process.arguments import printable
from qerl_core.statistics import Estimate
from qerl_studies.claims.claim import ClaimResult, ContrastResult
from qerl_studies.claims.estimate import Comparison
from qerl_studies.claims.evaluate import evaluate_claims
from qerl_studies.claims.match import Stratum, all_accept
from qerl_studies.claims.primary import look
from qerl_studies.claims.registry import QERL, claims_of, families
from qerl_studies.design.design import judged_by_page
from qerl_studies.design.gates import gates, override
from qerl_studies.design.looks import at_last_look, runs_of, with_primary
from qerl_studies.design.primary import MEASURES, Primary
from qerl_studies.design.protocol import first_start, protocol_commit
from qerl_studies.design.sessions import Sessions, study_of
from qerl_studies.effects.estimate import Effect
from qerl_studies.effects.state import GATES, State
from qerl_studies.report.sessions import judged, read_once
from qerl_studies.runs.committed import SETTINGS
from qerl_studies.runs.comparable import load_runs
from qerl_studies.runs.load import Run
from qerl_studies.runs.measure import Measure
from qerl_studies.runs.settings import by_scope

Record = dict[str, Any]
RecordedArm = tuple[str, Any, Sequence[Run]]  # label, options, runs
DIGITS = 6  # significant ones
SETTING = {  # config keys that a reader of a verdict asks for, by their names in its record
    "lr": "optim.lr",
    "steps": "steps",
    "quantizer": "quantizer.name",
    "temperature": "eval.temperature",
    "top_p": "eval.top_p",
}
EARLY = "no look at its primary contrasts yet. Its primary.md, by analysis/study_report.py, tells how far it is"
OWN_WORDS = "its own page judges it, as its study.yaml says"
NO_EFFECT = "its runs give no claim an effect. qerl-bench claims tells what is missing"


def studies_in(folders: Iterable[Path]) -> dict[str, Path]:
    """The studies in `folders`, by their path from there: those in sessions, and what `collect` or `publish` wrote.

    Other runs below a `data` are pilots and decide nothing. Raises ConfigError without any, or if two have one name.
    """
    names: dict[Path, str] = {}
    for folder in folders:
        require(folder.is_dir(), f"{folder} is not a folder: pass a study, or a folder that holds some")
    for folder in map(Path.resolve, folders):
        for file in sorted(folder.rglob(f"{SETTINGS}*")):
            packed = file.parent
            study = study_of(packed) or (packed.parent if packed.name == "data" else packed)
            if study.parent.name == "data":
                continue
            below = study != folder and study.is_relative_to(folder)
            names.setdefault(study, study.relative_to(folder).as_posix() if below else study.name)
    twice = sorted({name for name in names.values() if [*names.values()].count(name) > 1})
    require(bool(names), f"no study in {', '.join(map(str, folders))}: a study is made by qerl-bench collect or study")
    require(not twice, f"several studies are called {', '.join(twice)}: pass folders in which they have other names")
    return {name: folder for folder, name in sorted(names.items(), key=lambda one: one[1])}


def verdicts_of(studies: Mapping[str, Path]) -> dict[str, Any]:
    """What claims.json holds: `studies` by name, and the records of all of them as `verdicts`.

    stderr names the studies that have none. Raises ConfigError for runs that cannot be compared, and if none is left.
    """
    content: dict[str, Any] = {"studies": {}, "verdicts": []}
    lacking: dict[str, str] = {}
    for study, folder in studies.items():
        if judged_by_page(folder):
            lacking[study] = OWN_WORDS
            continue
        packed = any(study_of(file.parent) for file in folder.glob(f"data/*/{SETTINGS}*"))
        sessions = read_once(folder) if packed or with_primary(folder) else None
        if sessions is not None and (primary := sessions.design.primary) is not None:
            sessions = at_last_look(sessions)
            runs = [] if sessions is None else [*sessions.runs.values()]
            records = [] if sessions is None else [*_primary_records(study, sessions, primary)]
        else:
            results, runs = _judged(folder, sessions)
            records = [record for scope in results for record in _records(study, scope, results[scope])]
        if records:
            content["studies"][study] = _described(folder, sessions, runs)
            content["verdicts"] += records
        else:
            lacking[study] = EARLY if sessions is None and with_primary(folder) else NO_EFFECT
    said = [f"{study} has no verdict: {reason}" for study, reason in lacking.items()]
    require(bool(content["verdicts"]), "; ".join(said))
    for line in said:
        print(printable(line), file=sys.stderr)
    return content


def _judged(folder: Path, sessions: Sessions | None) -> tuple[dict[str, list[ClaimResult]], list[Run]]:
    """The verdicts on all claims by model and task, and the runs."""
    if sessions is not None:
        scope, runs, verdicts, later = judged(sessions)
        return {scope: [*verdicts, *(one for of_family in later.values() for one in of_family)]}, runs
    runs = load_runs([folder])
    claims = families().values()
    scopes = by_scope(runs).items()
    return {scope: [one for some in claims for one in evaluate_claims(some, group)] for scope, group in scopes}, runs


def _described(folder: Path, sessions: Sessions | None, runs: Sequence[Run]) -> Record:
    results = [] if sessions is None else gates(sessions.design, [*sessions.probes.values()], sessions.runs)
    passed = [] if sessions is None else override(results, sessions.overridden)
    return {
        "runs": len(runs),
        "released": any("id" in run.config["model"] for run in runs),
        "code": sorted({run.code for run in runs}),
        "machines": sorted({run.block for run in runs}),
        "gates": {one.gate: GATES.get(one.word, one.word) for one in passed},
        "protocol_commit": protocol_commit(folder, first_start(runs)),
    }


def _records(study: str, scope: str, results: Sequence[ClaimResult]) -> Iterator[Record]:
    for one in results:
        for contrast in one.voting:
            if contrast.primary is not None and contrast.effect is not None:
                yield _record(study, scope, one, contrast, contrast.primary, contrast.effect)


def _record(
    study: str, scope: str, result: ClaimResult, contrast: ContrastResult, primary: Comparison, effect: Effect
) -> Record:
    claim, stratum = result.claim, primary.stratum
    greedy = result.greedy.contrasts[result.contrasts.index(contrast)].effect if result.greedy else None
    labels = [side.label for side in primary.contrast.arms]
    arms = [*zip(labels, _options(stratum), [[*runs.values()] for runs in stratum.arms], strict=True)]
    return {
        "study": study,
        "scope": scope,
        "paper": claim.paper,
        "address": claim.address,
        "claim": claim.title,
        "answers_to": [],
        "exploratory": claim.exploratory,
        "expected": claim.expected,
        "contrast": contrast.contrast.label,
        **_measured(claim.measure, claim.measure.margin, arms, effect, effect.whole, effect.questions),
        "greedy": _estimate(claim.measure, greedy.whole) if greedy else None,
        "bases": _bases(claim.measure, arms, effect),
        "look": None,
        "setting": setting_of(stratum.runs),
        "verdict": result.verdict,
        "word": result.word,
        "state": _state(result.state),
        "reason": contrast.reason or result.reason,
    }


def _measured(
    measure: Measure, margin: float, arms: Sequence[RecordedArm], effect: Effect, estimate: Estimate, drawn: int | None
) -> Record:
    """The numbers of a record; `estimate` is the one of `effect` that decides, with so many questions drawn."""
    rows = zip(arms, effect.signs, effect.levels, strict=True)
    return {
        "measure": measure.name,
        "unit": "ratio" if measure.ratio else measure.unit,
        "margin": _shown(measure, margin),
        "arms": [
            {
                "label": label,
                "sign": sign,
                "options": options,
                "level": _shown(measure, level),
                "dose": dose_of(runs),
            }
            for (label, options, runs), sign, level in rows
        ],
        "units": {"kind": effect.unit, "n": estimate.n, "seeds": effect.seeds, "questions": drawn},
        "correlation": None if math.isnan(effect.correlation) else round(effect.correlation, 2),
        **_estimate(measure, estimate),
    }


def _bases(measure: Measure, arms: Sequence[RecordedArm], effect: Effect) -> list[Record]:
    """Each base, by the digest of its weights where that was recorded, with its own effect."""
    names = dict.fromkeys(run.base for run in arms[0][-1])
    effects = effect.by_unit.tolist() if effect.unit == "base" else [effect.whole.value]
    return [{"base": name, "effect": _shown(measure, one)} for name, one in zip(names, effects, strict=True)]


def setting_of(runs: Sequence[Run]) -> Record:
    """Rate, steps, quantizer and way of answering of sampled questions; a list where runs have several values."""
    found: Record = {}
    for name, key in SETTING.items():
        values = dict.fromkeys(run.config_items.get(key) for run in runs)
        known = [value for value in values if value is not None]
        found[name] = known if len(known) > 1 else next(iter(known), None)
    return found


def _state(state: State) -> Record:
    return {"direction": state.direction, "within": state.within, "untested": state.untested}


def _options(stratum: Stratum) -> list[Record]:
    """The options of each arm in which it differs from others."""
    keys = sorted({key for variant in stratum.variants for key in variant if not key.endswith("_target_")})
    differing = [key for key in keys if len({repr(variant.get(key)) for variant in stratum.variants}) > 1]
    return [{key: variant[key] for key in differing if key in variant} for variant in stratum.variants]


def dose_of(runs: Sequence[Run]) -> Record | None:
    """The largest sigma of the noise, and the ratio by which it raised the entropy: means, of runs that recorded them.

    None for runs without noise.
    """
    if all(run.noise == "none" for run in runs):
        return None
    sigmas = [float(run.series("train", "aqn/sigma").max()) for run in runs]
    rises = [float(rise.iloc[0]) for run in runs if len(rise := run.series("train", "aqn/dose_entropy").dropna())]
    recorded = {"sigma": [sigma for sigma in sigmas if sigma > 0], "entropy": rises}
    return {name: _rounded(fmean(values)) if values else None for name, values in recorded.items()}


def _primary_records(study: str, seen: Sessions, primary: Primary) -> Iterator[Record]:
    """The study's own contrasts, of what its last look saw."""
    measure, bases = MEASURES[primary.measure], [*seen.probes]
    (scope,) = by_scope([*seen.runs.values()])
    words = {arm.name: arm.words for arm in seen.design.arms}
    for result in look(seen, primary, len(bases)):
        pair = primary.contrasts[result.name]
        arms = [(name, words[name], [run for base in bases for run in runs_of(seen, name, base)]) for name in pair]
        sides = [runs for *_, runs in arms]
        yield {
            "study": study,
            "scope": scope,
            "paper": None,
            "address": None,
            "claim": f"{result.name}, a primary contrast of the study",
            "answers_to": claims_about(*sides),
            "exploratory": False,
            "expected": "more",
            "contrast": " - ".join(pair),
            **_measured(measure, primary.margin, arms, result.effect, result.over_bases, None),
            "greedy": None,
            "bases": _bases(measure, arms, result.effect),
            "look": {"bases": len(bases), "level": primary.looks[len(bases)], "planned": [*primary.looks]},
            "setting": setting_of([run for of_arm in sides for run in of_arm]),
            "verdict": result.verdict,
            "word": result.state.word,
            "state": _state(result.state),
            "reason": result.exploratory,
        }


def claims_about(treated: Sequence[Run], control: Sequence[Run]) -> list[str]:
    """The titles of QeRL's claims about accuracy whose two arms these are, in whatever setting."""
    sides = [[run.config_items for run in runs] for runs in (treated, control)]
    return [
        claim.title
        for claim in claims_of(QERL)
        if claim.measure.answers
        for contrast in claim.contrasts
        if contrast.votes
        if all(
            all_accept((*claim.where, *arm.where), items)
            for arm, side in zip(contrast.arms, sides, strict=False)
            for items in side
        )
    ]


def _estimate(measure: Measure, estimate: Estimate) -> Mapping[str, float | None]:
    """Effect and 95 % interval, which a single repetition lacks, and some that are all alike."""
    ends = (estimate.low, estimate.high) if estimate.n > 1 and estimate.has_interval else (math.nan, math.nan)
    low, high = (None if math.isnan(end) else _shown(measure, end) for end in ends)
    return {"effect": _shown(measure, estimate.value), "low": low, "high": high}


def _shown(measure: Measure, value: float) -> float:
    """A number of the measure as readers get it."""
    return _rounded(math.exp(value) if measure.ratio else measure.scale * value)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
