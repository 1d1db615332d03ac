"""Which weights are trained: a LoRA adapter on the linear layers (PEFT), or everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qerl_bench.checks import require

if TYPE_CHECKING:
    from peft import LoraConfig


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """A low-rank adapter B A * alpha / rank beside each target layer; the base stays frozen and is never merged."""

    name: str
    rank: int
    alpha: float
    dropout: float
    targets: list[str]
    train_norms: bool

    def __post_init__(self) -> None:
        require(
            type(self.rank) is int and self.rank >= 1,
            f"lora.rank must be a whole number of at least 1, got {self.rank!r}; to train every weight instead of an "
            "adapter use lora=none",
        )
        require(0 < self.alpha < float("inf"), f"lora.alpha must be positive, got {self.alpha!r}")
        require(0 <= self.dropout < 1, f"lora.dropout must be in [0, 1), got {self.dropout!r}")
        require(isinstance(self.train_norms, bool), f"lora.train_norms must be true or false, got {self.train_norms!r}")
        require(
            isinstance(self.targets, list) and len(self.targets) > 0 and all(isinstance(t, str) for t in self.targets),
            f"lora.targets must list the names of layers, such as [q_proj, v_proj], got {self.targets!r}; to train "
            "without an adapter use lora=none",
        )

    def check_with(self, where: str, shape: Mapping[str, Any]) -> None:
        """Raise ConfigError if the rank is above the width of a target, as far as a config.json, `shape`, tells it."""
        inputs = {target: "intermediate_size" if target == "down_proj" else "hidden_size" for target in self.targets}
        self.check_widths(where, {name: shape[key] for name, key in inputs.items() if key in shape})

    def check_widths(self, where: str, widths: Mapping[str, int]) -> None:
        """Raise ConfigError if the rank is above the input width of a target layer, by name."""
        narrowest = min(widths, key=lambda name: widths[name], default=None)
        require(
            narrowest is None or self.rank <= widths[narrowest],
            f"lora.rank must be at most the input width of the layers it adapts, and {narrowest} of {where} has "
            f"{widths.get(narrowest or '')}, got {self.rank}; a larger rank adds parameters and no freedom. Use a "
            "smaller one, or lora=none to train the weights themselves",
        )

    def peft_config(self) -> LoraConfig:
        import torch
        from peft import LoraConfig

        from qerl_bench.model.kernels import LoRALinear

        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # type: ignore[arg-type]  # PEFT divides by the rank; fractions are fine
            lora_dropout=self.dropout,
            target_modules=list(self.targets),
            bias="none",
            task_type="CAUSAL_LM",
        )
        config._register_custom_module({torch.nn.Linear: LoRALinear})  # type: ignore[dict-item]
        return config
