"""Tasks that are data sets: on invented problems always, on the real files where QERL_DATA names their folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import pytest

from qerl_bench.config import build, compose
from qerl_bench.config import spec as build_spec
from qerl_bench.probe.measure import training_questions
from qerl_bench.sweep.check import check
from qerl_bench.task import datafile, sources
from qerl_bench.task.datafile import epoch_order, read_rows, training_indices
from qerl_bench.task.dataset import DatasetTask
from qerl_bench.task.grader.numbers import parse_number
from qerl_bench.task.prompts import INSTRUCTIONS
from qerl_bench.task.question_form import normalize_question
from qerl_core.checks import ConfigError

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "assets" / "gsm8k_tiny.jsonl"


@cache
def task(*overrides: str) -> DatasetTask:
    """A task exactly as its YAML has it, but for `overrides`."""
    built = build_spec(compose(list(overrides)), "task")
    assert isinstance(built, DatasetTask)
    return built


def spec(train: Path | str | None, test: Path | str | None) -> DatasetTask:
    """task=gsm8k with these files."""
    return replace(task("task=gsm8k"), train_file=train and str(train), eval_file=test and str(test))


@pytest.fixture
def tiny(tmp_path: Path) -> DatasetTask:
    """The first eight invented problems to train on, the last four held out."""
    lines = TINY.read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "train.jsonl").write_text("".join(lines[:8]), encoding="utf-8")
    (tmp_path / "test.jsonl").write_text("".join(lines[8:]), encoding="utf-8")
    return spec(tmp_path / "train.jsonl", tmp_path / "test.jsonl")


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def problem(question: str, gold: str) -> dict[str, str]:
    return {"question": question, "answer": f"Because.\n#### {gold}"}


# --- the data file ---


def test_rows_come_in_file_order(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": "1", "b": 2}\r\n{"a": "x\\u2028y\xe2\x80\xa8z", "c": null}')
    assert [*read_rows(path).values()] == [{"a": "1", "b": 2}, {"a": "x\u2028y\u2028z", "c": None}]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n", "is empty"),
        (b'{"a": "1"}\n{"a": \n', "line 2: not a line of JSON"),
        (b'{"a": "1"}\n\n{"a": "1"}\n', "line 2: not a line of JSON"),
        (b'{"a": "1"}\n{"a": "\xff"}\n', "line 2: not a line of JSON"),
        (b'{"a": "1"}\n' + b"[" * 200_000, "line 2: not a line of JSON"),
        (b'{"a": "1"}\n["a"]\n', "line 2: a JSON object is needed, got list"),
    ],
)
def test_a_broken_file_is_refused_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as refusal:
        read_rows(path)
    assert message in str(refusal.value)
    assert str(path) in str(refusal.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_rows(tmp_path / "absent.jsonl")
    with pytest.raises(ConfigError, match="directory"):
        read_rows(tmp_path)


# --- the order of training ---


def test_an_epoch_is_a_permutation_and_each_one_is_another() -> None:
    orders = {epoch_order(seed, epoch, 50) for seed in (0, 1) for epoch in (0, 1, 2)}
    assert len(orders) == 6
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert tuple(range(50)) not in orders


def test_the_order_stays_the_same_between_versions() -> None:
    # Rows 0..7 by the little-endian BLAKE2b-64 of "0/epoch/0/<row>", worked out apart from the project's code.
    assert epoch_order(0, 0, 8) == (6, 2, 3, 0, 7, 5, 1, 4)


@pytest.mark.parametrize("count", [1, 3, 8, 11, 20])
def test_batches_read_one_epoch_after_the_other(count: int) -> None:
    steps = 24
    stream = [row for step in range(1, steps + 1) for row in training_indices(step, count, seed=5, size=8)]
    expected = [row for epoch in range(steps * count // 8 + 1) for row in epoch_order(5, epoch, 8)]
    assert stream == expected[: steps * count]


def test_a_step_does_not_depend_on_the_steps_before_it() -> None:
    late = training_indices(1_000_003, 4, seed=1, size=8)
    datafile.epoch_order.cache_clear()
    assert training_indices(1_000_003, 4, seed=1, size=8) == late
    assert training_indices(1_000_003, 4, seed=2, size=8) != late


# --- prompts, demonstrations, reward ---


def test_prompts_hold_the_instruction_and_the_bare_question(tiny: DatasetTask) -> None:
    tiny.check()
    first = tiny.eval_prompts(1)[0]
    assert first.id == "gsm8k/test/1"
    assert first.answer == "68"
    assert first.messages == (
        {"role": "system", "content": INSTRUCTIONS["tags"]},
        {
            "role": "user",
            "content": "A jacket costs $80 and is sold at 15% off.  What is the new price in dollars?",
        },
    )


def test_eval_prompts_are_the_test_file_in_order(tiny: DatasetTask) -> None:
    prompts = tiny.eval_prompts(None)
    assert [(prompt.id, prompt.answer) for prompt in prompts] == [
        ("gsm8k/test/1", "68"),
        ("gsm8k/test/2", "98"),
        ("gsm8k/test/3", "750"),
        ("gsm8k/test/4", "2"),
    ]
    assert tiny.eval_prompts(2) == prompts[:2]
    for count in (0, 5):
        with pytest.raises(ConfigError, match=f"has 4 test questions, got count={count}"):
            tiny.eval_prompts(count)


def test_a_probe_asks_no_stored_question_twice(tiny: DatasetTask) -> None:
    """Where questions are drawn, intervals over them would be too narrow; a task that generates has none stored."""
    assert len({prompt.id for prompt in training_questions(tiny, 8)}) == 8
    with pytest.raises(ConfigError, match=r"contamination=9.*has 8 training questions.*give contamination=8 at most"):
        training_questions(tiny, 9, "contamination")


def test_train_prompts_follow_the_epoch_order(tiny: DatasetTask) -> None:
    ids = [prompt.id for step in range(1, 5) for prompt in tiny.train_prompts(step, 4, seed=3)]
    lines = [row + 1 for epoch in (0, 1) for row in epoch_order(3, epoch, 8)]
    assert ids == [f"gsm8k/train/{line}" for line in lines]


def test_a_demonstration_is_the_solution_without_annotations(tiny: DatasetTask) -> None:
    demonstrations = {demo.prompt.id: demo.completion for demo in tiny.demonstrations(1, 8, seed=0)}
    assert demonstrations["gsm8k/train/5"] == (
        "<think>A pen costs 9 / 6 = $1.5 in shop A.\nA pen costs 10 / 5 = $2 in shop B.\n"
        "Shop A is cheaper because 1.5 < 2.\nSo 12 pens cost 12 * 1.5 = $18.</think><answer>18</answer>"
    )
    assert demonstrations["gsm8k/train/3"] == "<think>There are 25 * 50 = 1,250 seats.</think><answer>1,250</answer>"


def test_demonstrations_go_with_the_prompts_of_their_step_and_earn_everything(tiny: DatasetTask) -> None:
    for step in range(1, 4):
        demonstrations = tiny.demonstrations(step, 5, seed=7)
        assert [demo.prompt for demo in demonstrations] == tiny.train_prompts(step, 5, seed=7)
        for demo in demonstrations:
            assert tiny.reward(demo.prompt, demo.completion).parts == {"correct": 1.0, "format": 1.0}


@pytest.mark.parametrize(
    ("completion", "total", "parts"),
    [
        ("<think>a</think><answer>$68.00</answer>", 1.2, (1.0, 1.0)),
        ("I say <answer>68 dollars</answer>", 1.0, (1.0, 0.0)),
        ("<think>a</think><answer>60</answer>", 0.2, (0.0, 1.0)),
        ("<think>a</think><answer></answer>", 0.2, (0.0, 1.0)),
        ("<think>68</think>68", 0.0, (0.0, 0.0)),
        ("", 0.0, (0.0, 0.0)),
    ],
)
def test_the_reward_adds_its_weighted_parts(
    tiny: DatasetTask, completion: str, total: float, parts: tuple[float, float]
) -> None:
    reward = tiny.reward(tiny.eval_prompts(1)[0], completion)
    assert reward.total == pytest.approx(total, abs=1e-12)
    assert reward.parts == {"correct": parts[0], "format": parts[1]}
    assert reward.correct is bool(parts[0])


def test_the_weights_of_the_spec_are_used(tiny: DatasetTask) -> None:
    heavy = replace(tiny, correct_weight=2.0, format_weight=0.0)
    completion = "<think>a</think><answer>68</answer>"
    assert heavy.reward(heavy.eval_prompts(1)[0], completion).total == 2.0


def test_rows_are_read_once(tiny: DatasetTask, listen: Any) -> None:
    reads = listen(sources, "read_rows")
    tiny.check()
    tiny.train_prompts(1, 2, seed=0)
    replace(tiny, format_weight=0.5).eval_prompts(None)
    assert sorted(Path(path).name for (path,) in reads) == ["test.jsonl", "train.jsonl"]


# --- refusals ---


LEAKING = (
    [problem("How many?", "1"), problem("What is  2 + 2?", "4"), problem("Why?", "5"), problem("Where", "6")],
    [problem("Who?", "3"), problem(" why?", "5"), problem("what IS: 2 +\n2", "4")],
)


def test_a_question_in_both_splits_is_refused_with_count_and_examples(tmp_path: Path) -> None:
    files = write(tmp_path / "a", *LEAKING[0]), write(tmp_path / "b", *LEAKING[1])
    with pytest.raises(ConfigError) as refusal:
        spec(*files).check()
    message = str(refusal.value)
    assert message.startswith("2 of 4 training questions of task=gsm8k are also in its test split")
    assert "train line 2 = test line 3: 'What is  2 + 2?'; train line 3 = test line 2: 'Why?'" in message
    assert "task.leaks=drop" in message


def test_leaked_questions_can_be_left_out_of_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = write(tmp_path / "a", *LEAKING[0]), write(tmp_path / "b", *LEAKING[1])
    dropping = replace(spec(*files), leaks="drop")
    dropping.check()
    assert {prompt.question for prompt in dropping.train_prompts(1, 2, seed=0)} == {"How many?", "Where"}
    assert len(dropping.eval_prompts(None)) == 3
    (warning,) = caplog.messages
    assert warning.startswith("2 of 4 training questions of task=gsm8k are also in its test split")
    assert "train line 2 = test line 3" in warning


def test_the_same_file_twice_is_refused_and_dropping_it_leaves_nothing() -> None:
    with pytest.raises(ConfigError, match="12 of 12 training questions"):
        spec(TINY, TINY).check()
    with pytest.raises(ConfigError, match=r"12 of 12 .*use another train_file"):
        replace(spec(TINY, TINY), leaks="drop").check()


LINE = "Please reason step by step, and put your final answer within \\boxed{}."
CARRIED = ["", f"\n{LINE}", f" {LINE.upper()}", f"\n\n{LINE.replace(',', ' ,')}\n"]


@pytest.mark.parametrize("kept", ["train", "eval", "neither"])
@pytest.mark.parametrize("held_out", CARRIED)
@pytest.mark.parametrize("trained", CARRIED)
def test_an_instruction_line_hides_no_leak(tmp_path: Path, trained: str, held_out: str, kept: str) -> None:
    """Whichever split brings the line, and whichever of the two cuts it off."""
    ours = [{"problem": f"What is half of {i}?{trained}", "answer": "1"} for i in range(3)]
    theirs = [{"problem": f"What is half of {i}?{held_out}", "answer": "1"} for i in range(2, 5)]
    words = [f"task.{kept}.instruction_line=null"] if kept != "neither" else []
    built = replace(
        task("task=bigmath", "task.leaks=refuse", *words),
        train_file=str(write(tmp_path / "a", *ours)),
        eval_file=str(write(tmp_path / "b", *theirs)),
    )
    with pytest.raises(ConfigError, match=r"1 of 3 training questions of task=bigmath .*train line 3 = test line 1:"):
        built.check()


@pytest.mark.parametrize("name", ["bigmath", "dapo_math"])
def test_the_competition_sets_as_stored_are_asked_without_their_line(tmp_path: Path, name: str) -> None:
    files = [write(tmp_path / key, {"problem": f"What is {key}?\n{LINE}", "answer": "1"}) for key in ("a", "b")]
    built = replace(task(f"task={name}"), train_file=str(files[0]), eval_file=str(files[1]))
    assert built.train_prompts(1, 1, seed=0)[0].question == "What is a?"
    assert built.eval_prompts(1)[0].question == "What is b?"


def test_a_line_is_part_of_a_question_that_is_nothing_else() -> None:
    assert (
        normalize_question(LINE, [LINE])
        == normalize_question(LINE)
        != normalize_question(f"Why? {LINE}", [LINE])
        == "why"
    )


@pytest.mark.parametrize(
    ("text", "other"),
    [("What is 2+2?", "what is  2 + 2"), ("$\\frac{1}{2}$", "\\frac 1 2"), ("①", "1"), ("Größe", "GRÖSSE")],
)
def test_questions_are_compared_by_their_letters_and_digits(text: str, other: str) -> None:
    assert normalize_question(text) == normalize_question(other)


def test_other_numbers_make_another_question() -> None:
    assert len({normalize_question(text) for text in ("2 + 2?", "2 + 3?", "22?", "2.2 apples?", "2.2 pears?")}) == 5


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (problem("  ", "1"), "1 with an empty question (line 2)"),
        (problem("How many?", "ten"), "1 with an answer that no completion can equal (line 2: 'ten')"),
        (problem("How many?", ""), "1 with an empty answer (line 2)"),
        (problem("How many?", "3 or 4"), "an answer that no completion can equal (line 2: '3 or 4')"),
        (problem("How many?", "3 #### 4"), "an answer that no completion can equal (line 2: '3 #### 4')"),
        ({"question": "How many?", "answer": "3"}, "1 with no #### before the final answer (line 2: ...'3')"),
        ({"question": "How many?"}, "1 with no 'answer' (line 2 has 'question')"),
        ({"question": None, "answer": "#### 1"}, "1 with no 'question' (line 2 has 'question', 'answer')"),
        ({"question": ["How"], "answer": "#### 1"}, "1 with a 'question' that is not text (line 2: list)"),
    ],
)
@pytest.mark.parametrize("split", ["train", "test"])
def test_malformed_rows_are_refused_with_their_line(tmp_path: Path, split: str, row: object, message: str) -> None:
    good = write(tmp_path / "good.jsonl", problem("Who?", "1"))
    bad = write(tmp_path / "bad.jsonl", problem("When?", "1"), row)
    broken = spec(bad, good) if split == "train" else spec(good, bad)
    with pytest.raises(ConfigError) as refusal:
        broken.check()
    assert message in str(refusal.value)
    assert "bad.jsonl: 2 rows, of them 1 with" in str(refusal.value)


def test_faults_are_counted_by_kind_with_three_examples(tmp_path: Path) -> None:
    rows = [problem("", "1")] * 5 + [problem("When?", "x"), problem("Who?", "1")]
    with pytest.raises(ConfigError) as refusal:
        spec(write(tmp_path / "a", *rows), TINY).check()
    message = str(refusal.value)
    assert "a: 7 rows, of them 5 with an empty question (line 1; line 2; line 3; ...), 1 with " in message
    assert "(line 6: 'x')" in message


def test_duplicate_ids_are_refused(tmp_path: Path) -> None:
    rows = [{"id": id} | problem(f"Question {i}?", "1") for i, id in enumerate((7, 8, "7", 9, 8))]
    named = replace(task("task=gsm8k"), eval_file=str(write(tmp_path / "a", *rows)))
    with pytest.raises(
        ConfigError, match=r"2 with the id of another row .line 3 and line 1: '7'; line 5 and line 2: '8'"
    ):
        named.eval_prompts(None)
    write(tmp_path / "b", *({"id": i} | problem(f"Question {i}?", "1") for i in range(3)))
    assert len(replace(named, eval_file=str(tmp_path / "b")).eval_prompts(None)) == 3
    write(tmp_path / "c", {"id": 1} | problem("Who?", "1"), problem("When?", "1"))
    with pytest.raises(ConfigError, match=r"1 with no 'id' .line 2 has"):
        replace(named, eval_file=str(tmp_path / "c")).eval_prompts(None)


def test_a_missing_column_is_refused_with_those_that_are_there(tmp_path: Path) -> None:
    file = write(tmp_path / "a", {"text": "How many?", "answer": "#### 1"})
    with pytest.raises(ConfigError, match="none of 1 rows has a column 'question'; the columns are 'answer', 'text'"):
        spec(file, TINY).check()


def test_the_words_to_type_for_foreign_columns_work(tmp_path: Path) -> None:
    rows = [{"prompt": f"How many? {number}", "solution": "1", "other": "x"} for number in (1, 2)]
    train, test = (write(tmp_path / name, row) for name, row in zip("ab", rows, strict=True))
    words = ["task=gsm8k", f"task.train_file={train}", f"task.eval_file={test}"]
    with pytest.raises(ConfigError, match=r"(?s)4 things are wrong.\n\(1\) .*\n\(4\) .*\nIn one: ") as refused:
        build(compose(words)).task.check()  # columns and marker of each split
    words += shlex.split(str(refused.value).partition("In one: ")[2])
    build(compose(words)).task.check()
    assert [row.question for row in build(compose(words)).task.rows("train")] == ["How many? 1"]
    (tmp_path / "c").write_text('{"a": "x", "b": "y"}')
    with pytest.raises(ConfigError, match=r"'task\.eval\.question=\[NAME\]' 'task\.eval\.answer=\[NAME\]'"):
        build(compose(["task=gsm8k", f"task.eval_file={tmp_path / 'c'}"])).task.eval_prompts(None)


def test_long_questions_and_instruction_lines_are_left_out(tmp_path: Path) -> None:
    words = ["task=bigmath", "task.train.max_question_characters=9", "task.train.instruction_line='Box it.'"]
    file = write(
        tmp_path / "a",
        {"prompt": "123456789\nBox it.", "solution": "1"},
        {"problem": "x", "prompt": "1234567890", "solution": 2},
        {"prompt": "Box it.?", "solution": "3"},
    )
    questions = replace(task(*words), train_file=str(file), eval_file=str(write(tmp_path / "b", MATH)))
    questions.check()
    shown = {prompt.id: prompt.question for prompt in questions.train_prompts(1, 2, seed=0)}
    assert shown == {"bigmath/train/1": "123456789", "bigmath/train/3": "Box it.?"}
    assert questions.train is not None
    with pytest.raises(ConfigError, match="all 3 questions have more than 3 characters"):
        narrow = replace(questions.train, max_question_characters=3)
        replace(questions, train=narrow).check()


MATH = {"problem": "What is half of $x$?", "answer": "\\frac{x}{2}"}


@pytest.mark.usefixtures("no_packages")
def test_evaluation_alone_says_which_package_is_missing(tmp_path: Path) -> None:
    alone = replace(task("task=math500"), eval_file=str(write(tmp_path / "a", MATH)))
    with pytest.raises(ConfigError, match=r"task.equality=math needs the package math_verify"):
        alone.eval_prompts(None)


@pytest.mark.parametrize("evaluation", ["task", "lm_eval"])
def test_more_questions_than_there_are_is_found_before_training(evaluation: str) -> None:
    evaluator = build_spec(compose([f"eval={evaluation}"]), "eval")
    with pytest.raises(ConfigError, match="has 12 test questions, got count=256"):
        evaluator.check(task("task=gsm8k", f"task.eval_file={TINY}"))


@pytest.mark.parametrize("name", ["math500", "aime24", "aime25", "amc23"])
def test_sets_for_evaluation_only_refuse_training_and_say_what_to_train_on(tmp_path: Path, name: str) -> None:
    alone = replace(task(f"task={name}"), eval_file=str(write(tmp_path / "a", MATH)))
    assert [prompt.id for prompt in alone.eval_prompts(None)] == [f"{name}/test/1"]
    for use in (alone.check, lambda: alone.train_prompts(1, 1, 0), lambda: alone.demonstrations(1, 1, 0)):
        with pytest.raises(ConfigError, match=f"task={name} is for evaluation only .* train on bigmath or dapo_math"):
            use()
    with pytest.raises(ConfigError, match="is for evaluation only"):
        replace(alone, train_file="x.jsonl")


def test_sets_without_solutions_have_no_demonstrations(tmp_path: Path) -> None:
    train = write(tmp_path / "a", {"prompt": "Half of 2?", "solution": "1"})
    questions = replace(task("task=dapo_math"), train_file=str(train), eval_file=str(write(tmp_path / "b", MATH)))
    with pytest.raises(ConfigError, match="task=dapo_math has no worked solutions to imitate"):
        questions.demonstrations(1, 1, 0)


def test_solutions_that_break_the_format_are_no_demonstrations(tmp_path: Path) -> None:
    train = write(tmp_path / "a", {"question": "How many?", "answer": "a</think>b\n#### 3"})
    with pytest.raises(ConfigError, match=r"gsm8k/train/1: .* task.answer_format=tags"):
        spec(train, TINY).demonstrations(1, 1, 0)
    assert replace(spec(train, TINY), answer_format="boxed").demonstrations(1, 1, 0)[0].completion.endswith("boxed{3}")


def test_held_out_questions_need_no_training_data(tmp_path: Path) -> None:
    assert len(spec(tmp_path / "absent.jsonl", TINY).eval_prompts(None)) == 12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_completion_tokens": 0}, "max_completion_tokens must be a whole number of at least 1, got 0"),
        ({"correct_weight": 0.0}, "task.correct_weight .* got 0.0"),
        ({"correct_weight": float("nan")}, "task.correct_weight .* got nan"),
        ({"format_weight": -0.1}, "task.format_weight .* got -0.1"),
        ({"format_weight": float("inf")}, "task.format_weight .* got inf"),
        ({"leaks": "allow"}, "task.leaks must be one of refuse, drop, got 'allow'"),
        ({"instruction": "prefix"}, "task.instruction must be one of system, suffix, none, got 'prefix'"),
        ({"template": "raw"}, "task.template must be one of chat, plain, got 'raw'"),
        ({"answer_format": "xml"}, "task.answer_format must be one of"),
        ({"train_on": "bigmath"}, "task.train_on"),
    ],
)
def test_options_out_of_range_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(spec(None, None), **change)


# --- the hub, played by a stand-in: no test touches the network ---


Split = list[dict[str, object]]


def play_hub(
    monkeypatch: pytest.MonkeyPatch, splits: dict[str, Split] | Exception | Callable[..., Split]
) -> list[tuple[object, ...]]:
    """A package `datasets` whose splits these are, or are made of path, name and split; its calls."""
    calls: list[tuple[object, ...]] = []

    def load_dataset(path: str, name: str, *, split: str, revision: str | None) -> Split:
        calls.append((path, name, split, revision))
        if isinstance(splits, Exception):
            raise splits
        return splits(path, name, split) if callable(splits) else splits[split]

    module = ModuleType("datasets")
    module.__dict__["load_dataset"] = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    sources._hub_rows.cache_clear()
    return calls


def test_without_files_the_rows_come_from_the_hub_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first: dict[str, object] = {"question": "How many?", "answer": "a <<1+1=2>>2\n#### 2"}
    train: Split = [first, {"question": "Who?", "answer": "#### 3"}]
    calls = play_hub(monkeypatch, {"train": train, "test": [{"question": "When?", "answer": "b\n#### 4"}]})
    hub = task("task=gsm8k", "task.train.revision=abc", "task.eval.revision=abc")
    hub.check()
    assert [prompt.id for prompt in hub.eval_prompts(None)] == ["gsm8k/test/1"]
    completions = {demo.completion for demo in hub.demonstrations(1, 2, seed=0)}
    assert completions == {"<think>a 2</think><answer>2</answer>", "<think></think><answer>3</answer>"}
    assert sorted(calls) == [("openai/gsm8k", "main", "test", "abc"), ("openai/gsm8k", "main", "train", "abc")]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (ConnectionError("unreachable"), "from the hub: unreachable; check the network"),
        (FileNotFoundError("no such data set"), "from the hub: no such data set"),
        (ValueError("unknown config"), "from the hub: unknown config"),
        ({"test": [{"text": "a"}]}, "has a column 'question' .*the columns are 'text'"),
        ({"test": [{"question": "How many?", "answer": None}]}, "1 with no 'answer'"),
        ({"test": [{"question": "How many?", "answer": "3"}]}, "openai/gsm8k, split test: 1 rows, .* no ####"),
        ({"test": []}, "the test split of openai/gsm8k is empty"),
    ],
)
def test_a_hub_that_fails_is_bad_input(
    monkeypatch: pytest.MonkeyPatch, answer: dict[str, Split] | Exception, message: str
) -> None:
    play_hub(monkeypatch, answer)
    with pytest.raises(ConfigError, match=message):
        spec(None, None).eval_prompts(None)


# Where the questions stand, and in which columns; the data cards and the loaders that others have published agree.
HUB = {
    "gsm8k": [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")],
    "bigmath": [
        ("open-r1/Big-Math-RL-Verified-Processed", "level_3_4_5", "train"),
        ("HuggingFaceH4/MATH-500", None, "test"),
    ],
    "dapo_math": [("open-r1/DAPO-Math-17k-Processed", "en", "train"), ("HuggingFaceH4/aime_2024", None, "train")],
    "math500": [("HuggingFaceH4/MATH-500", None, "test")],
    "aime24": [("HuggingFaceH4/aime_2024", None, "train")],
    "aime25": [("math-ai/aime25", None, "test")],
    "amc23": [("math-ai/amc23", None, "test")],
}


@pytest.mark.parametrize("name", HUB)
def test_every_set_asks_the_hub_for_its_splits(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    question = {"gsm8k": "question", "bigmath": "prompt", "dapo_math": "prompt", "amc23": "question"}

    def rows(path: str, config: str | None, split: str) -> Split:
        training = len(HUB[name]) == 2 and (path, config, split) == HUB[name][0]
        columns = (question.get(name, "problem"), "answer" if name == "gsm8k" else "solution")
        if not training and name != "gsm8k":
            columns = ("question" if name == "amc23" else "problem", "answer")
        return [{columns[0]: f"Question of {path} {split}?", columns[1]: "#### 1" if name == "gsm8k" else "1"}]

    asked = play_hub(monkeypatch, rows)
    hub = task(f"task={name}")
    hub = replace(hub)  # rows are kept with the object
    if len(HUB[name]) == 2:
        hub.check()
    else:
        hub.eval_prompts(None)
    assert sorted((place for *place, _ in asked), key=str) == sorted(map(list, HUB[name]), key=str)


def test_bigmath_comes_in_the_two_levels_of_the_paper() -> None:
    hard = task("task=bigmath", "task.train.config=level_4_5")
    assert hard.train is not None and hard.train.config == "level_4_5"
    assert hard.train.max_question_characters == 1024


def test_without_the_datasets_package_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    sources._hub_rows.cache_clear()
    with pytest.raises(ConfigError, match=r"pip install datasets, or set task\.train_file"):
        spec(None, None).check()


def test_importing_the_task_imports_neither_torch_nor_datasets() -> None:
    code = "import sys, qerl_bench.task.dataset; print([m for m in ('torch', 'datasets') if m in sys.modules])"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# --- the real files ---

# Test lines whose gold answer is also that of the next line: 15 of 1,319.
EQUAL_NEIGHBOURS = [
    *[(54, "40"), (125, "10"), (205, "98"), (435, "5"), (534, "300"), (656, "10"), (671, "4"), (704, "50")],
    *[(774, "10"), (913, "6"), (929, "60"), (1037, "10"), (1083, "2"), (1170, "2"), (1178, "17")],
]


def real_file(name: str) -> Path:
    folder = os.environ.get("QERL_DATA")
    if not folder:
        pytest.skip(f"QERL_DATA does not name a folder with {name}")
    if not (Path(folder) / name).is_file():
        pytest.skip(f"QERL_DATA names a folder without {name}")
    return Path(folder) / name


@pytest.fixture(scope="module")
def real() -> DatasetTask:
    return spec(real_file("gsm8k_train.jsonl"), real_file("gsm8k_test.jsonl"))


def test_no_real_test_question_of_gsm8k_is_in_training_not_even_with_other_numbers(real: DatasetTask) -> None:
    """The check itself finds none (see the next test); this is a second count, by sets, of a wider net."""
    sides = [
        {re.sub("[0-9]+", "0", normalize_question(prompt.question)) for prompt in prompts}
        for prompts in (real.train_prompts(1, 7473, seed=0), real.eval_prompts(None))
    ]
    assert sides[0] & sides[1] == set()
    assert [len(side) for side in sides] == [7472, 1319]  # two training questions differ in their numbers alone


# Rows, and for three of them how the question ends and what the answer is.
COMPETITIONS = {
    "math500": ("math500.jsonl", 500),
    "aime24": ("aime24.jsonl", 30),
    "aime25": ("aime25.jsonl", 30),
    "amc23": ("amc2023.jsonl", 40),
}


@pytest.mark.parametrize("name", COMPETITIONS)
def test_real_competition_files_are_read_whole_and_lose_their_instruction_line(name: str) -> None:
    file, count = COMPETITIONS[name]
    lines = [json.loads(line) for line in real_file(file).read_text(encoding="utf-8").splitlines()]
    prompts = replace(task(f"task={name}"), eval_file=str(real_file(file))).eval_prompts(None)
    assert len(prompts) == len(lines) == count
    for prompt, line in zip(prompts, lines, strict=True):
        assert prompt.answer == line["answer"]
        cut = line["problem"].removeprefix(prompt.question).strip()
        assert cut == "Please reason step by step, and put your final answer within \\boxed{}."
        assert "Please reason" not in prompt.question and prompt.question.strip() == prompt.question != ""


def test_no_real_competition_problem_stands_in_two_of_them() -> None:
    seen: dict[str, str] = {}
    for name, (file, _) in COMPETITIONS.items():
        for prompt in replace(task(f"task={name}"), eval_file=str(real_file(file))).eval_prompts(None):
            assert seen.setdefault(normalize_question(prompt.question), prompt.id) == prompt.id


@pytest.mark.parametrize("answer_format", ["hash", "boxed", "colon"])
def test_real_demonstrations_earn_everything_in_other_formats_too(real: DatasetTask, answer_format: str) -> None:
    other = replace(real, answer_format=answer_format)
    for demo in other.demonstrations(1, 500, seed=0):
        assert other.reward(demo.prompt, demo.completion).parts == {"correct": 1.0, "format": 1.0}, demo


def test_real_files_pass_the_check_and_have_the_known_sizes(real: DatasetTask) -> None:
    real.check()
    assert len(real.eval_prompts(None)) == 1319
    ids = [prompt.id for prompt in real.train_prompts(1, 7473, seed=0)]
    assert len(set(ids)) == 7473


def test_real_demonstrations_all_earn_the_full_reward_and_carry_no_annotation(real: DatasetTask) -> None:
    for demo in real.demonstrations(1, 7473, seed=0):
        reward = real.reward(demo.prompt, demo.completion)
        assert reward.parts == {"correct": 1.0, "format": 1.0}, demo
        assert "<<" not in demo.completion and ">>" not in demo.completion and "####" not in demo.completion, demo


def test_every_real_gold_answer_matches_itself_and_only_equal_ones_match_the_next_question(real: DatasetTask) -> None:
    prompts = real.eval_prompts(None)
    own = [real.reward(prompt, f"<think>So.</think><answer>{prompt.answer}</answer>") for prompt in prompts]
    assert all(reward.parts == {"correct": 1.0, "format": 1.0} for reward in own)

    shifted = prompts[1:] + prompts[:1]
    matches = [
        (prompt.id, prompt.answer)
        for prompt, other in zip(prompts, shifted, strict=True)
        if real.reward(prompt, f"<think>So.</think><answer>{other.answer}</answer>").correct
    ]
    # Without the task's own parser: every real gold answer is a plain integer, but for thousands separators.
    integers = [int(prompt.answer.replace(",", "")) for prompt in prompts]
    assert [parse_number(prompt.answer) for prompt in prompts] == integers
    equal = [
        (prompt.id, prompt.answer)
        for prompt, value, other in zip(prompts, integers, integers[1:] + integers[:1], strict=True)
        if value == other
    ]
    assert matches == equal == [(f"gsm8k/test/{line}", gold) for line, gold in EQUAL_NEIGHBOURS]


def test_a_constant_answer_earns_only_its_own_share_of_the_real_test_split(real: DatasetTask) -> None:
    prompts = real.eval_prompts(None)
    golds = Counter(int(prompt.answer.replace(",", "")) for prompt in prompts)
    hits = sum(real.reward(prompt, "<think>So.</think><answer>18</answer>").correct for prompt in prompts)
    assert hits == golds[18] == 15


def test_foreign_columns_leaks_and_markers_are_said_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two columns of any name: the much longer text is taken for the question, to look for what else is wrong."""
    rows = [{"Aufgabe": f"Wie viele Aepfel hat Anna, wenn sie {n} kauft?", "Loesung": str(n)} for n in range(6)]
    train, test = write(tmp_path / "a", *rows), write(tmp_path / "b", *rows[4:])
    words = ["task=gsm8k", f"task.train_file={train}", f"task.eval_file={test}"]
    with pytest.raises(ConfigError, match=r"(?s)5 things .*Aufgabe.*marker=null.*2 of 6 training questions") as refused:
        build(compose(words)).task.check()
    assert caplog.messages == []  # nothing was left out yet
    assert [line[:3] for line in str(refused.value).splitlines()[1:-1]] == [f"({n})" for n in range(1, 6)]
    mended = shlex.split(str(refused.value).partition("In one: ")[2])
    task = build(compose([*words, *mended])).task
    task.check()
    assert len(task.rows("train")) == 4 and "task.leaks=drop" in mended


