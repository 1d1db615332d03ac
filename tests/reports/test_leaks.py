"""Leaks are told by what a question asks: operators, signs and decimal points, and the rows that a run trained on."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from qerl_bench.checks import ConfigError
from qerl_bench.config import compose
from qerl_bench.config import spec as build_spec
from qerl_bench.task.question_form import normalize_question

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
