"""aqn=entropy: a closed loop that steers sigma so that the sampling policy's entropy follows a target curve.

QeRL decays sigma by the clock; its readers ask for noise that reacts. The loop is an integral controller in log sigma,
with an optional proportional part. Working in logarithms fits noise whose useful range spans decades: the same relative
error of the entropy always moves sigma by the same factor.

    m_t = (1 - s) m_(t-1) + s H_t                 smoothed measurement, m_1 = H_1
    e_t = (target_t - m_t) / target_t             relative error
    I_t = I_(t-1) + k_i e_t                       integral, in log sigma, clamped to the bounds
    log sigma_(t+1) = I_t + k_p e_t               clamped to [log sigma_min, log sigma_max]

Anti-windup: because the integral itself never leaves the bounds, the loop answers in the very step in which the error
changes its sign, however long it has been at a bound.

Noise can only add entropy. While a policy is more random than its target the loop rests at sigma_min and says so
(`aqn/saturated` = -1). Every decision is in metrics.jsonl: target, smoothed measurement, next sigma, saturation.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qerl_bench.aqn.base import Schedule, SigmaController
from qerl_bench.checks import require

if TYPE_CHECKING:
    from qerl_bench.aqn.spec import NoiseSpec
    from qerl_bench.model.policy import Policy
    from qerl_bench.quant.base import WeightFormat

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EntropyTarget(Schedule):
    """The target runs straight from `target_start` (first step) to `target_end` (last step), in nats per token."""

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
        for key in ("target_start", "target_end", "sigma_min", "integral_gain"):
            value = getattr(self, key)
            require(_finite(value) and value > 0, f"aqn.{key} must be a positive number, got {value!r}")
        require(
            _finite(self.sigma_start)
            and _finite(self.sigma_max)
            and self.sigma_min <= self.sigma_start <= self.sigma_max,
            f"aqn needs sigma_min <= sigma_start <= sigma_max, got {self.sigma_min!r}, {self.sigma_start!r} and "
            f"{self.sigma_max!r}",
        )
        require(
            _finite(self.proportional_gain) and self.proportional_gain >= 0,
            f"aqn.proportional_gain must be a number >= 0, got {self.proportional_gain!r}",
        )
        require(
            _finite(self.smoothing) and 0 < self.smoothing <= 1,
            f"aqn.smoothing is the weight of the newest measurement, in (0, 1] (1 = none), got {self.smoothing!r}",
        )

    def check_with(self, quant: WeightFormat, injection: NoiseSpec) -> None:
        require(
            injection.norms != "missed",
            "aqn=entropy steers by what its noise does, but noise.norms=missed lets none in; use noise.norms=blocks",
        )

    def target(self, step: int, total_steps: int) -> float:
        """Entropy asked for in step `step`, counted 1..total_steps."""
        progress = (step - 1) / max(1, total_steps - 1)
        return self.target_start + (self.target_end - self.target_start) * progress

    def controller(self, policy: Policy, total_steps: int) -> SigmaController:
        return EntropyLoop(self, total_steps)


class EntropyLoop:
    """The controller at work. `observe` is called once per step and decides the next step's sigma."""

    factors: Mapping[str, float] = {}

    def __init__(self, spec: EntropyTarget, total_steps: int) -> None:
        self.spec = spec
        self.total_steps = total_steps
        self.integral = math.log(spec.sigma_start)
        self.output = spec.sigma_start
        self.smoothed = math.nan  # nothing measured yet
        self.saturated = 0

    def sigma(self, step: int) -> float:
        return self.output

    def observe(self, step: int, entropy: float) -> dict[str, float]:
        spec = self.spec
        target = spec.target(step, self.total_steps)
        first = math.isnan(self.smoothed)
        self.smoothed = entropy if first else (1 - spec.smoothing) * self.smoothed + spec.smoothing * entropy
        error = (target - self.smoothed) / target
        low, high = math.log(spec.sigma_min), math.log(spec.sigma_max)
        integral, proportional = self.integral + spec.integral_gain * error, spec.proportional_gain * error
        outside = _side(integral + proportional, low, high)
        self.integral = min(max(integral, low), high)
        self.output = math.exp(min(max(self.integral + proportional, low), high))
        if outside != self.saturated:
            bound = {1: "sigma_max: more noise is wanted", -1: "sigma_min: less noise is wanted", 0: "controller again"}
            log.info("step %d: entropy %.4g, target %.4g, %s", step, self.smoothed, target, bound[outside])
        self.saturated = outside
        return {
            "aqn/entropy_target": target,
            "aqn/entropy_smoothed": self.smoothed,
            "aqn/sigma_next": self.output,
            "aqn/saturated": float(outside),
        }

    def state(self) -> dict[str, float]:
        return {
            "integral": self.integral,
            "output": self.output,
            "smoothed": self.smoothed,
            "saturated": float(self.saturated),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.integral, self.output, self.smoothed = state["integral"], state["output"], state["smoothed"]
        self.saturated = int(state["saturated"])


def _side(value: float, low: float, high: float) -> int:
    """-1 below, 1 above, 0 within the bounds."""
    return (value > high) - (value < low)


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
