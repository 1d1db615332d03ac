"""Specs of weight formats that several tests use."""

from __future__ import annotations

from typing import Any

from qerl_bench.quant.symmetric import FP8, INT4, INT8, Symmetric

PLAIN: dict[str, Any] = {"partial": False, "keep_first": 0.0, "keep_last": 0.0, "activations": "none"}
KINDS = {"fp8": FP8, "int8": INT8, "int4": INT4}
BLOCKS = (("fp8", "row"), ("fp8", "128x128"), ("int8", "row"), ("int4", 32), ("int4", 128))


def symmetric(
    name: str, block: int | str, compute_dtype: str = "bfloat16", convention: str = "compressed-tensors"
) -> Symmetric:
    return KINDS[name](name=name, block=block, compute_dtype=compute_dtype, convention=convention, **PLAIN)
