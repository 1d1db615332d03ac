"""Graders: they know how a completion ended, read numbers strictly, and take only numbers as rewards."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from qerl_bench.commands.score import grade_file
from qerl_bench.config import compose
from qerl_bench.config import spec as build_spec
from qerl_bench.eval.formats import formats_of
from qerl_bench.eval.task import grade_rollouts
from qerl_bench.task.graded import all_checked, check_reward, checked, reward_of
from qerl_bench.task.grader.extract import extract, well_formed
from qerl_bench.task.grader.grader import Grader
from qerl_bench.task.grader.last_number import last_number_is
from qerl_bench.task.grader.latex import compare, is_found_in
from qerl_bench.task.grader.numbers import parse_number
from qerl_core.checks import ConfigError, TrainingStopped
from qerl_core.records import Prompt, Reward, Rollout

PROMPT = Prompt(id="gsm8k/test/1", messages=(), answer="1", question="?")


def rollout(text: str, finished: bool, prompt: Prompt = PROMPT) -> Rollout:
    return Rollout(
        prompt=prompt,
        sample=0,
        prompt_ids=[0],
        token_ids=[0],
        logprobs=[0.0],
        entropies=[0.0],
        text=text,
        finished=finished,
    )


# --- an answer cut in the middle: https://github.com/Tencent-Hunyuan/UniRL/issues/19 ----------------------------------
# and https://github.com/huggingface/trl/issues/3248


@pytest.mark.parametrize(
    ("answer_format", "text", "answer"),
    [
        ("colon", "A: 1", None),
        ("colon", "A: 18", None),
        ("colon", "A: 18 ", None),  # "18 million"
        ("colon", "A:", None),
        ("colon", "A: 18\n", "18"),
        ("colon", "A: 18\nThat is", "18"),
        ("colon", "A: 18\nA: 18", None),
        ("colon", "A: 18\nA: 1", None),
        ("hash", "#### 1", None),
        ("hash", "so\n#### 18\n", "18"),
        ("hash", "#### 18\n####", None),
        ("hash", "#### 18 ####", None),
        ("auto", "A: 1", None),
        ("auto", "#### 1", None),
        ("auto", "A: 18\n", "18"),
        ("auto", "\\boxed{18}", "18"),
        ("boxed", "So \\boxed{18}", "18"),  # has an end of its own
        ("boxed", "So \\boxed{1", None),
        ("tags", "<think>a</think><answer>18</answer>", "18"),
        ("tags", "<think>a</think><answer>1", None),
    ],
)
def test_a_completion_that_was_cut_off_in_its_answer_has_none(
    answer_format: str, text: str, answer: str | None
) -> None:
    assert extract(text, answer_format, finished=False) == answer


@pytest.mark.parametrize("answer_format", ["colon", "hash", "auto"])
@pytest.mark.parametrize("equality", ["numeric", "math", "words"])
def test_a_shorter_limit_earns_nothing(answer_format: str, equality: str) -> None:
    """Four tokens of `A: 18` are `A: 1`, which was right where the gold answer is 1."""
    grader = Grader(answer_format=answer_format, equality=equality, correct_weight=1.0, format_weight=0.2)
    cut, whole = ("#### 1", "#### 18") if answer_format == "hash" else ("A: 1", "A: 18")
    reward = grader.reward("1", cut, finished=False)
    assert (reward.total, reward.correct, reward.answer) == (0.0, False, None)
    assert grader.reward("18", whole).total == 1.2
    assert grader.reward("1", f"{cut}\n", finished=False).correct  # the line has ended
    assert not well_formed(cut, answer_format, finished=False)


def colon_task(*words: str) -> Any:
    options = ("task=arithmetic", "task.answer_format=colon", "task.template=plain", *words)
    return build_spec(compose(list(options)), "task")


def test_training_evaluations_and_reports_of_formats_know_it() -> None:
    task = colon_task()
    cut, ended = rollout("A: 1", finished=False), rollout("A: 1", finished=True)
    assert [reward.total for reward in task.rewards([cut, ended])] == [0.0, 1.2]
    assert [row["correct"] for row in grade_rollouts(task, [cut, ended], "greedy")] == [False, True]
    assert [row["lenient"] for row in grade_rollouts(task, [cut, ended], "greedy")] == [False, True]
    found = formats_of(task, [(PROMPT, "A: 1", False), (PROMPT, "A: 1", True)])
    assert found["formats"]["colon"] == {"found": 0.5, "right": 0.5} and found["lenient"] == 0.5


def test_completions_made_elsewhere_say_how_they_ended(tmp_path: Path) -> None:
    task = colon_task()
    prompt = task.eval_prompts(1)[0]
    lines = [
        {"id": prompt.id, "completion": f"A: {prompt.answer}", "sample": sample, "finished": finished}
        for sample, finished in enumerate((True, False))
    ]
    (tmp_path / "made.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert [row["reward"] for row in grade_file(task, str(tmp_path / "made.jsonl"))] == [1.2, 0.0]


def test_a_chain_that_was_cut_off_has_no_end() -> None:
    """What would have come behind it counts, too: one step more makes it wrong."""
    countdown, dag = (build_spec(compose([f"task={name}"]), "task") for name in ("countdown", "dag"))
    asked = Prompt(id="c", messages=(), answer="40", question="3 7 11 2 -> 40 :")
    chain = "3 + 7 = 10 ; 10 * 2 = 20 ; 20 + 11 = 31 ;"
    asked = replace(asked, answer="31")
    assert countdown.reward(asked, chain).correct and not countdown.reward(asked, chain, finished=False).correct
    asked = Prompt(id="d", messages=(), answer="5", question="c = a * b . a = 7 . b = 4 . ? c :")
    steps = "a = 7 ; b = 4 ; c = a * b = 7 * 4 = 5 ;"
    assert dag.reward(asked, steps).correct and dag.reward(asked, steps, finished=False).answer is None


def test_lenient_accuracy_stays_what_it_was() -> None:
    """The last number of a finished text, as by lm-eval's flexible extract."""
    assert last_number_is("18", "2 3 and about 18", finished=True)
    assert not last_number_is("18", "A: 18", finished=False)


