"""What a quantizer is: the way to choose codes and scales, whatever the format that stores them.

A quantizer spec is a frozen dataclass named by `_target_` in conf/quantizer/*.yaml and imports no torch. It reaches the
format through `WeightFormat.scales`, `unit`, `nearest` and `encode` alone, so every quantizer works with every format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from qerl_bench.quant.base import WeightFormat
    from qerl_bench.quantizer.calibrate import Group
    from qerl_bench.quantizer.calibration import Calibration


class Quantizer(Protocol):
    """Chooses the codes and scales of each linear layer W (N, K)."""

    @property
    def name(self) -> str: ...

    @property
    def calibration(self) -> Calibration | None:
        """The text that this quantizer looks at; None if it needs none."""
        ...

    def prepare(self, groups: list[Group], weight_format: WeightFormat) -> None:
        """Rescale the weights of one transformer block, in place, without changing what the block computes.

        Called before any layer of the block is packed, and only for quantizers with a calibration text.
        """
        ...

    def pack(
        self,
        weight: torch.Tensor,
        weight_format: WeightFormat,
        tensor_amax: float | None,
        moment: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        """The packed tensors of W, as `WeightFormat.encode` returns them.

        `tensor_amax` is that of `WeightFormat.scales`. `moment` is the mean of x x^T over the layer's calibration
        inputs, FP32 (K, K); None where no text was asked for or none of it reached the layer.
        """
        ...
