"""The statistics against closed forms, hand computation, scipy's own tests, and numbers recorded from rliable."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from qerl_core.checks import ConfigError
from qerl_core.statistics import Estimate, holm, mean_ci, mean_ci_crossed
from qerl_studies.claims.measures import steps_to_threshold
from qerl_studies.effects.estimate import Effect
from qerl_studies.runs.measure import area_under_curve
from qerl_studies.runs.resampling import (
    interquartile_mean,
    performance_profile,
    probability_of_improvement,
    stratified_bootstrap,
)


def holds_zero(estimate: Estimate) -> bool:
    return estimate.low <= 0 <= estimate.high


PEER: dict[str, Any] = json.loads((Path(__file__).parents[1] / "assets" / "rliable.json").read_text())
X, Y, TAUS = (np.array(PEER[name]) for name in ("x", "y", "taus"))


# --- recorded from rliable 1.2.0 -------------------------------------------------------------------------------------


def test_point_estimates_are_those_of_rliable() -> None:
    assert interquartile_mean(X) == pytest.approx(PEER["iqm"]["x"], abs=1e-12)
    assert interquartile_mean(Y) == pytest.approx(PEER["iqm"]["y"], abs=1e-12)
    assert performance_profile(X, TAUS) == pytest.approx(np.array(PEER["profile"]), abs=1e-12)


def test_bootstrap_intervals_are_those_of_rliable_up_to_resampling() -> None:
    """Both sides drew at random: their ends of an interval of width 0.05 to 0.3 agree to a few thousandths."""
    for scores, name in ((X, "x"), (Y, "y")):
        for statistic, key in ((interquartile_mean, "iqm"), (np.mean, "mean")):
            found = stratified_bootstrap(scores, statistic, np.random.default_rng(0), draws=4000)
            assert found.value == pytest.approx(PEER[key][name])
            assert [found.low, found.high] == pytest.approx(PEER[f"{key}_interval"][name], abs=3e-3)


def test_bands_of_performance_profiles_are_those_of_rliable() -> None:
    found = stratified_bootstrap(X, lambda x: performance_profile(x, TAUS), np.random.default_rng(0), draws=3000)
    assert np.abs(np.stack([found.low, found.high]) - np.array(PEER["profile_interval"])).max() <= 1 / 24  # one score


# --- resampling, in closed form --------------------------------------------------------------------------------------


def test_bootstrap_of_a_mean_has_its_known_variance() -> None:
    """Within a task of n runs the resampled mean varies by s^2 / n with s^2 over n; tasks are independent."""
    scores = np.random.default_rng(1).normal(size=(8, 5))
    means: list[float] = []
    stratified_bootstrap(scores, lambda x: means.append(x.mean()) or 0.0, np.random.default_rng(2), draws=20_000)
    expected = math.sqrt((scores.var(0) / 8).sum()) / 5
    assert np.std(means) == pytest.approx(expected, rel=0.02)


def test_a_task_without_spread_has_no_interval_and_strata_do_not_mix() -> None:
    found = stratified_bootstrap(np.array([[0.0, 1.0]] * 3), np.mean, np.random.default_rng(0), draws=50)
    assert (found.value, found.low, found.high) == (0.5, 0.5, 0.5)


def test_the_same_generator_gives_the_same_interval_and_another_does_not() -> None:
    first, again, other = (
        stratified_bootstrap(X, interquartile_mean, np.random.default_rng(seed), draws=100) for seed in (3, 3, 4)
    )
    assert first == again != other


def test_probability_of_improvement_by_hand() -> None:
    assert probability_of_improvement(np.array([[0.1, -0.1], [0.0, 0.2]])) == 5 / 8


# --- means, differences and tests ------------------------------------------------------------------------------------


def test_an_interval_is_that_of_scipy() -> None:
    values = np.array([0.3, -0.1, 0.5, 0.2, 0.4])
    found, peer = mean_ci(values), scipy_stats.ttest_1samp(values, 0.0)
    assert [found.low, found.high] == pytest.approx([*peer.confidence_interval(0.95)])
    assert 2 * found.p_above(0.0) == pytest.approx(peer.pvalue)
    assert found.p_above(0.1) == pytest.approx(scipy_stats.ttest_1samp(values, 0.1, alternative="greater").pvalue)
    assert found.p_below(0.1) == pytest.approx(1 - found.p_above(0.1))
    lower = scipy_stats.ttest_1samp(values, -0.6, alternative="greater").pvalue
    upper = scipy_stats.ttest_1samp(values, 0.6, alternative="less").pvalue
    assert found.p_within(0.6) == pytest.approx(max(lower, upper))
    assert found.p_outside(0.05) == pytest.approx(
        2 * scipy_stats.ttest_1samp(values, 0.05, alternative="greater").pvalue
    )


def test_a_single_seed_has_no_interval() -> None:
    found = mean_ci([0.7])
    assert (found.value, found.n) == (0.7, 1)
    assert math.isnan(found.half_width) and math.isnan(found.p_above(0.0))


def test_without_any_spread_the_interval_is_a_point() -> None:
    found = mean_ci([0.5] * 4)
    assert (found.low, found.high) == (0.5, 0.5)


def test_without_any_spread_there_is_no_test() -> None:
    """Five times 0.1 has a mean that is not quite 0.1: rounding is no spread either."""
    for found in (mean_ci([0.1] * 5), mean_ci_crossed(np.array([[0.1] * 5, [0.7] * 5])), mean_ci([0.0] * 2)):
        assert found.identical and found.stderr == 0
        tests = found.p_above(0.0), found.p_below(0.2), found.p_within(1), found.p_outside(1)
        assert all(math.isnan(p) for p in tests)
    assert not mean_ci([0.1]).identical and not mean_ci([0.1, 0.2]).identical
    assert not mean_ci_crossed(np.array([[0.1, 0.1], [0.7, 0.8]])).identical


def test_crossed_by_hand() -> None:
    """Mean squares: questions 2 (2 df), seeds 8/3 (1 df), rest 2/3 (2 df), which counts once."""
    found = mean_ci_crossed(np.array([[-1.0, 1.0], [1.0, 1.0], [1.0, 3.0]]))
    assert (found.value, found.n) == (1.0, 2)
    assert found.stderr == pytest.approx(math.sqrt((2 + 8 / 3 - 2 / 3) / 6))
    assert found.df == 1  # two seeds; Satterthwaite's 1.7 from five units on
    assert found.stderr_questions**2 == pytest.approx((2 - 2 / 3) / 6)  # what more seeds would not take away


def test_crossed_is_never_surer_than_questions_or_seeds_alone() -> None:
    """Where the rest is larger than both, the difference of mean squares says nothing, and the larger one counts."""
    table = np.array([[1.0, -1.0, 0.2], [-1.0, 1.0, 0.0], [0.5, 0.3, -1.0]])
    found = mean_ci_crossed(table)
    largest = max(3 * table.mean(1).var(ddof=1), 3 * table.mean(0).var(ddof=1))
    assert found.stderr == pytest.approx(math.sqrt(largest / 9)) and found.df == 2


@pytest.mark.peers
@pytest.mark.parametrize("units", [5, 6, 12])
def test_crossed_is_a_mixed_model_of_questions_and_units(units: int) -> None:
    """REML of a balanced layout whose variances are all above 0 has the same mean and standard error."""
    mixed = pytest.importorskip("statsmodels.regression.mixed_linear_model", reason="extra peers")
    draw = np.random.default_rng(units)
    parts = draw.normal(0, 0.3, (24, 1)), draw.normal(0, 0.2, (1, units)), draw.normal(0, 0.4, (24, units))
    table = 0.3 + sum(parts, np.zeros((24, units)))
    places = {"question": np.repeat(range(24), units), "unit": np.tile(range(units), 24)}
    rows = pd.DataFrame({"value": table.ravel(), "all": 1, **places})
    variances = {name: f"0 + C({name})" for name in places}
    fitted = mixed.MixedLM.from_formula("value ~ 1", rows, groups="all", vc_formula=variances).fit(reml=True)
    found = mean_ci_crossed(table)
    assert found.value == pytest.approx(fitted.params["Intercept"], rel=1e-6)
    assert found.stderr == pytest.approx(fitted.bse["Intercept"], rel=1e-3)


def test_crossed_with_one_seed_is_the_interval_over_questions() -> None:
    values = np.array([0.0, 1.0, 0.0, -1.0, 1.0])
    found, questions = mean_ci_crossed(values), mean_ci(values)
    assert (found.value, found.n) == (pytest.approx(questions.value), 1)
    assert (found.stderr, found.df) == (pytest.approx(questions.stderr), pytest.approx(questions.df))


def test_crossed_covers_a_true_mean() -> None:
    """Effects of questions, of seeds, and their interaction are drawn anew 400 times; the truth is 0."""
    generator = np.random.default_rng(7)
    hits = 0
    for _ in range(400):
        parts = generator.normal(size=(40, 1)), 0.3 * generator.normal(size=(1, 5)), generator.normal(size=(40, 5))
        hits += holds_zero(mean_ci_crossed(sum(parts, np.zeros((40, 5)))))
    assert 0.93 <= hits / 400 <= 0.995


@pytest.mark.parametrize(("n", "level"), [(3, 0.025), (8, 0.025), (8, 0.025 / 9), (16, 0.025)])
def test_what_is_detectable_is_found_as_often_as_it_says(n: int, level: float) -> None:
    found = mean_ci(np.random.default_rng(n).normal(size=n))
    effect = found.detectable(level, power=0.8)
    draws = effect + found.stderr * n**0.5 * np.random.default_rng(1).normal(size=(20_000, n))
    t = draws.mean(1) / (draws.std(1, ddof=1) / n**0.5)
    assert (t > scipy_stats.t.isf(level, n - 1)).mean() == pytest.approx(0.8, abs=0.012)
    assert found.power(effect, level) == pytest.approx(0.8)
    assert math.isnan(mean_ci([0.1] * 3).detectable(level)) and math.isnan(mean_ci([0.1]).detectable(level))


def test_as_many_repetitions_are_needed_as_first_find_the_effect() -> None:
    found = mean_ci(np.random.default_rng(0).normal(size=6))
    needed = found.repetitions_needed(0.5 * found.stderr * 6**0.5, 0.025)
    by_hand = next(
        n for n in range(2, 200) if found.with_repetitions(n).power(0.5 * found.stderr * 6**0.5, 0.025) >= 0.8
    )
    assert needed == by_hand == 34  # the textbook's number for half a standard deviation, one sample
    assert found.with_repetitions(24).stderr == pytest.approx(found.stderr / 2)
    fixed = replace(found, stderr_questions=found.stderr / 2**0.5)
    assert fixed.with_repetitions(10**9).stderr == pytest.approx(found.stderr / 2**0.5)
    assert (
        fixed.repetitions_needed(0.5 * found.stderr, 0.025) is None
    )  # the questions alone leave more to chance than that


def level_of(values: np.ndarray) -> Effect:
    """Of numbers (questions, bases, seeds) of one arm."""
    questions, bases, seeds = values.shape
    cells = pd.MultiIndex.from_product([range(bases), range(seeds)], names=["base", "seed"])
    return Effect((pd.DataFrame(values.reshape(questions, bases * seeds), columns=cells),), (1,))


def test_an_effect_over_bases_by_hand() -> None:
    """Base means 1, 3 and 5; within each base the two seeds lie one apart: 4 - 0.5 / 2 is the bases' own."""
    values = np.array([[[0.5, 1.5], [2.5, 3.5], [4.5, 5.5]]])
    found = level_of(values)
    assert (found.whole.value, found.whole.n, found.whole.df) == (3.0, 3, 2)
    assert found.whole.stderr == pytest.approx(2 / 3**0.5)
    assert found.between == pytest.approx(math.sqrt(4 - 0.5 / 2))
    half = scipy_stats.t.ppf(0.975, 2) * 2 * math.sqrt(1 + 1 / 3)
    assert found.prediction == pytest.approx((3 - half, 3 + half))
    assert [mean.value for mean in found.by_base] == [1.0, 3.0, 5.0]
    assert level_of(values[:, :2]).prediction is None
    seeds = level_of(values[:, :1])
    assert (seeds.unit, seeds.whole.n, seeds.prediction) == ("seed", 2, None)


