"""Linear layers of a mixture's experts for few tokens: each row of x is multiplied by the weight of its own expert.

`sort_rows` brings the experts that a router chose into the order of experts, once for all matmuls of a layer.
`grouped_gemm` then reads the weights of the chosen experts only, packed or in bfloat16. Shapes depend on the number of
tokens alone and nothing waits for the host, so a CUDA graph can hold both. The operand is code x block scale, as
everywhere; sums are FP32, scale and bias are applied before the only rounding, and two runs give the same bits.
Packed weights run the decode GEMM on Hopper, and a slower kernel on other GPUs. Left out: gradients, and rows without
an expert (an index past the last one).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from qerl_kernels import decode, decode_launch
from qerl_kernels.checks import require_device, require_shape
from qerl_kernels.decode_configs import BUCKETS, WGMMA, Config, bucket, by_rule
from qerl_kernels.layout import INPUTS, ROWS, SCALE_TYPES, KernelWeight, shapes

Weight = KernelWeight | torch.Tensor  # (E * N, K) packed, experts one after the other, or bfloat16 (E, N, K)

MAX_TOKENS = 256  # of a batch, as of the decode GEMM
_MAX_TILE = 64  # rows that one program multiplies
FORMATS = ("nvfp4", "mxfp4", "nf4")  # index: FORMAT of the kernel; bfloat16 is the next
_SORTED = 64  # rows whose places one program finds
_FLOATS = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class SortedRows:
    """Rows, a token and one of its experts each, in the order of experts; rows of one expert in that of tokens."""

    tokens: torch.Tensor  # int32 (S,): the token of each sorted row
    places: torch.Tensor  # int32 (S,): where each row (token, choice) is in the order
    starts: torch.Tensor  # int32 (E + 1,): where the rows of each expert start in it
    items: torch.Tensor  # int32 (I, 3): expert, first row and end of what one program multiplies; expert -1: nothing
    tile: int  # rows of an item at most

    @property
    def experts(self) -> int:
        return len(self.starts) - 1


def supported(weight: KernelWeight, experts: int, tokens: int, dtype: torch.dtype) -> bool:
    """Whether `grouped_gemm` takes this weight of `experts` on its device, with x in `dtype` for `tokens`."""
    fits = 0 < tokens <= MAX_TOKENS and dtype == torch.bfloat16 and weight.shape[0] % (experts * ROWS) == 0
    return fits and weight.words.device.type == "cuda"


def sort_rows(ids: torch.Tensor, experts: int) -> SortedRows:
    """The rows of tokens whose chosen experts are `ids` (M, k), numbers from 0 to `experts` - 1."""
    require_shape("ids", ids, (-1, -1), torch.int64, torch.int32)
    require_device(ids=ids)
    from qerl_kernels import jit_grouped

    count, rows = ids.numel(), _empty(ids, experts)
    kernel: Any = jit_grouped.sort_rows[(1 + -(-count // _SORTED),)]
    kernel(
        ids, rows.tokens, rows.places, rows.starts, rows.items, count, ids.shape[1], experts, len(rows.items),
        EXPERTS=1 << (experts - 1).bit_length(), ROWS=rows.tile, BLOCK=_SORTED, num_warps=8,
    )  # fmt: skip
    return rows


def _empty(ids: torch.Tensor, experts: int) -> SortedRows:
    """An expert's share of the rows fits in half a tile; the items are at least as many as any choice fills."""
    count = ids.numel()
    active = min(count, experts)
    tile = min(_MAX_TILE, bucket(min(BUCKETS[-1], 2 * -(-count // active))))
    blocks = min(count, active + count // tile)

    def empty(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=ids.device)

    return SortedRows(empty(count), empty(count), empty(experts + 1), empty(blocks, 3), tile)


def sort_rows_reference(ids: torch.Tensor, experts: int) -> SortedRows:
    """`sort_rows` in plain PyTorch."""
    rows = _empty(ids, experts)
    by_expert, order = ids.flatten().sort(stable=True)
    rows.tokens.copy_(order // ids.shape[1])
    rows.places[order] = torch.arange(len(order), dtype=torch.int32, device=ids.device)
    rows.starts.copy_(torch.searchsorted(by_expert, torch.arange(experts + 1, device=ids.device)))
    items = [
        (expert, first, min(first + rows.tile, end))
        for expert, (start, end) in enumerate(pairwise(rows.starts.tolist()))
        for first in range(start, end, rows.tile)
    ]
    rows.items.fill_(-1)[: len(items)] = torch.tensor(items, dtype=torch.int32)
    return rows


def grouped_gemm(
    x: torch.Tensor,
    weight: Weight,
    rows: SortedRows,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """y (S, N) with y_i = scale_e * (W_e x_i) + bias_e, e the expert of the sorted row i, in the dtype of x (S, K).

    `scale` is FP32 (E,), `bias` (E, N). Raises ValueError for what does not fit. Before capturing it in a CUDA graph,
    call it once.
    """
    experts, count = rows.experts, len(rows.tokens)
    n, k = _matrix_shape(weight, experts)
    require_shape("x", x, (count, k), *_FLOATS)
    tensors = {"x": x, "rows": rows.items, "weight": weight.words if isinstance(weight, KernelWeight) else weight}
    if scale is not None:
        require_shape("scale", scale, (experts,), torch.float32)
        tensors["scale"] = scale
    if bias is not None:
        require_shape("bias", bias, (experts, n), *_FLOATS)
        tensors["bias"] = bias
    require_device(**tensors)
    y = x.new_empty(count, n)
    if isinstance(weight, KernelWeight) and x.dtype == torch.bfloat16 and decode.kernel_of(x.device) == WGMMA:
        decode_launch.launch_grouped(x, weight, (n, k), rows.items, scale, bias, y, choose(n, k, rows))
    else:
        _launch(x, weight, (n, k), rows, scale, bias, y)
    return y


def choose(n: int, k: int, rows: SortedRows) -> Config:
    """The decode GEMM's configuration for experts W (N, K): by its rule, as for one matrix with as many programs."""
    return replace(by_rule((n * len(rows.items), k), rows.tile), separate=False)


def grouped_reference(
    x: torch.Tensor,
    weight: Weight,
    rows: SortedRows,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`grouped_gemm` in plain PyTorch on any device: computed in `dtype`, rounded once to the dtype of x."""
    n, k = _matrix_shape(weight, rows.experts)
    matrices = decode.operand(weight).view(-1, n, k) if isinstance(weight, KernelWeight) else weight
    parts = []
    for expert, (start, end) in enumerate(pairwise(rows.starts.tolist())):
        part = x[start:end].to(dtype) @ matrices[expert].to(dtype).t()
        part = part if scale is None else part * scale[expert]
        parts.append(part if bias is None else part + bias[expert].to(dtype))
    return torch.cat(parts).to(x.dtype)


def _launch(
    x: torch.Tensor,
    weight: Weight,
    shape: tuple[int, int],
    rows: SortedRows,
    scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    from qerl_kernels import jit_grouped

    n, k = shape
    packed = isinstance(weight, KernelWeight)
    block = 64 if packed else 128
    kernel: Any = jit_grouped.grouped_gemm[(len(rows.items), -(-n // block))]
    kernel(
        x,
        *((weight.words, weight.scales.flatten(3).view(torch.int32)) if packed else (weight, None)),
        decode_launch.nf4_table(x.device).view(torch.float32), rows.items, scale, bias, y,
        2.0**weight.exponent if packed else 1.0, n, k, -(-k // INPUTS), x.stride(0),
        *((0, 0, 0) if packed else weight.stride()),
        FORMAT=FORMATS.index(weight.format) if packed else len(FORMATS), BM=block, BN=max(16, rows.tile),
        EVEN=k % INPUTS == 0, HAS_SCALE=scale is not None, HAS_BIAS=bias is not None,
        num_warps=4 if packed else 8, num_stages=4,
    )  # fmt: skip


def _matrix_shape(weight: Weight, experts: int) -> tuple[int, int]:
    """(N, K) of one expert's matrix; raises ValueError if `weight` does not hold `experts` of them."""
    if isinstance(weight, torch.Tensor):
        if weight.ndim != 3 or len(weight) != experts or weight.dtype not in _FLOATS:
            raise ValueError(f"weight must be ({experts}, N, K) of floats, got {tuple(weight.shape)} {weight.dtype}")
        return weight.shape[1], weight.shape[2]
    n, k = weight.shape
    if n % (experts * ROWS):
        raise ValueError(f"packed weights of {experts} experts must have N a multiple of {ROWS}, got {n} / {experts}")
    if weight.format not in FORMATS:
        raise ValueError(f"experts are packed in {', '.join(FORMATS)}, got {weight.format}; dequantize them")
    words, scales = shapes(weight.format, weight.shape)
    require_shape("words", weight.words, words, torch.int32)
    require_shape("scales", weight.scales, scales, *SCALE_TYPES[weight.format])
    return n // experts, k
