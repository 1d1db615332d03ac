"""Gains of algorithms on runs with known answers, question by question."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf

from qerl_bench.config import compose
from qerl_core.checks import ConfigError
from qerl_studies.figures.algorithms import algorithm_curves, answers_after, answers_before, gain_table
from qerl_studies.figures.style import FORMAT_COLORS
from qerl_studies.runs.load import load_run
from qerl_studies.runs.settings import Study
from tests.run_folders import write_run

BEFORE = [True, False, False, False]
AFTER = {0: [True, True, True, False], 1: [False, True, True, True]}


def _write(root: Path, algo: str, seed: int, after: list[bool], refills: float | None = None) -> Path:
    lines = []
    for step, answers in ((0, BEFORE), (10, after)):
        share = sum(answers) / 4
        lines.append({"kind": "eval", "step": step, "eval/accuracy_greedy": share, "eval/accuracy_sampled": share / 2})
    for i in range(1, 11):
        line = {"kind": "train", "step": i, "reward/mean": 0.1 * i, "entropy": 1 - 0.05 * i}
        lines.append(line if refills is None else line | {"dynamic/refills": refills})
    rows = [
        {"step": step, "mode": mode, "question": f"q{3 - i}", "correct": correct if mode == "greedy" else not correct}
        for step, answers in ((10, after), (0, BEFORE))
        for mode in ("greedy", "sampled")
        for i, correct in enumerate(answers)
    ]
    config = OmegaConf.to_yaml(compose([f"algo={algo}", f"seed={seed}", "steps=10"]))
    return write_run(root / f"{algo}-{seed}", config, lines, {}, answers=pd.DataFrame(rows))


def test_gains_by_hand(tmp_path: Path) -> None:
    runs = [load_run(_write(tmp_path, algo, seed, AFTER[seed])) for algo in ("gspo", "grpo") for seed in (1, 0)]
    changes = answers_after(runs[1]) - answers_before(runs[1])
    assert changes.tolist() == [0, 1, 1, 0]  # sorted by question: the last answer is q0's
    table = gain_table(Study(runs))
    assert list(table["algo"]) == ["grpo", "gspo"] and list(table["seeds"]) == [2, 2]
    row = table.iloc[0]
    assert (row["start"], row["final"], row["gain"]) == (0.25, 0.75, 0.5)
    per_question = np.array([-0.5, 1.0, 1.0, 0.5])  # means over the seeds of (0, 1, 1, 0) and (-1, 1, 1, 1)
    expected = per_question.std(ddof=1) / 2  # both seeds gain the same, so seeds add nothing
    assert row["gain_se"] == pytest.approx(expected) and row["gain_z"] == pytest.approx(0.5 / expected)
    worst = 0.5 / (np.array([-1, 1, 1, 1]).std(ddof=1) / 2)
    assert row["worst_z"] == pytest.approx(worst)
    assert row["entropy_first"] == pytest.approx(0.95) and row["entropy_last"] == pytest.approx(0.5)
    assert row["sampled_final"] == pytest.approx(0.375)


def test_seeds_that_differ_widen_the_error(tmp_path: Path) -> None:
    runs = [load_run(_write(tmp_path, "rloo", seed, after)) for seed, after in ((0, [True] * 4), (1, BEFORE))]
    row = gain_table(Study(runs)).iloc[0]
    questions, seeds = np.array([0, 0.5, 0.5, 0.5]).std(ddof=1) / 2, 0.75 / 2
    # What either holds of the rest, whose mean square is 0.125 (2 x (0.375^2 + 3 x 0.125^2) over 3), counts once.
    assert row["gain_se"] == pytest.approx(math.sqrt(questions**2 + seeds**2 - 0.125 / 8))
    assert row["worst_z"] == 0  # the seed in which nothing changed


def test_the_figure_has_a_line_for_each_algorithm_against_completions(tmp_path: Path) -> None:
    """dapo samples twice in every step, 16 prompts x 8 completions each time."""
    folders = [
        _write(tmp_path, algo, seed, AFTER[seed], float(algo == "dapo")) for algo in ("grpo", "dapo") for seed in (0, 1)
    ]
    drawn = algorithm_curves(Study([load_run(folder) for folder in folders]), smooth=3)
    for ax in drawn.axes:
        lines = {line.get_label(): line for line in ax.get_lines() if line.get_label() != "_each seed"}
        assert list(lines) == ["dapo", "grpo"]
        assert lines["grpo"].get_xdata()[-1] == pytest.approx(10 * 0.128)
        assert lines["dapo"].get_xdata()[-1] == pytest.approx(20 * 0.128)
        assert not {line.get_color() for line in lines.values()} & set(FORMAT_COLORS.values())
        assert ax.get_xlabel() == "completions sampled, thousands"
        assert {text.get_text() for text in ax.texts} == {"dapo", "grpo"}
    said = " ".join(drawn.get_supxlabel().split())
    assert "BF16 without noise" in said and "2 seeds of one base model" in said and "do not begin at 0" in said


def test_where_refills_were_not_kept_the_axis_is_the_step_and_the_caption_says_so(tmp_path: Path) -> None:
    drawn = algorithm_curves(
        Study([load_run(_write(tmp_path, algo, 0, AFTER[0])) for algo in ("dapo", "grpo")]), smooth=1
    )
    assert [ax.get_xlabel() for ax in drawn.axes] == ["step", "step"]
    assert "dapo sampled further completions in a step" in " ".join(drawn.get_supxlabel().split())


def test_two_runs_of_one_seed_and_runs_without_evaluation_are_refused(tmp_path: Path) -> None:
    path = _write(tmp_path, "grpo", 0, AFTER[0])
    with pytest.raises(ConfigError, match="two runs of one setting"):
        gain_table(Study([load_run(path), load_run(path)]))
    with pytest.raises(ConfigError, match="no finished run"):
        gain_table(Study([]))
    samples = pd.read_parquet(path / "samples.parquet")
    samples[samples["step"] == 0].to_parquet(path / "samples.parquet")
    with pytest.raises(ConfigError, match="before and after"):
        gain_table(Study([load_run(path)]))
