"""How others take means and estimate divergences: small functions that definitions name and tests apply to numbers.

Arrays are (completions, tokens) with a mask of the same shape, 1 for the tokens that count.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Array = np.ndarray


def of_completions(values: Array) -> float:
    """Mean of one number per completion (completions,); NaN, for one that nobody could grade, is left out."""
    return float(np.nanmean(values))


def spread_of_completions(values: Array) -> float:
    """Standard deviation (n - 1) of one number per completion."""
    known = values[~np.isnan(values)]
    return float(known.std(ddof=1))


def equal_groups(values: Array) -> float:
    """Share of groups (groups, completions) whose rewards differ by no more than 1e-8 in standard deviation."""
    return float(np.mean(values.std(axis=1, ddof=1) <= 1e-8))


def over_tokens(values: Array, mask: Array) -> float:
    """Every token of the batch counts the same."""
    return float((values * mask).sum() / mask.sum())


def over_micro_batches(values: Array, mask: Array, rows: int) -> float:
    """The mean over tokens of each `rows` completions, and then the mean of these."""
    pieces = range(0, len(values), rows)
    return float(np.mean([over_tokens(values[at : at + rows], mask[at : at + rows]) for at in pieces]))


def over_sequences(values: Array, mask: Array) -> float:
    """The mean over tokens of each completion, and then the mean of these; completions without a token are left out."""
    count = mask.sum(axis=1)
    means = (values * mask).sum(axis=1)[count > 0] / count[count > 0]
    return float(means.mean())


def over_sums(values: Array, mask: Array) -> float:
    """The mean over completions of the sum over their tokens; completions without a token are left out."""
    return float((values * mask).sum(axis=1)[mask.sum(axis=1) > 0].mean())


def over_widths(values: Array, mask: Array) -> float:
    """`over_sums` divided by the number of columns, padded ones included: it falls as a batch gets wider."""
    return over_sums(values, mask) / values.shape[1]


def k1(policy: Array, other: Array) -> Array:
    """log p - log q on tokens that p sampled: no bias, large spread, may be negative."""
    return policy - other


def k2(policy: Array, other: Array) -> Array:
    """Half the square of log p - log q on tokens that p sampled."""
    return (policy - other) ** 2 / 2


def k3(policy: Array, other: Array) -> Array:
    """q / p - 1 - log(q / p) on tokens that p sampled: never negative."""
    return np.exp(other - policy) - (other - policy) - 1


def entropy(logits: Array, temperature: float) -> Array:
    """Of the whole vocabulary, the last axis, in nats, of the distribution at this temperature."""
    scaled = logits / temperature
    logs = scaled - np.log(np.exp(scaled - scaled.max(-1, keepdims=True)).sum(-1, keepdims=True))
    logs -= scaled.max(-1, keepdims=True)
    return -(np.exp(logs) * logs).sum(-1)


MEANS: dict[str, tuple[str, Callable[..., float]]] = {  # by name: in words, and as a function
    "completions": ("mean over completions", of_completions),
    "spread": ("standard deviation over completions (n - 1)", spread_of_completions),
    "groups": ("share of groups", equal_groups),
    "tokens": ("mean over all tokens of the step", over_tokens),
    "micro-batches": ("mean over micro-batches of their means over tokens", over_micro_batches),
    "sequences": ("mean over completions of their means over tokens", over_sequences),
    "sums": ("mean over completions of their sums over tokens", over_sums),
    "widths": ("mean over completions of their sums over tokens, over the padded width", over_widths),
}
ESTIMATORS: dict[str, tuple[str, Callable[[Array, Array], Array]]] = {
    "k1": ("k1: log p - log q", k1),
    "k2": ("k2: (log p - log q)^2 / 2", k2),
    "k3": ("k3: q / p - 1 - log(q / p)", k3),
}
