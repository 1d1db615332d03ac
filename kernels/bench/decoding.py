"""Tokens a second that engine=hf samples with random weights in the shape of a model.

    python kernels/bench/decoding.py [--out FILE] [--shape 7b] [--formats nvfp4 bf16] [--ranks 32] [--slow 64]

Steps replayed as CUDA graphs are compared with sampling through transformers in the same process. A model whose step
the engine cannot record is sampled through transformers alone. `resident_gib` is what model and adapter take. A router
with random weights spreads its tokens evenly over the experts; a trained one prefers some, and then a step reads fewer
weights. Unlike the other benches this one needs the whole project. Without a GPU it shows only that it runs.

Every prompt is different, and all completions have the same length. Decode tokens/s are those of steps alone: the time
of a round of START tokens is subtracted, which reads the prompts, launches the first step kernel by kernel and records
the next one. `record_s` is what these two steps take longer than a replay; a round has it once, and once more each time
that half of its rows are done. Numbers are medians of several repeats, after one round that compiles.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
import transformers
from timing import argument_parser, print_rows, write_rows

from qerl_bench.config import CONF_DIR, Experiment, build, compose
from qerl_bench.device import now, peak_gib, reset_peak, resolve_device
from qerl_bench.engine import hf_graph, hf_reference
from qerl_bench.engine.base import Sampling
from qerl_bench.model.load import load_packed
from qerl_bench.model.policy import Policy
from qerl_bench.model.structure import probe
from qerl_bench.model_setup import build_noise
from qerl_bench.task.shape import IDS

SHAPES = sorted(path.stem for path in (CONF_DIR / "model" / "shape").glob("*.yaml"))
METHODS: dict[str, Callable[..., list[hf_reference.Completion]]] = {
    "recorded": hf_graph.decode,
    "transformers": hf_reference.decode,
}
SLOW_TOKENS = 12  # tokens of a round through transformers
START = 3  # tokens of the start of a round: one sampled after the prompts, one launched step, one recorded step


def random_policy(experiment: Experiment, rank: int, device: str) -> Policy:
    """A policy with random weights in the format of `experiment`; rank 0 means no adapter."""
    model, tokenizer, reports = load_packed(
        experiment.model, experiment.quant, experiment.quantizer, experiment.task, None, device
    )
    structure = probe(model)
    adapter = None
    if rank == 0:
        model.requires_grad_(False)
    else:
        adapter = experiment.lora.attach(model, "the shape", 0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0, 0.01)
    model.eval()
    noise = build_noise(experiment, model, structure, reports)
    options = {"packing": False, "train_norms": False, "template": {}}
    return Policy(model, tokenizer, reports, structure, noise, adapter, kernel=experiment.kernel, **options)


def seconds(method: str, policy: Policy, batch: int, prompt: int, new: int, limit: int) -> tuple[float, float]:
    """Seconds that one round of `new` tokens takes with room for `limit`, and its peak memory in GiB."""
    device = policy.device.type
    ids = torch.randint(IDS, (batch, prompt), generator=torch.Generator().manual_seed(batch)).tolist()
    sampling = Sampling(samples=1, temperature=1.0, max_tokens=limit, seed=0)
    reset_peak(device)
    started = now(device)
    with torch.inference_mode():
        METHODS[method](policy, ids, sampling, list(range(batch)), [new] * batch)
    return now(device) - started, peak_gib(device)


def measure(
    policy: Policy, method: str, batches: Sequence[int], prompt: int, new: int, repeats: int
) -> Iterator[dict[str, Any]]:
    for batch in batches:
        seconds(method, policy, batch, prompt, START, new)  # compiles
        rounds = [[seconds(method, policy, batch, prompt, n, new) for n in (1, START, new)] for _ in range(repeats)]
        steps = [(total - start) / (new - START) for _, (start, _), (total, _) in rounds]
        step = median(steps)
        extra = [start - read - (START - 1) * step for (read, _), (start, _), _ in rounds]
        yield {
            "way": method,
            "batch": batch,
            "prompt": prompt,
            "new": new,
            "repeats": repeats,
            "read_s": median(read for (read, _), _, _ in rounds),
            "record_s": median(extra) if method == "recorded" else None,
            "total_s": median(total for _, _, (total, _) in rounds),
            "step_ms": 1e3 * step,
            "step_ms_least": 1e3 * min(steps),
            "step_ms_most": 1e3 * max(steps),
            "decode_tok_s": batch / step,
            "peak_gib": max(peak for _, _, (_, peak) in rounds),
        }


def measure_all(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    device = resolve_device("auto")
    gpu = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    started = time.perf_counter()
    for shape, name, rank in itertools.product(options.shape, options.formats, options.ranks):
        words = (f"quant={name}", f"model=shape/{shape}", "model.dtype=bfloat16", "task=shape", "eval=none")
        policy = random_policy(build(compose([*words, f"lora.rank={max(rank, 1)}"])), rank, device)
        resident = torch.cuda.memory_allocated() / 2**30 if device == "cuda" else None
        plan = [("recorded", options.batches, options.new), ("transformers", options.slow, SLOW_TOKENS)]
        if device == "cuda" and (reason := hf_graph.eager_reason(policy)) is not None:
            print(f"{shape} {name}: through transformers alone, because {reason}")
            plan = [("transformers", options.batches, SLOW_TOKENS)]
        for method, batches, new in plan:
            for row in measure(policy, method, batches, options.prompt, min(new, options.new), options.repeats):
                print(f"[{time.perf_counter() - started:.0f} s]", shape, name, rank, row, flush=True)
                about = {"shape": shape, "format": name, "rank": rank, "resident_gib": resident}
                yield about | {"gpu": gpu, **versions, **row}
        del policy
        if device == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["7b"])
    parser.add_argument("--formats", nargs="+", default=["nvfp4", "bf16"])
    parser.add_argument("--ranks", type=int, nargs="+", default=[32], help="of the adapter, 0 for none")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--slow", type=int, nargs="*", default=[64], help="batches also sampled through transformers")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if options.new <= START or options.repeats < 1:
        parser.error(f"--new must be above {START} and --repeats at least 1: a round starts with {START} tokens")
    print_rows(write_rows(measure_all(options), options.out), leave_out=("gpu", "torch", "transformers"))


if __name__ == "__main__":
    main()
