"""From rollouts or demonstrations to the tensors of one optimiser step."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences of one optimiser step. `sampler_logprobs` is 0 off the mask and for demonstrations."""

    input_ids: torch.Tensor  # (B, T) prompt, completion, padding
    mask: torch.Tensor  # (B, T) true on completion tokens
    sampler_logprobs: torch.Tensor  # (B, T) FP32
    advantages: torch.Tensor  # (B,) FP32
    lengths: torch.Tensor  # (B,) prompt + completion tokens

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every field by its name, for a dump."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def micro_batches(self, size: int, among: torch.Tensor) -> list[torch.Tensor]:
        """The rows where `among` (B,) is true as index tensors of at most `size`, of similar length, longest first."""
        order = torch.argsort(self.lengths, descending=True, stable=True)
        chosen = order[among[order]]
        return list(chosen.split(size)) if len(chosen) > 0 else []

    def rows(self, rows: torch.Tensor) -> Batch:
        """These sequences alone, cut to the longest of them."""
        width = int(self.lengths[rows].max())
        return Batch(
            self.input_ids[rows, :width],
            self.mask[rows, :width],
            self.sampler_logprobs[rows, :width],
            self.advantages[rows],
            self.lengths[rows],
        )


def make_batch(
    prompts: list[list[int]],
    completions: list[list[int]],
    pad_id: int,
    device: torch.device,
    logprobs: list[list[float]] | None = None,
    advantages: torch.Tensor | None = None,
) -> Batch:
    """Token ids of prompts and completions (one entry a sequence) as a Batch on `device`."""
    count = len(prompts)
    lengths = torch.tensor([len(p) + len(c) for p, c in zip(prompts, completions, strict=True)])
    width = int(lengths.max())
    input_ids = torch.full((count, width), pad_id)
    mask = torch.zeros(count, width, dtype=torch.bool)
    sampler_logprobs = torch.zeros(count, width)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        end = len(prompt) + len(completion)
        input_ids[row, :end] = torch.tensor([*prompt, *completion])
        mask[row, len(prompt) : end] = True
        if logprobs is not None:
            sampler_logprobs[row, len(prompt) : end] = torch.tensor(logprobs[row])
    advantages = torch.zeros(count) if advantages is None else advantages.float()
    return Batch(
        input_ids.to(device), mask.to(device), sampler_logprobs.to(device), advantages.to(device), lengths.to(device)
    )
