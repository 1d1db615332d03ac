"""What the benches share: the layers, weights rotated past the L2 cache, times of CUDA graphs, and rows of a table."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from qerl_kernels.layout import SCALE_TYPES, KernelWeight, shapes

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # layers with an adapter
LAYERS = {  # Qwen2.5, N x K; query, key and value are one matrix, and gate and up
    "7B qkv": (4608, 3584),
    "7B o": (3584, 3584),
    "7B gate_up": (37888, 3584),
    "7B down": (3584, 18944),
    "32B qkv": (7168, 5120),
    "32B o": (5120, 5120),
    "32B gate_up": (55296, 5120),
    "32B down": (5120, 27648),
}
COPY_RATE = 4.30e12  # bytes a second, measured on an H200
MATRIX_RATE = 790e12  # bfloat16 operations a second, likewise
ROTATED_BYTES = 256 << 20  # of weights that a measurement cycles through, several times the L2 cache
GRAPH_S = 2e-3  # length of a long graph; calls that take longer are launched by the host
QUEUED = 6  # such calls in a row, of which only the first waits for the host

Call = Callable[[], object]


def argument_parser(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="CSV file to write")
    return parser


def require_gpu(parser: argparse.ArgumentParser) -> None:
    if not torch.cuda.is_available():
        parser.error("this measures kernels on an NVIDIA GPU, and PyTorch finds none here")


def random_weight(format_name: str, shape: tuple[int, int]) -> KernelWeight:
    """Random codes under random scales, made in the kernel layout."""
    words_shape, scales_shape = shapes(format_name, shape)
    words = torch.empty(words_shape, dtype=torch.int32, device="cuda").random_()
    scales = torch.empty(scales_shape, dtype=SCALE_TYPES[format_name][0], device="cuda").random_(40, 100)
    return KernelWeight(format_name, shape, words, scales, 127 if format_name == "mxfp4" else 0)


def copies(nbytes: float) -> int:
    """How many weights of `nbytes` a measurement cycles through."""
    return max(2, min(40, int(ROTATED_BYTES / nbytes)))


def times(runs: Sequence[Sequence[Call]], budget_s: float = 0.1, graph_s: float = GRAPH_S) -> list[list[float]]:
    """Microseconds of one call, sorted, for each of `runs`, which are measured in turns under the same clocks.

    The calls of a run do the same work on different inputs. Short ones are timed in a CUDA graph that repeats the run
    until it takes `graph_s`; 0: once. On an H200 the decode GEMM was up to 9 % slower in graphs of 2 ms, and
    PyTorch 5 to 9 % faster (docs/LOG.md, 2026-11-22).
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        prepared = [_prepared(run, stream, graph_s) for run in runs]
        longest = max(elapsed_us(replay, 1)[0] / 1e6 for replay, _ in prepared)
        spans: list[list[float]] = [[] for _ in runs]
        for _ in range(max(5, min(30, int(budget_s / longest)))):
            for spans_of_run, (replay, count) in zip(spans, prepared, strict=True):
                spans_of_run.append(elapsed_us(replay, 1)[0] / count)
    return [sorted(spans_of_run) for spans_of_run in spans]


def _prepared(run: Sequence[Call], stream: torch.cuda.Stream, graph_s: float) -> tuple[Call, int]:
    """What to time, and how many calls it makes."""

    def call_all(repeats: int) -> None:
        for _ in range(repeats):
            for call in run:
                call()

    call_all(2)
    seconds = elapsed_us(run[0], 1)[0] / 1e6
    if seconds > GRAPH_S:
        return lambda: call_all(QUEUED), QUEUED * len(run)
    repeats = max(1, round(graph_s / seconds / len(run)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        call_all(repeats)
    return graph.replay, repeats * len(run)


def elapsed_us(call: Call, count: int) -> list[float]:
    """Microseconds of each of `count` calls."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for before, after in events:
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) * 1e3 for before, after in events]


def quantiles(spans: Sequence[float]) -> dict[str, float]:
    """20th, 50th and 80th percentile of sorted microseconds."""
    return {f"p{percent}_us": round(spans[round(percent / 100 * (len(spans) - 1))], 2) for percent in (20, 50, 80)}


def floor_us(nbytes: float, flops: float, bandwidth: float, flop_rate: float) -> float:
    """Microseconds that work of this size takes at least, at `bandwidth` bytes and `flop_rate` operations a second."""
    return 1e6 * max(nbytes / bandwidth, flops / flop_rate)


def write_rows(rows: Iterable[dict[str, Any]], path: Path | None) -> list[dict[str, Any]]:
    """All `rows`, each written to the CSV file `path` as soon as it is measured."""
    written = []
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    with nullcontext() if path is None else path.open("w", newline="") as file:
        for row in rows:
            if file is not None:
                writer = csv.DictWriter(file, row)
                if not written:
                    writer.writeheader()
                writer.writerow(row)
                file.flush()
            written.append(row)
    return written


def append_rows(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Add `rows` of equal columns to the CSV file `path`, which gets its header with the first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(rows)


def print_rows(rows: Sequence[dict[str, Any]], leave_out: Sequence[str] = ()) -> None:
    names = [name for name in rows[0] if name not in leave_out]
    cells = [[f"{row[name]:.4g}" if isinstance(row[name], float) else str(row[name]) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    for line in (names, *cells):
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
