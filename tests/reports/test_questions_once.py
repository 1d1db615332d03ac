"""Errors over questions: copies of a question count once, and one question tells of no error."""

from __future__ import annotations

import json
import math
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qerl_bench.commands import score
from qerl_bench.config import compose, spec
from qerl_bench.eval.base import Score, metrics_of
from qerl_bench.eval.majority import majority
from qerl_bench.eval.task import grade_rollouts, scores_of
from qerl_bench.eval.validation import log_validation, metrics_of_validation
from qerl_bench.probe.merging_cost import cost_table
from qerl_bench.task.base import held_out
from qerl_core.checks import ConfigError
from qerl_core.records import Prompt, Rollout
from qerl_core.statistics import over_questions, over_samples, paired_difference, pass_at_k
from qerl_studies.probes.page import interval

# --- copies: https://github.com/GanjinZero/math401-llm/issues/4 ------------------------------------------------------
# and https://github.com/UKGovernmentBEIS/inspect_ai/issues/1251 and 1113

QUESTION = "Tom has $3 \\times 4$ pens and gives 2 away. How many are left?"
COPIES = [
    QUESTION,
    QUESTION.upper().replace("\\TIMES", "\\times"),
    QUESTION.replace(" ", "  "),
    QUESTION.replace(" ", "\u00a0"),
    QUESTION.replace("pens and", "pens\nand"),
    QUESTION.replace("?", "").replace(". ", " "),
    QUESTION.replace("\\times", "×"),
    QUESTION.replace("\\times", "\\cdot"),
    QUESTION.replace("$3", "$\\displaystyle 3"),
    f"<p>{QUESTION}</p>",
    f"{QUESTION}\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
]
OTHERS = [QUESTION.replace("3", "5"), QUESTION.replace("\\times", "+"), QUESTION.replace("2 away", "-2 away")]


def task_of(tmp_path: Path, questions: list[str], answers: list[str] | None = None) -> list[str]:
    """The words of a task whose held-out questions these are; the answer to each is 10."""
    rows = [{"problem": one, "answer": "10" if answers is None else answers[i]} for i, one in enumerate(questions)]
    file = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"  # a file is read once
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return [
        "task=math500",
        "task.equality=numeric",
        "task.answer_format=hash",
        f"task.eval_file={file}",
    ]


