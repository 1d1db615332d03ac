"""Dynamic sampling: which groups are trained on, when sampling ends, and what happens if nothing can be learnt."""

from __future__ import annotations

import random
import zlib
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from qerl_bench.aqn.injector import NoiseReport
from qerl_bench.experiment import collect_rollouts
from qerl_bench.reward.task import TaskReward
from qerl_bench.train.batch import rollout_batch
from qerl_core.checks import TrainingStopped
from qerl_core.metrics.compute import LOOP_WINDOW, garbled
from qerl_core.process.device import PhaseTimer
from qerl_core.records import Prompt, Reward, Rollout

PROMPT = Prompt(id="p", messages=(), answer="1")


GOOD, BAD, WON = (1.0, 0.0), (0.0, 0.0), (1.2, 1.2)  # the rewards of a group


class Scripted:
    """Experiment, policy and engine of a step whose rounds give groups of these rewards, without a model."""

    name = "scripted"

    def __init__(self, *rounds: list[tuple[float, float]], max_rounds: int, on_no_signal: str = "stop") -> None:
        self.algo = SimpleNamespace(max_resampling_rounds=max_rounds, on_no_signal=on_no_signal)
        self.rollout = SimpleNamespace(prompts_per_step=len(rounds[0]), group_size=2, temperature=1.0)
        self.noise = SimpleNamespace(draws=lambda prompts, drawn: [(0, prompts)])
        self.task, self.seed, self.max_completion_tokens = self, 0, 1
        self.reward = TaskReward(name="task")
        self.controller, self.rounds, self.totals = self, list(rounds), {}

    def train_prompts(self, step: int, count: int, seed: int) -> list[Prompt]:
        groups = self.rounds.pop(0)
        prompts = [Prompt(id=f"{len(self.rounds)}/{i}", messages=(), answer="") for i in range(len(groups))]
        self.totals |= {prompt.id: totals for prompt, totals in zip(prompts, groups, strict=True)}
        return prompts

    def generate(self, prompts: list[Prompt], sampling: Any) -> list[Rollout]:
        return [replace(_rollout("", [0]), prompt=prompt, sample=i) for prompt in prompts for i in range(2)]

    def rewards(self, rollouts: list[Rollout]) -> list[Reward]:
        totals = [self.totals[rollout.prompt.id][rollout.sample] for rollout in rollouts]
        return [Reward(total=total, correct=False) for total in totals]

    def collect(self) -> tuple[list[tuple[float, ...]], int, int]:
        """Rewards of the groups to train on, the number of groups sampled, and the number of refills."""
        report = NoiseReport(0.0, 0.0, 0, 0.0)
        engine = SimpleNamespace(sync=lambda prompts: {}, generate=self.generate, sleep=dict)
        policy = SimpleNamespace(noise=SimpleNamespace(for_rollout=lambda step, draw: nullcontext(report)))
        step: tuple[Any, ...] = (self, policy, engine, 1, PhaseTimer("cpu"))
        kept, sampled, step_metrics = collect_rollouts(*step)
        totals = [tuple(reward.total for reward in group.rewards) for group in kept]
        return totals, len(sampled), int(step_metrics["dynamic/refills"])


def test_without_refills_every_group_is_kept() -> None:
    assert Scripted([BAD, GOOD, BAD], max_rounds=0).collect() == ([BAD, GOOD, BAD], 3, 0)


def test_sampling_ends_as_soon_as_there_are_enough() -> None:
    step = Scripted([GOOD, BAD], [GOOD, GOOD], [GOOD, GOOD], max_rounds=5)
    assert step.collect() == ([GOOD, GOOD], 4, 1)
    assert len(step.rounds) == 1


def test_refills_are_capped_and_fewer_groups_are_trained_on() -> None:
    step = Scripted([GOOD, BAD], [BAD, BAD], [WON, BAD], [GOOD, GOOD], max_rounds=2)
    assert step.collect() == ([GOOD], 6, 2)


def test_a_task_without_more_prompts_ends_it_too() -> None:
    assert Scripted([GOOD, BAD], [], max_rounds=9).collect() == ([GOOD], 2, 0)


def test_a_step_without_any_signal_stops_the_run_and_says_why() -> None:
    says = r"4 groups, sampled in 2 rounds.*rewards: 0, 1\.2.*algo\.on_no_signal=continue"
    with pytest.raises(TrainingStopped, match=says):
        Scripted([BAD, WON], [BAD, BAD], max_rounds=1).collect()


def test_or_goes_on_with_the_first_round_if_asked_to() -> None:
    step = Scripted([BAD, WON], [BAD, BAD], max_rounds=1, on_no_signal="continue")
    assert step.collect() == ([BAD, WON], 4, 1)


