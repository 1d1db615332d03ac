"""Microseconds of the experts of one block over 4-bit weights, compared with bfloat16. Needs a GPU.

    python benchmarks/moe.py [--out FILE] [--shapes qwen3-30b-a3b gpt-oss-20b] [--tokens 1 8 32 128]

Timed is the way from the tokens of a decoding step and the experts chosen for each to the experts' outputs: sorting,
the matmul of gate and up, SwiGLU, and the matmul of down; not the router and not the weighted sum. In every way SwiGLU
is the same kernel. Each call has other tokens and other experts, drawn uniformly as a router with random weights would;
the weights are several times the L2 cache. A trained router prefers some experts, and so reads fewer weights.

The floor is the larger of bytes (weights and scales of the chosen experts) over COPY_RATE and floating-point operations
over MATRIX_RATE.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import timing
import torch
import triton
from timing import COPY_RATE, MATRIX_RATE, copies, quantiles, random_weight

from qerl_kernels.decoder_layer import swiglu
from qerl_kernels.grouped import Weight, grouped_gemm, sort_rows

FORMATS = ("nvfp4", "mxfp4", "nf4", "bf16")
CALLS = 8  # draws of tokens and experts that a measurement cycles through


@dataclass(frozen=True)
class Experts:
    """The experts of one block."""

    count: int
    chosen: int  # of each token
    hidden: int
    intermediate: int

    @property
    def matrices(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """N and K of gate and up together, and of down."""
        return (2 * self.intermediate, self.hidden), (self.hidden, self.intermediate)


SHAPES = {"qwen3-30b-a3b": Experts(128, 8, 2048, 768), "gpt-oss-20b": Experts(32, 4, 2880, 2880)}


def ours(x: torch.Tensor, ids: torch.Tensor, weights: tuple[Weight, Weight], experts: int) -> torch.Tensor:
    rows = sort_rows(ids, experts)
    h = swiglu(*grouped_gemm(x.index_select(0, rows.tokens), weights[0], rows).chunk(2, dim=1))
    return grouped_gemm(h, weights[1], rows).index_select(0, rows.places)


def torch_grouped(x: torch.Tensor, ids: torch.Tensor, weights: tuple[Weight, Weight], experts: int) -> torch.Tensor:
    """As transformers' `grouped_mm_experts_forward` does it."""
    multiply: Any = torch._grouped_mm  # type: ignore[reportPrivateImportUsage]  # public from torch 2.10 on
    by_expert, order = ids.flatten().sort()
    ends = torch.histc(by_expert.int(), bins=experts, min=0, max=experts - 1).cumsum(0, dtype=torch.int32)
    up, down = (weight.transpose(1, 2) for weight in weights if isinstance(weight, torch.Tensor))
    h = swiglu(*multiply(x[order // ids.shape[1]], up, offs=ends).chunk(2, dim=1))
    y = multiply(h, down, offs=ends)
    return torch.empty_like(y).index_copy_(0, order, y)


def random_experts(format_name: str, experts: Experts) -> tuple[Weight, Weight]:
    def make(n: int, k: int) -> Weight:
        if format_name == "bf16":
            return torch.empty(experts.count, n, k, dtype=torch.bfloat16, device="cuda").normal_(0, k**-0.5)
        return random_weight(format_name, (experts.count * n, k))

    up, down = (make(n, k) for n, k in experts.matrices)
    return up, down


def layer_rows(name: str, formats: list[str], tokens: list[int]) -> Iterator[dict[str, Any]]:
    """For each format and number of tokens the time of every way to run the experts of the shape `name`."""
    experts = SHAPES[name]
    draws = {m: [_draw(experts, m) for _ in range(CALLS)] for m in tokens}
    measured: dict[tuple[str, str, int], list[float]] = {}
    floors: dict[tuple[str, int], float] = {}
    for format_name in formats:
        weights = [random_experts(format_name, experts)]
        size = sum(weight.nbytes for weight in weights[0])
        weights += [random_experts(format_name, experts) for _ in range(copies(size) - 1)]
        ways = {"ours": ours} | ({"torch": torch_grouped} if format_name == "bf16" else {})
        for m in tokens:
            runs = [
                [partial(way, x, ids, weights[i % len(weights)], experts.count) for i, (x, ids) in enumerate(draws[m])]
                for way in ways.values()
            ]
            for way, spans in zip(ways, timing.times(runs), strict=True):
                measured[way, format_name, m] = spans
            chosen = sum(len(ids.unique()) for _, ids in draws[m]) / CALLS
            flops = 2 * m * experts.chosen * sum(n * k for n, k in experts.matrices)
            floors[format_name, m] = timing.floor_us(chosen / experts.count * size, flops, COPY_RATE, MATRIX_RATE)
        del weights, runs
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    for (way, format_name, m), spans in measured.items():
        percentiles, peer = quantiles(spans), measured.get(("torch", "bf16", m))
        yield {
            "shape": name, "way": way, "format": format_name, "tokens": m, **percentiles,
            "floor_us": round(floors[format_name, m], 2),
            "speed_relative_to_torch": round(quantiles(peer)["p50_us"] / percentiles["p50_us"], 2) if peer else None,
        } | about  # fmt: skip


def _draw(experts: Experts, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(tokens, experts.hidden, dtype=torch.bfloat16, device="cuda")
    return x, torch.rand(tokens, experts.count, device="cuda").topk(experts.chosen).indices


def main() -> None:
    parser = timing.argument_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 32, 128])
    options: argparse.Namespace = parser.parse_args()
    timing.require_gpu(parser)
    rows = (row for name in options.shapes for row in layer_rows(name, options.formats, options.tokens))
    timing.print_rows(timing.write_rows(rows, options.out), leave_out=("gpu", "torch", "triton"))


if __name__ == "__main__":
    main()
