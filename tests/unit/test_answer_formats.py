"""Which formats a base answers in, what is told of it before the first step, and accuracy by the last number."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from qerl_bench.commands.run import run_experiment
from qerl_bench.config import build, compose, spec
from qerl_bench.eval import formats
from qerl_bench.eval.base import Evaluation
from qerl_bench.eval.task import grade_rollouts, scores_of
from qerl_bench.task.grader.last_number import last_number_is
from qerl_core.records import Prompt, Rollout
from qerl_core.rundir.run_dir import RunDir

# gold, completion, whether its last number is the gold answer
LAST = [
    ("18", "2 * 9 = 18.", True),
    ("18", "<answer>18</answer>", True),
    ("18", "18 apples in 3 days", False),
    ("18", "He pays $18.00", True),
    ("18", "**18**%", True),
    ("1000", "\\boxed{1{,}000}", True),
    ("1234567", "1,234,567 apples", True),
    ("5", "one of 3,4,5", True),
    ("0.5", "about .5 of it", True),
    ("-5", "x = -5", True),
    ("-5", "x = \u22125", True),
    ("5", "10-5", True),
    ("5", "(2+3)-5", True),
    ("3", "no number", False),
    ("3", "", False),
    ("3", "3" + "1" * 5000, False),
    ("3", "\u0663", False),
    ("x", "3", None),
    ("\\frac{x}{2}", "2", None),
]


@pytest.mark.parametrize(("gold", "completion", "right"), LAST)
def test_the_last_number(gold: str, completion: str, right: bool | None) -> None:
    assert last_number_is(gold, completion, finished=True) is right
    assert last_number_is(gold, completion, finished=False) is (None if right is None else False)


# A model that always writes \boxed{}, asked for tags: of ten answers six are right, one is cut off, one has no mark.
BOXED = [*["So \\boxed{7}"] * 5, *["So \\boxed{8}"] * 2, "\\boxed{7} or \\boxed{8}: 9", "It is 7", "1 2 3 and"]
LOOP = "and so on and on " * 9


def answers(texts: list[str], cut: int = 1) -> list[formats.Answer]:
    """Of the question whose answer is 7; the last `cut` are cut off."""
    prompt = Prompt(id="gsm8k/test/1", messages=(), answer="7")
    return [(prompt, text, number < len(texts) - cut) for number, text in enumerate(texts)]


def test_formats_are_counted_as_each_of_them_would_be_graded() -> None:
    found = formats.formats_of(spec(compose(["task=gsm8k"]), "task"), answers(BOXED))
    assert found["formats"] == {
        **{name: {"found": 0.0, "right": 0.0} for name in ("tags", "hash", "colon")},
        **{name: {"found": 0.7, "right": 0.5} for name in ("boxed", "auto")},
    }
    shares = {"lenient": 0.6, "truncated": 0.1, "repeating": 0.0, "completions": 10}
    assert found == {**found, **shares, "answer_format": "tags"}


@pytest.mark.parametrize(
    ("texts", "cut", "asked", "options"),
    [
        (BOXED, 1, "tags", {"task.answer_format": "boxed"}),
        (BOXED, 1, "boxed", {}),
        (BOXED, 1, "auto", {}),
        (BOXED, 2, "boxed", {"task.max_completion_tokens": 800}),
        (BOXED, 9, "boxed", {"task.max_completion_tokens": 1600}),
        ([*BOXED[:-2], LOOP, LOOP], 2, "boxed", {}),  # which would not end at a larger limit either
        (["\\boxed{8}"] * 9, 0, "hash", {"task.answer_format": "boxed"}),  # wrong, but read
        (["\\boxed{7}", "#### 7", "A: 7", "x"] * 3, 0, "tags", {"task.answer_format": "auto"}),
        (["I do not know"] * 5, 0, "tags", {}),
        (["It is 7"] * 5, 0, "tags", {"task.instruction": "suffix"}),  # right, but not marked
    ],
)
def test_what_to_set(texts: list[str], cut: int, asked: str, options: dict[str, Any]) -> None:
    task = spec(compose(["task=gsm8k", f"task.answer_format={asked}"]), "task")
    found = formats.formats_of(task, answers(texts, cut)) | {"max_tokens": 400, "where": "step 0"}
    assert formats.advice(found) == options
    said = "; ".join(formats.doubts(found | {"advice": options}))
    assert all(f"{key}={value}" in said for key, value in options.items()) and (not options) == ("try" not in said)
    assert ("400 tokens" in said) == (cut > 1) and ("repeat" in said) == (LOOP in texts)


def evaluation(texts: list[str], task: Any, cut: int = 1) -> Evaluation:
    rollouts = [
        Rollout(
            **{"prompt": prompt, "sample": 0, "prompt_ids": [1], "token_ids": [2], "logprobs": [0.0]},
            **{"entropies": [0.0], "text": text, "finished": finished},
        )
        for prompt, text, finished in answers(texts, cut)
    ]
    rows = grade_rollouts(task, rollouts, "sampled")
    return Evaluation(scores=scores_of(rows, "sampled", 1, 1), samples=rows, settings={"max_tokens": 400})


def test_later_evaluations_warn_of_a_gap_and_of_cuts(caplog: pytest.LogCaptureFixture) -> None:
    for words, texts, cut, said in (
        ("tags", BOXED, 1, ["0.0%", "60.0%", "task.answer_format=tags"]),
        ("boxed", BOXED, 1, ["50.0%", "60.0%"]),
        ("boxed", ["\\boxed{7}"] * 10, 0, []),
        ("boxed", ["\\boxed{7}"] * 4, 1, ["25% are cut off at 400 tokens"]),
    ):
        caplog.clear()
        task = spec(compose(["task=gsm8k", f"task.answer_format={words}"]), "task")
        formats.warn(task, evaluation(texts, task, cut), "step 60", 400)
        assert len(caplog.messages) == bool(said) and all(part in caplog.text for part in said), (words, texts)
    caplog.clear()
    formats.warn(spec(compose(["task=even_characters"]), "task"), Evaluation(), "step 60", 400)
    assert not caplog.messages


WORDS = ("steps=1", "eval.questions=4", "eval.samples=2", "task.max_completion_tokens=12")


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize(
    ("words", "where", "count"),
    [
        (("task=arithmetic",), "step 0, sampled", 8),
        (("task=arithmetic", "eval=none", "rollout.prompts_per_step=3"), "rollouts of step 1", 12),
        (("task=even_characters",), None, 0),
    ],
)
def test_a_run_says_it_before_its_first_step(
    words: tuple[str, ...],
    where: str | None,
    count: int,
    tmp_path: Path,
    make_config: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    own = [word for word in WORDS if "eval=none" not in words or not word.startswith("eval.")]
    cfg = make_config(*own, *words, "rollout.group_size=4", f"root={tmp_path}", "name=a")
    caplog.set_level(logging.INFO)
    run_experiment(build(cfg), cfg)
    first = build(cfg).task.train_prompts(1, cfg.rollout.prompts_per_step, cfg.seed)[0]
    assert (tmp_path / "runs" / "a" / "prompt.txt").read_text().strip() == first.messages[-1]["content"].strip()
    file = tmp_path / "runs" / "a" / formats.FILE
    assert file.exists() == (where is not None) == (f"formats of {count} answers" in caplog.text)
    if where is None:
        return
    found = json.loads(file.read_text())
    assert (found["where"], found["completions"], found["max_tokens"]) == (where, count, 12)
    assert found["truncated"] > 0.1 and "cut off at 12 tokens" in caplog.text
    assert {*found["formats"]} == {"tags", "hash", "boxed", "colon", "auto"}
    if where.startswith("step 0"):
        rows = pd.read_parquet(file.parent / "samples.parquet").query("step == 0 and mode == 'sampled'")
        assert found["lenient"] == rows["lenient"].mean()
        assert found["formats"]["tags"]["right"] == rows["correct"].mean()
        assert found["truncated"] == 1 - rows["finished"].mean()


def test_lenient_accuracy_of_an_older_evaluation_is_left_out(tmp_path: Path, make_config: Callable[..., Any]) -> None:
    """A run that was begun before samples had the column, and is continued after."""
    from qerl_bench.eval.record import record_evaluation

    task = spec(compose(["task=gsm8k", "task.answer_format=boxed"]), "task")
    new = evaluation(BOXED[:1] * 2, task)
    old = Evaluation(samples=[{k: v for k, v in row.items() if k != "lenient"} for row in new.samples])
    with RunDir(tmp_path, make_config()) as run:
        for before, gains in ((old, ["eval/gain_sampled"]), (new, ["eval/gain_sampled", "eval/gain_lenient_sampled"])):
            record_evaluation(run, "gsm8k", 0, Evaluation(scores=new.scores, samples=before.samples))
            scores = record_evaluation(run, "gsm8k", 2, new)
            assert [one.metric for one in scores if "gain" in one.metric] == gains
