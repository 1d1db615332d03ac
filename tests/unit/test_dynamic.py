"""Dynamic sampling: which groups are trained on, when sampling ends, and what happens if nothing can be learnt."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from qerl_bench.algo.dynamic import fill
from qerl_bench.checks import TrainingStopped
from qerl_bench.device import PhaseTimer
from qerl_bench.experiment import sampled_batch
from qerl_bench.metrics import LOOP, garbled
from qerl_bench.records import Group, Prompt, Reward, Rollout

PROMPT = Prompt(id="p", messages=(), answer="1")


def _group(*totals: float) -> Group:
    return Group(rollouts=[], rewards=[Reward(total=total, correct=False) for total in totals])


GOOD, BAD, WON = _group(1.0, 0.0), _group(0.0, 0.0), _group(1.2, 1.2)


def _algo(max_resampling_rounds: int, on_no_signal: str = "stop") -> Any:
    return SimpleNamespace(max_resampling_rounds=max_resampling_rounds, on_no_signal=on_no_signal)


def _sampler(*rounds: list[Group]) -> Callable[[int], list[Group]]:
    asked: list[int] = []

    def sample(refill: int) -> list[Group]:
        asked.append(refill)
        return rounds[refill]

    sample.asked = asked  # type: ignore[attr-defined]
    return sample


def test_without_refills_every_group_is_kept() -> None:
    assert fill(_sampler([BAD, GOOD, BAD]), _algo(0), 3) == ([BAD, GOOD, BAD], [BAD, GOOD, BAD], 0)


def test_sampling_ends_as_soon_as_there_are_enough() -> None:
    sample = _sampler([GOOD, BAD], [GOOD, GOOD], [GOOD, GOOD])
    kept, sampled, refills = fill(sample, _algo(5), 2)
    assert (kept, refills) == ([GOOD, GOOD], 1) and len(sampled) == 4
    assert sample.asked == [0, 1]  # type: ignore[attr-defined]


def test_refills_are_capped_and_fewer_groups_are_trained_on() -> None:
    kept, sampled, refills = fill(_sampler([GOOD, BAD], [BAD, BAD], [WON, BAD], [GOOD, GOOD]), _algo(2), 2)
    assert (kept, refills, len(sampled)) == ([GOOD], 2, 6)


def test_a_task_without_more_prompts_ends_it_too() -> None:
    kept, sampled, refills = fill(_sampler([GOOD, BAD], []), _algo(9), 2)
    assert (kept, refills, len(sampled)) == ([GOOD], 0, 2)


def test_a_step_without_any_signal_stops_the_run_and_says_why() -> None:
    with pytest.raises(TrainingStopped) as stopped:
        fill(_sampler([BAD, WON], [BAD, BAD]), _algo(1), 2)
    message = str(stopped.value)
    assert "all 4 groups, sampled in 2 rounds" in message and "rewards: 0, 1.2" in message
    assert "algo.on_no_signal=continue" in message


def test_or_goes_on_with_the_first_round_if_asked_to() -> None:
    assert fill(_sampler([BAD, WON], [BAD, BAD]), _algo(1, "continue"), 2)[0] == [BAD, WON]


def test_refills_bring_new_prompts_and_every_completion_is_measured(make_experiment: Any, make_policy: Any) -> None:
    """The whole step, with rewards that give one group in four a signal, by the text of its prompt."""
    experiment = make_experiment(
        "quant=nvfp4", "algo=dapo", "algo.max_resampling_rounds=6", "rollout.prompts_per_step=3"
    )
    policy = make_policy()
    asked: list[str] = []

    class Task:
        max_completion_tokens = 6

        def check_with(self, experiment: Any) -> None:
            """Suits every experiment."""

        def train_prompts(self, step: int, count: int, seed: int) -> list[Prompt]:
            prompts = experiment.task.train_prompts(step, count, seed)
            asked.extend(prompt.id for prompt in prompts)
            return prompts

        def rewards(self, rollouts: list[Rollout]) -> list[Reward]:
            return [self.reward(rollout.prompt, rollout.text) for rollout in rollouts]

        def reward(self, prompt: Prompt, text: str) -> Reward:
            teaches = zlib.crc32(prompt.id.encode()) % 4 == 0
            return Reward(total=float(zlib.crc32(text.encode()) % 97) if teaches else 0.5, correct=False)

    run: Any = SimpleNamespace(append=lambda name, rows: None)
    dapo = dataclasses.replace(experiment, task=Task())
    engine = experiment.engine.build(policy)
    batch, found = sampled_batch(dapo, policy, engine, run, 1, PhaseTimer("cpu"))
    seen = list(dict.fromkeys(asked))
    teaching = [zlib.crc32(prompt.encode()) % 4 == 0 for prompt in seen]
    assert found["dynamic/refills"] == len(asked) // 3 - 1 >= 1
    assert found["dynamic/groups_kept"] == min(3, sum(teaching)) >= 1
    assert len(batch.lengths) == found["dynamic/groups_kept"] * 4
    assert found["reward/frac_zero_std"] == pytest.approx(1 - sum(teaching) / len(seen))  # of all that was sampled
    assert (batch.advantages != 0).any()
    again, repeated = sampled_batch(dapo, policy, engine, run, 1, PhaseTimer("cpu"))
    assert repeated == found and again.input_ids.equal(batch.input_ids)  # a function of seed and step


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
    assert garbled(_rollout("x", [7] * (4 * LOOP), finished=False))
    assert not garbled(_rollout("x", list(range(100))))
    assert not garbled(_rollout("x", list(range(60)) + list(range(40))))  # 33 of 93 windows seen before
    assert not garbled(_rollout("x", [7] * LOOP))  # too short to tell
