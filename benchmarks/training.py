"""Times of what training runs: the fused block and its kernels, dequantize, training linear, loss head, attention,
sampling. Needs a GPU.

    python benchmarks/training.py [SUITE ...] [--out FILE] [--seconds 0.1] [--quick]

Each case is timed in turns with a peer, so their ratio holds. The floor follows from bytes and flops at the rates that
are measured first. A case that fails prints its error, and the others go on; after 90 seconds the rest of a suite is
left out.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import timing
import torch
from timing import LAYERS, Call, copies, floor_us, quantiles, random_weight

from qerl_bench.config import build, compose
from qerl_bench.model import attention
from qerl_bench.model.block import without_fused_blocks
from qerl_bench.model.lm_head import decoder_of
from qerl_bench.model.packing import Packing, packed_hidden
from qerl_bench.model_setup import build_policy
from qerl_kernels import training_block, training_block_reference
from qerl_kernels.dequantize import dequantize
from qerl_kernels.loss_head import linear_scores
from qerl_kernels.sampling import draw, draw_seeded
from qerl_kernels.training_linear import packed_linear

TRAINED = ("7B qkv", "7B o", "7B gate_up", "7B down")
LIMIT_S = 90  # after which no further case of a suite is started
BLOCK_FORMATS = ["nvfp4"]  # of the suite layer
BLOCKS = 2  # of the model whose blocks are timed


@dataclass(frozen=True)
class Case:
    """One row of the table. `floor_bytes` and `floor_flops` are the least memory traffic and work."""

    kernel: str
    format: str
    layer: str
    rows: int
    run: Sequence[Call]
    peer: str
    peer_run: Sequence[Call]
    floor_bytes: float
    floor_flops: float


def block_cases(tokens: Sequence[int]) -> Iterator[Case]:
    """Sizes of 7B, and head norms as in Qwen3; the peer is the same in plain PyTorch. Bytes: each tensor once."""
    width, heads, size, inner = 3584, (28, 4), 128, 18944
    joined = (heads[0] + 2 * heads[1]) * size

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).requires_grad_()

    for rows in tokens:
        angles = torch.rand(rows, size, device="cuda").bfloat16()
        scale, head_scale = torch.rand(width, device="cuda"), torch.rand(size, device="cuda").bfloat16()
        leaves = values(rows, width), values(rows, width), values(rows, joined), values(rows, 2 * inner)
        rotation: tuple[Any, ...] = (angles, angles, heads)
        cases = (  # and the numbers per token that the forward and the backward pass read or write
            ("add_norm", leaves[:2], (scale, 1e-6), 4 * width, 4 * width),
            ("rotate", leaves[2:3], rotation, 2 * joined + 2 * size, 2 * joined + 2 * size),
            ("rotate", leaves[2:3], (*rotation, (head_scale, head_scale), 1e-6), 2 * joined, 3 * joined),
            ("swiglu", leaves[3:4], (), 3 * inner, 5 * inner),
        )
        for name, inputs, rest, forward, backward in cases:
            ours, plain = (getattr(module, name) for module in (training_block, training_block_reference))
            found = ours(*inputs, *rest)
            grads = [torch.randn_like(output) for output in (found if isinstance(found, tuple) else (found,))]

            def apply(function: Any, inputs: Any = inputs, rest: Any = rest) -> None:
                with torch.no_grad():
                    function(*inputs, *rest)

            def train(function: Any, inputs: Any = inputs, rest: Any = rest, grads: Any = grads) -> None:
                here = [x.detach().requires_grad_() for x in inputs]  # leaves of the stream that is captured
                torch.autograd.grad(function(*here, *rest), here, grads)

            label = f"{name}, head norms" if len(rest) == 5 else name
            for way, run, count in (("forward", apply, forward), ("both", train, forward + backward)):
                runs = [partial(run, ours)], [partial(run, plain)]
                yield Case(f"{label}, {way}", "bf16", "7B", rows, runs[0], "plain torch", runs[1], 2 * rows * count, 0)


def layer_cases(tokens: Sequence[int], modes: Sequence[str], formats: Sequence[str]) -> Iterator[Case]:
    """Forward and backward of whole 7B blocks, packed rows of 1,024 tokens, rank 32; the peer is their modules.

    The floor is that of the matmuls with frozen weights, without adapters, attention and repetition.
    """
    parameters = BLOCKS * sum(n * k for n, k in (LAYERS[name] for name in TRAINED))
    for format_name, mode in itertools.product(formats, modes):
        model = ("model=shape/7b", "model.dtype=bfloat16", f"model.layers={BLOCKS}", "lora.rank=32")
        words = ("kernel=block", "task=shape", "eval=none", f"train.recompute={mode}")
        experiment = build(compose([*f"quant={format_name}".split("+"), *model, *words]))
        policy = build_policy(experiment, None, "cuda")
        policy.train_mode(True)
        decoder = decoder_of(policy.model)
        for rows in tokens:
            packing = Packing.from_mask(torch.ones(rows // 1024, 1024, dtype=torch.bool, device="cuda"))
            ids = torch.randint(200, (rows // 1024, 1024), device="cuda")
            grad = torch.randn(rows, 3584, device="cuda", dtype=torch.bfloat16)

            def fused(decoder: Any = decoder, policy: Any = policy, data: Any = (ids, packing, grad)) -> None:
                hidden = packed_hidden(decoder, data[0], data[1])
                torch.autograd.grad(hidden, policy.trainable, data[2])

            def modules(policy: Any = policy, fused: Any = fused) -> None:
                with without_fused_blocks(policy.model):
                    fused()

            name = f"{BLOCKS} blocks, recompute={mode}"
            yield Case(name, format_name, "7B", rows, [fused], "modules", [modules], 0, 4 * rows * parameters)


def dequantize_cases(formats: Sequence[str]) -> Iterator[Case]:
    """The peer is a copy of as many bytes."""
    for format_name, name in itertools.product(formats, (*TRAINED, "32B gate_up", "32B down")):
        shape = LAYERS[name]
        count = shape[0] * shape[1]
        weights = [random_weight(format_name, shape) for _ in range(copies(2.5 * count))]
        total = weights[0].nbytes + 2 * count
        buffers = torch.randint(0, 255, (2 * len(weights), total // 2), dtype=torch.uint8, device="cuda")
        run = [partial(dequantize, weight) for weight in weights]
        copy = [partial(b.copy_, a) for a, b in zip(buffers[::2], buffers[1::2], strict=True)]
        yield Case("dequantize", format_name, name, 0, run, "copy of as many bytes", copy, total, 0)


def training_cases(tokens: Sequence[int], layers: Sequence[str]) -> Iterator[Case]:
    """Forward and input gradient of a frozen layer; the peer is torch's own linear layer in bfloat16."""

    def train(linear: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, grad: torch.Tensor) -> None:
        torch.autograd.grad(linear(x), x, grad)

    for name in layers:
        shape = LAYERS[name]
        weight = random_weight("nvfp4", shape)
        operand = partial(lambda weight, dtype: dequantize(weight), weight)
        packed = partial(packed_linear, operand=operand, row_scales=[(slice(None), 0.01)], bias=None)
        plain = partial(torch.nn.functional.linear, weight=(torch.randn(shape, device="cuda") * 0.02).bfloat16())
        for rows in tokens:
            x = torch.randn(rows, shape[1], device="cuda", dtype=torch.bfloat16, requires_grad=True)
            grad = torch.randn(rows, shape[0], device="cuda", dtype=torch.bfloat16)
            ours, peer = partial(train, packed, x, grad), partial(train, plain, x, grad)
            flops = 4 * rows * shape[0] * shape[1]
            yield Case("training linear", "nvfp4", name, rows, [ours], "torch bf16", [peer], 0, flops)


