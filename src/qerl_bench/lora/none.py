"""lora=none: no adapter, every weight is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qerl_core.checks import require

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class FullParameter:
    """Every weight is trained; the run's name shows rank 0."""

    name: str
    rank: int

    dropout = 0.0
    train_norms = False  # all weights are trained, none of them apart

    def __post_init__(self) -> None:
        require(self.rank == 0, f"lora=none has no rank, got lora.rank={self.rank!r}; for an adapter use lora=default")

    def check_with(self, where: str, shape: Mapping[str, Any]) -> None:
        """Works with every model."""

    def attach(self, model: PreTrainedModel, where: str, seed: int) -> None:
        """Leaves every weight trainable."""
