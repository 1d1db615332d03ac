"""Part 2 of the fair test: what its page says beside the words of results/words.md, made again from the runs."""

from __future__ import annotations

import re
import sys
from typing import Any

import pandas as pd
import pytest
from scipy import stats

from qerl_core.options import user_options
from qerl_core.statistics import Estimate, holm
from qerl_studies.design.design import read_design
from qerl_studies.design.sessions import read_sessions
from tests.scripts import ROOT, script

STUDY = ROOT / "studies" / "fair-2026"
PART = STUDY / "rates"
PAGE = script("studies/fair-2026/rates.py")
BESIDE = script("studies/fair-2026/beside_parts.py")
MECHANISM = script("studies/fair-2026/mechanism.py")
FOUND = sys.modules["rates_analysis.contrasts"]  # as the page has it


@pytest.fixture(autouse=True)
def _words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_options, "_in_use", [])
    user_options.use([STUDY / "conf"])


def test_the_committed_words_are_those_that_the_programs_make() -> None:
    made = {
        "rates": PAGE.words_page({size: PAGE.read_size(size, PART / "data") for size in PAGE.DESIGNS}),
        "mechanism": MECHANISM.words_page(MECHANISM.HERE),
        "nf4": BESIDE.nf4_page(BESIDE.NF4),
        "full": BESIDE.full_page(BESIDE.OF_FULL, PART / "data"),
        "ranks": BESIDE.ranks_page(BESIDE.OF_RANKS),
        "fp8": BESIDE.fp8_page(BESIDE.FP8),
    }
    for part, page in made.items():
        assert page == (STUDY / part / "results" / "words.md").read_text(), part


def test_the_page_says_what_the_words_say() -> None:
    """Effects as words.md has them of the same model, shares rounded to a digit; as many as the tables have cells."""
    page, words = part_2(), (PART / "results" / "words.md").read_text().partition("## 1.5B")
    of_words = {"0.5B": triples(words[0]), "1.5B": triples(words[2])}
    rows = [(line, triples(line)) for line in page.splitlines() if triples(line)]
    counted = 0
    for line, said in rows:
        one_model = next((size for size in of_words if line.startswith(f"| {size}, ")), None)
        if len(said) % 2 and one_model is None:
            continue  # of some copies, or of more: the tests below
        half = len(said) // 2
        models = [one_model] * len(said) if one_model else ["0.5B"] * half + ["1.5B"] * half
        for triple, model in zip(said, models, strict=True):
            assert any(near(triple, other) for other in of_words[model]), line
        counted += len(said)
    assert counted == 18 + 18 + 12 + 26
    verdicts = r"\*\*(higher|lower|not decided)\*\*"
    each = [re.findall(verdicts, one.partition("### If one copy")[0]) for one in (words[0], words[2])]
    assert re.findall(verdicts, page) == [word for pair in zip(*each, strict=True) for word in pair]


def test_the_page_says_what_hangs_on_single_copies() -> None:
    """By the table of results/words.md, a row for each copy that is left out."""
    small, _, large = (PART / "results" / "words.md").read_text().partition("## 1.5B")
    hangs: dict[str, list[str]] = {}
    for size, words in (("0.5B", small), ("1.5B", large)):
        for line in re.findall(r"(?m)^\| (4[3-9]|50) \| (.+) \|$", words.partition("### If one copy")[2]):
            four_six, nearest, _, answering, _ = re.findall(r"\*\*(.+?)\*\*", line[1])
            hangs.setdefault(f"{size} four-six", []).extend([line[0]] * (four_six != "lower"))
            hangs.setdefault(f"{size} nearest", []).extend([line[0]] * (nearest != "lower"))
            hangs.setdefault(f"{size} answering", []).extend([line[0]] * (answering != "higher"))
    assert hangs["0.5B four-six"] == hangs["0.5B nearest"] == []
    assert table_behind("| word | is *not decided* without") == [
        ["0.5B, `four-six` or nearest minus BF16, lower", "none"],
        ["0.5B, answering, higher", ", ".join(hangs["0.5B answering"])],
        ["1.5B, `four-six` minus BF16, lower", ", ".join(hangs["1.5B four-six"])],
        ["1.5B, answering, higher", ", ".join(hangs["1.5B answering"])],
    ]


