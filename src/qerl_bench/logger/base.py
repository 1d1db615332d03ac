"""Where metrics go. The local record comes first; a mirror may fail without failing the run."""

from __future__ import annotations

from typing import Any, Protocol

from qerl_bench.rundir import RunDir


class Sink(Protocol):
    """Takes one record per step and kind."""

    def log(self, kind: str, step: int, metrics: dict[str, float]) -> None: ...

    def close(self, failed: bool) -> None: ...


class LoggerSpec(Protocol):
    """A logger option."""

    @property
    def name(self) -> str: ...

    def check(self) -> None:
        """Raise ConfigError if this logger cannot work here; called before training."""

    def build(self, run: RunDir, config: dict[str, Any]) -> list[Sink]:
        """The sinks of one run; `config` is its resolved config as plain data."""
        ...
