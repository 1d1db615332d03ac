"""`qerl-bench score`: completions made elsewhere, graded line by line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qerl_bench.commands import score
from qerl_bench.config import compose, spec
from qerl_core.checks import ConfigError

TINY = Path(__file__).parents[1] / "assets" / "gsm8k_tiny.jsonl"
TASK = ("task=gsm8k", f"task.eval_file={TINY}")


def problems() -> list[dict[str, str]]:
    return [json.loads(line) for line in TINY.read_text(encoding="utf-8").splitlines()]


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return f"completions={path}"


def run(tmp_path: Path, *words: str) -> tuple[list[dict], dict]:
    score.main([*TASK, f"out={tmp_path / 'out'}", *words])
    lines = (tmp_path / "out" / "scores.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], json.loads((tmp_path / "out" / "totals.json").read_text())


def test_every_column_of_every_line_and_the_totals(tmp_path: Path) -> None:
    first, second, third, *_ = problems()
    gold = [problem["answer"].rpartition("####")[2].strip() for problem in (first, second, third)]
    file = write(
        tmp_path / "c.jsonl",
        {"id": "gsm8k/test/1", "completion": f"<think>a</think><answer>${gold[0]}.0</answer>"},
        {"question": second["question"].upper() + " ", "completion": f"I say <answer>{gold[1]}</answer>", "other": 1},
        {"id": "gsm8k/test/3", "completion": f"#### {gold[2]}"},
    )
    rows, totals = run(tmp_path, file)
    assert rows[0] == {
        **{"line": 1, "id": "gsm8k/test/1", "sample": 0, "gold": gold[0], "answer": gold[0]},
        **{"correct": 1.0, "format": 1.0, "reward": pytest.approx(1.2), "lenient": True},
    }
    assert [row["id"] for row in rows] == ["gsm8k/test/1", "gsm8k/test/2", "gsm8k/test/3"]
    assert [(row["correct"], row["format"]) for row in rows] == [(1.0, 1.0), (1.0, 0.0), (0.0, 0.0)]
    assert rows[2]["answer"] is None
    assert (totals["completions"], totals["questions"], totals["unscored"]) == (3, 3, len(problems()) - 3)
    assert totals["accuracy"] == pytest.approx(2 / 3)
    assert totals["stderr"] == pytest.approx(1 / 3)  # variance (2 * 1/9 + 4/9) / 2 = 1/3, over 3 questions
    assert totals["format_failed"] == pytest.approx(1 / 3)
    assert totals["means"] == pytest.approx({"correct": 2 / 3, "format": 1 / 3, "reward": 2.2 / 3})
    assert [row["lenient"] for row in rows] == [True] * 3 and totals["lenient"] == 1.0


def test_what_was_cut_off_has_no_last_number(tmp_path: Path) -> None:
    golds = [problem["answer"].rpartition("####")[2].strip() for problem in problems()[:2]]
    lines = [{"id": f"gsm8k/test/{line}", "completion": f"So {gold}"} for line, gold in enumerate(golds, start=1)]
    rows, totals = run(tmp_path, write(tmp_path / "c.jsonl", lines[0], lines[1] | {"finished": False}))
    assert [row["lenient"] for row in rows] == [True, False] and totals["lenient"] == 0.5
    with pytest.raises(ConfigError, match=r"line 1: finished must be true, or false .* got 'no'"):
        run(tmp_path, write(tmp_path / "d.jsonl", lines[0] | {"finished": "no"}))
    file, line = tmp_path / "c.csv", 'gsm8k/test/1,"So\n75",'
    file.write_text(f"id,completion,sample,finished,finish_reason\n{line}0,true,\n{line}1,False,\n{line}2,,length\n")
    rows, _ = run(tmp_path, f"completions={file}")
    assert [(row["line"], row["lenient"]) for row in rows] == [(2, True), (4, False), (6, False)]


def test_questions_are_found_with_the_instruction_line_that_is_cut_off(tmp_path: Path) -> None:
    line = "Please reason step by step, and put your final answer within \\boxed{}."
    stored = [{"problem": f"What is {i} + {i}?\n{line}", "answer": str(2 * i)} for i in range(3)]
    write(tmp_path / "held_out.jsonl", *stored)
    copied = [{"question": row["problem"], "completion": f"<answer>{row['answer']}</answer>"} for row in stored]
    file = write(tmp_path / "c.jsonl", *copied, {"question": "What is 2 + 2?", "completion": "", "sample": 1})
    rows, totals = run(tmp_path, file, "task=math500", f"task.eval_file={tmp_path / 'held_out.jsonl'}")
    assert [row["id"] for row in rows] == [f"math500/test/{i}" for i in (1, 2, 3, 3)]
    assert [row["correct"] for row in rows] == [1.0, 1.0, 1.0, 0.0] and totals["unscored"] == 0


@pytest.mark.parametrize("form", ["#### {}", "A: {}", "So $\\boxed{{{}}}$.", "<answer>{}</answer>"])
def test_any_format_with_auto(tmp_path: Path, form: str) -> None:
    golds = [problem["answer"].rpartition("####")[2].strip() for problem in problems()]
    lines = [{"id": f"gsm8k/test/{i}", "completion": form.format(gold)} for i, gold in enumerate(golds, start=1)]
    rows, totals = run(tmp_path, write(tmp_path / "c.jsonl", *lines), "task.answer_format=auto")
    assert totals["accuracy"] == 1
    assert all(row["answer"] is not None for row in rows)


def test_several_samples_of_a_question(tmp_path: Path) -> None:
    """Accuracies 1/2 and 0: the mean is over questions, however many samples each has."""
    gold = problems()[0]["answer"].rpartition("####")[2].strip()
    lines = [
        {"id": "gsm8k/test/1", "sample": 0, "completion": f"#### {gold}"},
        {"id": "gsm8k/test/1", "sample": 1, "completion": "#### none"},
        *({"id": "gsm8k/test/2", "sample": i, "completion": ""} for i in range(4)),
    ]
    _, totals = run(tmp_path, write(tmp_path / "c.jsonl", *lines), "task.answer_format=hash")
    assert totals["accuracy"] == pytest.approx(0.25)
    assert totals["stderr"] == pytest.approx(0.25)
    assert totals["stderr_sampling"] == pytest.approx((0.5 / 2 / 2 / 2) ** 0.5)


GOOD = {"id": "gsm8k/test/1", "completion": "x"}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            [GOOD, {"id": "gsm8k/test/999", "completion": "x"}],
            r"line 2: id 'gsm8k/test/999' is none of the 12 .*ids are",
        ),
        ([{"question": "Why?", "completion": "x"}], r"line 1: question 'Why\?' is none of the 12"),
        ([{"completion": "x"}], r"line 1: the key 'id' or 'question' .* the line has 'completion'"),
        (
            [GOOD, {"id": "gsm8k/test/2"}],
            r"line 2: the key 'completion' .* the line has 'id'",
        ),
        ([{"id": "gsm8k/test/2", "completion": 18}], r"line 1: the key 'completion'"),
        ([GOOD, GOOD], r"line 2: gsm8k/test/1 .* line 1.*different 'sample'"),
        ([GOOD | {"sample": "a"}], r"line 1: sample must be a whole number from 0, got 'a'"),
        ([GOOD, [1]], r"line 2: a JSON object"),
        ([], "is empty"),
    ],
)
def test_what_cannot_be_scored_is_refused_with_its_line(tmp_path: Path, lines: list[object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, write(tmp_path / "c.jsonl", *lines))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["task=gsm8k"], "completions= and out= must be given; usage"),
        (["task=gsm8k", "out=x", "completions"], "'completions' is not key=value; usage"),
        (["out=x", "out=y", "completions=z"], "out= is given twice"),
        (["quant=nf4", "out=x", "completions=z"], "not on quant=nf4"),
        ([*TASK, "out=x", "completions=no/such/file"], "cannot read the data file no/such/file"),
    ],
)
def test_the_command_line_is_checked(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        score.main(words)


def test_questions_that_differ_in_signs_alone_are_told_apart(tmp_path: Path) -> None:
    """11+5-9 and 11-5+9 are the same letters and digits, with different answers."""
    lines = [
        {"question": "11+5-9=?", "completion": "<answer>7</answer>"},
        {"question": "11-5+9=?", "completion": "<answer>7</answer>"},
    ]
    score.main(["task=arithmetic", f"out={tmp_path / 'out'}", write(tmp_path / "c.jsonl", *lines)])
    rows = [json.loads(line) for line in (tmp_path / "out" / "scores.jsonl").read_text().splitlines()]
    assert [(row["gold"], row["correct"]) for row in rows] == [("7", 1.0), ("15", 0.0)]
    unknown = write(tmp_path / "d.jsonl", {"question": "11 5 9", "completion": "<answer>7</answer>"})
    with pytest.raises(ConfigError, match=r"line 1: question '11 5 9' is none of .* 'arithmetic/"):
        score.main(["task=arithmetic", f"out={tmp_path / 'none'}", unknown])


def test_part_of_a_score_is_not_right(tmp_path: Path) -> None:
    task = spec(compose(list(TASK)), "task")
    rows = [{"id": "a", "answer": "x", "correct": 1.0}, {"id": "b", "answer": "y", "correct": 0.65}]
    found = score.totals(task, rows)
    assert found["accuracy"] == 0.5
    assert found["means"] == {"correct": pytest.approx(0.825)}


def test_an_option_may_be_added_to_the_task(tmp_path: Path) -> None:
    """task.options of task=reasoning_gym is given so."""
    with pytest.raises(ConfigError, match="cannot read the data file no/such/file"):
        score.main(["task=arithmetic", "++task.max_start=30", "out=x", "completions=no/such/file"])


def test_as_a_command_without_torch(tmp_path: Path) -> None:
    file = write(tmp_path / "c.jsonl", {"id": "gsm8k/test/1", "completion": "#### 1"})
    command = [sys.executable, "-X", "importtime", "-m", "qerl_bench", "score", *TASK, file, f"out={tmp_path / 'o'}"]
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "1 completions of 1 questions, 11 of the task without one" in done.stdout
    assert " torch\n" not in done.stderr and " transformers\n" not in done.stderr
    refused = subprocess.run([*command[:6], "task=gsm8k"], capture_output=True, text=True, env=environment)
    assert refused.returncode == 2
    assert "error: completions= and out= must be given" in refused.stderr
