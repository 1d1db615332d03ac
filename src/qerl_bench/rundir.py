"""The run directory: the files of one run, as runner, analysis and notebooks know them.

A kill at any moment loses at most the steps since the last checkpoint: lines are appended and flushed, every other file
is written under another name and then renamed, and done.json comes last.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from qerl_bench.checks import ConfigError, require
from qerl_bench.environment import environment, sha256
from qerl_bench.records import Group
from qerl_bench.renamed_keys import require_current

log = logging.getLogger(__name__)
ELSEWHERE = "root=DIR or name=NAME; a name that is left out is derived from the config"
NO_EFFECT = frozenset({"root", "name", "logger", "save_every", "hydra"})  # config keys that do not affect the numbers
ROLLOUTS_KEPT = 4  # completions per step in rollouts.jsonl


def is_finished(path: Path) -> bool:
    """Whether the run in `path` is complete."""
    return (path / "done.json").exists()


def check_run_dir(path: Path, cfg: DictConfig, elsewhere: str = ELSEWHERE) -> None:
    """Raise ConfigError, with `elsewhere` as the remedy, if the run can neither start nor continue in `path`."""
    place = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    require(
        place.is_dir() and os.access(place, os.W_OK),
        f"cannot write the run to {path}: {place} is not a writable folder. Choose another place: {elsewhere}",
    )
    if (path / "config.yaml").exists():
        refuse_other_config(path, cfg, elsewhere)
    checkpoint = last_checkpoint(path)
    if checkpoint is not None:
        check_checkpoint(checkpoint)


def refuse_other_config(path: Path, cfg: DictConfig, elsewhere: str) -> None:
    """Raise ConfigError if `path` holds a run of a config that gives other numbers."""
    there = as_dict(OmegaConf.load(path / "config.yaml"))
    require_current(there, path)
    stored, wanted = (
        flat({key: value for key, value in container.items() if key not in NO_EFFECT})
        for container in (there, as_dict(cfg))
    )
    different = sorted(key for key in stored.keys() | wanted.keys() if stored.get(key) != wanted.get(key))
    shown = ", ".join(f"{key} is {stored.get(key)!r} there and {wanted.get(key)!r} here" for key in different[:4])
    require(
        not different,
        f"{path} holds a run of another config ({len(different)} differences: {shown}). Nothing was changed there. "
        f"Choose another place: {elsewhere}",
    )


def as_dict(cfg: Any) -> dict[str, Any]:
    return OmegaConf.to_container(cfg, resolve=True)  # type: ignore[return-value]


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one dict with dotted keys."""
    items: dict[str, Any] = {}
    for key, value in tree.items():
        items |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return items


