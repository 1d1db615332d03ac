"""Part 8 of the fair test: designs and format are those of the protocol, and the words are right on planted data."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from qerl_bench.config import build, compose
from qerl_core.checks import ConfigError
from qerl_core.options import user_options
from qerl_core.options.composer import Composer
from qerl_core.statistics import Estimate
from qerl_studies.design.design import read_design
from qerl_studies.runs.collect import write_study
from tests.run_folders import DONE, write_run
from tests.scripts import ROOT, script

STUDY = ROOT / "studies" / "fair-2026"
PART = STUDY / "mechanism"
PAGE = script("studies/fair-2026/mechanism.py")
POWER = script("studies/fair-2026/mechanism_power.py")
ARMS = ("bf16", "nvfp4", "bf16-hot", "nvfp4-cool", "random")
FORMATS = dict(zip(ARMS, ("bf16", "nvfp4", "bf16", "nvfp4", "random-error"), strict=True))
COPIES = range(51, 59)
RISE = 0.15  # of the logarithm of NVFP4's entropy
MATCHED = dict(zip(ARMS, (0, RISE, RISE, 0, 0.1), strict=True))
FROZEN = "HASH"  # SHA-256 of the protocol without its amendments


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(user_options, "_in_use", [])
    user_options.use([STUDY / "conf"])
    return user_options.search_path([STUDY / "conf"])


def test_the_protocol_is_the_frozen_one() -> None:
    """Amendments are appended; nothing before them changes."""
    before = (PART / "protocol.md").read_text().partition("\n## Amendments")[0].rstrip("\n")
    assert hashlib.sha256(before.encode()).hexdigest() == FROZEN


# --- designs ---------------------------------------------------------------------------------------------------------


def test_arms_differ_from_those_of_part_2_as_the_protocol_says(words: list[str]) -> None:
    design, part_2 = read_design(PART / "study.yaml", words), read_design(STUDY / "rates" / "05b" / "study.yaml", words)
    assert [arm.name for arm in design.arms] == [*ARMS] and [*design.bases] == [*COPIES]
    assert design.seeds == part_2.seeds and not {*design.bases} & {*part_2.bases}
    reference: Any = compose(part_2.words(part_2.arms[0], 43, 0, sigma=None))
    reference.model.dither, reference.seed = 51, 51
    for arm in design.arms:
        tree: Any = compose(design.words(arm, 51, 0, sigma=None))
        assert {key for key in tree if tree[key] != reference[key]} <= {"name", "quant", "rollout"}
        assert tree.quant.name == FORMATS[arm.name]
        given = dict(tree.rollout)
        hot = given.pop("temperature")
        assert given == {key: value for key, value in reference.rollout.items() if key != "temperature"}
        assert (hot > 1, hot < 1) == (arm.name == "bf16-hot", arm.name == "nvfp4-cool")
        experiment: Any = build(tree)
        assert {*experiment.also_answering} >= {"nvfp4+four-six"}


def test_temperatures_are_measured_on_other_copies_and_questions_alike(words: list[str]) -> None:
    design, other = read_design(PART / "temperatures" / "study.yaml", words), read_design(PART / "study.yaml", words)
    assert not {*design.bases} & {*other.bases}
    for arm in design.arms:
        kind, _, temperature = arm.name.rpartition("-")
        tree: Any = compose(design.words(arm, 31, 0, sigma=None))
        assert (tree.quant.name, tree.rollout.temperature, tree.steps) == (kind, float(temperature), 1)
        assert tree.rollout.prompts_per_step * tree.rollout.group_size == 1024
        build(tree)
    trained: Any = compose(other.words(other.arms[0], 51, 0, sigma=None))
    measured: Any = compose(design.words(design.arms[0], 31, 0, sigma=None))
    trained.model.dither = 31
    assert measured.task == trained.task and measured.model == trained.model


# --- the random error ------------------------------------------------------------------------------------------------


def error_of(quant: Any, weight: torch.Tensor) -> torch.Tensor:
    packed = quant.pack(weight)
    return quant.operand(packed, tuple(weight.shape), torch.float32) * quant.output_scale(packed) - weight.float()


def test_a_random_error_is_as_long_as_nvfp4s_and_points_elsewhere() -> None:
    quant: Any = build(compose(["experiment=smoke", "quant=random-error", *user_options.words_in_use()])).quant
    drawn = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 896, generator=drawn) * torch.logspace(-3, 0, 64)[:, None]
    weight[:, 0] *= 2  # an outlier, as rows have them
    weight = weight.bfloat16()
    moved, rounded = error_of(quant, weight), error_of(quant.like, weight)
    assert quant.like.name == "nvfp4" and quant.kernel_layout == "int8"
    assert torch.allclose(moved.norm(dim=1) / rounded.norm(dim=1), torch.tensor(quant.size), rtol=0.03)
    assert torch.equal(moved, error_of(quant, weight))  # the same on every call
    other = weight.roll(1, 0)
    for one, two in ((moved, rounded), (moved, weight.float()), (moved, error_of(quant, other).roll(-1, 0))):
        cosines = torch.cosine_similarity(one, two, dim=1)
        assert abs(cosines.mean()) < 4 / math.sqrt(weight.numel()), cosines.mean()


@pytest.mark.parametrize(
    ("word", "named"),
    [("quant.size=-1", "quant.size"), ("quant.block=128", "quant.block"), ("quant@quant.like=bf16", "quant.like")],
)
def test_what_no_random_error_can_be_is_refused(word: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        build(compose(["experiment=smoke", "quant=random-error", word, *user_options.words_in_use()]))


def test_other_widths_and_quantizers_are_refused() -> None:
    found: Any = build(
        compose(["experiment=smoke", "quant=random-error", "quantizer=mse", *user_options.words_in_use()])
    )
    with pytest.raises(ConfigError, match="blocks of 16"):
        found.quant.check_width("model.layers.0.mlp.up_proj", 13)
    with pytest.raises(ConfigError, match="rtn"):
        found.quantizer.pack(torch.randn(16, 32).bfloat16(), found.quant, None, None)


# --- the temperatures ------------------------------------------------------------------------------------------------


def test_a_temperature_is_interpolated_and_extended() -> None:
    curve = {1.06: -0.8, 1.0: -1.1, 1.03: -1.0}
    assert [PAGE.temperature_of(curve, target) for target in (-1.05, -0.95, -0.7, -1.2)] == [1.015, 1.038, 1.075, 0.97]
    with pytest.raises(ConfigError, match="does not rise"):
        PAGE.temperature_of({1.0: -1.0, 1.03: -1.1}, -1.05)


# --- the words -------------------------------------------------------------------------------------------------------


def table(late: Mapping[str, float], early: Mapping[str, float] = MATCHED, error: float = 0.004) -> pd.DataFrame:
    """Planted runs in two sessions, which differ by five points; `late` are shares above those of bf16.

    The errors of an arm in a session add up to nothing, so that means are as planted.
    """
    draw, rows = np.random.default_rng(0), []
    for arm in ARMS:
        errors = error * draw.standard_normal((2, 2, 4))  # (right and entropy, sessions, copies)
        errors -= errors.mean(2, keepdims=True)
        answers, entropy = errors.reshape(2, 8)
        for copy in COPIES:
            right = 0.3 + late.get(arm, 0.0) + 0.05 * (copy > 54) + answers[copy - 51]
            shares = dict.fromkeys(("late", "greedy", "in bf16"), right) | {"first": 0.1, "last": 0.2}
            entropies = dict.fromkeys(("early", "ended"), early[arm] + entropy[copy - 51])
            rows.append({"arm": arm, "copy": copy, "session": "ab"[copy > 54], **shares, **entropies})
    return pd.DataFrame(rows)


def kl(of_random: float = 0.026) -> dict[str, np.ndarray]:
    return dict(zip(ARMS, np.full((5, 8), 0.026) * np.array([0, 1, 0, 1, of_random / 0.026])[:, None], strict=True))


def told(rows: pd.DataFrame, of: Mapping[str, np.ndarray] | None = None) -> tuple[dict[str, str], str]:
    """The word of each contrast, and the sentence."""
    page = PAGE.words_of(rows, of or kl())
    lines = [line.strip("| ").split(" | ") for part in (page[0], page[3]) for line in part.splitlines()[2:]]
    return {line[0]: line[-1].strip("*") for line in lines}, page[1].strip("*.")


COSTS = {"nvfp4": -0.047, "nvfp4-cool": -0.047, "random": -0.047}


@pytest.mark.parametrize(
    ("late", "entropy", "sentence"),
    [
        (COSTS, PAGE.SAME, "Damage acts, and entropy by itself makes less than half"),
        (COSTS | {"bf16-hot": -0.04, "nvfp4-cool": -0.01}, "lower", "Entropy acts, and damage does"),
        (COSTS | {"bf16-hot": 0.04, "nvfp4-cool": -0.09}, "higher", "Entropy acts, and damage does"),
        (COSTS | {"bf16-hot": -0.047, "nvfp4-cool": 0, "random": 0}, "lower", "Entropy acts; that damage does is not"),
        (COSTS | {"random": 0}, PAGE.SAME, "Which of the two acts is not decided"),
        ({}, PAGE.SAME, "These copies do not show that NVFP4 costs answers"),
    ],
)
def test_what_is_planted_is_said(late: Mapping[str, float], entropy: str, sentence: str) -> None:
    found, said = told(table(late))
    assert found[PAGE.ENTROPY] == entropy and said.startswith(sentence)
    assert found["nvfp4 - bf16"] == ("lower" if late else PAGE.SAME)
    expected = {"bf16-hot - bf16": late.get("bf16-hot", 0), "random - bf16": late.get("random", 0)}
    expected["nvfp4-cool - nvfp4"] = late.get("nvfp4-cool", 0) - late.get("nvfp4", 0)
    expected["random - nvfp4"] = late.get("random", 0) - late.get("nvfp4", 0)
    for name, planted in expected.items():
        assert found[name] == ("higher" if planted > 0.01 else "lower" if planted < -0.01 else PAGE.SAME), name
    assert found["random - bf16, both in BF16"] == found["random - bf16"]


def test_what_runs_leave_open_is_not_decided() -> None:
    found, said = told(table(COSTS | {"bf16-hot": -0.023}, error=0.03))
    assert found[PAGE.ENTROPY] == "not decided" and said == "Damage acts; whether entropy does is not decided"
    few = table(COSTS)
    found, said = told(few[few["copy"] < 58])
    assert {*found.values()} == {"not decided"} and said.startswith("These copies do not show")


@pytest.mark.parametrize(("share", "ok"), [(0.4, False), (0.6, True), (1.4, True), (1.6, False)])
@pytest.mark.parametrize("arm", ["bf16-hot", "nvfp4-cool"])
def test_a_temperature_that_misses_has_no_word(arm: str, share: float, ok: bool) -> None:
    at = RISE * (share if arm == "bf16-hot" else 1 - share)
    found, said = told(table(COSTS, MATCHED | {arm: at}))
    assert (found[PAGE.ENTROPY] == "not matched") is not ok and found["random - bf16"] == "lower"
    assert ok or said == "Damage acts; whether entropy does is not decided"
    other = "nvfp4-cool - nvfp4" if arm == "bf16-hot" else "bf16-hot - bf16"
    assert found[other] == PAGE.SAME


@pytest.mark.parametrize(("of_random", "ok"), [(0.020, False), (0.022, True), (0.032, True), (0.034, False)])
def test_an_error_of_another_kl_has_no_word(of_random: float, ok: bool) -> None:
    found, said = told(table(COSTS), kl(of_random))
    assert (found["random - bf16"], found["random - nvfp4"]) == (("lower", PAGE.SAME) if ok else ("not matched",) * 2)
    assert said.startswith("Damage acts" if ok else "Which of the two")


def test_an_arm_that_did_not_train_is_not_tested() -> None:
    rows = table(COSTS)
    rows.loc[rows["arm"] == "random", "last"] = 0.1
    assert {name for name, word in told(rows)[0].items() if word == "not tested"} == {
        "random - bf16",
        "random - nvfp4",
        "random - bf16, both in BF16",
    }


@pytest.mark.parametrize(
    ("value", "stderr", "p", "word"),
    [
        (0.05, 0.01, 0.01, "higher"),
        (-0.05, 0.01, 0.01, "lower"),
        (0.001, 0.008, 0.9, PAGE.SAME),
        (0.01, 0.008, 0.3, "not decided"),
        (0.0, math.nan, math.nan, "not decided"),
    ],
)
def test_words(value: float, stderr: float, p: float, word: str) -> None:
    assert PAGE.word_of(Estimate(value, stderr, 8, 13), p) == word


def test_the_simulation_fits_as_the_page_does() -> None:
    rows = table(COSTS, error=0.016)
    runs = rows["late"].to_numpy().reshape(1, 5, 8)
    sessions = np.repeat([0, 1], 4)
    for weights, measure in PAGE.PRIMARY.values():
        found, fitted = PAGE.effect(rows, weights, measure), POWER.fitted(runs, weights, sessions)
        assert [fitted[0][0], fitted[1][0]] == pytest.approx([found.value, found.stderr]) and fitted[2] == found.df


# --- from what sessions pack -----------------------------------------------------------------------------------------


def pack(folder: Path, design_at: Path, session: str, copies: range, records: Any) -> None:
    """What a session packs: `records(arm, copy)` of each run, and KL before training."""
    design, composer = read_design(design_at / "study.yaml", user_options.search_path([STUDY / "conf"])), Composer()
    runs = folder.parent / f"runs-{session}"
    for arm in design.arms:
        for copy in copies:
            tree = composer.tree(design.words(arm, copy, 0, None))
            where = {"device": "cuda", "gpu": "H200", "gguf": {"digest": "sha256:a", "dither": copy}}
            write_run(runs / tree["name"], tree, records(arm.name, copy), DONE, where)
    write_study(sorted(runs.iterdir()), folder / session, mixed_code=True, metrics=("study",))
    of = {"bf16": 0.0, "nvfp4": 0.026, "random-error": 0.026}
    formats = {name: {"kl": {"own": 0.0, "of_reference": value}} for name, value in of.items()}
    probes = [{"base": copy, "digest": f"of {copy}", "doses": {}, "formats": formats} for copy in copies]
    (folder / session / "probes.json").write_text(json.dumps(probes))
    shutil.copy(design_at / "study.yaml", folder / session)


def trained(arm: str, copy: int) -> list[dict[str, Any]]:
    train = [
        {"kind": "train", "step": at, "reward/mean": at / 100, "entropy": 0.34 * math.exp(MATCHED[arm])}
        for at in range(1, 41)
    ]
    right = 0.3 + COSTS.get(arm, 0.0) + (copy % 4) / 1000
    shares = dict.fromkeys(("eval/lenient_sampled", "eval/lenient_greedy", "eval/in/bf16/lenient_sampled"), right)
    return [*train, *({"kind": "eval", "step": at, **shares} for at in (0, 32, 36, 40))]


def at_first(arm: str, copy: int) -> list[dict[str, Any]]:
    """One step, whose entropy is x1.16 in NVFP4 and rises by 0.05 in each hundredth of temperature."""
    kind, _, temperature = arm.rpartition("-")
    level = 0.15 * (kind == "nvfp4") + 5 * (float(temperature) - 1) + (copy - 32.5) / 10
    return [{"kind": "train", "step": 1, "reward/mean": 0.1, "entropy": 0.34 * math.exp(level)}]


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, Path]:
    """Folders of data; the design has the temperatures that `at_first` gives."""
    own = tmp_path / "mechanism"
    shutil.copytree(PART, own, ignore=shutil.ignore_patterns("data", "results"))
    text = (own / "study.yaml").read_text()
    (own / "study.yaml").write_text(text.replace("temperature=1.04", "temperature=1.03").replace("=0.96", "=0.97"))
    monkeypatch.setattr(PAGE, "HERE", own)
    return own / "temperatures" / "data", own / "data"


def test_two_whole_sessions_have_words(pair: tuple[Path, Path]) -> None:
    temperatures, data = pair
    pack(temperatures, PAGE.HERE / "temperatures", "t", range(31, 35), at_first)
    assert "Not whole, so no words: copies 51, 52" in PAGE.words_page(temperatures, data)
    pack(data, PAGE.HERE, "a", range(51, 55), trained)
    page = PAGE.words_page(temperatures, data)
    assert "at 1.030, and NVFP4 that of BF16 at 0.970." in page and "words: copies 55, 56, 57, 58 lack a run" in page
    pack(data, PAGE.HERE, "b", range(55, 59), trained)
    page = PAGE.words_page(temperatures, data)
    assert "**Damage acts, and entropy by itself makes less" in page and "| random | 1.00 | 0.8 to 1.25 |" in page
    assert "| nvfp4 - bf16 | -4.70 [" in page and "| bf16-hot | 1.00 | 0.5 to 1.5 |" in page


def test_runs_at_another_temperature_are_refused(pair: tuple[Path, Path]) -> None:
    temperatures, data = pair
    pack(temperatures, PAGE.HERE / "temperatures", "t", range(31, 35), lambda arm, copy: at_first(arm, copy)[:1])
    (PAGE.HERE / "study.yaml").write_text((PART / "study.yaml").read_text())
    pack(data, PAGE.HERE, "a", COPIES, trained)
    with pytest.raises(ConfigError, match=r"rollout\.temperature=1\.04 where the protocol has 1\.03"):
        PAGE.words_page(temperatures, data)


def test_without_data_there_are_no_words(tmp_path: Path) -> None:
    page = PAGE.words_page(tmp_path, tmp_path)
    assert "Not measured." in page and "Not whole, so no words: copies 51, 52, 53, 54, 55, 56, 57, 58" in page


def test_the_design_has_the_measured_temperatures(words: list[str]) -> None:
    """Once they are measured, an amendment puts them there."""
    measured = PAGE.matched(PAGE.read(PART / "temperatures", PART / "temperatures" / "data"))
    arms = {arm.name: arm.words for arm in read_design(PART / "study.yaml", words).arms}
    guesses = (1.04, 0.96)
    for name, value in zip(("bf16-hot", "nvfp4-cool"), measured or guesses, strict=True):
        assert f"rollout.temperature={value:g}" in arms[name]
