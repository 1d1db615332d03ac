"""How often an analysis finds an effect that is not there, where runs are made in sessions.

    python studies/fair-2026/simulate.py [--studies 5000]

A session is a machine, a kind of card and a day; all its runs are up or down together. Two arms
have 8 runs each, in 2, 3 or 4 sessions, as many of either in each; 16 old runs of the reference
are from a session of their own. A run has an error of 1.4 points, a session one of 0, 0.7 or 1.4.
Nothing differs between the arms, so each share of verdicts at level 0.05 is an error. Prints a
table.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from scipy import stats

RUN, SESSIONS, SPREADS = 1.4, (2, 3, 4), (0.0, 0.7, 1.4)  # points
RUNS, OLD, LEVEL = 8, 16, 0.05
METHODS = ("least squares", "mixed model", "Welch", "Welch with old references")


def false_shares(sessions: int, spread: float, studies: int, seed: int) -> list[float]:
    """The share of `studies` in which each of METHODS finds an effect."""
    draw = np.random.default_rng([seed, sessions, round(10 * spread)])
    sizes = [len(part) for part in np.array_split(range(RUNS), sessions)]  # runs of an arm in each session
    of_session = np.repeat(np.arange(sessions), sizes)
    shift = spread * draw.standard_normal((studies, sessions))
    arms = shift[:, None, of_session] + RUN * draw.standard_normal((studies, 2, RUNS))  # (studies, arms, runs)
    old = spread * draw.standard_normal((studies, 1)) + RUN * draw.standard_normal((studies, OLD))
    effect = arms[:, 1].mean(1) - arms[:, 0].mean(1)

    # Each session has as many runs of either arm, so the effect is free of sessions, and so is its error below.
    design = np.concatenate([np.tile(np.eye(sessions)[of_session], (2, 1)), np.repeat([[0.0], [1.0]], RUNS, 0)], axis=1)
    flat = arms.reshape(studies, 2 * RUNS)
    residuals = flat - flat @ np.linalg.pinv(design).T @ design.T
    freedom = 2 * RUNS - sessions - 1
    within = (residuals**2).sum(1) / freedom
    t = effect / np.sqrt(2 * within / RUNS)
    least_squares = 2 * stats.t.sf(abs(t), freedom)

    # REML of a balanced design: where sessions vary less than runs do, their variance is 0 and both are pooled.
    means = np.stack([flat[:, np.tile(of_session, 2) == one].mean(1) for one in range(sessions)], 1)
    counts = 2 * np.array(sizes)
    between = (counts * (means - flat.mean(1, keepdims=True)) ** 2).sum(1) / (sessions - 1)
    pooled = ((sessions - 1) * between + freedom * within) / (sessions - 1 + freedom)
    variance = np.where(between < within, pooled, within)
    mixed = 2 * stats.norm.sf(abs(effect) / np.sqrt(2 * variance / RUNS))

    with_old = np.concatenate([arms[:, 0], old], 1)
    welch = [welch_p(arms[:, 1], control) for control in (arms[:, 0], with_old)]
    return [float((p < LEVEL).mean()) for p in (least_squares, mixed, *welch)]


def welch_p(treated: np.ndarray, control: np.ndarray) -> np.ndarray:
    """Welch's two-sided p of each study, whose runs are a row."""
    found: Any = stats.ttest_ind(treated, control, axis=1, equal_var=False)
    return found.pvalue


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=5000, help="simulated studies a row (default: 5000)")
    parser.add_argument("--seed", type=int, default=0, help="of all random numbers (default: 0)")
    given = parser.parse_args(arguments)
    print(f"| sessions | spread of sessions | {' | '.join(METHODS)} |")
    print(f"|{'---|' * (2 + len(METHODS))}")
    for sessions in SESSIONS:
        for spread in SPREADS:
            shares = false_shares(sessions, spread, given.studies, given.seed)
            print(f"| {sessions} | {spread:.1f} | {' | '.join(f'{100 * share:.1f} %' for share in shares)} |")


if __name__ == "__main__":
    main()
