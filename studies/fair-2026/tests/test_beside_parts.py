"""Parts 5, 6, 7 and FP8 of the fair test: an arm differs in one thing from its control; words of planted data."""

from __future__ import annotations

import hashlib
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from qerl_bench.config import build, compose
from qerl_core.options import user_options
from qerl_studies.design.design import read_design
from tests.scripts import ROOT, script

STUDY = ROOT / "studies" / "fair-2026"
PAGE = script("studies/fair-2026/beside_parts.py")
PART_8 = script("studies/fair-2026/tests/test_mechanism.py")
FROZEN = {  # SHA-256 of each protocol without its amendments
    "fp8": "da0a84a92edb6d5bf36ef7646e4e5802bec112578e04c4efe15f9d078eea4ceb",
    "full": "1a5cd8fed959e124e535b0357b9923da5fd04dd6d2500df76a1419ded2876e8d",
    "nf4": "a2d3a775a24fffc623606ad6d04e580baf336e4b8695dde67c6ba1634c9e88bc",
    "ranks": "118f8f5527f3db21019ed28ca5d74dbfe6c85a39759afee42e7b2ea2ad83942a",
}
SIZES = {"nf4 0.5B": PAGE.NF4["0.5B"], "nf4 1.5B": PAGE.NF4["1.5B"], "ranks": PAGE.OF_RANKS}
COUNTED = {f"nf4 {size}": copies for size, copies in PAGE.NF4_COPIES.items()} | {"ranks": PAGE.RANKS_COPIES}


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(user_options, "_in_use", [])
    user_options.use([STUDY / "conf"])
    return user_options.words_in_use()


@pytest.mark.parametrize("part", FROZEN)
def test_the_protocol_is_the_frozen_one(part: str) -> None:
    before = (STUDY / part / "protocol.md").read_text().partition("\n## Amendments")[0].rstrip("\n")
    assert hashlib.sha256(before.encode()).hexdigest() == FROZEN[part]


@pytest.mark.parametrize("size", SIZES)
def test_an_arm_differs_from_what_it_is_compared_with_in_one_thing(size: str, words: list[str]) -> None:
    pairing = SIZES[size]
    ours, other = (read_design(part / "study.yaml", words) for part in (pairing.design, pairing.other))
    assert {*ours.bases} <= {*other.bases} and ours.seeds == other.seeds
    assert len(ours.bases) == COUNTED[size]
    (control,) = [arm for arm in other.arms if arm.name == pairing.names["nvfp4"]]
    copy = ours.bases[0]
    reference = compose(other.words(control, copy, 0, sigma=None))
    for arm in ours.arms:
        tree: Any = compose(ours.words(arm, copy, 0, sigma=None))
        differ = {key for key in tree if tree[key] != reference[key]} - {"name"}
        assert differ == ({"quant"} if arm.name == "nf4" else {"lora"}) and build(tree)
        if arm.name != "nf4":
            assert f"rank-{tree.lora.rank}" == arm.name and tree.lora.alpha == reference.lora.alpha == 32
        assert tree.quant.name == PAGE.OWN[arm.name]


def test_full_training_differs_in_what_is_trained_and_how_it_is_computed(words: list[str]) -> None:
    ours, other = (read_design(part / "study.yaml", words) for part in (PAGE.OF_FULL.design, PAGE.OF_FULL.other))
    assert {*ours.bases} < {*other.bases} and len(ours.bases) == PAGE.FULL_COPIES and ours.seeds == other.seeds
    (arm,), (control,) = ours.arms, [arm for arm in other.arms if arm.name == "bf16-2e-4"]
    tree: Any = compose(ours.words(arm, ours.bases[0], 0, sigma=None))
    reference: Any = compose(other.words(control, ours.bases[0], 0, sigma=None))
    differ = {key for key in tree if tree[key] != reference[key]}
    assert differ == {"name", "lora", "model", "train", "engine", "optim", "eval", "save_every"} and build(tree)
    assert {key for key in tree.eval if tree.eval[key] != reference.eval[key]} == {"also"}
    assert {key for key in tree.optim if tree.optim[key] != reference.optim[key]} == {"lr"}
    assert {arm.name for arm in other.arms} == {*PAGE.OF_FULL.names}