# --- wrong LaTeX answers taken as right: https://github.com/huggingface/Math-Verify/issues/14 and 2 -------------------

WRONG = [
    # numbers side by side are never added
    *[("5", "2 3"), ("7", "3 4"), ("9", "1 8"), ("5", "2\\,3"), ("5", "2\\ 3"), ("5", "2\\;3"), ("5", "{2}{3}")],
    *[("5", "2\\quad 3"), ("3", "1\\thinspace 2"), ("3", "1 \\$ 2"), ("5", "0 5"), ("6", "1 2 3"), ("3", "1 000 2")],
    *[("3", "\\begin{pmatrix} 1 2 \\end{pmatrix}"), ("\\frac{5}{2}", "1 \\frac{3}{2}"), ("5", "(2)(3)")],
    *[("-5", "(-2)(3)"), ("5", "\\{2\\}\\{3\\}"), ("0.5", "0 .5"), ("5", "2 \\text{ } 3")],
    # ellipses
    *[("1, 2, \\ldots, n", "1, 3, 5, \\ldots, 2n-1"), ("18", "18\\ldots"), ("18", "1, 2, ..., 18")],
    *[("\\frac{1}{3}", "0.333333\\ldots"), ("18", "1, \\dots, 18"), ("18", "\u202618"), ("n", "1, 2, \\dotsc, n")],
    # approximations
    *[("12", "12 \\approx 13"), ("13", "12 \\approx 13"), ("18", "\\approx 18"), ("18", "17 \\sim 18")],
    *[("18", "x \\approx 18"), ("18", "18 \\text{ (approx.)}"), ("18", "\\text{about } 18"), ("18", "\u2248 18")],
    # equations that are not true, and what is no equation
    *[("18", "17 = 18"), ("18", "x = 17 = 18"), ("18", "2 \\cdot 3 = 18"), ("18", "17 \\equiv 18")],
    *[("18", "17 \\to 18"), ("18", "17 \\Rightarrow 18"), ("18", "17 \\vee 18"), ("2", "1 \\mid 2"), ("4", "3 & 4")],
    *[("x=5", "-(x=5)"), ("5", "-(x=5)")],
    # values of any size
    *[("\\frac{1}{2004!}", "\\frac{1}{2006!}"), ("\\frac{1}{2^{99}}", "\\frac{1}{2^{98}}")],
    *[("\\frac{1}{4096}", "0.000244"), ("10^{-8}", "0.00000002"), ("e^{-100}", "e^{-101}"), ("\\pi", "3.1416")],
    *[("\\sqrt{2} \\cdot 10^{-20}", "\\sqrt{3} \\cdot 10^{-20}"), ("\\frac{x}{2004!}", "\\frac{x}{2006!}")],
    *[("(\\frac{1}{2^{40}}, 2)", "(\\frac{1}{2^{41}}, 2)"), ("\\frac{5}{9}", "\\frac{6}{0}")],
    # brackets, bases, words
    *[("(15,-29)", "[15,-29]"), ("(3,4]", "(3,4)"), ("(3,4]", "[3,4]"), ("1,2", "[1,2]")],
    *[("(-\\infty, 2) \\cup (3, \\infty)", f"{a}-\\infty, 2) \\cup (3, \\infty{b}") for a, b in ("[]", "[)", "(]")],
    *[("2516_8", "2516_7"), ("18", "18_9"), ("18", "18 \\text{ million}"), ("18", "18 \\text{ and a half}")],
]


