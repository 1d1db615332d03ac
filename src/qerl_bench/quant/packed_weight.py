"""What stands in the place of the weight of a packed layer, for code that looks at it."""

from __future__ import annotations

from typing import Any

import torch

from qerl_core.checks import ConfigError


class PackedWeightRead(ConfigError):
    """A model multiplies by the weight of a packed layer instead of calling the layer."""

    def __init__(self, layer: torch.nn.Module, format_name: str) -> None:
        super().__init__(f"a weight that is packed as {format_name} cannot be read; use quant=bf16")
        self.layer, self.format_name = layer, format_name


class PackedWeight:
    """Device, dtype and shape of a packed weight; reading its values is an error.

    PEFT reads `weight.device` to place an adapter, and adds to `weight.data` to merge one.
    """

    def __init__(self, layer: Any) -> None:
        tensor = next(layer.buffers())
        # PEFT would make its adapter in a dtype of floats
        self.device, self.dtype = tensor.device, torch.uint8 if tensor.is_floating_point() else tensor.dtype
        self.shape = torch.Size((layer.out_features, layer.in_features))
        self._format_name = layer.weight_format.name
        self._layer = layer

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by every function of torch that gets a packed weight. Raises PackedWeightRead."""
        read = next(arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, cls))
        raise PackedWeightRead(read._layer, read._format_name)

    @property
    def data(self) -> torch.Tensor:
        raise ConfigError(
            f"this layer's weight is packed as {self._format_name} and cannot be read or merged into: rounding it "
            "again loses most of an adapter's update; keep the adapter separate, or merge it into an unquantized model"
        )
