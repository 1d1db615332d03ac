"""task=countdown and task=dag: solutions checked by a second calculation, exact rewards, splits that never meet."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from qerl_bench.config import build, compose
from qerl_bench.model.word_tokenizer import END_ID, UNKNOWN, WORDS, word_tokenizer
from qerl_bench.task.countdown import Countdown, problem_of, random_chain
from qerl_bench.task.dag import MODULUS, Dag, depth_first, operations_needed, random_graph, worked_out
from qerl_bench.task.symbolic import SymbolicTask
from qerl_core.checks import ConfigError
from qerl_core.options.fingerprint import as_dict, fingerprint
from qerl_core.records import Prompt
from qerl_core.rundir.finished_run import with_later_keys


def countdown(**changed: Any) -> Countdown:
    options = {"name": "countdown", "max_completion_tokens": 28, "numbers": [3, 4], "max_number": 13}
    return Countdown(**{**options, "max_target": 100, "hit": 0.5, **changed})


def dag(**changed: Any) -> Dag:
    ladders = {"operations": [5, 6], "pretrain_operations": [1, 2, 3], "eval_operations": [1, 4, 12]}
    options = {"name": "dag", "max_completion_tokens": 200, "distractors": [0, 2], "solution": "explained"}
    return Dag(**{**options, **ladders, **changed})


BOTH = pytest.mark.parametrize("task", [countdown(), dag()], ids=lambda task: task.name)


@BOTH
def test_prompts_are_a_function_of_step_and_seed(task: SymbolicTask) -> None:
    assert task.train_prompts(3, 20, 7) == task.train_prompts(3, 20, 7)
    assert task.train_prompts(3, 20, 7) != task.train_prompts(4, 20, 7) != task.train_prompts(4, 20, 8)
    assert task.demonstrations(3, 20, 7) == task.demonstrations(3, 20, 7) != task.demonstrations(3, 20, 8)
    assert task.eval_prompts(40)[:10] == task.eval_prompts(10)


@BOTH
def test_every_word_is_in_the_vocabulary_and_comes_back(task: SymbolicTask) -> None:
    tokenizer = word_tokenizer()
    for demonstration in task.demonstrations(1, 200, 0):
        text = f"{demonstration.prompt.messages[0]['content']} {demonstration.completion}"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert WORDS.index(UNKNOWN) not in ids and tokenizer.decode(ids) == text
        assert len(tokenizer(demonstration.completion)["input_ids"]) < task.max_completion_tokens
    assert tokenizer.eos_token_id == END_ID and len(tokenizer) == len(WORDS) == len(set(WORDS))


# --- countdown -------------------------------------------------------------------------------------------------------


def key_of(prompt: Prompt) -> tuple[str, ...]:
    numbers, _, target = prompt.question.partition(" -> ")
    return (*sorted(numbers.split()), target)


def test_countdown_splits_share_no_problem_in_any_order_of_its_numbers() -> None:
    task = countdown(numbers=[3], max_number=6, max_target=30)
    held_out = {key_of(prompt) for prompt in task.eval_prompts(40)}
    trained = {key_of(prompt) for step in range(1, 9) for prompt in task.train_prompts(step, 100, 0)}
    shown = {key_of(demonstration.prompt) for demonstration in task.demonstrations(1, 2000, 0)}
    assert not held_out & trained and not held_out & shown and len(trained) > 300


def test_random_chains_follow_the_rules() -> None:
    draw = random.Random(0)
    for _ in range(2000):
        pool = [draw.randint(1, 200) for _ in range(draw.randint(2, 6))]
        steps = random_chain(draw, pool)
        assert len(steps) == len(pool) - 1
        for x, op, y, z in steps:
            assert eval(f"{x} {op} {y}") == z and 0 <= z <= 200
            pool.remove(x)
            pool.remove(y)
            pool.append(z)


def test_every_problem_of_countdown_has_a_solution_and_demonstrations_hit_as_often_as_asked() -> None:
    task = countdown(hit=0.25)
    for prompt in task.eval_prompts(50):
        numbers = [int(n) for n in prompt.question.split(" ->")[0].split()]
        assert int(prompt.answer) in reachable(tuple(sorted(numbers)))
    rewards = [task.reward(d.prompt, d.completion) for d in task.demonstrations(1, 4000, 0)]
    assert all(reward.parts["legal"] == 1 for reward in rewards)
    # Of the chains 75 % have a target drawn apart from them, which a few hit by chance.
    assert 0.2 < sum(reward.correct for reward in rewards) / 4000 < 0.27


def reachable(numbers: tuple[int, ...]) -> set[int]:
    if len(numbers) == 1:
        return set(numbers)
    found: set[int] = set()
    for i in range(len(numbers)):
        for j in range(len(numbers)):
            if i != j:
                rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
                x, y = numbers[i], numbers[j]
                results = [value for value in (x + y, x * y, x - y) if 0 <= value <= 200]
                found.update(*(reachable((*rest, value)) for value in results))
    return found


@pytest.mark.parametrize(
    ("completion", "correct", "answer"),
    [
        ("3 + 7 = 10 ; 10 * 2 = 20 ; 20 + 11 = 31 ;", True, "31"),
        ("7 + 3 = 10 ; 2 * 10 = 20 ; 11 + 20 = 31 ;", True, "31"),
        ("3 + 7 = 10 ; 10 + 11 = 21 ; 21 + 2 = 23 ;", False, "23"),
        ("3 + 7 = 11 ; 11 * 2 = 22 ; 22 + 11 = 33 ;", False, None),  # a wrong sum
        ("3 + 7 = 10 ; 10 * 2 = 20 ;", False, None),  # one number is not used
        ("3 + 7 = 10 ; 10 * 2 = 20 ; 20 + 11 = 31", False, None),  # cut short
        ("3 + 7 = 10 ; 10 * 2 = 20 ; 20 + 11 = 31 ; 31", False, None),
        ("7 + 7 = 14 ; 14 + 2 = 16 ; 16 + 3 = 19 ;", False, None),  # 7 is there once
        ("20 + 11 = 31 ; 3 + 7 = 10 ; 10 * 2 = 20 ;", False, None),  # 20 is not there yet
        ("31", False, None),
        ("", False, None),
    ],
)
def test_countdown_reward(completion: str, correct: bool, answer: str | None) -> None:
    problem = problem_of([3, 7, 11, 2], 31)
    prompt = Prompt(id="x", messages=(), answer=problem.answer, question=problem.question)
    reward = countdown().reward(prompt, completion)
    assert (reward.correct, reward.total, reward.answer) == (correct, float(correct), answer)
    assert reward.parts == {"correct": float(correct), "legal": float(answer is not None)}


# --- dag -------------------------------------------------------------------------------------------------------------


def solved(question: str) -> tuple[int, int]:
    """The asked value, worked out from the statements alone, and how many operations that needs."""
    statements, asked = question[:-2].split(" ? ")
    definitions = {parts[0]: parts[2:] for parts in (s.split() for s in statements.strip(" .").split(" . "))}
    needed: set[str] = set()

    def value(name: str) -> int:
        words = definitions[name]
        if len(words) == 1:
            return int(words[0])
        needed.add(name)
        return eval(f"{value(words[0])} {words[1]} {value(words[2])}") % MODULUS

    return value(asked), len(needed)


def test_dag_problems_need_the_operations_of_their_rung() -> None:
    task = dag()
    rungs = set()
    for prompt in task.eval_prompts(100):
        value, operations = solved(prompt.question)
        assert str(value) == prompt.answer
        rungs.add(operations)
    assert rungs == {1, 4, 12}
    assert {solved(prompt.question)[1] for prompt in task.train_prompts(1, 50, 0)} == {5, 6}
    assert {solved(d.prompt.question)[1] for d in task.demonstrations(1, 100, 0)} == {1, 2, 3}


def test_dag_demonstrations_are_right_in_every_step() -> None:
    task = dag(pretrain_operations=[3, 8])
    for demonstration in task.demonstrations(1, 300, 0):
        assert task.reward(demonstration.prompt, demonstration.completion).correct
        for step in demonstration.completion.removesuffix(" ;").split(" ; "):
            if calculation := re.fullmatch(r"\w = \w [-+*] \w = (\d+ [-+*] \d+) = (\d+)", step):
                assert eval(calculation[1]) % MODULUS == int(calculation[2])


def test_a_solution_of_one_kind_is_wrong_as_the_other() -> None:
    """The problems are the same; the reward of explained steps takes any order that is possible."""
    terse, explained = dag(solution="terse"), dag()
    orders = 0
    for one, other in zip(terse.demonstrations(1, 50, 0), explained.demonstrations(1, 50, 0), strict=True):
        question, texts = one.prompt.question, (one.completion, other.completion)
        assert one.prompt == other.prompt
        assert [terse.reward(one.prompt, text).correct for text in texts] == [True, False]
        assert [explained.reward(one.prompt, text).correct for text in texts] == [False, True]
        drawn = [step.split()[0] for step in one.completion.removesuffix(" ;").split(" ; ")]
        assert explained.reward(one.prompt, worked_out(question, drawn, "explained")).correct
        orders += drawn != depth_first(question)
    assert orders > 10


def test_explained_demonstrations_work_out_an_operand_just_before_what_needs_it() -> None:
    question = "e = a + d . x = e * e . d = c - b . c = a * b . b = 4 . a = 7 . ? e :"
    assert depth_first(question) == ["a", "b", "c", "d", "e"]
    worked = "a = 7 ; b = 4 ; c = a * b = 7 * 4 = 5 ; d = c - b = 5 - 4 = 1 ; e = a + d = 7 + 1 = 8 ;"
    assert worked_out(question, depth_first(question), "explained") == worked


def test_a_base_of_terse_demonstrations_is_not_taken_for_another() -> None:
    """They were the only kind once, and configs of that time do not say so."""
    words = ["experiment=worlds/base", "task=dag"]
    now, before = as_dict(compose(words)), as_dict(compose([*words, "task.solution=terse"]))
    earlier = before | {"task": {key: value for key, value in before["task"].items() if key != "solution"}}
    assert fingerprint(earlier) == fingerprint(before) != fingerprint(now)
    assert with_later_keys(earlier)["task"] == before["task"] and with_later_keys(now) == now
    assert "task.solution=explained" in build(compose(words)).task.warm_start_overrides()


def test_dag_splits_share_no_calculation() -> None:
    """With one operation and no distractor there are few calculations, so the splits would meet."""
    task = dag(operations=[1], pretrain_operations=[1], eval_operations=[1], distractors=[0])

    def calculation(prompt: Prompt) -> str:
        statements = prompt.question.split(" ? ")[0].strip(" .").split(" . ")
        values = {s.split()[0]: s.split()[2] for s in statements if len(s.split()) == 3}
        (operation,) = (s.split()[2:] for s in statements if len(s.split()) == 5)
        left, op, right = operation
        return f"{values[left]} {op} {values[right]}"

    held_out = {calculation(prompt) for prompt in task.eval_prompts(60)}
    trained = {calculation(d.prompt) for d in task.demonstrations(1, 3000, 0)}
    assert not held_out & trained and len(trained) > 800


@pytest.mark.parametrize(
    ("completion", "correct", "answer"),
    [
        ("a = 7 ; b = 4 ; c = a * b = 7 * 4 = 5 ;", True, "5"),
        ("b = 4 ; a = 7 ; d = b - b = 4 - 4 = 0 ; c = a * b = 7 * 4 = 5 ;", True, "5"),  # a right step, not needed
        ("c = 5 ;", False, "5"),  # luck
        ("a = 7 ; c = a * b = 7 * 4 = 5 ;", False, "5"),  # b was not worked out
        ("a = 7 ; b = 4 ; c = b * a = 4 * 7 = 5 ;", False, "5"),  # not what is stated
        ("a = 7 ; b = 4 ; c = a * b = 4 * 7 = 5 ;", False, "5"),
        ("a = 7 ; b = 5 ; c = a * b = 7 * 4 = 5 ;", False, "5"),
        ("a = 7 ; e = 4 ; b = 4 ; c = a * b = 7 * 4 = 5 ;", False, "5"),  # nobody states an e
        ("a = 7 ; b = 4 ; c = a * b = 7 * 4 = 6 ;", False, "6"),
        ("a = 7 ; b = 4 ; c = 7 * 4 = 5 ;", False, "5"),  # not restated
        ("a = 5 ;", False, None),  # another value than the one asked for
        ("c = a * b = 7 * 4 = 5", False, None),
        ("", False, None),
    ],
)
def test_dag_reward(completion: str, correct: bool, answer: str | None) -> None:
    prompt = Prompt(id="x", messages=(), answer="5", question="c = a * b . a = 7 . d = b - b . b = 4 . ? c :")
    reward = dag().reward(prompt, completion)
    assert (reward.correct, reward.total, reward.answer) == (correct, float(correct), answer)
    assert reward.parts == {"correct": float(correct), "answer": float(answer == "5")}


@pytest.mark.parametrize(
    ("make", "changed", "message"),
    [
        (countdown, {"numbers": [7]}, r"task\.numbers .*2\.\.6.*\[7\]"),
        (countdown, {"numbers": 3}, r"task\.numbers"),
        (countdown, {"max_number": 201}, r"task\.max_number must be at most 200"),
        (countdown, {"hit": 1.5}, r"task\.hit"),
        (dag, {"operations": []}, r"task\.operations .*1\.\.16"),
        (dag, {"distractors": [-1]}, r"task\.distractors .*0\.\.8"),
        (dag, {"solution": "short"}, r"task\.solution must be .*explained.*terse.* 'short'"),
    ],
)
def test_bad_options_are_refused(make: Any, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**changed)


def test_too_few_problems_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"task=countdown cannot make 500 .*max_number=2"):
        countdown(numbers=[2], max_number=2).train_prompts(1, 500, 0)


def test_dag_questions_tell_how_many_operations_they_need() -> None:
    """Whatever the order of the statements and however many are not needed."""
    draw = random.Random(0)
    for operations in range(1, 17):
        for distractors in (0, 1, 8):
            assert operations_needed(random_graph(draw, operations, distractors)[0].question) == operations
