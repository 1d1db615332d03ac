"""quantizer=awq: make the inputs that carry much signal larger before rounding, and divide the layer before by as much.

Lin et al., arXiv 2306.00978, with a search that packs every candidate in the real format: a block scale shared by 16 or
32 inputs reacts to scaling in a way that an integer stand-in does not show. The factors are s = rms(x)^a, normalised,
with `a` on a grid; a = 0 is plain rounding, so the measured output error never gets worse. They are folded into what
feeds the layer: a norm's scale, the value projection, or the up projection. Left out: clipping.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.checks import require
from qerl_bench.quantizer.calibration import Calibration

if TYPE_CHECKING:
    import torch

    from qerl_bench.quant.base import WeightFormat
    from qerl_bench.quantizer.calibrate import Group


@dataclass(frozen=True, kw_only=True)
class AWQ:
    """`steps` exponents are tried for each group of layers that share their input: 0, 1/steps, ... below 1."""

    name: str
    steps: int
    calibration: Calibration

    def __post_init__(self) -> None:
        require(self.name != "", "quantizer.name is empty; give it a name, for example awq")
        require(
            isinstance(self.steps, int) and self.steps >= 2,
            f"quantizer.steps must be a whole number of at least 2, got {self.steps!r}; 20 is usual",
        )

    def prepare(self, groups: list[Group], weight_format: WeightFormat) -> None:
        for group in groups:
            if group.foldable:
                group.rescale(self.search(group, weight_format))

    def search(self, group: Group, weight_format: WeightFormat) -> torch.Tensor:
        """The factors (K,) under which the group's layers lose the least of their output."""
        import torch

        rms = group.moment.diagonal().sqrt().clamp(min=1e-8)  # (K,)
        best, least = torch.ones_like(rms), None
        for step in range(self.steps):
            factors = group.shared(rms.pow(step / self.steps))
            factors = factors / (factors.max() * factors.min()).sqrt()
            loss = sum(group.losses(factors, weight_format))
            if least is None or loss < least:
                best, least = factors, loss
        return best

    def pack(
        self,
        weight: torch.Tensor,
        weight_format: WeightFormat,
        tensor_amax: float | None,
        moment: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        return weight_format.pack(weight, tensor_amax)
