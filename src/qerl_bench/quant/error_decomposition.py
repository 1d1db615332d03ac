"""The rounding error of a packed weight: its size, and its exact decomposition into three parts.

With E = Q - W and g = <W, Q> / <W, W>, the error is E = (g - 1) W + R, where R is orthogonal to W:

- (g - 1) W is *scale bias*: the whole layer became weaker or stronger, which training can undo with one number.
- R over the weights that were rounded to zero is the *dead zone*: inputs that no longer reach an output.
- R over the other weights is *grid noise*: the spacing of the code table.

The squares of the parts add up to ||E||^2, since R is orthogonal to W, and the last two parts have no weight in common.
Left out: measures that need data, except the output error where a quantizer has measured the layer's inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from qerl_core.checks import ConfigError
from qerl_core.rundir.durable import atomically

_CHUNK = 1 << 17  # weights processed at once; small enough for a CPU's cache
_GPU_CHUNK = 1 << 24  # larger on a GPU, where launching a small operation takes longer than running it


@dataclass(frozen=True, kw_only=True)
class LayerReport:
    """Size and error of a layer's weight W (N, K), packed as Q. Shares of ||W||^2 add up to relative_error^2."""

    bytes: int  # resident, scales included
    bits_per_weight: float  # 8 * bytes / (N * K)
    relative_error: float  # ||W - Q|| / ||W||, Frobenius
    scale_bias: float  # share of the error along W itself
    dead_zone: float  # share of R over weights with Q = 0
    grid_noise: float  # share of R over weights with Q != 0
    gain: float  # <W, Q> / <W, W>: below 1 the layer shrank
    cosine: float  # <W, Q> / (||W|| ||Q||)
    kurtosis: float  # fourth central moment of W over its variance squared; 3 for a Gaussian
    zero_share: float  # share of weights with Q = 0
    output_error: float | None = None  # ||X (W - Q)^T|| / ||X W^T|| over calibration inputs X; None without them


def unpacked_report(size: int, weights: int) -> LayerReport:
    """The report of a layer of `size` bytes that was not packed here: no error, and statistics of W not computed."""
    zero = dict.fromkeys(("relative_error", "scale_bias", "dead_zone", "grid_noise"), 0.0)
    unknown = dict.fromkeys(("kurtosis", "zero_share"), float("nan"))
    return LayerReport(
        bytes=size,
        bits_per_weight=8 * size / weights,
        gain=1.0,
        cosine=1.0,
        **zero,
        **unknown,
    )


def layer_report(
    weight: torch.Tensor, restored: torch.Tensor, size: int, second_moment: torch.Tensor | None = None
) -> LayerReport:
    """Compare W (N, K) with `restored`, the FP32 weight that the packed layer multiplies by.

    `size` is in bytes, `second_moment` the mean of x x^T over the layer's inputs, (K, K), if it was measured. A layer
    of zeros has relative error 0, gain 1 and cosine 1. Raises ConfigError if `restored` is no finite FP32 (N, K).
    """
    report = _report(_sums(weight, restored), weight.numel(), size)
    error = None if second_moment is None else output_error(weight, restored, second_moment)
    return replace(report, output_error=error)


def experts_report(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], size: int) -> LayerReport:
    """`layer_report` of several matrices as one, given W and its restored form for each, one at a time."""
    count, sums = 0, torch.zeros(8, dtype=torch.float64)
    for weight, restored in pairs:
        sums += _sums(weight, restored).cpu()
        count += weight.numel()
    return _report(sums, count, size)


def _require_rebuilt(weight: torch.Tensor, restored: torch.Tensor) -> None:
    """A format of a user's own may give anything; later on a NaN would look like a fault of the model."""
    if restored.dtype != torch.float32 or restored.shape != weight.shape:
        raise ConfigError(
            f"the format's operand() gives {restored.dtype} {tuple(restored.shape)}, where it was asked for "
            f"torch.float32 {tuple(weight.shape)}: it must return its argument `dtype`, and one value a weight"
        )
    if not all(math.isfinite(float(end)) for end in restored.aminmax()):
        count = restored.numel() - int(restored.isfinite().sum())
        raise ConfigError(
            f"the format rebuilds {count} of {restored.numel()} finite weights as NaN or infinite; "
            "look at its scales(), such as of a block of zeros, and at its operand()"
        )


def _sums(weight: torch.Tensor, restored: torch.Tensor) -> torch.Tensor:
    """The sums over all weights that a report is made of, FP64 (8,)."""
    _require_rebuilt(weight, restored)
    sums = torch.zeros(8, dtype=torch.float64, device=weight.device)
    chunk = _CHUNK if weight.device.type == "cpu" else _GPU_CHUNK
    for w, q in zip(weight.reshape(-1).split(chunk), restored.reshape(-1).split(chunk), strict=True):
        w = w.to(torch.float32)
        e = q - w
        zero = q == 0
        dead, ww = w * zero, w * w
        products = (w @ w, e @ w, e @ e, dead @ dead, zero.sum(), w.sum(), ww @ w, ww @ ww)
        sums += torch.stack([product.to(torch.float64) for product in products])
    return sums


def _report(sums: torch.Tensor, count: int, size: int) -> LayerReport:
    ww, ew, ee, ww_dead, zeros, w1, w3, w4 = sums.tolist()
    shift = ew / ww if ww > 0 else 0.0  # g - 1
    norm = ww if ww > 0 else 1.0
    qq = ww + 2 * ew + ee
    # Where Q = 0, E = -W, so ww_dead is all that these weights add to the sums.
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


def output_error(weight: torch.Tensor, restored: torch.Tensor, second_moment: torch.Tensor) -> float:
    """||X (W - Q)^T|| / ||X W^T|| from the second moment of the inputs, X^T X up to a factor, (K, K)."""
    reference = weight.to(torch.float32)
    error = reference - restored
    total = float(((reference @ second_moment) * reference).sum())
    return max(0.0, float(((error @ second_moment) * error).sum()) / total) ** 0.5 if total > 0 else 0.0


def write_layers(
    path: Path, layers: Mapping[str, LayerReport], quant: str, quantizer: str, kernels: Mapping[str, str] | None = None
) -> None:
    """Write one row per layer to the Parquet file `path`, in the model's order; `kernels`: what computes each layer."""
    import pandas as pd

    rows = [
        {"layer": name, "quant": quant, "quantizer": quantizer, "kernel": (kernels or {}).get(name), **asdict(report)}
        for name, report in layers.items()
    ]
    with atomically(path) as writing:
        pd.DataFrame(rows).astype({"output_error": "float64", "kernel": "string"}).to_parquet(writing, index=False)
