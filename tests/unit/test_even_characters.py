"""task=even_characters: different even code points earn, questions do not overlap, and nothing is demonstrated."""

from __future__ import annotations

import pytest

from qerl_bench.config import build, compose, spec
from qerl_core.checks import ConfigError


@pytest.fixture(scope="module")
def task():
    return spec(compose(["task=even_characters"]), "task")


@pytest.mark.parametrize(
    ("completion", "share", "answer"),
    [
        ("bdf", 1.0, "even"),
        ("ace", 0.0, "odd"),
        ("ab", 0.5, "even"),
        ("\N{REPLACEMENT CHARACTER}bbc", 1 / 4, "odd"),
        ("\n" * 24, 1 / 24, "odd"),  # what random weights write greedily
    ],
)
def test_the_reward_is_the_share_of_even_characters(task, completion, share, answer):
    (prompt,) = task.eval_prompts(1)
    reward = task.reward(prompt, completion)
    assert (reward.total, reward.answer, reward.correct) == (pytest.approx(share), answer, answer == "even")


def test_an_empty_completion_has_no_answer(task):
    reward = task.reward(task.eval_prompts(1)[0], "")
    assert (reward.total, reward.answer, reward.correct) == (0.0, None, False)


def test_training_and_held_out_questions_differ_and_repeat(task):
    train = [task.train_prompts(step, 16, seed=5) for step in (1, 2)]
    assert train[0] != train[1] and train[0] == task.train_prompts(1, 16, seed=5) != task.train_prompts(1, 16, seed=6)
    held_out = task.eval_prompts(None)
    assert len(held_out) == 1024 and held_out[:8] == task.eval_prompts(8)
    assert not {p.question for step in train for p in step} & {p.question for p in held_out}


def test_any_tokenizer_can_write_the_prompt(task):
    (message,) = task.eval_prompts(1)[0].messages
    assert message["role"] == "rendered"
    (message,) = spec(compose(["task=even_characters", "task.template=chat"]), "task").eval_prompts(1)[0].messages
    assert message["role"] == "user"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algo=sft"], "task=even_characters .*sft"),
        (["task.template=jinja"], "task.template .*chat, plain, got 'jinja'"),
        (["task.max_completion_tokens=0"], "task.max_completion_tokens .*at least 1, got 0"),
    ],
)
def test_what_cannot_work_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        build(compose(["task=even_characters", *words]))
