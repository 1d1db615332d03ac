"""NVFP4 weights: E2M1 codes, an E4M3 scale per 16 inputs, one FP32 scale for the tensor.

Two conventions give different bytes for the same weights:

- "compressed-tensors": bit for bit that library's NVFP4A16 scheme (round to nearest with the maxima, no calibration),
  which QeRL's checkpoints use. Its quirks change bytes, so they are kept: scales are computed in the dtype of the
  weights, the tensor scale G is a divisor computed with a rounded reciprocal, and a block scale that rounds to zero
  becomes 0.125.
- "torchao": everything is in FP32, the tensor scale is a multiplier, block scales are at least 2^-6, and weights are
  multiplied by a reciprocal instead of divided. The two differ in about 1 % of the block scales.

Packing has two steps, `scales` and `encode`, so that a quantizer can change the scales between them. Left out:
activation scales, and Blackwell's swizzled scale layout.
"""

from __future__ import annotations

from functools import cache

import torch

from qerl_kernels import e2m1

BLOCK = 16
E4M3_MAX = 448.0
E4M3_MIN_NORMAL = 2.0**-6  # torchao's lower bound for a block scale
CONVENTIONS = ("compressed-tensors", "torchao")
_EMPTY_BLOCK_SCALE = 0.125  # stored by compressed-tensors for a scale that rounds to zero


def tensor_scale(tensor_amax: torch.Tensor) -> torch.Tensor:
    """G, FP32 (1,): maps the largest |w| (a scalar in the compute dtype) to 448 * 6. Real block scale = stored / G.

    The reciprocal and the product are each rounded to the compute dtype: a number divided by a tensor is evaluated
    that way in PyTorch. G is 1 where that overflows: a tensor of zeros, or float16 and maxima below about 0.041.
    """
    amax = tensor_amax.clamp(min=torch.finfo(tensor_amax.dtype).tiny)
    scale = amax.reciprocal() * (E4M3_MAX * e2m1.MAX)
    return torch.nan_to_num(scale, nan=1.0, posinf=1.0).to(torch.float32).reshape(1)


def scales(
    weight: torch.Tensor,
    compute_dtype: torch.dtype,
    tensor_amax: float | None = None,
    convention: str = CONVENTIONS[0],
    stretch: float = 1.0,
) -> dict[str, torch.Tensor]:
    """The scales of a finite W (N, K), K a multiple of 16: `weight_scale` float8_e4m3fn (N, K/16) and the tensor scale.

    The tensor scale, FP32 (1,), is `weight_global_scale` (a divisor) for compressed-tensors and `weight_scale_2` (a
    multiplier, ModelOpt's name) for torchao. `tensor_amax` is the largest |w| over all matrices that share it; None: of
    this matrix. `stretch` multiplies the block scales before rounding: 1 maps a block's maximum to 6, 1.5 maps it to 4.
    """
    block_amax = weight.to(compute_dtype).unflatten(-1, (-1, BLOCK)).abs().amax(dim=-1)  # (N, K/16)
    amax = block_amax.amax() if tensor_amax is None else block_amax.new_full((), tensor_amax)
    # Divisors are tensors on the device, not Python numbers: CUDA turns division by a number into a product.
    six = block_amax.new_full((), e2m1.MAX)
    if convention == "torchao":
        multiplier = amax.to(torch.float32) / amax.new_full((), E4M3_MAX * e2m1.MAX, dtype=torch.float32)
        multiplier = torch.where(multiplier == 0, 1.0, multiplier)
        wanted = block_amax.to(torch.float32) / six.to(torch.float32) / multiplier * stretch
        block_scale = wanted.clamp(E4M3_MIN_NORMAL, E4M3_MAX).to(torch.float8_e4m3fn)
        return {"weight_scale": block_scale, "weight_scale_2": multiplier.reshape(1)}
    global_scale = tensor_scale(amax)
    wanted = (block_amax / six).to(torch.float32) * global_scale * stretch
    block_scale = wanted.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float32)
    block_scale = torch.where(block_scale == 0, _EMPTY_BLOCK_SCALE, block_scale)
    return {"weight_scale": block_scale.to(torch.float8_e4m3fn), "weight_global_scale": global_scale}


def unit(scales: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weight that code value 1 represents, FP32 (N, K/16)."""
    block_scale = scales["weight_scale"].to(torch.float32)
    if "weight_scale_2" in scales:
        return block_scale * scales["weight_scale_2"].view(-1, 1)
    return block_scale / scales["weight_global_scale"].view(-1, 1)


def encode(
    weight: torch.Tensor, compute_dtype: torch.dtype, scales: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors of the packed W (N, K): `scales`, unchanged, and `weight_packed` uint8 (N, K/2)."""
    blocks = weight.to(compute_dtype).to(torch.float32).unflatten(-1, (-1, BLOCK))  # (N, K/16, 16)
    if "weight_scale_2" in scales:
        reciprocal = scales["weight_scale_2"].reciprocal().view(-1, 1) / scales["weight_scale"].to(torch.float32)
        scaled = blocks * reciprocal.unsqueeze(-1)
    else:
        scaled = blocks / unit(scales).unsqueeze(-1)
    return {"weight_packed": e2m1.pack_pairs(e2m1.encode(scaled.flatten(-2))), **scales}


def pack(
    weight: torch.Tensor,
    compute_dtype: torch.dtype,
    tensor_amax: float | None = None,
    convention: str = CONVENTIONS[0],
) -> dict[str, torch.Tensor]:
    """Round a finite W (N, K), K a multiple of 16, to nearest with the scales of its maxima.

    W is rounded to `compute_dtype` first. See `scales` and `encode` for the tensors; those of the convention
    "compressed-tensors" are as in its checkpoints.
    """
    return encode(weight, compute_dtype, scales(weight, compute_dtype, tensor_amax, convention))


@cache
def _scale_table(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype).to(device)


def operand(weight_packed: torch.Tensor, weight_scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Code x block scale (N, K), without the tensor scale: exact in bfloat16, float16 and float32.

    A code has at most 2 significant bits and a scale 4, so a product has at most 6; its magnitude is 0 or lies in
    [2^-10, 2688].
    """
    scales = e2m1.lookup(_scale_table(weight_scale.device, dtype), weight_scale.view(torch.uint8))
    return e2m1.scale_blocks_(e2m1.decode(weight_packed, dtype), scales)
