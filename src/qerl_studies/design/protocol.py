"""What shows that a study was designed before its data: the commits of its protocol.md and study.yaml.

Both lie in the repository of whoever makes the study, which need not be that of this code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qerl_core.rundir.checkout import git_in
from qerl_studies.runs.load import Run

COMMITS = "commits.json"  # what a session packed: the commits of code and study, in order, each pair once
PROTOCOL = "protocol.md"


def protocol_of(folder: Path) -> Path | None:
    """The protocol of the study in `folder`, or of the studies in the folder around it; None without one."""
    return next((place for at in (folder, folder.parent) if (place := at / PROTOCOL).is_file()), None)


def protocol_commit(folder: Path, began: float | None) -> str | None:
    """The protocol's commit that held when the first run of a study `began`: the last one before that time.

    Of runs that did not say when they began, the one that brought the protocol. Where git does not know it, the one
    that the first session ran. None without any, and if the protocol came after the first run.
    """
    if commits := protocol_commits(folder):
        before = [commit for commit, when in commits if began is None or when <= began]
        return None if not before else before[0] if began is None else before[-1]
    recorded = [one["study"] for packed in sorted(folder.glob(f"data/*/{COMMITS}")) for one in commits_in(packed)]
    return next(iter(recorded), None)


def protocol_commits(folder: Path) -> list[tuple[str, int]]:
    file = protocol_of(folder)
    return [] if file is None else commits_of(file)


def commits_of(file: Path) -> list[tuple[str, int]]:
    """The commits of a file with their times in unix seconds, the first one first.

    Empty where git does not know it, and not asked where the history is cut off.
    """
    if git_in(file.parent, "rev-parse", "--is-shallow-repository") != "false":
        return []
    lines = git_in(file.parent, "log", "--follow", "--format=%H %ct", "--", str(file.resolve()))
    found = [line.split() for line in (lines or "").splitlines()]
    return [(commit, int(when)) for commit, when in reversed(found)]


def first_start(runs: Iterable[Run]) -> float | None:
    """When the first of these runs began, in unix seconds; None if one of them did not say."""
    starts = [run.done.get("started", math.nan) for run in runs]
    return None if not starts or any(map(math.isnan, starts)) else min(starts)


def commits_in(file: Path) -> list[dict[str, Any]]:
    """The pairs of commits that a session has recorded: `code` and `study`, null where there was none."""
    return json.loads(file.read_text()) if file.is_file() else []
