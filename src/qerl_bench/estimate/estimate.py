"""The estimate of one run: seconds by stage, GiB by phase, disk; and in words what no committed table covers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qerl_bench.estimate.cards import CARDS, MEASURED, Card
from qerl_bench.estimate.memory import Memory, memory
from qerl_bench.estimate.seconds import Rates, evaluation_s, rollout_s, train_s
from qerl_bench.estimate.table import Measured, corrected, nearest, place_of
from qerl_bench.estimate.work import Work
from qerl_bench.train.memory_rule import ADAM_BYTES, GIB

NOT_TIMED = "no committed run has it"
COVERED: dict[str, tuple[tuple[Any, ...], str]] = {  # the values with committed times, and what is said of others
    "engine.name": (("hf",), NOT_TIMED),
    "kernel": (("auto", "block", "modules"), NOT_TIMED),
    "quant.name": (("bf16", "nvfp4", "nf4", "mxfp4"), "no committed run on a GPU has it"),
    "quant.activations": (("none",), NOT_TIMED),
    "rollout.quant": ((None,), NOT_TIMED),
    "rollout.activations": ((None,), NOT_TIMED),
    "rollout.merge": ((False,), NOT_TIMED),
    "algo.max_resampling_rounds": ((0,), "it samples as often as it has to"),
    "train.updates_per_batch": ((1,), NOT_TIMED),
    "train.gradients": (("bf16",), NOT_TIMED),
    "eval.name": (("task", "quick", "paper", "none"), NOT_TIMED),
}
FAR = 2.0  # from the nearest measured setting, in factors of two: what is farther is named


@dataclass(frozen=True, kw_only=True)
class RunEstimate:
    """Seconds, GiB, and what of them no table covers."""

    memory: Memory
    start_s: float  # imports, loading, comparisons, checkpoints, figures
    evaluation_s: float
    rollout_s: float  # of a step
    train_s: float
    other_s: float
    steps: int
    disk_gib: float
    said: tuple[str, ...]

    @property
    def step_s(self) -> float:
        return self.rollout_s + self.train_s + self.other_s

    @property
    def run_s(self) -> float:
        return self.start_s + self.evaluation_s + self.steps * self.step_s


def estimate(work: Work, card: Card, rates: Rates, runs: Sequence[Measured], said: Iterable[str] = ()) -> RunEstimate:
    """Of one run on `card`, which shares it with `work.per_card` - 1 others like it."""
    needed, place = memory(work, card), place_of(work)
    sampling = corrected(rollout_s(work, card, rates), "rollout", place, runs)
    training = corrected(train_s(work, needed.micro_batches, card, rates), "train", place, runs)
    return RunEstimate(
        memory=needed,
        start_s=rates.start_s + work.checkpoints * checkpoint_bytes(work) * rates.save_s,
        evaluation_s=corrected(evaluation_s(work, card, rates), "rollout", place, runs),
        rollout_s=sampling,
        train_s=training,
        other_s=rates.other * work.completions,
        steps=work.steps,
        disk_gib=work.checkpoints * checkpoint_bytes(work) / GIB,
        said=(*said, *extrapolated(work, card, needed, place, runs)),
    )


def checkpoint_bytes(work: Work) -> int:
    """What is trained, in FP32, and Adam's moments."""
    return work.trained_weights * (4 + ADAM_BYTES)


def uncovered(config: Mapping[str, Any]) -> list[str]:
    """Options of a flat config that no committed run covers, in words: with any of them there is no estimate."""
    given = {key: config[key] for key in COVERED if key in config}
    return [f"{key}={value}: {COVERED[key][1]}" for key, value in given.items() if value not in COVERED[key][0]]


def extrapolated(work: Work, card: Card, needed: Memory, place: Sequence[float], runs: Sequence[Measured]) -> list[str]:
    """In words where an estimate leaves what was measured."""
    said = []
    if card.name != MEASURED:
        measured = CARDS[MEASURED]
        said.append(
            f"no committed run is of a card like {card.name}: the times are those of an {measured.model}, by "
            f"{card.bandwidth / measured.bandwidth:.2f} of its bandwidth and {card.flops / measured.flops:.2f} of its "
            "operations a second, as data sheets have them; launches take what they took there"
        )
    away, near = nearest(place, [run for run in runs if run.rollout is not None])
    if away > FAR:
        said.append(
            f"far from all that was timed: the nearest is {near.model} ({near.session}), a factor of {2**away:.0f} away"
        )
    if work.quant == "mxfp4":
        said.append("mxfp4 was not timed on a card in whole steps; it is counted as nvfp4 is")
    if work.rank == 0 and not any(run.place[-2] for run in runs):
        said.append("training of all weights was not timed")
    if not needed.fits:
        said.append(
            f"does not fit: one sequence of {math.ceil(work.prompt_tokens + work.limit):,} tokens needs more than the "
            f"{card.gib / work.per_card:.0f} GiB; train.recompute=selective or full, or fewer runs on a card"
        )
    return said
