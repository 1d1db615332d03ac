"""Noise schedules: every published stage table, end points, monotony, stage boundaries, and what is refused."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from qerl_bench.aqn.base import OpenLoop, Schedule, stage_of
from qerl_bench.aqn.constant import Constant
from qerl_bench.aqn.cosine import CosineDecay
from qerl_bench.aqn.decay import StagedDecay
from qerl_bench.aqn.exp import ExponentialDecay
from qerl_bench.aqn.linear import LinearDecay
from qerl_bench.aqn.log import LogarithmicDecay
from qerl_bench.aqn.none import NoNoise
from qerl_core.checks import ConfigError

DECAYS = [ExponentialDecay, LinearDecay, CosineDecay, LogarithmicDecay]


def _decay(kind: type[StagedDecay] = ExponentialDecay, **changed: Any) -> StagedDecay:
    usual = {"sigma_start": 1e-2, "sigma_end": 1e-4, "stages": 10, "exponent": "K-2", "boundaries": "even"}
    return kind(name="test", **(usual | changed))


def _ladder(schedule: StagedDecay) -> list[float]:
    """Sigma of each stage, read from a run with ten steps in each of them."""
    return [schedule.sigma(10 * stage + 5, 10 * schedule.stages) for stage in range(schedule.stages)]


# Stage values as published: the paper's eq. 8 over Table 4's range, and the released code over its two ranges.
PAPER = "0 1.00e-02 7.17e-03 5.14e-03 3.68e-03 2.64e-03 1.89e-03 1.36e-03 9.73e-04 6.97e-04"
REPO_SCRIPTS = "0 1.00e-02 5.62e-03 3.16e-03 1.78e-03 1.00e-03 5.62e-04 3.16e-04 1.78e-04 1.00e-04"
REPO_DEFAULTS = "0 5.00e-02 2.81e-02 1.58e-02 8.89e-03 5.00e-03 2.81e-03 1.58e-03 8.89e-04 5.00e-04"


@pytest.mark.parametrize(
    ("settings", "table"),
    [
        ({"sigma_start": 1e-2, "sigma_end": 5e-4, "exponent": "K-1"}, PAPER),
        ({"sigma_start": 1e-2, "sigma_end": 1e-4}, REPO_SCRIPTS),
        ({"sigma_start": 5e-2, "sigma_end": 5e-4}, REPO_DEFAULTS),
    ],
    ids=["paper", "repo scripts", "repo defaults"],
)
def test_exp_against_the_published_stage_tables(settings: dict[str, Any], table: str) -> None:
    assert [f"{sigma:.2e}" if sigma else "0" for sigma in _ladder(_decay(**settings))] == table.split()


@pytest.mark.parametrize(
    ("recipe", "table", "starts"),
    [
        ("paper", PAPER, [1, 21, 41, 61, 81, 101, 121, 141, 161, 181]),
        ("repo", REPO_SCRIPTS, [1, 20, 40, 60, 80, 100, 120, 140, 160, 180]),
        ("as_released", REPO_SCRIPTS, [1, 20, 40, 60, 80, 100, 120, 140, 160, 180]),
        ("surogate", REPO_DEFAULTS, [1, 21, 41, 61, 81, 101, 121, 141, 161, 181]),
    ],
)
def test_recipes_have_their_tables(
    make_experiment: Callable[..., Any], recipe: str, table: str, starts: list[int]
) -> None:
    """200 steps, ten stages; the released code counts the first step as 1 and so begins every stage a step early."""
    experiment = make_experiment(f"recipe={recipe}", "steps=200")
    sigmas = [experiment.aqn.sigma(step, 200) for step in range(1, 201)]
    begun = [step for step in range(1, 201) if step == 1 or sigmas[step - 1] != sigmas[step - 2]]
    assert begun == starts
    assert [f"{sigmas[step - 1]:.2e}" if sigmas[step - 1] else "0" for step in begun] == table.split()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # K = 5, from 1.0 to 0.1: t = 0, 1/3, 2/3, 1 by hand
        (ExponentialDecay, [0, 1.0, 10 ** (-1 / 3), 10 ** (-2 / 3), 0.1]),
        (LinearDecay, [0, 1.0, 0.7, 0.4, 0.1]),
        (CosineDecay, [0, 1.0, 0.1 + 0.9 * 0.75, 0.1 + 0.9 * 0.25, 0.1]),
        (LogarithmicDecay, [0, 1.0, 0.55, 1 - 0.9 * math.log(3) / math.log(4), 0.1]),
    ],
)
def test_shapes_by_hand(kind: type[StagedDecay], expected: list[float]) -> None:
    schedule = _decay(kind, sigma_start=1.0, sigma_end=0.1, stages=5)
    assert _ladder(schedule) == pytest.approx(expected, rel=1e-12)


def test_shapes_differ_as_they_are_described() -> None:
    """In its first half cosine falls slowest, then linear, then log; the exponential falls fastest."""
    exp, linear, cosine, log = (_ladder(_decay(kind, stages=11)) for kind in DECAYS)
    assert exp[4] < log[4] < linear[4] < cosine[4]
    assert linear[5] > cosine[7]  # cosine falls below linear in its second half
    assert cosine[8] < linear[8]


@pytest.mark.parametrize(
    ("stages", "total", "expected"),
    [
        (1, 1, [0]),
        (1, 2, [0, 0]),
        (10, 1, [0]),
        (10, 2, [0, 5]),
        (10, 9, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (10, 10, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (10, 11, [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (3, 1, [0]),
        (3, 2, [0, 1]),
        (3, 3, [0, 1, 2]),
        (3, 4, [0, 0, 1, 2]),
        (2, 1, [0]),
        (2, 2, [0, 1]),
        (2, 3, [0, 0, 1]),
    ],
)
def test_stages_of_short_runs(stages: int, total: int, expected: list[int]) -> None:
    assert [stage_of(step, total, stages) for step in range(1, total + 1)] == expected
    if stages > 1:
        schedule = _decay(stages=stages)
        ladder = {2: [0, 1e-2], 3: [0, 1e-2, 1e-4]}.get(stages, [0, *(1e-2 * 10 ** (-2 * k / 8) for k in range(9))])
        sigmas = [schedule.sigma(step, total) for step in range(1, total + 1)]
        assert sigmas == pytest.approx([ladder[stage] for stage in expected], rel=1e-12)


@pytest.mark.parametrize(
    ("stages", "total", "expected"),
    [
        (10, 1, [9]),  # floor(1 * 10 / 1), capped: a run of one step has noise at once
        (10, 2, [5, 9]),
        (10, 9, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
        (10, 10, [1, 2, 3, 4, 5, 6, 7, 8, 9, 9]),
        (10, 11, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9]),
        (10, 20, [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 9]),
        (3, 4, [0, 1, 2, 2]),
        (2, 3, [0, 1, 1]),
    ],
)
def test_stages_as_the_released_code_counts_them(stages: int, total: int, expected: list[int]) -> None:
    schedule = _decay(stages=stages, boundaries="code")
    assert [schedule.stage(step, total) for step in range(1, total + 1)] == expected


@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize("stages", [2, 3, 10])
@pytest.mark.parametrize("exponent", ["K-2", "K-1"])
def test_every_decay_starts_silent_and_then_only_falls(kind: type[StagedDecay], stages: int, exponent: str) -> None:
    schedule = _decay(kind, stages=stages, exponent=exponent)
    for total in range(1, 45):
        sigmas = [schedule.sigma(step, total) for step in range(1, total + 1)]
        assert sigmas[0] == 0.0
        noisy = [sigma for sigma in sigmas if sigma > 0]
        assert sigmas == [0.0] * (total - len(noisy)) + noisy  # silent at first, never silent again
        assert all(a >= b for a, b in itertools.pairwise(noisy))
        assert all(1e-4 * (1 - 1e-12) <= sigma <= 1e-2 for sigma in noisy)
        if total >= stages:
            assert len(set(sigmas)) == stages
            assert noisy[0] == pytest.approx(1e-2, rel=1e-12)
            if stages > 2:
                reached = exponent == "K-2"
                assert (noisy[-1] == pytest.approx(1e-4, rel=1e-9)) is reached


def test_equal_ends_constant_and_none() -> None:
    for kind in DECAYS:
        assert {_decay(kind, sigma_start=5e-3, sigma_end=5e-3).sigma(step, 50) for step in range(6, 51)} == {5e-3}
    assert {Constant(name="constant", level=1e-2).sigma(step, 7) for step in range(1, 8)} == {1e-2}
    assert {NoNoise(name="none").sigma(step, 7) for step in range(1, 8)} == {0.0}


@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sigma_start": 1e-4, "sigma_end": 1e-2}, "sigma_end <= sigma_start"),
        ({"sigma_end": 0.0}, r"aqn\.sigma_end"),
        ({"sigma_end": -1e-4}, r"aqn\.sigma_end"),
        ({"sigma_start": float("nan")}, r"aqn\.sigma_start"),
        ({"sigma_start": float("inf")}, r"aqn\.sigma_start"),
        ({"stages": 1}, "at least 2"),
        ({"stages": 2.5}, "at least 2"),
        ({"exponent": "K"}, "K-2, K-1"),
        ({"boundaries": "odd"}, "even, code"),
    ],
)
def test_decays_that_make_no_sense_are_refused(kind: type[StagedDecay], changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _decay(kind, **changed)


@pytest.mark.parametrize("level", [-1e-3, float("nan"), float("inf"), True, "much"])
def test_a_constant_that_makes_no_sense_is_refused(level: Any) -> None:
    with pytest.raises(ConfigError, match=r"aqn\.level"):
        Constant(name="constant", level=level)


@pytest.mark.parametrize("wrong", [-1e-3, math.nan, math.inf, None, "0.1"])
def test_a_schedule_of_the_users_own_is_refused_if_one_step_has_no_standard_deviation(wrong: Any) -> None:
    class Own(Schedule):
        name = "own"

        def sigma(self, step: int, total_steps: int) -> float:
            return wrong if step == total_steps - 1 else np.float32(0.5)

    with pytest.raises(ConfigError, match=r"aqn=own has sigma=.* in step 4 of 5: .* at least 0"):
        OpenLoop(Own(), 5)
    assert type(OpenLoop(Own(), 1).sigma(1)) is float  # which JSON can say
