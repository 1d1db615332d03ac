"""Chooses the kernels of a model: fused kernels where they can run, the plain PyTorch reference everywhere else.

`kernel=auto` uses fused kernels on a GPU, for layers that compute in bfloat16; `kernel=torch` never uses them. A CPU
has only the reference. The choice for each layer is logged, so a fallback is never silent. Whole blocks are fused in
training if `kernel=block` asks for it, or by `kernel=auto` in a model that is not small.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
from peft.tuners import lora

from qerl_bench.model.adapters import LoRAExperts
from qerl_bench.model.base import SMALL_BYTES
from qerl_bench.quant.activations import in_fp8, why_not_fp8
from qerl_bench.quant.concat import concat_rows_in_place
from qerl_bench.quant.linear import PackedLinear
from qerl_bench.quant.matrices import PackedMatrices
from qerl_core.checks import require
from qerl_kernels.compilers import refusal
from qerl_kernels.decode import MOST_TOKENS, kernel_of, separable
from qerl_kernels.grouped import FORMATS as GROUPED_FORMATS
from qerl_kernels.grouped import MAX_TOKENS as GROUPED_TOKENS
from qerl_kernels.training_linear import Adapter, JoinedAdapters, packed_linear

log = logging.getLogger(__name__)

REFERENCE = "torch"
FUSED_BLOCKS = "block"
MODULES = "modules"
GROUPED = f"grouped gemm up to {GROUPED_TOKENS} tokens without gradient, dequantize + cublas otherwise"
DEQUANTIZE = "dequantize + cublas"
DECODE = {
    kernel: f"decode gemm ({kernel}) up to {tokens} tokens without gradient, dequantize + cublas otherwise"
    for kernel, tokens in MOST_TOKENS.items()
}
CUBLAS = "cublas"
SCALED = "fp8 by fp8 (scaled_mm), for gradients with train.gradients=fp8, dequantize + cublas otherwise"
BITSANDBYTES = "bitsandbytes matmul_4bit"


class LoRALinear(lora.Linear):
    """PEFT's layer with an adapter. If `fused`, base and adapter are one operation in the dtype of the input.

    PEFT casts the input to the adapter's FP32 for two small matmuls, which then miss the tensor cores and take about a
    quarter of the layer's time. Here the adapter's FP32 weights are cast to the input's dtype and get FP32 gradients.
    """

    fused = False
    cast_adapter: Adapter | None = None  # in the dtype of the input, inside `adapters_cast_to`

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        adapter = self._own_adapter() if self.fused and not args and not kwargs else None
        if adapter is None:
            return super().forward(x, *args, **kwargs)
        base = self.get_base_layer()
        assert isinstance(base, torch.nn.Linear)
        return linear_with_lora(base, x, adapter)

    def _own_adapter(self) -> Adapter | None:
        """The adapter of the one operation; if the base rounds its input, in sampling alone."""
        return self.cast_adapter or (None if rounds(self.get_base_layer()) else self.adapter())

    def adapter(self) -> Adapter | None:
        """The active adapter; None if PEFT's own forward is needed: without adapter, with several, or with dropout."""
        if self.disable_adapters or self.merged or len(self.active_adapters) != 1:
            return None
        (name,) = self.active_adapters
        dropout = self.lora_dropout[name]
        if name in self.lora_variant or (self.training and not isinstance(dropout, torch.nn.Identity)):
            return None
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        return Adapter(a, b, self.scaling[name])


def linear_with_lora(base: torch.nn.Linear, x: torch.Tensor, adapter: Adapter | JoinedAdapters | None) -> torch.Tensor:
    """Output of a linear layer, packed or not, plus that of `adapter`."""
    if isinstance(base, PackedLinear):
        return base(x, adapter)
    return packed_linear(x, base.weight.to, [(slice(None), 1.0)], base.bias, adapter)


