"""A study that was made in sessions: its design, and what each packed session in its folder data/ holds.

    docs/studies/NAME/study.yaml       the design
    docs/studies/NAME/data/SESSION/    what `qerl-bench study` packed

A base belongs to the session that trained arms from it: pretrained again it is another model, so probes of bases
without runs are left out.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl_bench.checks import require
from qerl_bench.gates.design import Arm, Design, read_design
from qerl_bench.gates.runner import finished_runs
from qerl_bench.study.load import Run


@dataclass(frozen=True)
class Sessions:
    """All sessions of a study. `probes` are by base, in order; `session_of` has the folder's name by base."""

    design: Design
    probes: dict[int, dict[str, Any]]
    session_of: dict[int, str]
    runs: dict[tuple[str, int, int], Run]  # by arm, base and seed

    def of_arm(self, name: str) -> list[Run]:
        """The runs of an arm, by base and seed."""
        return [run for (arm, _, _), run in sorted(self.runs.items()) if arm == name]

    @property
    def arms(self) -> list[Arm]:
        """The arms that have runs, in the order of the design."""
        made = {arm for arm, _, _ in self.runs}
        return [arm for arm in self.design.arms if arm.name in made]


def read_sessions(study: Path) -> Sessions:
    """The study in a folder with study.yaml and data/. Raises ConfigError if two sessions trained one base."""
    design = read_design(study / "study.yaml")
    probes: dict[int, dict[str, Any]] = {}
    session_of: dict[int, str] = {}
    runs: dict[tuple[str, int, int], Run] = {}
    for folder in sorted(path.parent for path in (study / "data").glob("*/probes.json")):
        of_session = json.loads((folder / "probes.json").read_text())
        found = finished_runs(design, of_session, folder)
        trained = {base for _, base, _ in found}
        require(
            not trained & session_of.keys(),
            f"{folder} has runs of the bases {sorted(trained & session_of.keys())}, which an earlier session trained "
            "too: leave them out of one of both",
        )
        probes |= {one["base"]: one for one in of_session if one["base"] in trained}
        session_of |= dict.fromkeys(trained, folder.name)
        runs |= found
    require(bool(runs), f"{study / 'data'} has no packed session with runs of {study / 'study.yaml'}")
    return Sessions(design, dict(sorted(probes.items())), dict(sorted(session_of.items())), runs)
