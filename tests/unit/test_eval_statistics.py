"""Accuracies and their errors: by hand on small tables, and against what repeated simulated evaluations really do."""

from __future__ import annotations

import itertools
import math
from statistics import mean, pstdev, stdev

import numpy as np
import pandas as pd
import pytest

from qerl_bench.eval.majority import majority
from qerl_bench.eval.paired import gains, paired, read_samples
from qerl_core.checks import ConfigError
from qerl_core.statistics import over_questions, over_samples, paired_difference, pass_at_k

# --- by hand ---


def test_mean_and_error_over_questions() -> None:
    found = over_questions([1.0, 0.0, 0.0, 1.0, 1.0])
    assert (found.value, found.n) == (0.6, 5)
    assert found.stderr == pytest.approx(math.sqrt(0.3 / 5))  # variance (3 * 0.16 + 2 * 0.36) / 4
    assert (found.stderr_questions, found.stderr_sampling) == (None, None)
    assert math.isnan(over_questions([1.0]).stderr)  # one question says nothing about others


def test_the_two_parts_of_the_error() -> None:
    """Means 1, 1/2, 0, 1/2: variance 1/6, over 4 questions 1/24. Within: 0, 1/3, 0, 1/3, each over 4 samples."""
    samples = [[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 0, 1]]
    found = over_samples(samples)
    assert found.value == 0.5
    assert found.stderr**2 == pytest.approx(1 / 24)
    assert found.stderr_sampling is not None and found.stderr_questions is not None
    assert found.stderr_sampling**2 == pytest.approx((1 / 3 + 1 / 3) / 4 / 4 / 4)
    assert found.stderr_questions**2 == pytest.approx(1 / 24 - 1 / 96)


def test_one_sample_cannot_tell_the_parts_apart_and_noise_alone_has_no_part_of_questions() -> None:
    alone = over_samples([[1], [0], [1]])
    assert (alone.stderr_questions, alone.stderr_sampling) == (None, None)
    assert alone.stderr == over_questions([1, 0, 1]).stderr
    equal = over_samples([[1, 0], [0, 1], [1, 0]])
    assert (equal.stderr, equal.stderr_questions) == (0, 0)
    assert equal.stderr_sampling == pytest.approx(math.sqrt(0.5 / 2 / 3))


def test_a_paired_difference() -> None:
    """Gains 1, 0, 0, 1/2. Differences of samples: 1 1, -1 1, 0 0, 0 1 with variances 0, 2, 0, 1/2, each over 2."""
    before, after = [[0, 0], [1, 0], [0, 0], [1, 0]], [[1, 1], [0, 1], [0, 0], [1, 1]]
    found = paired_difference(before, after)
    assert found.value == pytest.approx(3 / 8)
    assert found.stderr**2 == pytest.approx(stdev([1, 0, 0, 0.5]) ** 2 / 4)
    assert found.stderr_sampling is not None
    assert found.stderr_sampling**2 == pytest.approx((0 + 2 + 0 + 0.5) / 2 / 4 / 4)
    same = [[1.0], [0.0], [1.0], [0.0]]
    assert paired_difference(same, same).stderr == 0  # however far apart the questions are


def test_unequal_numbers_of_samples_are_taken_as_independent() -> None:
    """Gains 1/2 and 1/4. Within: before 1/2 and 1/2 over 2 samples, after 0 and 1/4 over 4 (1 of 4 wrong)."""
    found = paired_difference([[1, 0], [0, 1]], [[1, 1, 1, 1], [1, 1, 0, 1]])
    assert found.value == pytest.approx(3 / 8)
    assert found.stderr == pytest.approx(stdev([0.5, 0.25]) / 2**0.5)
    assert found.stderr_sampling == pytest.approx(((0.5 / 2 + 0) + (0.5 / 2 + 0.25 / 4)) ** 0.5 / 2)


def test_common_random_numbers_leave_less_to_chance() -> None:
    """Both policies draw with the same numbers, one a little better: the answers differ only where it matters."""
    generator = np.random.default_rng(3)
    hard, numbers = beta(generator, (QUESTIONS, 1)), generator.random((REPEATS, QUESTIONS, SAMPLES))
    first, second = (numbers < hard).astype(float), (numbers < np.clip(hard + 0.1, 0, 1)).astype(float)
    found = [paired_difference(*pair).stderr_sampling or 0 for pair in zip(first[:300], second[:300], strict=True)]
    spread = (second - first).mean((1, 2)).std()
    assert math.sqrt(mean(error**2 for error in found)) == pytest.approx(spread, rel=0.05)


@pytest.mark.parametrize("row", list(itertools.product([0, 1], repeat=5)))
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_mean_over_all_subsets(row: tuple[int, ...], k: int) -> None:
    subsets = [float(any(chosen)) for chosen in itertools.combinations(row, k)]
    assert pass_at_k([row], k).value == pytest.approx(mean(subsets))
    assert pass_at_k([row], 1).value == pytest.approx(mean(row))


@pytest.mark.parametrize(
    ("answers", "correct", "share"),
    [
        (["18", "18", "3"], [1, 1, 0], 1.0),
        (["18", "3", "3"], [1, 0, 0], 0.0),
        (["18", "3"], [1, 0], 0.5),  # a tie is half a point
        (["18", "3", "4"], [1, 0, 0], 1 / 3),
        (["1/2", "0.5", "3", "3", "4"], [1, 1, 0, 0, 0], 0.5),  # two ways to write the right answer are one
        (["3", "4"], [0, 0], 0.0),
        (["18", None, None, None], [1, 0, 0, 0], 1.0),  # no answer, no vote
        ([None, None], [0, 0], 0.0),
        (["", "", "18"], [0, 0, 1], 0.0),  # an empty answer is an answer
    ],
)
def test_majority(answers: list[str | None], correct: list[int], share: float) -> None:
    assert majority([answers], [correct]).value == pytest.approx(share)


