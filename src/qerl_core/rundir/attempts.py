"""What the steps of a run were made with, attempt by attempt, and what must not differ between attempts.

A continued run goes on with the weights, files and data that it began with. Other code, packages and machines are
allowed and kept: env.json says of each attempt whose steps count what it was, under `earlier`, unless it was alike.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qerl_core.checks import require
from qerl_core.rundir.checkpoints import last_checkpoint, step_of
from qerl_core.rundir.checksums import changed
from qerl_core.rundir.read_files import read_object

log = logging.getLogger(__name__)
ENVIRONMENT = "env.json"
MADE_WITH = (  # what steps may differ in, and numbers with them
    *("code", "own_code", "packages", "python"),
    *("device", "cpu", "gpu", "driver", "kernel_tables", "threads"),
)
KEPT = ("after", "commit", "dirty", *MADE_WITH)  # of an earlier attempt
BACK = "(model.id, task.*_file, or a warm start that was made again), or give this run another name"


def recorded_attempt(path: Path, now: Mapping[str, Any]) -> dict[str, Any]:
    """What the env.json of an attempt says, which is made with `now`: that, the step `after` which it begins, and the
    `earlier` attempts whose steps are kept, as far as they differ.

    Raises ConfigError if there are steps on other base weights, files or data (`base`, `inputs`), as far as recorded.
    """
    checkpoint, file = last_checkpoint(path), path / ENVIRONMENT
    after = 0 if checkpoint is None else step_of(checkpoint)
    before: dict[str, Any] = {}
    if checkpoint is not None:
        if reason := changed(path, ENVIRONMENT):
            log.warning("%s: %s. The code and the machine of the steps so far may be unknown", path, reason)
        elif file.exists():
            before = read_object(file, "Delete it, and the same command makes it again")
    if before:
        require_same_base(path, before.get("base"), now.get("base"))
        require_same_inputs(path, before.get("inputs"), now.get("inputs"))
    attempts = [entry for entry in [*before.get("earlier", []), before] if entry and entry.get("after", 0) < after]
    earlier = [{"after": 0} | {key: entry[key] for key in KEPT if key in entry} for entry in attempts]
    return {**now, "after": after, "earlier": [entry for entry in earlier if warned_of_changes(path, entry, now)]}


def require_same_base(path: Path, earlier: object, base: object) -> None:
    """Raise ConfigError if the weights of `base` are not the `earlier` ones, as far as both are of files."""
    known = all(str(digest).startswith("sha256:") for digest in (earlier, base))
    require(
        not known or earlier == base,
        f"{path}: its steps so far are on the base weights {earlier}, and those of the model are now {base}. Put the "
        f"weights back {BACK}",
    )


def require_same_inputs(path: Path, earlier: object, inputs: object) -> None:
    """Raise ConfigError if what the steps so far were made of is now another: digests of files and data by name."""
    if not (isinstance(earlier, Mapping) and isinstance(inputs, Mapping)):
        if isinstance(inputs, Mapping):
            log.info("%s: the version that began it recorded no files and data, so they are not compared", path)
        return
    different = sorted(name for name in earlier.keys() | inputs.keys() if earlier.get(name) != inputs.get(name))
    require(
        not different,
        f"{path}: its steps so far were made with other contents of {', '.join(different)}. Put them back {BACK}",
    )


def warned_of_changes(path: Path, earlier: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether steps were made with something else than `now`, and a warning of what."""
    different = [key for key in MADE_WITH if earlier.get(key) != now.get(key)]
    if different:
        log.warning(
            "%s: steps after step %s were made with other %s, which may change the numbers of the steps from here on. "
            "env.json keeps both, and who compares runs is told (--mixed-code)",
            path,
            earlier.get("after") or 0,
            ", ".join(_change(key, earlier.get(key), now.get(key)) for key in different),
        )
    return bool(different)


def _change(key: str, before: Any, now: Any) -> str:
    if not (isinstance(before, Mapping) and isinstance(now, Mapping)):
        return f"{key} ({before}, now {now})"
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    return f"{key} ({'; '.join(f'{name} {before.get(name)}, now {now.get(name)}' for name in names)})"
