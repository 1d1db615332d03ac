"""The README is short; effects on it and on pages of studies are those of results pages and committed answers."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from qerl_studies.report.sessions import read_once
from qerl_studies.runs.load import Run

ROOT = Path(__file__).parents[2]
STUDIES = ROOT / "studies"
NUMBER = r"[×x]?([-+]?\d+\.\d+)"
EFFECT = re.compile(rf"{NUMBER}(?:\*\*)?(?: points)?,? ?(?:9\d(?:\.\d)? % )?\[{NUMBER}, {NUMBER}\]")
TRIED = (STUDIES / "tried.md").read_text()
NAMES = dict(re.findall(r"(?m)^\| (\d+) \| \[([\w-]+)\]", TRIED))
ARMS = {
    "NVFP4 - BF16": ("nvfp4", "bf16"),
    "noise on NVFP4 - none": ("nvfp4-noise", "nvfp4"),
    "noise on NVFP4 - none, 97.1 %": ("nvfp4-noise", "nvfp4"),
    "noise of the paper's size on NVFP4 - none": ("nvfp4-paper", "nvfp4"),
    "supervised, NVFP4 - BF16": ("nvfp4-sft", "bf16-sft"),
    "supervised, NF4 - BF16": ("nf4-sft", "bf16-sft"),
}
SUMS = re.findall(r"(?m)^\| ([^|]+) \| ([\d, ]+) \| (\d+) \| ([^|]+) \| ([^|]+) \|$", TRIED)


def points(run: Run, mode: str) -> float:
    answers = run.kept_answers
    assert answers is not None
    last = answers[(answers["mode"] == mode) & (answers["step"] > 0)]
    return 100 * float(last["correct"].sum()) / float(last["samples"].sum())


def by_base(name: str, arm: str, control: str, mode: str) -> list[float]:
    """The mean over seeds of the difference, for each base."""
    if (name, arm) == ("worlds-2026-settings", "nvfp4-noise"):
        arm = "nvfp4-exp"  # the same noise, beside other schedules
    found: dict[int, list[float]] = {}
    for one, other in zip(*read_once(STUDIES / name).pairs(arm, control), strict=True):
        found.setdefault(one.option("model.seed"), []).append(points(one, mode) - points(other, mode))
    return [float(np.mean(values)) for values in found.values()]


@pytest.mark.parametrize("row", SUMS, ids=lambda row: f"{row[0]} in {row[1]}")
def test_sums_over_studies_are_made_again(row: tuple[str, ...]) -> None:
    contrast, numbers, bases, *said = row
    for text, mode in zip(said, ("sampled", "greedy"), strict=True):
        values = [one for number in numbers.split(", ") for one in by_base(NAMES[number], *ARMS[contrast], mode)]
        assert len(values) == int(bases)
        level = 0.971 if "97.1" in contrast else 0.95
        reach = stats.t.ppf((1 + level) / 2, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
        mean = float(np.mean(values))
        assert text == f"{mean:+.2f} [{mean - reach:+.2f}, {mean + reach:+.2f}]"


@pytest.mark.parametrize(
    ("page", "numbers"),
    [
        ("verdicts.md", "1234"),
        ("worlds-2026/README.md", "1"),
    ],
)
def test_what_of_a_loss_is_of_sampled_answers_only_is_made_again(page: str, numbers: str) -> None:
    ways = [
        np.array([one for number in numbers for one in by_base(NAMES[number], "nvfp4", "bf16", mode)])
        for mode in ("sampled", "greedy")
    ]
    only = ways[1] - ways[0]
    reach = stats.t.ppf(0.975, len(only) - 1) * np.std(only, ddof=1) / len(only) ** 0.5
    mean, whole = only.mean(), -ways[0].mean()
    said = f"({mean:.1f} of {whole:.1f} points [{mean - reach:.1f}, {mean + reach:.1f}])"
    assert said in (STUDIES / page).read_text()


def test_all_sums_were_found() -> None:
    assert {row[0] for row in SUMS} == ARMS.keys() and len(SUMS) == 8


DOSES = re.findall(r"(?m)^\| ([\w-]+) \| (0\.\d{3}) \| (\d+), (\d\.\d) \| (0\.\d{3}) \|", TRIED)


@pytest.mark.parametrize("row", DOSES, ids=lambda row: row[0])
def test_doses_are_those_of_the_probes(row: tuple[str, ...]) -> None:
    name, *said = row
    doses = [probe["doses"] for probe in read_once(STUDIES / name).probes.values()]
    found = [one.get("nvfp4-noise", one.get("nvfp4-exp")) for one in doses]
    sigma, kl = (float(np.mean([dose[key] for dose in found])) for key in ("sigma", "kl"))
    assert said == [f"{sigma:.3f}", f"{sigma / 0.01:.0f}", f"{sigma / 0.05:.1f}", f"{kl:.3f}"]


def test_all_doses_were_found() -> None:
    assert len(DOSES) == 6


def found_on_pages() -> list[tuple[float, ...]]:
    """Effect and interval wherever a page of results has both; of its own sign, and without."""
    texts = [page.read_text().replace(VERDICTS, "") for page in STUDIES.rglob("*.md") if page.name != IN_FULL.name]
    triples = [tuple(map(float, triple)) for text in texts for triple in EFFECT.findall(text)]
    return triples + [(-value, -high, -low) for value, low, high in triples]


README = (ROOT / "README.md").read_text()
RESULTS = (STUDIES / "README.md").read_text()
VERDICTS = RESULTS.split("## Verdicts on the paper's claims")[1].split("\n## ")[0]
IN_FULL = STUDIES / "claims-in-full.md"
FOUND = README.split("## What was found")[1].split("\n## ")[0]
SHOWN = (FOUND + VERDICTS, IN_FULL.read_text().split("\n## Verdicts of tiny")[0])
LINES, WORDS = 75, 700  # of the README, at most


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= LINES and len(README.split()) <= WORDS


def test_the_photograph_of_a_report_is_small() -> None:
    assert (ROOT / "docs/pictures/report.webp").stat().st_size < 60_000


@pytest.mark.parametrize("text", SHOWN, ids=("first tables", "all claims in full"))
def test_every_effect_of_the_readme_and_of_the_verdicts_is_on_a_page_of_results(text: str) -> None:
    shown = EFFECT.findall(text)
    assert len(shown) >= 20
    pages = np.array(found_on_pages())
    for triple in shown:
        half = 0.5 * 10.0 ** -len(triple[1].partition(".")[2]) + 1e-9
        near = np.abs(pages - np.array(triple, float)) <= half
        assert near.all(1).any(), f"no page has {triple[0]} [{triple[1]}, {triple[2]}]"
