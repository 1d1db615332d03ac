"""aqn=layerwise: any schedule, shared out among the norms in proportion to the quantization error behind them.

QeRL gives every norm the same sigma. If noise is to extend what quantization does, it should be larger where the format
errs more; this is what the paper's readers ask for and no one has published.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.aqn.base import OpenLoop, Schedule, SigmaController
from qerl_bench.aqn.norm_consumers import error_of_norms, root_mean_square
from qerl_bench.checks import require

if TYPE_CHECKING:
    from qerl_bench.aqn.spec import NoiseSpec
    from qerl_bench.model.policy import Policy
    from qerl_bench.quant.base import WeightFormat


@dataclass(frozen=True, kw_only=True)
class Layerwise(Schedule):
    """sigma of norm n = sigma(step) * e_n / rms(e): the root mean square over the block norms is the schedule's own.

    e_n is the measured relative error of the weights that the norm feeds (`aqn/norm_consumers.py`).
    """

    name: str
    schedule: Schedule

    def __post_init__(self) -> None:
        require(
            isinstance(self.schedule, Schedule) and type(self.schedule).controller is Schedule.controller,
            f"aqn.schedule must be a schedule of the step alone, such as exp or constant, got {self.schedule!r}",
        )

    def check_with(self, quant: WeightFormat, injection: NoiseSpec) -> None:
        require(
            quant.bits_per_weight is not None,
            f"aqn=layerwise follows each layer's quantization error, but quant={quant.name} quantizes nothing. Use a "
            "4-bit format, or aqn=format_error for noise on unquantized weights with the size of a format's error",
        )

    def sigma(self, step: int, total_steps: int) -> float:
        return self.schedule.sigma(step, total_steps)

    def controller(self, policy: Policy, total_steps: int) -> SigmaController:
        errors = error_of_norms(policy.norms, {name: report.relative_error for name, report in policy.layers.items()})
        mean = root_mean_square(errors.values())
        require(
            mean > 0,
            "aqn=layerwise follows each layer's quantization error, but none was measured: this model came packed. "
            "Give the unquantized model, or use another schedule",
        )
        factors = {name: error / mean for name, error in errors.items()}
        return OpenLoop(self, total_steps, {"model.norm": 0.0} | factors)
