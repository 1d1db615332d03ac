"""Strict, exact reading of answers: the traps that lenient and literal matchers fall into, one line each."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl_bench.task.grader.extract import ANSWER_FORMATS, extract, well_formed
from qerl_bench.task.grader.grader import Grader
from qerl_bench.task.grader.numbers import parse_number

GRADER = Grader(answer_format="tags", equality="numeric", correct_weight=1.0, format_weight=0.2)

# (gold, answer, are they the same number?)
TRAPS = [
    ("18", "18", True),
    ("18", "15", False),  # the first character agrees
    ("18", "1", False),
    ("18", "175", False),
    ("18", "180", False),
    ("18", "1.8", False),
    ("18", "-18", False),
    ("18", "8", False),
    ("18", "118", False),
    ("18", "18.0", True),
    ("18", "18.00", True),
    ("18", "18.", True),
    ("18", "018", True),
    ("18", "+18", True),
    ("18", "$18", True),
    ("18", "$18.00", True),
    ("18", "$ 18", True),
    ("18", "\\$18", True),
    ("18", "€18", True),
    ("18", "18 €", True),
    ("18", "18%", True),
    ("18", "18 %", True),
    ("18", "18\\%", True),
    ("18", "0.18", False),
    ("18", "18 dollars", True),
    ("18", "18 dollars.", True),
    ("18", "18 miles per hour", True),
    ("18", "18 km/h", True),
    ("18", "$18/hr", True),
    ("18", "18cm", True),
    ("18", "18 sq. ft.", True),
    ("18", "18 °C", True),
    ("18", "18 children's books", True),
    ("18", "18 children\u2019s books", True),
    ("18", "\u00a018\u00a0eggs\n", True),
    ("18", "36/2", True),
    ("18", "1.8e1", True),
    ("18", "$18$", True),
    ("18", "\\$18.00", True),
    ("18", "18 \\text{ dollars}", True),
    ("18", "\\text{18}", True),
    ("18", "18\\,\\mathrm{cm}", True),
    ("18", "\\frac{36}{2}", True),
    ("-0.5", "-\\dfrac{1}{2}", True),
    ("1000", "1{,}000", True),
    ("1000", "1,\\!000", True),
    ("1.5", "1\\frac{1}{2}", False),
    ("5.5", "1\\frac{1}{2}", False),  # 11/2 to a careless reader
    ("0.5", "\\frac12", False),
    ("5", "5 \\text{ million}", False),
    ("18", "3\\cdot6", False),
    ("18", "\\sqrt{324}", False),
    ("18", "**18**", False),  # emphasis is taken off where the answer is found
    ("18", "17.999999999999999999999", False),  # equal as floats
    ("0.1", "0.1000000000000000055511151231257827", False),  # equal as floats
    ("9007199254740993", "9007199254740992", False),  # equal as floats
    ("1,000", "1000", True),
    ("1000", "$1,000.00", True),
    ("1000000", "1,000,000", True),
    ("1000", "1,00", False),
    ("1000", "1,0000", False),
    ("1000000", "1000,000", False),
    ("1000", "1 000", False),
    ("1000", "1_000", False),
    ("1000", "1.000", False),
    ("1000", "1k", False),
    ("1", "1k", False),
    ("5", "5 million", False),
    ("5000000", "5 million", False),
    ("5", "$5M", False),
    ("5", "5 m", True),  # metres
    ("3", "3 dozen", False),
    ("3", "3 and a half", False),
    ("3", "3 or four", False),
    ("3", "3 half-dozen boxes", False),
    ("3", "3 thirds", False),
    ("10", "10 squared", False),
    ("-3", "-3", True),
    ("-3", "\u22123", True),
    ("-3", "-$3", True),
    ("-3", "$-3", True),
    ("-3", "3", False),
    ("-3", "--3", False),
    ("3", "--3", False),
    ("-3", "-$-3", False),
    ("-3", "- 3", False),  # a list item, perhaps
    ("3", "- 3", False),
    ("0", "-0", True),
    ("0.5", "1/2", True),
    ("1/2", ".5", True),
    ("3.5", "3.50", True),
    ("-0.5", "-1/2", True),
    ("0", "1/0", False),
    ("0", "0/0", False),
    ("1", "1/2/2", False),
    ("1.5", "1 1/2", False),
    ("18", "18 or 19", False),
    ("18", "18-20", False),
    ("18", "18, 19", False),
    ("18", "18 + 0", False),
    ("18", "9 * 2 = 18", False),
    ("18", "x = 18", False),
    ("18", "the answer is 18", False),
    ("18", "not 18", False),
    ("18", "18 19", False),
    ("18", "18 = x", False),
    ("18", "18!", False),
    ("18", "18..", False),
    ("18", "18 m2", False),
    ("18", "18 m\u00b2", False),
    ("18", "\uff11\uff18", False),  # full-width digits
    ("18", "\u0661\u0668", False),  # Arabic-Indic digits
    ("18", "1\u0668", False),
    ("0.5", "\u00bd", False),
    ("10", "10:30", False),
    ("18", "", False),
    ("18", " \n", False),
    ("18", "eighteen", False),
    ("18", "$", False),
    ("18", "-", False),
    ("18", ".", False),
    ("18", "nan", False),
    ("18", "inf", False),
]


@pytest.mark.parametrize(("gold", "answer", "same"), TRAPS)
def test_trap_table(gold: str, answer: str, same: bool) -> None:
    number = parse_number(gold)
    assert (number is not None and number == parse_number(answer)) is same
    assert GRADER.reward(gold, f"<think>x</think><answer>{answer}</answer>").correct is same


def test_what_is_read_wrong_is_no_number_at_all() -> None:
    refused = ["1,00", "1,0000", "1000,000", "0,123", "5 million", "$5M", "18k", "- 3", "1/0", "18-20", "18 m2"]
    assert [text for text in refused if parse_number(text) is not None] == []


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3.50", Fraction(7, 2)),
        ("-1/3", Fraction(-1, 3)),
        ("1,234,567.89", Fraction(123456789, 100)),
        ("1,000/3", Fraction(1000, 3)),
        ("1e3", Fraction(1000)),
        ("25E-2", Fraction(1, 4)),
        ("1e100", Fraction(10**100)),
        (".125", Fraction(1, 8)),
        ("\u2212$1,000", Fraction(-1000)),
    ],
)
def test_parse_number_is_exact(text: str, value: Fraction) -> None:
    assert parse_number(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "1e1000000000",
        "1e-1000000000",
        "1e101",
        "1e" + "9" * 150,
        "9" * 100_000,
        "1/" + "9" * 100_000,
        "1" + ",000" * 100_000,
        "18" + " a" * 100_000,
        "18 " + "a-" * 90 + "!",
        "18 " + "a" * 190 + "!",
    ],
)
def test_hostile_text_is_refused_at_once(text: str) -> None:
    start = time.process_time()
    assert parse_number(text) is None
    assert time.process_time() - start < 0.5


def test_an_unreadable_gold_answer_is_never_matched() -> None:
    assert not GRADER.reward("eighteen", "<think>a</think><answer>eighteen</answer>").correct
    assert not GRADER.is_readable("eighteen") and GRADER.is_readable("$18")


TAGS = ("<think>", "</think>", "<answer>", "</answer>")
pieces = st.sampled_from(
    [*TAGS, *("18", " ", "-", "$", ",000", ".5", "/", "e9"), *("####", "\\boxed{", "{", "}", "\\", "A:", "**", "\n")]
)


@settings(max_examples=300, deadline=None)
@given(st.lists(pieces, max_size=10).map("".join) | st.text(max_size=40))
def test_any_text_is_judged_without_an_error(text: str) -> None:
    for answer_format in ANSWER_FORMATS:
        found = extract(text, answer_format)
        number = parse_number(text if found is None else found)
        assert number is None or isinstance(number, Fraction)
        if well_formed(text, answer_format):
            assert found is not None


@settings(max_examples=200, deadline=None)
@given(st.integers(-(10**12), 10**12), st.sampled_from(["{}", "{:,}", "{}.0", "{:,}.00", "{} apples", "{:,}%", " {} "]))
def test_every_way_to_write_an_integer_reads_as_that_integer(value: int, form: str) -> None:
    assert parse_number(form.format(value)) == value
