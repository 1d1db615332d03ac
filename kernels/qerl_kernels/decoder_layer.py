"""The operations between the matmuls of a decoding step, one kernel each: norms, rotation, cache, attention, GLU.

A decoding step has one token per sequence, so these operations are tiny. As the dozens of kernels that transformers
launches they take as much time as the matmuls. Positions are read on the GPU, so one captured CUDA graph serves all of
them, and attention reads only the slots that a row may see. `decoder_layer_reference` has the same functions in plain
PyTorch. Left out: gradients, more than one query per row.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from qerl_kernels.checks import require_device, require_shape

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
KEYS = 64  # that a program of `attend` reads at once, fewer if they exceed _KEY_BYTES
_KEY_BYTES = 1 << 14  # several such tiles are prefetched into shared memory, of which small GPUs have 99 KiB
_MIN_DOT = 16
_PROGRAMS = 256  # enough to fill a large GPU: two per processor
_MAX_SPLITS = 32


def add_norm(
    x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, epsilon: float, unit_offset: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum x + delta and its RMSNorm with `weight`; x and delta (n, H), weight (H,).

    Without delta, the sum is x itself. `weight` may have a higher precision than x. With `unit_offset` the norm
    multiplies by 1 + weight and rounds only the result, as Gemma's does.
    """
    rows, width = x.shape
    require_shape("x", x, (rows, width), *FLOATS)
    require_shape("weight", weight, (width,), *FLOATS)
    normed = torch.empty_like(x)
    total = x
    if delta is not None:
        require_shape("delta", delta, (rows, width), x.dtype)
        total = torch.empty_like(x)
    require_device(x=x, weight=weight, delta=x if delta is None else delta)
    from qerl_kernels import jit_decoder_layer

    block = _power_of_2(width)
    kernel: Any = jit_decoder_layer.add_norm
    kernel[(rows,)](
        x, delta, weight, total, normed, width, epsilon, ADD=delta is not None, UNIT_OFFSET=unit_offset, BLOCK=block,
        num_warps=min(8, max(1, block // 256)),
    )  # fmt: skip
    return total, normed


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, both (n, I); rows may be strided."""
    return _gated(gate, up, gelu=False)


def geglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up, both (n, I), with the tanh approximation of GELU; rows may be strided."""
    return _gated(gate, up, gelu=True)


def _gated(gate: torch.Tensor, up: torch.Tensor, gelu: bool) -> torch.Tensor:
    rows, width = gate.shape
    require_shape("gate", gate, (rows, width), *FLOATS, strided=True)
    require_shape("up", up, (rows, width), gate.dtype, strided=True)
    require_device(gate=gate, up=up)
    from qerl_kernels import jit_decoder_layer

    out = gate.new_empty(rows, width)
    kernel: Any = jit_decoder_layer.gated
    grid = (rows, -(-width // 1024))
    kernel[grid](gate, up, out, width, gate.stride(0), up.stride(0), GELU=gelu, BLOCK=1024, num_warps=4)
    return out


def rotate_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    starts: torch.Tensor,
    slot: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """The rotated queries (n, H, D); writes rotated keys, and values, to `slot` of the cache's first n rows.

    q is (n, H * D), k and v are (n, KV * D), rows may be strided; the cache, `keys` and `values`, is (N, KV, S, D).
    `cos` and `sin` (S, D) are indexed by position, `starts` (n,) is the slot of each row's position 0, and `slot` (1,)
    is written by all rows. Rotates the two halves of a head against each other, as Llama does.
    """
    rows, (_, heads, width, size) = len(q), keys.shape
    queries = q.shape[1] // size
    _require_cache(rows, starts, slot, keys, values)
    require_shape("q", q, (rows, queries * size), keys.dtype, strided=True)
    for name, tensor in (("k", k), ("v", v)):
        require_shape(name, tensor, (rows, heads * size), keys.dtype, strided=True)
    for name, tensor in (("cos", cos), ("sin", sin)):
        require_shape(name, tensor, (width, size), *FLOATS)
    require_device(q=q, k=k, v=v, cos=cos, sin=sin, starts=starts, slot=slot, keys=keys, values=values)
    from qerl_kernels import jit_decoder_layer

    rotated = q.new_empty(rows, queries, size)
    kernel: Any = jit_decoder_layer.rotate_store
    kernel[(rows, queries + 2 * heads)](
        q, k, v, cos, sin, starts, slot, keys, values, rotated, width, q.stride(0), k.stride(0), v.stride(0),
        HEADS=queries, KV=heads, D=size, HALF=_power_of_2(size // 2), DIM=_power_of_2(size), num_warps=1,
    )  # fmt: skip
    return rotated


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    starts: torch.Tensor,
    slot: torch.Tensor,
    scaling: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attention (n, H * D) of one query per row, q (n, H, D), over the slots `starts` to `slot` of its cache.

    Of these it sees the last `window`, if that is given.
    Adjacent query heads share a key head. Softmax and sums are in FP32 and deterministic. If there are too few rows
    and heads to fill the GPU, the slots of a row are split among programs.
    """
    rows, (_, heads, width, size) = len(q), keys.shape
    group = q.shape[1] // heads
    _require_cache(rows, starts, slot, keys, values)
    require_shape("q", q, (rows, heads * group, size), keys.dtype)
    require_device(q=q, starts=starts, slot=slot, keys=keys, values=values)
    from qerl_kernels import jit_decoder_layer

    splits = min(_MAX_SPLITS, _power_of_2(width) // KEYS, _power_of_2(_PROGRAMS // (rows * heads)))
    splits = max(1, splits)
    out = q.new_empty(rows, heads * group * size)
    dim = max(_MIN_DOT, _power_of_2(size))
    block = key_block(dim, keys.dtype)
    partial = maxima = sums = None
    if splits > 1:
        partial = q.new_empty(rows * heads * group, splits, size, dtype=torch.float32)
        maxima, sums = (q.new_empty(rows * heads * group, splits, dtype=torch.float32) for _ in range(2))
    kernel: Any = jit_decoder_layer.attend
    kernel[(rows, heads, splits)](
        q, keys, values, starts, slot, out, partial, maxima, sums, scaling * math.log2(math.e), width, window or width,
        KV=heads, GROUP=group, ROWS=max(_MIN_DOT, _power_of_2(group)), D=size, DIM=dim, BLOCK=block,
        SPLITS=splits, num_warps=4, num_stages=3,
    )  # fmt: skip
    if splits > 1:
        combine: Any = jit_decoder_layer.combine_splits
        combine[(rows * heads * group,)](partial, maxima, sums, out, D=size, DIM=dim, SPLITS=splits, num_warps=1)
    return out


def key_block(dim: int, dtype: torch.dtype) -> int:
    """How many keys of `dim` numbers (a power of two) a program of `attend` reads at once."""
    return max(_MIN_DOT, min(KEYS, _KEY_BYTES // (dim * dtype.itemsize)))


def _require_cache(
    rows: int, starts: torch.Tensor, slot: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    require_shape("keys", keys, (-1, -1, -1, -1), *FLOATS)
    require_shape("values", values, tuple(keys.shape), keys.dtype)
    require_shape("starts", starts, (rows,), torch.int64)
    require_shape("slot", slot, (1,), torch.int64)
    if rows > len(keys) or keys.shape[3] % 2:
        raise ValueError(
            f"the cache must have at least {rows} rows and an even head size, got "
            f"{tuple(keys.shape)}; allocate a larger one"
        )


def _power_of_2(size: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(0, size - 1).bit_length()
