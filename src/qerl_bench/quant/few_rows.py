"""A packed layer over a few rows, as in sampling: the decode GEMM with its scales, bias and adapter.

Left out: gradients, and inputs that are rounded.
"""

from __future__ import annotations

from typing import Any

import torch

from qerl_kernels import decode, projection
from qerl_kernels.layout import KernelWeight
from qerl_kernels.training_linear import Adapter, down


def multiply(
    layer: Any, weight: KernelWeight, x: torch.Tensor, adapter: Adapter | None, gated: str = ""
) -> torch.Tensor:
    """x (M, K) of a few tokens to (M, N), straight from the packed `weight` of `layer`; `gated` as in `decode_gemm`."""
    if len(layer.row_scales) == 1:
        scale: float | torch.Tensor = layer.output_scale
    else:
        scale = torch.empty(layer.out_features, device=x.device)
        for rows, value in layer.row_scales:
            scale[rows] = value
    if adapter is None:
        return decode.decode_gemm(x, weight, scale, layer.bias, gated=gated)
    a, b, parts = adapter.a.to(x.dtype), adapter.b.to(x.dtype), adapter.parts
    if b.shape[1] > decode.MAX_RANK * (len(parts) or 1):
        assert not gated
        return decode.decode_gemm(x, weight, scale, layer.bias).addmm_(down(x, a), b.t(), alpha=adapter.scaling)
    beside = projection.runs_beside(x, a)  # then nothing may be launched between the two
    lora = down(x, a, beside), b, adapter.scaling
    return decode.decode_gemm(x, weight, scale, layer.bias, lora, parts=parts, beside=beside, gated=gated)


def gate(layer: Any, x: torch.Tensor, adapter: Adapter | None, gated: str) -> torch.Tensor | None:
    """x (M, K) to (M, N / 2): `gated` of the halves of what `layer` gives; None if one kernel cannot do both."""
    weight = layer.kernel_weight
    rounds = layer.rounding is not None and layer.rounding.on
    if weight is None or rounds or torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type):
        return None
    if not decode.pays(weight, len(x), x.dtype, at_hand=layer._kept is not None):
        return None
    rank, parts = (0, ()) if adapter is None else (adapter.b.shape[1], adapter.parts)
    return multiply(layer, weight, x, adapter, gated) if decode.can_gate(weight, len(x), rank, parts) else None
