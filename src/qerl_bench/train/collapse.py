"""Whether training has destroyed the policy: with a learning rate of 1 every number may be finite and mean nothing.

Each sign compares the mean of a metric over the last STEPS steps with the first step, whose metrics are those of the
policy before any update, so that a base that could do nothing is not called destroyed. Left out: a policy that became
worse without losing everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

STEPS = 5
UNIFORM = 0.8  # of ln V: more entropy than this is noise, since a trained language model has less than half of it
GARBLED = 0.9  # share of completions
ABLE = 0.1  # accuracy that is more than luck


def collapse(records: Sequence[dict[str, Any]], uniform_entropy: float) -> str | None:
    """What shows that the policy of a run is gone, from the lines of metrics.jsonl; None if nothing does.

    `uniform_entropy` is ln V, for a vocabulary of V tokens.
    """
    steps = [record for record in records if record["kind"] == "train"]
    if len(steps) <= STEPS:
        return None

    def before_and_after(name: str) -> tuple[float, float] | None:
        values = [record[name] for record in (steps[0], *steps[-STEPS:]) if record.get(name) is not None]
        return (values[0], sum(values[1:]) / STEPS) if len(values) == 1 + STEPS else None

    limit = UNIFORM * uniform_entropy
    if (entropy := before_and_after("entropy_clean")) and entropy[0] < limit / 2 and entropy[1] > limit:
        return (
            f"entropy_clean rose from {entropy[0]:.2f} to {entropy[1]:.2f} nats/token, and uniform is "
            f"{uniform_entropy:.2f}"
        )
    if (garbled := before_and_after("completions/garbled_frac")) and garbled[0] < GARBLED / 2 and garbled[1] > GARBLED:
        return f"completions/garbled_frac rose from {garbled[0]:.2f} to {garbled[1]:.2f}"
    if (accuracy := before_and_after("accuracy")) and accuracy[0] > ABLE and accuracy[1] == 0:
        return f"accuracy fell from {accuracy[0]:.2f} to 0"
    return None
