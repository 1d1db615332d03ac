"""E2M1, the 4-bit float of NVFP4 and MXFP4: code table, rounding, nibble order, and decoding by table.

Plain PyTorch on any device, and the reference of faster kernels. A code is a sign bit (0x8) and an index 0..7 into
`MAGNITUDES`. Two codes share a byte, the even input index in the low nibble (OCP Microscaling Formats 1.0, section
5.3.3, and checkpoints of compressed-tensors). Left out: stochastic rounding, and NaN, which E2M1 does not have; callers
refuse non-finite weights.
"""

from __future__ import annotations

from functools import cache

import torch

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MAX = MAGNITUDES[-1]

# Two decoded values are fetched as one integer of twice their width.
_PAIR_WORD = {torch.bfloat16: torch.int32, torch.float16: torch.int32, torch.float32: torch.int64}


@cache
def _boundaries(device: torch.device) -> torch.Tensor:
    """The largest FP32 magnitude that rounds to each code 0..6; larger ones are code 7."""
    with torch.inference_mode(False):
        magnitudes = torch.tensor(MAGNITUDES)
        midpoints = (magnitudes[:-1] + magnitudes[1:]) / 2
        below = torch.nextafter(midpoints, torch.zeros(()))
        # A tie goes to the even code: down to `code` if it is even, else up to `code + 1`.
        tie_goes_down = torch.arange(len(midpoints)) % 2 == 0
        return torch.where(tie_goes_down, midpoints, below).to(device)


def encode(values: torch.Tensor) -> torch.Tensor:
    """Round FP32 values of any shape to E2M1 codes (uint8, 0..15): to nearest, ties to the even code, saturating at 6.

    A negative value that rounds to zero keeps its sign (0x8); an exact -0.0 becomes 0x0, as in compressed-tensors.
    """
    assert values.dtype == torch.float32, values.dtype
    index = torch.bucketize(values.abs(), _boundaries(values.device), out_int32=True).to(torch.uint8)
    return index | ((values < 0).to(torch.uint8) << 3)


def nearest(values: torch.Tensor) -> torch.Tensor:
    """The E2M1 value nearest to each FP32 value, as `encode` chooses it, in FP32 and of the same shape."""
    index = torch.bucketize(values.abs(), _boundaries(values.device), out_int32=True)
    return torch.copysign(lookup(_magnitudes(values.device), index), values)


@cache
def _magnitudes(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(MAGNITUDES).to(device)


def pack_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Codes (..., K), K even, to bytes (..., K/2)."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_pairs(packed: torch.Tensor) -> torch.Tensor:
    """Bytes (..., K/2) to codes (..., K)."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


@cache
def _pair_table(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Both values of each of the 256 bytes, in memory order, viewed as one word: (256,)."""
    if dtype not in _PAIR_WORD:
        raise TypeError(f"E2M1 decodes to bfloat16, float16 or float32, not to {dtype}")
    with torch.inference_mode(False):
        values = torch.tensor([*MAGNITUDES, *(-magnitude for magnitude in MAGNITUDES)], dtype=dtype)
        pairs = values[unpack_pairs(torch.arange(256, dtype=torch.uint8).unsqueeze(1)).int()]  # (256, 2)
        return pairs.view(_PAIR_WORD[dtype]).flatten().to(device)


def lookup(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`table[index]` for a byte tensor `index` of any shape, by PyTorch's fastest gather on a CPU."""
    return torch.index_select(table, 0, index.flatten().int()).view(index.shape)


def decode(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes (..., K/2) to their values (..., K) in `dtype` (bfloat16, float16 or float32), always exact."""
    return lookup(_pair_table(packed.device, dtype), packed).view(dtype)


def scale_blocks_(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Multiply `values` (N, K) in place by `scales` (N, K/B), each scale covering B neighbours along K."""
    block = values.shape[-1] // scales.shape[-1]
    if values.device.type == "cpu" and values.dtype != torch.float32:
        # Broadcasting over such a short inner axis is not vectorized for 16-bit types: 4x slower than repeating.
        return values.mul_(scales.repeat_interleave(block, dim=-1))
    values.unflatten(-1, (-1, block)).mul_(scales.unsqueeze(-1))
    return values
