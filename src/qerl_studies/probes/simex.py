"""What a number would be without the rounding of a GGUF file: more rounding error is added, and the trend prolonged.

Simulation extrapolation (Cook and Stefanski, JASA 1994). A copy with dither of `scale` has 1 + scale times the file's
own variance of error, if the true weights lie uniformly in their cells; so -1 is a file without any.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from qerl_core.checks import require

WITHOUT_ERROR = -1.0
DEGREES = {"linear": 1, "quadratic": 2}


def extrapolated(scales: Sequence[float], values: np.ndarray, degree: int) -> np.ndarray:
    """The fitted value at -1 of each copy, (copies,), from its `values` (copies, scales) by least squares.

    Raises ConfigError with fewer scales than the polynomial needs.
    """
    have = len({*scales})
    require(
        have > degree, f"a polynomial of degree {degree} needs {degree + 1} values of model.dither_scale, got {have}"
    )
    powers = np.vander(np.asarray(scales, dtype=float), degree + 1)
    coefficients = np.linalg.lstsq(powers, values.T, rcond=None)[0]  # (degree + 1, copies)
    return np.polyval(coefficients, WITHOUT_ERROR)
