"""The numbers in a GGUF tensor, and the cells of its rounding.

A block keeps a code for each weight, and a scale; some have an offset too. All weights that were nearest to a code lie
in its cell, as wide as the step from one code to the next. The step comes out of the gguf package's own arithmetic:
the same block is dequantized with all codes 0 and all codes 1. Cells at the ends of a block's range are open, and taken
as wide as the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from qerl_bench.model.gguf.header import FLOATS, SCALED, Header, Tensor, scale_of
from qerl_core.checks import require
from qerl_core.seeding import derive

CHUNK = 2**18  # weights that are dequantized at a time: what they pass through fits the cache of a core
# Type of block -> bytes of its codes, [first, last), and of those with low bits, and what these are when all codes are
# 1. Scales and offsets are elsewhere in the block.
CODES = {
    "Q4_0": (2, 18, 2, 18, 0x11),
    "Q4_1": (4, 20, 4, 20, 0x11),
    "Q5_0": (2, 22, 6, 22, 0x11),
    "Q5_1": (4, 24, 8, 24, 0x11),
    "Q8_0": (2, 34, 2, 34, 0x01),
    "Q4_K": (16, 144, 16, 144, 0x11),
    "Q5_K": (16, 176, 48, 176, 0x11),
    "Q6_K": (0, 192, 0, 128, 0x11),
}
_MANTISSA = {"F32": 23, "F16": 10, "BF16": 7}  # bits, stored


@dataclass(frozen=True)
class Dither:
    """One plausible original: each weight moves within its cell, by a uniform draw.

    `scale` is the variance of the draw over that of the cell: 1 fills the cell, more leaves it.
    """

    seed: int
    scale: float


def check_kinds(header: Header, dither: Dither | None) -> None:
    """Raise ConfigError unless every tensor can be dequantized, and dithered if that is asked for."""
    kinds: dict[str, str] = {}
    for name, tensor in header.tensors.items():
        kinds.setdefault(tensor.kind, name)
    for name, tensor in header.tensors.items():
        scale = tensor_scale(header, name) if tensor.kind == SCALED else 1
        require(
            bool(0 < scale < math.inf),
            f"model.id={header.path}: {scale_of(name)}={scale}, which multiplies {name}, is no number above 0; "
            "download the file again",
        )
    for kind, name in kinds.items():
        require(
            _is_read(kind),
            f"model.id={header.path}: tensor {name} has the type {kind}, which the gguf package does not dequantize; "
            "choose a file of another type, such as Q8_0 or Q4_K_M",
        )
        require(
            dither is None or has_known_cells(kind),
            f"model.dither is not known for {kind}, the type of tensor {name} in {header.path}; it is for "
            f"{', '.join(CODES)}. Choose another file, or model.dither=null",
        )
    require(
        dither is None or any(kind in CODES for kind in kinds),
        f"model.dither draws within cells of rounding, and {header.path} has none: its types are {', '.join(kinds)}. "
        "Use model.dither=null",
    )


def has_known_cells(kind: str) -> bool:
    """Whether `cell_widths` knows the type. Fewer are known than can be dequantized."""
    return kind in FLOATS or kind in CODES


def _is_read(kind: str) -> bool:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    number = GGMLQuantizationType[kind]
    if kind in FLOATS:
        return True
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[number][1]), dtype=np.uint8), number)
    except NotImplementedError:
        return False
    return True


def chunks(tensor: Tensor, together: int = 1) -> list[range]:
    """The rows of a tensor, in ranges of about CHUNK weights and a multiple of `together` rows."""
    rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
    step = together * max(1, CHUNK // (tensor.count // rows * together))
    return [range(start, min(start + step, rows)) for start in range(0, rows, step)]


def stored(header: Header, tensor: Tensor, rows: range) -> np.ndarray:
    """The bytes of some rows of a tensor: (rows, bytes of a row)."""
    per_row = tensor.size // (tensor.shape[0] if len(tensor.shape) > 1 else 1)
    first = tensor.start + rows.start * per_row
    return np.fromfile(header.path, np.uint8, len(rows) * per_row, offset=first).reshape(len(rows), per_row)


def values(raw: np.ndarray, kind: str) -> np.ndarray:
    """The weights in FP32, (rows, weights of a row), of the bytes (rows, bytes of a row)."""
    from gguf import GGMLQuantizationType, dequantize

    if kind == "F32":
        return raw.view("<f4")
    if kind == "F16":
        return raw.view("<f2").astype(np.float32)
    in_one_go = raw.reshape(1, -1)  # of more rows the package takes 16 at a time, too few for threads to help
    return dequantize(in_one_go, GGMLQuantizationType[kind]).reshape(len(raw), -1)


def tensor_scale(header: Header, name: str) -> np.float32:
    """What multiplies the weights of a tensor in NVFP4, from the tensor beside it; 1 of others, and without one."""
    beside = header.tensors.get(scale_of(name)) if header.tensors[name].kind == SCALED else None
    return np.float32(1) if beside is None else stored(header, beside, range(1)).view("<f4")[0, 0]


def cell_widths(raw: np.ndarray, kind: str) -> np.ndarray:
    """How wide the cell of each weight is, shaped like `values`: the step between codes, or the float's last bit."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if kind in FLOATS:
        return np.abs(values(raw, kind)) * np.float32(2.0 ** -_MANTISSA[kind])
    first, last, low, end, ones = CODES[kind]
    blocks = raw.reshape(-1, GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]).copy()
    blocks[:, first:last] = 0
    zero = values(blocks.reshape(raw.shape), kind)
    blocks[:, low:end] = ones
    return np.abs(values(blocks.reshape(raw.shape), kind) - zero)


def dequantized(header: Header, name: str, dither: Dither | None, rows: range) -> np.ndarray:
    """The weights of some rows of a tensor in FP32; with `dither`, moved within their cells.

    The draws depend on the seed, the tensor's name and the place in it: all of its rows are one stream.
    """
    tensor = header.tensors[name]
    raw = stored(header, tensor, rows)
    weights = values(raw, tensor.kind)
    if tensor.kind == SCALED:
        weights *= tensor_scale(header, name)
    if dither is None or tensor.kind not in CODES:
        return weights
    random = np.random.default_rng(derive(dither.seed, "dither", name))
    random.bit_generator.advance(rows.start * weights.shape[1])  # type: ignore[attr-defined]  # a number a weight
    draw = random.random(weights.shape) - 0.5
    return weights + (draw * math.sqrt(dither.scale) * cell_widths(raw, tensor.kind)).astype(np.float32)


def bits_per_weight(header: Header) -> float:
    """Bits that the file has for each weight of the matrices in its blocks, scales included."""
    matrices = [tensor for name, tensor in header.tensors.items() if name.startswith("blk.") and len(tensor.shape) > 1]
    return 8 * sum(tensor.size for tensor in matrices) / sum(tensor.count for tensor in matrices)


def was_rounded(header: Header) -> bool:
    """Whether any of its tensors is stored in blocks."""
    return any(tensor.kind not in FLOATS for tensor in header.tensors.values())
