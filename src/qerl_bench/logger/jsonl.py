"""logger=jsonl: metrics.jsonl in the run directory, which every logger writes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from qerl_bench.logger.base import Sink
from qerl_bench.rundir import RunDir


@dataclass(frozen=True, kw_only=True)
class LocalOnly:
    """No mirror."""

    name: str

    def check(self) -> None:
        """Needs nothing."""

    def build(self, run: RunDir, config: dict[str, Any]) -> list[Sink]:
        return [JsonlSink(run)]


class JsonlSink:
    """One JSON object per step and kind."""

    def __init__(self, run: RunDir) -> None:
        self.run = run

    def log(self, kind: str, step: int, metrics: dict[str, float]) -> None:
        self.run.append("metrics.jsonl", [{"kind": kind, "step": step, "time": time.time(), **metrics}])

    def close(self, failed: bool) -> None:
        """Nothing to do: each line was flushed when it was written."""
