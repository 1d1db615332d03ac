"""The functions that compute metrics, from numbers per token and from records; definitions.py says what each is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from qerl_core.metrics.definitions import POSITIONS, WEIGHT_SYNC
from qerl_core.records import Group, Rollout

if TYPE_CHECKING:
    import torch

LOOP_WINDOW = 8  # tokens
ROUNDING = 1e-9  # nats a token: log-probabilities in FP32 alone differ by less
TOP_SHARE = 0.2  # of a step's tokens: those of most entropy, where completions part


class TokenTable:
    """Columns of per-token numbers, collected from micro-batches where they are."""

    def __init__(self) -> None:
        self.columns: dict[str, list[torch.Tensor]] = {}

    def add(self, **values: torch.Tensor) -> None:
        """Append a tensor (n,) to each column; it stays on its device."""
        for name, value in values.items():
            self.columns.setdefault(name, []).append(value.detach())

    def extend(self, other: TokenTable) -> None:
        """Append the columns of `other`."""
        for name, parts in other.columns.items():
            self.columns.setdefault(name, []).extend(parts)

    def __getitem__(self, name: str) -> torch.Tensor:
        import torch

        return torch.cat(self.columns[name]).double()

    def names(self) -> list[str]:
        return list(self.columns)


def token_metrics(table: TokenTable, on_policy: bool) -> dict[str, float]:
    """Metrics of the training pass from its per-token columns; those of the sampler only if `on_policy`.

    `sequence_gap` has one entry per completion. MISMATCH_SPLIT needs the column `noisy_logprobs`, ROUTING
    `router_changed`, with an entry per expert of a token, IMPORTANCE_SAMPLING `importance` and `importance_raw`,
    BY_POSITION `position`, BY_SIGN `advantages`, KL_TO_BASE `base_gap`, base minus policy. These metrics are left out
    without them. `noisy_measured` is 1 for the tokens that `noisy_logprobs` has.
    """
    values = {"entropy_clean": table["entropy"].mean().item(), "entropy_t1": table["entropy_t1"].mean().item()}
    if not on_policy:
        return values
    trainer, sampler, columns = table["logprobs"], table["sampler_logprobs"], table.names()
    values |= mismatch_metrics(trainer, sampler) | {"mismatch/ess_sequence": ess(table["sequence_gap"])}
    if "position" in columns:
        values |= kl_by_position(trainer, sampler, table["position"])
    if "advantages" in columns:
        values |= kl_by_sign(trainer, sampler, table["advantages"])
    if "base_gap" in columns:
        values["kl_to_base"] = k3(table["base_gap"]).mean().item()
    if "noisy_logprobs" in columns:
        measured = table["noisy_measured"].bool()
        noisy, trainer, sampler = table["noisy_logprobs"], trainer[measured], sampler[measured]
        values["mismatch/measured_frac"] = measured.double().mean().item()
        parts = {"kernel": (noisy, sampler), "noise": (trainer, noisy)}
        for part, (later, earlier) in parts.items():
            gap = mismatch_metrics(later, earlier)
            values |= {f"mismatch/{part}_{name}": gap[f"mismatch/{name}"] for name in ("kl", "logp_abs_max", "ess")}
    if "router_changed" in columns:
        values["router/changed_frac"] = table["router_changed"].mean().item()
    if "importance" in columns:
        values |= importance_metrics(table["importance"], table["importance_raw"])
    return values


def importance_metrics(bounded: torch.Tensor, raw: torch.Tensor) -> dict[str, float]:
    """Metrics of importance weights (n,), before (`raw`) and after truncation or masking (`bounded`)."""
    return {
        "importance_sampling/weight_mean": bounded.mean().item(),
        "importance_sampling/weight_max": raw.max().item(),
        "importance_sampling/changed_frac": (bounded != raw).double().mean().item(),
    }


def mismatch_metrics(trainer: torch.Tensor, sampler: torch.Tensor) -> dict[str, float]:
    """How far the trainer's log-probabilities of the sampled tokens are from the sampler's, both (n,)."""
    difference = trainer - sampler
    return {
        "mismatch/kl": k3(difference).mean().item(),
        "mismatch/logp_abs_mean": difference.abs().mean().item(),
        "mismatch/logp_abs_max": difference.abs().max().item(),
        "mismatch/ess": ess(difference),
    }


def kl_by_position(trainer: torch.Tensor, sampler: torch.Tensor, position: torch.Tensor) -> dict[str, float]:
    """mismatch/kl of the tokens in each bin of POSITIONS that has some, all (n,)."""
    found, estimate = {}, k3(trainer - sampler)
    for first, end in zip(POSITIONS, (*POSITIONS[1:], math.inf), strict=True):
        inside = (position >= first) & (position < end)
        if bool(inside.any()):
            found[f"mismatch/kl_by_position_{first}"] = estimate[inside].mean().item()
    return found


def kl_by_sign(trainer: torch.Tensor, sampler: torch.Tensor, advantages: torch.Tensor) -> dict[str, float]:
    """Shares of mismatch/kl by the signs of the advantage and of trainer - sampler, all (n,): arXiv 2610.07043.

    They are of the tokens whose advantage is not 0, and sum to 1. Empty if their gaps are those of rounding, or one
    overflows.
    """
    gap = trainer - sampler
    estimate = k3(gap) * (advantages != 0)
    whole, found = estimate.sum(), {}
    for sign, token in (("negative", advantages < 0), ("positive", advantages > 0)):
        for side, inside in (("below", gap < 0), ("above", gap > 0)):
            found[f"mismatch/kl_frac_{sign}_{side}"] = (estimate[token & inside].sum() / whole).item()
    return found if len(gap) * ROUNDING < whole < math.inf else {}


def k3(difference: torch.Tensor) -> torch.Tensor:
    """The k3 estimate of KL(p || q) at tokens that p sampled, from log q - log p."""
    return difference.exp() - difference - 1


def ess(log_weights: torch.Tensor) -> float:
    """Kish's effective sample size of weights exp(`log_weights`) (n,) as a share of n: 1/n to 1, 1 for equal weights.

    A common factor cancels, so the largest weight is taken as 1 and none can overflow.
    """
    weights = (log_weights - log_weights.max()).exp()
    return (weights.sum().square() / (len(weights) * weights.square().sum())).item()


def rollout_metrics(groups: list[Group]) -> dict[str, float]:
    """Metrics of all completions of one step."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = [reward for group in groups for reward in group.rewards]
    totals = [reward.total for reward in rewards]
    tokens = sum(len(rollout.token_ids) for rollout in rollouts)
    parts = {f"reward/{part}": mean([reward.parts[part] for reward in rewards]) for part in rewards[0].parts}
    return {
        "reward/mean": mean(totals),
        "reward/std": sample_std(totals),
        **parts,
        "reward/frac_zero_std": mean([float(not group.has_signal) for group in groups]),
        "accuracy": mean([float(reward.correct) for reward in rewards]),
        "entropy": mean_entropy(rollouts),
        **entropy_by_part([entropy for rollout in rollouts for entropy in rollout.entropies]),
        "completions/tokens": tokens,
        "completions/mean_length": tokens / len(rollouts),
        "completions/truncated_frac": mean([float(not rollout.finished) for rollout in rollouts]),
        "completions/garbled_frac": mean([float(garbled(rollout)) for rollout in rollouts]),
    }


