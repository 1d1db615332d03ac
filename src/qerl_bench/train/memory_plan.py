"""How many tokens a micro-batch holds: as given, or as many as the GPU's free memory takes.

Two small passes are measured, forward and backward at the length of the longest sequence, in the place of a model of
every architecture's memory. What was found and chosen is in memory.json of the run, which a continued run reads, so
that it makes the same micro-batches. After a shortage it holds half of them, so the same command gets further.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

from qerl_bench.checks import TrainingStopped
from qerl_bench.device import peak_gib, reset_peak
from qerl_bench.memory import NO_MEMORY, shortage
from qerl_bench.model.policy import Policy
from qerl_bench.rundir import RunDir
from qerl_bench.train.spec import TrainSpec

log = logging.getLogger(__name__)
FILE = "memory.json"
CPU_TOKENS = 8_192  # a machine's memory is shared, and larger matmuls are no faster there
MOST_TOKENS = 32_768  # four times what keeps a large GPU busy
PROBE_TOKENS = 1_024
USABLE = 0.85  # of the free memory; the rest is for fragments and for an estimate that is too low
ADAM_BYTES = 8  # of each trained number: both moments in FP32
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What was measured, in bytes, and the tokens of a micro-batch that follow from it."""

    free: int  # on the GPU, before the first update
    fixed: int  # a pass of no tokens: gradients, buffers, and the optimizer's states if they are still to be made
    per_token: int
    micro_batch_tokens: int

    @classmethod
    def of(cls, peaks: dict[int, int], free: int, states: int) -> MemoryPlan:
        """From the peaks (bytes) of two passes by their tokens, the free memory, and the states still to be made."""
        (few, low), (many, high) = sorted(peaks.items())
        per_token = max(1, (high - low) // (many - few))
        fixed = max(0, low - few * per_token) + states
        fits = int((USABLE * free - fixed) // per_token)
        tokens = fits // 1024 * 1024 if fits > 1024 else max(1, fits)
        return cls(free=free, fixed=fixed, per_token=per_token, micro_batch_tokens=min(MOST_TOKENS, tokens))

    def __str__(self) -> str:
        used = self.fixed + self.per_token * self.micro_batch_tokens
        return (
            f"micro-batches of {self.micro_batch_tokens:,} tokens: {self.per_token / 2**20:.2f} MiB a token and "
            f"{self.fixed / GIB:.2f} GiB make {used / GIB:.2f} GiB of {self.free / GIB:.2f} GiB free"
        )


def micro_batch_tokens(
    train: TrainSpec, policy: Policy, optimizer: torch.optim.Optimizer, longest: int, run: RunDir
) -> int:
    """Tokens that a micro-batch may take, at least `longest`, those of the longest sequence.

    Raises TrainingStopped if `train` gives a number that cannot hold it.
    """
    wanted = train.micro_batch_tokens
    if wanted is not None:
        if wanted < longest:
            raise TrainingStopped(
                f"train.micro_batch_tokens={wanted:,} cannot hold the longest sequence, prompt and completion, of "
                f"{longest:,} tokens. Set it to at least {longest:,}, or to null, or lower task.max_completion_tokens; "
                "memory is saved by train.recompute=selective or full"
            )
        return wanted
    if policy.device.type != "cuda":
        return max(CPU_TOKENS, longest)
    if (run.path / FILE).exists():
        return max(longest, json.loads((run.path / FILE).read_text())["micro_batch_tokens"])
    plan = measured_plan(policy, optimizer, longest)
    run.write(FILE, json.dumps(asdict(plan) | {"longest_sequence": longest, "recompute": train.recompute}, indent=1))
    log.info("%s (train.recompute=%s)", plan, train.recompute)
    if plan.micro_batch_tokens < longest:
        log.warning(
            "the longest sequence has %d tokens, and %d fit by estimate: if memory runs out, use train.recompute=full",
            *(longest, plan.micro_batch_tokens),
        )
    return max(longest, plan.micro_batch_tokens)


def measured_plan(policy: Policy, optimizer: torch.optim.Optimizer, longest: int) -> MemoryPlan:
    """The plan for sequences of up to `longest` tokens with the memory that is free now."""
    rows = -(-PROBE_TOKENS // longest)
    training_pass(policy, rows, longest)  # makes the buffers that stay, and compiles kernels
    peaks: dict[int, int] = {}
    for count in (rows, 2 * rows):
        try:
            peaks[count * longest] = peak_bytes(policy, lambda count=count: training_pass(policy, count, longest))
        except Exception as error:
            if shortage(error) is None or not peaks:
                raise  # not even one pass fits
            for parameter in policy.trainable:
                parameter.grad = None
            peaks[0] = 0  # of what a pass of no tokens takes nothing is known
    states = 0 if optimizer.state else ADAM_BYTES * sum(parameter.numel() for parameter in policy.trainable)
    torch.cuda.empty_cache()
    return MemoryPlan.of(peaks, torch.cuda.mem_get_info()[0], states)


def peak_bytes(policy: Policy, work: Callable[[], None]) -> int:
    """How much more memory than before was allocated at once during `work`."""
    before = torch.cuda.memory_allocated() if policy.device.type == "cuda" else 0
    reset_peak(policy.device.type)
    work()
    return int(peak_gib(policy.device.type) * GIB) - before


def training_pass(policy: Policy, rows: int, width: int) -> None:
    """Forward and backward of `rows` completions of `width` tokens; leaves no gradient and no random draw behind."""
    ids = torch.zeros(rows, width, dtype=torch.long, device=policy.device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, 0] = False
    with torch.random.fork_rng([policy.device] if policy.device.type == "cuda" else []):
        policy.train_mode(True)
        policy.token_stats(ids, mask, 1.0).logprobs.sum().backward()
        policy.train_mode(False)
    for parameter in policy.trainable:
        parameter.grad = None


@contextmanager
def shortage_in_words(train: TrainSpec, tokens: int, longest: int, run: RunDir) -> Iterator[None]:
    """Say with numbers that memory ran out in this block, whose micro-batches have up to `tokens` tokens.

    Micro-batches whose size was not given are halved for the next attempt.
    """
    try:
        yield
    except Exception as error:
        said = shortage(error)
        if said is None:
            raise
        stronger = {"none": "train.recompute=selective or full", "selective": "train.recompute=full"}
        remedies = [
            remedy for remedy in (stronger.get(train.recompute), "a shorter task.max_completion_tokens") if remedy
        ]
        again = "If another process has used it, the same command continues from the last checkpoint"
        if tokens > longest and train.micro_batch_tokens is not None:
            remedies.insert(0, f"a smaller train.micro_batch_tokens, at least {longest:,}")
        elif tokens > longest and (run.path / FILE).exists():
            plan = json.loads((run.path / FILE).read_text())
            run.write(FILE, json.dumps(plan | {"micro_batch_tokens": tokens // 2}, indent=1))
            again = f"The same command continues from the last checkpoint with micro-batches of {tokens // 2:,} tokens"
        raise TrainingStopped(
            f"train: {NO_MEMORY} ({said}) in micro-batches of up to {tokens:,} tokens with "
            f"train.recompute={train.recompute}; the longest sequence has {longest:,}. {again}. Otherwise: "
            f"{', or '.join(remedies)}"
        ) from error
