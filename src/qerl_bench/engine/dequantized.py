"""Packed weights in 16 bits as well, while a rollout decodes many rows.

A step of few rows waits for its weights, and 4 bits arrive sooner. In a step of many rows decoding them takes longer
than a library GEMM over the same weights in 16 bits (kernels/README.md). The copies hold the matmul operand, code x
block scale, that training multiplies by, so the policy is the same. Small weights come first: by byte they gain most.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate

import torch

from qerl_bench.quant.linear import PackedLinear
from qerl_bench.quant.packed_weight import is_sharded

log = logging.getLogger(__name__)

Allocate = Callable[..., torch.Tensor]  # of a shape and dtype=


class Dequantized:
    """Copies of `layers` in `dtype` that take at most `gib` GiB, between `make` and `drop`."""

    def __init__(self, layers: Iterable[PackedLinear], dtype: torch.dtype, gib: float) -> None:
        found = sorted(layers, key=lambda layer: copy_bytes([layer], dtype))
        totals = accumulate(copy_bytes([layer], dtype) for layer in found)
        self.layers = [layer for layer, total in zip(found, totals, strict=True) if total <= gib * 2**30]
        self.packed, self.dtype, self.made = len(found), dtype, False

    @property
    def bytes(self) -> int:
        """What is in memory now."""
        return copy_bytes(self.layers, self.dtype) if self.made else 0

    def make(self, allocate: Allocate) -> None:
        """Fill the copies; if memory runs out, there are none."""
        if self.made or not self.layers:
            return
        try:
            for layer in self.layers:
                layer.keep_operand(allocate((layer.out_features, layer.in_features), dtype=self.dtype))
        except torch.OutOfMemoryError:
            self.drop()
            raise
        self.made = True
        layers, gib = len(self.layers), self.bytes / 2**30
        log.debug("%d of %d packed layers are in memory in 16 bits as well: %.2f GiB", layers, self.packed, gib)

    def drop(self) -> None:
        """Free the copies."""
        for layer in self.layers:
            layer.drop_operand()
        self.made = False


def copy_bytes(layers: Iterable[PackedLinear], dtype: torch.dtype) -> int:
    return sum(layer.out_features * layer.in_features for layer in layers) * dtype.itemsize


@contextmanager
def operands_kept(model: torch.nn.Module) -> Iterator[None]:
    """Inside, packed layers on a CPU rebuild their weight once and keep it in 16 or 32 bits, and not in every call.

    A model of billions of weights would take minutes to rebuild them for each token. On a GPU nothing is kept, nor of
    a sharded base.
    """
    packed = [one for one in model.modules() if isinstance(one, PackedLinear) and not is_sharded(one)]
    layers = [one for one in packed if one.weight.device.type == "cpu"]
    try:
        for layer in layers:
            layer._kept = {}
        yield
    finally:
        for layer in layers:
            del layer._kept
