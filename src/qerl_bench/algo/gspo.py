"""algo=gspo: group sequence policy optimization (arXiv 2507.18071): one ratio for a whole completion."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.algo.base import LossInputs
from qerl_bench.algo.functional import sequence_ratio
from qerl_bench.algo.grpo import GRPO

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class GSPO(GRPO):
    """GRPO with the geometric mean of a completion's token ratios as the ratio of each of its tokens."""

    def ratio(self, inputs: LossInputs) -> torch.Tensor:
        return sequence_ratio(inputs, mean=True)
