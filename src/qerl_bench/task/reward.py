"""The reward of every task whose answer is a number."""

from __future__ import annotations

from qerl_bench.records import Reward
from qerl_bench.task.answers import answer_block, parse_number, well_formed


def judge_number(gold: str, completion: str, correct_weight: float, format_weight: float) -> Reward:
    """correct_weight for the right number in the answer block + format_weight for a well-formed completion."""
    block = answer_block(completion)
    number = None if block is None else parse_number(block)
    correct = number is not None and number == parse_number(gold)
    formed = well_formed(completion)
    return Reward(
        total=correct_weight * correct + format_weight * formed,
        correct=correct,
        parts={"correct": float(correct), "format": float(formed)},
    )
