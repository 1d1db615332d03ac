"""quantizer=mse: for each block, the scale with the smallest squared error among a few candidates; no data.

For NVFP4 the candidate 1.5 maps a block's maximum to 4 instead of 6, which uses the finer half of the grid: the choice
of "four over six" (arXiv 2512.02010). Candidates above 1 do not help the block that holds the tensor's maximum, because
its scale is already E4M3's largest. Left out: changing the tensor scale to make room for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.quantizer.base import Quantizer
from qerl_core.checks import require

if TYPE_CHECKING:
    import torch

    from qerl_bench.quant.base import BlockFormat


@dataclass(frozen=True, kw_only=True)
class BlockScaleSearch(Quantizer):
    """Tries `scale_multipliers` times the scale that the format's rule gives, after that scale itself."""

    name: str
    scale_multipliers: list[float]
    calibration = None

    def __post_init__(self) -> None:
        require(
            len(self.scale_multipliers) > 0
            and all(isinstance(s, int | float) and 0.1 <= s <= 10 for s in self.scale_multipliers),
            "quantizer.scale_multipliers must be numbers from 0.1 to 10, at least one, got "
            f"{self.scale_multipliers}; 1 is the format's own scale",
        )

    def pack(
        self,
        weight: torch.Tensor,
        weight_format: BlockFormat,
        tensor_amax: float | None,
        second_moment: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        import torch

        shape = (weight.shape[0], weight.shape[1])
        inputs, rows = weight_format.block_of(shape[1]), weight_format.block_rows
        blocks = weight.to(torch.float32).unflatten(-1, (-1, inputs))  # (N, K/B, B)

        def block_errors(scales: dict[str, torch.Tensor]) -> torch.Tensor:
            unit = weight_format.unit(scales, shape).unsqueeze(-1)
            # A block of zeros may have the scale zero (NF4); its error is zero under any scale.
            restored = weight_format.nearest(blocks / torch.where(unit == 0, 1.0, unit)) * unit
            errors = (restored - blocks).square().sum(-1)  # (N, K/B)
            if rows == 1:
                return errors
            return torch.nn.functional.pad(errors, (0, 0, 0, -shape[0] % rows)).unflatten(0, (-1, rows)).sum(1)

        best = weight_format.scales(weight, tensor_amax)
        least = block_errors(best)
        for multiplier in self.scale_multipliers:
            scales = weight_format.scales(weight, tensor_amax, multiplier)
            error = block_errors(scales)
            better = error < least
            least = torch.where(better, error, least)
            best = {name: _where_better(better, scales[name], tensor) for name, tensor in best.items()}
        return weight_format.encode(weight, best)


def _where_better(better: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """`new` where `better` (a flag per block), else `old`. Tensor scales, which know no multiplier, stay."""
    import torch

    if old.numel() != better.numel():
        return old
    if old.dtype == torch.float8_e4m3fn:
        return torch.where(better, new.view(torch.uint8), old.view(torch.uint8)).view(old.dtype)
    return torch.where(better.view(old.shape), new, old)
