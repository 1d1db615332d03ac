"""lora=none: no adapter, every weight is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qerl_bench.checks import require


@dataclass(frozen=True, kw_only=True)
class FullParameter:
    """Every weight is trained; rank 0 stands in the run's name."""

    name: str
    rank: int

    dropout = 0.0
    train_norms = False  # apart from the other weights

    def check_with(self, where: str, shape: Mapping[str, Any]) -> None:
        """Nothing that could be too wide."""

    def __post_init__(self) -> None:
        require(self.rank == 0, f"lora=none has no rank, got lora.rank={self.rank!r}; for an adapter use lora=default")
