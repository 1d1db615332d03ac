"""Pairs, mean differences and their words: numbers by hand, and that figures and claims have one interval."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from qerl_core.checks import ConfigError
from qerl_core.statistics import Estimate, mean_ci, mean_ci_crossed
from qerl_studies.design.gates import between, render
from qerl_studies.effects.estimate import effect_of, share
from qerl_studies.effects.pairs import difference_by_step
from qerl_studies.effects.state import WORDS, State, of_interval, of_look
from qerl_studies.figures import paired
from qerl_studies.probes.numbers import accuracy
from qerl_studies.probes.page import interval
from qerl_studies.runs.measure import ACCURACY

CELLS = [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 0), ("c", 1)]
QUESTIONS = [f"q{i}" for i in range(20)]


def arm(name: str, numbers: np.ndarray, **changed: Any) -> list[Any]:
    """A run for each of CELLS, with its numbers (questions,) or one number."""
    return [
        SimpleNamespace(**{"name": f"{name}-{cell}", "cell": cell, "block": "a card", "own": own} | changed)
        for cell, own in zip(CELLS, numbers, strict=True)
    ]


def own(run: Any) -> Any:
    return pd.Series(run.own, index=QUESTIONS) if np.ndim(run.own) else float(run.own)


@pytest.fixture
def arms() -> tuple[list[Any], list[Any], np.ndarray]:
    """Two arms and their differences, (questions, cells)."""
    draw = np.random.default_rng(0)
    control, added = draw.uniform(size=(6, 20)), draw.normal(0.1, 0.2, (6, 20))
    return arm("treated", control + added), arm("control", control)[::-1], added.T


def test_differences_are_taken_in_each_cell_and_question_whatever_the_order(arms: Any) -> None:
    treated, control, added = arms
    for order in (control, control[::-1]):
        found = effect_of([treated, order], own).differences
        assert [*found.columns] == CELLS and [*found.index] == QUESTIONS
        assert found.to_numpy() == pytest.approx(added)


def test_questions_are_drawn_or_fixed(arms: Any) -> None:
    treated, control, _ = arms
    found = effect_of([treated, control], own)
    assert found.table.shape == (20, 3)
    assert found.whole == mean_ci_crossed(found.table) and found.fixed == mean_ci(found.by_unit)
    assert found.whole.value == pytest.approx(found.fixed.value) and found.whole.half_width != found.fixed.half_width
    of_run = effect_of([treated, control], lambda run: float(own(run).mean()))  # a number of the whole run
    assert of_run.whole == of_run.fixed and of_run.fixed.low == pytest.approx(found.fixed.low)


def test_levels_and_their_correlation_are_those_of_units(arms: Any) -> None:
    treated, control, _ = arms
    found = effect_of([treated, control], own)
    each = [
        np.array([np.mean([run.own for run in arm if run.cell[0] == base]) for base in "abc"])
        for arm in (treated, control)
    ]
    assert found.levels == pytest.approx([one.mean() for one in each])
    assert found.correlation == pytest.approx(np.corrcoef(*each)[0, 1])
    assert (
        found.origin
        == f"3 bases × 2 seeds × 20 questions drawn, {found.whole.df:.0f} df, correlation {found.correlation:+.2f}"
    )


def test_a_figure_has_the_interval_of_the_claim(arms: Any) -> None:
    """Over the same runs; a page that fixed the questions and one that drew them told two for one difference."""
    treated, control, added = arms
    shown = paired.effect(treated, control, replace(ACCURACY, metric=own))
    whole = mean_ci_crossed(added.reshape(20, 3, 2).mean(2))
    assert (shown.whole.low, shown.whole.high) == pytest.approx((whole.low, whole.high))
    assert shown.by_unit == pytest.approx(added.mean(0).reshape(3, 2).mean(1))


def test_captions_say_how_far_arms_go_together_from_least_to_most(arms: Any) -> None:
    treated, control, _ = arms
    first = effect_of([treated, control], own)
    turned = effect_of([treated, control], lambda run: own(run) * (-1 if run in control else 1))
    low, high = sorted((first.correlation, turned.correlation))
    assert paired.correlation_note([first]) == f"Arms correlate {first.correlation:+.2f}."
    assert paired.correlation_note([first, turned]) == f"Arms correlate {low:+.2f} to {high:+.2f}."
    two = effect_of([treated[:4], control[2:]], own)  # bases, which always lie on a line
    assert paired.correlation_note([two]) == "" and "correlation" not in two.origin


def test_what_is_no_pair_is_refused(arms: Any) -> None:
    treated, control, _ = arms
    with pytest.raises(ConfigError, match=r"same bases and seeds: not all have \[\('a', 0\)\]"):
        effect_of([treated, control[:-1]], own)
    elsewhere = arm("control", np.array([run.own for run in control]), block="another card")
    with pytest.raises(ConfigError, match=r"different machines or library versions .*a card; another card"):
        effect_of([treated, elsewhere], own)
    assert effect_of([treated, elsewhere], own, any_machine=True).questions == 20
    with pytest.raises(ConfigError, match="different questions: control"):
        effect_of([treated, control], lambda run: own(run).iloc[: 20 - run.name.startswith("control")])
    steps = difference_by_step(treated, control, lambda run: own(run).iloc[: 20 - run.name.startswith("c")])
    assert len(steps) == 19


@pytest.mark.parametrize(
    ("value", "of_pair", "of_contrast"),
    [(0.05, "higher", "higher"), (-0.05, "lower", "lower"), (0.0, "no difference beyond the margin", "negligible")],
)
def test_one_interval_has_one_state(value: float, of_pair: str, of_contrast: str) -> None:
    estimate = Estimate(value, 0.001, 12, 11)
    assert of_interval(estimate, 0.01).of_pair == of_pair
    assert of_look(estimate, estimate.p_outside(0.0), 0.05, 0.01).of_contrast == of_contrast
    wide = Estimate(value, 0.1, 12, 11)
    assert of_interval(wide, 0.01) == of_look(wide, 0.6, 0.05, 0.01) == State()


def test_a_small_effect_has_both_a_direction_and_a_size() -> None:
    small = of_interval(Estimate(-0.005, 0.001, 12, 11), 0.01)
    assert small == State(direction=-1, within=True)
    assert (small.of_claim, small.of_contrast, small.word) == (
        "reversed but negligible", "lower", "opposite, within the margin"
    )  # fmt: skip


def test_each_state_has_one_of_five_words() -> None:
    states = [State(1), State(-1, harm=True), State(within=True, untested="incomplete"), State(), State(untested="x")]
    assert [one.word for one in states] == [*WORDS]
    assert [one.of_claim for one in states[:4]] == ["supported", "harms", "negligible", "undecided"]


@pytest.mark.parametrize(("found", "among"), [(0, 8), (3, 20), (20, 20)])
def test_a_single_share_has_wilsons_interval(found: int, among: int) -> None:
    """Its ends are the shares from which what was found is 1.96 standard errors away; 0 of 8 has one too."""
    one = share([True] * found + [False] * (among - found))
    assert one.has_interval and one.value == found / among
    for end in (one.low, one.high):
        assert abs(one.value - end) == pytest.approx(stats.norm.ppf(0.975) * (end * (1 - end) / among) ** 0.5)


def test_what_did_not_vary_has_no_interval() -> None:
    alike, several = mean_ci([0.5, 0.5, 0.5]), mean_ci([0.4, 0.5, 0.6])
    assert [one.has_interval for one in (alike, several, mean_ci([0.5]))] == [False, True, False]
    assert ACCURACY.with_interval(alike) == "+50.00" and ACCURACY.with_interval(several).startswith("+50.00 [+")
    none_right = {"samples": 1, "correct": [0] * 8}
    assert interval(accuracy(none_right), ".1f") == "0.0 [0.0, 32.4]"
    assert interval(accuracy({"samples": 4, "correct": [0] * 8}), ".1f") == "0.0"  # no spread of any question to go by
    assert between("gate", 0.0, 1.0, [0.5, 0.5], ()).word == "yes"
    assert render([between("gate", 0.0, 1.0, [0.5, 0.5], ())]).splitlines()[2].split(" | ")[2:4] == ["0.5", "-"]
