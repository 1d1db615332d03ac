"""Leaks are told by what a question asks: operators, signs and decimal points, and the rows that a run trained on."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from qerl_bench.commands.eval import main
from qerl_bench.commands.run import run_experiment
from qerl_bench.config import build as build_experiment
from qerl_bench.config import compose
from qerl_bench.config import spec as build_spec
from qerl_bench.task.question_form import normalize_question
from qerl_bench.task.sources import _rows_of
from qerl_core.checks import ConfigError

# --- different sums count as one question: https://github.com/GanjinZero/math401-llm/issues/4 and its data ------------

OTHERS = [
    # MATH 401
    *("5+2=", "5-2=", "5*2=", "5/2=", "5^2=", "52=", "5.2=", "5,2="),
    *("1.5", "1/5", "1,5", "15", "1:5", "-1.5", "1-5", "1|5", ".15", "0.15"),
    *("3!=", "3=", "-3=", "+3=", "3%=", "√3=", "3√=", "|3|=", "|-3|="),
    # the same words, other signs
    *("Is x < 3?", "Is x > 3?", "Is x = 3?", "Is x ≤ 3?", "Is x ≠ 3?", "Is x ≈ 3?", "Is x ± 3?", "Is x 3?"),
    *("(2+3)*4", "2+3*4", "2+(3*4)", "2^{3+1}", "2^3+1", "[2,3)", "(2,3]", "(2,3)", "2,3"),
    *("x²", "x2", "x³", "x^{-2}", "3½", "31/2", "a/b", "ab", "a b", "a*b"),
    *(r"\frac{1}{23}", r"\frac{12}{3}", r"\frac{1.2}{3}", r"\sqrt{x+1}", r"\sqrt{x}+1"),
    *("from -5 to 3", "from 5 to 3", "from 5 to -3", "pay $.5", "pay $5"),
]


def test_questions_that_ask_something_else_are_not_equal() -> None:
    forms = {text: normalize_question(text) for text in OTHERS}
    assert [pair for pair in combinations(OTHERS, 2) if forms[pair[0]] == forms[pair[1]]] == []


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("What is 2+2?", "what is  2 + 2"),
        ("What is 2 - 2?", "what is 2−2"),  # a minus sign of Unicode
        ("What is **2** and *3*?", "What is 2 and 3"),
        ("# Task\n* 3 eggs\n- 2 cups\n> 1 pan", "Task: 3 eggs, 2 cups, 1 pan."),
        ("Tom's well-known uncle/aunt, 42, sings!", "toms well known uncle aunt 42 sings".replace("toms", "tom s")),
        ("It costs $5. He (a man of 30) pays.", "It costs 5; he, a man of 30, pays"),
        (r"$\frac{1}{2}$", r"\frac 1 2"),
        (r"\(2 \times 3\)", "2×3"),
        ("the point (2, 3)", "The point (2,3)."),
        (r"$2 \cdot 3 \leq x$", "2*3 ≤ x"),
        (r"\left(x+1\right)^{2}", "(x+1)^2"),
        ("x² + 1", "x^2+1"),
        ("2<sup>3</sup>", "2^3"),
        ("x^{2}", "x^2"),
        ("a = b\n=====\n-----", "a=b"),
        ("Wait... 5 apples", "wait 5 apples"),
        ("a line\u2028break", "a line break"),
        ("①", "1"),
        ("Größe", "GRÖSSE"),
    ],
)
def test_copies_in_another_layout_are_equal(text: str, other: str) -> None:
    assert normalize_question(text) == normalize_question(other)


def sums(folder: Path) -> list[Path]:
    """Half of the sums of two numbers and an operator to train on, the other half held out."""
    rows = [
        {"question": f"{a}{sign}{b}=", "answer": str(eval(f"{a}{sign.replace('^', '**')}{b}"))}
        for a in range(2, 8)
        for b in range(2, 8)
        for sign in "+-*^"
    ]
    files = [folder / "train.jsonl", folder / "test.jsonl"]
    for start, file in enumerate(files):
        file.write_text("".join(json.dumps(row) + "\n" for row in rows[start::2]))
    return files


def gsm8k(train: Path, held_out: Path, *words: str) -> Any:
    files = [
        f"task.train_file={train}",
        f"task.eval_file={held_out}",
        "task.train.marker=null",
        "task.eval.marker=null",
    ]
    return build_spec(compose(["task=gsm8k", *files, *words]), "task")


def test_no_sum_is_a_leak_of_another(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train, held_out = sums(tmp_path)
    for leaks in ("refuse", "drop"):
        task = gsm8k(train, held_out, f"task.leaks={leaks}")
        task.check()
        assert len(task.stored_prompts()) == 72
    assert "dropped" not in caplog.text
    more = tmp_path / "more.jsonl"
    more.write_text(train.read_text() + json.dumps({"question": " 2 - 2 =", "answer": "0"}) + "\n")
    with pytest.raises(ConfigError, match="1 of 73 training questions"):
        gsm8k(more, held_out).check()


# --- trained on what is evaluated later: https://github.com/simplescaling/s1/issues/26 and ---------------------------
# https://github.com/project-numina/aimo-progress-prize/issues/22

PROBLEMS = [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(2, 8)]


def write(file: Path, rows: list[dict[str, str]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, make_config: Any) -> Path:
    """A run on the first four PROBLEMS."""
    root = tmp_path_factory.mktemp("root")
    train = write(root / "train.jsonl", PROBLEMS[:4])
    held_out = write(root / "test.jsonl", [{"question": "What is 1 + 1?", "answer": "2"}])
    words = [f"task.train_file={train}", f"task.eval_file={held_out}", "task.max_completion_tokens=4", "eval=none"]
    marks = ["task.train.marker=null", "task.eval.marker=null"]
    cfg = make_config("task=gsm8k", *words, *marks, f"root={root}", "name=run", "steps=1", "save_every=1")
    run_experiment(build_experiment(cfg), cfg)
    return root / "runs" / "run"


def evaluate(run: Path, out: Path, rows: list[dict[str, str]], *words: str) -> list[dict[str, Any]]:
    asked = write(out.with_suffix(".jsonl"), rows)
    own = ["task=amc23", f"task.eval_file={asked}", "task.equality=numeric", "task.max_completion_tokens=4"]
    main([str(run), *own, "eval=quick", "eval.questions=null", "eval.samples=1", "eval.k=1", f"out={out}", *words])
    return json.loads((out / "eval.json").read_text())


@pytest.mark.usefixtures("no_figures")
def test_an_evaluation_of_another_task_is_compared_with_what_the_run_trained_on(trained: Path, tmp_path: Path) -> None:
    asked = [{**row, "question": row["question"].replace(" + ", "+").upper()} for row in PROBLEMS]
    refusal = r"4 of 6 held-out questions of task=amc23 .* task=gsm8k \(amc23/test/1 = gsm8k/train/1.*task\.leaks=drop"
    with pytest.raises(ConfigError, match=refusal):
        evaluate(trained, tmp_path / "refused", asked)
    assert not (tmp_path / "refused").exists()
    with pytest.raises(ConfigError, match="no question is left"):
        evaluate(trained, tmp_path / "none", asked[:4], "task.leaks=drop")
    dropped = evaluate(trained, tmp_path / "dropped", asked, "task.leaks=drop")
    assert {entry["n"] for entry in dropped} == {2}
    assert {entry["settings"]["trained_on"] for entry in dropped} == {4}
    others = evaluate(trained, tmp_path / "others", asked[4:])
    assert {entry["settings"]["trained_on"] for entry in others} == {0} and {entry["n"] for entry in others} == {2}


@pytest.mark.usefixtures("no_figures")
def test_a_training_file_that_is_gone_is_said(trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    moved = trained.parents[1] / "train.jsonl"
    moved.rename(tmp_path / "train.jsonl")
    _rows_of.cache_clear()
    try:
        found = evaluate(trained, tmp_path / "out", PROBLEMS[:2])
    finally:
        (tmp_path / "train.jsonl").rename(moved)
    assert {entry["settings"]["trained_on"] for entry in found} == {None}
    assert "not compared" in caplog.text and "train.jsonl" in caplog.text
