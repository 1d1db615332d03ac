"""How many tokens a micro-batch holds: as given, or as many as the GPU's free memory takes; and fewer after a shortage.

Two small passes are measured, forward and backward at the length of the longest sequence, in the place of a model of
every architecture's memory. What was found and chosen is in memory.json of the run, which a continued run reads, so
that it makes the same micro-batches. A shortage first ends the recording of passes, then halves the micro-batches, for
some steps (`reduced_sizes.py`).
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from typing import Any

import torch

from qerl_bench.model.policy import Policy
from qerl_bench.train.memory_rule import ADAM_BYTES, MemoryPlan
from qerl_bench.train.recorded_passes import least_tokens
from qerl_bench.train.reduced_sizes import Size
from qerl_bench.train.spec import TrainSpec
from qerl_bench.train.trainer_state import TrainerState
from qerl_core.checks import TrainingStopped
from qerl_core.process.device import peak_bytes
from qerl_core.process.gpu_share import free_bytes, release
from qerl_core.process.out_of_memory import shortage
from qerl_core.rundir.run_dir import RunDir

log = logging.getLogger(__name__)
FILE = "memory.json"
CPU_TOKENS = 2_048  # half as many are slower in a tiny model; of 135 M parameters more are slower, and take more memory
PROBE_TOKENS = 1_024


def stored_plan(run: RunDir) -> dict[str, Any]:
    """What memory.json of the run says; nothing without one."""
    return json.loads((run.path / FILE).read_text()) if (run.path / FILE).exists() else {}


def planned_before(run: RunDir) -> Size | None:
    """The micro-batches that a run which goes on or begins again has planned; None if it has planned none.

    What shortages have made of them is in checkpoints.
    """
    if "micro_batch_tokens" in (stored := stored_plan(run)):
        return Size(stored["micro_batch_tokens"], stored.get("recorded", True))
    return None


def micro_batch_size(
    train: TrainSpec,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    longest: int,
    run: RunDir,
    records: bool,
    state: TrainerState,
) -> Size:
    """The size of the micro-batches, at least `longest` tokens, those of the longest sequence.

    `records`: whether this run's passes can be recorded; they are if the smallest such pass is no larger. Raises
    TrainingStopped if `train` gives a number of tokens that cannot hold the longest sequence.
    """
    wanted = train.micro_batch_tokens
    if wanted is not None and wanted < longest:
        raise TrainingStopped(
            f"train.micro_batch_tokens={wanted:,} cannot hold the longest sequence, prompt and completion, of "
            f"{longest:,} tokens. Set it to at least {longest:,}, or to null, or lower task.max_completion_tokens; "
            "memory is saved by train.recompute=selective or full"
        )
    if state.size is None and wanted is None and policy.device.type == "cuda":
        plan = measured_plan(policy, optimizer, longest, records)
        about = {"longest_sequence": longest, "recompute": train.recompute}
        run.write(FILE, json.dumps(asdict(plan) | about, indent=1))
        log.info("%s (train.recompute=%s)", plan, train.recompute)
        if plan.micro_batch_tokens < longest:
            log.warning(
                "the longest sequence has %d tokens, and %d fit by estimate: if memory runs out, use "
                "train.recompute=full",
                *(longest, plan.micro_batch_tokens),
            )
        state.size = Size(plan.micro_batch_tokens, plan.recorded)
    size = state.size or Size(wanted or CPU_TOKENS, recorded=True)
    if reduced := state.shortages.size.value:
        size = Size(**reduced)
    tokens = max(longest, size.tokens)
    return Size(tokens, size.recorded and records and least_tokens(longest) <= tokens)


def measured_plan(policy: Policy, optimizer: torch.optim.Optimizer, longest: int, records: bool) -> MemoryPlan:
    """The plan for sequences of up to `longest` tokens with the memory that is free now."""
    rows = -(-PROBE_TOKENS // longest)
    training_pass(policy, rows, longest)  # makes the buffers that stay, and compiles kernels
    peaks: dict[int, int] = {}
    for count in (rows, 2 * rows):
        try:
            peaks[count * longest] = peak_bytes(
                policy.device.type, lambda count=count: training_pass(policy, count, longest)
            )
        except Exception as error:
            if shortage(error) is None or not peaks:
                raise  # not even one pass fits
            for parameter in policy.trainable:
                parameter.grad = None
            peaks[0] = 0  # of what a pass of no tokens takes nothing is known
    states = 0 if optimizer.state else ADAM_BYTES * sum(parameter.numel() for parameter in policy.trainable)
    release()
    return MemoryPlan.of(peaks, free_bytes(), states, least_tokens(longest) if records else None)


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