# --- against simulation ---

QUESTIONS, SAMPLES, REPEATS = 60, 4, 3000


def beta(generator: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    """How hard questions are: most of them are answered nearly always or nearly never."""
    return generator.beta(0.4, 0.6, size)


def test_each_error_is_the_spread_of_repeated_evaluations() -> None:
    generator = np.random.default_rng(0)

    # New questions every time: the whole error.
    hard = beta(generator, (REPEATS, QUESTIONS, 1))
    tables = (generator.random((REPEATS, QUESTIONS, SAMPLES)) < hard).astype(float)
    found = [over_samples(table) for table in tables[:300]]
    spread = tables.mean((1, 2)).std()
    assert math.sqrt(mean(estimate.stderr**2 for estimate in found)) == pytest.approx(spread, rel=0.05)

    # The same questions every time: the part of sampling.
    fixed = beta(generator, (QUESTIONS, 1))
    again = (generator.random((REPEATS, QUESTIONS, SAMPLES)) < fixed).astype(float)
    sampling = [over_samples(table).stderr_sampling or 0 for table in again[:300]]
    assert math.sqrt(mean(error**2 for error in sampling)) == pytest.approx(again.mean((1, 2)).std(), rel=0.05)

    # New questions, each asked without end: the part of questions.
    questions = [estimate.stderr_questions or 0 for estimate in found]
    assert math.sqrt(mean(error**2 for error in questions)) == pytest.approx(hard.mean((1, 2)).std(), rel=0.05)


def test_the_paired_error_is_the_spread_of_repeated_comparisons_and_smaller_than_the_unpaired_one() -> None:
    generator = np.random.default_rng(1)
    before = beta(generator, (REPEATS, QUESTIONS, 1))
    after = np.clip(before + 0.1, 0, 1)
    first, second = ((generator.random((REPEATS, QUESTIONS, SAMPLES)) < hard).astype(float) for hard in (before, after))
    spread = (second - first).mean((1, 2)).std()
    pairs = list(zip(first[:300], second[:300], strict=True))
    found = [paired_difference(*pair) for pair in pairs]
    assert mean(estimate.value for estimate in found) == pytest.approx((after - before).mean(), abs=0.01)
    assert math.sqrt(mean(estimate.stderr**2 for estimate in found)) == pytest.approx(spread, rel=0.05)
    unpaired = [math.hypot(over_samples(a).stderr, over_samples(b).stderr) for a, b in pairs]
    assert spread < 0.6 * mean(unpaired)
    sampling = math.sqrt(mean((estimate.stderr_sampling or 0) ** 2 for estimate in found))
    assert sampling == pytest.approx(pstdev(((second - first).mean(2) - (after - before)[:, :, 0]).mean(1)), rel=0.05)


def test_pass_at_k_is_unbiased() -> None:
    generator = np.random.default_rng(2)
    hard = beta(generator, (QUESTIONS, 1))
    tables = (generator.random((800, QUESTIONS, 6)) < hard).astype(float)
    truth = (1 - (1 - hard) ** 3).mean()
    assert mean(pass_at_k(table, 3).value for table in tables) == pytest.approx(truth, abs=0.003)


# --- as tables of rows ---


def frame(correct: dict[str, list[int]], mode: str = "sampled", step: int = 0) -> pd.DataFrame:
    rows = [
        {"step": step, "mode": mode, "question": question, "sample": i, "correct": bool(value)}
        for question, values in correct.items()
        for i, value in enumerate(values)
    ]
    return pd.DataFrame(rows)


def test_rows_are_paired_by_question_in_any_order() -> None:
    first, second = {"a": [0, 0], "b": [1, 0], "c": [1, 1]}, {"c": [1, 1], "a": [1, 0], "b": [1, 1]}
    found = paired(frame(first), frame(second), "sampled")
    values = list(first.values()), [second[question] for question in first]
    assert found == paired_difference(*values)
    assert found.value == pytest.approx(1 / 3)
    [gain] = gains(frame(first), frame(second))
    assert (gain.metric, gain.value, gain.stderr) == ("eval/gain_sampled", found.value, found.stderr)


def test_other_questions_cannot_be_paired() -> None:
    with pytest.raises(ConfigError, match=r"1 .* in both and 2 in one alone \(b, c\).*eval\.questions"):
        paired(frame({"a": [1], "b": [1]}), frame({"a": [1], "c": [1]}), "sampled")
    with pytest.raises(ConfigError, match=r"0 .* in both and 0 in one alone"):
        paired(frame({"a": [1]}), frame({"a": [1]}), "greedy")


def test_rows_of_a_step_are_read_from_a_run(tmp_path) -> None:
    rows = pd.concat([frame({"a": [0]}, step=0), frame({"a": [1]}, step=6)])
    rows.to_parquet(tmp_path / "samples.parquet")
    assert read_samples(tmp_path)["correct"].tolist() == [True]
    assert read_samples(tmp_path, step=0)["correct"].tolist() == [False]
    with pytest.raises(ConfigError, match="steps 0, 6, not 3"):
        read_samples(tmp_path, step=3)
    with pytest.raises(ConfigError, match=r"has no samples\.parquet"):
        read_samples(tmp_path / "absent")
