"""A study that was made in sessions: its design, and what each of them packed.

    studies/NAME/study.yaml       the design
    studies/NAME/data/SESSION/    what `qerl-bench study` packed

Each session pretrains its bases, so those of one number differ: a base belongs to the session that trained arms of it.
Copies of one file do not, so that a further session can train further arms of them.
"""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from qerl_core.checks import require
from qerl_core.options.fingerprint import flat
from qerl_studies.design.design import Arm, Design, read_design, read_yaml
from qerl_studies.runs.committed import settings_file
from qerl_studies.runs.find import find_runs
from qerl_studies.runs.load import Run, load_run

log = logging.getLogger(__name__)
PROBES = "probes.json"
MEASURED_BY = ("probe", "dose")  # parts of a design that say how bases are measured


@dataclass(frozen=True, eq=False)
class Sessions:
    """All sessions of a study. `probes` are by base, in order, those without runs too."""

    design: Design
    probes: dict[int, dict[str, Any]]
    runs: dict[tuple[str, int, int], Run]  # by arm, base and seed
    overridden: tuple[str, ...] = ()  # gates that failed in a session and stopped nothing there
    otherwise: Mapping[str, str] = field(default_factory=dict)  # in words: sessions that measured bases differently

    @property
    def session_of(self) -> dict[int, str]:
        """The name of the last folder of each base that has runs, in the order of bases."""
        folders = sorted((base, run.path.parent.name) for (_, base, _), run in self.runs.items())
        return dict(folders)

    @property
    def formats(self) -> list[str]:
        """The weight formats in which all bases were measured, that of the reference first."""
        return [quant for quant in self.design.formats if all(quant in one["formats"] for one in self.probes.values())]

    def of_arm(self, name: str) -> list[Run]:
        """The runs of an arm, by base and seed."""
        return [run for (arm, _, _), run in sorted(self.runs.items()) if arm == name]

    def pairs(self, name: str, other: str) -> tuple[list[Run], list[Run]]:
        """The runs of two arms on the bases and seeds that both have, in the same order."""
        both = sorted((base, seed) for arm, base, seed in self.runs if arm == name and (other, base, seed) in self.runs)
        return [self.runs[name, *cell] for cell in both], [self.runs[other, *cell] for cell in both]

    @property
    def arms(self) -> list[Arm]:
        """The arms that have runs, in the order of the design."""
        made = {arm for arm, _, _ in self.runs}
        return [arm for arm in self.design.arms if arm.name in made]


def read_sessions(design: Design, folders: Sequence[Path]) -> Sessions:
    """What these sessions packed. Raises ConfigError if two of them trained one arm of a base, or arms of a base whose
    weights differ, or if a folder is no session.

    Files of the same name are the same, wherever a session had them: what is in them, digests of bases say. Runs that
    are none of the design, since their words differ otherwise, are left out with a warning.
    """
    probes: dict[int, dict[str, Any]] = {}
    runs: dict[tuple[str, int, int], Run] = {}
    overridden: list[str] = []
    otherwise: dict[str, str] = {}
    designed = _measured_by(design.path)
    for folder in folders:
        packed = read_probes(folder)
        here = [one for one in packed if one["base"] in design.bases]
        # A session that only probed has no settings of runs.
        kept = {path.name for path in find_runs(folder)} if settings_file(folder).is_file() else set()
        there = _with_files_of(design, folder / "study.yaml")
        names = {cell: there.point(words).name for cell, words in words_of_runs(there, here).items()}
        loaded = {cell: load_run(folder / name) for cell, name in names.items() if name in kept}
        others = sorted(kept - {*names.values()})
        if others and len(here) == len(packed):
            listed = ", ".join(others)
            log.warning("%s has runs whose words no arm of %s has; they are left out: %s", folder, design.path, listed)
        trained = {base for _, base, _ in runs}
        others = {
            one["base"] for one in here if one["base"] in trained and one["digest"] != probes[one["base"]]["digest"]
        }
        twice = sorted({cell[1] for cell in loaded if cell in runs or cell[1] in others})
        require(
            not twice,
            f"{folder} has runs of the bases {twice}, and so has a folder before it, of the same arms or of other "
            "weights: leave one out",
        )
        probes |= {one["base"]: one for one in here if one["base"] not in trained}
        runs |= loaded
        overridden += _overridden(folder / "gates.json")
        otherwise |= {folder.name: told} if (told := _otherwise(_measured_by(folder / "study.yaml"), designed)) else {}
    return Sessions(design, dict(sorted(probes.items())), runs, tuple(dict.fromkeys(overridden)), otherwise)


