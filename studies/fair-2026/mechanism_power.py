"""What eight copies can tell of the mechanism: how often mechanism/protocol.md gives each word.

    python studies/fair-2026/mechanism_power.py [studies=5000]

As simulate.py: a run has an error of 1.6 points, a session, of which there are two, one of 0.7. Each row plants what
arms end above or below `bf16`, fits each primary contrast on its own arms by least squares, corrects the four by Holm,
and prints the share of studies, in per cent, in which it is higher / lower / without difference beyond the margin.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from mechanism import ARMS, MARGIN, PRIMARY, SAME
from rates_analysis.contrasts import LEVEL
from scipy import stats

from qerl_core.process.arguments import KeyValueParser
from qerl_studies.tables.markdown import markdown_table

RUN, SPREAD, COPIES, SESSIONS, SEED = 1.6, 0.7, 8, 2, 0  # points
PLANTED = {  # points above bf16, of ARMS
    "nothing": (0, 0, 0, 0, 0),
    "damage alone": (0, -4.7, 0, -4.7, -4.7),
    "entropy alone": (0, -4.7, -4.7, 0, 0),
    "half is entropy": (0, -4.7, -2.35, -2.35, -2.35),
    "damage, and entropy helps": (0, -4.7, 2.35, -7.05, -7.05),
}


def words(planted: tuple[float, ...], studies: int) -> np.ndarray:
    """The word of each contrast in each study, (studies, contrasts)."""
    draw = np.random.default_rng(SEED)
    of_session = np.repeat(np.arange(SESSIONS), COPIES // SESSIONS)
    shift = SPREAD * draw.standard_normal((studies, 1, SESSIONS))[:, :, of_session]
    runs = np.array(planted)[:, None] + shift + RUN * draw.standard_normal((studies, len(ARMS), COPIES))
    effects, errors, freedoms = zip(
        *(fitted(runs, weights, of_session) for weights, _ in PRIMARY.values()), strict=True
    )
    effect, error = np.stack(effects, 1), np.stack(errors, 1)
    p = holm_of_each(2 * stats.t.sf(abs(effect / error), freedoms))
    within = abs(effect) + stats.t.ppf(1 - LEVEL / 2, freedoms) * error <= 100 * MARGIN
    undecided = np.where(within, SAME, "not decided")
    return np.where(p < LEVEL, np.where(effect > 0, "higher", "lower"), undecided)


def fitted(
    runs: np.ndarray, weights: Mapping[str, float], of_session: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """Effects, standard errors and degrees of freedom by least squares: each session has all arms equally often."""
    of = runs[:, [ARMS.index(arm) for arm in weights]]  # (studies, arms, copies)
    own = np.array([*weights.values()])
    left = of - of.mean(2, keepdims=True)
    for session in range(SESSIONS):
        left[:, :, of_session == session] -= left[:, :, of_session == session].mean((1, 2), keepdims=True)
    freedom = len(own) * COPIES - len(own) - SESSIONS + 1
    variance = (left**2).sum((1, 2)) / freedom
    return of.mean(2) @ own, np.sqrt(variance * (own @ own) / COPIES), freedom


def holm_of_each(p: np.ndarray) -> np.ndarray:
    """p after Holm's correction within each row."""
    order = p.argsort(1)
    scaled = np.take_along_axis(p, order, 1) * np.arange(p.shape[1], 0, -1)
    adjusted = np.empty_like(p)
    np.put_along_axis(adjusted, order, np.maximum.accumulate(scaled, 1).clip(max=1), 1)
    return adjusted


def main(arguments: list[str] | None = None) -> None:
    parser = KeyValueParser(__doc__)
    parser.add_argument("--studies", type=int, default=5000, help="simulated studies a row (default: 5000)")
    given = parser.parse_args(arguments)
    lines = []
    for name, planted in PLANTED.items():
        drawn = words(planted, given.studies)
        shares = [[(of == word).mean() for word in ("higher", "lower", SAME)] for of in drawn.T]
        lines.append([name, *(" / ".join(f"{100 * share:.0f}" for share in each) for each in shares)])
    print(markdown_table(["planted", *PRIMARY], lines))


if __name__ == "__main__":
    main()