def test_the_page_says_what_is_left_without_one_session() -> None:
    rows = PAGE.read_size("1.5B", PART / "data").rows
    rows = rows[~rows["arm"].str.endswith(PAGE.THIRD)]  # which has sessions of its own
    table = table_behind("| the 1.5B without the session of |")
    assert [line[0] for line in table] == ["43 and 44", "45 and 46", "47 and 48", "49 and 50"]
    for line in table:
        left_out = [int(copy) for copy in line[0].split(" and ")]
        assert rows[rows["copy"].isin(left_out)]["session"].nunique() == 1
        rest = rows[~rows["copy"].isin(left_out)]
        four_six, nearest, _ = FOUND.tested(rest, FOUND.primary(rest), copies=6).values()
        answering, _ = FOUND.tested(rest, FOUND.costs(rest), copies=6).values()
        assert [line[2], line[5]] == [four_six.word, answering.word]
        for said, one in zip(line[1::2], (four_six, nearest), strict=False):
            assert same(said, one.found)
        assert same(line[4], answering.found)


def test_the_page_says_what_paired_copies_would_say() -> None:
    """P values after Holm, over the contrasts of the protocol's table."""
    rows = PAGE.read_size("1.5B", PART / "data").rows
    late = rows.pivot(index="copy", columns="arm", values="late")
    gaps = {rate: late[f"nvfp4-{rate}"] - late[f"bf16-{rate}"] for rate in FOUND.RATES}
    asked = (late["four-six-2e-4"] - late["bf16-2e-4"], gaps["2e-4"], gaps["4e-4"] - gaps["2e-4"])
    tests: list[Any] = [stats.ttest_1samp(one, 0) for one in asked]
    nearest = holm([one.pvalue for one in tests])[1]
    full, _ = BESIDE.rows_of(BESIDE.OF_FULL)
    late = full.pivot(index="copy", columns="arm", values="late")
    each = [stats.ttest_rel(late[arm], late["full"]).pvalue for arm in ("four-six-2e-4", "nvfp4-2e-4")]
    assert f"with p {nearest:.3f} after the correction" in part_2()
    assert {f"{p:.3f}" for p in holm(each)} == {"0.041"} and "full training, with 0.041" in part_2()


def test_the_page_says_what_learning_costs_in_both_parts_together() -> None:
    ours = PAGE.read_size("0.5B", PART / "data").rows
    ours = ours.assign(arm=ours["arm"].str.removesuffix("-2e-4"))
    theirs = MECHANISM.rows_of(MECHANISM.read(MECHANISM.HERE))
    both = pd.concat([ours, theirs.assign(session="of part 8, " + theirs["session"])])
    table = table_behind("| policies trained by nearest minus those of BF16,")
    for line, mode in zip(table, ("sampled", "greedy"), strict=True):
        found = FOUND.effect(both, FOUND.minus("nvfp4", "bf16"), f"{mode} in bf16")
        assert found.n == 16 and same(line[1], found)


def test_the_page_says_how_many_answers_were_cut_off() -> None:
    said = {line[0]: line[1:] for line in table_behind("| answers cut off, late,")}
    for size, first in (("05b", 0), ("15b", 2)):
        design = read_design(PART / size / "study.yaml", user_options.search_path([STUDY / "conf"]))
        folders = [path.parent for path in sorted((PART / "data" / size).glob("*/study.yaml"))]
        shares: dict[str, list[float]] = {}
        for (arm, _, _), run in read_sessions(design, folders).runs.items():
            late = [PAGE.at(run, "eval/accuracy_sampled_truncated", step) for step in PAGE.LATE]
            shares.setdefault(arm, []).append(100 * sum(late) / len(late))
        for kind, name in (("bf16", "BF16"), ("nvfp4", "NVFP4, nearest"), ("four-six", "NVFP4, `four-six`")):
            for at, rate in enumerate(FOUND.RATES, first):
                of = shares[f"{kind}-{rate}"]
                mean, largest = map(float, said[name][at].split(", "))
                assert abs(mean - sum(of) / 8) <= 0.051 and abs(largest - max(of)) <= 0.051


def same(said: str, found: Estimate) -> bool:
    return near(triples(said)[0], tuple(f"{100 * value:+.3f}" for value in (found.value, found.low, found.high)))


def table_behind(head: str) -> list[list[str]]:
    """The cells of a table of part 2, without its two first lines."""
    lines = part_2().partition(head)[2].partition("\n\n")[0].splitlines()[2:]
    return [line.strip("| ").split(" | ") for line in lines]


def part_2() -> str:
    """Its sections of the page."""
    sections = re.split(r"(?m)^(?=## )", (STUDY / "README.md").read_text())
    return "".join(section for section in sections if section.startswith("## Part 2"))


def triples(text: str) -> list[tuple[str, ...]]:
    return re.findall(r"x?([+-]?[\d.]+) \[([+-]?[\d.]+), ([+-]?[\d.]+)\]", text)


def near(said: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether it is the same to the digits that are said."""
    digits = len(said[0].partition(".")[2])
    return all(abs(float(one) - float(two)) <= 0.51 * 10**-digits for one, two in zip(said, other, strict=True))