@contextmanager
def adapters_cast_to(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Cast the adapters of fused layers to `dtype` once, for the duration of the context, not once per token.

    Changes to the adapters inside the context have no effect there.
    """
    layers: list[Any] = [module for module in model.modules() if isinstance(module, LoRALinear) and module.fused]
    layers += [module for module in model.modules() if isinstance(module, LoRAExperts)]
    try:
        for layer in layers:
            adapter = layer.adapter()
            if adapter is not None:
                a, b = (matrix.to(dtype).contiguous() for matrix in (adapter.a, adapter.b))
                layer.cast_adapter = replace(adapter, a=a, b=b)
        yield
    finally:
        for layer in layers:
            layer.cast_adapter = None


class JoinedLinears:
    """Layers over one input as one matmul in training: their outputs (..., N), one behind the other.

    Their weights become one, which `fuse_linears` finds joined later. Where formats or adapters do not allow it, the
    layers run one by one.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.layers = layers
        bases: list[Any] = [layer.get_base_layer() if isinstance(layer, LoRALinear) else layer for layer in layers]
        ends = list(accumulate(base.out_features for base in bases))
        self.parts = [slice(end - base.out_features, end) for base, end in zip(bases, ends, strict=True)]
        fused = all(layer.fused for layer in layers if isinstance(layer, LoRALinear))
        self.base = concat_rows_in_place(bases) if fused else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        adapters: list[tuple[slice, Adapter]] = []
        for part, layer in zip(self.parts, self.layers, strict=True):
            if not isinstance(layer, LoRALinear) or layer.disable_adapters:
                continue
            adapter = layer.cast_adapter or layer.adapter()
            if adapter is None:
                break
            adapters.append((part, adapter))
        else:
            if self.base is not None:
                return linear_with_lora(self.base, x, adapters)
        return torch.cat([layer(x) for layer in self.layers], dim=-1)


class FusedLinears:
    """Several layers over one input as one matmul over one copy of their weights.

    Their adapters act as one: the matrices A are stacked, the B's form the blocks of a diagonal.
    """

    def __init__(self, base: torch.nn.Module, layers: Sequence[Any], sizes: Sequence[int]) -> None:
        self.base, self.layers, self.sizes = base, layers, list(sizes)
        self.adapter = self._adapter()

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return linear_with_lora(self.base, x, self.adapter).split(self.sizes, dim=-1)  # type: ignore[arg-type]

    def refresh(self) -> None:
        """Copy the layers' present adapters to the tensors that the matmul reads; the same layers must have one."""
        fresh = self._adapter()
        if fresh is not None and self.adapter is not None:
            self.adapter.a.copy_(fresh.a)
            self.adapter.b.copy_(fresh.b)

    def _adapter(self) -> Adapter | None:
        parts = [layer.cast_adapter if isinstance(layer, LoRALinear) else None for layer in self.layers]
        present = [part for part in parts if part is not None]
        if not present:
            return None
        empty = present[0].b.new_empty
        blocks = [empty(size, 0) if part is None else part.b for part, size in zip(parts, self.sizes, strict=True)]
        alike = len(present) == len(parts) and len({len(part.a) for part in present}) == 1
        return Adapter(
            torch.cat([part.a for part in present]),
            torch.block_diag(*blocks),
            present[0].scaling,
            tuple(self.sizes) if alike and separable(self.sizes) else (),
        )


def fuse_linears(layers: Sequence[torch.nn.Module]) -> Callable[[torch.Tensor], tuple[torch.Tensor, ...]]:
    """A function that applies all `layers` to one input: `FusedLinears` if their formats allow it, else one by one.

    Call this, and the function, inside `adapters_cast_to`.
    """
    adapted = [layer for layer in layers if isinstance(layer, LoRALinear)]
    bases: list[Any] = [layer.get_base_layer() if isinstance(layer, LoRALinear) else layer for layer in layers]
    present = [layer.cast_adapter for layer in adapted if layer.cast_adapter is not None]
    plain = all(layer.disable_adapters or layer.cast_adapter is not None for layer in adapted)
    fused = concat_rows_in_place(bases) if plain and len({adapter.scaling for adapter in present}) <= 1 else None
    if fused is None:
        return lambda x: tuple(layer(x) for layer in layers)
    return FusedLinears(fused, layers, [base.out_features for base in bases])


def why_not_fused(kernel: str, device: torch.device) -> str | None:
    """Why no fused kernel can run, or None if they can."""
    if kernel == REFERENCE:
        return "kernel=torch"
    if device.type != "cuda":
        return f"the device is {device.type}"
    if find_spec("triton") is None:
        return "the package triton is not installed"
    return None


def require_compiler(kernel: str, device: torch.device) -> None:
    """Raise ConfigError if Triton would compile fused kernels wrongly for this card, or not at all."""
    if why_not_fused(kernel, device) is None:
        reason = refusal(torch.cuda.get_device_capability(device), version("triton"))
        require(reason is None, f"kernel={kernel} cannot compile for this card: {reason}, or use kernel=torch")


def is_small(model: torch.nn.Module) -> bool:
    """Whether the weights of `model` take at most `SMALL_BYTES`."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) <= SMALL_BYTES


def why_not_fused_blocks(kernel: str, model: torch.nn.Module) -> str | None:
    """Why the blocks of `model` are not to be fused in training, or None if they are, should their type allow it."""
    if kernel == MODULES:
        return "kernel=modules"
    if kernel == FUSED_BLOCKS:
        return None
    if (reason := _why_not_in(next(model.parameters()).dtype)) is not None:
        return reason
    return "the model is small; kernel=block fuses them" if is_small(model) else None


def _why_not_in(dtype: torch.dtype) -> str | None:
    return None if dtype == torch.bfloat16 else f"the model computes in {str(dtype).removeprefix('torch.')}"


def choose_kernels(model: torch.nn.Module, layers: Iterable[str], kernel: str) -> dict[str, str]:
    """Switch each of the linear layers and experts `layers` to the best kernel it can run; the choice by layer name."""
    choices, dtype, refused = {}, next(model.parameters()).dtype, Counter[str]()
    for name in layers:
        module, base = _layer_and_base(model, name)
        choices[name] = _kernel_of(base, kernel, dtype, refused)
        if isinstance(module, LoRALinear):
            module.fused = choices[name] not in (REFERENCE, BITSANDBYTES)
    for choice in dict.fromkeys(choices.values()):
        names = [name for name in choices if choices[name] == choice]
        log.info("kernel of %d layers (%s ... %s): %s", len(names), names[0], names[-1], choice)
    for reason, count in refused.items():
        log.info("%d layers with weights and inputs in FP8 do not multiply FP8: %s", count, reason)
    return choices


def rounds(base: object) -> bool:
    """Whether a layer multiplies its rounded input apart from its adapter: then training takes PEFT's operations."""
    return isinstance(base, PackedLinear) and base.rounding is not None and not base.multiplies_fp8


def _layer_and_base(model: torch.nn.Module, name: str) -> tuple[Any, Any]:
    """The layer `name` with its adapter, and without; unpacked experts are a parameter."""
    module: Any = model
    base: Any = model
    for part in name.split("."):
        module = getattr(base, part)
        base = module.get_base_layer() if isinstance(module, lora.LoraLayer) else module
    return module, base


def _kernel_of(
    base: torch.nn.Module | torch.Tensor, kernel: str, compute_dtype: torch.dtype, refused: Counter[str]
) -> str:
    """The kernel that `base` is switched to. `refused` counts why layers in FP8 do not multiply it."""
    if isinstance(base, PackedLinear) and base.uses_bitsandbytes:
        return BITSANDBYTES
    packed = isinstance(base, PackedLinear | PackedMatrices)
    tensor = base if isinstance(base, torch.Tensor) else next(base.buffers() if packed else base.parameters())
    reason = why_not_fused(kernel, tensor.device) or _why_not_in(compute_dtype)
    if isinstance(base, PackedLinear) and in_fp8(base):
        if (why_not := reason or why_not_fp8(base)) is None:
            base.use_fp8()
            return SCALED
        refused[why_not] += 1
    if reason is not None:
        return REFERENCE
    if not packed:
        return CUBLAS if not tensor.requires_grad else REFERENCE
    layout = base.weight_format.kernel_layout
    if layout is None or (isinstance(base, PackedMatrices) and layout not in GROUPED_FORMATS):
        return REFERENCE
    try:
        base.use_kernels()
    except ValueError as error:  # scales that the kernel layout cannot hold, in a checkpoint made elsewhere
        log.warning("a layer runs the reference: %s", error)
        return REFERENCE
    weight = base.kernel_weight
    assert weight is not None
    if isinstance(base, PackedMatrices):
        return GROUPED
    return DECODE.get(kernel_of(weight.words.device) or "", DEQUANTIZE)
