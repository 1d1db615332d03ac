"""Microseconds of linear layers over 4-bit weights, compared with other libraries and with the limits of the GPU.

    python benchmarks/gemm.py [--out FILE] [--formats nvfp4,mxfp4,nf4] [--tokens 1,16,..] [--layers 7B,32B]
                                 [--search [--lora-rank 32]] [--kernel mma_v2]

All kernels are timed in the same process. Each cycles through so many copies of its weight that none is found in the
L2 cache. Peers are torch in bfloat16 and, where they are installed, bitsandbytes, vLLM's Marlin, gemlite and humming.
The table of times is of layers without an adapter.

`--search` first measures configurations for these layers, with an adapter as runs have it, and writes the fastest to
the user's cache folder, where `decode_gemm` finds them, or to --table FILE.

`--kernel mma_v2` times the kernel of other cards on a Hopper GPU, with the tiles of its rule.

The floor is the larger of bytes (weight, scales, x, y) over COPY_RATE and floating-point operations over MATRIX_RATE,
both measured on an H200.
"""

from __future__ import annotations

import copy
import itertools
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from importlib.metadata import packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import timing
import torch
from timing import COPY_RATE, LAYERS, MATRIX_RATE, Call, copies, quantiles, random_weight, times

from qerl_kernels import decode, decode_configs
from qerl_kernels.decode_configs import MMA_V2, WGMMA, Config
from qerl_kernels.layout import EIGHT_BITS

CONCATENATED = {"qkv": 3, "gate_up": 2}  # layers in one matrix, whose adapters are concatenated too
TOKENS = (1, 4, 8, 16, 32, 64, 128, 256)
BITS = {
    **{"nvfp4": 4.5, "mxfp4": 4.25, "nf4": 4.5, "int4-32": 4.5, "int4-128": 4.125, "bfloat16": 16.0},
    **dict.fromkeys(EIGHT_BITS, 8.0),
}
_PROCESSES = 14

Peer = Callable[[tuple[int, int], torch.Tensor], Iterator[Call]]


def short_times(calls: Sequence[Call]) -> list[float]:
    """Sorted microseconds of one call, in graphs that have each call once, as in the committed tables."""
    return times([calls], graph_s=0)[0]


def weight_bytes(format_name: str, shape: tuple[int, int]) -> float:
    return shape[0] * shape[1] * BITS[format_name] / 8


def floor(format_name: str, shape: tuple[int, int], tokens: int) -> float:
    """Microseconds that every kernel takes at least."""
    n, k = shape
    return timing.floor_us(
        weight_bytes(format_name, shape) + 2 * tokens * (n + k), 2 * tokens * n * k, COPY_RATE, MATRIX_RATE
    )


def torch_calls(shape: tuple[int, int], x: torch.Tensor) -> Iterator[Call]:
    for _ in range(copies(weight_bytes("bfloat16", shape))):
        weight = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
        yield lambda weight=weight: torch.mm(x, weight.t())


def bitsandbytes_calls(shape: tuple[int, int], x: torch.Tensor) -> Iterator[Call]:
    bitsandbytes: Any = import_module("bitsandbytes")
    packed, state = bitsandbytes.functional.quantize_4bit(
        torch.randn(shape, dtype=torch.bfloat16, device="cuda"), quant_type="nf4", compress_statistics=False
    )
    for _ in range(copies(weight_bytes("nf4", shape))):
        weight = packed.clone()
        yield lambda weight=weight: bitsandbytes.matmul_4bit(x, weight.t(), state)


