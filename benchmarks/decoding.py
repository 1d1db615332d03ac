"""Tokens a second that engine=hf samples with random weights in the shape of a model.

    python benchmarks/decoding.py [--out FILE] [--shape 7b] [--formats nvfp4 bf16] [--ranks 32] [--slow 64]
        [--ragged 512 1024] [--group 8] [--dequantized 0 16] [--profile FILE]

Steps replayed as CUDA graphs are compared with sampling through transformers in the same process. A model whose step
the engine cannot record is sampled through transformers alone. `resident_gib` is what model and adapter take,
`matmuls` the kernels of its layers. A router with random weights spreads its tokens evenly over the experts; a trained
one prefers some, and then a step reads fewer weights. Unlike the other benches this one needs the whole project.
Without a GPU it shows only that it runs.

Batches of equal length: --group completions of each prompt, at most as many as the batch. Decode tokens/s are those of
steps alone: a rollout of one token is subtracted, which reads the prompts. Ragged rollouts: so many completions of
geometric length with mean 600 and limit 4,096, eight of each prompt, in at most 256 rows. `tok_s` is over the whole
rollout, prompts included; `rows_used` is the share of computed rows whose token was kept, `cache_gib` what was reserved
for keys and values with all lengths known, `cache_used_gib` the most that was in use. Graphs are recorded in a first
rollout that also compiles; that takes `first_record_s` and is in no other number. With --dequantized (GiB, as
engine.dequantized_gib) those of many rows are recorded in each rollout, which counts in ragged rollouts alone. Numbers
are medians of several repeats. --profile writes how long each kernel ran in one more rollout of each batch.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from timing import append_rows, argument_parser, print_rows, write_rows

from qerl_bench.config import build, compose
from qerl_bench.engine import hf_reference
from qerl_bench.engine.base import Sampling
from qerl_bench.engine.recordable import eager_reason
from qerl_bench.engine.rollout_queue import Limits
from qerl_bench.engine.sampler import Sampler
from qerl_bench.experiment_spec import Experiment
from qerl_bench.model.load import load_packed
from qerl_bench.model.policy import Policy
from qerl_bench.model.structure import structure_of
from qerl_bench.model_setup import build_noise
from qerl_bench.quant.activations import round_inputs
from qerl_bench.task.shape import IDS, Shape
from qerl_core.process.device import now, peak_gib, reset_peak, resolve_device
from qerl_core.process.installation import CONF_DIR
from qerl_kernels import projection

SHAPES = sorted(path.stem for path in (CONF_DIR / "model" / "shape").glob("*.yaml"))
SLOW_TOKENS = 12  # tokens of a rollout through transformers
ROWS = 256  # of a ragged rollout
COLUMNS = (  # empty where a row has no such number
    "way", "dequantized_gib", "batch", "group", "prompt", "new", "tokens", "longest", "repeats", "read_s",
    "first_record_s", "total_s", "step_ms", "step_ms_least", "step_ms_most", "decode_tok_s", "tok_s", "rows_used",
    "cache_gib", "cache_used_gib", "peak_gib",
)  # fmt: skip


def random_policy(experiment: Experiment, rank: int, device: str) -> Policy:
    """A policy with random weights in the format of `experiment`; rank 0 means no adapter."""
    model, tokenizer, reports, *_ = load_packed(
        experiment.model, experiment.quant, experiment.quantizer, experiment.task, None, device
    )
    structure = structure_of(model)
    rounding = round_inputs(model, experiment.quant.activations, "the shape")
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
    options = {"packing": False, "train_norms": False, "template": {}, "rounding": rounding}
    return Policy(model, tokenizer, reports, structure, noise, adapter, kernel=experiment.kernel, **options)


def kernels_of(rollout: Callable[[], object], device: str) -> list[dict[str, Any]]:
    """Milliseconds that each kernel of a rollout ran, its share of all, and its calls; the longest first.

    Names are cut where arguments of a library's templates go on for hundreds of characters.
    """
    activity = torch.profiler.ProfilerActivity.CUDA if device == "cuda" else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        rollout()
    spans = {
        event.key: ((event.self_device_time_total if device == "cuda" else event.self_cpu_time_total), event.count)
        for event in profile.key_averages()
    }
    total = sum(us for us, _ in spans.values())
    longest = sorted(((name, span) for name, span in spans.items() if span[0] > 0), key=lambda item: -item[1][0])
    return [
        {"ms": round(us / 1e3, 6), "share": round(us / total, 9), "calls": calls, "kernel": name[:100]}
        for name, (us, calls) in longest
    ]


class Way:
    """One way to decode: recorded steps, which stay recorded, or transformers."""

    def __init__(self, name: str, policy: Policy, rows: int, dequantized_gib: float = 0.0) -> None:
        self.name, self.policy = name, policy
        limits = Limits(rows=rows, kept_gib=1e6, dequantized_gib=dequantized_gib)
        self.sampler = Sampler(policy, limits) if name == "recorded" else None

    def seconds(self, prompts: list[list[int]], lengths: list[int], limit: int) -> tuple[float, dict[str, float]]:
        """Seconds of one rollout with room for `limit` tokens, its peak memory in GiB, and the sampler's report."""
        device, samples = self.policy.device.type, len(lengths) // len(prompts)
        sampling = Sampling(samples=samples, temperature=1.0, max_tokens=limit, seed=0)
        reset_peak(device)
        started = now(device)
        keys: list[int] = list(range(len(lengths)))
        with torch.inference_mode():
            if self.sampler is None:
                hf_reference.decode(self.policy, prompts, sampling, keys, lengths)
            else:
                self.sampler.decode(prompts, sampling, keys, lengths)
        taken = now(device) - started
        return taken, {"peak_gib": peak_gib(device), **(self.sampler.sleep() if self.sampler else {})}


