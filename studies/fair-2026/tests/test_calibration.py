"""Part 1 of the fair test, calibration: its pages from committed data, numbers by hand, the protocol as frozen."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy import stats

from qerl_bench.conduct.archive import ANSWERS
from qerl_core.statistics import Estimate
from qerl_studies.design.design import read_design
from qerl_studies.design.sessions import read_probes
from qerl_studies.probes.over_units import word_of
from qerl_studies.runs.private import Private, kinds_in
from tests.scripts import ROOT, script

STUDY = ROOT / "studies" / "fair-2026"
PART = STUDY / "calibration"
SIZES = sorted(path.name for path in (PART / "data").iterdir())
PAGES = script("studies/fair-2026/calibration.py")
# SHA-256 of the protocol at its tag, fair-calibration
FROZEN = "b8e96f7f8e691bfbc95f1b7b08b254b1975ad7289d8dbb28b7bc3ff50cabde53"
FORMATS = ["bf16", "nvfp4", *(f"nvfp4+{name}" for name in PAGES.QUANTIZERS)]
READ = {"05b": FORMATS, "15b": FORMATS[:6]}  # that all copies have: amendment 2
CODE = {"05b": "7433bc4f6954", "15b": "c5b5d7f8a06f"}  # of the tags fair-calibration and fair-calibration-15b


@cache
def right(size: str) -> Any:
    """Right answers in points, (copies,), by format and temperature: of single answers, not of probes."""
    rows: Any = pd.read_parquet(PART / "data" / size / ANSWERS)
    shares = 100 * rows.groupby(["quant", "temperature", "base"])["lenient"].mean()
    return {(quant, at): shares[quant, at].to_numpy() for quant in rows["quant"].unique() for at in (0.0, 0.6)}


def by_hand(each: Any) -> list[float]:
    """Mean, ends of the 95 % interval."""
    half = stats.t.ppf(0.975, len(each) - 1) * np.std(each, ddof=1) / len(each) ** 0.5
    return [np.mean(each), np.mean(each) - half, np.mean(each) + half]


def p_of(each: Any) -> float:
    """Two-sided, of the mean being 0."""
    found: Any = stats.ttest_1samp(each, 0)
    return found.pvalue


def table(size: str, heading: str) -> dict[str, list[str]]:
    """The cells of the rows of a table of words.md, by their first."""
    page = (PART / "results" / "words.md").read_text().partition(f"## {PAGES.SIZES[size]}, ")[2]
    lines = re.findall(r"^\| .* \|$", page.partition(f"### {heading}")[2].partition("\n#")[0], flags=re.MULTILINE)
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    return {first: others for first, *others in cells}


def numbers(cell: str) -> list[float]:
    return [float(one) for one in re.findall(r"[+-]?\d+(?:\.\d+)?", cell)]


def test_pages_come_out_again() -> None:
    pages = PAGES.pages_of({size: read_probes(PART / "data" / size) for size in SIZES})
    committed = {path.relative_to(PART / "results").as_posix(): path for path in (PART / "results").rglob("*.md")}
    assert {name: path.read_text() for name, path in committed.items()} == pages


@pytest.mark.parametrize("size", SIZES)
def test_answers_are_those_that_probes_count(size: str) -> None:
    rows: Any = pd.read_parquet(PART / "data" / size / ANSWERS)
    counted = rows.groupby(["base", "quant", "temperature"])[["correct", "lenient"]].agg(["sum", "count"])
    for probe in read_probes(PART / "data" / size):
        assert [*probe["formats"]][: len(READ[size])] == READ[size]
        for quant, found in probe["formats"].items():
            for at, one in found["temperatures"].items():
                each = counted.loc[probe["base"], quant, float(at)]
                assert [each["correct", "sum"], each["lenient", "sum"]] == [sum(one["correct"]), sum(one["lenient"])]
                assert each["lenient", "count"] == 512 * one["samples"]


@pytest.mark.parametrize("size", SIZES)
def test_contrasts_of_the_page_by_hand(size: str) -> None:
    found, shown = right(size), table(size, "The four contrasts")
    gaps = [found[f"nvfp4+{name}", 0.6] - found["nvfp4", 0.6] for name in ("mse", "four-six", "gptq", "awq")]
    p = np.array([p_of(gap) for gap in gaps])
    order, adjusted, largest = np.argsort(p), np.zeros(4), 0.0
    for tests, place in zip((4, 3, 2, 1), order, strict=True):
        adjusted[place] = largest = max(largest, min(1.0, tests * p[place]))
    assert len(shown) == 4
    for (difference, raw, holm, word), gap, one, corrected in zip(shown.values(), gaps, p, adjusted, strict=True):
        mean, low, high = by_hand(gap)
        assert numbers(difference) == pytest.approx([mean, low, high], abs=0.0051)
        assert [float(raw), float(holm)] == pytest.approx([one, corrected], abs=0.000051)
        expected = "no difference beyond the margin" if low >= -1 and high <= 1 else "not decided"
        expected = ("higher" if mean > 0 else "lower") if corrected < 0.05 else expected
        assert word == f"**{expected}**"


@pytest.mark.parametrize("size", SIZES)
def test_quantizers_of_the_page_by_hand(size: str) -> None:
    found, probes = right(size), read_probes(PART / "data" / size)
    shown, shares = table(size, "Each quantizer"), table(size, "The part of nearest")
    assert [len(shown), len(shares)] == [len(READ[size]) - 1, len(READ[size]) - 2]
    for quant, (greedy, sampled, entropy, distance, _) in zip(READ[size][1:], shown.values(), strict=True):
        for cell, at in ((greedy, 0.0), (sampled, 0.6)):
            assert numbers(cell) == pytest.approx(by_hand(found[quant, at] - found["bf16", at]), abs=0.0051)
        spread = [
            math.log(one["formats"][quant]["entropy"]) - math.log(one["formats"]["bf16"]["entropy"]) for one in probes
        ]
        assert numbers(entropy) == pytest.approx(np.exp(by_hand(spread)).tolist(), abs=0.00051)
        far = by_hand([one["formats"][quant]["kl"]["of_reference"] for one in probes])
        assert numbers(distance) == pytest.approx(far, abs=0.000051)
    for quant, cells in zip(READ[size][2:], shares.values(), strict=True):
        for cell, at in zip(cells, (0.0, 0.6), strict=True):
            gained, lost = (found[one, at] - found["nvfp4", at] for one in (quant, "bf16"))
            share, *ends = numbers(cell.replace(" %", ""))
            assert share == pytest.approx(100 * gained.mean() / lost.mean(), abs=0.51)
            for end in ends:  # where the mean of gained - share x lost is just told from 0
                ps = [p_of(gained - (end + aside) / 100 * lost) for aside in (-0.51, 0.51)]
                assert min(ps) <= 0.05 <= max(ps)


def test_a_share_has_no_interval_where_the_damage_is_not_told_from_zero() -> None:
    def copy(reference: int, nearest: int, other: int) -> dict[str, Any]:
        of = {"bf16": reference, "nvfp4": nearest, "nvfp4+mse": other}
        asked = {quant: {"0.6": {"samples": 10, "lenient": [right]}} for quant, right in of.items()}
        return {"formats": {quant: {"temperatures": found} for quant, found in asked.items()}}

    share, low, high = PAGES.share_taken([copy(9, 1, 5), copy(2, 6, 4), copy(6, 4, 5)], "nvfp4+mse", "0.6")
    assert share == pytest.approx(0.5) and math.isnan(low) and math.isnan(high)


@pytest.mark.parametrize(
    ("value", "stderr", "copies", "p", "word"),
    [
        (0.02, 0.004, 12, 0.01, "higher"),
        (-0.005, 0.001, 12, 0.01, "lower"),
        (0.001, 0.003, 12, 0.8, "no difference beyond the margin"),
        (0.001, 0.02, 12, 0.9, "not decided"),
        (0.02, 0.004, 11, 0.01, "not decided"),
        (0.001, 0.003, 11, 0.8, "not decided"),
    ],
)
def test_words(value: float, stderr: float, copies: int, p: float, word: str) -> None:
    assert PAGES.word_of(Estimate(value, stderr, copies, copies - 1), p) == word


def test_the_better_quantizer_is_the_first_of_equals(monkeypatch: pytest.MonkeyPatch) -> None:
    means = dict.fromkeys(PAGES.QUANTIZERS, -4.0) | {"gptq": -1.55, "mse": -2.06}
    monkeypatch.setattr(PAGES, "mean_damage", lambda sizes, name: means[name])
    assert PAGES.better_quantizer({}) == "gptq"
    means["mse"] = -2.04
    assert PAGES.better_quantizer({}) == "mse"
    means["awq-text"] = -1.5
    assert PAGES.better_quantizer({}) == "awq-text"  # mse is 0.54 behind it


def test_the_rule_takes_of_what_both_sizes_have_and_says_what_the_others_need() -> None:
    both = {name: read_probes(PART / "data" / size) for size, name in PAGES.SIZES.items()}
    found = {size: right(size) for size in SIZES}

    def lost(size: str, name: str) -> float:
        return float(np.mean([(found[size][f"nvfp4+{name}", at] - found[size]["bf16", at]).mean() for at in (0, 0.6)]))

    means = {name: (lost("05b", name) + lost("15b", name)) / 2 for name in ("mse", "four-six", "gptq", "awq")}
    assert means["four-six"] == max(means.values()) and means["mse"] < means["four-six"] - 0.5
    assert PAGES.better_quantizer(both) == "four-six"
    text = 2 * (means["four-six"] + 0.5) - lost("05b", "awq-text")  # it stands behind four-six, so must be ahead
    assert PAGES.needed(both, "awq-text") == {"1.5B": pytest.approx(text)} and text > 2.7
    assert lost("15b", "awq") < 0  # as all that were measured: BF16 is not beaten


def test_a_size_that_has_not_run_whole_decides_nothing() -> None:
    probes = read_probes(PART / "data" / "05b")
    alone, partly, both = (
        PAGES.words_page({"0.5B": probes} | other).partition("## Over both sizes")[2]
        for other in ({}, {"1.5B": probes[:5]}, {"1.5B": probes})
    )
    assert alone == partly and "open" in alone and "0.55" in alone
    assert "open" not in both.lower() and "The rule takes `gptq`" in both


def test_effects_of_the_study_page_are_those_of_words() -> None:
    sections = re.split(r"(?m)^(?=## )", (STUDY / "README.md").read_text())
    page = "".join(section for section in sections if section.startswith("## Part 1"))
    words = (PART / "results" / "words.md").read_text()
    effects = re.findall(r"[x+-]?\d+\.\d+ \[[^\]]+\]", page)
    shown = sum(4 + 4 * (len(formats) - 1) for formats in READ.values())
    assert len(effects) == shown and [one for one in effects if one not in words] == []
    said = re.findall(r"\*\*(higher|lower|not decided|no difference[^*]*)\*\*", page)
    of_sizes = [[cells[-1].strip("*") for cells in table(size, "The four contrasts").values()] for size in SIZES]
    assert said == [word for row in zip(*of_sizes, strict=True) for word in row]


def test_the_protocol_is_the_frozen_one() -> None:
    """Amendments are appended; nothing before them changes."""
    before = (PART / "protocol.md").read_text().partition("\n## Amendments")[0].rstrip("\n")
    assert hashlib.sha256(before.encode()).hexdigest() == FROZEN


def test_text_without_its_archives_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"sotu-0\.2\.3\.tgz is not there: fetch it by the first line of --help"):
        script("studies/fair-2026/make_text.py").main([str(tmp_path / "text.jsonl"), str(tmp_path)])


@pytest.mark.parametrize("size", SIZES)
def test_what_ran_is_what_the_protocol_says(size: str) -> None:
    asked, ran = (yaml.safe_load((folder / "study.yaml").read_text()) for folder in (PART, PART / "data" / size))
    model = "model.id=qwen2.5-coder-{}-instruct.gguf"
    asked["common"][asked["common"].index(model.format("0.5b"))] = model.format(PAGES.SIZES[size].lower())
    assert ran == asked
    probes = read_probes(PART / "data" / size)
    assert [one["base"] for one in probes] == [*range(31, 43)] and {one["code"] for one in probes} == {CODE[size]}
    for one in probes:
        tokens = {quant: found["calibration"]["tokens"] for quant, found in one["formats"].items() if "gptq" in quant}
        expected = {"nvfp4+gptq": 46_539, "nvfp4+gptq-text": 46_592}
        assert tokens == {quant: expected[quant] for quant in tokens} and "nvfp4+gptq" in tokens


def test_copies_are_in_no_study_of_released_models() -> None:
    designs = [yaml.safe_load(path.read_text()) for path in (ROOT / "studies" / "real-2026").rglob("*.yaml")]
    drawn: list[Any] = [design["units"]["dither"] for design in designs if "dither" in design.get("units", {})]
    sessions = {path.parent for path in (ROOT / "studies" / "real-2026").rglob("probes.json*")}
    asked = [word_of(one, "model.dither") for folder in sessions for one in read_probes(folder) if "unit" in one]
    used = {copy for copies in drawn for copy in copies} | {int(copy) for copy in asked if copy is not None}
    assert {*range(1, 13)} <= used and not used & {*read_design(PART / "study.yaml").units}


def test_what_is_kept_of_many_answers_stays_as_it_is(tmp_path: Path) -> None:
    again = tmp_path / "05b"
    shutil.copytree(PART / "data" / "05b", again)
    script("studies/keep.py").main([str(again), "--small"])
    assert (again / ANSWERS).read_bytes() == (PART / "data" / "05b" / ANSWERS).read_bytes()


@pytest.mark.parametrize("size", SIZES)
def test_the_data_name_no_machine_or_folder(size: str) -> None:
    folder = PART / "data" / size
    rows: Any = pd.read_parquet(folder / ANSWERS)
    texts = [*rows["question"].unique(), *rows["answer"].dropna(), *rows["completion"].dropna()]
    kept = [read_probes(folder), yaml.safe_load((folder / "study.yaml").read_text())]
    private = Private("", "")
    assert kinds_in(json.loads(json.dumps(kept)), private) == []
    assert [one for one in texts if re.search(r"/(?:home|root|tmp|work|mnt|usr)/", one)] == []


def test_the_errors_of_layers_in_the_docs_are_those_of_the_file() -> None:
    layers: Any = pd.read_parquet(PART / "layers" / "05b.parquet")
    means = layers.groupby("quantizer")[["relative_error", "output_error"]].mean()
    page = (ROOT / "docs" / "formats.md").read_text()
    for name, (weight, output) in means.iterrows():
        assert f"| `{name}` | {weight:.3f} | {output:.3f} | " in page, name
    assert layers.groupby("quantizer").size().tolist() == [168] * 4
