"""reward=random: rewards that repeat, have their share of ones and know nothing of the answer; all else stays true."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from qerl_bench.commands.run import run_experiment
from qerl_bench.config import build
from qerl_bench.experiment import collect_rollouts
from qerl_bench.reward.random import RandomReward
from qerl_bench.reward.task import TaskReward
from qerl_bench.task.base import Task
from qerl_core.process.device import PhaseTimer
from qerl_core.records import Prompt, Reward, Rollout

GRADED = Reward(total=0.9, correct=True, parts={"correct": 1.0, "format": 0.5}, answer="4")
TASK: Task = SimpleNamespace(rewards=lambda rollouts: [GRADED] * len(rollouts))  # type: ignore[assignment]


def completion(number: int, text: str = "4") -> Rollout:
    prompt = Prompt(id=f"p{number // 8}", messages=(), answer="4")
    return Rollout(
        prompt=prompt, sample=number % 8, prompt_ids=[0], token_ids=[1], logprobs=[0.0], entropies=[0.0], text=text,
        finished=True,
    )  # fmt: skip


def totals(rollouts: list[Rollout], seed: int = 0, p: float = 0.3) -> list[float]:
    return [reward.total for reward in RandomReward(name="random", p=p).rewards(TASK, rollouts, seed)]


def test_the_share_of_ones_is_p_and_neighbors_are_independent() -> None:
    drawn = np.array(totals([completion(number) for number in range(8000)]))
    assert set(drawn) == {0.0, 1.0}
    assert drawn.mean() == pytest.approx(0.3, abs=3 * (0.21 / 8000) ** 0.5)
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.04


def test_a_reward_depends_on_seed_prompt_and_sample_alone() -> None:
    rollouts = [completion(number) for number in range(64)]
    drawn = totals(rollouts)
    assert totals(rollouts[::-1]) == drawn[::-1]
    assert totals([completion(number, text="wrong") for number in range(64)]) == drawn
    assert totals(rollouts, seed=1) != drawn


def test_what_the_grader_says_is_kept_beside_it() -> None:
    (reward,) = RandomReward(name="random", p=0.5).rewards(TASK, [completion(0)], 0)
    assert reward.total in (0.0, 1.0)
    assert (reward.correct, reward.parts, reward.answer) == (GRADED.correct, GRADED.parts, GRADED.answer)
    assert TaskReward(name="task").rewards(TASK, [completion(0)], 0) == [GRADED]


def test_each_step_draws_its_own_and_repeats_it(make_experiment: Callable[..., Any], make_policy: Any) -> None:
    experiment, policy = make_experiment("quant=nvfp4", "reward=random"), make_policy()
    engine = experiment.engine.build(policy)

    def rewards(step: int) -> list[float]:
        groups, _, _ = collect_rollouts(experiment, policy, engine, step, PhaseTimer("cpu"))
        return [reward.total for group in groups for reward in group.rewards]

    first = rewards(1)
    assert rewards(2) != first == rewards(1)
    assert set(first) == {0.0, 1.0}


def test_held_out_questions_are_still_graded(tmp_path: Path, make_config: Any, no_figures: None) -> None:
    answers = {}
    for name in ("task", "random"):
        cfg = make_config("task=even_characters", "steps=2", f"reward={name}", f"root={tmp_path}", f"name={name}")
        run_experiment(build(cfg), cfg)
        answers[name] = pd.read_parquet(tmp_path / "runs" / name / "samples.parquet")
    base, after = ({name: rows[rows["step"] == step] for name, rows in answers.items()} for step in (0, 2))
    pd.testing.assert_frame_equal(base["task"], base["random"])
    assert base["random"]["reward"].nunique() > 2  # shares of characters, not coins
    even = [sum(ord(one) % 2 == 0 for one in {*text}) / max(len(text), 1) for text in after["random"]["completion"]]
    assert after["random"]["reward"].to_numpy() == pytest.approx(even)