def scored(tmp_path: Path, words: list[str], completions: list[dict[str, Any]]) -> dict[str, Any]:
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in completions), encoding="utf-8")
    score.main([*words, f"completions={tmp_path / 'c.jsonl'}", f"out={tmp_path / 'out'}"])
    return json.loads((tmp_path / "out" / "totals.json").read_text())


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_is_the_same_question(copy: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = spec(compose(task_of(tmp_path, [QUESTION, *OTHERS, copy])), "task")
    assert [prompt.id for prompt in held_out(task, None)] == [f"math500/test/{line}" for line in (1, 2, 3, 4)]
    assert task.copies() == {"math500/test/5": "math500/test/1"}
    assert "1 of 5 test questions" in caplog.text and "line 5 = line 1" in caplog.text


def test_other_questions_are_no_copies(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = spec(compose(task_of(tmp_path, [QUESTION, *OTHERS])), "task")
    assert len(held_out(task, None)) == 4 and task.copies() == {} and not caplog.text


def test_four_copies_of_a_file_have_the_error_of_one(tmp_path: Path) -> None:
    """Ten questions, half of them answered: 0.1667, and not half of it for the same ten once more."""
    ten = [QUESTION.replace("3", str(number)) for number in range(3, 13)]
    words = task_of(tmp_path, ten * 4)
    lines = [
        {"id": f"math500/test/{line}", "completion": "#### 10" if (line - 1) % 10 < 5 else "#### 11"}
        for line in range(1, 41)
    ]
    once, all_four = scored(tmp_path, words, lines[:10]), scored(tmp_path, words, lines)
    assert once["stderr"] == all_four["stderr"] == pytest.approx(math.sqrt(0.25 * 10 / 9 / 10))
    assert (all_four["questions"], all_four["completions"], all_four["unscored"]) == (10, 40, 0)
    assert once["accuracy"] == all_four["accuracy"] == 0.5 and all_four["stderr_sampling"] == 0


def test_a_copy_is_named_by_its_id_or_its_text(tmp_path: Path) -> None:
    words = task_of(tmp_path, [QUESTION, COPIES[1], *OTHERS])
    by_text = [{"question": COPIES[2], "completion": "#### 10"}, {"id": "math500/test/2", "completion": "#### 11"}]
    found = scored(tmp_path, words, by_text)
    assert (found["questions"], found["accuracy"]) == (1, 0.5)
    with pytest.raises(ConfigError, match=r"line 2: math500/test/2 is already completed on line 1"):
        scored(tmp_path, words, [by_text[1], by_text[1]])


def test_an_id_of_another_file_is_not_believed(tmp_path: Path) -> None:
    """Line numbers of a file in another order are ids of other questions; what is asked is beside them."""
    words, line = task_of(tmp_path, [QUESTION, *OTHERS]), {"id": "math500/test/1", "completion": "#### 10"}
    for copy in COPIES:
        assert scored(tmp_path, words, [line | {"question": copy}])["accuracy"] == 1.0
    for other in (*OTHERS, "", "7"):
        with pytest.raises(ConfigError, match=r"line 1: math500/test/1 is another question"):
            scored(tmp_path, words, [line | {"question": other}])


@pytest.mark.parametrize(
    "reason", ["stop", "eos_token", "stop_sequence", None, "length", "abort", "", 0, {"type": "length"}]
)
@pytest.mark.parametrize("said", [{}, {"finished": True}, {"finished": False}])
def test_a_server_says_how_a_completion_ended(tmp_path: Path, reason: object, said: dict[str, bool]) -> None:
    line = {"id": "math500/test/1", "completion": "#### 10", "finish_reason": reason} | said
    known = said or reason in ("stop", "eos_token", "stop_sequence", None, "length")
    with nullcontext() if known else pytest.raises(ConfigError, match=r"line 1: finish_reason must"):
        found = scored(tmp_path, task_of(tmp_path, [QUESTION]), [line])["accuracy"]
        assert found == said.get("finished", reason != "length")


def test_copies_with_two_answers_are_refused(tmp_path: Path) -> None:
    task = spec(compose(task_of(tmp_path, [QUESTION, COPIES[1]], ["10", "10.0"])), "task")
    assert len(held_out(task, None)) == 1
    task = spec(compose(task_of(tmp_path, [*OTHERS, QUESTION, COPIES[1]], ["1", "2", "3", "10", "11"])), "task")
    with pytest.raises(ConfigError, match=r"line 4 and line 5 .* '10' and '11'"):
        held_out(task, None)


def test_a_task_of_ones_own_that_asks_twice_is_refused() -> None:
    task = spec(compose(["task=arithmetic"]), "task")
    first = held_out(task, 2)
    asking = type("Own", (type(task),), {"eval_prompts": lambda self, count: [*first, replace(first[0], id="own/3")]})
    own = object.__new__(asking)
    own.__dict__.update(vars(task))
    evaluation = spec(compose(["task=arithmetic"]), "eval")
    with pytest.raises(ConfigError, match=re.escape(f"{first[0].id} and as own/3")):
        evaluation.check(own)
    evaluation.check(task)


# --- one question: https://github.com/openai/evals/issues/1834 -------------------------------------------------------
# and https://github.com/EleutherAI/lm-evaluation-harness/issues/3966

PROMPT = Prompt(id="gsm8k/test/1", messages=(), answer="7", question="?")


def rows(mode: str, texts: list[str]) -> list[dict[str, Any]]:
    made = [
        Rollout(
            **{"prompt": PROMPT, "sample": sample, "prompt_ids": [1], "token_ids": [2], "logprobs": [0.0]},
            **{"entropies": [0.0], "text": text, "finished": True},
        )
        for sample, text in enumerate(texts)
    ]
    return grade_rollouts(spec(compose(["task=gsm8k", "task.answer_format=hash"]), "task"), made, mode)


def test_no_estimate_over_questions_has_an_error_from_one() -> None:
    estimates = [
        over_questions([1.0]),
        over_samples([[1.0]]),
        over_samples([[1.0, 0.0]]),
        over_samples([[1.0, 1.0]], [0.0]),
        paired_difference([[0.0]], [[1.0]]),
        paired_difference([[0.0, 1.0]], [[1.0, 1.0]]),
        paired_difference([[0.0, 1.0]], [[1.0]]),
        pass_at_k([[1.0, 0.0]], 1),
        majority([["7", "7"]], [[1.0, 1.0]]),
    ]
    assert all(math.isnan(one.stderr) and one.known_stderr is None and one.n == 1 for one in estimates)
    assert all(math.isnan(one.low) and math.isnan(one.p_above(0.0)) and not one.identical for one in estimates)
    assert all(one.stderr_questions is None for one in estimates)
    assert over_samples([[1.0, 0.0]]).stderr_sampling == pytest.approx(0.5)  # other samples of the same question
    assert over_questions([1.0, 1.0]).stderr == 0.0  # two questions, both right


def test_an_evaluation_of_one_question_writes_no_error(caplog: pytest.LogCaptureFixture) -> None:
    scores = scores_of(rows("sampled", ["#### 7", "#### 8"]), "sampled", 2, 2)
    assert len(scores) == 4 and all(one.stderr is None and "+-" not in str(one) for one in scores)
    metrics = metrics_of(scores)
    assert [name for name in metrics if name.endswith("_stderr")] == [] and metrics["eval/accuracy_sampled"] == 0.5
    json.dumps([vars(one) for one in scores], allow_nan=False)
    two = Score(metric="eval/x", value=0.5, stderr=0.25, n=2)
    assert "+- 0.250" in str(two) and metrics_of([two])["eval/x_stderr"] == 0.25
    found = metrics_of_validation(rows("greedy", ["#### 7"]))
    assert found["validation/accuracy_greedy"] == 1.0 and "validation/accuracy_greedy_stderr" not in found
    silent: Any = type("Silent", (), {"log": lambda self, *words: None})()
    caplog.set_level("INFO")
    log_validation(silent, silent, 3, found)
    assert "accuracy_greedy 1.000" in caplog.text and "+-" not in caplog.text


def test_pages_and_commands_show_no_interval_of_one_question(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert interval(over_samples([[1.0]]), ".1f") == "100.0" and interval(over_samples([[1.0], [0.0]])).count("[") == 1
    cost = {"accuracy": {"apart": 1.0, "merged": 0.0, "base": 0.0}, "kl": {"merged": 0.1, "base": 0.2}}
    gap = {name: {"value": -1.0, "stderr": None} for name in ("merged", "base")}
    assert "+-" not in cost_table({**cost, "difference": gap, "questions": 1, "samples": 1, "update_kept": 0.5})
    found = scored(tmp_path, task_of(tmp_path, [QUESTION, *OTHERS]), [{"question": QUESTION, "completion": "#### 10"}])
    assert found["stderr"] is None and found["accuracy"] == 1.0
    said = capsys.readouterr().out
    assert "accuracy 1.0000," in said and "+-" not in said