def head_cases(tokens: Sequence[int]) -> Iterator[Case]:
    """Scores and hidden gradient of a frozen head of 152k words; the peer is its bare matmuls in the same chunks."""
    vocabulary, width = 152064, 3584
    weight = (torch.randn(vocabulary, width, device="cuda") * 0.02).bfloat16()
    chunk = 2**27 // vocabulary // 128 * 128
    logits = torch.empty(chunk, vocabulary, device="cuda", dtype=torch.bfloat16)

    def train(hidden: torch.Tensor, targets: torch.Tensor) -> None:
        logprob, *_ = linear_scores(hidden, weight, None, targets, 1.0)
        torch.autograd.grad(logprob.sum(), hidden)

    @torch.no_grad()
    def score(hidden: torch.Tensor, targets: torch.Tensor) -> None:
        linear_scores(hidden, weight, None, targets, 1.0)

    @torch.no_grad()
    def matmuls(hidden: torch.Tensor, out: torch.Tensor, both: bool) -> None:
        for start in range(0, len(hidden), chunk):
            part = logits[: min(chunk, len(hidden) - start)]
            torch.mm(hidden[start : start + chunk], weight.t(), out=part)
            if both:
                torch.mm(part, weight, out=out[start : start + chunk])

    for rows in tokens:
        hidden = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        targets = torch.randint(0, vocabulary, (rows,), device="cuda")
        out = torch.empty_like(hidden.detach())
        flops = 2 * rows * vocabulary * width
        for name, run, both in (("train", train, True), ("score", score, False)):
            ours, peer = partial(run, hidden, targets), partial(matmuls, hidden, out, both)
            floor = flops * (1 + both)
            yield Case(f"loss head, {name}", "bf16", "lm_head", rows, [ours], "its bare matmuls", [peer], 0, floor)


