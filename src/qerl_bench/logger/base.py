"""A logger option: a mirror of metrics.jsonl. The run directory keeps its own record whatever the logger is."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol


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
