"""The run directory: the files of one run, as runner, analysis and notebooks know them.

A kill or a power loss at any moment loses at most the steps since the last checkpoint: lines are appended and flushed,
every other file is written under another name, synced and then renamed, and done.json comes last. Seals (seals.py) tell
a damaged file.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from omegaconf import DictConfig, OmegaConf

from qerl_bench import energy
from qerl_bench.checks import ConfigError, TrainingStopped, require
from qerl_bench.durable import make_folder, replace, sync, sync_tree
from qerl_bench.environment import environment
from qerl_bench.locks import RunLocked, holder, lock
from qerl_bench.seals import (
    DONE,
    GROWING,
    SEALS,
    Seal,
    are_seals,
    broken,
    changed,
    find_damage,
    replacing,
    seal,
    seals_of_growing,
    settle,
)
from qerl_bench.storage import failure, room, size
from qerl_bench.stored import read_config, read_object

log = logging.getLogger(__name__)
ELSEWHERE = "root=DIR or name=NAME; a name that is left out is derived from the config"
NO_EFFECT = frozenset(  # keys that do not affect what is trained, nor how it is evaluated in the end
    {
        "root",
        "name",
        "logger",
        "save_every",
        "save_on_term",
        "checkpoints",
        "hydra",
        "eval.every",
        "eval.every_questions",
        "train.kept_groups",
        "parallel",  # affects rounding, like the number of GPUs
    }
)
UNSAID: dict[str, Any] = {  # keys added later, with what earlier runs did; they have an effect at other values only
    "reward._target_": "qerl_bench.reward.task.TaskReward",
    "reward.name": "task",
    "algo.right_only": False,
    "eval.quant": None,
    "rollout.quant": None,
    "noise.where": "norms",
    "task.pretrain_procedures": {"guess": 0.25, "hasty": 0.35, "careful": 0.4},
}
WRITING, REMOVING = ".writing", ".removing"  # a checkpoint that is not yet, or no more, there
MADE_AGAIN = (
    "env.json",
    "preflight.json",
    "engine.json",
    "layers.parquet",
)  # by each attempt; the old env.json becomes env_<n>.json


class RunDamaged(ConfigError):
    """A run can neither continue nor be taken as finished, because its files are not as it wrote them."""


def is_finished(path: Path) -> bool:
    """Whether the run in `path` is complete."""
    return (path / DONE).exists()


def check_run_dir(path: Path, cfg: DictConfig | dict[str, Any], elsewhere: str = ELSEWHERE) -> None:
    """Raise ConfigError, with `elsewhere` as the remedy, if the run can neither start nor continue in `path`.

    It is RunDamaged for an unfinished run that is damaged in anything that it continues from, and for a finished one
    in what `quick` finds.
    """
    if not is_finished(path):
        refuse_unwritable(path, elsewhere)
    try:
        refuse_damaged(path, elsewhere)
    except ConfigError as error:
        raise RunDamaged(str(error)) from error
    if (path / "config.yaml").exists():
        refuse_other_config(path, cfg, elsewhere)


def refuse_damaged(path: Path, elsewhere: str = ELSEWHERE) -> None:
    """Raise ConfigError for what is damaged of a finished run, or of what an unfinished one continues from."""
    finished, checkpoint = is_finished(path), last_checkpoint(path)
    if checkpoint is not None or finished:
        check_records(path, f"Or choose another place: {elsewhere}", to_continue=True)
    if checkpoint is not None:
        check_checkpoint(checkpoint, quick=finished)


def refuse_unwritable(path: Path, elsewhere: str = ELSEWHERE) -> None:
    """Raise ConfigError if nothing can be written to the folder `path`, or where it would have to be made."""
    place = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    try:
        TemporaryFile(dir=place).close()  # for root, os.access allows places where nothing can be made
    except OSError as error:
        raise ConfigError(
            f"cannot write the run to {path}: {place} is not a writable folder ({error.strerror}). Choose another "
            f"place: {elsewhere}"
        ) from error


def refuse_other_config(path: Path, cfg: DictConfig | dict[str, Any], elsewhere: str) -> None:
    """Raise ConfigError if `path` holds a run of a config that gives other numbers."""
    stored, wanted = (flat(with_effect(container)) for container in (read_config(path / "config.yaml"), as_dict(cfg)))
    different = sorted(key for key in stored.keys() | wanted.keys() if stored.get(key) != wanted.get(key))
    shown = ", ".join(f"{key} is {stored.get(key)!r} there and {wanted.get(key)!r} here" for key in different[:4])
    require(
        not different,
        f"{path} holds a run of another config ({len(different)} differences: {shown}). Nothing was changed there. "
        f"Choose another place: {elsewhere}",
    )


def check_records(path: Path, otherwise: str, to_continue: bool = False) -> None:
    """Raise ConfigError, with what can be saved, if a file of the run in `path` is not as the run wrote it.

    Files above seals.QUICK_BYTES are compared by length only, unless an unfinished run is `to_continue`; then those
    that are made again are left out. A run from before seals is taken as it is.
    """
    finished = is_finished(path)
    skip = MADE_AGAIN if to_continue and not finished else ()
    for _ in range(2):  # a running process may have replaced a file between its seal and its content
        vouched = vouched_seals(path)
        damage = find_damage(path, vouched, finished=finished, quick=finished or not to_continue, skip=skip)
        if damage is None:
            break
    if damage is not None:
        name, reason = damage
        raise ConfigError(f"{path} is damaged: {reason}. {saved(path, name, finished)}. {otherwise}")
    if not vouched and not (path / SEALS).exists() and (finished or last_checkpoint(path) is not None):
        log.info("%s is a run from before seals, so damage to its files cannot be seen", path)


def vouched_seals(path: Path) -> dict[str, Seal]:
    """The seals of growing files that done.json or the last checkpoint keeps; empty without either."""
    checkpoint = last_checkpoint(path)
    if is_finished(path):
        remedy = saved(path, DONE, True)
        seals = read_object(path / DONE, remedy).get("seals", {})
        require(are_seals(seals), f"{path / DONE} is damaged. {remedy}")
        return seals
    return {} if checkpoint is None else read_manifest(checkpoint)["run"]


def saved(path: Path, name: str, finished: bool) -> str:
    """What is left of a run in which the file `name` is damaged, and how to go on with it."""
    if name == DONE:
        return "Delete it, and the same command finishes the run again"
    if name in GROWING:
        later: list[str] = []
        for checkpoint in sorted(checkpoints(path), key=step_of, reverse=True):
            expected = read_manifest(checkpoint)["run"].get(name)
            if expected and broken(path / name, expected, quick=False, grows=True) is None:
                delete = [*([DONE] if finished else []), *(f"checkpoints/{folder}" for folder in later)]
                return (
                    f"It is whole up to step {step_of(checkpoint)}: delete {', '.join(delete)}, and the same command "
                    "continues from there"
                )
            later.append(checkpoint.name)
        return "No checkpoint vouches for what is left of it: delete the folder to run it again"
    if name in MADE_AGAIN and finished:
        return f"Delete {name} and {DONE}, and the same command writes both again"
    return (
        "The numbers in metrics.jsonl are whole. Put back a copy of the damaged file, or delete the folder to run it "
        "again"
    )


def as_dict(cfg: DictConfig | dict[str, Any]) -> dict[str, Any]:
    """`cfg` as plain containers without references."""
    return cfg if isinstance(cfg, dict) else OmegaConf.to_container(cfg, resolve=True)  # type: ignore[return-value]


def unsaid(axis: str) -> dict[str, Any]:
    """The keys of UNSAID of one group of a config, without its name."""
    return {key.removeprefix(f"{axis}."): value for key, value in UNSAID.items() if key.startswith(f"{axis}.")}


def with_effect(tree: dict[str, Any]) -> dict[str, Any]:
    """A config without the keys NO_EFFECT, and without those of UNSAID at the value there."""

    def matters(key: str, value: Any) -> bool:
        return key not in NO_EFFECT and not (key in UNSAID and UNSAID[key] == value)

    def left(key: str, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: part for name, part in value.items() if matters(f"{key}.{name}", part)}

    parts = {key: left(key, value) for key, value in tree.items() if key not in NO_EFFECT}
    return {key: part for key, part in parts.items() if part or not tree[key]}


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dicts as one dict with dotted keys."""
    items: dict[str, Any] = {}
    for key, value in tree.items():
        items |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return items


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


