"""The lines of rollouts.jsonl: the first groups that a step trained on, token by token.

Per-token numbers are in thousandths of nats, as whole numbers; a token takes about twenty bytes. Nothing
is computed for them; where the loop did not measure a number, its column is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qerl_core.records import PER_NAT, Group, Prompt

TokenColumns = dict[str, list[float]]  # one number per completion token, in nats


def kept_records(
    step: int,
    groups: Sequence[Group],
    advantages: Sequence[float],
    columns: Mapping[int, TokenColumns],
    decode: Callable[[list[list[int]]], list[str]],
) -> list[dict[str, Any]]:
    """One line per completion of `groups`, the first of a batch.

    `advantages` are those of the batch's rows. `columns` has the trainer's numbers of a row, if it made any: `trained`,
    the log-probabilities of the policy as it trains, and `noisy`, those with the sampler's noise. `decode` makes texts
    of lists of token ids.
    """
    used = sorted({token for group in groups for one in group.rollouts for token in one.token_ids})
    texts = dict(zip(used, decode([[token] for token in used]), strict=True)) if used else {}  # no rollouts, no texts
    graded = [pair for group in groups for pair in zip(group.rollouts, group.rewards, strict=True)]
    return [
        {
            "step": step,
            "prompt": rollout.prompt.draw,  # with the place, if it has several in the step
            "question": question_of(rollout.prompt),
            "completion": rollout.text,
            "gold": rollout.prompt.answer,
            "reward": reward.total,
            **reward.parts,
            "correct": reward.correct,
            "finished": rollout.finished,
            "advantage": round(float(advantages[row]), 4),
            "tokens": [texts[token] for token in rollout.token_ids],
            "entropy": in_thousandths(rollout.entropies),
            "sampled": in_thousandths(rollout.logprobs),
            **{name: in_thousandths(column) for name, column in columns.get(row, {}).items()},
        }
        for row, (rollout, reward) in enumerate(graded)
    ]


def question_of(prompt: Prompt) -> str:
    """What a reader sees of it: empty for token ids, which have no words."""
    return prompt.question or (prompt.messages[-1]["content"] if prompt.messages else "")


def in_thousandths(nats: Sequence[float]) -> list[int | None]:
    """Whole thousandths; None for what is not finite."""
    return [round(PER_NAT * number) if math.isfinite(number) else None for number in nats]
