"""Accuracies from a table of answers (questions x samples), and how far chance could have moved them.

Two kinds of chance: which questions were asked, and which answers were sampled to them. Samples of one question are not
independent, so every standard error is over questions; docs/evaluation.md has the formulas. Left out: the correction
for a finite pool of questions (the held-out set is taken as a sample of the questions that could have been asked), and
the sampling part of pass@k and maj@n, which are no means over samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

from qerl_bench.metrics import mean, sample_std

Samples = Sequence[Sequence[float]]  # (questions, samples): the samples of one question side by side


@dataclass(frozen=True)
class Estimate:
    """A mean over questions. stderr^2 = stderr_questions^2 + stderr_sampling^2; the parts are None where a single
    sample of each question cannot tell them apart."""

    value: float
    stderr: float
    n: int  # questions
    stderr_questions: float | None = None  # what infinitely many samples would leave: other questions might be asked
    stderr_sampling: float | None = None  # the same questions, sampled again


def over_questions(per_question: Sequence[float]) -> Estimate:
    """Mean of one number per question."""
    values = list(per_question)
    return Estimate(value=mean(values), stderr=sample_std(values) / len(values) ** 0.5, n=len(values))


def over_samples(samples: Samples, sampling_variances: Sequence[float] | None = None) -> Estimate:
    """Mean over questions of the mean over samples.

    The variance within questions, s^2 / m for the m samples of each, is what sampling adds; the variance between the
    means of questions holds both kinds. Where the difference of the two is negative by chance, the part of questions
    is 0. `sampling_variances` gives the first for each question where it is not that of plain samples.
    """
    whole = over_questions([mean(list(row)) for row in samples])
    if sampling_variances is None:
        if min(len(row) for row in samples) < 2:
            return whole
        sampling_variances = [sample_std(list(row)) ** 2 / len(row) for row in samples]
    sampling = mean(list(sampling_variances)) / whole.n
    questions = max(0.0, whole.stderr**2 - sampling)
    return Estimate(whole.value, whole.stderr, whole.n, questions**0.5, sampling**0.5)


def paired_difference(first: Samples, second: Samples) -> Estimate:
    """Mean of second - first over the same questions in the same order.

    What both find hard or easy cancels, so that the error is usually far below that of two separate accuracies. Sample
    i of the one may have been drawn with the random numbers of sample i of the other, as the evaluations of one run
    are: the sampling part is that of their differences. Only for unequal numbers of samples are both taken as
    independent, and their variances add.
    """
    assert len(first) == len(second), (len(first), len(second))
    pairs = list(zip(first, second, strict=True))
    if all(len(before) == len(after) for before, after in pairs):
        return over_samples([[y - x for x, y in zip(before, after, strict=True)] for before, after in pairs])
    gains = [[mean(list(after)) - mean(list(before))] for before, after in pairs]
    if min(len(row) for row in (*first, *second)) < 2:
        return over_samples(gains)
    return over_samples(gains, [sum(sample_std(list(row)) ** 2 / len(row) for row in pair) for pair in pairs])


def pass_at_k(samples: Samples, k: int) -> Estimate:
    """Share of questions that at least one of k samples answers: 1 - C(m - c, k) / C(m, k) with c of m right, which is
    unbiased (Chen et al. 2021, arXiv 2107.03374)."""
    return over_questions([1 - comb(len(row) - round(sum(row)), k) / comb(len(row), k) for row in samples])


def majority(answers: Sequence[Sequence[str | None]], samples: Samples) -> Estimate:
    """Share of questions whose most frequent answer is right (maj@n).

    Right answers count as one answer however they are written, no answer has no vote, and of equally frequent answers
    each wins with equal probability. A question without any answer is wrong.
    """
    shares = []
    for said, right in zip(answers, samples, strict=True):
        votes = Counter(
            (bool(correct), "" if correct else answer)
            for answer, correct in zip(said, right, strict=True)
            if answer is not None
        )
        most = max(votes.values(), default=0)
        winners = [correct for (correct, _), count in votes.items() if count == most]
        shares.append(mean([float(correct) for correct in winners]) if winners else 0.0)
    return over_questions(shares)
