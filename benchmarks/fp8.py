"""FP8 by FP8 in the linear layers of a 7B: microseconds beside bfloat16, and how far off products and kernels are.

    python benchmarks/fp8.py [--out FILE]

`ours` is `quantize` and `fast`, a product; `exact` has FP32 sums (`fp8.FAST_SUMS`). The gradient of an input takes
`dX_bf16`, behind `dequantize`, or `dX_ours` with train.gradients=fp8: `scaled` rounds the gradient of the output, and
`transpose` turns the weight. Errors are relative to the FP64 product of the same codes: `far` by norm, `most` the
largest, by the root mean square. `bf16` rounds both operands too. The last table counts bytes of each kernel that are
not the reference's.
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
    plain = [weight.clone() for _ in range(copies(weight.nbytes))]
    of_y = gradient(rows, len(weight))
    runs = {
        "bf16": [partial(torch.mm, x, one.t()) for one in plain],
        "ours": [lambda w=one: fp8.multiply(*fp8.quantize(x, counts), w, scales, None) for one in packed],
        "quantize": [partial(fp8.quantize, x, counts)],
        "fast": [partial(fp8.multiply, *rounded, one, scales, None, True) for one in packed],
        "exact": [partial(fp8.multiply, *rounded, one, scales, None, False) for one in packed],
        "dequantize": [partial(fp8.dequantize, one, scales, torch.bfloat16) for one in packed],
        "dX_bf16": [partial(torch.mm, of_y, one) for one in plain],
        "dX_ours": [partial(fp8.input_gradient, of_y, one, scales, counts, True) for one in packed],
        "scaled": [partial(fp8.quantize, of_y, counts, factors=scales.flatten())],
        "transpose": [partial(fp8.transpose, one) for one in packed],
    }
    spans = zip(runs, timing.times([*runs.values()], 0.02), strict=True)
    us = {way: timing.quantiles(of_run)["p50_us"] for way, of_run in spans}
    speedups = {"speedup": us["bf16"] / us["ours"], "dX_speedup": us["dX_bf16"] / us["dX_ours"]}
    return {"layer": name, "M": rows, **us, **{way: round(value, 2) for way, value in speedups.items()}}


def gradient(rows: int, outputs: int) -> torch.Tensor:
    """dY (M, N), of tokens that weigh unlike."""
    return (1e-5 * torch.randn(rows, outputs, device="cuda") * torch.randn(rows, 1, device="cuda").exp()).bfloat16()


def compared(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Errors of products, and bytes of each kernel that are not the reference's."""
    x, weight, counts = operands(name, 1024)
    codes, scales = fp8.quantize(weight, counts, False)
    of_y, factors = gradient(1024, len(weight)), scales.flatten()
    rounded = fp8.quantize(x, counts, False), fp8.quantize(of_y, counts, False, factors=factors)
    (of_x, of_scaled), values = (one.double() * unit.double() for one, unit in rounded), codes.double()
    exact, exact_dx = of_x @ (values * scales.double()).t(), of_scaled @ values
    in_bf16 = fp8.dequantize(codes, scales, torch.bfloat16, False).clone()
    products = {
        "fast": (fp8.multiply(*rounded[0], codes, scales, None, True), exact),
        "exact": (fp8.multiply(*rounded[0], codes, scales, None, False), exact),
        "bf16": (round_blocks(x, "fp8") @ in_bf16.t(), exact),
        "dX": (fp8.input_gradient(of_y, codes, scales, counts, True), exact_dx),
        "dX_unrounded": (of_y @ in_bf16, exact_dx),  # how far rounding moves it
    }
    row: dict[str, Any] = {"layer": name}
    for way, (y, wanted) in products.items():
        away = y.double() - wanted
        row[f"{way}_far"] = float(away.norm() / wanted.norm())
        row[f"{way}_most"] = float(away.abs().max() / wanted.square().mean().sqrt())
    pairs = {
        "codes": (fp8.quantize(x, counts)[0], rounded[0][0]),
        "scales": (fp8.quantize(x, counts)[1], rounded[0][1]),
        "scaled codes": (fp8.quantize(of_y, counts, factors=factors)[0], rounded[1][0]),
        "scaled scales": (fp8.quantize(of_y, counts, factors=factors)[1], rounded[1][1]),
        "dequantized": (fp8.dequantize(codes, scales, torch.bfloat16).clone(), in_bf16),
        "transposed": (fp8.transpose(codes), codes.t().contiguous()),
    }
    in_bytes = {what: [one.view(torch.uint8) for one in both] for what, both in pairs.items()}
    return row, {"layer": name} | {what: int((one != other).sum()) for what, (one, other) in in_bytes.items()}


def main() -> None:
    parser = timing.argument_parser(__doc__)
    options = parser.parse_args()
    timing.require_gpu(parser)
    if (reason := fp8.why_not((0, 0), torch.cuda.get_device_capability())) is not None:
        parser.error(reason)
    layers = [name for name in LAYERS if "7B" in name]
    cases = itertools.product(layers, (64, 256, 2048, 8192))
    timing.print_rows(timing.write_rows(itertools.starmap(timed, cases), options.out))
    for rows in zip(*map(compared, layers), strict=True):
        timing.print_rows(rows)


if __name__ == "__main__":
    main()