def test_fp8_differs_in_what_is_rounded(words: list[str]) -> None:
    ours, other = (read_design(part / "study.yaml", words) for part in (PAGE.FP8.design, PAGE.FP8.other))
    assert [*ours.bases] == [*other.bases] and ours.seeds == other.seeds
    (arm,), (control,) = ours.arms, [arm for arm in other.arms if arm.name == PAGE.FP8.names["bf16"]]
    tree: Any = compose(ours.words(arm, 51, 0, sigma=None))
    reference: Any = compose(other.words(control, 51, 0, sigma=None))
    assert {key for key in tree if tree[key] != reference[key]} == {"name", "quant", "train"} and build(tree)
    assert {key for key in tree.train if tree.train[key] != reference.train[key]} == {"gradients"}
    assert tree.quant.name == tree.quant.activations == PAGE.OWN[arm.name] == "fp8"


# --- words ------------------------------------------------------------------------------------------------------------


def table(error: float = 0.005, **ends: float) -> Any:
    """Runs of these arms on eight copies in two sessions, the second a point higher."""
    draw = np.random.default_rng(0)
    rows = []
    for copy in range(51, 59):
        session = "a" if copy < 55 else "b"
        for arm, end in ends.items():
            late = end + 0.01 * (session == "b") + error * draw.standard_normal()
            asked = dict.fromkeys([*PAGE.SHARES, "sampled in bf16", "answering"], late)
            row = {"arm": arm, "copy": copy, "session": session, "entropy": -1.0, "collapsed": 0.0}
            rows.append(row | asked | {"first": 0.1, "last": late, "mismatch": 0.004})
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (0.20, "NF4 ends lower than NVFP4, as the paper says"),
        (0.30, "NF4 ends higher than NVFP4, the opposite"),
        (0.25, "NF4 and NVFP4 differ by less than half"),
    ],
)
def test_nf4_has_the_words_of_its_protocol(end: float, said: str) -> None:
    page = "\n".join(PAGE.nf4_words(table(nf4=end, nvfp4=0.25, bf16=0.30), 8))
    assert f"**{said}" in page


@pytest.mark.parametrize(
    ("end", "error", "said"),
    [
        (0.299, 0.005, "FP8 learns as BF16"),
        (0.25, 0.005, "FP8 ends lower than BF16"),
        (0.35, 0.005, "FP8 ends higher than BF16"),
        (0.30, 0.05, "Whether FP8 learns as BF16 is not decided"),
    ],
)
def test_fp8_has_the_words_of_its_protocol(end: float, error: float, said: str) -> None:
    rows = table(error=error, fp8=end, bf16=0.30)
    found = PAGE.fp8_words(rows)
    assert f"**{said}.**" in found and "| fp8 - bf16 |" in found[3] and "| fp8 | 0.0040 |" in found[5]
    only_late = PAGE.fp8_words(rows.assign(**{"sampled in bf16": rows["late"] + 0.1 * (rows["arm"] == "fp8")}))
    assert said != "FP8 learns as BF16" or "**FP8 ends within 2.3 points of BF16.**" in only_late
    failed = rows.assign(first=0.9 * (rows["arm"] == "fp8"))
    assert "**FP8 does not learn.**" in PAGE.fp8_words(failed)
    assert "**FP8 does not learn.**" not in PAGE.fp8_words(failed[failed["copy"] < 58])


def test_noise_decides_nothing_about_nf4() -> None:
    page = "\n".join(PAGE.nf4_words(table(error=0.04, nf4=0.25, nvfp4=0.25, bf16=0.30), 8))
    assert "**Which of the two ends higher is not decided.**" in page


@pytest.mark.parametrize(
    ("ends", "error", "said"),
    [
        ({"rank-16": 0.25, "nvfp4": 0.25, "rank-64": 0.25}, 0.003, "The rank matters little, as the paper says"),
        ({"rank-16": 0.20, "nvfp4": 0.25, "rank-64": 0.25}, 0.003, "The rank matters"),
        ({"rank-16": 0.25, "nvfp4": 0.25, "rank-64": 0.25}, 0.05, "Whether the rank matters is not decided"),
    ],
)
def test_ranks_have_the_words_of_their_protocol(ends: dict[str, float], error: float, said: str) -> None:
    assert f"**{said}.**" in PAGE.ranks_words(table(error=error, **ends))


@pytest.mark.parametrize(
    ("end", "error", "said"),
    [
        (0.30, 0.005, "LoRA in NVFP4 ends below full training"),
        (0.20, 0.005, "LoRA in NVFP4 ends above full training"),
        (0.245, 0.005, "LoRA in NVFP4 matches full training, as the paper says"),
        (0.25, 0.05, "Whether LoRA in NVFP4 matches full training is not decided"),
    ],
)
def test_full_training_has_the_words_of_its_protocol(end: float, error: float, said: str) -> None:
    arms = {"four-six-2e-4": 0.25, "nvfp4-4e-4": 0.24, "bf16-2e-4": 0.30}
    rows = table(error=error, **arms, full=end)
    found = PAGE.full_words(rows[rows["copy"] < 57], "nvfp4-4e-4", "four-six-2e-4", "bf16-2e-4")  # six copies
    assert f"**{said}.**" in found and "| bf16-2e-4 - full |" in found[3]


