"""quantizer=mse: for each block, the scale with the smallest squared error among a few, instead of its maximum's.

For NVFP4 the candidate 1.5 maps a block's maximum to 4 instead of 6, which uses the finer half of the grid: the choice
of "four over six" (arXiv 2512.02010). Candidates above 1 give nothing to the block that holds the tensor's maximum,
whose scale is E4M3's largest already. Left out: changing the tensor scale to make room for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.checks import require

if TYPE_CHECKING:
    import torch

    from qerl_bench.quant.base import WeightFormat
    from qerl_bench.quantizer.calibrate import Group


@dataclass(frozen=True, kw_only=True)
class BlockScaleSearch:
    """Tries each of `scale_multipliers`, factors on the scale that the format's rule gives; 1 is always tried first."""

    name: str
    scale_multipliers: list[float]

    def __post_init__(self) -> None:
        require(self.name != "", "quantizer.name is empty; give it a name, for example mse")
        require(
            len(self.scale_multipliers) > 0
            and all(isinstance(s, int | float) and 0.1 <= s <= 10 for s in self.scale_multipliers),
            f"quantizer.scale_multipliers must be factors between 0.1 and 10, got {self.scale_multipliers}; 1 is the format's own",
        )

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
        import torch

        shape = (weight.shape[0], weight.shape[1])
        blocks = weight.to(torch.float32).unflatten(-1, (-1, weight_format.block))  # (N, K/B, B)

        def error_of(scales: dict[str, torch.Tensor]) -> torch.Tensor:
            unit = weight_format.unit(scales, shape).unsqueeze(-1)
            # A block of zeros may have a scale of zero (NF4); its error is zero under any scale.
            restored = weight_format.nearest(blocks / torch.where(unit == 0, 1.0, unit)) * unit
            return (restored - blocks).square().sum(-1)  # (N, K/B)

        best = weight_format.scales(weight, tensor_amax)
        least = error_of(best)
        for stretch in self.scale_multipliers:
            scales = weight_format.scales(weight, tensor_amax, stretch)
            error = error_of(scales)
            better = error < least
            least = torch.where(better, error, least)
            best = {name: _chosen(better, scales[name], tensor) for name, tensor in best.items()}
        return weight_format.encode(weight, best)


def _chosen(better: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """`new` where `better` (N, K/B) is true; tensors that are not one number per block do not depend on the stretch."""
    import torch

    if old.numel() != better.numel():
        return old
    if old.dtype == torch.float8_e4m3fn:
        return torch.where(better, new.view(torch.uint8), old.view(torch.uint8)).view(old.dtype)
    return torch.where(better.view(old.shape), new, old)
