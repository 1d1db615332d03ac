"""Noise on an adapter: on its matrix B, as a share of the weights that it is added to.

An adapter adds s B A to the weights W of its layer. B starts at 0, so noise on A alone would do nothing at first, and
little later. Noise Z on B with the standard deviation sigma ||W|| / (s ||A|| sqrt(rows of B)) changes the weights by
s Z A, which is sigma ||W|| in the Frobenius norm on average. Noise of relative size sigma on a norm scale does the same
to the layers behind it (`norm_errors.py`), so one sigma means one size in both places. The change has the rank of the
adapter, where that of a norm scale is diagonal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class AdaptedLayer:
    """A layer with an adapter: its matrices `a` and `b`, what their product is multiplied by, and the frozen weight."""

    a: torch.nn.Module
    b: torch.nn.Module
    scaling: float
    weight: Callable[[], torch.Tensor]  # unpacks it

    @cached_property
    def size(self) -> torch.Tensor:
        """||W||, which never changes."""
        return _norm(self.weight())

    def unit(self) -> torch.Tensor:
        """The standard deviation of noise on B that changes the weights by their own size; A as it is now."""
        b = self.b.get_parameter("weight")
        return self.size / (self.scaling * len(b) ** 0.5 * _norm(self.a.get_parameter("weight")))


def _norm(matrix: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(matrix.detach(), dtype=torch.float32)