def test_full_training_waits_for_part_2_at_two_rates_and_not_for_the_third(monkeypatch: pytest.MonkeyPatch) -> None:
    arms = {f"{kind}-{rate}": 0.25 for kind in PAGE.TRAINED for rate in PAGE.RATES}
    rows = table(**arms, full=0.2)

    def said(*left_out: str) -> str:
        monkeypatch.setattr(PAGE, "rows_of", lambda _: (rows[rows["copy"] < 57], []))
        monkeypatch.setattr(
            PAGE, "read_size", lambda *_: SimpleNamespace(rows=rows.assign(arm="bf16-2e-4"), left_out=left_out)
        )
        monkeypatch.setattr(PAGE, "own_best", lambda _, kind: f"{kind}-2e-4")
        return PAGE.full_page(PAGE.OF_FULL, STUDY)

    assert "**LoRA in NVFP4 ends above full training.**" in said("43 of 15b-high")
    assert "no words: copies 44 lack a run" in said("44 of 15b", "43 of 15b-high", "44 of 15b-high")


def test_too_few_copies_decide_nothing() -> None:
    rows = table(nf4=0.1, nvfp4=0.25, bf16=0.30)
    assert "not decided.**" in "\n".join(PAGE.nf4_words(rows[rows["copy"] < 58], 8))
    rows = table(**{"four-six-2e-4": 0.25, "nvfp4-2e-4": 0.24, "bf16-2e-4": 0.30}, full=0.4)
    words = PAGE.full_words(rows[rows["copy"] < 56], "nvfp4-2e-4", "four-six-2e-4", "bf16-2e-4")
    assert "**Whether LoRA in NVFP4 matches full training is not decided.**" in words


def test_arms_are_read_with_those_of_the_other_part_in_the_same_session(tmp_path: Path) -> None:
    other, own = (
        Path(shutil.copytree(part, tmp_path / part.name, ignore=shutil.ignore_patterns("data", "results")))
        for part in (PAGE.OF_RANKS.other, PAGE.OF_RANKS.design)
    )
    pairing = replace(PAGE.OF_RANKS, design=own, other=other)
    every = "51, 52, 53, 54, 55, 57, 58"
    assert f"copies {every} lack a run" in PAGE.ranks_page(pairing)
    costs, early = PART_8.COSTS, PART_8.MATCHED
    PART_8.pack(other, "a", range(51, 55), PART_8.trained)
    PART_8.pack(other, "b", range(55, 59), PART_8.trained)
    with pytest.MonkeyPatch.context() as patch:
        for arm, end in (("rank-16", -0.047), ("rank-64", -0.10)):
            patch.setitem(costs, arm, end)
            patch.setitem(early, arm, 0.0)
        PART_8.pack(own, "a", range(51, 55), PART_8.trained)
        PART_8.pack(own, "other", [55, 57, 58], PART_8.trained)
        assert "copies 55, 57, 58 lack a run in a common session" in PAGE.ranks_page(pairing)
        (own / "data" / "other").rename(own / "data" / "b")
        page = PAGE.ranks_page(pairing)
    assert "**The rank matters.**" in page and "| rank-64 - rank-16 | -5.30 [" in page
    assert re.search(r"\| rank-16 - nvfp4 \| [+-]0\.00 \[", page)


def test_the_study_page_says_what_the_pages_say() -> None:
    """Every row of its tables of contrasts is a row of a page, of the same model, with the same word."""
    page = (STUDY / "README.md").read_text().partition("\n## NF4, full training")[2].partition("\n## ")[0]
    pages = {part: (STUDY / part / "results" / "words.md").read_text() for part in FROZEN}
    small, _, large = pages["nf4"].partition("## 1.5B")
    of_size = {"0.5B": small + pages["ranks"] + pages["fp8"], "1.5B": large + pages["full"]}
    row = re.compile(r"\| ([+-][\d.]+ \[[^\]]+\]) \|(?: [\d.]+ \| [\d.]+ \|)? (\*\*.+?\*\*) \|")
    told = {size: row.findall(page.partition(f"| {size}, ")[2].partition("\n\n")[0]) for size in of_size}
    assert [len(rows) for rows in told.values()] == [8, 7]
    for size, rows in told.items():
        assert {*rows} <= {*row.findall(of_size[size])}
