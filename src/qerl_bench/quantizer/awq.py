"""quantizer=awq: enlarge the inputs that carry much signal before rounding, and shrink the layer before by as much.

Lin et al., arXiv 2306.00978, but the search packs every candidate in the real format: a block scale shared by 16 or 32
inputs reacts to rescaling in a way that an integer stand-in does not show. The input scales are rms(x)^a, normalized,
with `a` on a grid; a = 0 is plain rounding, so the measured output error never gets worse. They are folded into the
norm, the value projection or the up projection before the layer. Left out: clipping.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.quantizer.base import Quantizer
from qerl_bench.quantizer.calibration import Calibration
from qerl_core.checks import check_fields, count

if TYPE_CHECKING:
    import torch

    from qerl_bench.quant.base import BlockFormat
    from qerl_bench.quantizer.calibrate import InputGroup


@dataclass(frozen=True, kw_only=True)
class AWQ(Quantizer):
    """`steps` exponents are tried for each group of layers with the same input: 0, 1/steps, ... below 1."""

    name: str
    steps: int
    calibration: Calibration

    def __post_init__(self) -> None:
        check_fields(self, "quantizer", steps=count(2))

    def prepare(self, groups: list[InputGroup], weight_format: BlockFormat) -> None:
        for group in groups:
            if group.norm is not None or group.previous is not None:
                group.fold_scales(self.best_scales(group, weight_format))

    def best_scales(self, group: InputGroup, weight_format: BlockFormat) -> torch.Tensor:
        """The input scales (K,) with the smallest output error of the group's layers."""
        import torch

        rms = group.second_moment.diagonal().sqrt().clamp(min=1e-8)  # (K,)
        best, least = torch.ones_like(rms), None
        for step in range(self.steps):
            scales = group.averaged_over_repeats(rms.pow(step / self.steps))
            scales = scales / (scales.max() * scales.min()).sqrt()
            error = group.squared_output_error(scales, weight_format)
            if least is None or error < least:
                best, least = scales, error
        return best
