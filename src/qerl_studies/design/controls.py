"""When a control, an arm that raises accuracy by known means, has passed."""

from __future__ import annotations

from collections.abc import Iterable

from qerl_core.statistics import Estimate

EFFECT = 0.01  # accuracy that a control must raise, the margin of the claims
LEVEL = 0.01  # of the two-sided test of a control, over all controls


def level(controls: int) -> float:
    """What the p-value of a control has to be, at most, if so many are tested."""
    return LEVEL / max(controls, 1)


def one_passes(raised: Iterable[Estimate], controls: int) -> bool:
    """Whether one of these controls has raised accuracy by more than EFFECT, when so many are tested in all.

    A study knows all controls of its design, of both kinds; a claim knows those that were run.
    """
    return any(one.value > EFFECT and one.p_outside(0.0) <= level(controls) for one in raised)
