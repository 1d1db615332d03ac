"""What a completion earns: traps for lenient and for literal graders, LaTeX within its time limit, and real answers."""

from __future__ import annotations

import json
import os
import select
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from qerl_bench.task.grader import latex
from qerl_bench.task.grader.extract import ANSWER_FORMATS
from qerl_bench.task.grader.grader import Grader
from qerl_bench.task.grader.latex import Comparer, compare
from qerl_core.checks import ConfigError
from tests.failing import failing

NUMERIC = Grader(answer_format="tags", equality="numeric", correct_weight=1.0, format_weight=0.2)
MATH = replace(NUMERIC, equality="math")
WRITTEN = {
    "tags": "<think>a</think>\n<answer>{}</answer>",
    "hash": "So\n#### {}",
    "boxed": "So $\\boxed{{{}}}$.",
    "colon": "So\nA: {}",
}

# --- traps ---

# (completion, correct, well formed) for the gold answer 18: both graders agree on all of these
TRAPS = [
    ("<think>a</think><answer>18</answer>", True, True),
    ("<think>a</think><answer>15</answer>", False, True),  # the first character agrees
    ("<think>a</think><answer>175</answer>", False, True),
    ("<think>a</think><answer>18.0</answer>", True, True),
    ("<think>a</think><answer>$18</answer>", True, True),
    ("<think>a</think><answer>\\$18</answer>", True, True),
    ("<think>a</think><answer>$18$</answer>", True, True),
    ("<think>a</think><answer>-18</answer>", False, True),
    ("<think>a</think><answer>36/2</answer>", True, True),
    ("<think>a</think><answer>17.9999999999</answer>", False, True),
    ("<think>a</think><answer>18 \\text{ cm}</answer>", True, True),
    ("<think>a</think><answer></answer>", False, True),
    ("<think>a</think><answer> \n</answer>", False, True),
    ("", False, False),
    ("18", False, False),
    ("<think>a</think><answer>15</answer><answer>18</answer>", False, False),
    ("<think>a</think><answer>18</answer><answer>18</answer>", False, False),
    ("<think>it is <answer>18</answer></think><answer>15</answer>", False, False),
    ("<think>it is <answer>15</answer></think><answer>18</answer>", True, False),
    ("<think>it is <answer>18</answer></think>", False, False),
    ("<think>a</think><answer>\uff11\uff18</answer>", False, True),  # full-width digits
    ("<think>a</think><answer>\u0661\u0668</answer>", False, True),  # Arabic-Indic digits
    ("<think>a</think><answer>1e1000000000</answer>", False, True),
    ("<think>a</think><answer>" + "1" * 100_000 + "</answer>", False, True),
]


@pytest.mark.parametrize("grader", [NUMERIC, MATH], ids=["numeric", "math"])
@pytest.mark.parametrize(("completion", "correct", "formed"), TRAPS)
def test_trap_table(grader: Grader, completion: str, correct: bool, formed: bool) -> None:
    reward = grader.reward("18", completion)
    assert (reward.correct, reward.parts["correct"], reward.parts["format"]) == (correct, correct, formed)
    assert reward.total == pytest.approx(1.0 * correct + 0.2 * formed)


