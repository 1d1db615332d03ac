"""Part 4 of the fair test: its design, when its noise begins, and words of planted data."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from qerl_bench.config import build, compose
from qerl_core.options import user_options
from qerl_studies.design.design import read_design
from tests.scripts import ROOT, script

STUDY = ROOT / "studies" / "fair-2026"
PAGE = script("studies/fair-2026/longer.py")
FROZEN = "2f54805e46b2326f0b20b10e8ae0f4771b61eeb590c002233d8df8d9b2ab5246"  # of the protocol without its amendments


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(user_options, "_in_use", [])
    user_options.use([STUDY / "conf"])
    return user_options.words_in_use()


def test_the_protocol_is_the_frozen_one() -> None:
    before = (STUDY / "longer" / "protocol.md").read_text().partition("\n## Amendments")[0].rstrip("\n")
    assert hashlib.sha256(before.encode()).hexdigest() == FROZEN


def test_arms_differ_in_format_and_noise_and_train_as_part_2_but_longer(words: list[str]) -> None:
    ours, other = (read_design(STUDY / part / "study.yaml", words) for part in ("longer", "rates/15b"))
    assert len(ours.bases) == PAGE.COPIES and not {*ours.bases} & {*other.bases} and ours.seeds == other.seeds
    (control,) = [arm for arm in other.arms if arm.name == "bf16-2e-4"]
    trees: Any = {arm.name: compose(ours.words(arm, 51, 0, sigma=None)) for arm in ours.arms}
    reference: Any = compose(other.words(control, 43, 0, sigma=None))
    plain, packed, noisy = (trees[name] for name in PAGE.FORMATS)
    differ = {key for key in plain if plain[key] != reference[key]} - {"name", "seed", "model"}  # of another copy
    assert differ == {"steps", "save_every", "optim", "eval"}
    assert {key for key in plain.optim if plain.optim[key] != reference.optim[key]} == {"lr", "schedule"}
    assert {key for key in plain.eval if plain.eval[key] != reference.eval[key]} == {"at"}
    assert {key for key in packed if packed[key] != plain[key]} - {"name"} == {"quant", "quantizer"}
    assert {key for key in noisy if noisy[key] != packed[key]} - {"name"} == {"aqn"}
    assert [*plain.eval.at, plain.steps] == [*PAGE.EARLIER, *PAGE.LATE]
    sigmas = [build(noisy).aqn.sigma(step, noisy.steps) for step in range(1, noisy.steps + 1)]
    stages = sorted({*sigmas})
    assert len(stages) == 10 and stages[0] == 0 and max(stages) == pytest.approx(0.05)
    assert stages[1] == pytest.approx(5e-4)
    noise = sigmas[PAGE.NOISY]
    assert {*noise} == {max(sigmas)} and sigmas[PAGE.NOISY.start - 1] == 0 and sigmas[PAGE.NOISY.stop] < max(sigmas)


def table(error: float, noise: float = 0.1, **ends: float) -> Any:
    """Runs of these arms on six copies in two sessions, the second a point higher."""
    draw = np.random.default_rng(0)
    rows = []
    for copy in range(51, 57):
        session = "a" if copy < 54 else "b"
        for arm, end in ends.items():
            late = end + 0.01 * (session == "b") + error * draw.standard_normal()
            measures = dict.fromkeys([*PAGE.SHARES, "sampled in bf16", "answering", "after 80"], late)
            row = {"arm": arm.replace("_", "-"), "copy": copy, "session": session, "entropy": -1.0, "collapsed": 0.0}
            early = noise * (arm == "four_six_noise") + 0.01 * draw.standard_normal()
            rows.append(row | measures | {"after 40": late - 0.03, "first": 0.1, "last": late, "noisy": early})
    return pd.DataFrame(rows)


@pytest.mark.parametrize(
    ("end", "error", "word"),
    [
        (0.60, 0.005, "higher"),
        (0.50, 0.005, "lower"),
        (0.551, 0.005, "no difference beyond the margin"),
        (0.55, 0.05, "not decided"),
    ],
)
def test_the_page_has_the_words_of_its_protocol(end: float, error: float, word: str) -> None:
    rows = table(error, bf16=0.55, four_six=0.52, four_six_noise=end)
    found = PAGE.judged(rows, PAGE.FIRST_TABLE, True)
    assert found["four-six-noise - bf16"].word == word
    fewer = PAGE.judged(rows[rows["copy"] < 56], PAGE.FIRST_TABLE, True)
    assert {one.word for one in fewer.values()} == {"not decided"}
    assert "| four-six - bf16 |" in PAGE.words(rows)[0] and "tested" not in "".join(PAGE.words(rows))


def test_noise_that_does_nothing_and_training_that_ends_early_are_told() -> None:
    rows = table(0.005, noise=0.0, bf16=0.55, four_six=0.52, four_six_noise=0.60)
    found = PAGE.judged(rows, PAGE.FIRST_TABLE, False)
    assert [one.word for one in found.values()] == ["lower", "noise not shown", "noise not shown"]
    assert PAGE.words(rows)[0].count("noise not shown") == 2
    assert "Longer training was not tested" in PAGE.words(rows.assign(**{"after 40": rows["late"]}))[0]


def test_an_arm_that_fails_alone_is_named_and_keeps_its_word() -> None:
    rows = table(0.005, bf16=0.30, four_six=0.52, four_six_noise=0.52)
    rows.loc[rows["arm"] == "bf16", "first"] = 0.9
    found = PAGE.judged(rows, PAGE.FIRST_TABLE, True)
    assert found["four-six - bf16"].word == "higher" and "Rewards did not rise: bf16." in PAGE.words(rows)
    rows["first"] = 0.9
    assert {one.word for one in PAGE.judged(rows, PAGE.FIRST_TABLE, True).values()} == {"not tested"}


def test_a_part_that_is_not_whole_says_so(tmp_path: Path) -> None:
    part = Path(
        shutil.copytree(STUDY / "longer", tmp_path / "longer", ignore=shutil.ignore_patterns("data", "results"))
    )
    assert "Not whole, so no words: copies 51, 52, 53, 54, 55, 56 lack a run." in PAGE.page(part)