def test_intervals_over_bases_hold_the_true_mean_where_intervals_over_seeds_do_not() -> None:
    """Effects of bases differ: eight seeds of one base know nothing of that."""
    generator = np.random.default_rng(3)
    hits = {"bases": 0, "seeds": 0}
    for _ in range(400):
        table = generator.normal(size=(1, 4, 1)) + generator.normal(size=(1, 4, 8))
        hits["bases"] += holds_zero(level_of(table).whole)
        hits["seeds"] += holds_zero(mean_ci(table[0, 0]))
    assert 0.93 <= hits["bases"] / 400 <= 0.98 and hits["seeds"] / 400 < 0.75


def test_one_question_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least two questions"):
        mean_ci_crossed(np.zeros((1, 5)))


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]).tolist() == pytest.approx([0.03, 0.06, 0.06, 0.02])
    adjusted = holm([0.02, math.nan, 0.5])
    assert adjusted[[0, 2]].tolist() == pytest.approx([0.04, 0.5]) and math.isnan(adjusted[1])
    assert holm([]).tolist() == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_lies_between_the_raw_and_bonferronis_p_and_keeps_their_order(p: list[float]) -> None:
    adjusted = holm(p)
    assert (adjusted >= np.array(p)).all() and (adjusted <= np.minimum(1.0, np.array(p) * len(p) + 1e-12)).all()
    assert (np.diff(adjusted[np.argsort(p, kind="stable")]) >= 0).all()