def attention_cases(sequences: Sequence[tuple[int, int]]) -> Iterator[Case]:
    """Packed attention of 7B (28 query heads on 4), forward and backward, half of the sequences a fifth as long.

    The peer is the padded rectangle. The floor is the causal half of two matmuls forward and five backward.
    """
    for count, longest in sequences:
        lengths = torch.tensor([longest if i % 2 == 0 else longest // 5 for i in range(count)])
        packing = Packing.from_mask((torch.arange(longest) < lengths[:, None]).cuda())
        tokens, kind = int(lengths.sum()), attention.Kind(128**-0.5)
        shapes = [(1, heads, tokens, 128) for heads in (28, 4, 4)]
        leaves = [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes]
        grad = torch.randn(tokens, 28, 128, device="cuda", dtype=torch.bfloat16)

        def train(
            backend: str, leaves: Any = leaves, grad: Any = grad, kind: Any = kind, packing: Any = packing
        ) -> None:
            torch.autograd.grad(
                attention.BACKENDS[backend](leaves[0], leaves[1], leaves[2], None, kind, packing), leaves, grad
            )

        flops = 3.5 * 2 * 2 * 28 * 128 * float(lengths.double().square().sum()) / 2
        runs = [partial(train, "flash")], [partial(train, "padded")]
        yield Case("attention", "bf16", f"{count} x {longest}", tokens, runs[0], "padded", runs[1], 0, flops)


def sampling_cases(batches: Sequence[int]) -> Iterator[Case]:
    vocabulary = 152064
    for batch in batches:
        logits = (3 * torch.randn(batch, vocabulary, device="cuda")).bfloat16()
        keys = torch.arange(1, batch + 1, device="cuda")
        uniform = torch.rand(batch, device="cuda", dtype=torch.float64)
        for name, options in (("", {}), (" top-p", {"top_p": 0.9}), (" top-k top-p", {"top_k": 50, "top_p": 0.9})):
            ours, peer = (
                partial(draw_seeded, logits, 1.0, keys, 7, **options),
                partial(draw, logits, 1.0, uniform, **options),
            )
            yield Case(f"sampling{name}", "bf16", "V=152064", batch, [ours], "torch", [peer], logits.nbytes, 0)


def peak_rates() -> tuple[float, float]:
    """Bytes a second of a large copy, read and written, and flops a second of a large bfloat16 matmul."""
    source = torch.randn(1 << 29, device="cuda")
    target = torch.empty_like(source)
    copy = sorted(timing.elapsed_us(lambda: target.copy_(source), 20))[10]
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    matmul = sorted(timing.elapsed_us(lambda: a @ b, 20))[10]
    return 2 * source.nbytes / copy * 1e6, 2 * 8192**3 / matmul * 1e6


def measure(cases: Iterator[Case], bandwidth: float, flop_rate: float, budget_s: float) -> Iterator[dict[str, Any]]:
    """A row for each case of a suite. The error of a case is printed."""
    started = time.perf_counter()
    for case in cases:
        if time.perf_counter() - started > LIMIT_S:
            print(f"left out after {LIMIT_S} s: {case.kernel}, {case.layer}, {case.rows} rows, and all that follow")
            return
        try:
            ours, peer = (quantiles(spans) for spans in timing.times((case.run, case.peer_run), budget_s))
            peak, peer_peak = (peak_mib(run[0]) for run in (case.run, case.peer_run))
        except Exception as error:
            print(f"failed: {case.kernel}, {case.layer}, {case.rows} rows: {type(error).__name__}: {error}", flush=True)
            continue
        floor = floor_us(case.floor_bytes, case.floor_flops, bandwidth, flop_rate)
        row = {
            "kernel": case.kernel, "format": case.format, "layer": case.layer, "M": case.rows, **ours,
            "floor_us": floor, "share_of_floor": floor / ours["p50_us"], "peer": case.peer, "peer_us": peer["p50_us"],
            "speed_relative_to_peer": peer["p50_us"] / ours["p50_us"], "peak_mib": peak, "peer_peak_mib": peer_peak,
        }  # fmt: skip
        print(f"[{time.perf_counter() - started:.0f} s]", row, flush=True)
        yield row
        torch.cuda.empty_cache()


def peak_mib(call: Call) -> float:
    """The most memory that a call has allocated at a time, beyond what it found."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


SUITES: dict[str, Callable[[bool], Iterator[Case]]] = {
    "block": lambda quick: block_cases((8192,)),
    "layer": lambda quick: layer_cases(
        (8192,) if quick else (8192, 16384), ("none",) if quick else ("none", "selective"), BLOCK_FORMATS
    ),
    "linear": lambda quick: training_cases(
        (2048, 8192, 32768), [name for name in TRAINED if not quick or "gate_up" not in name]
    ),
    "head": lambda quick: head_cases((4096,) if quick else (1024, 8192)),
    "attention": lambda quick: attention_cases(((32, 512), (4, 4096))),
    "dequantize": lambda quick: dequantize_cases(("nvfp4", "mxfp4", "nf4")),
    "sampling": lambda quick: sampling_cases((1, 64, 256)),
}


def measure_all(suites: Sequence[str], quick: bool, *rates_and_budget: float) -> Iterator[dict[str, Any]]:
    """The rows of all suites. The error of a suite that makes no more cases is printed, and the next one begins."""
    for name in suites:
        try:
            yield from measure(SUITES[name](quick), *rates_and_budget)
        except Exception as error:
            print(f"the suite {name} makes no more cases: {type(error).__name__}: {error}", flush=True)


def main() -> None:
    parser = timing.argument_parser(__doc__)
    parser.add_argument("suites", nargs="*", help=f"what to time, all if none is named: {', '.join(SUITES)}")
    parser.add_argument("--seconds", type=float, default=0.1, help="time for each measurement")
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument("--formats", nargs="+", help="of the suite layer, also fp8+quant.activations=fp8")
    options = parser.parse_args()
    BLOCK_FORMATS[:] = options.formats or BLOCK_FORMATS
    if unknown := [name for name in options.suites if name not in SUITES]:
        parser.error(f"unknown suite {', '.join(unknown)}; choose from {', '.join(SUITES)}")
    timing.require_gpu(parser)
    bandwidth, flop_rate = peak_rates()
    print(
        f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e12:.2f} TB/s, bf16 matmul {flop_rate / 1e12:.0f} TFLOP/s"
    )
    measured = measure_all(options.suites or list(SUITES), options.quick, bandwidth, flop_rate, options.seconds)
    rows = timing.write_rows(measured, options.out)
    if not rows:
        parser.exit(1, "no case could be measured\n")
    timing.print_rows(rows)


if __name__ == "__main__":
    main()
