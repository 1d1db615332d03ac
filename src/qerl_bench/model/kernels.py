"""Which kernels a model runs: the fused ones where they can, the plain PyTorch reference everywhere else.

`kernel=auto` takes the fused kernels on a GPU, for layers that compute in bfloat16; `kernel=torch` never does. On a CPU
there is only the reference. Whatever was chosen is said, layer by layer: nothing falls back in silence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from peft.tuners import lora

from qerl_bench.quant.concat import concat_rows_in_place
from qerl_bench.quant.linear import PackedLinear
from qerl_kernels.decode import MOST_TOKENS, supported
from qerl_kernels.training_linear import Adapter, packed_linear

log = logging.getLogger(__name__)

REFERENCE = "torch"
DEQUANTIZE = "dequantize + cublas"
DECODE = f"decode gemm up to {MOST_TOKENS} tokens without gradient, dequantize + cublas otherwise"
CUBLAS = "cublas"
BITSANDBYTES = "bitsandbytes matmul_4bit"


class LoRALinear(lora.Linear):
    """PEFT's layer with an adapter. With `fused`, base and adapter are one operation in the dtype of the input.

    PEFT casts the input to the adapter's FP32 for two small matmuls without tensor cores, which cost about a quarter of
    the layer's time. Here the FP32 weights of the adapter are rounded for the product and get FP32 gradients.
    """

    fused = False
    rounded: Adapter | None = None  # in the dtype of the input, while `adapters_cast_to` holds

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        adapter = (self.rounded or self._adapter()) if self.fused and not args and not kwargs else None
        if adapter is None:
            return super().forward(x, *args, **kwargs)
        base = self.get_base_layer()
        assert isinstance(base, torch.nn.Linear)
        return linear_with_lora(base, x, adapter)

    def _adapter(self) -> Adapter | None:
        """The one plain adapter that is switched on, None where PEFT's own way is needed: none, several, or dropout."""
        if self.disable_adapters or self.merged or len(self.active_adapters) != 1:
            return None
        (name,) = self.active_adapters
        dropout = self.lora_dropout[name]
        if name in self.lora_variant or (self.training and not isinstance(dropout, torch.nn.Identity)):
            return None
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        return Adapter(a, b, self.scaling[name])


def linear_with_lora(base: torch.nn.Linear, x: torch.Tensor, adapter: Adapter | None) -> torch.Tensor:
    """What a layer, packed or not, makes of x, and `adapter` beside it."""
    if isinstance(base, PackedLinear):
        return base(x, adapter)
    return packed_linear(x, lambda _: base.weight, [(slice(None), 1.0)], base.bias, adapter)


@contextmanager
def adapters_cast_to(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Context in which fused layers have their adapters in `dtype` at hand, not to round them for every token.

    What changes in an adapter meanwhile is not seen.
    """
    layers = [module for module in model.modules() if isinstance(module, LoRALinear) and module.fused]
    try:
        for layer in layers:
            adapter = layer._adapter()
            if adapter is not None:
                layer.rounded = Adapter(adapter.a.to(dtype), adapter.b.to(dtype), adapter.scaling)
        yield
    finally:
        for layer in layers:
            layer.rounded = None


def fuse_linears(layers: Sequence[torch.nn.Module]) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    """What `layers` make of the same input: one matmul where they are frozen and stored alike, or else one each.

    To be made, and used, inside `adapters_cast_to`. Their adapters act as one: rows A above each other, and B's in
    blocks along the diagonal.
    """
    adapted = [layer for layer in layers if isinstance(layer, LoRALinear)]
    bases: list[Any] = [layer.get_base_layer() if isinstance(layer, LoRALinear) else layer for layer in layers]
    scalings = {layer.rounded.scaling for layer in adapted if layer.rounded is not None}
    plain = all(layer.disable_adapters or layer.rounded is not None for layer in adapted) and len(scalings) <= 1
    whole = concat_rows_in_place(bases) if plain else None
    if whole is None:
        return lambda x: tuple(layer(x) for layer in layers)
    sizes = [base.out_features for base in bases]
    adapter = None
    if scalings:
        like = next(layer.rounded for layer in adapted if layer.rounded is not None)
        found = [layer.rounded if isinstance(layer, LoRALinear) else None for layer in layers]
        a = torch.cat([one.a for one in found if one is not None])
        blocks = [like.b.new_empty(size, 0) if one is None else one.b for one, size in zip(found, sizes, strict=True)]
        adapter = Adapter(a, torch.block_diag(*blocks), like.scaling)
    return lambda x: linear_with_lora(whole, x, adapter).split(sizes, dim=-1)


def why_not_fused(kernel: str, device: torch.device) -> str | None:
    """Why fused kernels cannot be used at all, or None if they can."""
    if kernel == REFERENCE:
        return "kernel=torch"
    if device.type != "cuda":
        return f"the device is {device.type}"
    if find_spec("triton") is None:
        return "the package triton is not installed"
    return None


def choose_kernels(model: torch.nn.Module, layers: Iterable[str], kernel: str) -> dict[str, str]:
    """Switch the linear layers `layers` of `model` to the kernels that they can use; the choice by layer name."""
    chosen = {}
    for name in layers:
        module = model.get_submodule(name)
        base = module.get_base_layer() if isinstance(module, lora.Linear) else module
        assert isinstance(base, torch.nn.Linear), name
        chosen[name] = _chosen(base, kernel, next(model.parameters()).dtype)
        if isinstance(module, LoRALinear):
            module.fused = chosen[name] not in (REFERENCE, BITSANDBYTES)
    for choice in dict.fromkeys(chosen.values()):
        names = [name for name, its in chosen.items() if its == choice]
        log.info("kernel of %d layers (%s ... %s): %s", len(names), names[0], names[-1], choice)
    return chosen


def _chosen(base: torch.nn.Linear, kernel: str, compute: torch.dtype) -> str:
    if isinstance(base, PackedLinear) and base.uses_bitsandbytes:
        return BITSANDBYTES
    device = next(base.buffers()).device if isinstance(base, PackedLinear) else base.weight.device
    if why_not_fused(kernel, device) is not None or compute != torch.bfloat16:
        return REFERENCE
    if not isinstance(base, PackedLinear):
        return CUBLAS if not base.weight.requires_grad else REFERENCE
    if base.weight_format.kernel_layout is None:
        return REFERENCE
    try:
        base.use_kernels()
    except ValueError as error:  # scales that the layout leaves out, in a checkpoint made elsewhere
        log.warning("a layer keeps the reference: %s", error)
        return REFERENCE
    assert base.kernel_weight is not None
    return DECODE if supported(base.kernel_weight, 1, compute) else DEQUANTIZE
