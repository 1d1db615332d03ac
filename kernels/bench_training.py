"""Times of the kernels beside the decode GEMM: dequantize, training linear, loss head, sampling. Needs a GPU.

Every case is timed beside what it competes with in the same process, so that ratios hold, and weights are rotated past
the L2. One row per case: kernel, format, layer, M, p20/p50/p80 in microseconds, the floor by bytes and flops at the
rates measured first, and the speed relative to the peer.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from qerl_kernels.layout import KernelWeight, repack

LAYERS = {"qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)}  # Qwen2.5-7B
LARGE = {"gate_up_32b": (55296, 5120), "down_32b": (5120, 27648)}
L2_BYTES = 64 << 20
GRAPHED_S = 2e-3  # what takes longer is launched by the host
QUEUED = 6  # such calls, of which only the first waits for the host
Run = Callable[[], object]
Operand = Callable[[torch.dtype], torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One row of the table. `floor_bytes` and `floor_flops` are what the work cannot do without."""

    kernel: str
    format: str
    layer: str
    rows: int
    run: Sequence[Run]  # the same work on inputs of their own, to be taken in turns
    peer: str
    against: Sequence[Run]
    floor_bytes: float
    floor_flops: float


def quantiles(runs: Sequence[Sequence[Run]], budget_s: float) -> list[list[float]]:
    """p20, p50 and p80 of one call in microseconds for each of `runs`, measured in turns so that clocks are the same.

    Short ones are timed as CUDA graphs of many calls, long ones several behind each other.
    """
    stream = torch.cuda.Stream()
    prepared = []
    with torch.cuda.stream(stream):
        for run in runs:
            each([*run, *run])
            once = timed(run[0], 1)[0] / 1e6
            calls = [] if once > GRAPHED_S else list(run) * max(1, round(GRAPHED_S / once / len(run)))
            if calls:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    each(calls)
                prepared.append((graph.replay, len(calls)))
            else:
                prepared.append((partial(each, list(run) * QUEUED), len(run) * QUEUED))
        times: list[list[float]] = [[] for _ in runs]
        longest = max(timed(replay, 1)[0] / 1e6 for replay, _ in prepared)
        for _ in range(max(5, min(30, int(budget_s / longest)))):
            for found, (replay, calls) in zip(times, prepared, strict=True):
                found.append(timed(replay, 1)[0] / calls)
    quantile = torch.tensor([0.2, 0.5, 0.8])
    return [torch.tensor(found).quantile(quantile).tolist() for found in times]


def each(calls: Sequence[Run]) -> None:
    for one in calls:
        one()


