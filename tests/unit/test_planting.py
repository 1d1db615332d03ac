"""Planted effects and the plan: what is false, what is found, and that the table in the docs is the committed one."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from qerl_core.checks import ConfigError
from qerl_core.statistics import holm, mean_ci
from qerl_studies.claims.evaluate import evaluate_claims
from qerl_studies.claims.registry import QERL, claims_of
from qerl_studies.commands import plan
from qerl_studies.effects.estimate import least_squares
from qerl_studies.runs.committed import settings_file
from tests.scripts import script

planting = script("studies/planting/planting.py")
looks = script("studies/planting/looks.py")
ROOT = Path(__file__).parents[2]
CLAIMS = claims_of(QERL)


def test_planted_runs_hold_what_was_planted() -> None:
    """Without chance every claim has its effect, in margins and in the direction claimed, and no other gate closes."""
    runs = planting.planted_runs(2.0, 4, 2, np.random.default_rng(0))
    assert len(runs) == 15 * 4 * 2
    for claim_result in evaluate_claims(planting.TRAINING, runs):
        sign = -1 if claim_result.claim.expected == "less" else 1
        for result in claim_result.voting:
            assert result.status is None and result.primary is not None and result.primary.effect is not None
            mean = result.primary.effect.whole
            assert (
                abs(sign * mean.value / claim_result.claim.measure.margin - 2.0)
                < 4 * mean.stderr / claim_result.claim.measure.margin
            )
            assert (mean.n, result.primary.effect.seeds) == (4, 2)


@pytest.mark.parametrize(
    ("expected", "verdict", "effect", "false"),
    [
        ("more", "supported", 0.0, "supported"), ("more", "supported", 0.5, ""), ("more", "reversed", 0.0, "reversed"),
        ("more", "negligible", 1.0, "negligible"), ("more", "supported but negligible", 0.5, ""),
        ("more", "supported but negligible", 2.0, "negligible"), ("more", "undecided", 2.0, ""),
        ("same", "supported", 1.0, "supported"), ("same", "supported", 0.5, ""), ("same", "reversed", 0.5, "reversed"),
        ("same", "reversed", -2.5, ""), ("same", "supported", -2.5, "supported"), ("more", "reversed", -2.0, ""),
        ("more", "reversed but negligible", -2.0, "negligible"), ("less", "supported", -2.0, "supported"),
    ],
)  # fmt: skip
def test_which_word_is_false(expected: str, verdict: str, effect: float, false: str) -> None:
    claim = next(claim for claim in CLAIMS if claim.expected == expected)
    assert planting.false_verdict(claim, verdict, effect) == false


def test_a_small_planting_errs_as_rarely_as_it_should() -> None:
    """Four studies without an effect and four with two margins, eight seeds of one base each."""
    rows = [row for effect in (0.0, 2.0) for row in planting.replicate(effect, 1, 8, 4, seed=1)]
    table = planting.table(rows).set_index("effect")
    for word in ("supported", "negligible", "reversed"):
        assert (table[f"false {word}"] <= 0.05).all()
    assert (table["any false"] <= 0.25).all()  # one of four where at most 0.2 are expected
    assert table.loc[2.0, "supported"] > 0.5 > table.loc[0.0, "supported"]


def test_simulated_looks_are_the_rules_of_the_program() -> None:
    """Of one study: mean, error and degrees of freedom in pairs and by least squares, and Holm's method."""
    arms = looks.planted((-1.0,), 12, 0.0, 3, 0)
    _, sessions = looks.DESIGNS[12]
    for study in range(3):
        treated, control = (pd.Series(arm[study]) for arm in arms[::-1])
        gaps = mean_ci(treated - control)
        runs = least_squares(treated, control, dict(enumerate(map(str, sessions))))
        rules = {looks.in_pairs: gaps, looks.by_runs: runs}
        for rule, one in rules.items():
            mean, error, df = rule(arms[1], arms[0], sessions)
            assert (one.value, one.stderr, one.df) == pytest.approx((mean[study], error[study], df))
    p = np.random.default_rng(0).uniform(size=(2, 50))
    assert pytest.approx(np.array([holm(one) for one in p.T])) == looks.holm(p).T


def test_the_rule_of_two_looks_holds_its_level_in_pairs_and_least_squares_does_not_where_arms_go_apart() -> None:
    false = {}
    for correlation, rule in product((-0.45, 0.0, 0.5), looks.RULES):
        direction, _ = looks.words(looks.planted((0.0, 0.0), 12, correlation, 20_000, 1), 12, rule)
        false[correlation, rule] = (direction != 0).any(0).mean()
    assert all(share < 0.057 for (_, rule), share in false.items() if rule == "pairs")
    assert false[0.0, "least squares"] < 0.057 and false[-0.45, "least squares"] > 0.07


def test_a_correction_for_skewness_holds_the_level_where_student_does_not() -> None:
    skewed = np.random.default_rng(0).exponential(size=60)
    found = {row["test"]: row for row in looks.skew_rows(skewed, 4000, 0) if row["units"] == 16}
    assert found["Student's t"]["below"] > 0.05 > 0.02 > found["Student's t"]["above"]
    assert found["t, corrected for skewness"]["any"] < found["Student's t"]["any"]


def test_the_tables_of_looks_in_the_docs_are_the_committed_ones() -> None:
    page = (ROOT / "docs" / "claims.md").read_text()
    committed = pd.read_csv(ROOT / "studies/planting/results/looks.csv")
    shown = committed[(committed["units"] == 12) & (committed["format"] == 0) & (committed["effect"] <= 0)]
    assert looks.markdown(shown) in page
    assert looks.markdown(pd.read_csv(ROOT / "studies/planting/results/skew.csv")) in page


def test_the_table_in_the_docs_is_the_committed_one() -> None:
    committed = pd.read_csv(ROOT / "studies" / "planting" / "results" / planting.TABLE)
    assert planting.markdown(committed) in (ROOT / "docs" / "claims.md").read_text()
    errors = committed[[name for name in committed if str(name).startswith("false ")]]
    assert (errors <= 0.05).all(axis=None) and (committed["replications"] >= 200).all()


def test_a_plan_of_enough_power_is_the_smallest_one() -> None:
    found = plan.Spread(within=1.0, between=0.25, questions=0.0)
    designs = plan.designs(found, effect=1.0, level=0.025)
    sizes = [design.bases * design.seeds for design in designs]
    assert sizes == sorted(sizes)
    mean = found.estimate(16, 2)
    assert (mean.n, mean.df) == (16, 15) and mean.stderr == pytest.approx((1 / 32 + 0.25 / 16) ** 0.5)
    assert next(d for d in designs if (d.bases, d.seeds) == (16, 2)).detectable == pytest.approx(0.65, abs=0.01)
    assert found.estimate(1, 8).stderr == pytest.approx((1 / 8) ** 0.5)  # of one base nothing is known about others


def test_the_plan_reads_committed_studies(capsys: pytest.CaptureFixture[str]) -> None:
    study = ROOT / "studies" / "tiny"
    assert settings_file(study / "data").is_file()
    plan.main([str(study), "--effect", "2"])
    out = capsys.readouterr().out
    assert "find 2 margins" in out
    assert "| Higher final accuracy than 16-bit LoRA | 2.39 points | 0.50 points (assumed) |" in out
    for words in (["--effect", "0"], ["--power", "1"], ["--between", "-1"]):
        with pytest.raises(ConfigError, match=words[0]):
            plan.main([str(study), *words])
