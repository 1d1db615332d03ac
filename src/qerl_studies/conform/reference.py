"""References: BF16 runs of a committed study, with a tolerance for each measure, in a YAML file.

The file of the project is studies/references.yaml, of a checkout; a file of one's own has the same keys, and its
studies are paths from its folder.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from qerl_core.checks import is_number, require
from qerl_core.process.installation import CONF_DIR
from qerl_studies.claims.match import Filter, all_accept
from qerl_studies.claims.measures import LATE_REWARD
from qerl_studies.design.design import read_yaml
from qerl_studies.design.looks import shown_runs
from qerl_studies.design.primary import MEASURES as OF_STUDIES
from qerl_studies.runs.load import Run, load_run
from qerl_studies.runs.measure import Measure

FILE = CONF_DIR.parent / "studies" / "references.yaml"
MEASURES: dict[str, Measure] = {**OF_STUDIES, "late_reward": LATE_REWARD}
KEYS = {"study", "arm", "asked", "tolerances", "since"}


@dataclass(frozen=True)
class Bf16Reference:
    """`arm` says which runs of `study` are those of BF16; `tolerances` are in units of MEASURES, above 0."""

    name: str
    study: Path
    arm: tuple[Filter, ...]
    asked: tuple[str, ...]
    tolerances: Mapping[str, float]
    since: datetime.date

    @cached_property
    def runs(self) -> list[Run]:
        """The BF16 runs of the study that its looks may see. Raises ConfigError without any."""
        runs = [run for path in shown_runs([self.study]) if (run := load_run(path)).finished]
        found = [run for run in runs if all_accept(self.arm, run.config_items)]
        require(bool(found), f"{self.study} has no run that `arm` of the reference {self.name} describes")
        return found


def read_reference(name: str) -> Bf16Reference:
    """The reference with this name in FILE, or FILE.yaml:NAME of another file.

    Raises ConfigError, with the names there are, for one that is unknown, and for wrong entries.
    """
    place, _, own = name.rpartition(":")
    file, name = (Path(place), own) if place else (FILE, name)
    require(file.is_file(), f"{file} is not there: references are in a checkout, or in a file of yours, FILE.yaml:NAME")
    content = read_yaml(file)
    known = content if isinstance(content, dict) else {}
    require(name in known, f"reference={name} is not known: {file} has {', '.join(map(str, known)) or 'none'}")
    return _reference(file, name, known[name])


def _reference(file: Path, name: str, entry: Any) -> Bf16Reference:
    where = f"{file}: {name}"
    require(isinstance(entry, dict) and {*entry} == KEYS, f"{where} must have the keys {', '.join(sorted(KEYS))}")
    study, arm, asked, tolerances = (entry[key] for key in ("study", "arm", "asked", "tolerances"))
    require(isinstance(study, str) and (file.parent / study).is_dir(), f"{where}.study={study} is no folder beside it")
    require(isinstance(arm, dict) and bool(arm), f"{where}.arm must have the config keys of its BF16 runs")
    require(
        isinstance(tolerances, dict)
        and {*tolerances} <= {*MEASURES}
        and all(is_number(one) and one > 0 for one in tolerances.values()),
        f"{where}.tolerances must have sizes above 0 of {', '.join(MEASURES)}, got {tolerances!r}",
    )
    require(
        isinstance(asked, list) and bool(asked) and {*asked} <= {*tolerances},
        f"{where}.asked must name some of its tolerances, {', '.join(tolerances)}, got {asked!r}",
    )
    since = entry["since"]
    require(isinstance(since, datetime.date), f"{where}.since must be a day, 2026-11-29, got {since!r}")
    given = {str(key): value if isinstance(value, list) else [value] for key, value in arm.items()}
    filters = tuple(Filter(key, tuple(values)) for key, values in given.items())
    return Bf16Reference(name, file.parent / study, filters, tuple(asked), dict(tolerances), since)