# (gold, answer, are they equal?)
LATEX = [
    ("\\frac{1}{2}", "0.5", True),
    ("\\frac{1}{2}", "\\dfrac12", True),
    ("\\frac{1}{2}", "\\frac{1}{3}", False),
    ("\\frac{1}{3}", "0.333", False),
    ("2\\sqrt{3}", "\\sqrt{12}", True),
    ("x^2 + 2x + 1", "(x+1)^2", True),
    ("x^2 + 2x + 1", "(x-1)^2", False),
    ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3, \\pi/2)", True),
    ("\\left( 3, \\frac{\\pi}{2} \\right)", "(\\pi/2, 3)", False),
    ("\\{1, 2\\}", "\\{2, 1\\}", True),
    ("(-\\infty, 2]", "(-\\infty, 2)", False),
    ("\\text{Evelyn}", "\\text{Evelyn}", True),
    ("\\text{Evelyn}", "\\text{Carla}", False),
    ("1,000", "1000", True),
    ("1000", "1001", False),
    ("90^\\circ", "90", True),
    ("x = 5", "5", True),
    ("10\\%", "10", True),
    ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 3 \\end{pmatrix}", False),
    ("10\\%", "10%", True),
    ("10\\%", "0.1", False),
    ("18", "15 or 18", False),
    ("18", "18, 15", False),
    ("18", "15} or $\\boxed{18", False),  # would close the box it is put in and open a second one
    ("18", "\\text{not }18", False),
    ("18", "18 x", False),
    ("18", "17 < 18", False),
    ("18", "1 8", False),
    ("18", "}{", False),
    ("18", "\\frac{", False),
    ("18", "$$$$", False),
    ("18", "\\boxed{18", False),
    ("\u0661\u0668", "\u0661\u0668", False),
]


@pytest.mark.parametrize(("gold", "answer", "equal"), LATEX)
def test_latex_answers(gold: str, answer: str, equal: bool) -> None:
    assert compare(gold, answer)[0] is equal


# --- the time limit ---

SLOW = [
    "10^{10^{9}}",
    "2^{3^{4^{5^{6}}}}",
    "1000000000!",
    "\\prod_{n=1}^{10^{9}} (n^2+1)",
    "(x+y+z+w)^{2000}",
]


@pytest.mark.parametrize("answer", SLOW)
@pytest.mark.usefixtures("brief")
def test_slow_expressions_are_wrong_within_the_limit(answer: str) -> None:
    compare("\\frac{1}{2}", "0.5")  # a worker is there
    start = time.perf_counter()
    assert not MATH.reward("x+1", f"<think>a</think><answer>{answer}</answer>").correct
    assert time.perf_counter() - start < 20  # on a machine as busy as it may be; the limit is in CPU time
    assert compare("\\frac{1}{2}", "0.5")[0]


@pytest.mark.usefixtures("brief")
def test_the_limit_is_the_kernels_and_ends_work_in_progress() -> None:
    worker = Comparer()
    asked = {"gold": "x+1", "answer": "3^{10^{10}}", "limit_s": 0.3}
    assert worker.ask(asked) is None  # ended over it
    assert worker.ask({"gold": "x+1", "answer": "1+x", "limit_s": 5}) == {"equal": True, "canonical": "x + 1"}
    first = worker.process
    assert worker.ask({"gold": "x+1", "answer": "2+x", "limit_s": 5}) == {"equal": False, "canonical": "x + 2"}
    assert worker.process is first  # reused
    assert first is not None
    first.kill()
    first.wait()
    assert worker.ask({"gold": "x", "answer": "x", "limit_s": 5}) == {"equal": True, "canonical": "x"}
    worker.close()
    assert worker.process is None


@pytest.mark.usefixtures("brief")
def test_the_limit_holds_in_every_thread() -> None:
    answers = {"0.5": True, "10^{10^{9}}": False, "\\frac{2}{4}": True, "2^{3^{4^{5^{6}}}}": False, "0.25": False}
    found: dict[str, bool] = {}

    def grade(answer: str) -> None:
        found[answer] = compare("\\frac{1}{2}", answer)[0]

    threads = [threading.Thread(target=grade, args=(answer,)) for answer in answers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == answers


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # Python 3.12: of any fork
def test_an_interrupted_request_leaves_no_reply_for_the_next() -> None:
    worker = Comparer()
    with failing(select, "select", KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        worker.ask({"gold": "x", "answer": "x", "limit_s": 5})
    assert worker.ask({"gold": "x", "answer": "y", "limit_s": 5}) == {"equal": False, "canonical": "y"}
    worker.close()


def test_a_forked_child_has_a_worker_of_its_own() -> None:
    compare("\\frac{1}{2}", "0.5")
    ours = latex._current.process
    child = os.fork()
    if child == 0:
        right = latex._worker().owner == os.getpid() and compare("\\frac{1}{4}", "0.25")[0]
        latex._worker().close()
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert latex._current.process is ours
    assert compare("\\frac{1}{2}", "0.50")[0]


# --- words ---


def test_words_are_compared_without_case_spacing_and_punctuation() -> None:
    grader = replace(NUMERIC, equality="words", answer_format="colon")
    for answer in ("Mexico City", "**mexico  city.**"):
        assert grader.reward("Mexico City", f"So\nA: {answer}").correct, answer
    for answer in ("Mexico", "Mexicocity"):
        assert not grader.reward("Mexico City", f"So\nA: {answer}").correct, answer
    assert grader.is_readable("Ø") and not grader.is_readable("!?")


# --- options ---


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer_format": "xml"}, r"task\.answer_format must be one of tags, hash, boxed, colon, auto, got 'xml'"),
        ({"equality": "string"}, r"task\.equality must be one of numeric, math, words, got 'string'"),
        ({"correct_weight": 0.0}, r"task\.correct_weight .* got 0\.0"),
        ({"format_weight": float("nan")}, r"task\.format_weight .* got nan"),
    ],
)
def test_options_out_of_range_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(NUMERIC, **change)


