"""Gains of algorithms on runs with known answers, question by question."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf

from qerl_bench.config import compose
from qerl_bench.errors import BadInput
from qerl_bench.results.algorithms import figure, gains, paired_changes
from qerl_bench.results.load import load_run
from qerl_bench.results.style import save

BEFORE = [True, False, False, False]
AFTER = {0: [True, True, True, False], 1: [False, True, True, True]}


def _write(root: Path, algo: str, seed: int, after: list[bool]) -> Path:
    path = root / f"{algo}-{seed}"
    path.mkdir(parents=True)
    config = compose([f"algo={algo}", f"seed={seed}", "steps=10"])
    (path / "config.yaml").write_text(OmegaConf.to_yaml(config))
    lines = []
    for step, answers in ((0, BEFORE), (10, after)):
        share = sum(answers) / 4
        lines.append({"kind": "eval", "step": step, "eval/accuracy_greedy": share, "eval/accuracy_sampled": share / 2})
    lines += [{"kind": "train", "step": i, "reward/mean": 0.1 * i, "entropy": 1 - 0.05 * i} for i in range(1, 11)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (path / "done.json").write_text("{}")
    rows = [
        {"step": step, "mode": mode, "question": f"q{3 - i}", "correct": correct if mode == "greedy" else not correct}
        for step, answers in ((10, after), (0, BEFORE))
        for mode in ("greedy", "sampled")
        for i, correct in enumerate(answers)
    ]
    pd.DataFrame(rows).to_parquet(path / "samples.parquet")
    return path


def test_gains_by_hand(tmp_path: Path) -> None:
    runs = [load_run(_write(tmp_path, algo, seed, AFTER[seed])) for algo in ("gspo", "grpo") for seed in (1, 0)]
    assert paired_changes(runs[1]).tolist() == [0, 1, 1, 0]  # sorted by question: the last answer is q0's
    table = gains(runs)
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
    row = gains(runs).iloc[0]
    questions, seeds = np.array([0, 0.5, 0.5, 0.5]).std(ddof=1) / 2, 0.75 / 2
    assert row["gain_se"] == pytest.approx(math.hypot(questions, seeds))
    assert row["worst_z"] == 0  # the seed in which nothing changed


def test_the_figure_has_a_line_for_each_algorithm(tmp_path: Path) -> None:
    runs = [load_run(_write(tmp_path, algo, seed, AFTER[seed])) for algo in ("grpo", "cispo") for seed in (0, 1)]
    drawn = figure(runs, smooth=3)
    for ax in drawn.axes:
        assert [line.get_label() for line in ax.get_lines()] == ["cispo", "grpo"]
        assert len(ax.get_lines()[0].get_xdata()) == 10
    assert all(file.stat().st_size > 1000 for file in save(drawn, tmp_path / "out" / "algorithms"))


def test_two_runs_of_one_seed_and_runs_without_evaluation_are_refused(tmp_path: Path) -> None:
    path = _write(tmp_path, "grpo", 0, AFTER[0])
    with pytest.raises(BadInput, match="several runs of one seed"):
        gains([load_run(path), load_run(path)])
    with pytest.raises(BadInput, match="no finished run"):
        gains([])
    samples = pd.read_parquet(path / "samples.parquet")
    samples[samples["step"] == 0].to_parquet(path / "samples.parquet")
    with pytest.raises(BadInput, match="before and after"):
        gains([load_run(path)])
