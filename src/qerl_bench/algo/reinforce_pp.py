"""algo=reinforce_pp: REINFORCE++ (arXiv 2501.03262): rewards whitened over the whole batch instead of within groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qerl_bench.algo.clipped import ClippedAlgorithm
from qerl_bench.algo.functional import centered
from qerl_core.checks import check_fields, flag, positive

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlus(ClippedAlgorithm):
    """The advantage is (R - mean) / (std + eps) over all tokens of the step, each with its completion's reward."""

    advantage_eps: float
    group_baseline: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "algo", advantage_eps=positive, group_baseline=flag)

    def advantages(self, rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Long completions count more in mean and std (with Bessel's correction), because tokens are counted."""
        if self.group_baseline:
            rewards = centered(rewards)
        if bool((rewards == rewards.flatten()[0]).all()):
            return rewards.new_zeros(rewards.shape)
        tokens = lengths.sum()
        mean = (rewards * lengths).sum() / tokens
        variance = ((rewards - mean).square() * lengths).sum() / (tokens - 1)
        return (rewards - mean) / (variance.sqrt() + self.advantage_eps)
