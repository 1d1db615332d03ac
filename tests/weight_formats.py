"""Specs of weight formats that several tests use."""

from __future__ import annotations

from typing import Any

from qerl_bench.quant.base import BlockFormat
from qerl_bench.quant.mxfp4 import MXFP4
from qerl_bench.quant.mxfp8 import MXFP8
from qerl_bench.quant.nf4 import NF4
from qerl_bench.quant.nvfp4 import NVFP4
from qerl_bench.quant.symmetric import FP8, INT4, INT8, Symmetric

PLAIN: dict[str, Any] = {"partial": False, "keep_first": 0.0, "keep_last": 0.0, "activations": "none"}
KINDS = {"fp8": FP8, "int8": INT8, "int4": INT4}
BLOCKS = (("fp8", "row"), ("fp8", "128x128"), ("int8", "row"), ("int8", 128), ("int4", 32), ("int4", 128))


def symmetric(
    name: str, block: int | str, compute_dtype: str = "bfloat16", convention: str = "compressed-tensors"
) -> Symmetric:
    return KINDS[name](name=name, block=block, compute_dtype=compute_dtype, convention=convention, **PLAIN)


FORMATS: dict[str, BlockFormat] = {
    "nvfp4": NVFP4(name="nvfp4", compute_dtype="bfloat16", convention="compressed-tensors", **PLAIN),
    "mxfp4": MXFP4(name="mxfp4", scale_rule="even", **PLAIN),
    "nf4": NF4(name="nf4", double_quant=False, backend="own", **PLAIN),
    "nf4-double": NF4(name="nf4", double_quant=True, backend="own", **PLAIN),
    "fp8": symmetric("fp8", "row"),
    "int8": symmetric("int8", "row"),
    "int4": symmetric("int4", 32),
    "mxfp8": MXFP8(name="mxfp8", **PLAIN),
}
