"""logger=jsonl: metrics.jsonl in the run directory and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl_bench.logger.base import Mirror


@dataclass(frozen=True, kw_only=True)
class LocalOnly:
    """No mirror."""

    name: str

    def check(self) -> None:
        """Needs nothing."""

    def mirror(self, run_dir: Path, records: list[dict[str, Any]], config: dict[str, Any]) -> Mirror:
        return Mirror()
