"""logger=jsonl: metrics.jsonl in the run directory and nothing else; with names=trl another under TRL's names."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl_bench.logger.base import NAMES, MetricsMirror, ServiceMirror
from qerl_core.checks import check_fields, one_of, optional

FILE = "metrics_{}.jsonl"  # in the run's folder


@dataclass(frozen=True, kw_only=True)
class LocalOnly:
    """No mirror, or with `names` one in the run's folder."""

    name: str
    names: str | None

    def __post_init__(self) -> None:
        check_fields(self, "logger", names=optional(one_of(*NAMES)))

    def check(self) -> None:
        """Needs nothing."""

    def mirror(self, run_dir: Path, records: list[dict[str, Any]], config: dict[str, Any]) -> MetricsMirror:
        return MetricsMirror() if self.names is None else FileMirror(self, run_dir, records, config)


class FileMirror(ServiceMirror):
    """A line for each record, as of a Trainer's log: the step, and null for what is not finite. A continued run writes
    all lines anew."""

    trl_prefix = ""

    def begin(self, spec: LocalOnly, run_dir: Path, known: str | None, config: dict[str, Any]) -> Any:
        return (run_dir / FILE.format(spec.names)).open("w")

    def send(self, run: Any, kind: str, step: int, metrics: dict[str, float]) -> None:
        finite = {
            name: value if value is not None and math.isfinite(value) else None for name, value in metrics.items()
        }
        run.write(json.dumps({"step": step} | finite) + "\n")
        run.flush()

    def end(self, run: Any, failed: bool) -> None:
        run.close()
