"""One answer in many spellings: a hedged, denied or changed one earns nothing, a right one is not withheld."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from qerl_bench.task.grader.grader import Grader
from qerl_bench.task.grader.latex import compare
from qerl_bench.task.grader.numbers import parse_number
from tests.scripts import script

made = script("benchmarks/answer_variants.py")
graders = {
    name: Grader(answer_format="boxed", equality=name, correct_weight=1.0, format_weight=0.0)
    for name in ("math", "numeric")
}


def taken(gold: str, answers: Iterable[str]) -> list[str]:
    return [answer for answer in answers if compare(gold, answer)[0]]


# --- text behind a number: https://github.com/huggingface/Math-Verify/issues/14 and 47 --------------------------------

HEDGED = [
    *(
        " or 130",
        ", 130",
        " and 130",
        " or more",
        " at most",
        " or less",
        " not 6",
        " is wrong, it is 6",
        ", no wait 6",
    ),
    *(" maybe", " (wrong)", " is incorrect", " or so", " less than that", " is not right", " approximately", "?", "k"),
    *(" million", " squared", " and a half", " unless it is 6", " either", " instead of 6", " through 130", " to 130"),
]
COMMANDS = ("\\text", "\\mbox", "\\textbf", "\\mathrm", "\\textit", "\\operatorname")


@pytest.mark.parametrize("command", COMMANDS)
def test_text_behind_a_number_may_be_its_unit_alone(command: str) -> None:
    assert taken("120", [f"120{command}{{{said}}}" for said in HEDGED]) == []
    assert taken("120", [f"{command}{{{said}}} 120" for said in ("not", "maybe", "at least", "either", "about")]) == []


def test_what_hedges_in_words_is_no_number_either() -> None:
    said = [text for text in HEDGED if text not in (" and 130", "?")]
    assert [text for text in said if parse_number(f"120{text}") is not None] == []
    assert [
        text for text in (" more", " left over", " boxes of pens", " per day", "%") if not parse_number(f"9{text}")
    ] == []


# What math-verify leaves out, reads as a name, or takes for a list. All but the first two rows were right, or may be.
NOT_120 = [
    *("120, 130", "120;130", "120 or 130", "120 and 130", "120 or more", "120 maybe", "maybe 120", "120 ... 130"),
    *(
        r"\le 120",
        r"\pm 120",
        r"\neq 120",
        r"\not 120",
        r"\not= 120",
        r"120 \to 130",
        r"120\pm 1",
        "120?",
        "120!",
        "~120",
    ),
    *(
        "120c",
        "120 c",
        "120t",
        "120ab",
        "120h",
        "120m",
        "120x",
        "120k",
        "120'",
        "120''",
        "12'0",
        '12"0',
        "12$0",
        r"12\$0",
    ),
    *(r"12\text{}0", r"1\text{ }20", r"1{}20", r"120^{\circ}1", r"\phantom{120}", r"\cancel{120}", r"\cancel{120} 6"),
    *(r"120\text{ hours }30\text{ minutes}", r"120\text{ a}+5\text{ b}", r"120 \text{ cm}+1\text{ cm}", r"120_{5}"),
    *(
        r"\text{120 or 130}",
        r"\text{not 120}",
        r"\text{120, 130}",
        r"x=120 \text{ or } x=130",
        r"130 \text{ (not 120)}",
    ),
    *(r"\text{not} = 120", r"\{120\}\cup\{130\}", r"120\quad\text{or}\quad 130", "120 \\\\ 130", "120 & 130"),
    *("(120,130)", "120=121", "x=120=121", "120.0001", r"\begin{cases}120\\130\end{cases}", r"\hat{120}", "120 1/2"),
]
IS_120 = [
    *(
        "120",
        "120.",
        "120.0",
        "0120",
        "+120",
        "(120)",
        "{120}",
        "$120$",
        r"\(120\)",
        "x=120",
        "x = 120",
        "N=120",
        "1.2e2",
    ),
    *(
        "120e0",
        "1.2E2",
        "240/2",
        "240⁄2",
        "240∕2",
        r"\frac{240}{2}",
        "2·60",
        "2×60",
        r"2 \times 60",
        "√14400",
        "5!",
        "60+60",
    ),
    *(
        "120°",
        "120 °",
        r"120^\circ",
        r"120^{\circ }",
        "120^o",
        r"120\degree",
        r"120\%",
        "120 %",
        r"\$120",
        "120 dollars",
    ),
    *(r"120\text{ cm}", r"120 \text{ cm}^2", "120 cm", "120cm", "120 cm²", "120 cm^2", r"120\,cm", r"120~\mathrm{cm}"),
    *(r"\text{120}", r"\text{120 cm}", r"\textbf{120 cm}", r"\mathbf{120}", r"\boldsymbol{120}", r"\color{red}{120}"),
    *(
        r"\textcolor{red}{120}",
        r"\underline{120}",
        r"\mathtt{120}",
        r"\boxed{120}",
        r"\text{Area} = 120",
        "Answer: 120",
    ),
    *(r"\text{The answer is }120", r"\angle A = 120^\circ", r"120\text{ miles per hour}", r"120\text{ sq. units}"),
    *("120 apples", "120 percent", r"120\text{ m/s}^2", r"120\text{ cm²}", r"120\text{th}", r"120\ ", "120\u00a0cm"),
    *("121-1", r"\sqrt{14400}", r"1.2\cdot10^{2}", "−(−120)", r"\left(120\right)", r"120\text{.}", r"\tfrac{240}{2}"),
]


def test_siblings_of_one_number() -> None:
    assert taken("120", NOT_120) == []
    assert [answer for answer in IS_120 if answer not in taken("120", IS_120)] == []


# --- brackets by kind: https://github.com/huggingface/Math-Verify/issues/10 and 25 ------------------------------------
# characters: https://github.com/FormulasQuestion/moodle-qtype_formulas/issues/284,
# https://github.com/scitix/sieval/issues/26; numbers by how the reference is spelled, variables dropped as units

RIGHT = [
    *[
        (r"\{1,2\}", r"\{2,1\}"),
        (r"\{1,2\}", "1,2"),
        ("1,2", r"\{2, 1\}"),
        ("1,2", "2,1"),
        ("1,2", "(1,2)"),
        ("(1,2)", "1,2"),
    ],
    *[
        ("2,3", r"x=2\text{ or }x=3"),
        ("2,3", "x=2,3"),
        (r"\{1,2\}", r"1 \text{ and } 2"),
        ("(-1,2]", r"\left(-1, 2\right]"),
    ],
    *[
        ("1/3", "0.33333333"),
        (r"\frac{1}{3}", "0.33333333"),
        ("2/3", "0.66666667"),
        ("1/7", "0.14285714"),
        ("0.333333", "1/3"),
    ],
    *[
        ("1000", "1e3"),
        ("1000", "1E3"),
        ("1e3", "1000"),
        ("0.001", "1e-3"),
        ("1000", "1.0e3"),
        ("1/3", r"0.\overline{3}"),
    ],
    *[("90", "90°"), (r"90^\circ", "90°"), (r"\text{June 20}", "June 20"), (r"\text{Room 5}", "Room 5"), ("A", "(A)")],
    *[
        (r"\text{(C)}", "C"),
        (r"\text{Evelyn}", r"\textbf{Evelyn}"),
        ("no solution", "No solution."),
        ("yes", r"\text{Yes}"),
    ],
    *[
        (r"\frac{\pi}{2}", "π/2"),
        (r"3\sqrt{13}", "3√13"),
        (r"3\sqrt{13}", "3*sqrt(13)"),
        ("x^2", "x²"),
        (r"2\pi", "2pi"),
    ],
    *[(r"1 \pm \sqrt{19}", "1 ± √19"), (r"(-\infty,2)", "(−∞, 2)"), (r"\frac{3}{2}", "1½"), (r"\frac{3}{2}", "1 1/2")],
    *[
        ("25_8", "(25)_8"),
        ("25_8", "25₈"),
        ("25_8", r"25_{\text{8}}"),
        (r"10\%", r"10\text{ percent}"),
        (r"\$36", "36 dollars"),
    ],
    *[("x=5", "5=x"), ("x=5", "5"), ("x<2", "2>x"), (r"x \in [-2,7]", "[-2,7]"), ("[-2,7]", r"x \in [-2,7]")],
    *[(r"5\text{ hours }30\text{ minutes}", r"5\text{ hours}\ 30\text{ minutes}"), (r"\text{12:30}", "\\text{12:30}")],
]
WRONG = [
    *[
        (r"\{1,2\}", "(2,1)"),
        (r"\{1,2\}", "(1,2)"),
        (r"\{1,2\}", "[1,2]"),
        ("(1,2)", r"\{2,1\}"),
        ("(1,2)", r"\{1,2\}"),
    ],
    *[("(1,2)", r"1\text{ and }2"), ("(1,2)", "2,1"), ("[1,2]", "1,2"), ("1,-2", "(-2,1)"), ("(1,2]", r"\{1,2\}")],
    *[("1/3", "0.333"), ("18", "17.9999999999"), ("1/2", "0.49999"), ("1000", "1e2"), ("0.5", "0.50000001")],
    *[
        ("2t", "2s"),
        ("2t", "2"),
        ("x^{2}t", "x^{2}s"),
        ("f(x)", "f'(x)"),
        ("x", "x'"),
        ("56", r"5\text{}6"),
        ("20", "(5)_{2}"),
    ],
    *[(r"15\mbox{ cm}^2", r"15\text{ m}^2"), (r"5.4\text{ cents}", r"5.4\text{ dollars}"), (r"\$36", r"36\%")],
    *[("10 am", "10 pm"), (r"5\text{ hours }30\text{ minutes}", r"5\text{ hours}"), ("5", "5,5"), ("5", "x = 5, 6")],
    *[
        (r"\text{Room 5}", "5"),
        ("5", r"\text{Room 5}"),
        (r"\text{June 20}", "20 June"),
        (r"\text{abet}", "beta"),
        ("A", "A, B"),
    ],
    *[
        (r"\text{5 or -5}", r"\text{5 or 5}"),
        ("(1,2)", r"\text{1 2}"),
        (r"\text{east}", "not east"),
        ("no solution", "solution no"),
    ],
    *[
        (r"\frac{14}{3}", r"\neq \frac{14}{3}"),
        (r"\frac{14}{3}", r"\frac{14}{3} \to 9"),
        ("9", r"9\text{ and }\text{Evelyn}"),
    ],
]


@pytest.mark.parametrize(("gold", "answer", "right"), [*((*r, True) for r in RIGHT), *((*w, False) for w in WRONG)])
def test_kinds_and_siblings(gold: str, answer: str, right: bool) -> None:
    assert compare(gold, answer)[0] is right


# --- made by machine: 20 right and 20 wrong ways to write each reference ----------------------------------------------

OWN = [  # one of each kind that MATH-500, AIME and AMC have
    *(
        "204",
        "7",
        "-31",
        "1350",
        "2.75",
        ".0125",
        r"\frac{5}{14}",
        r"-\frac{9}{4}",
        r"\frac 27",
        r"\$41,\!250",
        r"\$7.20",
    ),
    *(
        r"35\%",
        r"48^\circ",
        r"\frac{50}{7}\text{ degrees}",
        r"21 \mbox{ cm}^2",
        r"4\sqrt{6}",
        r"\frac{\sqrt{5}}{4}",
        "7-3i",
    ),
    *(
        r"9\pi",
        r"3\frac{2}{5}",
        "x=8",
        "3x^2-5x+6",
        r"\frac{7+4b}{12}",
        "(4,-9)",
        r"\left( 2, \frac{\pi}{3} \right)",
        "(1,7]",
    ),
    *(
        r"(-\infty, 6]",
        r"(1,5) \cup (5,8)",
        r"x \in [-3,4]",
        "3,-8",
        "2, 9, 11",
        r"2 \pm \sqrt{7}",
        r"\{4,-1\}",
        "413_5",
    ),
    *(r"\text{Judith}", r"\text{(D)}", r"\text{north}", r"\begin{pmatrix} -2 \\ 5 \\ 1 \end{pmatrix}", "0"),
]


def errors(golds: list[str], equality: str = "math") -> tuple[list[str], list[str], int]:
    """Wrong answers that were taken, right ones that were withheld, and how many right ones there are."""
    found: dict[bool, list[str]] = {True: [], False: []}
    right_ones = 0
    for index, gold in enumerate(golds):
        for kind, text, right in made.variants(gold, made.other_of(golds, index)):
            right_ones += right
            if graders[equality].reward(gold, f"So $\\boxed{{{text}}}$.").correct != right:
                found[right].append(f"{kind}: {gold} <- {text}")
    return found[False], found[True], right_ones


@pytest.mark.slow
def test_own_references_in_all_spellings() -> None:
    wrongly_taken, withheld, right_ones = errors(OWN)
    assert wrongly_taken == [] and len(withheld) <= 0.01 * right_ones, withheld
    assert right_ones > 15 * len(OWN)


def test_spellings_are_what_they_say() -> None:
    """Numbers among them, read by Fraction alone, have the value of the reference or another one."""
    for index, gold in enumerate(OWN):
        ways = made.variants(gold, made.other_of(OWN, index), count=200)
        assert len({(text, right) for _, text, right in ways}) == len({text for _, text, _ in ways}), gold
        value = made.value_of(gold)
        for _, text, right in ways:
            stated = made.value_of(text.strip()) if value is not None and "e" not in text else None
            if stated is not None and value is not None:
                limit = abs(value) / 10**6 if value.denominator > 1 else 0
                assert (abs(stated - value) <= limit) == right, (gold, text)


DATA = Path(os.environ.get("QERL_DATA", "no such folder"))


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="QERL_DATA names no folder with the real data files")
@pytest.mark.parametrize("name", ["math500", "aime24", "aime25", "amc2023"])
def test_real_references_in_all_spellings(name: str) -> None:
    golds = [str(json.loads(line)["answer"]).strip() for line in (DATA / f"{name}.jsonl").read_text().splitlines()]
    wrongly_taken, withheld, right_ones = errors(golds)
    assert wrongly_taken == [] and len(withheld) <= 0.01 * right_ones, withheld