def test_holm_keeps_false_claims_below_the_level_where_single_tests_do_not() -> None:
    """Ten claims without any truth to them, 500 times: in how many of these families is at least one called proven?"""
    generator = np.random.default_rng(0)
    p = np.array([[mean_ci(generator.normal(size=5)).p_above(0.0) for _ in range(10)] for _ in range(500)])
    assert (p.min(1) < 0.05).mean() > 0.3
    assert np.mean([holm(family).min() < 0.05 for family in p]) < 0.08


# --- curves and grids ------------------------------------------------------------------------------------------------


def test_area_under_curve_by_hand() -> None:
    steps = np.array([1, 2, 4])
    assert area_under_curve(steps, np.array([0.0, 1.0, 1.0])) == pytest.approx((0.5 + 2.0) / 3)
    assert area_under_curve(steps, np.array([1.0, math.nan, 3.0])) == 2.0
    assert area_under_curve(steps[:1], np.array([0.7])) == 0.7
    with pytest.raises(ConfigError):
        area_under_curve(steps, np.full(3, math.nan))


def test_steps_to_threshold_by_hand() -> None:
    steps, values = np.arange(1, 7), np.array([0.0, 0.9, 0.0, 0.5, 0.7, 0.9])
    assert steps_to_threshold(steps, values, 0.5, 1) == 2
    assert steps_to_threshold(steps, values, 0.5, 2) == 5  # (0.5 + 0.7) / 2; one lucky step is not enough
    assert steps_to_threshold(steps, values, 0.95, 1) == math.inf
    assert steps_to_threshold(steps, values, 0.0, 7) == math.inf
