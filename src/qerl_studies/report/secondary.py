"""The page of all that a study with primary contrasts shows beside them: levels, differences and intervals, no word.

Which of these is looked at, and how often, no correction knows. Units are bases, as in design/looks.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
import pandas as pd

from qerl_core.statistics import Estimate
from qerl_studies.claims.measures import INITIAL_ENTROPY, LATE_REWARD, MEASURES, NOISY_ENTROPY, REWARD
from qerl_studies.design.readings import by_base, gain_where_complete
from qerl_studies.design.sessions import Sessions
from qerl_studies.effects.estimate import correlation, least_squares, over_known
from qerl_studies.effects.pairs import shared
from qerl_studies.runs.load import Run
from qerl_studies.runs.measure import Measure, RunMetric, area, last_fifth_mean, late_mean, mean_between
from qerl_studies.tables.markdown import markdown_table


def share(name: str, metric: RunMetric) -> Measure:
    return Measure(name, metric, unit="points", scale=100.0)


def mean_of(mode: str, column: str, at: float | None = None) -> RunMetric:
    """The mean over held-out questions of a column of answers: at a share of the run, or late in it."""

    def of_run(run: Run) -> float:
        if at is None:
            return float(np.mean(late_mean(mode, column)(run).to_numpy()))
        return float(np.mean(run.answers(mode, column)[round(at * run.option("steps"))].to_numpy()))

    return of_run


def late_gain(run: Run) -> float:
    return mean_of("sampled", "lenient")(run) - mean_of("sampled", "lenient", 0.0)(run)


def right_of_finished(run: Run) -> float:
    return mean_of("sampled", "lenient")(run) / mean_of("sampled", "finished")(run)


SAMPLED = share("right by the last number, sampled, last quarter", mean_of("sampled", "lenient"))
GREEDY = share("right by the last number, greedy, after training", mean_of("greedy", "lenient", 1.0))
SHOWN = (
    share("right by the last number, sampled, before training", mean_of("sampled", "lenient", 0.0)),
    share("right by the last number, sampled, half time", mean_of("sampled", "lenient", 0.5)),
    share("gain from before training to the last quarter", late_gain),
    share("gain of answers with an end before and after training", gain_where_complete),
    share("right, sampled, last quarter", mean_of("sampled", "correct")),
    share("right, greedy, after training", mean_of("greedy", "correct", 1.0)),
    GREEDY,
    share("with an end, sampled, last quarter", mean_of("sampled", "finished")),
    share("right by the last number of those with an end", right_of_finished),
    Measure("tokens of a sampled answer, last quarter", mean_of("sampled", "tokens"), ratio=True),
    REWARD,
    LATE_REWARD,
    INITIAL_ENTROPY,
    NOISY_ENTROPY,
    Measure("the same, without noise", mean_between("entropy_clean", 0.1, 0.2), ratio=True, needs="entropy_clean"),
    Measure("mean entropy of the sampler over the run", area("entropy"), ratio=True),
    Measure("entropy of the sampler over the last fifth of the steps", last_fifth_mean("entropy"), ratio=True),
    MEASURES["late_mismatch"],
    Measure("tokens of a completion over the last fifth", last_fifth_mean("completions/mean_length"), ratio=True),
)


def secondary_page(study: Sessions, pairs: Sequence[tuple[str, str]]) -> str:
    """Markdown: each arm's level and the differences of `pairs`, treated and control, on the bases that both have.

    Then the differences of any two of these arms that share bases, by sampled and by greedy answers.
    """
    arms = list(dict.fromkeys(arm for pair in pairs for arm in reversed(pair)))
    values = {measure: values_of(study, arms, measure) for measure in (*SHOWN, SAMPLED)}
    lines = [
        [
            measure.name,
            *(measure.level_text(of[arm].mean(skipna=False)) for arm in arms),
            *(measure.with_interval(difference(of, pair)) for pair in pairs),
        ]
        for measure, of in values.items()
        if measure is not SAMPLED
    ]
    heads = ["", *arms, *(" - ".join(pair) for pair in pairs)]
    of = values[SAMPLED]
    any_two = [
        [
            " - ".join(pair),
            str(count),
            *(one.with_interval(difference(values[one], pair)) for one in (SAMPLED, GREEDY)),
            SAMPLED.with_interval(least_squares(of[pair[0]], of[pair[1]], study.session_of)),
            f"{correlation(of[pair[0]], of[pair[1]]):+.2f}".replace("+nan", "-"),
        ]
        for pair in combinations(reversed(arms), 2)
        if (count := difference(of, pair).n)
    ]
    heads_of_two = ["", "bases", SAMPLED.name, GREEDY.name, "sampled, without pairs", "correlation of the arms"]
    return (
        "# Beside the primary contrasts\n\n"
        f"{len(study.session_of)} bases. Means and 95 % intervals over bases (Student's t, questions fixed) of paired "
        "differences, those of shares in points; tokens, entropy and KL are compared by ratio, and their levels are "
        "geometric means. These are many numbers without a correction for how many, and give no verdict.\n\n"
        f"{markdown_table(heads, lines)}\n\n"
        "## Any two arms\n\n"
        "Without pairs: least squares over all runs of both arms, with an effect for each session. Pairs help where "
        "the correlation over bases is above 0; where arms truly go against each other, intervals without pairs are "
        "too narrow. Where each base is a session of its own, both are the same.\n\n"
        f"{markdown_table(heads_of_two, any_two)}\n"
    )


def values_of(study: Sessions, arms: Sequence[str], measure: Measure) -> dict[str, pd.Series]:
    """The measure of each arm, by base."""
    return {arm: by_base(study.runs, arm, measure.averaged) for arm in arms}


def difference(of: Mapping[str, pd.Series], pair: tuple[str, str]) -> Estimate:
    """Over the bases that both arms have; of no number without any."""
    return over_known(shared(*(of[arm] for arm in pair)))
