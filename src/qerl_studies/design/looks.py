"""What the looks of a study with primary contrasts see: the first bases that have all arms, and before these nothing.

A base counts when all arms that the contrasts name are finished on it, on one machine and card; the first so many, by
the names of their sessions and then in the order of the design, are a look: one that comes later changes no look that
was made. Whatever shows numbers of arms, of the study or of its packed runs, asks here.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from qerl_core.checks import require
from qerl_core.process.arguments import printable
from qerl_studies.design.design import read_yaml
from qerl_studies.design.primary import Primary
from qerl_studies.design.sessions import Sessions, read_study, study_of
from qerl_studies.runs.committed import find_study
from qerl_studies.runs.find import chosen_runs
from qerl_studies.runs.load import Run


@dataclass(frozen=True)
class Counted:
    """The bases that count, in the order in which looks take them, and why others with some runs do not."""

    bases: tuple[int, ...]
    left_out: dict[int, str]


def counted(study: Sessions, primary: Primary) -> Counted:
    bases, left_out = [], {}
    for base in study.design.bases:
        runs = {arm: runs_of(study, arm, base) for arm in primary.arms}
        lacking = [arm for arm, found in runs.items() if len(found) < len(study.design.seeds)]
        machines = {run.block for found in runs.values() for run in found}
        if lacking and machines:
            left_out[base] = f"no finished run of {', '.join(lacking)}"
        elif len(machines) > 1:
            left_out[base] = f"its arms ran on different machines: {'; '.join(sorted(machines))}"
        elif machines:
            bases.append(base)
    session_of = study.session_of
    return Counted(tuple(sorted(bases, key=lambda base: session_of[base])), left_out)


def runs_of(study: Sessions, arm: str, base: int) -> list[Run]:
    """Those of each seed that is finished."""
    return [study.runs[arm, base, seed] for seed in study.design.seeds if (arm, base, seed) in study.runs]


def looks_reached(study: Sessions, primary: Primary) -> list[int]:
    return [count for count in primary.looks if count <= len(counted(study, primary).bases)]


def at_last_look(study: Sessions) -> Sessions | None:
    """The study as the last look that is reached sees it, with no other base; None before the first."""
    assert study.design.primary is not None
    reached = looks_reached(study, study.design.primary)
    if not reached:
        return None
    bases = counted(study, study.design.primary).bases[: reached[-1]]
    runs = {cell: run for cell, run in study.runs.items() if cell[1] in bases}
    return replace(study, runs=runs, probes={base: study.probes[base] for base in bases})


def seen_runs(study: Sessions) -> Mapping[tuple[str, int, int], Run]:
    """All runs of a study without primary contrasts; of another those that its last look sees."""
    if study.design.primary is None:
        return study.runs
    return {} if (seen := at_last_look(study)) is None else seen.runs


def shown_runs(folders: Iterable[str | os.PathLike[str]], without: Sequence[str] = ()) -> list[Path]:
    """`chosen_runs` less those packed runs of studies with primary contrasts that no look sees, which stderr names.

    Raises ConfigError if none is left.
    """
    primary_of = cache(with_primary)
    seen_in = cache(lambda study: {run.path for run in seen_runs(read_study(study)).values()})
    shown: list[Path] = []
    hidden: Counter[Path] = Counter()
    for path in chosen_runs(folders, without):
        kept = find_study(path.resolve())
        study = None if kept is None else primary_of(kept[0].path)
        if study is None or path.resolve() in seen_in(study):
            shown.append(path)
        else:
            hidden[study] += 1
    what = "are left out, which no look at its primary contrasts sees"
    said = [f"{many} runs of {study} {what}" for study, many in hidden.items()]
    require(bool(shown), f"{'; '.join(said)}: its primary.md, by analysis/study_report.py, tells how far it is")
    for line in said:
        print(printable(line), file=sys.stderr)
    return shown


def with_primary(session: Path) -> Path | None:
    """The folder of the study with primary contrasts that a packed session belongs to, or is; None without one.

    Raises ConfigError for a study.yaml that cannot be read.
    """
    folder = study_of(session) or session
    design = folder / "study.yaml"
    content = read_yaml(design) if design.is_file() else None
    return folder if isinstance(content, dict) and content.get("primary") is not None else None
