"""The plain options of a training step: how much is sampled, how AdamW steps, and how a batch is trained on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qerl_bench.checks import (
    is_number,
    learning_rate,
    positive,
    require,
    require_completions,
    require_count,
    require_package,
    temperature,
)


@dataclass(frozen=True, kw_only=True)
class RolloutSpec:
    """How many completions one step samples, and at which temperature."""

    prompts_per_step: int
    group_size: int
    temperature: float

    def __post_init__(self) -> None:
        require_count("rollout.prompts_per_step", self.prompts_per_step)
        require_count("rollout.group_size", self.group_size)
        require_completions("rollout.prompts_per_step x rollout.group_size", self.prompts_per_step, self.group_size)
        temperature("rollout.temperature", self.temperature)


@dataclass(frozen=True, kw_only=True)
class OptimSpec:
    """AdamW with linear warm-up, then a constant rate or one that falls to zero over the run."""

    optimizer: str
    lr: float
    schedule: str
    warmup_steps: int
    weight_decay: float
    max_grad_norm: float

    def __post_init__(self) -> None:
        require(
            self.optimizer in ("adamw", "adamw_8bit"),
            f"optim.optimizer must be adamw or adamw_8bit, got {self.optimizer!r}",
        )
        if self.optimizer == "adamw_8bit":
            require_package("bitsandbytes", "optim.optimizer=adamw_8bit", "bitsandbytes")
        learning_rate("optim.lr", self.lr)
        require(
            self.schedule in ("constant", "linear", "cosine"),
            f"optim.schedule must be constant, linear or cosine, got {self.schedule!r}",
        )
        require_count("optim.warmup_steps", self.warmup_steps, least=0)
        require(
            is_number(self.weight_decay) and self.weight_decay >= 0,
            f"optim.weight_decay must be >= 0, got {self.weight_decay!r}",
        )
        positive("optim.max_grad_norm", self.max_grad_norm)

    def lr_at(self, step: int, total_steps: int) -> float:
        """Learning rate of optimiser step `step`, counted 1..total_steps."""
        warm = min(1.0, step / (self.warmup_steps + 1))
        progress = max(0, step - self.warmup_steps) / (total_steps - self.warmup_steps + 1)
        decay = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
        return self.lr * warm * decay[self.schedule]


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """How one batch of rollouts is trained on."""

    updates_per_batch: int
    micro_batch_size: int
    packing: bool
    gradient_checkpointing: bool
    entropy_coef: float
    on_nonfinite: str

    def __post_init__(self) -> None:
        require_count("train.updates_per_batch", self.updates_per_batch)
        require_count("train.micro_batch_size", self.micro_batch_size)
        for key in ("packing", "gradient_checkpointing"):
            value = getattr(self, key)
            require(isinstance(value, bool), f"train.{key} must be true or false, got {value!r}")
        require(
            is_number(self.entropy_coef) and 0 <= self.entropy_coef < math.inf,
            f"train.entropy_coef must be a number >= 0, got {self.entropy_coef!r}",
        )
        require(
            self.on_nonfinite in ("stop", "skip"), f"train.on_nonfinite must be stop or skip, got {self.on_nonfinite!r}"
        )
