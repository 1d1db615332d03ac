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
from qerl_core.rundir.checksums import digest
from qerl_core.rundir.read_files import REMEDY, read_object
from qerl_core.sweeps.points import Point

log = logging.getLogger(__name__)


def warn_of_changes(points: Sequence[Point]) -> None:
    """Warn of each thing that is now another than finished runs were made with."""
    changed: dict[str, list[str]] = {}
    for point in points:
        for name in point.changed:
            changed.setdefault(name, []).append(point.name)
    for name, runs in changed.items():
        from qerl_studies.runs.parse import first_names  # which imports pandas

        log.warning(
            "%s is not what finished runs were made with (%s), and they are not made again. Delete their folders for "
            "that, or give root=DIR",
            name,
            first_names(runs),
        )


def changed_since(run_dir: Path, tree: Mapping[str, Any]) -> list[str]:
    """The own code, by its recorded name, and inputs, as messages call them, that a finished run had otherwise.

    What cannot be found or read now is left out: a finished run needs nothing of it.
    """
    file, options = run_dir / "env.json", flat(dict(tree))
    made_with = read_object(file, REMEDY) if file.is_file() else {}
    changed = []
    for name, version in sorted((made_with.get("own_code") or {}).items()):
        named = [Path(value) for value in options.values() if isinstance(value, str) and Path(value).name == name]
        now = next((place for place in [*(folder / name for folder in folders()), *named] if place.is_file()), None)
        changed += [name] if now is not None and digest(now) != version else []
    if any(value and key.endswith(("_file", ".file")) for key, value in options.items()):
        changed += changed_inputs(tree, made_with.get("inputs") or {})
    return changed


def changed_inputs(tree: Mapping[str, Any], recorded: Mapping[str, str]) -> list[str]:
    from qerl_bench.config import build
    from qerl_bench.eval.inputs import inputs_of

    try:
        now = inputs_of(build(OmegaConf.create(dict(tree))), None, None)
    except (ConfigError, OSError):
        return []
    return [name for name, version in now.items() if recorded.get(name, version) != version]