def marlin_calls(shape: tuple[int, int], x: torch.Tensor) -> Iterator[Call]:
    """vLLM's NVFP4 kernel for GPUs without FP4, with random weights in its own layout."""
    marlin_utils_fp4 = import_module("vllm.model_executor.layers.quantization.utils.marlin_utils_fp4")
    n, k = shape
    layer: Any = torch.nn.Module()
    layer.params_dtype, layer.output_size_per_partition, layer.input_size_per_partition = torch.bfloat16, n, k
    packed = {
        "weight": torch.empty((n, k // 2), dtype=torch.uint8, device="cuda:0").random_(),
        "weight_scale": torch.empty((n, k // 16), device="cuda:0").uniform_(1, 400).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.ones(1, device="cuda:0"),
    }
    for name, tensor in packed.items():
        layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    marlin_utils_fp4.prepare_fp4_layer_for_marlin(layer)
    for _ in range(copies(weight_bytes("nvfp4", shape))):
        weight, scale = layer.weight.clone(), layer.weight_scale.clone()
        yield lambda weight=weight, scale=scale: marlin_utils_fp4.apply_fp4_marlin_linear(
            x, weight, scale, layer.weight_global_scale, layer.workspace, n, k
        )


def gemlite_calls(shape: tuple[int, int], x: torch.Tensor) -> Iterator[Call]:
    packer = import_module("gemlite.helper").A16W4_MXFP
    linear = torch.nn.Linear(shape[1], shape[0], bias=False, dtype=torch.bfloat16, device="cuda")
    for _ in range(copies(weight_bytes("mxfp4", shape))):
        layer = packer(device="cuda", dtype=torch.bfloat16).from_linear(linear, del_orig=False)
        yield lambda layer=layer: layer(x)


def humming_calls(shape: tuple[int, int], x: torch.Tensor) -> Iterator[Call]:
    """humming's own NVFP4: E2M1 codes, an E4M3 scale for 16 weights, one scale for all. The first call compiles."""
    make = import_module("humming.layer").HummingLayer
    nvfp4 = {"dtype": "float4e2m1", "scale_dtype": "float8e4m3", "group_size": 16, "scale_2_type": "tensor"}
    layer = make(shape_n=shape[0], shape_k=shape[1], weight_config=nvfp4, torch_dtype=torch.bfloat16).cuda()
    layer.load_from_unquantized(torch.randn(shape, dtype=torch.bfloat16, device="cuda"))
    layer.transform()
    for _ in range(copies(weight_bytes("nvfp4", shape))):
        other = copy.deepcopy(layer)
        yield lambda other=other: other(x)


PEERS: dict[str, tuple[str, str, Peer]] = {  # name: package, format, calls
    "torch": ("torch", "bfloat16", torch_calls),
    "bitsandbytes": ("bitsandbytes", "nf4", bitsandbytes_calls),
    "vllm marlin": ("vllm", "nvfp4", marlin_calls),
    "gemlite": ("gemlite", "mxfp4", gemlite_calls),
    "humming": ("humming", "nvfp4", humming_calls),
}


def concatenated_rank(layer: str, rank: int) -> int:
    """The rank of the adapter that `decode_gemm` gets in a run with LoRA of `rank`.

    0 if concatenated layers have a larger rank together than the kernel takes; a separate matmul then adds the adapter.
    """
    total = rank * CONCATENATED.get(layer.rpartition(" ")[2], 1)
    return total if total <= decode.MAX_RANK else 0


def random_adapter(shape: tuple[int, int], tokens: int, rank: int) -> decode.LoRA | None:
    """x A^T and B of random numbers."""
    if rank == 0:
        return None
    xa, b = (torch.randn((size, rank), dtype=torch.bfloat16, device="cuda") for size in (tokens, shape[0]))
    return xa, b, 1.0


Job = tuple[str, tuple[int, int], int, Config, int]  # format, shape, tokens, configuration, rank of the adapter


def _case(config: Config, rank: int) -> str:
    return f"{config}, adapter of rank {rank}:"


def _compile_some(jobs: list[Job]) -> list[str]:
    """Run each configuration once to fill the compiler's cache, and return a line for each that fails."""
    failed = []
    for format_name, shape, tokens, config, rank in jobs:
        x = torch.randn((tokens, shape[1]), dtype=torch.bfloat16, device="cuda")
        lora = random_adapter(shape, tokens, rank)
        try:
            decode.decode_gemm(x, random_weight(format_name, shape), lora=lora, config=config)
            torch.cuda.synchronize()
        except (RuntimeError, ValueError) as error:
            failed.append(f"{_case(config, rank)} {error}")
    return failed


def compile_all(jobs: list[Job]) -> list[str]:
    """`_compile_some` in several processes, once for each format, configuration and rank."""
    unique = list({(job[0], *job[3:]): job for job in jobs}.values())
    with ProcessPoolExecutor(_PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(itertools.chain(*pool.map(_compile_some, [unique[i::_PROCESSES] for i in range(_PROCESSES)])))


def search(layers: dict[str, tuple[int, int]], buckets: list[int], path: Path, rank: int, kernel: str) -> None:
    """Write the fastest configuration of each layer and bucket, with an adapter of `rank`, to the table `path`."""
    ranks = {name: concatenated_rank(name, rank) for name in layers}
    plan = {
        (name, m): list(decode_configs.candidates(shape, m, kernel)) for name, shape in layers.items() for m in buckets
    }
    jobs = [("nvfp4", layers[name], m, c, ranks[name]) for (name, m), configs in plan.items() for c in configs]
    failed = compile_all(jobs)
    print("\n".join(["configurations that do not run:", *failed]) if failed else "all configurations run", flush=True)
    best: dict[tuple[int, int], dict[int, Config]] = {}
    for name, shape in layers.items():
        weights = [random_weight("nvfp4", shape) for _ in range(copies(weight_bytes("nvfp4", shape)))]
        for size in buckets:
            x = torch.randn((size, shape[1]), dtype=torch.bfloat16, device="cuda")
            loras = [
                random_adapter(shape, size, ranks[name]) for _ in weights
            ]  # as many, or it would stay in the L2 cache
            measured = []
            for config in plan[name, size]:
                case = _case(config, ranks[name])
                if config.shared > decode_configs.SHARED_LIMIT or any(line.startswith(case) for line in failed):
                    continue
                calls = [
                    lambda x=x, w=w, lora=lora, c=config: decode.decode_gemm(x, w, lora=lora, config=c)
                    for w, lora in zip(weights, loras, strict=True)
                ]
                measured.append((quantiles(short_times(calls))["p50_us"], config))
            measured.sort(key=lambda pair: pair[0])
            best.setdefault(shape, {})[size] = measured[0][1]
            print(name, size, "; ".join(f"{us:.1f} {c}" for us, c in measured[:3]), flush=True)
        del weights
    decode_configs.write_table(path, best, rank)


def rows(
    layers: dict[str, tuple[int, int]], formats: list[str], tokens: list[int], kernel: str
) -> Iterator[dict[str, Any]]:
    """For each layer and number of tokens the times of the peers, then ours."""
    gpu, own = torch.cuda.get_device_name(), decode.kernel_of(torch.device("cuda", 0))
    ours_name = "ours" if kernel == own else f"ours {kernel}"
    about = {"gpu": gpu, "torch": torch.__version__, "triton": _version("triton")}
    peers = {name: peer for name, peer in PEERS.items() if find_spec(peer[0]) is not None}
    for name, shape in layers.items():
        ours = {f: [random_weight(f, shape) for _ in range(copies(weight_bytes(f, shape)))] for f in formats}
        for m in tokens:
            x = torch.randn((m, shape[1]), dtype=torch.bfloat16, device="cuda")
            for peer, (package, format_name, make) in list(peers.items()):
                try:
                    calls = list(make(shape, x))
                    yield _row(peer, _version(package), format_name, name, shape, m, short_times(calls)) | about
                except (ImportError, RuntimeError, AttributeError, TypeError, OSError) as error:
                    print(f"{peer} left out: {error!r}", flush=True)
                    del peers[peer]
                calls = []
            for format_name, weights in ours.items():
                config = decode_configs.choose(gpu, shape, m, kernel, format_name)
                calls = [lambda x=x, w=w, c=config: decode.decode_gemm(x, w, config=c) for w in weights]
                yield _row(ours_name, "", format_name, name, shape, m, short_times(calls)) | about


def _row(
    kernel: str, release: str, format_name: str, layer: str, shape: tuple[int, int], tokens: int, spans: list[float]
) -> dict[str, Any]:
    percentiles, least = quantiles(spans), floor(format_name, shape, tokens)
    return {
        "kernel": kernel, "version": release, "format": format_name, "layer": layer, "n": shape[0], "k": shape[1],
        "tokens": tokens, **percentiles, "floor_us": round(least, 2),
        "share_of_floor": round(least / percentiles["p50_us"], 3),
    }  # fmt: skip


def _version(package: str) -> str:
    """The version of the distribution that `package` belongs to, whose name may differ."""
    distributions = packages_distributions().get(package)
    return version(distributions[0]) if distributions else "unknown"


def print_table(measured: list[dict[str, Any]]) -> None:
    """Microseconds, and the speed relative to torch in bfloat16, of each layer and number of tokens."""
    columns = list(dict.fromkeys((row["kernel"], row["format"]) for row in measured))
    print("layer | M |", " | ".join(f"{kernel} {format_name}" for kernel, format_name in columns))
    for (layer, tokens), group in itertools.groupby(measured, key=lambda row: (row["layer"], row["tokens"])):
        us = {(row["kernel"], row["format"]): row["p50_us"] for row in group}
        base = us.get(("torch", "bfloat16"))
        cells = [f"{us[c]:.1f} ({base / us[c]:.2f}x)" if c in us and base else "" for c in columns]
        print(layer, "|", tokens, "|", " | ".join(cells))


def main() -> None:
    parser = timing.argument_parser(__doc__)
    parser.add_argument("--formats", default="nvfp4,mxfp4,nf4")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--layers", default="", help="only layers whose name contains one of these")
    parser.add_argument("--search", action="store_true", help="measure configurations first")
    parser.add_argument("--lora-rank", type=int, default=32, help="rank of the adapter in --search; 0 for none")
    parser.add_argument("--table", type=Path, help="where --search writes; the user's cache by default")
    parser.add_argument("--kernel", choices=(WGMMA, MMA_V2), help="by default that which the GPU runs")
    options = parser.parse_args()
    timing.require_gpu(parser)
    gpu, own = torch.cuda.get_device_name(), decode.kernel_of(torch.device("cuda", 0))
    kernel = options.kernel or own
    if kernel is None or kernel == WGMMA != own:
        parser.error(f"the decode GEMM has no kernel {kernel or ''} for {gpu}")
    if options.search and kernel != own and options.table is None:
        parser.error(f"--search --kernel {kernel} would replace the configurations of {own}; give a --table")
    tokens = [int(m) for m in options.tokens.split(",")]
    layers = {name: s for name, s in LAYERS.items() if any(part in name for part in options.layers.split(","))}
    if options.search:
        path = options.table or decode_configs.cache_file(gpu)
        search(layers, sorted({decode_configs.bucket(m) for m in tokens}), path, options.lora_rank, kernel)
    formats = options.formats.split(",")
    jobs = itertools.product(formats, layers.values(), tokens)
    compile_all([(f, shape, m, decode_configs.choose(gpu, shape, m, kernel, f), 0) for f, shape, m in jobs])
    print_table(timing.write_rows(rows(layers, formats, tokens, kernel), options.out))


if __name__ == "__main__":
    main()