@pytest.mark.parametrize(("gold", "answer"), WRONG)
def test_wrong_answers_are_wrong(gold: str, answer: str) -> None:
    assert not compare(gold, answer)[0]


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        *[("1000", "1 000"), ("10000", "10\\,000"), ("1000000", "1\\,000\\,000"), ("12,345", "12 345")],
        *[("1000", "1{,}000"), ("1000.5", "1\\ 000.5"), ("-1000", "-1\\,000")],
        *[("\\frac{3}{2}", "1\\frac{1}{2}"), ("\\frac{275}{2}", "137 \\frac{1}{2}"), ("-\\frac{3}{2}", "-1\\tfrac12")],
        *[
            ("6", "2(3)"),
            ("6", "(2)(3)"),
            ("\\frac{1}{6}", "\\frac{1}{2} \\frac{1}{3}"),
            ("2k", "2 k"),
            ("12", "2^2 3"),
        ],
        *[
            ("18", "3 \\cdot 6 = 18"),
            ("18", "x = 18"),
            ("18", "x = 18."),
            ("x=5", "5."),
            ("18", "18 \\%."),
            ("18", "x = 3 \\cdot 6 = 18"),
            ("6", "x + y = 6"),
        ],
        *[("\\frac{1}{3}", "0.333333"), ("\\frac{2}{3}", "0.666667"), ("\\pi", "3.14159265")],
        *[("10^{-8}", "0.00000001"), ("\\frac{1}{2^{99}}", "2^{-99}"), ("\\sqrt{6}", "\\sqrt{2}\\sqrt{3}")],
        *[("1, 2, \\ldots, n", "1,2,\\ldots,n"), ("x \\approx 3", "x\\approx 3"), ("2 3", "2 3")],
        *[("(2,\\infty)", "\\left(2, \\infty\\right)"), ("1,2", "(1,2)"), ("(1,2)", "1, 2"), ("1,-2", "-2,1")],
        *[("2516_8", "2516_{8}"), ("mn", "nm"), ("17, 18", "17 \\text{ or } 18"), ("\\text{half}", "\\text{half}")],
        *[("90^\\circ", "90 \\text{ degrees}"), ("0.5x", "\\frac{x}{2}"), ("11,\\! 111", "11111")],
    ],
)
def test_right_answers_are_right(gold: str, answer: str) -> None:
    assert compare(gold, answer)[0]


@pytest.mark.parametrize(
    "text", ["1 000" * 20_000, "1 111 " * 20_000 + "1", " " * 100_000 + "%", "." * 100_000, "[1," * 300]
)
def test_hostile_answers_are_read_at_once(text: str) -> None:
    start = time.process_time()
    assert not compare("18", text)[0]
    assert time.process_time() - start < 0.5


