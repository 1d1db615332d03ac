"""Part 8 of the fair test: designs and format are those of the protocol, and the words are right on planted data."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping
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
from qerl_studies.design.design import read_design
from qerl_studies.runs.collect import write_study
from tests.run_folders import DONE, write_run
from tests.scripts import ROOT, script

STUDY = ROOT / "studies" / "fair-2026"
PART = STUDY / "mechanism"
PAGE = script("studies/fair-2026/mechanism.py")
COPIES, RISE, SAME = range(51, 59), 0.15, "no difference beyond the margin"
FADED = {"bf16": 0.0, "nvfp4": 0.2, "bf16-hot": 0.05, "nvfp4-cool": 0.06, "random": 0.1}  # the same in the last steps
MATCHED = {"bf16": 0.0, "nvfp4": RISE, "bf16-hot": RISE, "nvfp4-cool": 0.0, "random": 0.1}  # log entropy above BF16's
COSTS: Mapping[str, float] = dict.fromkeys(("nvfp4", "nvfp4-cool", "random"), -0.047)
# SHA-256 of the protocol without its amendments
FROZEN = "e0257e5add4e60da00895350f0cb4a66db21fe0ea5cf1fa9a8351117783e97af"


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(user_options, "_in_use", [])
    user_options.use([STUDY / "conf"])
    return user_options.words_in_use()


def test_the_protocol_is_the_frozen_one() -> None:
    before = (PART / "protocol.md").read_text().partition("\n## Amendments")[0].rstrip("\n")
    assert hashlib.sha256(before.encode()).hexdigest() == FROZEN


def test_arms_differ_from_part_2_in_format_and_temperature_alone(words: list[str]) -> None:
    design, part_2 = (read_design(at / "study.yaml", words) for at in (PART, STUDY / "rates" / "05b"))
    assert [arm.name for arm in design.arms] == [*PAGE.FORMATS] and [*design.bases] == [*COPIES]
    reference: Any = compose(part_2.words(part_2.arms[0], 43, 0, sigma=None))
    reference.model.dither = reference.seed = 51
    for arm in design.arms:
        tree: Any = compose(design.words(arm, 51, 0, sigma=None))
        hot, tree.rollout.temperature = tree.rollout.temperature, 1.0
        assert {key for key in tree if tree[key] != reference[key]} <= {"name", "quant"}
        assert (hot > 1, hot < 1) == (arm.name == "bf16-hot", arm.name == "nvfp4-cool")
        assert tree.quant.name == PAGE.FORMATS[arm.name] and build(tree)


def test_the_design_has_the_measured_temperatures(words: list[str]) -> None:
    """An amendment put them there."""
    design = read_design(PART / "temperatures" / "study.yaml", words)
    assert not {*design.bases} & {*COPIES}
    for arm in design.arms:
        tree: Any = compose(design.words(arm, 31, 0, sigma=None))
        assert arm.name == f"{tree.quant.name}-{tree.rollout.temperature:g}" and build(tree)
    arms = {arm.name: arm.words for arm in read_design(PART / "study.yaml", words).arms}
    pair = PAGE.matched(PAGE.read(PART / "temperatures"))
    assert pair == (1.032, 0.962)
    for name, value in zip(("bf16-hot", "nvfp4-cool"), pair, strict=True):
        assert f"rollout.temperature={value:g}" in arms[name]


def quant_of(*more: str) -> Any:
    return build(compose(["experiment=smoke", "quant=random-error", *more, *user_options.words_in_use()])).quant


def error_of(quant: Any, weight: torch.Tensor) -> torch.Tensor:
    packed = quant.pack(weight)
    return quant.operand(packed, tuple(weight.shape), torch.float32) * quant.output_scale(packed) - weight.float()


def test_a_random_error_is_as_long_as_nvfp4s_and_points_elsewhere() -> None:
    quant = quant_of()
    weight = torch.randn(64, 896, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 0, 64)[:, None]
    weight = weight.bfloat16()
    moved, rounded = error_of(quant, weight), error_of(quant.like, weight)
    assert quant.like.name == "nvfp4" and quant.kernel_layout == "int8"
    assert torch.allclose(moved.norm(dim=1) / rounded.norm(dim=1), torch.tensor(quant.size), rtol=0.03)
    assert torch.equal(moved, error_of(quant, weight))
    for other in (rounded, weight.float(), error_of(quant, weight.roll(1, 0)).roll(-1, 0)):
        assert abs(torch.cosine_similarity(moved, other, dim=1).mean()) < 4 / math.sqrt(weight.numel())


def test_what_no_random_error_can_be_is_refused() -> None:
    for word in ("size=-1", "block=128", "activations=x"):
        with pytest.raises(ConfigError, match=word.partition("=")[0]):
            quant_of(f"quant.{word}")
    with pytest.raises(ConfigError, match="rtn"):
        quant_of().encode(None, None)


def table(late: Mapping[str, float], early: Mapping[str, float] = MATCHED, error: float = 0.004) -> Any:
    """Planted runs of two sessions; errors of an arm in a session add up to nothing."""
    draw, rows = np.random.default_rng(0), []
    for arm in PAGE.FORMATS:
        errors = error * draw.standard_normal((2, 4))
        for copy, off in zip(COPIES, (errors - errors.mean(1, keepdims=True)).flat, strict=True):
            shares = dict.fromkeys(("before", "late", *PAGE.ASKED), 0.3 + late.get(arm, 0) + 0.05 * (copy > 54) + off)
            others = {"early": early[arm], "entropy": FADED[arm], "collapsed": 0, "first": 0.1, "last": 0.2, "gain": 0}
            rows.append({"arm": arm, "copy": copy, "session": "ab"[copy > 54], "greedy": 0.3} | shares | others)
    return pd.DataFrame(rows)


def told(rows: Any, kl: float = 1.0) -> tuple[dict[str, str], str]:
    """The word of each contrast, and the sentence."""
    page = PAGE.words_of(rows, kl)
    lines = [line.strip("| ").split(" | ") for part in (page[0], page[3]) for line in part.splitlines()[2:]]
    return {line[0]: line[-1].strip("*") for line in lines}, page[1].strip("*.")


@pytest.mark.parametrize(
    ("late", "entropy", "sentence"),
    [
        (COSTS, SAME, "Damage acts, and entropy by itself makes less than half"),
        ({**COSTS, "bf16-hot": -0.04, "nvfp4-cool": -0.01}, "lower", "Entropy acts, and damage does"),
        ({**COSTS, "bf16-hot": 0.04, "nvfp4-cool": -0.09}, "higher", "Entropy acts, and damage does"),
        ({"nvfp4": -0.047, "bf16-hot": -0.047}, "lower", "Entropy acts; that damage does is not"),
        ({**COSTS, "random": 0}, SAME, "Which of the two acts is not decided"),
        ({}, SAME, "These copies do not show that NVFP4 costs answers"),
    ],
)
def test_what_is_planted_is_said(late: Mapping[str, float], entropy: str, sentence: str) -> None:
    found, said = told(table(late))
    assert found.pop(PAGE.ENTROPY) == entropy and said.startswith(sentence)
    for name, word in found.items():
        one, other = name.partition(",")[0].split(" - ")
        gap = late.get(one, 0) - late.get(other, 0)
        assert word == ("higher" if gap > 0 else "lower" if gap < 0 else SAME), name


def test_the_page_shows_how_much_of_the_entropy_is_left_in_the_last_steps() -> None:
    """A quarter of NVFP4's rise for the one temperature, 0.7 for the other; the ratio of entropies is beside it."""
    page = PAGE.words_of(table(COSTS), 1.0)
    for arm, left in (("bf16-hot", "0.25"), ("nvfp4-cool", "0.70")):
        assert f"| {arm} | 1.00 | 0.5 to 1.5 | {left} |" in page[5]
    assert f"x{math.exp(0.05):.3f}" in next(line for line in page[8].splitlines() if "bf16-hot - bf16" in line)


