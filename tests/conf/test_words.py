"""First screens are light: few numbers in 100 words of prose, and few in a sentence. Intervals stand in tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIGHT = ("README.md", "docs/concepts.md")  # a page joins when it has been made so
SCREEN = 40  # lines of a study's page
WORDS, PER_100, PER_SENTENCE = 450, 5, 3  # of the README; digits, of each page


def prose(page: str) -> str:
    """The text of a page without code, tables, headings and pictures; of links what they are called."""
    kept = [
        line
        for line in re.sub(r"```.*?```", "", page, flags=re.DOTALL).splitlines()
        if not line.startswith(("|", "    ", "#", "!["))
    ]
    return re.sub(r"\]\([^)]*\)", "]", " ".join(kept))


def numbers(text: str) -> list[str]:
    return re.findall(r"(?<![\w.])[-+x\N{MULTIPLICATION SIGN}]?\d+(?:[.,]\d+)*", text)


@pytest.mark.parametrize("name", LIGHT)
def test_a_page_is_light(name: str) -> None:
    lines = (ROOT / name).read_text().splitlines()
    text = prose("\n".join(lines[:SCREEN] if name.startswith("studies/") else lines))
    assert len(numbers(text)) <= PER_100 * len(text.split()) / 100
    assert max(len(numbers(sentence)) for sentence in re.split(r"(?<=[.:!?])\s", text)) <= PER_SENTENCE


def test_the_readme_is_short() -> None:
    assert len(prose((ROOT / "README.md").read_text()).split()) <= WORDS


def test_numbers_are_seen_where_they_are() -> None:
    page = "# 7\n\nA 0.5B ends -4.7 points [1.3, 3.5] lower, see [2](x9.md).\n\n    code 5\n| 6 |\n```\n8\n```\n"
    assert numbers(prose(page)) == ["0.5", "-4.7", "1.3", "3.5", "2"]
