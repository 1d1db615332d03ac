"""What is measured of a policy before training, for `qerl-bench probe` and for the probe of a study alike.

Answers at several temperatures, the KL to another weight format on the answers of either, and a curve over sizes of
noise. The other format is the first that was measured: its policy stays in memory, with a part of its answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pyarrow as pa

from qerl_bench.dose import curve, kl_to
from qerl_bench.engine.base import RolloutEngine
from qerl_bench.experiment_spec import Experiment
from qerl_bench.model.policy import Policy
from qerl_bench.probe.answers import AnswerSet, first, numbers, table
from qerl_bench.probe.drafting import drafting
from qerl_bench.probe.parts import Keep, anew, kept_answers
from qerl_bench.task.base import Task
from qerl_bench.train.spec import TrainSpec
from qerl_core.checks import require
from qerl_core.process.device import reset_peak
from qerl_core.process.progress import bar, phase
from qerl_core.records import Prompt, Rollout
from qerl_core.seeding import derive

KL_ANSWERS = 1_024  # that are scored by another policy, at most, of the first questions


@dataclass(frozen=True, kw_only=True)
class ProbePlan:
    """What to measure: `questions` of a `split`, `samples` answers each at `temperatures`, noise of `sigmas`.

    `prompts` x `draws` groups of answers measure a sigma. `draw` names the random numbers of all.
    """

    questions: int
    split: str
    samples: int
    temperatures: Sequence[float]
    sigmas: Sequence[float]
    prompts: int
    draws: range
    texts: int
    draw: str

    def prompts_of(self, task: Task) -> list[Prompt]:
        """The questions, the same in all formats: such as RL could draw, or the held-out ones."""
        if self.split == "held_out":
            return task.eval_prompts(self.questions)
        return training_questions(task, self.questions)


def training_questions(task: Task, count: int, option: str = "questions") -> list[Prompt]:
    """`count` questions such as RL could draw, each once. Raises ConfigError if the task stores fewer."""
    prompts = task.train_prompts(1, count, derive("probe"))
    twice = len({prompt.id for prompt in prompts}) < count  # of questions that are made, by chance
    stored = len(task.stored_prompts()) if twice else 0
    require(
        not stored,
        f"{option}={count}, and task={task.name} has {stored} training questions: one asked twice says nothing new, "
        f"so give {option}={stored} at most",
    )
    return prompts


@dataclass(kw_only=True)
class Reference:
    """The format that others are compared with, once it was measured: its policy and some of its answers."""

    train: TrainSpec | None = None
    policy: Policy | None = None
    rollouts: Sequence[Rollout] = ()

    def take(self, train: TrainSpec, policy: Policy, asked: AnswerSet) -> None:
        self.train, self.policy, self.rollouts = train, policy, scored(asked)


def measure(
    experiment: Experiment,
    policy: Policy,
    engine: RolloutEngine,
    plan: ProbePlan,
    reference: Reference,
    keep: Keep = anew,
    tell: Callable[[Sequence[AnswerSet]], None] = lambda asked: None,
) -> tuple[dict[str, Any], pa.Table]:
    """The numbers of this policy, and a row for each answer (`answers.SCHEMA`).

    It becomes the reference if there is none yet. `correct`, `samples` and `entropy` are those of temperature 1. `keep`
    has the parts that are known already; `tell` hears of all answers so far after each temperature.
    """
    started = keep("started", lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    reset_peak(policy.device.type)
    asked: list[AnswerSet] = []
    for t in plan.temperatures:
        asked.append(answers_of(experiment.task, engine, plan, keep, t, policy.device.type))
        tell(asked)
    (plain,) = (one for one in asked if one.temperature == 1)
    if reference.policy is None:
        reference.take(experiment.train, policy, plain)
    found = numbers(plain)
    result = {
        "correct": found["correct"],
        "samples": found["samples"],
        "entropy": found["entropy"],
        "temperatures": {f"{one.temperature:g}": numbers(one) for one in asked},
        "kl": keep("kl", lambda: kl_between(experiment.train, policy, plain, reference)),
        "draft": keep("draft", lambda: draft_of(experiment.train, policy, plain.samples, reference)),
        "curve": noise_curve(experiment, policy, engine, plan, keep),
        "norm_scale": policy.noise.median_scale(),
        "tokens_per_s": sum(one.tokens for one in asked) / sum(one.seconds for one in asked),
        "weights_gib": weights_gib(policy),
        **({} if policy.calibration is None else {"calibration": policy.calibration}),
        "memory_gib": max(one.peak_gib for one in asked if one.peak_gib is not None),
        "started": started,
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return result, table(asked, plan.texts)


def questions_scored(samples: int) -> int:
    """Of how many questions the answers are scored by another policy."""
    return max(1, KL_ANSWERS // samples)


def scored(asked: AnswerSet) -> list[Rollout]:
    return first(asked, questions_scored(asked.samples)).rollouts


def kl_between(train: TrainSpec, policy: Policy, plain: AnswerSet, reference: Reference) -> dict[str, float]:
    """KL in nats a token, as mismatch/kl: from this policy to the reference on answers of this policy (`own`), and from
    the reference to this policy on answers of the reference (`of_reference`); all at temperature 1.

    Of the reference itself both are what engine and training passes differ by.
    """
    assert reference.train is not None and reference.policy is not None
    with phase("scoring answers by the other format"):
        return {
            "own": kl_to(reference.train, 1.0, reference.policy, scored(plain)),
            "of_reference": kl_to(train, 1.0, policy, reference.rollouts),
        }


def draft_of(train: TrainSpec, policy: Policy, samples: int, reference: Reference) -> dict[str, list[float]]:
    """What this policy is worth as a draft of the reference, on answers of the reference."""
    assert reference.policy is not None
    return drafting(train, reference.policy, policy, reference.rollouts, samples)


def answers_of(
    task: Task, engine: RolloutEngine | None, plan: ProbePlan, keep: Keep, temperature: float, device: str
) -> AnswerSet:
    """The answers at a temperature; without an engine they must be known."""
    prompts, name = plan.prompts_of(task), f"temperature {temperature:g}"
    how = temperature, plan.samples, plan.draw
    return kept_answers(keep, name, task, engine, prompts, *how, device)


def noise_curve(
    experiment: Experiment, policy: Policy, engine: RolloutEngine, plan: ProbePlan, keep: Keep = anew
) -> list[dict[str, Any]]:
    """Entropy, KL and accuracy without noise and with each sigma, of equal random numbers; empty without sigmas."""
    prompts = experiment.task.train_prompts(1, plan.prompts, derive("dose"))
    at_one = replace(experiment, rollout=replace(experiment.rollout, temperature=1.0))

    def dose(sigma: float) -> dict[str, Any]:
        (one,) = curve(at_one, policy, engine, prompts, [sigma], plan.draws)
        return asdict(one)

    sigmas = [0.0, *plan.sigmas] if plan.sigmas else []
    return [
        keep(f"sigma {sigma!r}", partial(dose, sigma)) for sigma in bar(sigmas, "measuring noise", len(sigmas), "sizes")
    ]


def weights_gib(policy: Policy) -> float:
    """What the model's weights take, packed or not."""
    tensors = (*policy.model.parameters(), *policy.model.buffers())
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values()) / 2**30  # tied ones once