def test_what_runs_leave_open_is_not_decided() -> None:
    found, said = told(table({**COSTS, "bf16-hot": -0.023}, error=0.03))
    assert found[PAGE.ENTROPY] == "not decided" and said == "Damage acts; whether entropy does is not decided"
    rows = table(COSTS)
    assert {*told(rows[rows["copy"] < 58])[0].values()} == {"not decided"}
    rows.loc[rows["arm"] == "random", "last"] = 0.1
    assert [name for name, word in told(rows)[0].items() if word == "not tested"] == [
        *("random - bf16", "random - nvfp4", "random - bf16, both in BF16")
    ]


@pytest.mark.parametrize("arm", ["bf16-hot", "nvfp4-cool", "random"])
def test_an_arm_that_is_not_what_it_is_called_has_no_word(arm: str) -> None:
    asked = PAGE.FIRST_TABLE | PAGE.SECOND_TABLE
    for share, ok in ((0.45, False), (0.85, True), (1.2, True), (1.55, False)):
        early = MATCHED | ({} if arm == "random" else {arm: RISE * (share if arm == "bf16-hot" else 1 - share)})
        found = told(table(COSTS, early), share if arm == "random" else 1.0)[0]
        assert all((found[name] == "not matched") == (arm in arms and not ok) for name, (arms, _) in asked.items())


