"""Base class of quantizers: how codes and scales are chosen, whatever the format that stores them.

A quantizer is a frozen dataclass named by `_target_` in conf/quantizer/*.yaml and imports torch only in its methods. It
reaches the format only through the methods of `BlockFormat`, so every quantizer works with every format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from qerl_bench.quant.base import BlockFormat
    from qerl_bench.quantizer.calibrate import InputGroup
    from qerl_bench.quantizer.calibration import Calibration


class Quantizer:
    """Chooses the codes and scales of each linear layer W (N, K). By default it rounds to nearest."""

    name: str
    calibration: Calibration | None  # the text that the quantizer runs through the model; None if it needs none

    @property
    def rescales(self) -> bool:
        """Whether `prepare` moves scales between layers, so that an adapter fits this base alone."""
        return type(self).prepare is not Quantizer.prepare

    def prepare(self, groups: list[InputGroup], weight_format: BlockFormat) -> None:
        """Rescale weights of one transformer block, in place, without changing the output of the block.

        Called before any layer of the block is packed, and only with a calibration text.
        """

    def pack(
        self,
        weight: torch.Tensor,
        weight_format: BlockFormat,
        tensor_amax: float | None,
        second_moment: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        """The packed tensors of W, as `BlockFormat.encode` returns them.

        `tensor_amax` is that of `BlockFormat.scales`. `second_moment` is the mean of x x^T over the layer's calibration
        inputs, FP32 (K, K); None without a calibration text, or if none of it reached the layer.
        """
        return weight_format.pack(weight, tensor_amax)
