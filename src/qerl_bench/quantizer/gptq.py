"""quantizer=gptq: round one input after the other and let the inputs that are still to come make up for the error.

Frantar et al., arXiv 2210.17323, with the rounding of the format itself: codes are the nearest of the real float grid
under the scales that the checkpoint will store. The scales of a block are set when its first input is reached, from the
weights as they are by then; the tensor scale is that of the original weights. Left out: reordering inputs by their
energy, which would tie the scales to the original weights or the blocks to an order that no checkpoint stores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.checks import ConfigError, require
from qerl_bench.quantizer.calibration import Calibration

if TYPE_CHECKING:
    import torch

    from qerl_bench.quant.base import WeightFormat
    from qerl_bench.quantizer.calibrate import Group

CHUNK = 128  # inputs after which the rest of the matrix is corrected; a speed setting, and a multiple of every block


@dataclass(frozen=True, kw_only=True)
class GPTQ:
    """`damping` is added to the second moment's diagonal, as a share of its mean, so that it can be inverted."""

    name: str
    damping: float
    calibration: Calibration

    def __post_init__(self) -> None:
        require(self.name != "", "quantizer.name is empty; give it a name, for example gptq")
        require(
            isinstance(self.damping, int | float) and 0 < self.damping <= 1,
            f"quantizer.damping must be in (0, 1], got {self.damping!r}; 0.01 is usual",
        )

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

        if moment is None:
            return weight_format.pack(weight, tensor_amax)
        factor = inverse_factor(moment, self.damping)  # (K, K), upper triangular
        amax = float(weight.abs().max()) if tensor_amax is None else tensor_amax
        left = weight.to(torch.float32).clone()  # what is still to be rounded, corrected on the way
        rounded = torch.empty_like(left)
        scales: list[dict[str, torch.Tensor]] = []
        rows, width = left.shape
        for start in range(0, width, CHUNK):
            stop = min(start + CHUNK, width)
            errors = torch.empty(rows, stop - start, device=left.device)
            for column in range(start, stop):
                if column % weight_format.block == 0:
                    slab = left[:, column : column + weight_format.block]
                    scales.append(weight_format.scales(slab, amax))
                    unit = weight_format.unit(scales[-1], (rows, weight_format.block))[:, 0]
                    unit = torch.where(unit == 0, 1.0, unit)
                value = left[:, column]
                rounded[:, column] = weight_format.nearest(value / unit) * unit
                error = (value - rounded[:, column]) / factor[column, column]
                left[:, column:stop] -= error.unsqueeze(1) * factor[column, column:stop].unsqueeze(0)
                errors[:, column - start] = error
            left[:, stop:] -= errors @ factor[start:stop, stop:]
        return weight_format.encode(rounded, _side_by_side(scales))


def inverse_factor(moment: torch.Tensor, damping: float) -> torch.Tensor:
    """U (K, K), upper triangular, with U^T U = (H + damping * mean(diag H) * I)^-1; dead inputs count as average ones.

    Raises ConfigError if the second moment H cannot be inverted with this damping.
    """
    import torch

    damped = moment.to(torch.float64)
    diagonal = damped.diagonal()
    mean = float(diagonal.mean())
    damped = damped + torch.diag(torch.where(diagonal == 0, mean or 1.0, 0.0) + damping * (mean or 1.0))
    lower, failed = torch.linalg.cholesky_ex(damped)
    if int(failed) == 0:
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    if int(failed) != 0:
        raise ConfigError(
            "the calibration inputs of this layer are too alike for quantizer.damping="
            f"{damping}: their second moment cannot be inverted; raise the damping, or quantizer.calibration.samples"
        )
    return upper.to(torch.float32)


def _side_by_side(scales: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The scales of the whole matrix from those of its blocks, which have one column each."""
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