@pytest.mark.usefixtures("no_packages")
def test_without_math_verify_the_grader_says_what_to_install() -> None:
    NUMERIC.check()
    with pytest.raises(ConfigError, match=r"task\.equality=math needs the package math_verify.*\[math\]"):
        MATH.check()


def test_ways_to_write_one_answer_are_one_answer() -> None:
    for grader, ways in ((NUMERIC, ["$1,000", "1000.0", "1000 eggs"]), (MATH, ["\\frac{2}{4}", "0.5", "\\dfrac12"])):
        found = {grader.reward("7", WRITTEN["tags"].format(way)).answer for way in ways}
        assert len(found) == 1, found
    assert NUMERIC.reward("7", "no answer").answer is None


# --- real answers: each is right in every format, and wrong for the question before it ---

DATA = Path(os.environ.get("QERL_DATA", "no such folder"))
real = pytest.mark.skipif(not DATA.is_dir(), reason="QERL_DATA names no folder with the real data files")
SIZES = {"gsm8k_test": 1319, "math500": 500, "aime24": 30, "aime25": 30, "amc2023": 40}
# Consecutive answers that are truly equal, by the number of the first (from 1).
EQUAL_NEIGHBOURS: dict[str, list[int]] = {
    # 40, 10, 98, 5, 300, 10, 4, 50, 10, 6, 60, 10, 2, 2, 17
    "gsm8k_test": [54, 125, 205, 435, 534, 656, 671, 704, 774, 913, 929, 1037, 1083, 1170, 1178],
    "math500": [23, 187, 404],  # 5 and x=5, 7, 3
    "aime24": [],
    "aime25": [],
    "amc2023": [20, 22, 23],  # 9, 7, 7
}


def golds(name: str) -> list[str]:
    rows = [json.loads(line)["answer"] for line in (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row.rpartition("####")[2].strip() for row in rows]


@real
@pytest.mark.parametrize("name", SIZES)
def test_every_real_answer_is_right_for_its_question_and_wrong_for_the_one_before(name: str) -> None:
    answers = golds(name)
    assert len(answers) == SIZES[name]
    grader = NUMERIC if name == "gsm8k_test" else MATH
    for answer_format in ANSWER_FORMATS:
        chosen = replace(grader, answer_format=answer_format)
        for form in WRITTEN if answer_format == "auto" else (answer_format,):
            missed = [gold for gold in answers if chosen.reward(gold, WRITTEN[form].format(gold)).parts != RIGHT]
            assert missed == [], (answer_format, form)
            equal = [
                number
                for number, (gold, other) in enumerate(zip(answers, answers[1:] + answers[:1], strict=True), start=1)
                if chosen.reward(gold, WRITTEN[form].format(other)).correct
            ]
            assert equal == EQUAL_NEIGHBOURS[name], (answer_format, form)


RIGHT = {"correct": 1.0, "format": 1.0}
