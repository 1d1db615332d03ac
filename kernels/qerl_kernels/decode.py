"""Linear layers over packed weights for few tokens, as in sampling: one token of each sequence.

`decode_gemm` takes up to 256 tokens. On Hopper it runs wgmma, on cards of compute capability 8 and 10 to 12 mma.sync;
that kernel has been compiled for them, but has run on an H200 only, where it pays up to 64 tokens. If `pays` says no,
use `dequantize` and a library GEMM. The weight is decoded in registers and never stored in 16 bits. The operand is code
x block scale, as in training, and exact for the FP4 formats. Sums are FP32; tensor or row scale, adapter and bias are
applied before the only rounding: in training a weight with row scales is rounded once more, to bfloat16. Two runs give
the same bits. The configuration, and with it the order of summation, depends on the number of tokens, so a row's last
bits may differ between batch sizes, but not within a bucket (`decode_configs`). Left out: float16 activations,
gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from qerl_kernels import mxfp4, nf4, nvfp4, symmetric
from qerl_kernels.decode_configs import BUCKETS, MMA_V2, WGMMA, Config, choose
from qerl_kernels.decode_launch import LoRA, launch
from qerl_kernels.layout import BLOCK, SCALE_TYPES, KernelWeight, block_rows, shapes, unpack

MAX_TOKENS = BUCKETS[-1]
MOST_TOKENS = {WGMMA: MAX_TOKENS, MMA_V2: 64}  # that the kernel is chosen for, as measured on an H200
FEW_TOKENS = {WGMMA: 128, MMA_V2: 32}  # the same where the weight is at hand in 16 bits; MMA_V2's is a guess
MAX_RANK = 128
_MOST_ROWS = 256  # of W that one program multiplies, so that none has rows of two parts
_KERNELS = {8: MMA_V2, 9: WGMMA, 10: MMA_V2, 11: MMA_V2, 12: MMA_V2}  # by major compute capability


def pays(weight: KernelWeight, tokens: int, dtype: torch.dtype, at_hand: bool = False) -> bool:
    """Whether `decode_gemm` takes an x (tokens, K) in `dtype` and is faster than a library GEMM with this weight in 16
    bits, which has to be dequantized for it unless it is `at_hand`.
    """
    kernel = kernel_of(weight.words.device)
    if kernel is None or dtype != torch.bfloat16:
        return False
    return 0 < tokens <= (FEW_TOKENS if at_hand else MOST_TOKENS)[kernel]


def few_tokens(device: torch.device) -> int:
    """The most tokens for which `decode_gemm` pays on `device` beside a weight in 16 bits; 0: it does for none."""
    kernel = kernel_of(device)
    return 0 if kernel is None else FEW_TOKENS[kernel]


@cache
def kernel_of(device: torch.device) -> str | None:
    """Which kernel runs on this device, WGMMA or MMA_V2; None: neither does."""
    return _KERNELS.get(torch.cuda.get_device_capability(device)[0]) if device.type == "cuda" else None


def _unsupported(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"the decode GEMM needs a GPU, got {device}; use decode_reference"
    if kernel_of(device) is None:
        needed = ", ".join(map(str, _KERNELS))
        return f"the decode GEMM needs a compute capability of {needed}; use dequantize and torch.addmm"
    return None


def decode_gemm(
    x: torch.Tensor,
    weight: KernelWeight,
    scale: torch.Tensor | float = 1.0,
    bias: torch.Tensor | None = None,
    lora: LoRA | None = None,
    config: Config | None = None,
    parts: Sequence[int] = (),
    beside: bool = False,
) -> torch.Tensor:
    """y (M, N) = x (M, K) operand^T * scale + (XA B^T) * factor + bias, bfloat16 like x, for M up to 256.

    `scale` is the tensor scale: one number, or FP32 (N,) for concatenated matrices. `bias` is (N,), bfloat16 or FP32.
    `config` overrides the measured table, its `kernel` that of the device: MMA_V2 runs on Hopper too. If W is that of
    up to three layers, `parts` are their rows: B is block diagonal, with a block of equal width for each, and the zeros
    are not read. Rows of x may be strided; the other tensors must be contiguous. Raises ValueError for an unsupported
    device, kernel, shape, dtype or stride. Before capturing it in a CUDA graph, call it once.

    The kernel may start before earlier ones have ended (`overlap`). It reads words and scales of `weight` at once, and
    waits before it reads or writes anything else. So no kernel of the same step may write the weight.

    `beside` is for an XA that `project(x, A, beside=True)` returned in the call just before: the matmul runs while that
    kernel does, and waits for XA at its end (Hopper; MMA_V2 waits at the start). Without such a call it may read an x
    that is not complete.
    """
    _check(x, weight, scale, bias, lora, parts)
    if beside and lora is None:
        raise ValueError("beside=True needs lora with the XA of project(x, A, beside=True); leave beside out")
    y = x.new_empty((len(x), weight.shape[0]))
    kernel = kernel_of(x.device)
    assert kernel is not None
    if config is None:
        config = choose(_gpu(x.device), weight.shape, len(x), kernel, weight.format)
    if config.kernel == WGMMA != kernel:
        raise ValueError(f"kernel={WGMMA} needs compute capability 9 (H100, H200); use a configuration of {MMA_V2}")
    if config.kernel == MMA_V2 and weight.shape[1] % 8:
        raise ValueError(f"kernel={MMA_V2} needs K divisible by 8, got {weight.shape[1]}; use dequantize")
    launch(x, weight, scale, bias, lora, y, config, parts, beside)
    return y


def separable(parts: Sequence[int]) -> bool:
    """Whether `decode_gemm` takes layers of so many rows as `parts`."""
    return len(parts) <= 3 and all(rows > 0 and rows % _MOST_ROWS == 0 for rows in parts)


def decode_reference(
    x: torch.Tensor,
    weight: KernelWeight,
    scale: torch.Tensor | float = 1.0,
    bias: torch.Tensor | None = None,
    lora: LoRA | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`decode_gemm` in plain PyTorch on any device: computed in `dtype`, rounded once to the dtype of x."""
    y = (x.to(dtype) @ operand(weight).to(dtype).t()) * scale
    if lora is not None:
        y = y + lora[0].to(dtype) @ lora[1].to(dtype).t() * lora[2]
    return (y if bias is None else y + bias.to(dtype)).to(x.dtype)


