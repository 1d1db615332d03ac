"""Seconds of an update on ragged completions in the shape of a 7B, in turns: BF16, and FP8 with gradients in FP8.

    python benchmarks/updating.py [--formats bf16 ...] [--completions 512] [--repeats 3] [--out FILE]

The batch is that of experiment=speed/ragged: lengths and prompts are the same for every format, tokens are random. An
update is all of training: forward, backward, clipping and AdamW. `first` trains on 64 completions before, so that
kernels are compiled.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator
from statistics import median
from typing import Any, Never, cast

import timing
import torch
from decoding import ragged_load

from qerl_bench.config import build, compose
from qerl_bench.model_setup import build_policy
from qerl_bench.task.shape import Shape
from qerl_bench.train.batch import Batch, make_batch
from qerl_bench.train.update import make_optimizer, update
from qerl_core.rundir.run_dir import RunDir

FORMATS = ("bf16", "fp8+quant.activations=fp8", "fp8+quant.activations=fp8+train.gradients=fp8")
FIRST = 64  # completions


class NoRun:
    """In the place of a run's folder, of which an update has need only if it must be made again or left out."""

    def __getattr__(self, name: str) -> Never:
        raise SystemExit("an update did not fit into memory, or was not finite: lower --tokens")


class Arm:
    """A policy in one format, and what trains it."""

    def __init__(self, name: str, options: Namespace) -> None:
        words = (f"model=shape/{options.shape}", "experiment=speed/ragged", "model.dtype=bfloat16", "lora.rank=32")
        self.name = name
        self.experiment = build(compose([*words, f"train.micro_batch_tokens={options.tokens}", *quant_words(name)]))
        self.policy = build_policy(self.experiment, None, options.device)
        self.optimizer = make_optimizer(self.policy, self.experiment.optim)

    def seconds(self, batch: Batch) -> float:
        started = time.perf_counter()
        update(self.experiment, self.policy, self.optimizer, batch, cast(RunDir, NoRun()), 1)  # waits for the device
        return time.perf_counter() - started


def quant_words(name: str) -> list[str]:
    """The words behind `name`, as of --formats."""
    return f"quant={name}".split("+")


def batch_of(task: Shape, count: int) -> Batch:
    """`count` completions of random tokens, of the lengths that `task` draws; none has advantage 0."""
    prompts, lengths = ragged_load(task, count)
    ids = torch.Generator().manual_seed(0)
    completions = [torch.randint(256, (length,), generator=ids).tolist() for length in lengths]
    logprobs = [[-12.0] * length for length in lengths]  # about that of a random model
    advantages = torch.tensor([1.0, -1.0]).repeat(count // 2)
    each = [prompt for prompt in prompts for _ in range(task.group_size)]
    return make_batch(each, completions, 0, torch.device("cpu"), logprobs, advantages)


def measure(options: Namespace) -> Iterator[dict[str, Any]]:
    arms = [Arm(name, options) for name in options.formats]
    task = cast(Shape, arms[0].experiment.task)
    batch, first = batch_of(task, options.completions), batch_of(task, min(FIRST, options.completions))
    before = {arm.name: arm.seconds(first) for arm in arms}
    seconds: dict[str, list[float]] = {arm.name: [] for arm in arms}
    for number in range(options.repeats):
        for arm in arms:
            seconds[arm.name].append(arm.seconds(batch))
            print(f"update {number + 1}: {arm.name} {seconds[arm.name][-1]:.2f} s", flush=True)
    reference = median(seconds[options.formats[0]])
    matmuls = {arm.name: " + ".join(dict.fromkeys(arm.policy.kernels.values())) for arm in arms}
    for name, found in seconds.items():
        yield {
            "format": name,
            "completions": options.completions,
            "tokens": int(batch.mask.sum()),
            "first_s": round(before[name], 2),
            "update_s": median(found),
            "least_s": min(found),
            "most_s": max(found),
            "times_the_first": median(found) / reference,
            "matmuls": matmuls[name],
        }


def main(words: list[str] | None = None) -> None:
    parser = timing.argument_parser(__doc__)
    parser.add_argument("--shape", default="7b")
    parser.add_argument(
        "--formats", nargs="+", default=list(FORMATS), help="the first is what others are compared with"
    )
    parser.add_argument("--completions", type=int, default=512, help="a multiple of 8, the size of a group")
    parser.add_argument("--tokens", type=int, default=16_384, help="of a micro-batch")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(words)
    if options.completions % 8 or min(options.completions, options.repeats) < 1:
        parser.error("--completions must be a multiple of 8, and --repeats at least 1")
    options.device = "cuda" if torch.cuda.is_available() else "cpu"
    timing.print_rows(timing.write_rows(measure(options), options.out))


if __name__ == "__main__":
    main()
