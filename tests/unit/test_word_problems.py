"""Generated word problems: solved a second time from their text alone, as a system of linear equations."""

from __future__ import annotations

import re
import time
from collections import Counter
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qerl_bench import model_setup
from qerl_bench.config import build, compose, spec
from qerl_bench.task.word_problems import WordProblems
from qerl_core.checks import ConfigError
from qerl_core.records import Prompt

PATTERNS = {
    r"(\w+) has (\d+) (\w+)\.": lambda m: ({m[1]: 1}, int(m[2]), m[3]),
    r"(\w+) has (\d+) more (\w+) than (\w+)\.": lambda m: ({m[1]: 1, m[4]: -1}, int(m[2]), m[3]),
    r"(\w+) has (\d+) fewer (\w+) than (\w+)\.": lambda m: ({m[1]: 1, m[4]: -1}, -int(m[2]), m[3]),
    r"(\w+) has (\d+) times as many (\w+) as (\w+)\.": lambda m: ({m[1]: 1, m[4]: -int(m[2])}, 0, m[3]),
    r"(\w+) has half as many (\w+) as (\w+)\.": lambda m: ({m[1]: 2, m[3]: -1}, 0, m[2]),
}


@cache
def task(*overrides: str) -> WordProblems:
    built = spec(compose(["task=word_problems", *overrides]), "task")
    assert isinstance(built, WordProblems)
    return built


EASY = ("task.steps=[1]", "task.distractors=[0]", "task.max_number=5")
HARD = ("task.steps=[6,12]", "task.distractors=[3,6]", "task.max_number=1000")
LEVELS = pytest.mark.parametrize("overrides", [(), EASY, HARD], ids=["default", "easy", "hard"])


def read(question: str) -> tuple[list[tuple[dict[str, int], int]], str]:
    """The equations that the text states, each coefficients and right-hand side, and whose number is asked for."""
    *sentences, last = re.findall(r"[^.?]+[.?]", question)
    asked = re.fullmatch(r" How many (\w+) does (\w+) have\?", last)
    assert asked is not None, last
    equations = []
    for sentence in sentences:
        matches = [build(m) for p, build in PATTERNS.items() if (m := re.fullmatch(p, sentence.strip()))]
        assert len(matches) == 1, sentence
        coefficients, constant, thing = matches[0]
        assert thing == asked[1]
        equations.append((coefficients, constant))
    return equations, asked[2]


def solved(equations: list[tuple[dict[str, int], int]]) -> dict[str, Fraction]:
    """The one solution, by Gauss-Jordan elimination. Fails if there is none, or more than one."""
    people = sorted({name for coefficients, _ in equations for name in coefficients})
    rows = [[Fraction(c.get(name, 0)) for name in people] + [Fraction(b)] for c, b in equations]
    for column in range(len(people)):
        pivot = next((r for r in range(column, len(rows)) if rows[r][column] != 0), None)
        assert pivot is not None, f"{people[column]} could have any number"
        rows[column], rows[pivot] = rows[pivot], rows[column]
        rows[column] = [value / rows[column][column] for value in rows[column]]
        for r in range(len(rows)):
            if r != column:
                rows[r] = [a - rows[r][column] * b for a, b in zip(rows[r], rows[column], strict=True)]
    assert all(row[-1] == 0 for row in rows[len(people) :]), "contradiction"
    return {name: rows[i][-1] for i, name in enumerate(people)}


def needed(equations: list[tuple[dict[str, int], int]], asked: str) -> int:
    """How many statements the asked number rests on: each person's own, which names them first."""
    own = {next(iter(coefficients)): coefficients for coefficients, _ in equations}
    assert len(own) == len(equations), "nobody is described twice"
    count, person = 1, asked
    while len(own[person]) == 2:
        _, person = own[person]
        count += 1
    return count


def prompts(*overrides: str) -> list[Prompt]:
    made = task(*overrides)
    return [*made.train_prompts(1, 150, seed=3), *made.eval_prompts(100 if overrides != EASY else 20)]


@LEVELS
def test_every_problem_has_one_solution_and_it_is_the_gold_answer(overrides: tuple[str, ...]) -> None:
    made = task(*overrides)
    for prompt in prompts(*overrides):
        equations, asked = read(prompt.question)
        numbers = solved(equations)
        assert numbers[asked] == int(prompt.answer)
        steps = needed(equations, asked) - 1
        assert steps in made.steps
        assert len(equations) - steps - 1 in made.distractors
        told = [int(number) for number in re.findall(r"\d+", prompt.question)]
        assert all(2 <= number <= max(made.max_number, 5) for number in told)
        assert all(n.denominator == 1 and 1 <= n <= 11 * made.max_number for n in numbers.values())
        correct = made.reward(prompt, f"<think>x</think><answer>{numbers[asked]}</answer>")
        wrong = made.reward(prompt, f"<think>x</think><answer>{numbers[asked] + 1}</answer>")
        assert (correct.correct, correct.total, wrong.correct, wrong.total) == (True, 1.2, False, 0.2)


def test_the_second_solver_sees_what_is_wrong() -> None:
    two = [({"A": 1}, 3), ({"B": 1, "A": -1}, 2)]
    assert solved(two) == {"A": 3, "B": 5}
    with pytest.raises(AssertionError, match="B could have any number"):
        solved([({"A": 1}, 3), ({"A": 1, "B": 0}, 3)])
    with pytest.raises(AssertionError, match="contradiction"):
        solved([*two, ({"B": 1}, 6)])


