"""A logger option: a mirror of metrics.jsonl. The run directory keeps its own record whatever the logger is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from qerl_bench.rundir.durable import write_atomically

IDS = "mirror.json"  # in the run's folder: the id of its record at each service


class MetricsMirror:
    """Receives every record of metrics.jsonl. This one ignores them. Use as a context manager."""

    def __enter__(self) -> MetricsMirror:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """End the mirror; `kind` is None if the run succeeded."""

    def log(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        """Mirror the metrics of one step; `kind` is train, validation or eval. Must not fail the run."""


class LoggerSpec(Protocol):
    """A logger option."""

    @property
    def name(self) -> str: ...

    def check(self) -> None:
        """Raise ConfigError if this logger cannot work here; called before training."""

    def mirror(self, run_dir: Path, records: list[dict[str, Any]], config: dict[str, Any]) -> MetricsMirror:
        """Start the mirror of the run in `run_dir`.

        `records` are the lines of metrics.jsonl so far, not empty after a resume; `config` is the resolved config.
        """
        ...


def metrics_in(record: dict[str, Any]) -> dict[str, Any]:
    """The metrics of a line of metrics.jsonl."""
    return {key: value for key, value in record.items() if key not in ("kind", "step", "time")}


def group_of(config: dict[str, Any]) -> str:
    """What runs that differ in their seed alone have in common: the name without it."""
    return str(config["name"]).replace(f"-s{config['seed']}-", "-")


def tags_of(config: dict[str, Any]) -> list[str]:
    """The option of each axis, as in quant=nvfp4; without the logger."""
    axes = {key: value["name"] for key, value in config.items() if isinstance(value, dict) and "name" in value}
    return [f"{axis}={name}" for axis, name in axes.items() if axis != "logger"]


def kept_id(run_dir: Path, logger: str, records: list[dict[str, Any]]) -> str | None:
    """The id of the record that `logger` has of this run; None for a run that has no `records` yet.

    A folder that was deleted takes the id with it, so that a run of its name does not go on in the old record.
    """
    file = run_dir / IDS
    return json.loads(file.read_text()).get(logger) if records and file.is_file() else None


def keep_id(run_dir: Path, logger: str, id: str) -> None:
    """Note the id of the record that `logger` has of this run."""
    file = run_dir / IDS
    known = json.loads(file.read_text()) if file.is_file() else {}
    write_atomically(file, json.dumps(known | {logger: id}) + "\n")
