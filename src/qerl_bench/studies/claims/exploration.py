"""Whether exploration can pay among these runs: the control without which noise may be said to harm, and no more.

A hotter sampler and a reward for entropy explore by known means. Where neither raises accuracy, that noise does not
either says nothing about noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from qerl_bench.statistics import Estimate
from qerl_bench.studies.claims.contrasts import ANSWERING, NO_NOISE
from qerl_bench.studies.claims.estimate import compare
from qerl_bench.studies.claims.match import Arm, Contrast, Filter
from qerl_bench.studies.runs.load import Run
from qerl_bench.studies.runs.measure import ACCURACY

EFFECT = 0.01  # accuracy that a control must raise, the margin of the claims
LEVEL = 0.01  # of the two-sided test of a control, over all controls


def _more(label: str, key: str, usual: float) -> Contrast:
    arms = (
        Arm(label, +1, (Filter(key, low=math.nextafter(usual, math.inf)),)),
        Arm("none", -1, (Filter(key, among=(usual,)),)),
    )
    return Contrast(f"{label} - none", (key,), arms)


MEANS = (_more("a hotter sampler", "rollout.temperature", 1.0), _more("a bonus", "train.entropy_coef", 0.0))


def level(controls: int) -> float:
    """What the p-value of a control has to be, at most, if so many are tested."""
    return LEVEL / max(controls, 1)


def one_passes(raised: Iterable[Estimate], controls: int) -> bool:
    """Whether one of these controls has raised accuracy by more than EFFECT, when so many are tested in all.

    A study knows all controls of its design, of both kinds; a claim knows those that were run.
    """
    return any(one.value > EFFECT and one.p_outside(0.0) <= level(controls) for one in raised)


def why_only_harm(runs: Sequence[Run]) -> str:
    """Why a lack of help cannot be shown: no such control was run, or none raised accuracy. Empty if one did."""
    found = [
        (contrast.label, one.effect.whole)
        for contrast in MEANS
        for one in compare(ACCURACY, contrast, (*ANSWERING, NO_NOISE), runs)
        if one.effect
    ]
    if one_passes((one for _, one in found), len(found)):
        return ""
    shown = ", ".join(f"{label} {ACCURACY.estimate_text(one)}" for label, one in found)
    control = f"no control of exploration passed ({shown})" if found else "no control of exploration was run"
    return f"{control}: harm can be shown here, a lack of help cannot"
