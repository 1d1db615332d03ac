"""aqn=entropy: a closed loop that sets sigma so that the sampling policy's entropy follows a target curve.

QeRL lowers sigma by the step count alone. This controller reacts to the policy instead. It is an integral controller on
log sigma, with an optional proportional part. On a log scale the same relative error of the entropy always changes
sigma by the same factor, which suits noise whose useful range spans decades.

    m_t = (1 - s) m_(t-1) + s H_t                 smoothed measurement, m_1 = H_1
    e_t = (target_t - m_t) / target_t             relative error
    I_t = I_(t-1) + k_i e_t                       integral, in log sigma, clamped to the bounds
    log sigma_(t+1) = I_t + k_p e_t               clamped to [log sigma_min, log sigma_max]

Anti-windup: the integral itself is clamped to the bounds, so the controller reacts in the very step in which the error
changes its sign, however long sigma has been at a bound.

Noise can only add entropy. While the policy is more random than its target, sigma stays at sigma_min and
`aqn/saturated` is -1. metrics.jsonl has every decision: target, smoothed measurement, next sigma, saturation.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qerl_bench.aqn.base import Schedule, SigmaController
from qerl_bench.aqn.norm_errors import NormErrors
from qerl_bench.aqn.spec import NoiseSpec
from qerl_bench.quant.base import WeightFormat
from qerl_core.checks import MAX_SIGMA, check_fields, number, positive, require

log = logging.getLogger(__name__)
STATE = ("integral", "output", "smoothed", "saturated")  # of the controller, in checkpoints


@dataclass(frozen=True, kw_only=True)
class EntropyTarget(Schedule):
    """The target moves linearly from `target_start` (first step) to `target_end` (last step), in nats per token."""

    name: str
    target_start: float
    target_end: float
    sigma_start: float
    sigma_min: float
    sigma_max: float
    integral_gain: float
    proportional_gain: float
    smoothing: float

    def __post_init__(self) -> None:
        check_fields(
            self,
            "aqn",
            target_start=positive,
            target_end=positive,
            sigma_start=positive,
            sigma_min=positive,
            sigma_max=number(above=0, most=MAX_SIGMA),
            integral_gain=positive,
            proportional_gain=number(0),
            smoothing=number(above=0, most=1),
        )
        require(
            self.sigma_min <= self.sigma_start <= self.sigma_max,
            f"aqn needs sigma_min <= sigma_start <= sigma_max, got {self.sigma_min}, {self.sigma_start} and "
            f"{self.sigma_max}",
        )

    def check_with(self, quant: WeightFormat, noise: NoiseSpec) -> None:
        require(
            noise.norms != "missed",
            "aqn=entropy reacts to the effect of its noise, but noise.norms=missed puts no noise into the model; use "
            "noise.norms=blocks",
        )

    def target(self, step: int, total_steps: int) -> float:
        """Entropy asked for in step `step`, counted 1..total_steps."""
        progress = (step - 1) / max(1, total_steps - 1)
        return self.target_start + (self.target_end - self.target_start) * progress

    def controller(self, norm_errors: NormErrors, total_steps: int) -> SigmaController:
        return EntropyController(self, total_steps)


class EntropyController:
    """Runs EntropyTarget: `update` is called once per step and decides the next step's sigma."""

    per_norm_scale: Mapping[str, float] = {}

    def __init__(self, spec: EntropyTarget, total_steps: int) -> None:
        self.spec = spec
        self.total_steps = total_steps
        self.integral = math.log(spec.sigma_start)
        self.output = spec.sigma_start
        self.smoothed = math.nan  # nothing measured yet
        self.saturated = 0

    def sigma(self, step: int) -> float:
        return self.output

    def update(self, step: int, entropy: float) -> dict[str, float]:
        spec = self.spec
        target = spec.target(step, self.total_steps)
        first = math.isnan(self.smoothed)
        self.smoothed = entropy if first else (1 - spec.smoothing) * self.smoothed + spec.smoothing * entropy
        error = (target - self.smoothed) / target
        low, high = math.log(spec.sigma_min), math.log(spec.sigma_max)
        integral, proportional = self.integral + spec.integral_gain * error, spec.proportional_gain * error
        wanted = integral + proportional
        saturated = (wanted > high) - (wanted < low)  # -1 below, 0 within, 1 above the bounds
        self.integral = min(max(integral, low), high)
        self.output = math.exp(min(max(self.integral + proportional, low), high))
        if saturated != self.saturated:
            text = {1: "needs more noise than sigma_max", -1: "needs less noise than sigma_min", 0: "within the bounds"}
            log.info("step %d: entropy %.4g, target %.4g: %s", step, self.smoothed, target, text[saturated])
        self.saturated = saturated
        return {
            "aqn/entropy_target": target,
            "aqn/entropy_smoothed": self.smoothed,
            "aqn/sigma_next": self.output,
            "aqn/saturated": float(saturated),
        }

    def state(self) -> dict[str, float]:
        return {name: float(getattr(self, name)) for name in STATE}

    def restore(self, state: Mapping[str, Any]) -> None:
        for name in STATE:
            setattr(self, name, state[name])
