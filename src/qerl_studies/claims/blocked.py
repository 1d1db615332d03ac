"""Arms that the gates of their study stopped: why a committed study has no runs of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from qerl_core.options.fingerprint import flat, scientific
from qerl_studies.claims.match import Contrast, Filter, Items, all_accept
from qerl_studies.design.design import read_design
from qerl_studies.runs.load import Run


@dataclass(frozen=True)
class BlockedArm:
    """An arm of a design, by the gates that failed and the config items that its runs would have had."""

    gates: tuple[str, ...]
    items: Items


def blocked_arms(runs: Iterable[Run]) -> list[BlockedArm]:
    """The arms that every session of the study which `runs` come from has stopped; none for runs in their own folders.

    A session is a committed study with the files gates.json and study.yaml, as `qerl-bench study` writes them.
    """
    folders = [folder for folder in sorted({run.path.parent for run in runs}) if (folder / "gates.json").is_file()]
    stopped = [json.loads((folder / "gates.json").read_text())["stopped"] for folder in folders]
    names = set.intersection(*map(set, stopped)) if stopped else set()
    return [BlockedArm(tuple(stopped[0][name]), _items(folders[0], name)) for name in sorted(names)]


def which_blocked(contrast: Contrast, where: Sequence[Filter], arms: Sequence[BlockedArm]) -> tuple[str, bool] | None:
    """Why an arm that `contrast` needs was stopped, and whether by a gate that still counts; None if none was.

    Damage by a format stops no arm any more, so an arm that it stopped was merely not run.
    """
    for needed in contrast.arms:
        for arm in arms:
            if all_accept((*where, *needed.where), arm.items):
                counts = not all(gate.startswith("damage by") for gate in arm.gates)
                former = "a gate of the study" if counts else "what was a gate of the study and is none now"
                return f"{needed.label} was stopped by {former}: {', '.join(arm.gates)}", counts
    return None


def _items(folder: Path, name: str) -> Items:
    design = read_design(folder / "study.yaml")
    (arm,) = (arm for arm in design.arms if arm.name == name)
    return flat(scientific(design.tree(arm)))