def measure(
    policy: Policy,
    name: str,
    batches: Sequence[int],
    prompt: int,
    new: int,
    repeats: int,
    group: int = 1,
    dequantized_gib: float = 0.0,
    profiled: bool = False,
) -> Iterator[dict[str, Any]]:
    """Batches of completions of `new` tokens; if `profiled`, the row of each also has the kernels of one more."""
    for batch in batches:
        samples = min(group, batch)
        way = Way(name, policy, batch, dequantized_gib)
        count = batch // samples
        ids = even_prompts(count, prompt, batch)
        _, first = way.seconds(ids, [new] * (count * samples), new)  # compiles and records, with room for `new`
        rounds = [[way.seconds(ids, [n] * (count * samples), new) for n in (1, new)] for _ in range(repeats)]
        replayed = [[taken - report.get("time/recording_s", 0.0) for taken, report in two] for two in rounds]
        row = even_row(count * samples, samples, prompt, new, replayed) | {
            "way": name,
            "dequantized_gib": dequantized_gib,
            "first_record_s": first.get("time/recording_s"),
            "cache_gib": first.get("memory/cache_gib"),
            "peak_gib": max(report["peak_gib"] for _, (_, report) in rounds),
        }
        if profiled:
            rollout = partial(way.seconds, ids, [new] * (count * samples), new)
            row["kernels"] = kernels_of(rollout, policy.device.type)
        yield row


def even_prompts(count: int, tokens: int, seed: int) -> list[list[int]]:
    return torch.randint(IDS, (count, tokens), generator=torch.Generator().manual_seed(seed)).tolist()


