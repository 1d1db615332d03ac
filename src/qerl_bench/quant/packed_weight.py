"""What stands in the place of the weight of a packed layer, for code that looks at it, and where it lies."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from qerl_core.checks import ConfigError

SHARDED = "sharded"  # the module that holds as parameters what else are buffers of a packed layer


def stored(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The packed tensors of `layer` by name: its buffers and, once its base is sharded, its parameters."""
    parameters = layer.get_submodule(SHARDED)._parameters if is_sharded(layer) else {}
    return {name: tensor for name, tensor in (layer._buffers | parameters).items() if tensor is not None}


def is_sharded(layer: torch.nn.Module) -> bool:
    return SHARDED in layer._modules


def store_as_parameters(layer: torch.nn.Module, left_out: Collection[str]) -> list[torch.nn.Parameter]:
    """Make the packed tensors of `layer` but `left_out` frozen parameters, which FSDP2 can cut, and return them.

    They belong to a module of their own, since the layer has a property of the name `weight`.
    """
    cut = {name: tensor for name, tensor in stored(layer).items() if name not in left_out and tensor.dim() > 0}
    parameters = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in cut.items()}
    layer._modules[SHARDED] = holder = torch.nn.Module()
    holder._parameters.update(parameters)
    for name in cut:
        del layer._buffers[name]
    return [*parameters.values()]


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
        tensor = next(iter(stored(layer).values()))
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
