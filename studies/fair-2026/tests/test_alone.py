"""Part 9 of the fair test: its designs, and words of planted data."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from qerl_bench.config import build, compose
from qerl_core.checks import ConfigError
from qerl_core.options import user_options
from qerl_studies.design.design import read_design
from tests.scripts import ROOT, script

STUDY = ROOT / "studies" / "fair-2026"
PAGE = script("studies/fair-2026/alone.py")
PART_8 = script("studies/fair-2026/tests/test_mechanism.py")
FROZEN = "881606f11e462079bd11eeb999417f13c52f6cab161cd75547dd741a0a4e9459"  # of the protocol without its amendments


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(user_options, "_in_use", [])
    user_options.use([STUDY / "conf"])
    return user_options.words_in_use()


def test_the_protocol_is_the_frozen_one() -> None:
    before = (STUDY / "alone" / "protocol.md").read_text().partition("\n## Amendments")[0].rstrip("\n")
    assert hashlib.sha256(before.encode()).hexdigest() == FROZEN


@pytest.mark.parametrize("folder", PAGE.SIZES.values())
def test_an_arm_is_a_format_and_a_number_of_completions(folder: str, words: list[str]) -> None:
    design = read_design(STUDY / "alone" / folder / "study.yaml", words)
    assert len(design.bases) == PAGE.MACHINES and len(design.arms) == 9
    for arm in design.arms:
        tree: Any = compose(design.words(arm, 31, 0, sigma=None))
        completions = tree.rollout.prompts_per_step * tree.rollout.group_size
        assert arm.name == f"{tree.quant.name}-{completions}" and completions in PAGE.BATCHES
        assert tree.steps == PAGE.STEPS and f"{folder[0]}.5b" in tree.model.id
    assert build(compose(design.words(design.arms[0], 31, 0, sigma=None)))


def planted(arm: str, machine: int) -> list[dict[str, Any]]:
    """NVFP4 samples half as much again as BF16, in half of its memory, and a step takes as long."""
    form, speed = arm.partition("-")[0], 1 + machine / 1000
    rollouts = {"nvfp4": 1500.0, "bf16": 1000.0, "nf4": 1490.0}[form] * speed
    peak = {"nvfp4": 5.0, "bf16": 10.0, "nf4": 5.0}[form]
    return [
        {
            "kind": "train", "step": at, "speed/rollout_tok_s": rollouts if at > 2 else 1.0, "memory/peak_gib": peak,
            "completions/tokens": 2000.0, "time/step_s": 2.0 * speed if at > 2 else 90.0,
        }
        for at in range(1, 11)
    ]  # fmt: skip


def test_three_whole_machines_have_words(tmp_path: Path) -> None:
    own = Path(shutil.copytree(STUDY / "alone", tmp_path / "alone", ignore=shutil.ignore_patterns("data", "results")))
    for machine in (31, 32):
        PART_8.pack(own / "05b", f"m{machine}", range(machine, machine + 1), planted)
    assert "Not whole, so no words: machines 33 lack a run." in PAGE.page(own)
    PART_8.pack(own / "05b", "m33", range(33, 34), planted)
    page = PAGE.page(own)
    assert "| rollouts, NVFP4 / BF16 | x1.500" in page and "| memory, NVFP4 / BF16 | x0.500" in page
    assert "machines 31, 32, 33 lack a run." in page  # of the other size
    assert "| nvfp4-8 | 1,548 | 1.03 | 5.00 |" in page and "more than a tenth: 0 of 27." in page


def rows(spread: float, **ratios: float) -> Any:
    draw = np.random.default_rng(0)
    found = []
    for machine in (31, 32, 33):
        for form in ("bf16", "nvfp4", "nf4"):
            for batch in PAGE.BATCHES:
                values = {
                    name: ratios.get(f"{form}_{name}", 1.0) * float(np.exp(spread * draw.standard_normal()))
                    for name in ("rollouts", "step", "memory")
                }
                found.append(
                    {"arm": f"{form}-{batch}", "machine": machine, "halves": 1.2 if batch == 8 else 1.0} | values
                )
    return pd.DataFrame(found)


def test_words_are_those_of_the_protocol() -> None:
    planted_rows = rows(0.002, nvfp4_rollouts=1.5, nvfp4_step=0.7, nvfp4_memory=0.5, nf4_rollouts=1.5)
    table = "\n".join(PAGE.words(planted_rows))
    for line in (
        r"rollouts, NVFP4 / BF16 .* \*\*more\*\*",
        r"step, NVFP4 / BF16 .* \*\*less\*\*",
        r"memory, NVFP4 / BF16 .* \*\*less\*\*",
        r"rollouts, NVFP4 / NF4 .* \*\*no difference beyond the margin\*\*",
    ):
        assert pd.Series([table]).str.contains(line).all(), line
    assert "more than a tenth: 9 of 27." in table
    assert "**not decided**" in "\n".join(PAGE.words(rows(0.3, nvfp4_rollouts=1.5)))
    two = planted_rows[planted_rows["machine"] < 33]
    assert "**more**" not in "\n".join(PAGE.words(two))


def test_a_run_that_broke_off_is_refused(tmp_path: Path) -> None:
    own = Path(shutil.copytree(STUDY / "alone", tmp_path / "alone", ignore=shutil.ignore_patterns("data", "results")))
    for machine in (31, 32, 33):
        PART_8.pack(own / "05b", f"m{machine}", range(machine, machine + 1), lambda arm, one: planted(arm, one)[:9])
    with pytest.raises(ConfigError, match="has not 10 steps of"):
        PAGE.page(own)
