"""The order of packed weights in memory for the fused kernels: a lane loads its tensor-core operand in 16 bytes or 32.

`repack` converts the tensors of a checkpoint once, and `unpack` restores them bit for bit. W (N, K) is padded to T x C
whole tiles of 16 rows and 64 inputs. A tile is contiguous, and tiles of the same rows follow each other.

**Words**, int32 (T, C, 32, 4): 4 words for each of 32 lanes. Word j of lane 4 g + t covers the block of 16 inputs
k0 = 64 c + 16 j and holds 8 codes in 4 pairs, which are registers a0..a3 of a bf16 m16n8k16 (or the warp's part of a
wgmma m64nNk16) A fragment:

    pair  row     inputs                        register
    A     g       k0 + 2t,     k0 + 2t + 1      a0
    B     g + 8   k0 + 2t,     k0 + 2t + 1      a1
    C     g       k0 + 8 + 2t, k0 + 8 + 2t + 1  a2
    D     g + 8   k0 + 8 + 2t, k0 + 8 + 2t + 1  a3

K keeps its natural order, so activations need no shuffle. The first code of each pair is in the word's low half, the
second in the high half, in the same bits.

E2M1 (NVFP4, MXFP4): with code = s e1 e0 m, the bits 15..0 of a half are

    15  14  13      12  11      10      9   8   7   6   5   4   3   2   1   0
    As  Ds  Dm^Cs   Bs  De1^As  De0^Ds  Cs  Ae1 Ae0 Am  Be1 Be0 Bm  Ce1 Ce0 Cm

so that masking with M = 0x81C081C0 leaves a pair as two bf16 numbers, each the code's value x 2^-126:

    A = w & M    B = (w << 3) & M    C = (w << 6) & M
    D = (((w >> 3) ^ (w >> 7)) & 0x01C001C0) | ((w << 1) & 0x80008000)

(bf16 holds sign, 8 exponent bits, 7 mantissa bits; a code's two exponent bits become the lowest of the exponent.)

NF4, INT4: a code is an index 0..15, or code + 8; pairs A..D are bits 3..0, 7..4, 11..8, 15..12 of each half.

FP8, INT8: words (T, C, 64, 4). Those of 32 lanes hold the pairs A and B in bits 7..0 and 15..8 of each half, and the
next 32 likewise C and D.

**Scales**, (T, C, 8, 2, S): for row g, then row g + 8 of the tile, its S scales.

    nvfp4   uint8, S = 4: the E4M3 byte, sign 0. `byte << 4` is a bf16 number, the scale x 2^-120.
    mxfp4   uint8, S = 2: the E8M0 byte plus `offset`. `byte << 7` is a bf16 number, 2^(byte - 127).
    nf4     float32, S = 1: the block's largest magnitude.
    int4-32, int4-128   bfloat16, S = 2, or S = 1 for two columns of tiles: (T, C/2, 8, 2, 1).
    fp8-128x128         bfloat16 (T, C/2): of each tile, so that tiles of several matrices can follow each other.
    fp8, int8           bfloat16, float16 or float32 (T, 16): of each row.

For MXFP4, `offset` raises the largest byte of the matrix (and of those concatenated with it) to 254, because bf16
cannot hold 2^(127 - byte + 126) for all bytes. A decoded pair times its scale must be in bf16's range, so kernels
compute with operand x 2^-`exponent` and multiply the FP32 factor of the matrix by 2^exponent: nvfp4 multiplies
w x 2^-126 by s x 2^118. These products are exact, except for MXFP4 blocks over 2^120 times smaller than the largest,
which lose their last bits.

Padding is code 0 (NF4: 7, INT4: 8, also zero) with scale 0 (MXFP4: `offset`). Left out: E4M3 scales that are negative
or NaN, E4M3 codes that are NaN, E8M0 bytes above 252, NF4 widths that are no multiple of 64, all of which no quantizer
here writes, and scales of INT4 and of squares in other dtypes. `repack` refuses them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qerl_kernels import e2m1

ROWS = 16  # of a tile
INPUTS = 64  # of a tile
SQUARES = "fp8-128x128"
BLOCK = {  # inputs that share a scale; 0: all of a row
    **{"nvfp4": 16, "mxfp4": 32, "nf4": 64, "int4-32": 32, "int4-128": 128, SQUARES: 128, "fp8": 0, "int8": 0},
}
EIGHT_BITS = ("fp8", SQUARES, "int8")
SCALE_TYPES = {
    **dict.fromkeys(("nvfp4", "mxfp4"), (torch.uint8,)),
    "nf4": (torch.float32,),
    **dict.fromkeys(("int4-32", "int4-128", SQUARES), (torch.bfloat16,)),
    **dict.fromkeys(("fp8", "int8"), (torch.bfloat16, torch.float16, torch.float32)),
}
_SCALE_WORDS = {  # of a row, or a tile in a square, for as many columns of tiles as share it
    **{"nvfp4": torch.int32, "mxfp4": torch.int16, "nf4": torch.float32, "int4-32": torch.int32},
    **dict.fromkeys(("int4-128", SQUARES), torch.int16),
}
MXFP4_MAX_BYTE = 252
_SQUARE_ROWS = 128
_ZERO = {"nf4": 7, "int4-32": 8, "int4-128": 8}
_MAX_CODES = 1 << 24  # converted at once; temporaries are int32
# Axes of codes in the order of a matrix, (T, row half, g, C, j, input half, t, parity), and in that of words.
_TO_WORDS = (0, 3, 2, 6, 4, 1, 5, 7)
_FROM_WORDS = (0, 5, 2, 1, 4, 6, 3, 7)


@dataclass(frozen=True)
class KernelWeight:
    """A matrix W (N, K) in the layout of this module; `words` and `scales` share a device."""

    format: str  # a key of BLOCK
    shape: tuple[int, int]
    words: torch.Tensor  # int32 (T, C, 32, 4), of 8 bits (T, C, 64, 4)
    scales: torch.Tensor  # see the module
    offset: int  # added to the bytes of MXFP4, otherwise 0

    @property
    def exponent(self) -> int:
        """Kernels compute with operand x 2^-exponent; see the module."""
        return {"nvfp4": 8, "mxfp4": 126 - self.offset}.get(self.format, 0)

    @property
    def scale_words(self) -> torch.Tensor:
        """Scales in the words that the decode GEMM loads. Of those of whole rows it loads none, here the words."""
        return self.scales.view(_SCALE_WORDS[self.format]) if BLOCK[self.format] else self.words

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes

    def to(self, device: torch.device | str) -> KernelWeight:
        return KernelWeight(self.format, self.shape, self.words.to(device), self.scales.to(device), self.offset)


def shapes(format_name: str, shape: tuple[int, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of `words` and `scales` of W (N, K)."""
    tiles, columns, block = -(-shape[0] // ROWS), -(-shape[1] // INPUTS), BLOCK[format_name]
    words = (tiles, columns, 64 if format_name in EIGHT_BITS else 32, 4)
    if block == 0:
        return words, (tiles, ROWS)
    if format_name == SQUARES:
        return words, (tiles, columns // 2)
    return words, (tiles, -(-shape[1] // max(block, INPUTS)), 8, 2, max(1, INPUTS // block))


def block_rows(format_name: str) -> int:
    """Rows that share a scale."""
    return _SQUARE_ROWS if format_name == SQUARES else 1


def repack(format_name: str, packed: dict[str, torch.Tensor], shape: tuple[int, int]) -> KernelWeight:
    """The kernel layout of a packed W (N, K). `packed` comes from the format's module; tensor scales are ignored.

    nvfp4, mxfp4: `weight_packed` uint8 (N, K/2) and `weight_scale` (N, K/block). nf4: `weight` uint8 (N*K/2, 1) and
    `absmax` FP32 (N*K/64,), row-aligned. Others: the tensors of `symmetric`. Raises ValueError for scales that the
    layout cannot hold.
    """
    n, k = shape
    if format_name not in BLOCK:
        raise ValueError(f"no kernel layout for {format_name!r}; choose from {', '.join(BLOCK)}")
    if k % (BLOCK[format_name] or 1):
        raise ValueError(f"{format_name} needs K divisible by {BLOCK[format_name]}, got {k}")
    scales, offset = _checked_scales(format_name, packed, shape)
    words_shape, scales_shape = shapes(format_name, shape)
    (tiles, columns, _, _), (_, *blocks) = words_shape, scales_shape
    if format_name == SQUARES:
        kernel_scales = scales.repeat_interleave(_SQUARE_ROWS // ROWS, dim=0)[:tiles].contiguous()
    else:
        per_row = blocks[0] * blocks[-1] if BLOCK[format_name] else 1
        padded = scales.new_full((tiles * ROWS, per_row), offset)
        padded[:n, : scales.shape[1]] = scales
        # (T, half, g, C, S) -> (T, C, g, half, S)
        split = padded.view(tiles, 2, 8, blocks[0], -1).permute(0, 3, 2, 1, 4) if BLOCK[format_name] else padded
        kernel_scales = split.contiguous().view(scales_shape)

    codes = _codes(format_name, packed, shape)
    words = codes.new_empty(words_shape, dtype=torch.int32)
    step = max(1, _MAX_CODES // (ROWS * INPUTS * columns))
    for start in range(0, tiles, step):
        here = _padded_codes(format_name, codes[start * ROWS : (start + step) * ROWS], columns)
        split = here.view(-1, 2, 8, columns, 4, 2, 4, 2).permute(_TO_WORDS)
        words[start : start + step] = _assemble(format_name, split).flatten(2, -2)
    return KernelWeight(format_name, shape, words, kernel_scales, offset)


def unpack(weight: KernelWeight) -> dict[str, torch.Tensor]:
    """The input of `repack`: packed codes and block scales under their checkpoint names."""
    n, k = weight.shape
    tiles, columns = weight.words.shape[:2]
    if weight.scales.dim() < 5:
        scales = weight.scales[:: _SQUARE_ROWS // ROWS] if weight.format == SQUARES else weight.scales.view(-1, 1)[:n]
    else:
        scales = weight.scales.permute(0, 3, 2, 1, 4).reshape(tiles * ROWS, -1)[:n, : k // BLOCK[weight.format]]
    eight = weight.format in EIGHT_BITS
    packed = weight.words.new_empty((n, k if eight else k // 2), dtype=torch.uint8)
    step = max(1, _MAX_CODES // (ROWS * INPUTS * columns))
    for start in range(0, tiles, step):
        split = _take_apart(weight.format, weight.words[start : start + step].unflatten(2, (-1, 8, 4)))
        codes = split.permute(_FROM_WORDS).reshape(-1, columns * INPUTS)[: n - start * ROWS, :k]
        if weight.format == "nf4":
            codes = codes.view(len(codes), -1, 2).flip(-1).flatten(1)  # the even input is in the high nibble
        codes = codes.to(torch.uint8)
        packed[start * ROWS : (start + step) * ROWS] = codes if eight else e2m1.pack_pairs(codes)
    if weight.format == "nf4":
        return {"weight": packed.view(-1, 1), "absmax": scales.flatten()}
    if weight.format == "mxfp4":
        return {"weight_packed": packed, "weight_scale": scales - weight.offset}
    if weight.format != "nvfp4":
        kind = torch.int8 if weight.format == "int8" else torch.float8_e4m3fn if eight else torch.int32
        return {"weight" if eight else "weight_packed": packed.view(kind), "weight_scale": scales.contiguous()}
    return {"weight_packed": packed, "weight_scale": scales.contiguous().view(torch.float8_e4m3fn)}


def _checked_scales(
    format_name: str, packed: dict[str, torch.Tensor], shape: tuple[int, int]
) -> tuple[torch.Tensor, int]:
    """Block scales (N, K/block) as they are stored, and the offset that was added to them."""
    if format_name == "nf4":
        return packed["absmax"].view(shape[0], -1), 0
    scales = packed["weight_scale"]
    if format_name not in ("nvfp4", "mxfp4"):
        wanted = (-(-shape[0] // block_rows(format_name)), shape[1] // (BLOCK[format_name] or shape[1]))
        if scales.shape != wanted or scales.dtype not in SCALE_TYPES[format_name]:
            names = " or ".join(str(dtype).removeprefix("torch.") for dtype in SCALE_TYPES[format_name])
            raise ValueError(
                f"the kernel layout of {format_name} holds scales {wanted} of {names}, got {tuple(scales.shape)} of "
                f"{str(scales.dtype).removeprefix('torch.')}"
            )
        return scales, 0
    scales = scales.view(torch.uint8)
    largest = int(scales.max())
    if format_name == "mxfp4":
        if largest > MXFP4_MAX_BYTE:
            raise ValueError(f"the kernel layout holds E8M0 bytes up to {MXFP4_MAX_BYTE}, got {largest}")
        return scales + (254 - largest), 254 - largest
    if largest > 0x7E:
        raise ValueError("the kernel layout holds E4M3 scales from 0 to 448; this weight has a negative one or NaN")
    return scales, 0


def _codes(format_name: str, packed: dict[str, torch.Tensor], shape: tuple[int, int]) -> torch.Tensor:
    """Packed codes in bytes, (N, K/2), of 8 bits (N, K)."""
    codes = packed["weight_packed" if "weight_packed" in packed else "weight"].view(torch.uint8).view(shape[0], -1)
    if format_name in ("fp8", SQUARES) and bool(((codes & 0x7F) == 0x7F).any()):
        raise ValueError("the kernel layout holds E4M3 codes from -448 to 448; this weight has NaN")
    return codes


def _padded_codes(format_name: str, rows: torch.Tensor, columns: int) -> torch.Tensor:
    """Packed rows to codes, int32 (multiple of 16, 64 C)."""
    codes = rows if format_name in EIGHT_BITS else e2m1.unpack_pairs(rows)
    if format_name == "nf4":
        codes = codes.view(len(codes), -1, 2).flip(-1).flatten(1)
    n, k = codes.shape
    size = (-(-n // ROWS) * ROWS, columns * INPUTS)
    padded = torch.full(size, _ZERO.get(format_name, 0), dtype=torch.int32, device=rows.device)
    padded[:n, :k] = codes
    return padded


def _assemble(format_name: str, codes: torch.Tensor) -> torch.Tensor:
    """Codes (T, C, g, t, j, row half, input half, parity) to words (T, C, g, t, j), of 8 bits (T, C, 2, g, t, j)."""
    a, c, b, d = codes.flatten(-3, -2).unbind(-2)  # each (..., parity)
    if format_name in EIGHT_BITS:
        halves = torch.stack((a | (b << 8), c | (d << 8)), dim=2)
    elif format_name in _ZERO:
        halves = a | (b << 4) | (c << 8) | (d << 12)
    else:
        (a_sign, a_rest), (b_sign, b_rest) = (a >> 3, a & 7), (b >> 3, b & 7)
        (c_sign, c_rest), (d_sign, d_rest) = (c >> 3, c & 7), (d >> 3, d & 7)
        halves = (a_sign << 15) | (a_rest << 6) | (b_sign << 12) | (b_rest << 3) | (c_sign << 9) | c_rest
        halves |= (d_sign << 14) | (((d_rest & 1) ^ c_sign) << 13)
        halves |= (((d_rest >> 2) ^ a_sign) << 11) | ((((d_rest >> 1) & 1) ^ d_sign) << 10)
    low, high = halves.unbind(-1)
    return low | (high << 16)


def _take_apart(format_name: str, words: torch.Tensor) -> torch.Tensor:
    """Words (T, C, 1 or 2, g, t, j) to codes (T, C, g, t, j, row half, input half, parity)."""
    halves = torch.stack((words & 0xFFFF, (words >> 16) & 0xFFFF), dim=-1)
    if format_name in EIGHT_BITS:
        (a, c), (b, d) = (bits.unbind(2) for bits in (halves & 0xFF, halves >> 8))
        return torch.stack((a, c, b, d), dim=-2).unflatten(-2, (2, 2))
    halves = halves.squeeze(2)
    if format_name in _ZERO:
        a, b, c, d = ((halves >> shift) & 0xF for shift in (0, 4, 8, 12))
    else:
        d_bits = (((halves >> 3) ^ (halves >> 7)) & 0x01C0) | ((halves << 1) & 0x8000)
        a, b, c, d = (((bits >> 12) & 8) | ((bits >> 6) & 7) for bits in (halves, halves << 3, halves << 6, d_bits))
    return torch.stack((a, c, b, d), dim=-2).unflatten(-2, (2, 2))