def pack(part: Path, session: str, copies: range, records: Callable[[str, int], list[dict[str, Any]]]) -> None:
    design, composer = read_design(part / "study.yaml", user_options.words_in_use()), Composer()
    runs, packed = part / f"runs-{session}", part / "data" / session
    for arm in design.arms:
        for copy in copies:
            tree = composer.tree(design.words(arm, copy, 0, None))
            where = {"device": "cuda", "gpu": "H200", "gguf": {"digest": "sha256:a", "dither": copy}}
            write_run(runs / tree["name"], tree, records(arm.name, copy), DONE, where)
    write_study(sorted(runs.iterdir()), packed, mixed_code=True, metrics=("study",))
    formats = {name: {"kl": {"of_reference": value}} for name, value in (("nvfp4", 0.026), ("random-error", 0.025))}
    probes = [{"base": copy, "digest": f"of {copy}", "doses": {}, "formats": formats} for copy in copies]
    (packed / "probes.json").write_text(json.dumps(probes))
    shutil.copy(part / "study.yaml", packed)


def step(at: int, entropy: float) -> dict[str, Any]:
    return {"kind": "train", "step": at, "reward/mean": at / 100, "accuracy": at / 100, "entropy": entropy}


def trained(arm: str, copy: int) -> list[dict[str, Any]]:
    right = 0.3 + COSTS.get(arm, 0.0) + copy % 4 / 1000
    forms = ("", *(f"in/{form}/" for form in ("bf16", "nvfp4", "nvfp4+four-six")))
    shares = {f"eval/{form}lenient_{mode}": right for form in forms for mode in ("sampled", "greedy")}
    steps = [{**step(at, 0.34 * math.exp(MATCHED[arm])), "entropy_clean": 0.34} for at in range(1, 41)]
    return [*steps, *({"kind": "eval", "step": at, **shares} for at in (0, 32, 36, 40))]


def at_first(arm: str, copy: int) -> list[dict[str, Any]]:
    right = {"bf16-1": 0.34, "bf16-1.04": 0.42, "bf16-1.08": 0.6, "nvfp4-1": 0.4, "nvfp4-0.96": 0.28, "nvfp4-0.92": 0.2}
    return [step(1, right[arm] + (copy - 32.5) / 100)]


def test_two_whole_sessions_have_words_and_another_temperature_is_refused(tmp_path: Path) -> None:
    own = shutil.copytree(PART, tmp_path / "mechanism", ignore=shutil.ignore_patterns("data", "results"))
    assert "Not measured." in (page := PAGE.words_page(own)) and "so no words: copies 51, 52, 53, 54, 55," in page
    pack(own / "temperatures", "t", range(31, 35), at_first)
    design = (own / "study.yaml").read_text()
    (own / "study.yaml").write_text(design.replace("=1.032", "=1.03").replace("=0.962", "=0.98"))
    pack(own, "a", range(51, 55), trained)
    page = PAGE.words_page(own)
    assert "entropy at 1.03, NVFP4 that of BF16 at 0.98." in page and "words: copies 55, 56, 57, 58 lack a run" in page
    pack(own, "b", range(55, 59), trained)
    page = PAGE.words_page(own)
    assert "**Damage acts, and entropy by itself makes less" in page and "| random | 0.96 | 0.8 to 1.25 |" in page
    assert "| nvfp4 - bf16 | -4.70 [" in page and "| bf16-hot | 1.00 | 0.5 to 1.5 |" in page
    runs, pair = PAGE.read(own), (1.031, 0.98)
    with pytest.raises(ConfigError, match=r"rollout\.temperature=1\.03 where the protocol has 1\.031"):
        PAGE.contrasts(runs, pair)