def even_row(batch: int, group: int, prompt: int, new: int, rounds: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Of completions of `new` tokens: the seconds of `rounds` are those of a rollout of one token and of all."""
    steps = [(total - read) / (new - 1) for read, total in rounds]
    return {
        "batch": batch,
        "group": group,
        "prompt": prompt,
        "new": new,
        "repeats": len(rounds),
        "read_s": median(read for read, _ in rounds),
        "total_s": median(total for _, total in rounds),
        "step_ms": 1e3 * median(steps),
        "step_ms_least": 1e3 * min(steps),
        "step_ms_most": 1e3 * max(steps),
        "decode_tok_s": batch / median(steps),
    }


def ragged_load(task: Shape, count: int) -> tuple[list[list[int]], list[int]]:
    """Prompts, and the length of each completion, the samples of a prompt side by side."""
    prompts = task.train_prompts(1, count // task.group_size, seed=0)
    lengths = [length for prompt in prompts for length in prompt.new_tokens or ()]
    return [list(prompt.token_ids or ()) for prompt in prompts], lengths


def ragged_row(task: Shape, lengths: Sequence[int], rounds: Sequence[float]) -> dict[str, Any]:
    """Of rollouts of completions of these lengths, by their seconds."""
    return {
        "batch": len(lengths),
        "group": task.group_size,
        "prompt": task.prompt_tokens,
        "tokens": sum(lengths),
        "longest": max(lengths),
        "repeats": len(rounds),
        "total_s": median(rounds),
        "tok_s": sum(lengths) / median(rounds),
    }


def measure_ragged(
    policy: Policy, counts: Sequence[int], task: Shape, repeats: int, dequantized_gib: float = 0.0
) -> Iterator[dict[str, Any]]:
    """Rollouts of completions whose lengths `task` draws."""
    for count in counts:
        way = Way("recorded", policy, ROWS, dequantized_gib)
        ids, lengths = ragged_load(task, count)
        _, first = way.seconds(ids, lengths, task.max_completion_tokens)
        rounds = [way.seconds(ids, lengths, task.max_completion_tokens) for _ in range(repeats)]
        report = rounds[-1][1]
        yield ragged_row(task, lengths, [seconds for seconds, _ in rounds]) | {
            "way": "ragged",
            "dequantized_gib": dequantized_gib,
            "first_record_s": first["time/recording_s"],
            "rows_used": (sum(lengths) - len(lengths)) / report["rollout/rows_computed"],
            "cache_gib": report["memory/cache_gib"],
            "cache_used_gib": report["memory/cache_used_gib"],
            "peak_gib": max(report["peak_gib"] for _, report in rounds),
        }


def measure_all(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each batch. The kernels of each, if they were measured, go to the file --profile at once."""
    device = resolve_device("auto")
    gpu = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    started = time.perf_counter()
    for shape, name, rank in itertools.product(options.shape, options.formats, options.ranks):
        words = (*f"quant={name}".split("+"), f"model=shape/{shape}", "model.dtype=bfloat16", "task=shape", "eval=none")
        policy = random_policy(build(compose([*words, f"lora.rank={max(rank, 1)}"])), rank, device)
        resident = torch.cuda.memory_allocated() / 2**30 if device == "cuda" else None
        budgets = options.dequantized if name != "bf16" else [0.0]
        plan = [("recorded", options.batches, options.new, gib) for gib in budgets]
        plan.append(("transformers", options.slow, SLOW_TOKENS, 0.0))
        if device == "cuda" and (reason := eager_reason(policy)) is not None:
            print(f"{shape} {name}: through transformers alone, because {reason}")
            plan = [("transformers", options.batches, SLOW_TOKENS, 0.0)]
        rows: list[Iterator[dict[str, Any]]] = []
        matmuls = " + ".join(dict.fromkeys(re.split(r",| up to ", one)[0] for one in policy.kernels.values()))
        case = {"shape": shape, "format": name, "rank": rank, "matmuls": matmuls}
        for way, batches, new, gib in plan:
            new = min(new, options.new)
            more = (options.prompt, new, options.repeats, options.group, gib, options.profile is not None)
            rows.append(measure(policy, way, batches, *more))
            if way == "recorded":
                rows.append(measure_ragged(policy, options.ragged, ragged_task(options), options.repeats, gib))
        for row in itertools.chain(*rows):
            if kernels := row.pop("kernels", None):
                batch = {key: row[key] for key in ("way", "dequantized_gib", "batch", "group")}
                append_rows([case | batch | kernel for kernel in kernels], options.profile)
            print(f"[{time.perf_counter() - started:.0f} s]", shape, name, rank, row, flush=True)
            yield case | {"resident_gib": resident, "gpu": gpu, **versions} | dict.fromkeys(COLUMNS) | row
        del policy
        gc.collect()  # fused blocks refer to themselves, and would count as resident in the next case
        if device == "cuda":
            torch.cuda.empty_cache()


def ragged_task(options: argparse.Namespace) -> Shape:
    return Shape(
        name="shape", prompt_tokens=options.prompt, lengths="geometric", completion_tokens=options.mean,
        max_completion_tokens=options.limit, group_size=8,
    )  # fmt: skip


def main(words: list[str] | None = None) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["7b"])
    parser.add_argument("--formats", nargs="+", default=["nvfp4", "bf16"], help="also fp8+quant.activations=fp8")
    parser.add_argument("--ranks", type=int, nargs="+", default=[32], help="of the adapter, 0 for none")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--slow", type=int, nargs="*", default=[64], help="batches also sampled through transformers")
    parser.add_argument("--ragged", type=int, nargs="*", default=[512, 1024], help="completions of ragged rollouts")
    parser.add_argument("--mean", type=int, default=600, help="tokens of a ragged completion")
    parser.add_argument("--limit", type=int, default=4096, help="most tokens of a ragged completion")
    parser.add_argument("--group", type=int, default=1, help="completions of one prompt in batches of equal length")
    parser.add_argument("--dequantized", type=float, nargs="+", default=[0.0], help="GiB of weights in 16 bits as well")
    parser.add_argument("--behind", action="store_true", help="x A^T of adapters first, not beside the matmul")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", type=Path, help="CSV file for the kernels of a rollout of each batch")
    options = parser.parse_args(words)
    if options.new < 2 or options.repeats < 1 or any(count % 8 for count in options.ragged):
        parser.error("--new must be above 1, --repeats at least 1, and --ragged multiples of 8, the size of a group")
    if options.behind:
        projection.BESIDE_ROWS = 0
    if options.profile is not None:
        options.profile.unlink(missing_ok=True)
    print_rows(write_rows(measure_all(options), options.out), leave_out=("gpu", "torch", "transformers"))


if __name__ == "__main__":
    main()