def timed(run: Run, count: int) -> list[float]:
    """Microseconds of each of `count` calls."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for before, after in events:
        before.record()
        run()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) * 1e3 for before, after in events]


def packed(format_name: str, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Random codes under scales of usual size."""
    n, k = shape
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
    if format_name == "nvfp4":
        scale = torch.randint(80, 127, (n, k // 16), dtype=torch.uint8, device="cuda")
        return {"weight_packed": codes, "weight_scale": scale.view(torch.float8_e4m3fn)}
    if format_name == "mxfp4":
        scale = torch.randint(115, 122, (n, k // 32), dtype=torch.uint8, device="cuda")
        return {"weight_packed": codes, "weight_scale": scale}
    return {"weight": codes.view(-1, 1), "absmax": torch.rand(n * k // 64, device="cuda") + 0.1}


def copies(shape: tuple[int, int], bytes_per_weight: float) -> int:
    """How many weights it takes to leave the L2."""
    return max(1, min(8, round(2 * L2_BYTES / (shape[0] * shape[1] * bytes_per_weight) + 0.5)))


def dequantize_cases(formats: Sequence[str]) -> Iterator[Case]:
    from qerl_kernels.dequantize import dequantize

    for format_name in formats:
        for name, shape in (LAYERS | LARGE).items():
            weights = [repack(format_name, packed(format_name, shape), shape) for _ in range(copies(shape, 2.5))]
            count = shape[0] * shape[1]
            total = weights[0].nbytes + 2 * count
            buffers = torch.randint(0, 255, (2 * len(weights), int(total // 2)), dtype=torch.uint8, device="cuda")
            run = [lambda weight=weight: dequantize(weight) for weight in weights]
            copy = [lambda a=a, b=b: b.copy_(a) for a, b in zip(buffers[::2], buffers[1::2], strict=True)]
            yield Case("dequantize", format_name, name, 0, run, "copy of as many bytes", copy, total, 0)


def training_cases(tokens: Sequence[int], layers: Sequence[str]) -> Iterator[Case]:
    """Forward and input gradient of a frozen layer, against those of torch's own in bfloat16."""
    from qerl_kernels.dequantize import dequantize
    from qerl_kernels.training_linear import packed_linear

    for name in layers:
        shape = LAYERS[name]
        weight = repack("nvfp4", packed("nvfp4", shape), shape)

        def operand(_: torch.dtype, weight: KernelWeight = weight) -> torch.Tensor:
            return dequantize(weight)

        plain = (torch.randn(shape, device="cuda") * 0.02).bfloat16()
        for rows in tokens:
            x = torch.randn(rows, shape[1], device="cuda", dtype=torch.bfloat16, requires_grad=True)
            grad = torch.randn(rows, shape[0], device="cuda", dtype=torch.bfloat16)

            def ours(x: torch.Tensor = x, grad: torch.Tensor = grad, operand: Operand = operand) -> None:
                y = packed_linear(x, operand, [(slice(None), 0.01)], None)
                torch.autograd.grad(y, x, grad)

            def theirs(x: torch.Tensor = x, grad: torch.Tensor = grad, plain: torch.Tensor = plain) -> None:
                torch.autograd.grad(torch.nn.functional.linear(x, plain), x, grad)

            flops = 4 * rows * shape[0] * shape[1]
            yield Case("training linear", "nvfp4", name, rows, [ours], "torch bf16", [theirs], 0, flops)


def head_cases(tokens: Sequence[int]) -> Iterator[Case]:
    """Scores and hidden gradient of a frozen 152k head, against its two bare matmuls in the same pieces."""
    from qerl_kernels.loss_head import linear_scores

    vocabulary, width = 152064, 3584
    weight = (torch.randn(vocabulary, width, device="cuda") * 0.02).bfloat16()
    piece = 2**27 // vocabulary // 128 * 128
    logits = torch.empty(piece, vocabulary, device="cuda", dtype=torch.bfloat16)
    for rows in tokens:
        hidden = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        targets = torch.randint(0, vocabulary, (rows,), device="cuda")
        out = torch.empty_like(hidden.detach())

        def train(hidden: torch.Tensor = hidden, targets: torch.Tensor = targets) -> None:
            logprob, *_ = linear_scores(hidden, weight, None, targets, 1.0)
            torch.autograd.grad(logprob.sum(), hidden)

        def score(hidden: torch.Tensor = hidden, targets: torch.Tensor = targets) -> None:
            with torch.no_grad():
                linear_scores(hidden, weight, None, targets, 1.0)

        def matmuls(both: bool, hidden: torch.Tensor = hidden, out: torch.Tensor = out) -> None:
            with torch.no_grad():
                for start in range(0, len(hidden), piece):
                    part = logits[: min(piece, len(hidden) - start)]
                    torch.mm(hidden[start : start + piece], weight.t(), out=part)
                    if both:
                        torch.mm(part, weight, out=out[start : start + piece])

        def bare_two(matmuls: Callable[[bool], None] = matmuls) -> None:
            matmuls(True)

        def bare_one(matmuls: Callable[[bool], None] = matmuls) -> None:
            matmuls(False)

        flops = 2 * rows * vocabulary * width
        yield Case("loss head, train", "bf16", "lm_head", rows, [train], "its bare matmuls", [bare_two], 0, 2 * flops)
        yield Case("loss head, score", "bf16", "lm_head", rows, [score], "its bare matmul", [bare_one], 0, flops)


def sampling_cases(batches: Sequence[int]) -> Iterator[Case]:
    from qerl_kernels.sampling import draw, draw_seeded

    vocabulary = 152064
    for batch in batches:
        logits = (3 * torch.randn(batch, vocabulary, device="cuda")).bfloat16()
        keys = torch.arange(1, batch + 1, device="cuda")
        uniform = torch.rand(batch, device="cuda", dtype=torch.float64)
        for name, options in (("", {}), (" top-p", {"top_p": 0.9}), (" top-k top-p", {"top_k": 50, "top_p": 0.9})):

            def ours(options: dict = options, logits: torch.Tensor = logits, keys: torch.Tensor = keys) -> None:
                draw_seeded(logits, 1.0, keys, 7, **options)

            def theirs(options: dict = options, logits: torch.Tensor = logits, uniform: torch.Tensor = uniform) -> None:
                draw(logits, 1.0, uniform, **options)

            yield Case(f"sampling{name}", "bf16", "V=152064", batch, [ours], "torch", [theirs], logits.nbytes, 0)


def ceilings() -> tuple[float, float]:
    """Bytes a second of a large copy, read and written, and flops a second of a large bfloat16 matmul."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    copy = sorted(timed(lambda: target.copy_(source), 20))[10]
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul = sorted(timed(lambda: a @ b, 20))[10]
    return 2 * source.nbytes / copy * 1e6, 2 * 8192**3 / matmul * 1e6


def measure(cases: Iterator[Case], bandwidth: float, rate: float, budget_s: float) -> Iterator[dict[str, object]]:
    for case in cases:
        (low, middle, high), (_, peer, _) = quantiles((case.run, case.against), budget_s)
        floor = max(case.floor_bytes / bandwidth, case.floor_flops / rate) * 1e6
        yield {
            "kernel": case.kernel,
            "format": case.format,
            "layer": case.layer,
            "M": case.rows,
            "p20_us": low,
            "p50_us": middle,
            "p80_us": high,
            "floor_us": floor,
            "share_of_floor": floor / middle,
            "peer": case.peer,
            "peer_us": peer,
            "speed_relative_to_peer": peer / middle,
        }


def all_cases(quick: bool) -> Iterator[Case]:
    yield from dequantize_cases(("nvfp4", "mxfp4", "nf4"))
    yield from training_cases((2048, 8192, 32768), ("qkv", "o", "down") if quick else tuple(LAYERS))
    yield from head_cases((4096,) if quick else (1024, 8192))
    yield from sampling_cases((1, 64, 256))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="CSV file to write")
    parser.add_argument("--seconds", type=float, default=0.1, help="time for each measurement")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures kernels on an NVIDIA GPU, and PyTorch finds none here")
    import pandas as pd

    bandwidth, rate = ceilings()
    print(f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e12:.2f} TB/s, bf16 matmul {rate / 1e12:.0f} TFLOP/s")
    rows = []
    for row in measure(all_cases(options.quick), bandwidth, rate, options.seconds):
        rows.append(row)
        torch.cuda.empty_cache()
    table = pd.DataFrame(rows)
    if options.out:
        table.to_csv(options.out, index=False)
    print(table.to_string(index=False, float_format=lambda value: f"{value:.3g}" if value < 10 else f"{value:.1f}"))


if __name__ == "__main__":
    main()
