"""The run directory: the files of one run, as runner, analysis and notebooks know them.

A kill or a power loss at any moment loses at most the steps since the last checkpoint: lines are appended and flushed,
every other file is written under another name, synced and then renamed, and done.json comes last. Seals (checksums.py)
tell a damaged file.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from qerl_core.checks import ConfigError, TrainingStopped
from qerl_core.rundir.attempts import ENVIRONMENT, recorded_attempt
from qerl_core.rundir.checkpoints import check_checkpoint, checkpoints, is_finished, last_checkpoint, step_of
from qerl_core.rundir.checksums import DONE, SEALS, broken, replacing, seal, settle
from qerl_core.rundir.disk_errors import size, stopped_by_disk
from qerl_core.rundir.durable import make_folder, replace, sync_tree
from qerl_core.rundir.environment import environment
from qerl_core.rundir.growing import GrowingFiles
from qerl_core.rundir.kept_files import KeptFiles
from qerl_core.rundir.locks import lock
from qerl_core.rundir.run_checks import (
    ELSEWHERE,
    RunDamaged,
    check_run_dir,
    damage_remedy,
    lacking_steps,
    refuse_locked,
    vouched_seals,
)

log = logging.getLogger(__name__)
WRITING, REMOVING = ".writing", ".removing"  # a checkpoint that is not yet, or no more, there


class RunDir:
    """The folder of one run, locked by this process. Use as a context manager."""

    def __init__(self, path: Path, cfg: DictConfig, elsewhere: str = ELSEWHERE) -> None:
        check_run_dir(path, cfg, elsewhere)
        self.path, self.last_step = path, cfg.get("steps")
        self._growing, self._kept = GrowingFiles(path), KeptFiles(path)
        self.started = time.time()
        self.begun: float | None = self.started  # of the first attempt whose steps are kept; None if it did not say
        self.base: str | None = None  # the digest of the base weights, once they are known
        self.spent_s = 0.0  # by earlier attempts, up to the checkpoint that this one continues from
        self.spent_j: float | None = 0.0  # as spent_s; None if an earlier attempt did not measure it
        self._counter: Callable[[], float | None] = lambda: None
        self._joules: float | None = None  # of the counter when it was first read
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
                self._growing.begin(SEALS)
                self.write("config.yaml", OmegaConf.to_yaml(cfg))
            unless_it_works.pop_all()

    def __enter__(self) -> RunDir:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Release the lock."""
        self._lock.close()
        if isinstance(error, FileNotFoundError) and not self.path.is_dir():
            raise TrainingStopped(f"{self.path} was deleted or moved while this run was alive: {error}") from error
        if isinstance(error, Exception) and (stopped := stopped_by_disk(self.path, error)):
            raise stopped from error

    @property
    def finished(self) -> bool:
        return is_finished(self.path)

    @property
    def wall_s(self) -> float:
        """Seconds of this attempt, and of earlier ones as far as their steps are kept."""
        return self.spent_s + time.time() - self.started

    def meter(self, counter: Callable[[], float | None]) -> None:
        """Count energy from here on by a `counter` of joules, if it gives any."""
        self._counter, self._joules = counter, counter()

    @property
    def energy_j(self) -> float | None:
        """Joules of the GPU in the time of `wall_s`; None if they were not counted all along."""
        before, now = self._joules, self._counter()
        return None if now is None or before is None or self.spent_j is None else self.spent_j + now - before

    @contextmanager
    def replacing(self, name: str) -> Iterator[Path]:
        """A path to write to; afterwards it takes the place of the file `name` of this run."""
        with replacing(self.path, name, self._growing.append) as file:
            yield file
            self._kept.keep(name, file)

    def mend(self) -> None:
        """Write files again that another program has deleted or damaged, as far as this process knows them."""
        self._kept.mend(self.replacing)

    def write(self, name: str, text: str) -> None:
        """Write a file of this run as a whole."""
        with self.replacing(name) as file:
            file.write_text(text)

    def write_environment(
        self,
        device: str,
        base: str | None,
        remote_code: Mapping[str, str] | None = None,
        ranks: int = 1,
        gguf: Mapping[str, Any] | None = None,
        inputs: Mapping[str, str] | None = None,
    ) -> None:
        """Write env.json: code, packages, machine, and `base`, the digest of the base weights (`model/digest.py`).

        `remote_code` has the SHA-256 of each Python file that came with the model and may run; None if none may.
        `gguf` says of which GGUF file the weights are, and what they have been through; None for other models.
        `ranks` is the number of processes that make the run, `inputs` the digests of files and data (`eval/inputs.py`)
        by name. The env.json of an earlier attempt becomes env_<n>.json. Raises ConfigError as `joined`.
        """
        self.base = base
        of_model = {"base": base, "remote_code": remote_code, "gguf": gguf, "inputs": inputs}
        given = {key: value for key, value in of_model.items() if key == "base" or value is not None}
        said = recorded_attempt(self.path, environment(device) | given | {"ranks": ranks})
        path = self.path / ENVIRONMENT
        if path.exists():
            with self.replacing(f"env_{len(list(self.path.glob('env_*.json'))) + 1}.json") as kept:
                shutil.copyfile(path, kept)
        self.write(ENVIRONMENT, json.dumps(said, indent=1))

    def resume_step(self) -> int:
        """The step of the last checkpoint, 0 without one. Deletes the records of later steps."""
        self._kept.begin()
        checkpoint = last_checkpoint(self.path)
        step = 0 if checkpoint is None else step_of(checkpoint)
        vouched = vouched_seals(self.path)
        for name in ("metrics.jsonl", "rollouts.jsonl"):
            if name in vouched and (reason := broken(self.path / name, vouched[name], quick=False, grows=True)):
                raise RunDamaged(f"{self.path} is damaged: {reason}. {damage_remedy(self.path, name, False)}")
            sealed = vouched[name]["bytes"] if name in vouched else 0
            self._cut(self.path / name, step if checkpoint is not None else -1, sealed)
            self._growing.begin(name)
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
            # The evaluation after the last step comes behind its checkpoint and is made again; those before are kept.
            evaluated_after = kind == "eval" and record_step == step == self.last_step
            if record_step > step or evaluated_after:
                break
            kept += len(line) + 1
        if kept < len(data):
            os.truncate(path, kept)

    @contextmanager
    def checkpoint(self, step: int) -> Iterator[Path]:
        """An empty folder to fill; afterwards it is sealed with a manifest and renamed to checkpoints/step_<step>."""
        self.mend()
        writing = self.path / "checkpoints" / WRITING
        shutil.rmtree(writing, ignore_errors=True)
        make_folder(writing)
        yield writing
        files = sorted(file for file in writing.rglob("*") if file.is_file())
        manifest = {
            "files": {str(file.relative_to(writing)): seal(file) for file in files},
            "run": self._growing.seals(),
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

    def foresee_room(self, further: int) -> None:
        """Warn if the disk, as it is now, has no room for `further` checkpoints as large as those that there are."""
        needed, free = further * max(map(size, checkpoints(self.path))), shutil.disk_usage(self.path).free
        if needed > free:
            log.warning(
                f"{self.path}: the checkpoints to come ({further}) need {needed / 2**30:.1f} GiB, and the disk has "
                f"{free / 2**30:.1f}. A larger save_every makes fewer, checkpoints.keep=1 keeps the newest: a "
                "run can continue with other values of both"
            )

    def log(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        """Append the metrics of a step to metrics.jsonl; `kind` is train, validation or eval."""
        self.append("metrics.jsonl", [{"kind": kind, "step": step, "time": time.time(), **metrics}])

    def append(self, name: str, records: list[dict[str, Any]]) -> None:
        """Append JSON lines to a file of the run and flush it. Non-finite numbers become null, with a warning."""
        lines = []
        for record in records:
            for key, value in record.items():
                if isinstance(value, float) and not math.isfinite(value):
                    log.warning("%s of step %s is %s, written as null", key, record.get("step"), value)
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
            lines.append(json.dumps(finite, allow_nan=False) + "\n")
        self._growing.append(name, "".join(lines))

    def metrics(self) -> list[dict[str, Any]]:
        """All records of metrics.jsonl."""
        path = self.path / "metrics.jsonl"
        return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []

    def finish(self, collapse: str | None = None, best: int | None = None) -> None:
        """Write done.json, which marks the run as finished, with the last value of every metric.

        `collapse` says what shows that training has destroyed the policy (`train/collapse.py`), if anything does.
        `best` is the step of the best checkpoint, if it is known.
        """
        last = last_checkpoint(self.path)
        records = self.metrics()
        if reason := lacking_steps(self.path, records, self.last_step):
            raise TrainingStopped(reason)
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
        """Write done.json with `content`, when and on which base it was made, and the seals of the growing files.

        `started` and `ended` are unix seconds; a run that paused took less between them.
        """
        self.mend()
        begun = None if self.begun is None else round(self.begun, 3)
        when = {"started": begun, "ended": round(time.time(), 3), "base": self.base}
        self.write(DONE, json.dumps(when | content | {"seals": self._growing.seals()}, indent=1))
