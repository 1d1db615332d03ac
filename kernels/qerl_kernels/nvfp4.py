"""NVFP4 weights: E2M1 codes, an E4M3 scale for every 16 inputs, one FP32 scale for the tensor.

Follows the NVFP4A16 scheme of compressed-tensors bit for bit (round to nearest from plain maxima, no calibration data),
which is what QeRL's checkpoints use. Its quirks are kept because they change bytes: scales are computed in the dtype of
the weights, the tensor scale G is a divisor made by a rounded reciprocal, and a block scale that rounds to zero becomes
0.125. torchao and ModelOpt compute in FP32 with other clamps and differ in about 1 % of the scales. Left out:
activation scales, the swizzled scale layout of Blackwell, searched scales ("four over six").
"""

from __future__ import annotations

from functools import cache

import torch

from qerl_kernels import e2m1

BLOCK = 16
E4M3_LARGEST = 448.0
_EMPTY_BLOCK_SCALE = 0.125  # what compressed-tensors stores where a scale rounds to zero


def tensor_scale(tensor_amax: torch.Tensor) -> torch.Tensor:
    """G, FP32 (1,): maps the largest |w| (a scalar in the compute dtype) to 448 * 6. Real block scale = stored / G.

    The reciprocal and the product are each rounded to the compute dtype: a number divided by a tensor is evaluated
    that way in PyTorch. G is 1 where that overflows: a tensor of zeros, or float16 and maxima below about 0.041.
    """
    amax = tensor_amax.clamp(min=torch.finfo(tensor_amax.dtype).tiny)
    scale = amax.reciprocal() * (E4M3_LARGEST * e2m1.LARGEST)
    return torch.nan_to_num(scale, nan=1.0, posinf=1.0).to(torch.float32).reshape(1)


def pack(weight: torch.Tensor, compute_dtype: torch.dtype, tensor_amax: float | None = None) -> dict[str, torch.Tensor]:
    """Quantize a finite W (N, K), K a multiple of 16, to the three tensors of a compressed-tensors checkpoint.

    Returns `weight_packed` uint8 (N, K/2), `weight_scale` float8_e4m3fn (N, K/16), `weight_global_scale` FP32 (1,).
    W is rounded to `compute_dtype` first. `tensor_amax` is the largest |w| over all matrices that share one tensor
    scale (query, key and value; gate and up), None for a matrix of its own.
    """
    blocks = weight.to(compute_dtype).unflatten(-1, (-1, BLOCK))  # (N, K/16, 16)
    block_amax = blocks.abs().amax(dim=-1)  # (N, K/16)
    amax = block_amax.amax() if tensor_amax is None else block_amax.new_tensor(tensor_amax)
    global_scale = tensor_scale(amax)
    # Divisors are tensors on the device, not Python numbers: CUDA turns division by a number into a product.
    wanted = (block_amax / block_amax.new_tensor(e2m1.LARGEST)).to(torch.float32) * global_scale
    block_scale = wanted.clamp(max=E4M3_LARGEST).to(torch.float8_e4m3fn).to(torch.float32)
    block_scale = torch.where(block_scale == 0, _EMPTY_BLOCK_SCALE, block_scale)
    scaled = blocks.to(torch.float32) / (block_scale / global_scale).unsqueeze(-1)
    return {
        "weight_packed": e2m1.pack_pairs(e2m1.encode(scaled.flatten(-2))),
        "weight_scale": block_scale.to(torch.float8_e4m3fn),
        "weight_global_scale": global_scale,
    }


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
