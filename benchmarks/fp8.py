"""FP8 by FP8 in the linear layers of a 7B: microseconds beside bfloat16, and how far off products and codes are.

    python benchmarks/fp8.py [--out FILE]

`ours` is `quantize` and `fast`, a product; `exact` has FP32 sums (`fp8.FAST_SUMS`). A backward pass adds `dequantize`.
Errors are relative to the FP64 product of the same codes: `far` by norm, `most` the largest, by the root mean square.
`bf16` rounds both operands too. `codes` and `scales` count bytes of the kernel that are not the reference's.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import timing
import torch
from timing import LAYERS, copies

from qerl_kernels import fp8
from qerl_kernels.activations import round_blocks


def operands(name: str, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x (M, K), its channels of unlike size, W (N, K), and counts."""
    n, k = LAYERS[name]
    x, weight = torch.randn(rows, k, device="cuda"), 0.02 * torch.randn(n, k, device="cuda")
    counts = torch.zeros(2, dtype=torch.long, device="cuda")
    return (x * torch.randn(k, device="cuda").exp()).bfloat16(), weight.bfloat16(), counts


def timed(name: str, rows: int) -> dict[str, Any]:
    x, weight, counts = operands(name, rows)
    (codes, scales), rounded = fp8.quantize(weight, counts), fp8.quantize(x, counts)
    packed = [codes.clone() for _ in range(copies(codes.nbytes))]
    runs = {
        "bf16": [partial(torch.mm, x, weight.clone().t()) for _ in range(copies(weight.nbytes))],
        "ours": [lambda w=one: fp8.multiply(*fp8.quantize(x, counts), w, scales, None) for one in packed],
        "quantize": [partial(fp8.quantize, x, counts)],
        "fast": [partial(fp8.multiply, *rounded, one, scales, None, True) for one in packed],
        "exact": [partial(fp8.multiply, *rounded, one, scales, None, False) for one in packed],
        "dequantize": [partial(fp8.dequantize, one, scales, torch.bfloat16) for one in packed],
    }
    spans = zip(runs, timing.times([*runs.values()], 0.02), strict=True)
    us = {way: timing.quantiles(of_run)["p50_us"] for way, of_run in spans}
    return {"layer": name, "M": rows, **us, "speedup": round(us["bf16"] / us["ours"], 2)}


def compared(name: str) -> dict[str, Any]:
    x, weight, counts = operands(name, 1024)
    own, reference, (codes, scales) = (
        fp8.quantize(x, counts),
        *(fp8.quantize(one, counts, False) for one in (x, weight)),
    )
    exact = (reference[0].double() * reference[1].double()) @ (codes.double() * scales.double()).t()
    products = {
        "fast": fp8.multiply(*reference, codes, scales, None, True),
        "exact": fp8.multiply(*reference, codes, scales, None, False),
        "bf16": round_blocks(x, "fp8") @ fp8.dequantize(codes, scales, torch.bfloat16).t(),
    }
    row: dict[str, Any] = {"layer": name}
    for way, y in products.items():
        away = y.double() - exact
        row[f"{way}_far"] = float(away.norm() / exact.norm())
        row[f"{way}_most"] = float(away.abs().max() / exact.square().mean().sqrt())
    for what, one, other in zip(("codes", "scales"), own, reference, strict=True):
        row[what] = int((one.view(torch.uint8) != other.view(torch.uint8)).sum())
    return row


def main() -> None:
    parser = timing.argument_parser(__doc__)
    options = parser.parse_args()
    timing.require_gpu(parser)
    if (reason := fp8.why_not((0, 0), torch.cuda.get_device_capability())) is not None:
        parser.error(reason)
    layers = [name for name in LAYERS if "7B" in name]
    cases = itertools.product(layers, (64, 256, 2048, 8192))
    timing.print_rows(timing.write_rows(itertools.starmap(timed, cases), options.out))
    timing.print_rows([*map(compared, layers)])


if __name__ == "__main__":
    main()
