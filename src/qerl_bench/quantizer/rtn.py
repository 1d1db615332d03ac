"""quantizer=rtn: round to nearest under the scale of each block's maximum, as QeRL's released script does; no data."""

from __future__ import annotations

from dataclasses import dataclass

from qerl_bench.quantizer.base import Quantizer


@dataclass(frozen=True, kw_only=True)
class RoundToNearest(Quantizer):
    """The format's own rule, nothing else."""

    name: str
    calibration = None
