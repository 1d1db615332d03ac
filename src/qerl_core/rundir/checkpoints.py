"""How far a run has come: whether it is finished, and its checkpoints."""

from __future__ import annotations

import json
from pathlib import Path

from qerl_core.checks import ConfigError, require
from qerl_core.rundir.checksums import DONE, Seal, are_seals, broken


def is_finished(path: Path) -> bool:
    """Whether the run in `path` is complete."""
    return (path / DONE).exists()


def checkpoints(path: Path) -> list[Path]:
    return [*(path / "checkpoints").glob("step_*")]


def last_checkpoint(path: Path) -> Path | None:
    """The newest checkpoint folder of a run, or None."""
    return max(checkpoints(path), default=None, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint folder was written."""
    digits = checkpoint.name.removeprefix("step_")
    require(
        digits.isdecimal() and digits.isascii(),
        f"{checkpoint} is not named as a checkpoint is, step_000025: move it out of that folder",
    )
    return int(digits)


def read_manifest(folder: Path) -> dict[str, dict[str, Seal]]:
    """The manifest of a checkpoint: seals of its `files`, and of the growing files of the `run` as they were then.

    Raises ConfigError without one. A manifest from before seals has digests of files, without lengths, and no `run`.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
    except (OSError, ValueError, RecursionError):  # ValueError: neither text nor JSON
        manifest = None
    if isinstance(manifest, dict) and all(isinstance(digest, str) for digest in manifest.values()):
        return {"files": {name: {"bytes": None, "sha256": digest} for name, digest in manifest.items()}, "run": {}}
    if not (
        isinstance(manifest, dict) and manifest.keys() == {"files", "run"} and all(map(are_seals, manifest.values()))
    ):
        raise ConfigError(
            f"checkpoint {folder} is incomplete: its manifest.json is missing or broken. {go_back(folder)}"
        )
    return manifest


def check_checkpoint(folder: Path, quick: bool = False) -> None:
    """Raise ConfigError unless every file of the checkpoint is as its manifest says."""
    for name, expected in read_manifest(folder)["files"].items():
        reason = broken(folder / name, expected, quick)
        require(
            reason is None,
            f"checkpoint {folder} is damaged: {name}: {reason}. {go_back(folder)}",
        )


def go_back(checkpoint: Path) -> str:
    """What to do about a damaged checkpoint."""
    finished = f" and {DONE}" if is_finished(checkpoint.parents[1]) else ""
    return f"Delete this folder{finished} to continue from the checkpoint before it (or from the start)"
