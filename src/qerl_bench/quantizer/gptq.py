"""quantizer=gptq: round the inputs one after the other, and correct the later ones for the error made so far.

Frantar et al., arXiv 2210.17323, with the format's own rounding: codes are the nearest on the format's grid, under the
scales that the checkpoint will store. The scales of a block are computed when its first input is reached, from the
weights corrected so far; the tensor scale is that of the original weights. Left out: sorting inputs by energy, which
would need scales of the original weights, or blocks in an order that no checkpoint stores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from qerl_bench.quantizer.base import Quantizer
from qerl_bench.quantizer.calibration import Calibration
from qerl_core.checks import ConfigError, check_fields, number

if TYPE_CHECKING:
    import torch

    from qerl_bench.quant.base import BlockFormat

CHUNK = 128  # inputs between two corrections of the rest of the matrix, for speed; about, in whole blocks


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
        width = corrected.shape[1]
        inputs = weight_format.block_of(width)
        whole_rows = weight_format.scales(corrected, amax) if inputs == width else None
        step = CHUNK if inputs == width else CHUNK // inputs * inputs or inputs
        rounding = _Rounding(weight_format, amax, inputs, whole_rows)
        first = slice(0, min(step, width))
        rounded_chunk = rounding.recorded(corrected[:, first], factor[first, first])
        rounded = torch.empty_like(corrected)
        scales = [] if whole_rows is None else [whole_rows]
        for start in range(0, width, step):
            here, later = slice(start, min(start + step, width)), slice(start + step, width)
            chunk = rounded_chunk(corrected[:, here], factor[here, here])
            rounded[:, here] = chunk.rounded
            corrected[:, later] -= chunk.errors @ factor[here, later]
            scales += chunk.scales
        weight_format.require_finite(rounded)
        return weight_format.encode(rounded, _concat_blocks(scales))


class _Chunk(NamedTuple):
    """What rounding of neighboring inputs gives."""

    rounded: torch.Tensor  # (N, C), FP32
    errors: torch.Tensor  # (N, C), FP32: those of each input over the factor's diagonal
    scales: list[dict[str, torch.Tensor]]  # of each block, unless blocks are whole rows


@dataclass(frozen=True)
class _Rounding:
    """How neighboring inputs of one matrix are rounded, each after the correction for those before it."""

    weight_format: BlockFormat
    amax: float
    inputs: int  # that share a scale
    whole_rows: dict[str, torch.Tensor] | None  # the scales, if they are those of whole rows

    def __call__(self, weight: torch.Tensor, factor: torch.Tensor) -> _Chunk:
        """Round W (N, C), FP32, with the inverse factor (C, C) of its inputs."""
        import torch

        corrected, rounded, errors = weight.clone(), torch.empty_like(weight), torch.empty_like(weight)
        scales: list[dict[str, torch.Tensor]] = []
        unit = None if self.whole_rows is None else self._unit(self.whole_rows, len(weight))
        for column in range(weight.shape[1]):
            if self.whole_rows is None and column % self.inputs == 0:
                scales.append(self.weight_format.scales(corrected[:, column : column + self.inputs], self.amax))
                unit = self._unit(scales[-1], len(weight))
            assert unit is not None
            value = corrected[:, column]
            rounded[:, column] = self.weight_format.nearest(value / unit) * unit
            error = (value - rounded[:, column]) / factor[column, column]
            corrected[:, column:] -= error.unsqueeze(1) * factor[column, column:].unsqueeze(0)
            errors[:, column] = error
        return _Chunk(rounded, errors, scales)

    def _unit(self, scales: dict[str, torch.Tensor], rows: int) -> torch.Tensor:
        import torch

        unit = self.weight_format.unit(scales, (rows, self.inputs))[:, 0]
        return torch.where(unit == 0, 1.0, unit)

    def recorded(self, weight: torch.Tensor, factor: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor], _Chunk]:
        """The same for many chunks of this shape. A GPU replays the thousand kernels of one that was recorded once."""
        import torch

        if not weight.is_cuda:
            return self
        weight, factor, graph = weight.clone(), factor.clone(), torch.cuda.CUDAGraph()
        self(weight[:, : self.inputs], factor[: self.inputs, : self.inputs])  # makes tables that are kept
        with torch.cuda.graph(graph):
            found = self(weight, factor)

        def replay(new_weight: torch.Tensor, new_factor: torch.Tensor) -> _Chunk:
            if new_weight.shape != weight.shape:
                return self(new_weight, new_factor)
            weight.copy_(new_weight)
            factor.copy_(new_factor)
            graph.replay()
            scales = [{name: tensor.clone() for name, tensor in block.items()} for block in found.scales]
            return _Chunk(found.rounded, found.errors, scales)

        return replay


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