def mean_entropy(rollouts: Sequence[Rollout]) -> float:
    """Nats per completion token, as their samplers measured it."""
    return sum(sum(one.entropies) for one in rollouts) / sum(len(one.token_ids) for one in rollouts)


def entropy_ratio(noisy: Sequence[Rollout], quiet: Sequence[Rollout]) -> float:
    """Entropy of a policy with noise over that without, each on what it samples itself; NaN if the latter is 0."""
    without = mean_entropy(quiet)
    return mean_entropy(noisy) / without if without else math.nan


def entropy_by_part(entropies: list[float]) -> dict[str, float]:
    """Mean entropy of the tokens where the policy hesitates most, a fifth of them but at least one, and of the rest."""
    import numpy as np

    ordered = np.sort(entropies)[::-1].tolist()
    top = max(1, round(TOP_SHARE * len(ordered)))
    return {"entropy/top20": mean(ordered[:top]), "entropy/rest": mean(ordered[top:] or ordered)}


def taught_frac(tokens: torch.Tensor, has_gradient: torch.Tensor) -> float:
    """Share of the completion tokens whose completion has a gradient, from the tokens (B,) of each completion."""
    return int(tokens[has_gradient].sum()) / int(tokens.sum())


def sync_metrics(reports: list[dict[str, float]]) -> dict[str, float]:
    """Combine the reports of several weight syncs in one step: the largest gap, the smallest of everything else."""
    worst = {name: max if name.startswith("sync/gap") else min for name in WEIGHT_SYNC}
    return {name: worst[name](report[name] for report in reports) for name in (reports[0] if reports else {})}


def garbled(rollout: Rollout) -> bool:
    """Whether a finished completion has broken tags, or any completion repeats itself.

    A tag is broken if it is closed before it is opened, not closed, or written twice; no tags at all is bad format, not
    garbling. A completion repeats itself if over half of its windows of LOOP_WINDOW tokens occurred before in it.
    """
    for tag in ("think", "answer"):
        opened, closed = rollout.text.count(f"<{tag}>"), rollout.text.count(f"</{tag}>")
        ordered = opened == 0 or rollout.text.index(f"<{tag}>") < (
            rollout.text.find(f"</{tag}>") if closed else math.inf
        )
        if rollout.finished and (opened != closed or opened > 1 or not ordered):
            return True
    return repeats_itself(rollout.token_ids)


def repeats_itself(ids: Sequence[int | str]) -> bool:
    """Whether over half of the windows of LOOP_WINDOW tokens, or words, occurred before."""
    windows = len(ids) - LOOP_WINDOW + 1
    if windows < LOOP_WINDOW or 2 * len({*ids[:windows]}) >= windows:  # windows that begin differently differ
        return False
    return 2 * len({tuple(ids[i : i + LOOP_WINDOW]) for i in range(windows)}) < windows


def ratio(counts: Sequence[tuple[int, int]]) -> float:
    """Of pairs (part, whole): all parts over all wholes; 0 of nothing."""
    part, whole = (sum(column) for column in zip(*counts, strict=True))
    return part / whole if whole else 0.0


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def sample_std(values: list[float]) -> float:
    """Standard deviation with Bessel's correction; 0 for a single value."""
    center = mean(values)
    return (sum((value - center) ** 2 for value in values) / max(1, len(values) - 1)) ** 0.5
