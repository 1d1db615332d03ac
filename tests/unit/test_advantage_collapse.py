"""The share of groups without signal in the first tenth of a run, and the slope of the final accuracy over it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from qerl_core.checks import ConfigError
from qerl_studies.commands.figure import main as figure
from qerl_studies.tables.advantage_collapse import WITHIN, slope_within
from tests.run_folders import DONE, SHORT, write_run

STEPS = 40  # the first tenth has four


def _write(root: Path, name: str, rank: int, base: int, seed: int, share: float, accuracy: float) -> None:
    config = SHORT | {"steps": STEPS, "seed": seed, "lora": {"name": "default", "rank": rank}}
    config |= {"model": {"name": "tiny", "seed": base}, "optim": {"lr": 1e-3}}
    early = [share - 0.03, share - 0.01, share + 0.01, share + 0.03]  # rises by 0.02 a step
    shares = early + [1.0] * (STEPS - 4)
    lines = [{"kind": "train", "step": at, "reward/frac_zero_std": one} for at, one in enumerate(shares, 1)]
    lines.append({"kind": "eval", "step": STEPS, "eval/accuracy_sampled": accuracy})
    write_run(root / name, config, lines, DONE, {"base": f"tiny {base}"})


def test_the_slope_is_taken_within_settings_and_bases(tmp_path: Path) -> None:
    """By construction: settings and bases move both numbers, and within them accuracy falls by 0.3 per unit share."""
    draw, rows = np.random.default_rng(0), []
    for rank in (4, 8):
        for base in (0, 1, 2):
            for seed in (0, 1):
                share = 0.3 + 0.1 * (rank == 8) + 0.05 * base + 0.02 * draw.standard_normal()
                accuracy = 0.2 + 0.2 * (rank == 8) + 0.1 * base - 0.3 * share
                rows.append((rank, share, accuracy))
                _write(tmp_path / "runs", f"r{rank}-b{base}-s{seed}", rank, base, seed, share, accuracy)
    figure(["advantage_collapse", str(tmp_path / "runs"), "--out", str(tmp_path), "--mixed-code"])
    table = pd.read_csv(tmp_path / "advantage_collapse.csv")
    assert len(table) == 3 and table["runs"].tolist() == [6, 6, 12]
    for line, rank in zip(table.itertuples(), (4, 8), strict=False):
        shares, ends = zip(*((share, end) for one, share, end in rows if one == rank), strict=True)
        assert line.share == pytest.approx(np.mean(shares)) and line.accuracy == pytest.approx(np.mean(ends))
        assert line.trend == pytest.approx(0.02)
    last = table.iloc[-1]
    assert last["setting"] == WITHIN and last["slope"] == pytest.approx(-0.3)
    assert np.polyfit([share for _, share, _ in rows], [end for *_, end in rows], 1)[0] > 0  # over all it rises


def test_the_slope_and_its_error_are_those_of_least_squares() -> None:
    draw = np.random.default_rng(1)
    arms, bases = [*"aabbccaabbcc"], [0] * 6 + [1] * 6
    x = draw.random(12)
    y = 0.5 * x + draw.standard_normal(12)
    found = slope_within(x.tolist(), y.tolist(), [arms, bases])
    design = np.stack([x, *(np.array([one == arm for one in arms], float) for arm in "abc"), np.array(bases, float)], 1)
    best, (rest,), *_ = np.linalg.lstsq(design, y, rcond=None)
    error = (rest / (12 - 5) * np.linalg.inv(design.T @ design)[0, 0]) ** 0.5
    assert (found.value, found.stderr, found.df, found.n) == pytest.approx((best[0], error, 7, 12))


@pytest.mark.parametrize("shares", [[0.1, 0.2], [0.3, 0.3, 0.3], [0.0, 0.0, 0.0, 0.0]], ids=str)
def test_too_few_runs_for_a_slope_are_refused(shares: list[float]) -> None:
    with pytest.raises(ConfigError, match=rf"got {len(shares)} .*add seeds or bases"):
        slope_within(shares, shares, [["a"] * len(shares)])