def test_all_levels_and_sentences_occur() -> None:
    shapes: Counter[tuple[int, int]] = Counter()
    found: Counter[str] = Counter()
    for prompt in task().train_prompts(1, 400, seed=0):
        equations, asked = read(prompt.question)
        shapes[needed(equations, asked) - 1, len(equations) - needed(equations, asked)] += 1
        found.update(pattern for pattern in PATTERNS if re.search(pattern, prompt.question))
    assert set(shapes) == {(2, 0), (2, 1), (3, 0), (3, 1)}
    assert min(shapes.values()) > 60  # of 100 expected
    assert set(found) == set(PATTERNS) and min(found.values()) > 40


def signature(prompt: Prompt) -> tuple[Any, ...]:
    """Numbers and kinds of the statements that matter, in the order in which they build on each other."""
    equations, person = read(prompt.question)
    own = {next(iter(coefficients)): (coefficients, constant) for coefficients, constant in equations}
    chain = []
    while True:
        coefficients, constant = own[person]
        chain.append((tuple(coefficients.values()), constant))
        if len(coefficients) == 1:
            return tuple(reversed(chain))
        _, person = coefficients


@LEVELS
def test_nothing_held_out_is_trained_on_in_any_wording(overrides: tuple[str, ...]) -> None:
    made = task(*overrides)
    held_out = {signature(prompt) for prompt in made.eval_prompts(20 if overrides == EASY else None)}
    trained = {signature(prompt) for step in range(1, 9) for prompt in made.train_prompts(step, 64, seed=step)}
    taught = {signature(demo.prompt) for demo in made.demonstrations(1, 256, seed=0)}
    assert held_out and trained and taught
    assert not held_out & (trained | taught)
    assert trained & taught or overrides != EASY  # few problems: other questions, the same arithmetic


def test_the_same_seed_makes_the_same_problems_and_others_make_others() -> None:
    assert task().train_prompts(3, 16, seed=5) == task().train_prompts(3, 16, seed=5)
    assert task().eval_prompts(64) == task().eval_prompts(256)[:64]
    assert not {p.id for p in task().train_prompts(3, 16, 5)} & {p.id for p in task().train_prompts(4, 16, 5)}
    assert not {p.id for p in task().train_prompts(3, 16, 5)} & {p.id for p in task().train_prompts(3, 16, 6)}
    assert len({p.question for p in task().eval_prompts(None)}) == 1024


def test_the_first_problem_stays_the_same_between_versions() -> None:
    (first,) = task().eval_prompts(1)
    assert first.question == (
        "Hal has 18 keys. Ned has 9 more keys than Hal. Zoe has 17 fewer keys than Ned. How many keys does Zoe have?"
    )
    assert first.answer == "10"


def test_demonstrations_are_guesses_hasty_and_careful_work() -> None:
    kinds: Counter[str] = Counter()
    for demo in task().demonstrations(1, 400, seed=0):
        thoughts, answer = re.fullmatch(r"<think>(.*)</think><answer>(\d+)</answer>", demo.completion).groups()  # type: ignore[union-attr]
        equations, asked = read(demo.prompt.question)
        lines = thoughts.split(";") if thoughts else []
        for line in lines:
            left, right = line.split("=")
            assert eval(left.replace("/", "//")) == int(right)
        steps = needed(equations, asked) - 1
        kind = {0: "guess", steps - 1: "hasty", steps: "careful"}[len(lines)]
        kinds[kind] += 1
        assert answer == (lines[-1].split("=")[1] if lines else demo.prompt.answer)
        assert (answer == demo.prompt.answer) or kind == "hasty"
    assert all(abs(kinds[kind] / 400 - share) < 0.07 for kind, share in task().procedures.items())


def test_other_formats_get_demonstrations_of_their_own() -> None:
    hashed = task("task.answer_format=hash")
    for demo in hashed.demonstrations(1, 40, seed=0):
        assert hashed.reward(demo.prompt, demo.completion).parts["format"] == 1.0
    assert any(hashed.reward(d.prompt, d.completion).correct for d in hashed.demonstrations(1, 40, seed=0))


def test_too_few_problems_are_an_error_and_not_an_endless_search() -> None:
    """Of the 6 calculations with the number 2 none is held out."""
    started = time.perf_counter()
    with pytest.raises(ConfigError, match=r"task=word_problems cannot make 1 different .* max_number=2; widen one"):
        task("task.steps=[1]", "task.max_number=2").check()
    assert time.perf_counter() - started < 5


def test_what_the_tiny_model_is_taught_fits_its_limit() -> None:
    from qerl_bench.model.byte_tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    lengths = [len(tokenizer(demo.completion)["input_ids"]) + 1 for demo in task().demonstrations(1, 500, seed=1)]
    assert max(lengths) <= task().max_completion_tokens


def test_the_tiny_model_is_taught_the_task_before_it(tmp_path: Path) -> None:
    """The warm start is a run of its own, on the demonstrations of this task; its words compose."""
    started: list[list[str]] = []

    def start(command: list[str]) -> Any:
        started.append(command[2:])
        return SimpleNamespace(poll=lambda: 0)

    for words in (["task=word_problems", "task.steps=[4]"], ["task=arithmetic"], ["task=gsm8k"]):
        experiment = build(compose(words))
        with pytest.raises(AssertionError, match="has no checkpoint"):  # nothing ran
            model_setup.base_checkpoint(experiment.model, experiment.task, str(tmp_path), start)
    taught = [build(compose(command)) for command in started]
    assert [(run.task.name, run.algo.name) for run in taught] == [
        ("word_problems", "sft"),
        ("arithmetic", "sft"),
        ("arithmetic", "sft"),
    ]
    assert len({run.run_dir for run in taught}) == 2
