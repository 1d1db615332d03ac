"""The checkpoint that vLLM loads: the policy's base weights, byte for byte, under their checkpoint names.

Formats for which vLLM has kernels are written packed. NF4, which vLLM dropped in 0.28, is dequantized to the model's
dtype: the same weights and so the same learning curve, but no claim about speed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qerl_bench.engine.vllm.install import loads_packed
from qerl_bench.quant.base import WeightFormat
from qerl_bench.quant.experts import PackedExperts
from qerl_bench.quant.export import checkpoint_tensors, write_model
from qerl_bench.quant.linear import FUSED_SIBLINGS, PackedLinear, resident_bytes
from qerl_bench.quant.packed_config import config_entry
from qerl_bench.quant.packed_share import persistent_buffers
from qerl_core.checks import require

TENSOR_SCALE = "weight_global_scale"


@dataclass(frozen=True)
class BaseCheckpoint:
    """The policy's frozen weights as vLLM gets them."""

    model: Any
    weight_format: WeightFormat | None  # None if no layer is packed
    packed: bool  # whether packed layers are written as codes, not dequantized

    @classmethod
    def from_model(cls, model: Any, dequantize: bool, device: str) -> BaseCheckpoint:
        """The checkpoint of `model`. Raises ConfigError if vLLM has no kernel for it on `device`."""
        experts = next((name for name, module in model.named_modules() if isinstance(module, PackedExperts)), None)
        require(
            experts is None,
            f"{type(model).__name__} has packed experts ({experts}), and whether vLLM computes with the same weights "
            "has not been tried; use engine=hf, or quant=bf16",
        )
        layers = packed_layers(model)
        weight_format = next(iter(layers.values())).weight_format if layers else None
        return cls(model, weight_format, loads_packed(weight_format, dequantize, device))

    @property
    def label(self) -> str:
        """The weights that sample, in words, for engine.json."""
        dtype = str(self.model.dtype).removeprefix("torch.")
        if self.weight_format is None:
            return dtype
        if self.packed:
            return f"{self.weight_format.name}, packed"
        return f"{self.weight_format.name} values on {dtype} kernels (no claim about speed)"

    def write(self, folder: Path) -> None:
        """Write config and weights to the empty `folder`. No tokenizer is needed: vLLM gets token ids."""
        tensors = {name.replace(".base_layer", ""): tensor for name, tensor in self._tensors() if ".lora_" not in name}
        needed, free = sum(tensor.nbytes for tensor in tensors.values()), shutil.disk_usage(folder).free
        require(
            free > needed,
            f"vLLM reads the base weights from a folder, and {folder.parent} has no room for it: {needed / 2**30:.1f} "
            f"GiB are needed and {free / 2**30:.1f} free. Set the environment variable TMPDIR to a larger disk",
        )
        entry = None
        if self.packed:
            assert self.weight_format is not None
            require_shared_scales(tensors)
            names = [name for name, m in self.model.named_modules() if type(m) is torch.nn.Linear]
            unquantized = [name.removesuffix(".base_layer") for name in names if ".lora_" not in name]
            entry = config_entry(self.weight_format, unquantized, str(self.model.dtype).removeprefix("torch."))
        write_model(self.model, tensors, entry, folder)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        if self.packed:
            yield from checkpoint_tensors(self.model)
            return
        for name, layer in packed_layers(self.model).items():
            yield f"{name}.weight", layer.dequantized().to(self.model.dtype).cpu()
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()
        yield from persistent_buffers(self.model).items()

    def resident_bytes(self) -> int:
        """Bytes of the linear layers in the policy's own copy."""
        modules = [module for name, module in self.model.named_modules() if ".lora_" not in name]
        return sum(resident_bytes(module) for module in modules if isinstance(module, torch.nn.Linear))


def packed_layers(model: torch.nn.Module) -> dict[str, PackedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def require_shared_scales(tensors: dict[str, torch.Tensor]) -> None:
    """Raise ConfigError if layers that vLLM fuses into one matrix have different tensor scales.

    vLLM would only warn and use the largest for all of them.
    """
    for name, scale in tensors.items():
        layer = name.removesuffix(f".{TENSOR_SCALE}")
        parent, _, leaf = layer.rpartition(".")
        siblings = next((group for group in FUSED_SIBLINGS if leaf in group), ())
        for other in (f"{parent}.{sibling}.{TENSOR_SCALE}" for sibling in siblings if layer != name):
            require(
                other not in tensors or torch.equal(tensors[other], scale),
                f"{layer} and {other.removesuffix(f'.{TENSOR_SCALE}')} have different tensor scales, and vLLM would "
                "use one for both. Use engine.dequantize=true, or pack the unquantized model, which gives them one",
            )