def test_a_run_says_with_the_rest_that_too_few_questions_are_held_out(tmp_path: Path) -> None:
    rows = [{"Aufgabe": f"Wie viele Aepfel hat Anna, wenn sie {n} kauft?", "Loesung": str(n)} for n in range(9)]
    train, test = write(tmp_path / "a", *rows[:6]), write(tmp_path / "b", *rows[6:])
    words = ["experiment=smoke", "model=tiny", "task=gsm8k", f"task.train_file={train}", f"task.eval_file={test}"]
    words += ["device=cpu", f"root={tmp_path}"]
    with pytest.raises(
        ConfigError, match=r"(?s)5 things .*\(5\) task=gsm8k has 3 test questions, got count=8"
    ) as refused:
        check(compose(words))
    mended = shlex.split(str(refused.value).partition("In one: ")[2])
    assert mended[-1] == "eval.questions=null"
    check(compose([*words, *mended]))


def test_what_no_word_mends_ends_the_search(tmp_path: Path) -> None:
    train = write(tmp_path / "a", {"Aufgabe": "Wie viele sind es?", "Loesung": ""})
    with pytest.raises(ConfigError, match=r"2 things .*Aufgabe.*1 with an empty answer|no #### before"):
        build(compose(["task=gsm8k", f"task.train_file={train}", f"task.eval_file={train}"])).task.check()


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_csv_and_parquet_are_the_same_questions(tmp_path: Path, kind: str) -> None:
    """With commas, quotes and line breaks; all of GSM8K where it is there."""
    real = Path(os.environ.get("QERL_DATA", ""), "gsm8k_train.jsonl")
    rows = [*read_rows(real if real.is_file() else TINY).values()]
    rows[0]["question"] = '\u00e9, "two"\nlines'
    frame = pd.DataFrame(rows)
    file = tmp_path / f"train.{kind.upper()}"
    frame.to_csv(file, index=False) if kind == "csv" else frame.to_parquet(file)
    assert [*read_rows(file).values()] == rows
    words = ["task=gsm8k", f"task.eval_file={write(tmp_path / 'b', problem('Who?', '1'))}"]
    own = replace(task(*words), train_file=str(file)).rows("train")
    assert own == replace(task(*words), train_file=str(write(tmp_path / "a", *rows))).rows("train")
    assert own[1].place == ("row 2" if kind == "parquet" else f"line {3 + ''.join(rows[0].values()).count(chr(10))}")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"question,answer\n1,2,3\n", "line 2: 3 values, and the first line names 2"),
        ("a.csv", b'a,b\n"1\n2",3\n"4\n5"\n', "line 4: 1 values"),
        ("a.csv", b"question,answer\n", "has no row"),
        ("a.csv", b"", "has no row"),
        ("a.csv", b"a,a\n1,2\n", "two columns have one name"),
        ("a.csv", b"a,b\n\xff,2\n", "not a file of CSV in UTF-8"),
        ("a.csv", b'a,b\n"1,2\n', "not a file of CSV"),
        ("a.parquet", b"PAR1 is not all", "not a Parquet file"),
    ],
)
def test_tables_that_cannot_be_read_are_refused(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_rows(tmp_path / name)
