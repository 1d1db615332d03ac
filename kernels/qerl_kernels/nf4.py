"""NF4 weights: indices into a table of 16 normal quantiles and an FP32 scale per 64 inputs (QLoRA, section 3).

Makes the bytes of bitsandbytes in plain PyTorch, so that a quantizer can choose other scales; bitsandbytes always uses
a block's maximum. A code is an index 0..15 into `VALUES`. Two share a byte, the even input index in the HIGH nibble,
unlike the FP4 formats. A block of zeros is code 7, as in the CPU code of bitsandbytes; its CUDA code divides by zero.
Left out: block sizes other than 64, widths that are no multiple of 64, and decoding, which bitsandbytes does.
"""

from __future__ import annotations

from functools import cache

import torch

BLOCK = 64
VALUES = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_MIN_DIVISOR = 1e-38


@cache
def _table(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The 16 values and the 15 midpoints between them; a tie goes to the lower index."""
    with torch.inference_mode(False):
        values = torch.tensor(VALUES)
        return values.to(device), ((values[:-1] + values[1:]) / 2).to(device)


def scales(weight: torch.Tensor, stretch: float = 1.0) -> dict[str, torch.Tensor]:
    """`absmax` FP32 (N*K/64,), the block maxima of W (N, K), K a multiple of 64, times `stretch`."""
    return {"absmax": weight.to(torch.float32).reshape(-1, BLOCK).abs().amax(dim=-1) * stretch}


def _index(scaled: torch.Tensor) -> torch.Tensor:
    return torch.bucketize(scaled, _table(scaled.device)[1], out_int32=True)


def nearest(values: torch.Tensor) -> torch.Tensor:
    """The nearest entry of `VALUES` for each FP32 value, in the same shape."""
    table, _ = _table(values.device)
    return torch.index_select(table, 0, _index(values).flatten()).view(values.shape)


def encode(weight: torch.Tensor, scales: dict[str, torch.Tensor]) -> torch.Tensor:
    """Bytes uint8 (N*K/2, 1) of W (N, K) with `scales`; weights beyond a block's scale saturate."""
    reciprocal = 1.0 / scales["absmax"].clamp(min=_MIN_DIVISOR)
    codes = _index((weight.to(torch.float32).reshape(-1, BLOCK) * reciprocal.unsqueeze(1)).flatten()).to(torch.uint8)
    return ((codes[0::2] << 4) | codes[1::2]).unsqueeze(1)
