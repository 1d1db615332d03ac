"""Scores of texts by a policy, over the whole vocabulary, and what two of them differ in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from qerl_bench.model.policy import Policy
from qerl_core.records import Rollout

TOKENS = 4096  # of a pass that scores texts, with padding: 2.5 GB a policy where the vocabulary has 152k


def passes(rollouts: Sequence[Rollout]) -> Iterator[list[Rollout]]:
    """The rollouts in their order, as many at once as have TOKENS padded tokens at most, and at least one."""
    now: list[Rollout] = []
    for one in rollouts:
        longest = max(len(each.prompt_ids) + len(each.token_ids) for each in [*now, one])
        if now and longest * (len(now) + 1) > TOKENS:
            yield now
            now = []
        now.append(one)
    if now:
        yield now


def scores(policy: Policy, rollouts: Sequence[Rollout]) -> list[torch.Tensor]:
    """Log-probabilities (T, V) in FP32 at each token of each completion, in one pass of training over padded rows."""
    rows = [[*one.prompt_ids, *one.token_ids] for one in rollouts]
    width = max(map(len, rows))
    ids = torch.tensor([row + [policy.pad_id] * (width - len(row)) for row in rows], device=policy.device)
    begins = [len(one.prompt_ids) - 1 for one in rollouts]  # what predicts the first token
    kept = width - min(begins)
    logits = policy.model(input_ids=ids, use_cache=False, logits_to_keep=kept).logits  # padding is behind all
    found = []
    for row, begin, one in zip(logits, begins, rollouts, strict=True):
        at = begin - (width - kept)
        found.append(torch.log_softmax(row[at : at + len(one.token_ids)].float(), -1))
    return found


def kl(from_: Sequence[torch.Tensor], to: Sequence[torch.Tensor]) -> float:
    """KL(from_ || to) in nats, the sum over all tokens."""
    sums = [(p.exp() * (p - q)).nan_to_num().sum(-1).double().sum().item() for p, q in zip(from_, to, strict=True)]
    return sum(sums)


def acceptance(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    """The chance that a token drafted by either is accepted by the other, the sum over all tokens.

    Of each it is that of min(p, q) over the vocabulary, taken as 1 - sum |p - q| / 2, which is 1 exactly of equal ones.
    """
    far = [(p.exp() - q.exp()).abs().sum(-1).double() / 2 for p, q in zip(one, other, strict=True)]
    return sum((1 - each).sum().item() for each in far)


def entropy(of: Sequence[torch.Tensor]) -> float:
    """In nats, the sum over all tokens."""
    return sum(-(p.exp() * p).nan_to_num().sum(-1).double().sum().item() for p in of)