def read_probes(folder: Path) -> list[dict[str, Any]]:
    """The probes that a session packed, as JSON or, in a checkout, gzip of it. Raises ConfigError without any."""
    file = folder / PROBES
    packed = file.with_name(f"{PROBES}.gz")
    if packed.is_file():
        return json.loads(gzip.decompress(packed.read_bytes()))
    require(file.is_file(), f"there is no {file}: a session is a folder that qerl-bench study has written")
    return json.loads(file.read_text())


def _overridden(file: Path) -> list[str]:
    """The gates of a session that failed and were overridden; none without a record.

    Older records do not say so: there a failed gate was that stopped none of its arms. Nor do they say of what kind a
    control was, and call it `control ARM`.
    """
    record: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {"gates": [], "stopped": {}}
    stopping = {gate for by in record["stopped"].values() for gate in by}
    found = [
        one["gate"]
        for one in record["gates"]
        if one.get("overridden", one["passed"] is False and one["gate"] not in stopping)
    ]
    return [gate.replace("control ", "control of gain ") if " of " not in gate else gate for gate in found]


def _with_files_of(design: Design, file: Path) -> Design:
    """`design` with the files of its common words where the session that kept `file` had them."""
    content = read_yaml(file) if file.is_file() else None
    common = content.get("common") if isinstance(content, dict) else None
    theirs = dict(word.split("=", 1) for word in common or [] if isinstance(word, str) and "=" in word)
    return replace(design, common=[_moved(word, theirs) for word in design.common])


def _moved(word: str, theirs: Mapping[str, str]) -> str:
    """`word` with the value of its key in `theirs`, if both are files of one name in other folders."""
    key, _, value = word.partition("=")
    path, other = Path(value), Path(theirs.get(key, value))
    is_file = path.suffix and path.name == other.name and path.parent != other.parent
    return f"{key}={other}" if is_file else word


def _measured_by(file: Path) -> dict[str, Any]:
    """The parts MEASURED_BY of a study.yaml with dotted keys; nothing if it is not there."""
    content = read_yaml(file) if file.is_file() else None
    return flat({key: content.get(key) for key in MEASURED_BY}) if isinstance(content, dict) else {}


def _otherwise(here: Mapping[str, Any], designed: Mapping[str, Any]) -> str:
    """In what a session measured bases otherwise than the design says, in words; empty for nothing, or if not known.

    Runs are found by their words, so all else that decides numbers is that of the design.
    """
    keys = [key for key in {**here, **designed} if here.get(key) != designed.get(key)] if here and designed else []
    return ", ".join(f"{key} was {here.get(key)} (study.yaml: {designed.get(key)})" for key in keys)


def study_of(session: Path) -> Path | None:
    """The folder of the study in sessions that `session` is one of; None if it is no session of such a study."""
    study = session.parent.parent
    packed = session.parent.name == "data" and any(session.glob(f"{PROBES}*"))
    return study if packed and (study / "study.yaml").is_file() else None


def read_study(folder: Path) -> Sessions:
    """The study in a folder with study.yaml and data/, or packed with its design: its bases that have runs.

    Raises ConfigError without any.
    """
    sessions = sorted({path.parent for place in ("data/*", ".") for path in folder.glob(f"{place}/{PROBES}*")})
    study = read_sessions(read_design(folder / "study.yaml"), sessions)
    require(bool(study.runs), f"{folder / 'data'} has no packed session with runs of {folder / 'study.yaml'}")
    return replace(study, probes={base: study.probes[base] for base in study.session_of})


def words_of_runs(design: Design, probes: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int, int], list[str]]:
    """The words of each run whose base was probed, by arm, base and seed; without a dose there is no run."""
    found: dict[tuple[str, int, int], list[str]] = {}
    for arm in design.arms:
        for record in probes:
            sigma = record["doses"].get(arm.name, {}).get("sigma")
            if not arm.dosed or sigma is not None:
                for seed in design.seeds:
                    found[arm.name, record["base"], seed] = design.words(arm, record["base"], seed, sigma)
    return found


def finished_runs(design: Design, probes: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int, int], Run]:
    """The finished runs of the study below root."""
    points = {cell: design.point(words) for cell, words in words_of_runs(design, probes).items()}
    return {cell: load_run(point.run_dir) for cell, point in points.items() if point.finished}
