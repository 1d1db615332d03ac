"""What shows that a study was designed before its data: the commits of its protocol.md and study.yaml.

Both lie in the repository of whoever makes the study, which need not be that of this code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qerl_core.rundir.checkout import git_in

COMMITS = "commits.json"  # what a session packed: the commits of code and study, in order, each pair once
PROTOCOL = "protocol.md"


def protocol_of(folder: Path) -> Path | None:
    """The protocol of the study in `folder`, or of the studies in the folder around it; None without one."""
    return next((place for at in (folder, folder.parent) if (place := at / PROTOCOL).is_file()), None)


def protocol_commit(folder: Path) -> str | None:
    """The commit that brought the protocol of a study; where git does not know it, the one that its first session ran.

    None without both. Not asked where the history is cut off.
    """
    file = protocol_of(folder)
    if file is not None and git_in(folder, "rev-parse", "--is-shallow-repository") == "false":
        commits = git_in(folder, "log", "--follow", "--diff-filter=A", "--format=%H", "--", str(file.resolve()))
        if commits:
            return commits.split("\n")[-1]
    recorded = [one["study"] for packed in sorted(folder.glob(f"data/*/{COMMITS}")) for one in commits_in(packed)]
    return next(iter(recorded), None)


def commits_in(file: Path) -> list[dict[str, Any]]:
    """The pairs of commits that a session has recorded: `code` and `study`, null where there was none."""
    return json.loads(file.read_text()) if file.is_file() else []
