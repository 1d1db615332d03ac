"""A study answers for its code: a commit holds it, or the patch that is missing from one lies beside the results."""

from __future__ import annotations

import logging
from pathlib import Path

from qerl_bench.checks import require
from qerl_bench.rundir.checkout import patch_of, uncommitted
from qerl_bench.rundir.environment import code_digest
from qerl_bench.studies.runs.parse import first_names

log = logging.getLogger(__name__)


def account_for_changes(study: Path, out: Path, with_changes: bool) -> None:
    """Raise ConfigError if files are not committed, unless `with_changes`: then OUT/changes-CODE.diff has them.

    CODE is what runs made with them have as `code` in env.json, so that a call with other code writes another file.
    Results in `out` need no commit, and neither do files that no run reads (checkout.uncommitted).
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
