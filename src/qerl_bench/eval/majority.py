"""Accuracy of the most frequent of several answers to a question."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from qerl_core.metrics.compute import mean
from qerl_core.statistics import Estimate, Samples, over_questions


def majority(answers: Sequence[Sequence[str | None]], samples: Samples) -> Estimate:
    """Share of questions whose most frequent answer is correct (maj@n).

    All correct answers count as one, however they are written; a missing answer has no vote; of equally frequent
    answers each wins with equal probability. A question without any answer counts as wrong.
    """
    shares = []
    for texts, correct in zip(answers, samples, strict=True):
        votes = Counter(
            (bool(is_correct), "" if is_correct else text)
            for text, is_correct in zip(texts, correct, strict=True)
            if text is not None
        )
        most = max(votes.values(), default=0)
        winners = [is_correct for (is_correct, _), count in votes.items() if count == most]
        shares.append(mean([float(is_correct) for is_correct in winners]) if winners else 0.0)
    return over_questions(shares)
