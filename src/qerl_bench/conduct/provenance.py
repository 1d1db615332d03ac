"""The provenance of a study: code and design must be committed, or the difference is stored beside the results."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from qerl_core.checks import require
from qerl_core.rundir.checkout import git, git_in, patch_of, uncommitted
from qerl_core.rundir.durable import write_atomically
from qerl_core.rundir.environment import code_digest
from qerl_studies.design.protocol import COMMITS, commits_in, protocol_of
from qerl_studies.runs.parse import first_names

log = logging.getLogger(__name__)


def account_for_changes(study: Path, out: Path, with_changes: bool) -> None:
    """Raise ConfigError if files are not committed, unless `with_changes`: then OUT/changes-CODE.diff has them.

    CODE is what runs made with them have as `code` in env.json, so that a call with other code writes another file.
    Results in `out` need no commit, and neither do files that no run reads (checkout.uncommitted). Of a study in
    another repository than the code, OUT/commits.json has both commits (`account_for_design`).
    """
    changes = uncommitted(study, out)
    if changes is None:
        log.warning("git knows no commit of this code, so its digest %s alone names it", code_digest())
    elif changes:
        require(
            with_changes,
            f"{len(changes)} files are not committed, and no third party could tell what this study ran: "
            f"{first_names(changes)}. Commit them, or let their changes be kept beside the results: with_changes=true",
        )
        out.mkdir(parents=True, exist_ok=True)
        kept = out / f"changes-{code_digest()}.diff"
        kept.write_bytes(patch_of(study, out))
        log.info("%d files are not committed: %s", len(changes), kept)
    repository = git_in(study.parent, "rev-parse", "--show-toplevel")
    if repository == git("rev-parse", "--show-toplevel"):
        return
    if repository is None:
        log.warning("git knows no commit of %s, so none shows that it was written before its runs", study)
    else:
        account_for_design(study, out, with_changes)


def account_for_design(study: Path, out: Path, with_changes: bool) -> None:
    """Add the commits of the code and of a study in another repository to OUT/commits.json.

    That of the study is the last one of study.yaml and its protocol.md. It is null where they are not committed as they
    are, which raises ConfigError unless `with_changes`. The design as it is run lies in `out` in any case.
    """
    files = [file.resolve() for file in (study, protocol_of(study.parent)) if file is not None]
    changed = [str(file) for file in files if not _is_committed(file)]
    last = git_in(study.parent, "log", "-1", "--format=%H", "--", *map(str, files))
    require(
        with_changes or not changed,
        f"{' and '.join(changed)} are not committed, and no third party could tell that they were written before the "
        "runs of this study. Commit them, or go on without: with_changes=true",
    )
    pair, known = {"code": git("rev-parse", "HEAD"), "study": None if changed else last}, commits_in(out / COMMITS)
    if pair not in known:
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(out / COMMITS, json.dumps([*known, pair], indent=1) + "\n")


def _is_committed(file: Path) -> bool:
    """Whether a commit of the repository that holds the file has it as it is."""
    known, changes = (git_in(file.parent, *words, "--", str(file)) for words in (("log", "-1"), ("status", "--short")))
    return bool(known) and changes == ""
