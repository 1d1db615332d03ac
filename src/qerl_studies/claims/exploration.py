"""Whether exploration can pay among these runs: the control without which noise may be said to harm, and no more.

A hotter sampler and a reward for entropy explore by known means. Where neither raises accuracy, that noise does not
either says nothing about noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from qerl_core.process.installation import CONF_DIR
from qerl_studies.claims.estimate import compare
from qerl_studies.claims.match import Contrast, Filter, Side
from qerl_studies.claims.read import conditions
from qerl_studies.design.controls import one_passes
from qerl_studies.runs.load import Run
from qerl_studies.runs.measure import ACCURACY


def _more(label: str, key: str, usual: float) -> Contrast:
    arms = (
        Side(label, +1, (Filter(key, low=math.nextafter(usual, math.inf)),)),
        Side("none", -1, (Filter(key, among=(usual,)),)),
    )
    return Contrast(f"{label} - none", (key,), arms)


MEANS = (_more("a hotter sampler", "rollout.temperature", 1.0), _more("a bonus", "train.entropy_coef", 0.0))


def why_only_harm(runs: Sequence[Run]) -> str:
    """Why a lack of help cannot be shown: no such control was run, or none raised accuracy. Empty if one did."""
    where = (*conditions([CONF_DIR], "shared/answering", "where"), Filter("aqn.name", among=("none",)))
    effects = [
        (contrast.label, one.effect.whole)
        for contrast in MEANS
        for one in compare(ACCURACY, contrast, where, runs)
        if one.effect
    ]
    if one_passes((one for _, one in effects), len(effects)):
        return ""
    shown = ", ".join(f"{label} {ACCURACY.estimate_text(one)}" for label, one in effects)
    control = f"no control of exploration passed ({shown})" if effects else "no control of exploration was run"
    return f"{control}: harm can be shown here, a lack of help cannot"