def stopped_by_disk(path: Path, error: Exception) -> TrainingStopped | None:
    """The message for a run in `path` that ends by `error`, if the disk is the reason: what it needs to continue."""
    reason = failure(error)
    if reason is None:
        return None
    newest = last_checkpoint(path)
    needs = "" if newest is None else f"; a checkpoint takes {size(newest) / 2**20:,.1f} MiB"
    return TrainingStopped(
        f"{path}: {reason} ({room(path, error)}{needs}). When that is solved, the same command continues from step "
        f"{0 if newest is None else step_of(newest)}"
    )


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that `path` holds either all of its old content or all of the new."""
    writing = path.with_name(f".{path.name}.writing")
    writing.write_text(text)
    sync(writing)
    replace(writing, path)


def refuse_locked(path: Path, elsewhere: str = ELSEWHERE) -> None:
    """Raise RunLocked if another process is running in the folder of a run."""
    if who := holder(path / ".lock"):
        raise RunLocked(
            f"another process is running in {path} ({who}); wait for it, or choose another place: {elsewhere}"
        )


class RunDir:
    """The folder of one run, locked by this process. Use as a context manager."""

    def __init__(self, path: Path, cfg: DictConfig, elsewhere: str = ELSEWHERE) -> None:
        check_run_dir(path, cfg, elsewhere)
        self.path = path
        self.started = time.time()
        self.spent_s = 0.0  # by earlier attempts, up to the checkpoint that this one continues from
        self.spent_j: float | None = 0.0  # as spent_s; None if an earlier attempt did not measure it
        self._meter: tuple[str, float | None] = "cpu", None  # the device, and its counter when it was first read
        try:
            self._claim(cfg, elsewhere)
        except OSError as error:
            raise stopped_by_disk(path, error) or error from None

    def _claim(self, cfg: DictConfig, elsewhere: str) -> None:
        """Lock the folder and, unless the run is finished, write its config."""
        make_folder(self.path)
        while (held := lock(self.path / ".lock")) is None:
            refuse_locked(self.path, elsewhere)
        with ExitStack() as unless_it_works:
            self._lock = unless_it_works.enter_context(held)  # held until close
            if not is_finished(self.path):
                if last_checkpoint(self.path) is None:
                    (self.path / SEALS).unlink(missing_ok=True)  # it starts again
                settle(self.path, vouched_seals(self.path))
                self.write("config.yaml", OmegaConf.to_yaml(cfg))
            unless_it_works.pop_all()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Release the lock."""
        self._lock.close()
        if isinstance(error, Exception) and (stopped := stopped_by_disk(self.path, error)):
            raise stopped from error

    @property
    def finished(self) -> bool:
        return is_finished(self.path)

    @property
    def wall_s(self) -> float:
        """Seconds of this attempt, and of earlier ones as far as their steps are kept."""
        return self.spent_s + time.time() - self.started

    def meter(self, device: str) -> None:
        """Count the energy of `device` from here on, if it can be counted."""
        self._meter = device, energy.counter(device)

    @property
    def energy_j(self) -> float | None:
        """Joules of the GPU in the time of `wall_s`; None if they were not counted all along."""
        device, before = self._meter
        now = None if before is None else energy.counter(device)
        return None if now is None or before is None or self.spent_j is None else self.spent_j + now - before

    def replacing(self, name: str) -> AbstractContextManager[Path]:
        """A path to write to; afterwards it takes the place of the file `name` of this run."""
        return replacing(self.path, name)

    def write(self, name: str, text: str) -> None:
        """Write a file of this run as a whole."""
        with self.replacing(name) as file:
            file.write_text(text)

    def write_environment(
        self, device: str, base: str | None, remote_code: Mapping[str, str] | None = None, ranks: int = 1
    ) -> None:
        """Write env.json: code, packages, machine, and `base`, the digest of the base weights (`model/digest.py`).

        `remote_code` has the SHA-256 of each Python file that came with the model and may run; None if none may.
        `ranks` is the number of processes that make the run. The env.json of an earlier attempt becomes env_<n>.json.
        """
        path = self.path / "env.json"
        if last_checkpoint(self.path) is not None and (reason := changed(self.path, "env.json")):
            log.warning("%s: %s. The code and the machine of the steps so far may be unknown", self.path, reason)
        if path.exists():
            with self.replacing(f"env_{len(list(self.path.glob('env_*.json'))) + 1}.json") as kept:
                shutil.copyfile(path, kept)
        of_model = {"base": base, **({} if remote_code is None else {"remote_code": dict(remote_code)})}
        self.write("env.json", json.dumps(environment(device) | of_model | {"ranks": ranks}, indent=1))

    def resume_step(self) -> int:
        """The step of the last checkpoint, 0 without one. Deletes the records of later steps."""
        checkpoint = last_checkpoint(self.path)
        step = 0 if checkpoint is None else step_of(checkpoint)
        vouched = vouched_seals(self.path)
        for name in ("metrics.jsonl", "rollouts.jsonl"):
            sealed = vouched[name]["bytes"] if name in vouched else 0
            self._cut(self.path / name, step if checkpoint is not None else -1, sealed)
        for begun in (WRITING, REMOVING):
            shutil.rmtree(self.path / "checkpoints" / begun, ignore_errors=True)
        for earlier in checkpoints(self.path):
            try:
                check_checkpoint(earlier, quick=True)
            except ConfigError as error:
                log.warning("%s. This run continues from step %d and does not need it", error, step)
        return step

    def _cut(self, path: Path, step: int, sealed: int) -> None:
        """Keep the records up to `step` and delete the rest, half a line included, or one that is damaged behind the
        first `sealed` bytes. Raises ConfigError for a damaged line within them."""
        if not path.exists():
            return
        kept = 0
        data = path.read_bytes()
        for number, line in enumerate(data.split(b"\n")[:-1], start=1):
            try:
                record = json.loads(line)
                kind, record_step = record.get("kind"), int(record["step"])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                if 0 < sealed <= kept or step < 0:
                    break
                raise ConfigError(
                    f"{path}, line {number}, is damaged ({error}): repair it, or delete the folder to run it again"
                ) from error
            # The evaluation after the last step comes behind its checkpoint and is made again; that of step 0 is kept.
            evaluated_after = kind == "eval" and record_step == step > 0
            if record_step > step or evaluated_after:
                break
            kept += len(line) + 1
        if kept < len(data):
            os.truncate(path, kept)

    @contextmanager
    def checkpoint(self, step: int) -> Iterator[Path]:
        """An empty folder to fill; afterwards it is sealed with a manifest and renamed to checkpoints/step_<step>."""
        writing = self.path / "checkpoints" / WRITING
        shutil.rmtree(writing, ignore_errors=True)
        make_folder(writing)
        yield writing
        files = sorted(file for file in writing.rglob("*") if file.is_file())
        manifest = {
            "files": {str(file.relative_to(writing)): seal(file) for file in files},
            "run": seals_of_growing(self.path),
        }
        (writing / "manifest.json").write_text(json.dumps(manifest, indent=1))
        sync_tree(writing)
        replace(writing, self.path / "checkpoints" / f"step_{step:06d}")

    def keep_checkpoints(self, newest: int, best: int | None) -> None:
        """Delete all checkpoints but the `newest` ones and that of the step `best`.

        A folder leaves its name before it is emptied, so that a kill leaves no half of a checkpoint. Nothing refers to
        a checkpoint that is gone: seals of a checkpoint are of its own files and of those that grow.
        """
        by_age = sorted(checkpoints(self.path), key=step_of, reverse=True)
        for folder in by_age[newest:]:
            if step_of(folder) != best:
                removing = folder.with_name(REMOVING)
                shutil.rmtree(removing, ignore_errors=True)
                replace(folder, removing)
                shutil.rmtree(removing)

    def log(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        """Append the metrics of a step to metrics.jsonl; `kind` is train, validation or eval."""
        self.append("metrics.jsonl", [{"kind": kind, "step": step, "time": time.time(), **metrics}])

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

    def finish(self, collapse: str | None = None, best: int | None = None) -> None:
        """Write done.json, which marks the run as finished, with the last value of every metric.

        `collapse` says what shows that training has destroyed the policy (`train/collapse.py`), if anything does.
        `best` is the step of the best checkpoint, if it is known.
        """
        last = last_checkpoint(self.path)
        records = self.metrics()
        final = {
            key: value for record in records for key, value in record.items() if key not in ("kind", "step", "time")
        }
        peaks = [record["memory/peak_gib"] for record in records if record.get("memory/peak_gib") is not None]
        done = {
            "wall_s": round(self.wall_s, 3),
            "energy_j": self.energy_j,
            "peak_memory_gib": max(peaks, default=None),
            "collapse": collapse,
            "checkpoints": {"last": None if last is None else step_of(last), "best": best},
            "final": final,
        }
        self.mark_finished(done)

    def mark_finished(self, content: dict[str, Any]) -> None:
        """Write done.json with `content` and the seals of the growing files."""
        self.write(DONE, json.dumps(content | {"seals": seals_of_growing(self.path)}, indent=1))
