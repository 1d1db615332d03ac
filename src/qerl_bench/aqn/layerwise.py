"""aqn=layerwise: any open-loop schedule, with sigma distributed over the norms in proportion to quantization error.

QeRL gives every norm the same sigma. If noise is meant to extend the effect of quantization, it should be larger where
the format's error is larger; we know of no published result for this.
"""

from __future__ import annotations

from dataclasses import dataclass

from qerl_bench.aqn.base import OpenLoop, Schedule, SigmaController
from qerl_bench.aqn.norm_errors import NormErrors
from qerl_bench.aqn.spec import NoiseSpec
from qerl_bench.quant.base import WeightFormat
from qerl_core.checks import require


@dataclass(frozen=True, kw_only=True)
class Layerwise(Schedule):
    """sigma of norm n = sigma(step) * e_n / rms(e): the root mean square over the block norms is the schedule's sigma.

    e_n is the measured relative error of the layers that read the norm (`aqn/norm_errors.py`).
    """

    name: str
    schedule: Schedule

    def __post_init__(self) -> None:
        require(
            isinstance(self.schedule, Schedule) and type(self.schedule).controller is Schedule.controller,
            f"aqn.schedule must depend on the step alone, such as exp or constant, got {self.schedule!r}",
        )

    def check_with(self, quant: WeightFormat, noise: NoiseSpec) -> None:
        noise.require_norms("layerwise")
        require(
            quant.bits_per_weight is not None,
            f"aqn=layerwise follows each layer's quantization error, but quant={quant.name} quantizes nothing. Use a "
            "4-bit format, or aqn=format_error for noise on unquantized weights with the size of a format's error",
        )

    def sigma(self, step: int, total_steps: int) -> float:
        return self.schedule.sigma(step, total_steps)

    def controller(self, norm_errors: NormErrors, total_steps: int) -> SigmaController:
        level, per_norm_scale = norm_errors.scale_by_error()
        require(
            level > 0,
            "aqn=layerwise follows each layer's quantization error, but none was measured: this model came packed. "
            "Give the unquantized model, or use another schedule",
        )
        return OpenLoop(self, total_steps, per_norm_scale)
