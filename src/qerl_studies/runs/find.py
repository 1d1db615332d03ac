"""Finds runs: folders of runs, and committed studies."""

from __future__ import annotations

import fnmatch
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from qerl_core.checks import ConfigError, require
from qerl_core.process.arguments import wrap_lines
from qerl_studies.runs.committed import SETTINGS, find_study, is_study, read_study
from qerl_studies.runs.reported import REPORTED


def find_runs(root: str | os.PathLike[str]) -> list[Path]:
    """The runs at or below `root`, sorted: each folder with metrics.jsonl, or with config.yaml and checkpoints, and
    STUDY/NAME for each run of a committed study.

    Folders inside a run or a study are not searched. A study beside runs that cannot be read is left out and told to
    stderr. Raises ConfigError if there is no such folder, or no run, or for a study that stands alone.
    """
    root = Path(root)
    if find_study(root) is not None:
        return [root]
    require(root.is_dir(), f"{root} is not a folder: pass a run directory, or a folder that holds runs")
    runs: list[Path] = []
    unread: list[ConfigError] = []
    for folder, subfolders, files in os.walk(root):
        if "metrics.jsonl" in files or ("config.yaml" in files and "checkpoints" in subfolders):
            runs.append(Path(folder))
            subfolders.clear()
        elif {SETTINGS, f"{SETTINGS}.gz", REPORTED} & {*files} and is_study(Path(folder)):
            subfolders.clear()
            try:
                runs += [Path(folder) / name for name in read_study(Path(folder)).runs]
            except ConfigError as error:
                unread.append(error)
    for error in unread:
        if not runs:
            raise error
        print(wrap_lines(f"left out: {error}"), file=sys.stderr)
    require(
        bool(runs),
        f"no run in {root}: a run is a folder with config.yaml and metrics.jsonl. "
        "Pass the folder that holds them (runs/ by default), or start one with python src/run.py",
    )
    return sorted(runs)


def chosen_runs(folders: Iterable[str | os.PathLike[str]], without: Sequence[str] = ()) -> list[Path]:
    """Every run at or below `folders`, but those whose names fit a pattern of `without`.

    Raises ConfigError as `find_runs` and `leave_out`.
    """
    return leave_out([path for folder in folders for path in find_runs(folder)], without)


def by_folder(paths: Iterable[Path]) -> dict[Path, list[Path]]:
    """The runs by the folder of their study, which holds them or whose `data` does; each once."""
    folders: dict[Path, list[Path]] = {}
    for path in dict.fromkeys(paths):
        folder = path.absolute().parent
        folders.setdefault(folder.parent if folder.name == "data" and is_study(folder) else folder, []).append(path)
    return folders


def leave_out(paths: Sequence[Path], without: Sequence[str]) -> list[Path]:
    """The folders whose names fit no pattern of `without`. Raises ConfigError for a pattern that fits none."""
    idle = [pattern for pattern in without if not fnmatch.filter([path.name for path in paths], pattern)]
    require(not idle, f"--except {' '.join(idle)} fits none of the {len(paths)} runs; * stands for anything: '*-s1-*'")
    return [path for path in paths if not any(fnmatch.fnmatchcase(path.name, pattern) for pattern in without)]