def operand(weight: KernelWeight) -> torch.Tensor:
    """Code x scale (N, K) in FP32; rounded to bfloat16, as in all kernels, for NF4 and the block scales of others."""
    packed = unpack(weight)
    if (kind := weight.format.partition("-")[0]) in symmetric.CODES:
        dtype = torch.bfloat16 if BLOCK[weight.format] else torch.float32
        rows = block_rows(weight.format)
        return symmetric.operand(packed, symmetric.CODES[kind], rows, weight.shape, dtype).float()
    if weight.format != "nf4":
        decode = nvfp4.operand if weight.format == "nvfp4" else mxfp4.operand
        return decode(packed["weight_packed"], packed["weight_scale"], torch.float32)
    codes = torch.stack((packed["weight"] >> 4, packed["weight"] & 0xF), dim=-1).view(-1, BLOCK["nf4"])
    values = torch.tensor(nf4.VALUES, device=codes.device)[codes.int()] * packed["absmax"].unsqueeze(1)
    return values.to(torch.bfloat16).float().view(weight.shape)


def _check(
    x: torch.Tensor,
    weight: KernelWeight,
    scale: torch.Tensor | float,
    bias: torch.Tensor | None,
    lora: LoRA | None,
    parts: Sequence[int] = (),
) -> None:
    n, k = weight.shape
    if (reason := _unsupported(weight.words.device)) is not None:
        raise ValueError(reason)
    if x.ndim != 2 or not 0 < len(x) <= MAX_TOKENS:
        raise ValueError(f"x must have the shape (1 to {MAX_TOKENS}, {k}), got {tuple(x.shape)}")
    _require("x", x[:1], weight, (1, k), (torch.bfloat16,))
    if x.data_ptr() % 16 or x.stride(0) % 8:
        raise ValueError(f"rows of x must start at multiples of 16 bytes, got strides {x.stride()}; copy it")
    words, scales = shapes(weight.format, weight.shape)
    _require("words", weight.words, weight, words, (torch.int32,))
    _require("scales", weight.scales, weight, scales, SCALE_TYPES[weight.format])
    if isinstance(scale, torch.Tensor):
        _require("scale", scale, weight, (n,), (torch.float32,))
    if bias is not None:
        _require("bias", bias, weight, (n,), (torch.bfloat16, torch.float32))
    if lora is not None:
        rank = lora[1].shape[-1]
        if parts and (not separable(parts) or sum(parts) != n or rank % len(parts)):
            raise ValueError(
                f"{list(parts)} must be up to three multiples of {_MOST_ROWS} that add up to {n}, with a part of the "
                f"rank {rank} each; leave parts out"
            )
        own = rank // (len(parts) or 1)
        if not 0 < own <= MAX_RANK:
            raise ValueError(f"the adapter's rank must be 1 to {MAX_RANK}, got {own}; add it with a separate matmul")
        _require("XA", lora[0], weight, (len(x), rank), (torch.bfloat16,))
        _require("B", lora[1], weight, (n, rank), (torch.bfloat16,))


def _require(
    name: str, tensor: torch.Tensor, weight: KernelWeight, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    if tensor.shape != shape or tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        got = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
        raise ValueError(f"{name} must be {wanted} {shape} for a weight {weight.shape}, got {got}; convert it")
    if tensor.device != weight.words.device:
        raise ValueError(f"{name} is on {tensor.device}, the weight on {weight.words.device}; move one to the other")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}; pass {name}.contiguous()")


@cache
def _gpu(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)
