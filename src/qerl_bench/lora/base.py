"""What `lora` chooses: which parameters of the policy are trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


class Adapter(Protocol):
    """A LoRA adapter, or full-parameter training with rank 0."""

    @property
    def name(self) -> str: ...

    @property
    def rank(self) -> int: ...

    @property
    def dropout(self) -> float: ...

    @property
    def train_norms(self) -> bool:
        """Whether the norm scales of the blocks are trained beside an adapter."""
        ...

    def check_with(self, where: str, shape: Mapping[str, Any]) -> None:
        """Raise ConfigError if the adapter does not fit the model `where`, with the sizes in `shape`, a config.json."""
        ...

    def attach(self, model: PreTrainedModel, where: str, seed: int) -> PeftModel | None:
        """Freeze `model`, named `where`, and attach a fresh adapter; None if `model` itself is trained."""
        ...
