"""quant=bf16: the unquantized baseline."""

from __future__ import annotations

from dataclasses import dataclass

from qerl_bench.quant.base import NOT_ROUNDED, WeightFormat


@dataclass(frozen=True, kw_only=True)
class BF16(WeightFormat):
    """Linear layers stay as the checkpoint loaded them; nothing is packed or rounded."""

    name: str

    activations = NOT_ROUNDED
