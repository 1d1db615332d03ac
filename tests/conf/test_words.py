"""Pages are light: few numbers in 100 words of prose, and few in a sentence. Intervals stand in tables. What is below
the first screen of a study may have a few more.

A number is one in digits or in words; "one" is left out, which is seldom a number in English. A word that the glossary
gives a meaning of its own is linked to it, or explained in italics, where a page has it first.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUDIES = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "studies").glob("*/README.md"))
FOUND = ("README.md", "studies/README.md", *STUDIES)  # what was found
LIGHT = (*FOUND, "docs/concepts.md")  # a page joins when it has been made so
SCREEN = 40  # lines of a study's page
WORDS, PER_100, PER_SENTENCE = 450, 5, 3  # of the README; numbers, of each page
IN_FULL = 8  # numbers in 100 words of a whole page of a study
IN_WORDS = (
    "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
    "nineteen twenty thirty forty fifty sixty seventy eighty ninety hundred thousand million half halves third thirds "
    "quarter quarters fifth fifths tenth tenths twice"
)
NUMBER = re.compile(
    r"(?<![\w.])[-+x\N{MULTIPLICATION SIGN}]?\d+(?:[.,]\d+)*"
    rf"|(?<![\w-])(?:{'|'.join(sorted(IN_WORDS.split(), key=len, reverse=True))})(?!\w)",
    flags=re.IGNORECASE,
)
# Of the glossary's words those that a reader who trains language models has with this meaning, and plain English.
KNOWN = (
    "experiment study sweep run setting seed factor cell stratum design probe state block tier matched position "
    "page row request point refusal failure policy rollout group batch update sampler trainer ratio lag advantage "
    "engine rank sync recompute schedule stage sigma draw controller injector router code symmetric adapter reward "
    "grader strict lenient validation loss straight-through taught underflow micro-batch session fingerprint seal "
    "launcher spec invariant activations prefix cluster verdict fixed truncated"
)


def screen(name: str) -> str:
    """What a reader sees first: of a study's page 40 lines."""
    lines = (ROOT / name).read_text().splitlines()
    return "\n".join(lines[:SCREEN] if name.startswith("studies/") else lines)


def prose(page: str) -> str:
    """The text of a page without code, tables, headings and pictures; of links what they are called."""
    kept = [
        line
        for line in re.sub(r"```.*?```", "", page, flags=re.DOTALL).splitlines()
        if not line.startswith(("|", "    ", "#", "!["))
    ]
    return re.sub(r"\]\([^)]*\)", "]", " ".join(kept))


def numbers(text: str) -> list[str]:
    return NUMBER.findall(text)


def share(text: str) -> float:
    """Numbers in 100 words."""
    return 100 * len(numbers(text)) / len(text.split())


def crowded(text: str) -> list[str]:
    """The sentences with too many numbers."""
    return [one for one in re.split(r"(?<=[.:!?])[*_]*\s", text) if len(numbers(one)) > PER_SENTENCE]


@pytest.mark.parametrize("name", LIGHT)
def test_a_first_screen_is_light(name: str) -> None:
    text = prose(screen(name))
    assert share(text) <= PER_100 and crowded(text) == []


@pytest.mark.parametrize("name", (*STUDIES, "studies/README.md"))
def test_a_whole_page_of_a_study_is_light(name: str) -> None:
    text = prose((ROOT / name).read_text())
    assert share(text) <= IN_FULL and crowded(text) == []


def test_the_readme_is_short() -> None:
    assert len(prose((ROOT / "README.md").read_text()).split()) <= WORDS


def terms() -> set[str]:
    """The words of the glossary, without those that need no link."""
    page = (ROOT / "docs/glossary.md").read_text()
    cells = re.findall(r"(?m)^\| ([^|]+) \|", page)
    parts = {part for cell in cells for part in re.sub(r"\([^)]*\)|\*", "", cell).split(",")}
    return {part.strip() for part in parts} - {"term", "---", *KNOWN.split()}


EXPLAINED = re.compile(r"\[[^\]]*\]\([^)]*glossary\.md[^)]*\)|(?<![*\w])\*[^*\n]+\*(?![*\w])")


def uses(word: str) -> re.Pattern[str]:
    stem, ends = (word[:-1], "y|ies") if word.endswith("y") else (word, "s?")
    return re.compile(rf"(?<![\w-]){re.escape(stem)}(?:{ends})(?![\w-])", re.IGNORECASE)


def unexplained(page: str, words: set[str]) -> list[str]:
    """The words whose first use in text or tables is neither in a link to the glossary nor in italics."""
    shown = "\n".join(line for line in page.splitlines() if not line.startswith(("#", "![", "    ")))
    shown = re.sub(r"```.*?```|`[^`]*`", "", shown, flags=re.DOTALL)
    hidden = EXPLAINED.sub(lambda one: " " * len(one[0]), shown)  # the same places, without what is explained
    elsewhere = re.sub(r"\]\([^)]*\)", lambda link: " " * len(link[0]), hidden)
    missing = []
    for word in sorted(words):
        plain = uses(word).search(elsewhere)
        told = (one.start() for one in EXPLAINED.finditer(shown) if uses(word).search(one[0]))
        if plain and plain.start() < min(told, default=len(shown)):
            missing.append(word)
    return missing


PLAIN = {"copy", "look", "packing", "control", "cut off", "trap"}  # below the first screen often plain English


@pytest.mark.parametrize("name", STUDIES)
def test_words_of_a_whole_page_are_explained_too(name: str) -> None:
    assert unexplained((ROOT / name).read_text(), terms() - PLAIN) == []


@pytest.mark.parametrize("name", FOUND)
def test_words_of_our_own_are_explained_where_they_come_first(name: str) -> None:
    assert unexplained(screen(name), terms()) == []


def test_a_word_is_explained_in_a_link_or_in_italics() -> None:
    words = {"copy", "gate", "dose", "arm"}
    page = "# The gate\n\nA [copy](../docs/glossary.md#runs). A *dose* is small. Copies and doses, and [gates](x.md).\n"
    assert unexplained(page, words) == ["gate"]
    assert unexplained("| copies | arm |\n", words) == ["arm", "copy"]
    assert {"copy", "gate", "base", "planted effect", "AQN"} <= terms() and "run" not in terms()


def test_numbers_are_seen_where_they_are() -> None:
    page = "# 7\n\nA 0.5B ends -4.7 points [1.3, 3.5] lower, see [2](x9.md).\n\n    code 5\n| 6 |\n```\n8\n```\n"
    assert numbers(prose(page)) == ["0.5", "-4.7", "1.3", "3.5", "2"]
    assert numbers("Twelve copies in two-thirds of one; twenty-six and tens; -half") == ["Twelve", "two", "twenty"]