def test_what_lm_eval_measures_is_still_read_as_math_verify_reads_it() -> None:
    assert compare("5", "2 + 3")[0]
    assert is_found_in("5", "So the answer is $\\boxed{2 3}$.")  # its own metric, lenient as it is
    assert not compare("5", "2 3")[0]


@pytest.mark.parametrize(
    "text", ["~18", "18 or so", "18 approx.", "18 approximately", "18ish", "18...", "17 = 18", "2 3"]
)
def test_numbers_that_are_left_open_are_no_numbers(text: str) -> None:
    assert parse_number(text) is None


# --- rewards of numpy, bool, NaN: https://github.com/verl-project/verl/issues/6167 ------------------------------------
# and https://github.com/THUDM/slime/issues/2121


@pytest.mark.parametrize(
    ("value", "number"),
    [
        *[(np.float32(0.5), 0.5), (np.int64(2), 2.0), (np.bool_(True), 1.0), (True, 1.0), (1, 1.0)],
        *[(torch.tensor(0.5), 0.5), (np.array([0.5]), 0.5)],
    ],
)
def test_numbers_of_any_kind_are_taken(value: Any, number: float) -> None:
    reward = checked(Reward(total=value, correct=np.bool_(True), parts={"near": value}), "task=mine", PROMPT)  # type: ignore[arg-type]
    assert (reward.total, reward.correct, reward.parts) == (number, True, {"near": number})
    assert {type(reward.total), type(reward.parts["near"])} == {float} and type(reward.correct) is bool
    json.dumps(vars(reward))


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), np.float32("nan"), None, "1.0", np.array([1.0, 2.0]), 1j, 10**400]
)
def test_what_is_no_number_is_refused_with_the_prompt(value: Any) -> None:
    for reward in (
        Reward(total=value, correct=True),
        Reward(total=1.0, correct=True, parts={"near": value}),
        Reward(total=1.0, correct=value),
    ):
        with pytest.raises(TrainingStopped, match=r"task=mine, prompt gsm8k/test/1: .*return"):
            checked(reward, "task=mine", PROMPT)


def test_one_reward_for_each_completion() -> None:
    with pytest.raises(TrainingStopped, match=r"reward=mine gave 1 rewards for 2 completions"):
        all_checked([Reward(total=1.0, correct=True)], "reward=mine", [rollout("", True)] * 2)


def test_nothing_is_learned_from_a_reward_that_is_none(make_experiment: Any, make_policy: Any) -> None:
    from qerl_bench.experiment import collect_rollouts
    from qerl_core.process.device import PhaseTimer

    experiment = make_experiment()
    source = SimpleNamespace(name="mine", check_with=lambda algo: None)
    source.rewards = lambda task, rollouts, seed: [Reward(total=float("nan"), correct=False) for _ in rollouts]
    policy = make_policy()
    engine = experiment.engine.build(policy)
    with pytest.raises(
        TrainingStopped, match=r"task=arithmetic reward=mine, prompt arithmetic/.* the total of the reward is nan"
    ):
        collect_rollouts(replace(experiment, reward=source), policy, engine, 1, PhaseTimer("cpu"))


# --- rewards of one's own -------------------------------------------------------------------------------------------


class Deaf:
    """A task as they were written before completions said how they ended."""

    name = "deaf"

    def reward(self, prompt: Prompt, completion: str) -> Reward:
        return Reward(total=1.0, correct=True)


class Hearing(Deaf):
    def reward(self, prompt: Prompt, completion: str, finished: bool = True) -> Reward:
        return Reward(total=np.float32(finished), correct=finished)  # type: ignore[arg-type]


def test_a_reward_of_ones_own_is_told_how_a_completion_ended() -> None:
    assert [reward_of(Hearing(), PROMPT, "", finished).total for finished in (True, False)] == [1.0, 0.0]
    deaf: Any = Deaf()
    for ask in (lambda: check_reward(deaf), lambda: reward_of(deaf, PROMPT, "", True)):
        with pytest.raises(ConfigError, match=r"task=deaf: Deaf\.reward .*finished.*def reward\(self"):
            ask()
