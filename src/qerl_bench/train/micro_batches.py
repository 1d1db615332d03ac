"""The parts of a batch that are trained on one after the other, and what is known of each between updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import floordiv
from random import Random

import torch

from qerl_bench.model.packing import Packing
from qerl_bench.train.batch import Batch
from qerl_bench.train.recorded_passes import PaddedInputs, rows_that_fit


@dataclass
class MicroBatch:
    """A micro-batch on the policy's device, and the numbers that stay fixed through all updates on it."""

    batch: Batch
    layout: Packing  # of its mask
    completed: torch.Tensor  # (C,) the rows with completion tokens
    loss_weights: torch.Tensor  # (B,) how much each token of a completion counts in the loss of the step
    has_gradient: bool  # False: the loss is 0 whatever the policy, so it needs no backward pass
    logprobs: torch.Tensor | None = None  # (B, T) of the latest pass, without gradient
    old_logprobs: torch.Tensor | None = None  # (B, T), None before the first update
    reference_logprobs: torch.Tensor | None = None  # (B, T)
    importance_weights: torch.Tensor | None = None  # (B, T) old / sampler, truncated or masked
    padded: PaddedInputs | None = None  # with fixed shapes, if its pass can be recorded
    tokens_of: tuple[tuple[int, int], ...] = ()  # for each sequence its row in the step's batch, and its tokens
    measures_noise: bool = True  # whether it may make a pass only to measure the mismatch that noise makes
    measures_base: bool = False  # whether it makes a pass of the base to measure kl_to_base


def split(
    batch: Batch,
    loss_weights: torch.Tensor,
    has_gradient: torch.Tensor,
    rows: torch.Tensor,
    tokens: int,
    device: torch.device,
    pad_id: int | None = None,
    shares_prompts: bool = False,
) -> list[MicroBatch]:
    """Micro-batches of at most `tokens` tokens on `device` of the sequences `rows` (B,).

    First those where `has_gradient` (B,), then the others. `batch` and the other tensors are on the host.
    `loss_weights` (B,) are made from the lengths of the whole batch, so the losses of micro-batches add up. With
    `pad_id` they have their tensors in fixed shapes too, and take at most `tokens` tokens with the padding of these.
    With `shares_prompts` passes compute equal prompts once, in fixed shapes each.
    """

    def parts(selected: torch.Tensor) -> list[torch.Tensor]:
        if shares_prompts and pad_id is None:
            return batch.sharing_micro_batches(tokens, selected)
        return batch.micro_batches(tokens, selected, floordiv if pad_id is None else rows_that_fit)

    return [
        MicroBatch(
            part.to(device),
            Packing.from_mask(part.mask, part.input_ids if shares_prompts else None).to(device),
            part.mask.any(1).nonzero()[:, 0].to(device),
            loss_weights[chosen].to(device),
            has_gradient=value,
            padded=None if pad_id is None else PaddedInputs.of(part, loss_weights[chosen], pad_id).to(device),
            tokens_of=tuple(zip(chosen.tolist(), part.mask.sum(1).tolist(), strict=True)),
        )
        for value, selected in ((True, has_gradient & rows), (False, ~has_gradient & rows))
        for chosen in parts(selected)
        for part in [batch.rows(chosen)]
    ]


def sample_measured(micro_batches: list[MicroBatch], share: float, seed: int, base: bool = False) -> None:
    """Let `share` of the micro-batches, drawn by `seed`, at least one, measure the mismatch that noise makes.

    And, if `base`, the KL to the base.
    """
    count = max(1, math.ceil(share * len(micro_batches)))
    drawn = Random(seed).sample(range(len(micro_batches)), min(count, len(micro_batches)))
    for index, micro_batch in enumerate(micro_batches):
        micro_batch.measures_noise = index in drawn
        micro_batch.measures_base = base and index in drawn


def carry_over(old: Sequence[MicroBatch], new: Sequence[MicroBatch]) -> None:
    """Give the sequences in `new` the numbers that stay fixed, which they had in other micro-batches, `old`."""
    for name in ("old_logprobs", "reference_logprobs", "importance_weights"):
        by_row = {
            row: numbers
            for micro_batch in old
            if (tensor := getattr(micro_batch, name)) is not None
            for (row, _), numbers in zip(micro_batch.tokens_of, tensor, strict=True)
        }
        for micro_batch in new if by_row else ():
            width = micro_batch.batch.mask.shape[1]
            rows = [by_row[row][:width] for row, _ in micro_batch.tokens_of]
            padded = [torch.nn.functional.pad(numbers, (0, width - len(numbers))) for numbers in rows]
            setattr(micro_batch, name, torch.stack(padded))
