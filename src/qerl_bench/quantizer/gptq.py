"""quantizer=gptq: round the inputs one after the other, and correct the later ones for the error made so far.

Frantar et al., arXiv 2210.17323, with the format's own rounding: codes are the nearest on the format's grid, under the
scales that the checkpoint will store. The scales of a block are computed when its first input is reached, from the
weights corrected so far; the tensor scale is that of the original weights. Left out: sorting inputs by energy, which
would need scales of the original weights, or blocks in an order that no checkpoint stores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.quantizer.base import Quantizer
from qerl_bench.quantizer.calibration import Calibration
from qerl_core.checks import ConfigError, check_fields, number

if TYPE_CHECKING:
    import torch

    from qerl_bench.quant.base import BlockFormat

CHUNK = (
    128  # inputs between two corrections of the rest of the matrix, for speed; a multiple of all blocks but whole rows
)


@dataclass(frozen=True, kw_only=True)
class GPTQ(Quantizer):
    """`damping` times its mean is added to the diagonal of the second moment, so that it can be inverted."""

    name: str
    damping: float
    calibration: Calibration

    def __post_init__(self) -> None:
        check_fields(self, "quantizer", damping=number(above=0, most=1))

    def pack(
        self,
        weight: torch.Tensor,
        weight_format: BlockFormat,
        tensor_amax: float | None,
        second_moment: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        import torch

        if second_moment is None:
            return weight_format.pack(weight, tensor_amax)
        factor = inverse_factor(second_moment, self.damping)  # (K, K), upper triangular
        amax = float(weight.abs().max()) if tensor_amax is None else tensor_amax
        corrected = weight.to(torch.float32).clone()
        rounded = torch.empty_like(corrected)
        scales: list[dict[str, torch.Tensor]] = []
        rows, width = corrected.shape
        inputs = weight_format.block_of(width)
        for start in range(0, width, CHUNK):
            stop = min(start + CHUNK, width)
            errors = torch.empty(rows, stop - start, device=corrected.device)
            for column in range(start, stop):
                if column % inputs == 0:
                    scales.append(weight_format.scales(corrected[:, column : column + inputs], amax))
                    unit = weight_format.unit(scales[-1], (rows, inputs))[:, 0]
                    unit = torch.where(unit == 0, 1.0, unit)
                value = corrected[:, column]
                rounded[:, column] = weight_format.nearest(value / unit) * unit
                error = (value - rounded[:, column]) / factor[column, column]
                corrected[:, column:stop] -= error.unsqueeze(1) * factor[column, column:stop].unsqueeze(0)
                errors[:, column - start] = error
            corrected[:, stop:] -= errors @ factor[start:stop, stop:]
        return weight_format.encode(rounded, _concat_blocks(scales))


def inverse_factor(second_moment: torch.Tensor, damping: float) -> torch.Tensor:
    """U (K, K), upper triangular, with U^T U = (H + damping * mean(diag H) * I)^-1. Zeros on diag H count as its mean.

    Raises ConfigError if the second moment H cannot be inverted with this damping.
    """
    import torch

    damped = second_moment.to(torch.float64)
    diagonal = damped.diagonal()
    mean = float(diagonal.mean())
    damped = damped + torch.diag(torch.where(diagonal == 0, mean or 1.0, 0.0) + damping * (mean or 1.0))
    lower, failed = torch.linalg.cholesky_ex(damped)
    if int(failed) == 0:
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    if int(failed) != 0:
        raise ConfigError(
            f"the second moment of the calibration inputs cannot be inverted with quantizer.damping={damping}; "
            "raise quantizer.damping or quantizer.calibration.samples"
        )
    return upper.to(torch.float32)


def _concat_blocks(scales: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The scales of the whole matrix from those of its columns of blocks."""
    import torch

    from qerl_bench.quant.linear import TENSOR_SCALES

    first = scales[0]
    joined: dict[str, torch.Tensor] = {}
    for name, tensor in first.items():
        if name in TENSOR_SCALES:
            joined[name] = tensor
            continue
        columns = torch.stack([s[name].view(torch.uint8).reshape(-1, tensor.element_size()) for s in scales], dim=1)
        whole = columns.reshape(-1).view(tensor.dtype)  # (N * K/B,)
        joined[name] = whole.view(-1, len(scales)) if tensor.dim() == 2 else whole
    return joined