def test_refills_bring_new_prompts_and_every_completion_is_measured(make_experiment: Any, make_policy: Any) -> None:
    """The whole step, with rewards that give one group in four a signal, by the text of its prompt."""
    experiment = make_experiment(
        "quant=nvfp4", "algo=dapo", "algo.max_resampling_rounds=6", "rollout.prompts_per_step=3"
    )
    policy = make_policy()
    asked: list[str] = []

    class Task:
        name = "one in four"
        max_completion_tokens = 6

        def check_with(self, *options: Any) -> None:
            """Suits every experiment."""

        def train_prompts(self, step: int, count: int, seed: int) -> list[Prompt]:
            prompts = experiment.task.train_prompts(step, count, seed)
            asked.extend(prompt.id for prompt in prompts)
            return prompts

        def rewards(self, rollouts: list[Rollout]) -> list[Reward]:
            return [self.reward(rollout.prompt, rollout.text) for rollout in rollouts]

        def reward(self, prompt: Prompt, text: str, finished: bool = True) -> Reward:
            differs = zlib.crc32(prompt.id.encode()) % 4 == 0
            return Reward(total=float(zlib.crc32(text.encode()) % 97) if differs else 0.5, correct=False)

    dapo = replace(experiment, task=Task())
    engine = experiment.engine.build(policy)
    groups, _, step_metrics = collect_rollouts(dapo, policy, engine, 1, PhaseTimer("cpu"))
    prompt_ids = list(dict.fromkeys(asked))
    signals = [zlib.crc32(prompt_id.encode()) % 4 == 0 for prompt_id in prompt_ids]
    assert step_metrics["dynamic/refills"] == len(asked) // 3 - 1 >= 1
    assert step_metrics["dynamic/groups_kept"] == len(groups) == min(3, sum(signals)) >= 1
    assert step_metrics["reward/frac_zero_std"] == pytest.approx(1 - sum(signals) / len(prompt_ids))  # of all groups
    batch = rollout_batch(groups, dapo.algo, policy)
    assert len(batch.lengths) == len(groups) * 4 and (batch.advantages != 0).any()
    again = collect_rollouts(dapo, policy, engine, 1, PhaseTimer("cpu"))
    assert (again[0], again[2]) == (groups, step_metrics)  # a function of seed and step


# --- garbled output --------------------------------------------------------------------------------------------------


def _rollout(text: str, ids: list[int] | None = None, finished: bool = True) -> Rollout:
    ids = list(range(len(text))) if ids is None else ids
    numbers = [0.0] * len(ids)
    return Rollout(
        prompt=PROMPT,
        sample=0,
        prompt_ids=[],
        token_ids=ids,
        logprobs=numbers,
        entropies=numbers,
        text=text,
        finished=finished,
    )


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("<think>1+1=2</think><answer>2</answer>", False),
        ("2", False),
        ("", False),
        ("<answer>2</answer>", False),
        ("<think>1+1=2<answer>2</answer>", True),
        ("</think>1<think>", True),
        ("<think>a</think><think>b</think>", True),
        ("<answer>2", True),
        ("2</answer>", True),
    ],
)
def test_broken_tags(text: str, broken: bool) -> None:
    assert garbled(_rollout(text)) == broken
    assert not garbled(_rollout(text, finished=False))  # cut at the limit: truncated, which is another metric


def test_loops() -> None:
    period = [1, 2, 3, 4, 5]
    assert garbled(_rollout("x", period * 8))
    assert garbled(_rollout("x", [7] * (4 * LOOP_WINDOW), finished=False))
    assert not garbled(_rollout("x", list(range(100))))
    assert not garbled(_rollout("x", list(range(60)) + list(range(40))))  # 33 of 93 windows seen before
    assert not garbled(_rollout("x", [7] * LOOP_WINDOW))  # too short to tell


def test_a_completion_repeats_itself_if_most_of_its_windows_occurred_before() -> None:
    draw, found = random.Random(0), []
    for _ in range(300):
        few = [draw.randrange(draw.choice([1, 2, 9])) for _ in range(draw.choice([6, 14, 15, 40]))]
        ids = draw.choice([few, few[:5] * draw.randrange(2, 9), [*range(20), *few]])
        windows = [ids[i : i + LOOP_WINDOW] for i in range(len(ids) - LOOP_WINDOW + 1)]
        repeats = sum(window in windows[:i] for i, window in enumerate(windows))
        found.append(garbled(_rollout("x", ids)))
        assert found[-1] == (len(windows) >= LOOP_WINDOW and repeats > len(windows) / 2), ids
    assert 20 < sum(found) < 200
