"""The two controls of the fair test: the design is that of the protocol, and the words are right on planted data."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from qerl_bench.config import build, compose
from qerl_core.options import user_options
from qerl_core.options.composer import Composer
from qerl_core.statistics import Estimate
from qerl_studies.design.design import read_design
from qerl_studies.runs.collect import write_study
from tests.run_folders import DONE, write_run
from tests.scripts import ROOT, script

STUDY = ROOT / "studies" / "fair-2026"
PAGE = script("studies/fair-2026/controls.py")
DESIGNS = {"random": STUDY / "controls" / "random", "true": STUDY / "rates" / "05b"}
COPIES = (46, 47, 48, 49)
FROZEN = (
    "c580283e20c8bdb294f47bb2247442e753334f25a8332c7506d34e413f3404f1"  # SHA-256 of the protocol without its amendments
)


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(user_options, "_in_use", [])
    user_options.use([STUDY / "conf"])
    return user_options.search_path([STUDY / "conf"])


def test_the_protocol_is_the_frozen_one() -> None:
    """Amendments are appended; nothing before them changes."""
    before = (STUDY / "controls" / "protocol.md").read_text().partition("\n## Amendments")[0].rstrip("\n")
    assert hashlib.sha256(before.encode()).hexdigest() == FROZEN


def test_the_random_arm_differs_from_the_true_one_in_its_reward_alone(words: list[str]) -> None:
    random, true = (read_design(folder / "study.yaml", words) for folder in DESIGNS.values())
    assert tuple(random.bases) == COPIES and {*COPIES} <= {*true.bases} and random.seeds == true.seeds
    (arm,), (reference,) = random.arms, [one for one in true.arms if one.name == PAGE.REFERENCE]
    trees = [compose(design.words(of, 46, 0, sigma=None)) for design, of in ((random, arm), (true, reference))]
    differ = {key for key in trees[0] if trees[0][key] != trees[1][key]}
    assert differ == {"name", "reward"}
    experiment: Any = build(trees[0])
    assert experiment.reward.name == "random"


# --- contamination ---------------------------------------------------------------------------------------------------


def completions(whole: int, of: int = 200) -> list[dict[str, int]]:
    return [{"left": 40, "first": 40 if at < whole else 3, "common": 40 if at < whole else 12} for at in range(of)]


def write_probes(data: Path, **found: tuple[int, int, int]) -> None:
    for size, counts in found.items():
        (data / size).mkdir(parents=True)
        each = dict(zip((PAGE.TRAIN, PAGE.TEST, PAGE.GENERATED), map(completions, counts), strict=True))
        (data / size / "probe.json").write_text(json.dumps({"contamination": each}))


def test_shares_by_hand(tmp_path: Path) -> None:
    write_probes(tmp_path, **{"05b": (40, 4, 2), "15b": (2, 2, 2)})
    told = PAGE.by_heart(tmp_path)
    tables = [[[one, 200 - one], [two, 200 - two]] for one, two in ((40, 2), (4, 2), (4, 40))]
    tests: list[Any] = [stats.fisher_exact(table) for table in tables]
    p = [test.pvalue for test in tests]
    assert p[0] < p[2] < 0.001 < p[1]
    lines = {line.split(" | ")[0]: line for line in told[2].splitlines()}
    assert f"| +19.0 | {6 * p[0]:.4f} | **more often** |" in lines["| training part - generated, seen by nobody"]
    assert "| +1.0 | 1.0000 | **not decided** |" in lines["| test part - generated, seen by nobody"]
    assert (
        "| -18.0 |" in lines["| test part - training part"] and "**less often**" in lines["| test part - training part"]
    )
    assert "more often" not in told[5] and "20.0 [" in told[1]


def test_one_model_alone_has_no_words(tmp_path: Path) -> None:
    write_probes(tmp_path, **{"05b": (40, 4, 2)})
    (told,) = PAGE.by_heart(tmp_path)
    assert told.startswith("Not run: 1.5B.")


# --- random reward ---------------------------------------------------------------------------------------------------


def pack(kind: str, data: Path, session: str, copies: Sequence[int], before: float, late: Sequence[float]) -> None:
    """What a session packs of the first arm of a design: right answers before and late of each copy."""
    design, composer = read_design(DESIGNS[kind] / "study.yaml", user_options.search_path([STUDY / "conf"])), Composer()
    runs = data.parent / f"{kind}-{session}"
    coin = np.random.default_rng(0)
    for copy, right in zip(copies, late, strict=True):
        tree = composer.tree(design.words(design.arms[0], copy, 0, None))
        train = [
            {"kind": "train", "step": at, "reward/mean": float(coin.uniform(0.4, 0.6)), "accuracy": at / 100}
            for at in range(1, 41)
        ]
        steps = ((0, before), (32, right - 0.01), (36, right), (40, right + 0.01))
        evals = [{"kind": "eval", "step": at, "eval/lenient_sampled": value} for at, value in steps]
        where = {"device": "cuda", "gpu": "H200", "gguf": {"digest": "sha256:a", "dither": copy}}
        write_run(runs / tree["name"], tree, [*train, *evals], DONE, where)
    write_study(sorted(runs.iterdir()), data / session, mixed_code=True, metrics=("study",))
    probes = [{"base": copy, "digest": f"of {copy}", "doses": {}} for copy in copies]
    (data / session / "probes.json").write_text(json.dumps(probes))
    shutil.copy(DESIGNS[kind] / "study.yaml", data / session)


def test_random_reward_by_hand(tmp_path: Path) -> None:
    late, true = [0.25, 0.24, 0.27, 0.26], [0.33, 0.30, 0.34, 0.35]
    for session, part in {"a": slice(0, 3), "b": slice(3, 4)}.items():
        pack("random", tmp_path / "random", session, COPIES[part], 0.25, late[part])
        pack("true", tmp_path / "true", session, COPIES[part], 0.25, true[part])
    told = PAGE.at_random(tmp_path / "random", tmp_path / "true")
    gap = np.array(true) - late
    test: Any = stats.ttest_1samp(gap, 0)
    rise, added = told[1].splitlines()[2:]
    assert "| late - before, `random` | +0.50 [" in rise and "**not decided**" in rise
    assert f"| +{100 * gap.mean():.2f} [" in added and f"| {2 * test.pvalue:.4f} | **higher** |" in added
    assert "over 160 steps: " in told[2] and abs(float(told[2].split()[-1][:-1])) < 0.3


@pytest.mark.parametrize("true", [{"a": COPIES[:3]}, {"a": COPIES[:3], "b": COPIES[3:]}])
def test_a_copy_without_its_true_reward_in_the_same_session_has_no_words(
    true: dict[str, Sequence[int]], tmp_path: Path
) -> None:
    pack("random", tmp_path / "random", "a", COPIES, 0.25, [0.25] * 4)
    for session, copies in true.items():
        pack("true", tmp_path / "true", session, copies, 0.25, [0.3] * len(copies))
    (told,) = PAGE.at_random(tmp_path / "random", tmp_path / "true")
    assert told.startswith("Not whole, so no words: copies 49 ")


@pytest.mark.parametrize(
    ("value", "stderr", "p", "word"),
    [
        (0.05, 0.01, 0.01, "higher"),
        (-0.05, 0.01, 0.01, "lower"),
        (0.001, 0.002, 0.6, "no difference beyond the margin"),
        (0.02, 0.02, 0.4, "not decided"),
        (0.0, math.nan, math.nan, "not decided"),
    ],
)
def test_words(value: float, stderr: float, p: float, word: str) -> None:
    assert PAGE.word_of(Estimate(value, stderr, 4, 3), p) == word
