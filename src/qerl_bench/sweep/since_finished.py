"""What a finished run was made with and is now another: a user's own code, a calibration text, data."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from qerl_core.checks import ConfigError
from qerl_core.options.fingerprint import flat
from qerl_core.options.user_options import folders
from qerl_core.rundir.checksums import DONE, digest
from qerl_core.rundir.read_files import REMEDY, read_object
from qerl_core.sweeps.points import Point

log = logging.getLogger(__name__)
DATA = ("task.train_file", "task.eval_file")
TEXT = "the calibration text"


def warn_of_changes(points: Sequence[Point]) -> None:
    """Warn of each thing that is now another than finished runs were made with."""
    for name in dict.fromkeys(name for point in points for name in point.changed):
        from qerl_studies.runs.parse import first_names  # which imports pandas

        log.warning(
            "%s is not what finished runs were made with (%s), and they are not made again. Delete their folders for "
            "that, or give root=DIR",
            name,
            first_names(point.name for point in points if name in point.changed),
        )


def changed_since(run_dir: Path, tree: Mapping[str, Any]) -> list[str]:
    """The own code, by its recorded name, and inputs, as messages call them, that a finished run had otherwise.

    What cannot be found or read now is left out: a finished run needs nothing of it. Data are read if their files were
    written since the run began.
    """
    options = {key: Path(value) for key, value in flat(dict(tree)).items() if isinstance(value, str)}
    try:
        made_with = read_object(run_dir / "env.json", REMEDY)
        began = read_object(run_dir / DONE, REMEDY).get("started") or 0.0
    except (ConfigError, OSError):  # an earlier version's, or damaged, which others say
        return []
    inputs, changed = made_with.get("inputs") or {}, []
    for name, version in sorted((made_with.get("own_code") or {}).items()):
        named = [file for file in options.values() if file.name == name and file.is_file()]
        changed += [name] if differs(named or [folder / name for folder in folders()[1:]], version) else []
    text = options.get("quantizer.calibration.file")
    changed += [TEXT] if text is not None and differs([text], inputs.get(TEXT)) else []
    data = [options[key] for key in DATA if key in options and options[key].is_file()]
    if len(data) == len(DATA) and any(written_s(file) > began for file in data):  # none is of a hub
        changed += changed_data(run_dir, tree, inputs)
    return changed


def differs(places: Sequence[Path], version: str | None) -> bool:
    """Whether a file is in one of these places, and in none has this SHA-256; False if that is not known."""
    there = [place for place in places if place.is_file()]
    return version is not None and bool(there) and all(digest(place) != version for place in there)


def written_s(file: Path) -> float:
    """When a file was written, or put in its place, in unix seconds."""
    return max(file.stat().st_mtime, file.stat().st_ctime)


def changed_data(run_dir: Path, tree: Mapping[str, Any], recorded: Mapping[str, str]) -> list[str]:
    from qerl_bench.config import build
    from qerl_bench.eval.inputs import inputs_of

    try:
        now = inputs_of(build(OmegaConf.create(dict(tree))), None, None)
    except Exception as error:  # whatever a task of the user's own raises: a finished run is not in need of it
        log.info("%s: its data cannot be read now, so they are not compared (%s)", run_dir, error)
        return []
    return [name for name, version in now.items() if name != TEXT and recorded.get(name, version) != version]
