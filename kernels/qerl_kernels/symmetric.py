"""Symmetric weights: 8-bit floats (E4M3) or integers of 8 or 4 bits, times a scale for a block of a matrix, no offset.

A block is rows x inputs: (1, K) is a scale for each row, (1, 32) for a group of inputs, (128, 128) for a square. Two
libraries share the rule, maximum over half the range of the codes, and differ in arithmetic:

- "compressed-tensors": scales are computed and stored in the dtype of the weights, a block of zeros gets the epsilon of
  that dtype, and weights are divided by their scale in FP32. Its kernel for GPUs does so; on a CPU it rounds
  the quotient to the dtype of the weights first, which gives the same codes for FP32 weights alone.
- "torchao": 8-bit formats store the same scale in FP32, and integers are multiplied by the rounded reciprocal.

Left out: offsets (asymmetric codes), one scale for a whole tensor, and rows of zeros in torchao's FP8, which are NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qerl_kernels import e2m1

CONVENTIONS = ("compressed-tensors", "torchao")


@dataclass(frozen=True)
class Codes:
    """The grid that weights are rounded to: E4M3, or the integers from -`least` to `most`."""

    bits: int
    least: float
    most: float

    @property
    def is_float(self) -> bool:
        return self.least == self.most

    @property
    def span(self) -> float:
        """What a scale maps the largest magnitude of its block to."""
        return (self.least + self.most) / 2


CODES = {"fp8": Codes(8, 448, 448), "int8": Codes(8, 128, 127), "int4": Codes(4, 8, 7)}


def scales(
    weight: torch.Tensor,
    codes: Codes,
    block: tuple[int, int],
    compute_dtype: torch.dtype,
    convention: str = CONVENTIONS[0],
    stretch: float = 1.0,
) -> dict[str, torch.Tensor]:
    """`weight_scale` (N / rows, rounded up, K / inputs) of a finite W (N, K), for blocks of (rows, inputs).

    K is a multiple of the block's inputs. `stretch` multiplies the scales before they are rounded.
    """
    rows, inputs = block
    magnitudes = weight.to(compute_dtype).unflatten(-1, (-1, inputs)).abs().amax(dim=-1)  # (N, K / inputs)
    padded = torch.nn.functional.pad(magnitudes, (0, 0, 0, -len(magnitudes) % rows))
    amax = padded.unflatten(0, (-1, rows)).amax(dim=1)
    scale = amax / amax.new_full((), codes.span) * stretch  # a tensor: CUDA would multiply by a number's reciprocal
    if convention == "torchao" and not codes.is_float:
        in_8_bits = codes.bits == 8
        least = torch.finfo(torch.float32).eps if in_8_bits else torch.finfo(compute_dtype).smallest_normal
        scale = scale.clamp(min=least)
    scale = torch.where(scale == 0, torch.finfo(compute_dtype).eps, scale)
    return {"weight_scale": scale.to(torch.float32 if convention == "torchao" and codes.bits == 8 else compute_dtype)}


def unit(weight_scale: torch.Tensor, rows: int, block_rows: int) -> torch.Tensor:
    """The weight that code value 1 represents, FP32 (`rows`, K / inputs), for blocks of `block_rows` rows."""
    scale = weight_scale.to(torch.float32)
    return scale if block_rows == 1 else scale.repeat_interleave(block_rows, dim=0)[:rows]


def nearest(values: torch.Tensor, codes: Codes) -> torch.Tensor:
    """The code value nearest to each value, ties to even, saturating; FP32 of the same shape."""
    values = values.to(torch.float32)
    if codes.is_float:
        return values.clamp(-codes.least, codes.most).to(torch.float8_e4m3fn).to(torch.float32)
    return values.round().clamp(-codes.least, codes.most)


def encode(
    weight: torch.Tensor,
    scales: dict[str, torch.Tensor],
    codes: Codes,
    block_rows: int,
    compute_dtype: torch.dtype,
    convention: str = CONVENTIONS[0],
) -> dict[str, torch.Tensor]:
    """The tensors of the packed W (N, K): `scales`, unchanged, and its codes.

    They are `weight` (N, K), float8_e4m3fn or int8, or for 4 bits `weight_packed` int32 (N, K/8): code + 8, the first
    input in the lowest bits.
    """
    scale = scales["weight_scale"]
    if convention == "torchao" and not codes.is_float:
        reciprocal = 1.0 / scale
        factors = reciprocal if block_rows == 1 else reciprocal.repeat_interleave(block_rows, dim=0)[: len(weight)]
        blocks = weight.to(compute_dtype).unflatten(-1, (scale.shape[1], -1))
        values = nearest(blocks * factors.unsqueeze(-1), codes).flatten(-2)
    else:
        divisors = unit(scale, len(weight), block_rows).unsqueeze(-1)
        blocks = weight.to(compute_dtype).to(torch.float32).unflatten(-1, (scale.shape[1], -1))
        values = nearest(blocks / divisors, codes).flatten(-2)
    if codes.bits == 8:
        return {"weight": values.to(torch.float8_e4m3fn if codes.is_float else torch.int8), **scales}
    nibbles = (values + codes.least).to(torch.uint8)
    return {"weight_packed": e2m1.pack_pairs(nibbles).view(torch.int32), **scales}


def swap_sign(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 8 bits, int8, as themselves + 128, the bytes of checkpoints that pack four in a word; and back."""
    return (codes.contiguous().view(torch.uint8) ^ 0x80).view(torch.int8)


def values(packed: dict[str, torch.Tensor], codes: Codes, dtype: torch.dtype) -> torch.Tensor:
    """The value of each code (N, K) in `dtype` (bfloat16, float16 or float32), always exact."""
    if codes.bits == 8:
        return packed["weight"].to(dtype)
    return e2m1.unpack_pairs(packed["weight_packed"].view(torch.uint8)).to(dtype) - codes.least


def operand(
    packed: dict[str, torch.Tensor], codes: Codes, block_rows: int, shape: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """The weight, code x scale, (N, K): a product in FP32 that is rounded once to `dtype`."""
    factors = unit(packed["weight_scale"], shape[0], block_rows)
    return e2m1.scale_blocks_(values(packed, codes, torch.float32), factors).to(dtype)
