"""Weights in FP8, INT8 and INT4 with every code under scales of many sizes, by the names of their kernel layouts."""

from __future__ import annotations

import torch

from tests.weight_formats import BLOCKS, symmetric

SPECS = {spec.kernel_layout: spec for spec in (symmetric(kind, block) for kind, block in BLOCKS) if spec.kernel_layout}


def packed_symmetric(
    name: str, shape: tuple[int, int], seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """The packed tensors of W (N, K), with scales in `dtype`."""
    (n, k), spec, generator = shape, SPECS[name], torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (n, k * spec.bits // 8), generator=generator, dtype=torch.uint8)
    size = (-(-n // spec.block_rows), k // spec.block_of(k))
    exponents = torch.randint(-12, 3, size, generator=generator)
    scale = ((torch.rand(size, generator=generator) + 0.5) * 2.0**exponents).to(dtype)
    if spec.bits == 4:
        return {"weight_packed": codes.view(torch.int32), "weight_scale": scale}
    if spec.kind == "int8":
        return {"weight": codes.view(torch.int8), "weight_scale": scale}
    finite = codes.where((codes & 0x7F) != 0x7F, codes & 0x80)
    return {"weight": finite.view(torch.float8_e4m3fn), "weight_scale": scale}
