"""The operations between the matmuls of a decoding step, one kernel each: norms, rotation, cache, attention, GLU.

A decoding step has one token per sequence, so these operations are tiny. As the dozens of kernels that transformers
launches they take as much time as the matmuls. Keys and values lie in pages of PAGE tokens; row i of the batch finds
its own in row i of a block table. Positions and tables are read on the GPU, so one captured CUDA graph serves all of
them. `decoder_layer_reference` has the same functions in plain PyTorch. Left out: gradients, more than one query per
row.

Rows with the same prompt share the whole pages of it, their *prefix*. Attention reads a prefix once for all rows of a
*cluster*, up to `cluster_size` rows that share it. It sums over pieces of PIECE keys, of the prefix and then of the
rest, so the order of summation depends on the row alone: its bits do not depend on what else is in the batch.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from qerl_kernels.checks import require_device, require_shape
from qerl_kernels.overlap import overlapping

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
PAGE = 64  # tokens whose keys and values lie together
PIECE = 256  # keys whose part of a softmax is computed by one program, in order
_KEY_BYTES = 1 << 14  # of keys that a program reads at once; small GPUs have 99 KiB of shared memory for several
_MIN_DOT = 16
_QUERIES = 64  # that a program multiplies with a prefix: a full tile of the tensor cores
_PROGRAMS = 512  # enough to fill a large GPU: four per processor
_MIN_SPLITS = 4  # so that one long row among short ones does not decide the time of a full batch
_CHUNK = 8  # pieces that are combined at once
PREFIX_WARPS = 8  # with 4, a tile of 64 queries needs more registers than there are


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

    block = power_of_2(width)
    kernel: Any = jit_decoder_layer.add_norm
    kernel[(rows,)](
        x, delta, weight, total, normed, width, epsilon, ADD=delta is not None, UNIT_OFFSET=unit_offset, BLOCK=block,
        num_warps=min(8, max(1, block // 256)), **overlapping(x.device),
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
    kernel[grid](
        gate, up, out, width, gate.stride(0), up.stride(0), GELU=gelu, BLOCK=1024, num_warps=4,
        **overlapping(gate.device),
    )  # fmt: skip
    return out


def cluster_size(group: int) -> int:
    """How many rows of a prompt one program can serve, if `group` query heads share a key head."""
    return max(1, _QUERIES // group)


def rotate_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    table: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """The rotated queries (n, H, D); writes the rotated key and the value of each row to its page.

    q is (n, H * D), k and v are (n, KV * D), rows may be strided; `keys` and `values` are (pages, KV, PAGE, D). `cos`
    and `sin` (S, D) are indexed by position. Row i has the position positions[i], (n,) int64, whose page is
    table[i, positions[i] // PAGE], (n, S / PAGE) int32. Rotates the two halves of a head against each other, as Llama
    does.
    """
    rows, (_, heads, _, size) = len(q), keys.shape
    queries = q.shape[1] // size
    _require_cache(rows, positions, table, keys, values)
    require_shape("q", q, (rows, queries * size), keys.dtype, strided=True)
    for name, tensor in (("k", k), ("v", v)):
        require_shape(name, tensor, (rows, heads * size), keys.dtype, strided=True)
    for name, tensor in (("cos", cos), ("sin", sin)):
        require_shape(name, tensor, (table.shape[1] * PAGE, size), *FLOATS)
    require_device(q=q, k=k, v=v, cos=cos, sin=sin, positions=positions, table=table, keys=keys, values=values)
    from qerl_kernels import jit_decoder_layer

    rotated = q.new_empty(rows, queries, size)
    kernel: Any = jit_decoder_layer.rotate_store
    kernel[(rows, queries + 2 * heads)](
        q, k, v, cos, sin, positions, table, keys, values, rotated, table.shape[1], q.stride(0), k.stride(0),
        v.stride(0), HEADS=queries, KV=heads, D=size, HALF=power_of_2(size // 2), DIM=power_of_2(size), PAGE=PAGE,
        num_warps=1, **overlapping(q.device),
    )  # fmt: skip
    return rotated


def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    prefixes: torch.Tensor,
    clusters: torch.Tensor | None,
    scaling: float,
    window: int | None = None,
) -> torch.Tensor:
    """Attention (n, H * D) of one query per row, q (n, H, D), over the keys up to its position in its pages.

    Of these it sees the last `window`, if that is given. Adjacent query heads share a key head. `prefixes` (n,) int64
    are multiples of PAGE, at most the positions. `clusters` (C, cluster_size) int32 names the rows whose prefixes are
    read together, each row with a prefix in one of them, -1 behind the last; None if no row has a prefix. Softmax and
    sums are in FP32 and deterministic.
    """
    rows, (_, heads, _, size) = len(q), keys.shape
    group = q.shape[1] // heads
    columns, members = table.shape[1], cluster_size(group)
    _require_cache(rows, positions, table, keys, values)
    require_shape("q", q, (rows, heads * group, size), keys.dtype)
    require_shape("prefixes", prefixes, (rows,), torch.int64)
    if clusters is not None:
        require_shape("clusters", clusters, (-1, members), torch.int32)
    require_device(q=q, positions=positions, prefixes=prefixes, table=table, keys=keys, values=values)
    from qerl_kernels import jit_decoder_layer

    pieces = -(-columns * PAGE // PIECE) + 1  # the last of the prefix may be cut
    splits = min(pieces, max(_MIN_SPLITS, _PROGRAMS // (rows * heads)))
    out = q.new_empty(rows, heads * group * size)
    dim = max(_MIN_DOT, power_of_2(size))
    partial = q.new_empty(rows * heads * group, pieces, size, dtype=torch.float32)
    maxima, total = (q.new_empty(rows * heads * group, pieces, dtype=torch.float32) for _ in range(2))
    seen = window or columns * PAGE
    factor = scaling * math.log2(math.e)
    shape = {"KV": heads, "GROUP": group, "D": size, "DIM": dim, "PAGE": PAGE, "PIECE": PIECE}
    shape |= {"BLOCK": key_block(dim, keys.dtype), **overlapping(q.device)}
    if clusters is not None:
        prefix: Any = jit_decoder_layer.attend_prefix
        prefix[(len(clusters), heads, splits)](
            q, keys, values, table, positions, prefixes, clusters, partial, maxima, total, factor, seen, columns,
            pieces, MEMBERS=members, ROWS=max(_MIN_DOT, power_of_2(members * group)), num_warps=PREFIX_WARPS,
            num_stages=2, **shape,
        )  # fmt: skip
    own: Any = jit_decoder_layer.attend_own
    own[(rows, heads, splits)](
        q, keys, values, table, positions, prefixes, partial, maxima, total, factor, seen, columns, pieces,
        ROWS=max(_MIN_DOT, power_of_2(group)), num_warps=own_warps(keys.dtype), num_stages=3, **shape,
    )  # fmt: skip
    combine: Any = jit_decoder_layer.combine_pieces
    combine[(rows * heads * group,)](
        partial, maxima, total, positions, prefixes, out, seen, pieces,
        HEADS=heads * group, D=size, DIM=dim, PIECE=PIECE, CHUNK=_CHUNK, num_warps=1,
        **overlapping(q.device),
    )  # fmt: skip
    return out


def key_block(dim: int, dtype: torch.dtype) -> int:
    """How many keys of `dim` numbers (a power of two) a program of `attend` reads at once."""
    return max(_MIN_DOT, min(PAGE, _KEY_BYTES // (dim * dtype.itemsize)))


def own_warps(dtype: torch.dtype) -> int:
    """Warps of a program that attends to a row's own keys: FP32 has no tensor cores, and needs more registers."""
    return 4 if dtype.itemsize == 2 else 8


def _require_cache(
    rows: int, positions: torch.Tensor, table: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    require_shape("keys", keys, (-1, -1, PAGE, -1), *FLOATS)
    require_shape("values", values, tuple(keys.shape), keys.dtype)
    require_shape("positions", positions, (rows,), torch.int64)
    require_shape("table", table, (rows, -1), torch.int32)
    if keys.shape[3] % 2:
        raise ValueError(f"the head size must be even, got {tuple(keys.shape)}; pad it")


def power_of_2(size: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(0, size - 1).bit_length()
