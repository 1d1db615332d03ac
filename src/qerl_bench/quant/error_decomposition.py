"""What kind of error a packed weight makes: its size, and its exact split into three parts that mean different things.

With E = Q - W and g = <W, Q> / <W, W>, the error is E = (g - 1) W + R, where R is orthogonal to W. The first part is
*scale bias*: the layer as a whole became weaker or stronger, which training can undo with one number. R over the
weights that were rounded to zero is the *dead zone*: inputs that no longer reach an output at all. R over the others is
*grid noise*, the spacing of the code table. The three squares add up to ||E||^2, since W and R are orthogonal and the
weights of R are disjoint. Left out: anything that needs data, except the output error where a quantizer has measured
the layer's inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

_PIECE = 1 << 17  # weights per piece, which stay in a CPU's cache while they are looked at
_GPU_PIECE = 1 << 24  # few pieces, as a GPU takes longer to start an operation than to do it on a small one


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """What became of one layer's weight W (N, K), packed as Q. Shares are of ||W||^2 and add up to relative_error^2."""

    bytes: int  # resident, scales included
    bits_per_weight: float  # 8 * bytes / (N * K)
    relative_error: float  # ||W - Q|| / ||W||, Frobenius
    scale_bias: float  # share of the error along W itself
    dead_zone: float  # share of the rest, over weights with Q = 0
    grid_noise: float  # share of the rest, over weights with Q != 0
    gain: float  # <W, Q> / <W, W>: below 1 the layer shrank
    cosine: float  # <W, Q> / (||W|| ||Q||)
    kurtosis: float  # fourth central moment of W over its variance squared; 3 for a Gaussian
    zero_share: float  # share of weights with Q = 0
    output_error: float | None = None  # ||X (W - Q)^T|| / ||X W^T|| over calibration inputs X; None without them


def unpacked_report(size: int, weights: int) -> LayerReport:
    """The report of a layer that was left as it is: no error, and the rest not looked at."""
    nothing = dict.fromkeys(("relative_error", "scale_bias", "dead_zone", "grid_noise"), 0.0)
    unknown = dict.fromkeys(("kurtosis", "zero_share"), float("nan"))
    return LayerReport(bytes=size, bits_per_weight=8 * size / weights, gain=1.0, cosine=1.0, **nothing, **unknown)


def layer_report(weight: torch.Tensor, restored: torch.Tensor, size: int) -> LayerReport:
    """Compare W (N, K) with `restored`, the FP32 weight that the packed layer multiplies by; `size` is in bytes.

    A layer of zeros has no relative error, gain and cosine 1.
    """
    sums = torch.zeros(8, dtype=torch.float64, device=weight.device)
    piece = _PIECE if weight.device.type == "cpu" else _GPU_PIECE
    for w, q in zip(weight.reshape(-1).split(piece), restored.reshape(-1).split(piece), strict=True):
        w = w.to(torch.float32)
        e = q - w
        zero = q == 0
        dead, ww = w * zero, w * w
        products = (w @ w, e @ w, e @ e, dead @ dead, zero.sum(), w.sum(), ww @ w, ww @ ww)
        sums += torch.stack([product.to(torch.float64) for product in products])
    ww, ew, ee, ww_dead, zeros, w1, w3, w4 = sums.tolist()
    count = weight.numel()
    shift = ew / ww if ww > 0 else 0.0  # g - 1
    norm = ww if ww > 0 else 1.0
    qq = ww + 2 * ew + ee
    # Where Q = 0, E = -W: what the sums hold of those weights is known from ww_dead alone.
    live = (ee - ww_dead) - 2 * shift * (ew + ww_dead) + shift**2 * (ww - ww_dead)
    mean = w1 / count
    variance = ww / count - mean**2
    fourth = w4 / count - 4 * mean * w3 / count + 6 * mean**2 * ww / count - 3 * mean**4
    return LayerReport(
        bytes=size,
        bits_per_weight=8 * size / count,
        relative_error=(ee / norm) ** 0.5,
        scale_bias=shift**2 * ww / norm,
        dead_zone=(1 + shift) ** 2 * ww_dead / norm,
        grid_noise=max(0.0, live) / norm,
        gain=1 + shift,
        cosine=(ww + ew) / (ww * qq) ** 0.5 if ww > 0 and qq > 0 else 1.0,
        kurtosis=fourth / variance**2 if variance > 0 else float("nan"),
        zero_share=zeros / count,
    )


def output_error(weight: torch.Tensor, restored: torch.Tensor, moment: torch.Tensor) -> float:
    """||X (W - Q)^T|| / ||X W^T|| from the second moment X^T X of the inputs (K, K)."""
    reference = weight.to(torch.float32)
    error = reference - restored
    total = float(((reference @ moment) * reference).sum())
    return max(0.0, float(((error @ moment) * error).sum()) / total) ** 0.5 if total > 0 else 0.0


def with_output_error(report: LayerReport, error: float | None) -> LayerReport:
    return replace(report, output_error=error)


def write_layers(
    path: Path, layers: Mapping[str, LayerReport], quant: str, quantizer: str, kernels: Mapping[str, str] | None = None
) -> None:
    """Write one row per layer to the Parquet file `path`, in the order of the model; `kernels` names what runs it."""
    import pandas as pd

    rows = [
        {"layer": name, "quant": quant, "quantizer": quantizer, "kernel": (kernels or {}).get(name), **asdict(report)}
        for name, report in layers.items()
    ]
    beside = path.with_name(f".{path.name}.writing")
    pd.DataFrame(rows).astype({"output_error": "float64", "kernel": "string"}).to_parquet(beside, index=False)
    beside.replace(path)
