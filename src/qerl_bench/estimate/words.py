"""Estimates for people: a table for `qerl-bench estimate`, lines for a run and a sweep that begin."""

from __future__ import annotations

import heapq
import logging
from collections import Counter
from collections.abc import Sequence

from omegaconf import DictConfig

from qerl_bench.estimate.cards import card_of
from qerl_bench.estimate.estimate import RunEstimate
from qerl_bench.estimate.point import of_experiment, of_point
from qerl_bench.experiment_spec import Experiment
from qerl_bench.task.base import Task
from qerl_core.checks import ConfigError
from qerl_core.options.composer import Composer
from qerl_core.options.fingerprint import as_dict, flat
from qerl_core.process.arguments import wrap_lines
from qerl_core.process.gpu_share import runs_on_gpu
from qerl_core.process.progress import duration

log = logging.getLogger(__name__)
ERROR = "Ten committed runs that the table did not see: docs/estimate.md has the error of each"


def lines(estimate: RunEstimate) -> list[str]:
    """The table of one run."""
    memory = estimate.memory
    left = [
        ("weights", memory.weights),
        ("trained, with Adam", memory.optimizer),
        ("sampling, at most", memory.rollout),
        ("training, at most", memory.train),
        ("disk, checkpoints", estimate.disk_gib),
    ]
    right = [
        ("start", duration(estimate.start_s)),
        ("evaluations", duration(estimate.evaluation_s)),
        (f"a step: {estimate.rollout_s:.2f} sampling, {estimate.train_s:.2f} training", f"{estimate.step_s:.2f} s"),
        (f"{estimate.steps:,} steps", duration(estimate.steps * estimate.step_s)),
        ("the run", duration(estimate.run_s)),
    ]
    rows = [
        f"  {name:19} {gib:7.1f} GiB    {stage:40} {took:>9}"
        for (name, gib), (stage, took) in zip(left, right, strict=True)
    ]
    micro = (
        f"micro-batches of {memory.micro_batch:,} tokens, {memory.micro_batches} a step; of one sequence each they "
        f"take {memory.least:.1f} GiB"
    )
    return [*rows, *(wrap_lines(f"  {said}") for said in (micro, *estimate.said))]


def brief(estimate: RunEstimate | Sequence[str]) -> list[str]:
    """What a run that begins says: memory, seconds by stage, what is not covered."""
    if not isinstance(estimate, RunEstimate):
        return [f"no estimate: {'; '.join(estimate)}"]
    memory = estimate.memory
    return [
        f"estimate: {memory.rollout:.1f} GiB at most while sampling, {memory.train:.1f} while training; "
        f"checkpoints {estimate.disk_gib:.1f} GiB of disk",
        f"estimate: start {duration(estimate.start_s)}, evaluations {duration(estimate.evaluation_s)}, "
        f"{estimate.steps:,} steps of {estimate.step_s:.1f} s, in all {duration(estimate.run_s)}",
        f"estimate: {'; '.join(estimate.said)}",
    ]


def run_estimate_lines(experiment: Experiment, cfg: DictConfig, device: str) -> list[str]:
    """What a run says before it begins on a GPU; on a CPU nothing, of which no table says anything.

    What keeps that from being said is said, and keeps no run from running.
    """
    if device == "cpu":
        return []
    try:
        return brief(of_experiment(experiment, flat(as_dict(cfg)), card_of(None), runs_on_gpu()))
    except ConfigError as error:
        return brief([str(error)])


def log_sweep_estimate(points: Sequence[Sequence[str]], slots: int, gpus: int) -> None:
    """Say before a sweep how long all runs of `points`, words of each, will take on so many GPUs, `slots` at a time."""
    if not points or not gpus:
        return
    slots, composer = min(slots, len(points)), Composer()
    tasks: list[Task] = []
    try:
        card = card_of(None)
        found = [of_point(composer.tree(words), card, -(-slots // gpus), tasks=tasks) for words in points]
    except ConfigError as error:
        found = [[str(error)]]
    log.info(total(found, slots))


def total(found: Sequence[RunEstimate | list[str]], slots: int) -> str:
    """Hours and disk of all runs with an estimate, and why others have none."""
    known = [one for one in found if isinstance(one, RunEstimate)]
    reasons = Counter("; ".join(one) for one in found if not isinstance(one, RunEstimate))
    told = [
        f"estimate: {duration(hours_s(known, slots))} for {len(known)} runs, {slots} at a time; checkpoints "
        f"{sum(one.disk_gib for one in known):.1f} GiB of disk"
    ]
    missing = [f"no estimate for {count} runs: {reason}" for reason, count in reasons.items()]
    return "\n".join([*(told if known else []), *missing])


def hours_s(found: Sequence[RunEstimate], slots: int) -> float:
    """Seconds until all are done, where each begins in the slot that is free first."""
    free = [0.0] * max(1, min(slots, len(found)))
    for one in found:
        heapq.heapreplace(free, free[0] + one.run_s)
    return max(free)
