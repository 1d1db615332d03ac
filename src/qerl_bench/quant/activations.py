"""Rounding the inputs of packed layers: `quant.activations`, `rollout.activations`, and gradients, `train.gradients`.

A layer multiplies its packed weight by the rounded input; the adapter reads the input as it is, and gradients pass
straight through, unless they are rounded themselves. Fused paths of training know nothing of it, so there blocks run
the modules of transformers and PEFT, unless a card multiplies FP8 by FP8; recorded sampling rounds. Left out: experts,
which are refused, and the head, which is not packed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from qerl_bench.quant.base import NOT_ROUNDED
from qerl_bench.quant.experts import PackedExperts
from qerl_bench.quant.linear import FP8_BUFFERS, PackedLinear
from qerl_bench.quant.packed_weight import stored
from qerl_bench.quant.symmetric import FP8
from qerl_core.checks import require
from qerl_kernels.activations import round_rows
from qerl_kernels.fp8 import input_gradient, quantize, why_not

log = logging.getLogger(__name__)
REASON = "the inputs of packed layers are rounded"  # why a fused path of training is not taken


class Rounding:
    """Rounds inputs x (..., K) to the format `kind`, straight-through, and counts what becomes zero.

    One kernel does both if `fused`, where it can run. With `gradients` those of outputs are rounded too, in kind fp8.
    """

    def __init__(self, kind: str, device: torch.device) -> None:
        self.kind, self.on, self.fused, self.gradients = kind, True, True, False
        self.counts, self.gradient_counts = (torch.zeros(2, dtype=torch.long, device=device) for _ in range(2))
        self.skipped: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.on:
            return x
        rounded: Any = _StraightThrough.apply(x, self)
        return rounded

    def codes(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What x (M, K) is rounded to, in kind fp8: `fp8.quantize`."""
        return quantize(x, self.counts, self.fused, self.skipped)

    def input_gradient(self, layer: PackedLinear, gradient: torch.Tensor) -> torch.Tensor:
        """dX (M, K) of dY (M, N) of a layer in FP8: `fp8.input_gradient`."""
        packed = stored(layer) if layer.multiplies_fp8 else layer.packed()
        codes, scales = map(packed.__getitem__, FP8_BUFFERS)
        multiplies = layer.multiplies_fp8 and gradient.dtype == torch.bfloat16
        return input_gradient(gradient, codes, scales, self.gradient_counts, multiplies)

    @contextmanager
    def skipping(self, rows: torch.Tensor) -> Iterator[None]:
        """Context in which inputs (M, K) do not count where `rows` int64 (M,) is not 0."""
        self.skipped = rows
        try:
            yield
        finally:
            self.skipped = None

    @contextmanager
    def off(self) -> Iterator[None]:
        """Context in which inputs stay as they are."""
        self.on = False
        try:
            yield
        finally:
            self.on = True

    def take(self) -> tuple[int, int]:
        """How many inputs became zero, of how many that were not, since the last call. Waits for the device."""
        return _taken(self.counts)

    def take_gradients(self) -> tuple[int, int]:
        """The same of gradients of outputs."""
        return _taken(self.gradient_counts)


def _taken(counts: torch.Tensor) -> tuple[int, int]:
    lost, numbers = counts.tolist()
    counts.zero_()
    return lost, numbers


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rounding: Rounding) -> torch.Tensor:
        return round_rows(x, rounding.kind, rounding.counts, rounding.fused, rounding.skipped)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return grads[0], None


def round_inputs(model: torch.nn.Module, kind: str, where: str) -> Rounding | None:
    """Let the packed layers of `model` round their inputs to the format `kind`; None for none.

    Raises ConfigError, which names the model `where`, if it has packed experts.
    """
    if kind == NOT_ROUNDED:
        return None
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    experts = next((name for name, module in model.named_modules() if isinstance(module, PackedExperts)), None)
    require(
        experts is None,
        f"activations={kind} rounds the inputs of linear layers, and the experts of {where} ({experts}) would read "
        "theirs as they are. Use quant.activations=none and rollout.activations=none, or a dense model",
    )
    rounding = Rounding(kind, next(model.parameters()).device)
    for layer in layers:
        layer.rounding = rounding
    log.info("the inputs of %d packed layers are rounded to %s; recorded passes are off", len(layers), kind)
    return rounding


def in_fp8(layer: PackedLinear) -> bool:
    """Whether it is packed as FP8, and rounds its inputs to FP8 too."""
    return isinstance(layer.weight_format, FP8) and layer.rounding is not None and layer.rounding.kind == "fp8"


def why_not_fp8(layer: PackedLinear) -> str | None:
    """Why its card cannot multiply such a layer in FP8, or None if it can."""
    if layer.weight_format.block != "row":
        return f"quant.block={layer.weight_format.block}"
    return why_not((layer.out_features, layer.in_features), torch.cuda.get_device_capability(layer.weight.device))
