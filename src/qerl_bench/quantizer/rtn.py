"""quantizer=rtn: round to nearest under each block's maximum. No data, and what QeRL's released script does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.checks import require

if TYPE_CHECKING:
    import torch

    from qerl_bench.quant.base import WeightFormat
    from qerl_bench.quantizer.calibrate import Group


@dataclass(frozen=True, kw_only=True)
class RoundToNearest:
    """The format's own rule, nothing else."""

    name: str

    def __post_init__(self) -> None:
        require(self.name != "", "quantizer.name is empty; give it a name, for example rtn")

    @property
    def calibration(self) -> None:
        return None

    def prepare(self, groups: list[Group], weight_format: WeightFormat) -> None:
        """Changes nothing."""

    def pack(
        self,
        weight: torch.Tensor,
        weight_format: WeightFormat,
        tensor_amax: float | None,
        moment: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        return weight_format.pack(weight, tensor_amax)
