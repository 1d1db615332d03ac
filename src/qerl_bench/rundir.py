"""The run directory: the contract between runner, analysis and notebooks.

Everything is written so that a kill at any moment loses at most the steps since the last checkpoint: lines are appended
and flushed, every other file is written beside its place and renamed, and done.json comes last.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from qerl_bench.checks import ConfigError, require
from qerl_bench.config import UNSCIENTIFIC
from qerl_bench.installation import CHECKOUT
from qerl_bench.metrics import definitions
from qerl_bench.renamed_keys import require_current

log = logging.getLogger(__name__)
ELSEWHERE = "root=DIR or name=NAME; a name that is left out is derived from the config"
PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "triton", "hydra-core", "lm-eval", "wandb", "numpy")


def is_finished(path: Path) -> bool:
    """Whether the run in `path` came to its end."""
    return (path / "done.json").exists()


def check_run_dir(path: Path, cfg: DictConfig, elsewhere: str = ELSEWHERE) -> None:
    """Raise ConfigError, with `elsewhere` as the way out, if the run cannot be written to, or continued in, `path`."""
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
    """Raise ConfigError if `path` holds a run whose numbers came from another config."""
    ignored = UNSCIENTIFIC - {"seed"}
    there = as_dict(OmegaConf.load(path / "config.yaml"))
    require_current(there, path)
    stored, wanted = (
        flat({key: value for key, value in container.items() if key not in ignored})
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
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def last_checkpoint(path: Path) -> Path | None:
    """The newest checkpoint folder of a run, or None."""
    return max((path / "checkpoints").glob("step_*"), default=None, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint folder was written."""
    return int(checkpoint.name.removeprefix("step_"))


def check_checkpoint(folder: Path) -> None:
    """Raise ConfigError unless every file of the checkpoint is there with the content that its manifest names."""
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


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that `path` holds either its old content or all of the new one."""
    beside = path.with_name(f".{path.name}.writing")
    beside.write_text(text)
    os.replace(beside, path)


class RunDir:
    """One run's folder, held open by one process. Use as a context manager."""

    def __init__(self, path: Path, cfg: DictConfig, elsewhere: str = ELSEWHERE) -> None:
        check_run_dir(path, cfg, elsewhere)
        self.path = path
        self.started = time.time()
        self.spent_s = 0.0  # by earlier attempts, up to the checkpoint from which this one continues
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
        """Seconds behind the record as it is: of this attempt, and of earlier ones as far as their steps are kept."""
        return self.spent_s + time.time() - self.started

    def write_environment(self, device: str, base: str | None) -> None:
        """env.json: what code, packages, machine and base weights (`base_digest.digest_of`) made these numbers.

        An earlier attempt's becomes env_<n>.json.
        """
        path = self.path / "env.json"
        if path.exists():
            os.replace(path, self.path / f"env_{len(list(self.path.glob('env_*.json'))) + 1}.json")
        write_atomically(path, json.dumps(environment(device) | {"base": base}, indent=1))

    def resume_step(self) -> int:
        """The step of the last checkpoint, 0 without one; records of later steps are cut away."""
        checkpoint = last_checkpoint(self.path)
        step = 0 if checkpoint is None else step_of(checkpoint)
        for name in ("metrics.jsonl", "rollouts.jsonl"):
            self._cut(self.path / name, step if checkpoint is not None else -1)
        shutil.rmtree(self.path / "checkpoints" / ".writing", ignore_errors=True)
        return step

    def _cut(self, path: Path, step: int) -> None:
        """Keep the records up to `step`. Whatever follows, half a line included, was written after the checkpoint."""
        if not path.exists():
            return
        kept = []
        for line in path.read_text().splitlines(keepends=True):
            record = json.loads(line) if line.endswith("\n") else {"step": math.inf}
            evaluated_after = record.get("kind") == "eval" and record["step"] == step > 0
            if record["step"] > step or evaluated_after:
                break
            kept.append(line)
        write_atomically(path, "".join(kept))

    def save_checkpoint(self, step: int, write: Callable[[Path], None]) -> None:
        """Let `write` fill a folder, seal it with a manifest of checksums, and move it to checkpoints/step_<step>."""
        writing = self.path / "checkpoints" / ".writing"
        shutil.rmtree(writing, ignore_errors=True)
        writing.mkdir(parents=True)
        write(writing)
        files = sorted(file for file in writing.rglob("*") if file.is_file())
        manifest = {str(file.relative_to(writing)): sha256(file) for file in files}
        (writing / "manifest.json").write_text(json.dumps(manifest, indent=1))
        os.replace(writing, self.path / "checkpoints" / f"step_{step:06d}")

    def append(self, name: str, records: list[dict[str, Any]]) -> None:
        """Append JSON lines to a file of the run, flushed; non-finite numbers become null with a warning."""
        with open(self.path / name, "a") as file:
            for record in records:
                for key, value in record.items():
                    if isinstance(value, float) and not math.isfinite(value):
                        log.warning("%s of step %s is %s, written as null", key, record.get("step"), value)
                finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
                file.write(json.dumps(finite, allow_nan=False) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """Every record of metrics.jsonl so far."""
        path = self.path / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def finish(self) -> None:
        """Write done.json, the mark of a finished run, with the last value of every metric."""
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


def versions() -> dict[str, str | None]:
    """Versions of the packages that the numbers depend on; None where one is not installed."""
    installed: dict[str, str | None] = dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            installed[name] = metadata.version(name)
    return installed


def environment(device: str) -> dict[str, Any]:
    """Code version, packages, machine and command of this process, and what its metrics mean.

    `code` is what tells whether two runs came from the same code: commits differ by their documentation too, and a
    checkout with changes has none.
    """
    import torch

    from qerl_kernels.decode_configs import tables

    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    return {
        "commit": git("rev-parse", "HEAD"),
        "dirty": bool(git("status", "--porcelain")),
        "code": code_digest(),
        "metrics": definitions(),
        "python": platform.python_version(),
        "packages": versions(),
        "platform": platform.platform(),
        "device": device,
        "cpu": cpu_name(),
        "gpu": gpu,
        "driver": nvidia_driver() if gpu else None,
        "kernel_tables": {str(path): sha256(path) for path in tables(gpu)} if gpu else {},
        "threads": torch.get_num_threads(),
        "argv": sys.argv,
    }


def code_digest() -> str:
    """First 12 hex digits of the SHA-256 of this project's Python sources, results/ left out, which only reads runs."""
    import qerl_kernels

    digest = hashlib.sha256()
    for package in (Path(__file__).parent, *map(Path, qerl_kernels.__path__)):
        for file in sorted(package.rglob("*.py")):
            if "results" not in file.relative_to(package).parts:
                digest.update(f"{file.relative_to(package)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def git(*words: str) -> str | None:
    """Output of a git command about this checkout, None without one."""
    if CHECKOUT is None:
        return None
    try:
        done = subprocess.run(["git", *words], cwd=CHECKOUT, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def cpu_name() -> str | None:
    """The model of the processor, which decides in which order a CPU adds up; None where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or None)


def nvidia_driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True).stdout.split("\n")[0] or None
    except FileNotFoundError:
        return None