def last_checkpoint(path: Path) -> Path | None:
    """The newest checkpoint folder of a run, or None."""
    return max((path / "checkpoints").glob("step_*"), default=None, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint folder was written."""
    return int(checkpoint.name.removeprefix("step_"))


def check_checkpoint(folder: Path) -> None:
    """Raise ConfigError unless every file of the checkpoint has the checksum that its manifest lists."""
    remedy = "Delete this folder to continue from the checkpoint before it (or from the start)"
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError):  # ValueError: neither text nor JSON
        manifest = None
    if not isinstance(manifest, dict):
        raise ConfigError(f"checkpoint {folder} is incomplete: its manifest.json is missing or broken. {remedy}")
    for name, digest in manifest.items():
        file = folder / name
        require(file.is_file() and sha256(file) == digest, f"checkpoint {folder} is damaged: {name}. {remedy}")


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that `path` holds either all of its old content or all of the new."""
    writing = path.with_name(f".{path.name}.writing")
    writing.write_text(text)
    os.replace(writing, path)


class RunDir:
    """The folder of one run, locked by this process. Use as a context manager."""

    def __init__(self, path: Path, cfg: DictConfig, elsewhere: str = ELSEWHERE) -> None:
        check_run_dir(path, cfg, elsewhere)
        self.path = path
        self.started = time.time()
        self.spent_s = 0.0  # by earlier attempts, up to the checkpoint that this one continues from
        path.mkdir(parents=True, exist_ok=True)
        self._lock = open(path / ".lock", "w")  # noqa: SIM115 - held until close
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise ConfigError(
                f"another process is running in {path}; wait for it, or choose another place: {elsewhere}"
            ) from None
        if not is_finished(path):
            write_atomically(path / "config.yaml", OmegaConf.to_yaml(cfg))

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.close()

    @property
    def finished(self) -> bool:
        return is_finished(self.path)

    @property
    def wall_s(self) -> float:
        """Seconds of this attempt, and of earlier ones as far as their steps are kept."""
        return self.spent_s + time.time() - self.started

    def write_environment(self, device: str, base: str | None) -> None:
        """Write env.json: code, packages, machine, and `base`, the digest of the base weights (`model/digest.py`).

        The env.json of an earlier attempt becomes env_<n>.json.
        """
        path = self.path / "env.json"
        if path.exists():
            os.replace(path, self.path / f"env_{len(list(self.path.glob('env_*.json'))) + 1}.json")
        write_atomically(path, json.dumps(environment(device) | {"base": base}, indent=1))

    def resume_step(self) -> int:
        """The step of the last checkpoint, 0 without one. Deletes the records of later steps."""
        checkpoint = last_checkpoint(self.path)
        step = 0 if checkpoint is None else step_of(checkpoint)
        for name in ("metrics.jsonl", "rollouts.jsonl"):
            self._cut(self.path / name, step if checkpoint is not None else -1)
        shutil.rmtree(self.path / "checkpoints" / ".writing", ignore_errors=True)
        return step

    def _cut(self, path: Path, step: int) -> None:
        """Keep the records up to `step` and delete the rest, half a line included."""
        if not path.exists():
            return
        kept = []
        for line in path.read_text().splitlines(keepends=True):
            record = json.loads(line) if line.endswith("\n") else {"step": math.inf}
            # The evaluation after the last step comes behind its checkpoint and is made again; that of step 0 is kept.
            evaluated_after = record.get("kind") == "eval" and record["step"] == step > 0
            if record["step"] > step or evaluated_after:
                break
            kept.append(line)
        write_atomically(path, "".join(kept))

    @contextmanager
    def checkpoint(self, step: int) -> Iterator[Path]:
        """An empty folder to fill; afterwards it is sealed with a manifest and renamed to checkpoints/step_<step>."""
        writing = self.path / "checkpoints" / ".writing"
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
        yield writing
        files = sorted(file for file in writing.rglob("*") if file.is_file())
        manifest = {str(file.relative_to(writing)): sha256(file) for file in files}
        (writing / "manifest.json").write_text(json.dumps(manifest, indent=1))
        os.replace(writing, self.path / "checkpoints" / f"step_{step:06d}")

    def log(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        """Append the metrics of a step to metrics.jsonl; `kind` is "train" or "eval"."""
        self.append("metrics.jsonl", [{"kind": kind, "step": step, "time": time.time(), **metrics}])

    def log_rollouts(self, step: int, groups: list[Group]) -> None:
        """Append the first few completions of a step, with their rewards, to rollouts.jsonl."""
        graded = [pair for group in groups for pair in zip(group.rollouts, group.rewards, strict=True)]
        records = [
            {
                "step": step,
                "prompt": rollout.prompt.id,
                "completion": rollout.text,
                "gold": rollout.prompt.answer,
                "reward": reward.total,
                **reward.parts,
            }
            for rollout, reward in graded[:ROLLOUTS_KEPT]
        ]
        self.append("rollouts.jsonl", records)

    def append(self, name: str, records: list[dict[str, Any]]) -> None:
        """Append JSON lines to a file of the run and flush it. Non-finite numbers become null, with a warning."""
        with open(self.path / name, "a") as file:
            for record in records:
                for key, value in record.items():
                    if isinstance(value, float) and not math.isfinite(value):
                        log.warning("%s of step %s is %s, written as null", key, record.get("step"), value)
                finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
                file.write(json.dumps(finite, allow_nan=False) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All records of metrics.jsonl."""
        path = self.path / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def finish(self) -> None:
        """Write done.json, which marks the run as finished, with the last value of every metric."""
        records = self.metrics()
        final = {
            key: value for record in records for key, value in record.items() if key not in ("kind", "step", "time")
        }
        peaks = [record["memory/peak_gib"] for record in records if record.get("memory/peak_gib") is not None]
        done = {
            "wall_s": round(self.wall_s, 3),
            "peak_memory_gib": max(peaks, default=None),
            "final": final,
        }
        write_atomically(self.path / "done.json", json.dumps(done, indent=1))
