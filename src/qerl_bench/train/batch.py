"""The tensors of one step, made from rollouts or demonstrations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from operator import floordiv

import numpy as np
import torch

from qerl_bench.algo.base import Algorithm
from qerl_bench.model.context import require_one_rope
from qerl_bench.model.policy import Policy
from qerl_bench.model.shared_prompts import first_with_prompt, prompt_lengths
from qerl_bench.task.base import Task
from qerl_bench.train.spec import Specs
from qerl_core.checks import require
from qerl_core.records import Group

HOST = torch.device("cpu")  # where a batch is made and split; its parts go to the GPU
MOST_READ = 2  # tokens of a micro-batch that attention reads, over those that a pass may compute: they are kept too


@dataclass(frozen=True)
class Batch:
    """Right-padded sequences of one step. `sampler_logprobs` is 0 off the mask and for demonstrations."""

    input_ids: torch.Tensor  # (B, T) prompt, completion, padding
    mask: torch.Tensor  # (B, T) true on completion tokens
    sampler_logprobs: torch.Tensor  # (B, T) FP32
    advantages: torch.Tensor  # (B,) FP32
    lengths: torch.Tensor  # (B,) prompt + completion tokens

    def tensors(self) -> dict[str, torch.Tensor]:
        """All fields by name, for a dump."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def to(self, device: torch.device) -> Batch:
        return Batch(**{name: tensor.to(device) for name, tensor in self.tensors().items()})

    def micro_batches(
        self, tokens: int, selected: torch.Tensor, rows_of: Callable[[int, int], int] = floordiv
    ) -> list[torch.Tensor]:
        """The rows where `selected` (B,) is true, longest first, as index tensors.

        Each but one of a single row takes at most `tokens` tokens: rows x length of the longest. `rows_of` says how
        many rows of a length so many tokens are.
        """
        order = torch.argsort(self.lengths, descending=True, stable=True)
        rows = order[selected[order]]
        lengths, parts, start = self.lengths[rows].tolist(), [], 0
        while start < len(rows):
            parts.append(rows[start : start + max(1, rows_of(tokens, lengths[start]))])
            start += len(parts[-1])
        return parts

    def by_prompt(self, selected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows (R,) where `selected` (B,) is true, on the host, those of equal prompts side by side.

        And what each adds to the tokens of a pass (R,) that has computed the prompt of the row before. Prompts with the
        longest sequences come first, and of each its longest sequence.
        """
        rows = selected.nonzero()[:, 0]
        first = first_with_prompt(self.input_ids[rows], self.mask[rows])  # (R,) index in `rows`
        lengths = self.lengths[rows]
        longest = torch.zeros_like(lengths).scatter_reduce(0, first, lengths, "amax")[first]
        keys = torch.stack([-longest, first, -lengths], dim=1).tolist()
        order = torch.tensor(sorted(range(len(rows)), key=keys.__getitem__), dtype=torch.long)
        rows, first = rows[order], first[order]
        repeats = torch.nn.functional.pad(first, (1, 0), value=-1)[:-1] == first
        return rows, self.lengths[rows] - repeats * prompt_lengths(self.mask[rows])

    def sharing_micro_batches(self, tokens: int, selected: torch.Tensor) -> list[torch.Tensor]:
        """As `micro_batches`, for passes without padding that compute equal prompts once.

        Each but one of a single row computes at most `tokens` tokens, and attention reads at most `MOST_READ` times as
        many. A prompt whose rows do not fit is computed once in each micro-batch that has some of them.
        """
        rows, added = self.by_prompt(selected)
        parts: list[list[int]] = []
        computed = read = 0
        for row, more, length in zip(rows.tolist(), added.tolist(), self.lengths[rows].tolist(), strict=True):
            if not parts or computed + more > tokens or read + length > MOST_READ * tokens:
                parts.append([])
                computed, read, more = 0, 0, length
            parts[-1].append(row)
            computed, read = computed + more, read + length
        return [torch.tensor(part) for part in parts]

    def rows(self, rows: torch.Tensor) -> Batch:
        """The sequences `rows`, cut to the longest of them."""
        width = int(self.lengths[rows].max())
        return Batch(
            self.input_ids[rows, :width],
            self.mask[rows, :width],
            self.sampler_logprobs[rows, :width],
            self.advantages[rows],
            self.lengths[rows],
        )


def make_batch(
    prompts: Sequence[list[int]],
    completions: Sequence[list[int]],
    pad_id: int,
    device: torch.device,
    logprobs: list[list[float]] | None = None,
    advantages: torch.Tensor | None = None,
) -> Batch:
    """A Batch on `device` from the token ids of prompts and completions, one entry per sequence."""
    starts = torch.tensor([len(prompt) for prompt in prompts])
    lengths = starts + torch.tensor([len(completion) for completion in completions])
    columns = torch.arange(int(lengths.max()))
    real = columns < lengths[:, None]  # (B, T)
    mask = real & (columns >= starts[:, None])
    input_ids = torch.full(real.shape, pad_id)
    tokens = [*chain(*chain(*zip(prompts, completions, strict=True)))]
    input_ids[real] = torch.from_numpy(np.array(tokens, dtype=np.int64))  # torch.tensor takes ten times as long
    sampler_logprobs = torch.zeros(real.shape)
    if logprobs is not None:
        sampler_logprobs[mask] = torch.from_numpy(np.array([*chain(*logprobs)], dtype=np.float32))
    advantages = torch.zeros(len(prompts)) if advantages is None else advantages.float()
    return Batch(input_ids, mask, sampler_logprobs, advantages, lengths).to(device)


def rollout_batch(groups: list[Group], algo: Algorithm, policy: Policy) -> Batch:
    """The batch of one RL step, with the advantages of `algo`."""
    rewards = torch.tensor([[reward.total for reward in group.rewards] for group in groups])  # (P, G)
    lengths = torch.tensor([[len(rollout.token_ids) for rollout in group.rollouts] for group in groups])  # (P, G)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return make_batch(
        [rollout.prompt_ids for rollout in rollouts],
        [rollout.token_ids for rollout in rollouts],
        policy.pad_id,
        HOST,
        [rollout.logprobs for rollout in rollouts],
        advantages_of(algo, rewards, lengths).flatten(),
    )


def advantages_of(algo: Algorithm, rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The advantages of `algo`, (P, G). Raises ConfigError for another shape, which may be of an algorithm of a user's
    own: flattened, it would give a completion the advantage of another."""
    found = algo.advantages(rewards, lengths)
    shape = tuple(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
    require(
        shape == tuple(rewards.shape),
        f"{type(algo).__name__}.advantages must give a tensor of the shape of rewards, (prompts, completions of each), "
        f"here {tuple(rewards.shape)}, and gave {shape}",
    )
    return found


def demonstration_batch(task: Task, specs: Specs, policy: Policy, step: int) -> Batch:
    """The batch of one supervised step. Raises ConfigError if no demonstration is left."""
    count = specs.rollout.prompts_per_step
    demonstrations = task.demonstrations(step, count, specs.seed)
    if specs.algo.right_only:
        demonstrations = [one for one in demonstrations if task.reward(one.prompt, one.completion).correct]
        require(
            bool(demonstrations),
            f"algo.right_only=true leaves none of the {count} demonstrations of step {step} of task={task.name}: raise "
            "rollout.prompts_per_step, or set algo.right_only=false",
        )
    prompts, completions = policy.demonstration_ids(demonstrations)
    lengths = [len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True)]
    require_one_rope(policy.model, lengths, f"a demonstration of task={task.name}")
    return make_batch(prompts, completions, policy.pad_id, HOST)
