"""The figure of dose and response shows the means over bases that its numbers have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from qerl_studies.design.readings import by_base, final
from qerl_studies.design.sessions import Sessions
from qerl_studies.figures.dose import dose_response
from qerl_studies.figures.effects import PlottedArm
from qerl_studies.report import sessions
from qerl_studies.report.sessions import figures, read_once

STUDIES = Path(__file__).parents[2] / "studies"


@pytest.fixture(scope="module")
def study() -> Sessions:
    return read_once(STUDIES / "shortcut-2026-again")


def _arm(study: Sessions, name: str, control: str) -> PlottedArm:
    return PlottedArm(name, *study.pairs(name, control), shade="#0072B2")


def _line(figure: Figure, panel: int) -> tuple[np.ndarray, np.ndarray]:
    """The line through the means: KL and responses."""
    (line,) = [one for one in figure.axes[panel].lines if len(one.get_xdata()) == 2 and one.get_zorder() == 1][-1:]
    return np.asarray(line.get_xdata()), np.asarray(line.get_ydata())


def test_means_are_those_of_the_runs_in_the_order_of_their_dose(study: Sessions) -> None:
    arms = [_arm(study, "nvfp4-noise", "nvfp4"), _arm(study, "bf16-noise", "bf16")]
    figure = dose_response(arms)
    kl, pass_1 = _line(figure, 2)
    assert list(kl) == sorted(kl) and 0.01 < kl[0] < kl[-1] < 0.1
    ends = {arm.name: by_base(study.runs, arm.name, final) for arm in study.arms}
    wanted = [
        100 * np.mean([ends[name][base] - ends[control][base] for base in ends[name].index])
        for name, control in (("nvfp4-noise", "nvfp4"), ("bf16-noise", "bf16"))
    ]
    assert sorted(pass_1) == pytest.approx(sorted(wanted), abs=1e-9)
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert titles[2:] == ["pass@1 after training", "pass@16 after training"]
    _, noisy = _line(figure, 0)
    assert all(2 < rise < 15 for rise in noisy)


@pytest.mark.parametrize(("name", "drawn"), [("shortcut-2026-again", False), ("shortcut-2026-doses", True)])
def test_only_a_study_with_three_sizes_of_noise_has_such_a_figure(name: str, drawn: bool, stand_in: Any) -> None:
    shown: list[str] = []
    stand_in(sessions, by_figure=lambda study: {}, dot_plot=lambda arms, measures: Figure())
    stand_in(sessions, dose_response=lambda arms: (shown.extend(arm.label for arm in arms), Figure())[1])
    found = figures(read_once(STUDIES / name))
    assert set(found) == ({"arms.svg", "dose.svg"} if drawn else {"arms.svg"}) and not shown
    for draw in found.values():
        draw()
    assert sorted(shown) == (["nvfp4-noise", "nvfp4-strong", "nvfp4-weak"] if drawn else [])
