"""The plain options of training: how much to sample, how AdamW steps, how to train on a batch, what to keep.

And which specs of a run its training reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from qerl_bench.algo.base import Algorithm
from qerl_bench.algo.importance_sampling import ImportanceSampling
from qerl_bench.algo.kl import KLPenalty
from qerl_bench.aqn.spec import NoiseSpec
from qerl_bench.lora.base import Adapter
from qerl_bench.parallel import ParallelSpec
from qerl_bench.quant.base import ACTIVATIONS, KEYS_AND_VALUES
from qerl_core.checks import (
    at_most,
    check_fields,
    count,
    flag,
    learning_rate,
    number,
    one_of,
    optional,
    positive,
    require_completions,
    require_package,
    temperature,
    text,
)

MAX_UPDATES = 1_000  # on one batch


@dataclass(frozen=True, kw_only=True)
class RolloutSpec:
    """How many completions one step samples, at which temperature, and from which weights in which format."""

    prompts_per_step: int
    group_size: int
    temperature: float
    quant: str | None
    activations: str | None
    kv: str | None
    merge: bool
    lag: int

    def __post_init__(self) -> None:
        check_fields(
            self,
            "rollout",
            prompts_per_step=count(),
            group_size=count(),
            temperature=temperature,
            quant=optional(text),
            activations=optional(one_of(*ACTIVATIONS)),
            kv=optional(one_of(*KEYS_AND_VALUES)),
            merge=flag,
            lag=count(0),
        )
        require_completions("rollout.prompts_per_step x rollout.group_size", self.prompts_per_step, self.group_size)


@dataclass(frozen=True, kw_only=True)
class OptimSpec:
    """AdamW with a linear warm-up, then a learning rate that is constant or falls to zero over the run."""

    optimizer: str
    lr: float
    schedule: str
    warmup_steps: int
    beta2: float
    weight_decay: float
    max_grad_norm: float

    def __post_init__(self) -> None:
        check_fields(
            self,
            "optim",
            optimizer=one_of("adamw", "adamw_8bit"),
            lr=learning_rate,
            schedule=one_of("constant", "linear", "cosine"),
            warmup_steps=count(0),
            beta2=number(0, below=1),
            weight_decay=number(0),
            max_grad_norm=positive,
        )
        if self.optimizer == "adamw_8bit":
            require_package("bitsandbytes", "optim.optimizer=adamw_8bit", "bitsandbytes")

    def lr_at(self, step: int, total_steps: int) -> float:
        """Learning rate of step `step`, counted 1..total_steps."""
        warm = min(1.0, step / (self.warmup_steps + 1))
        progress = max(0, step - self.warmup_steps) / (total_steps - self.warmup_steps + 1)
        decay = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
        return self.lr * warm * decay[self.schedule]


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """How to train on one batch of rollouts."""

    updates_per_batch: int
    kv: str
    merge: str
    gradients: str
    micro_batch_tokens: int | None
    packing: bool
    recompute: str
    mismatch_share: float
    capture: str
    tf32: bool
    autocast: bool
    entropy_coef: float
    on_nonfinite: str
    kept_groups: int

    def __post_init__(self) -> None:
        check_fields(
            self,
            "train",
            updates_per_batch=at_most(MAX_UPDATES, count()),
            kv=one_of(*KEYS_AND_VALUES),
            merge=one_of("none", "ste"),
            gradients=one_of("bf16", "fp8"),
            micro_batch_tokens=optional(count()),
            packing=flag,
            recompute=one_of("none", "selective", "full"),
            mismatch_share=number(above=0, most=1),
            capture=one_of("auto", "off"),
            tf32=flag,
            autocast=flag,
            entropy_coef=number(0),
            on_nonfinite=one_of("stop", "skip"),
            kept_groups=count(0),
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec:
    """Which checkpoints of a run are kept."""

    keep: int | None

    def __post_init__(self) -> None:
        check_fields(self, "checkpoints", keep=optional(count()))


class Specs(Protocol):
    """The specs that updates, their passes and checkpoints read; an `Experiment` has them, and more."""

    @property
    def seed(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def algo(self) -> Algorithm: ...
    @property
    def kl(self) -> KLPenalty: ...
    @property
    def importance_sampling(self) -> ImportanceSampling: ...
    @property
    def noise(self) -> NoiseSpec: ...
    @property
    def lora(self) -> Adapter: ...
    @property
    def rollout(self) -> RolloutSpec: ...
    @property
    def optim(self) -> OptimSpec: ...
    @property
    def train(self) -> TrainSpec: ...
    @property
    def parallel(self) -> ParallelSpec: ...
    @property
    def save_every(self) -> int: ...
    @property
    def checkpoints(self) -> CheckpointSpec: ...
