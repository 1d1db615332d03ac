"""The same answers, rewards and adapters for every trainer of `beside_trainers.py`, and what ours computes of them.

A model of two blocks with random weights; the tokens of the answers are random too. Losses are linear in rewards and
read tokens only through their log-probabilities, so it does not matter that nobody would give such answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from qerl_bench.config import build, compose
from qerl_bench.model.policy import Policy
from qerl_bench.model_setup import build_policy
from qerl_bench.parallel import ALONE
from qerl_bench.train.batch import rollout_batch
from qerl_bench.train.reduced_sizes import Size
from qerl_bench.train.update import StepAccumulator, add_gradients, micro_batches_of
from qerl_core.metrics import compute
from qerl_core.records import Group, Prompt, Reward, Rollout

LIMIT, GROUP = 12, 4  # tokens of an answer, answers to a prompt
PROMPTS = (5, 9, 3, 7)  # tokens
LENGTHS = (3, 5, 4, 8, 6, 2, 7, 5, LIMIT, 4, 9, 3, 10, 6, 5, 7)  # of the answers; that of LIMIT has no stop token
REWARDS = (1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.25, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0)  # the second group is dead
WORDS = [
    *("model=tiny_untrained", "model.layers=2", "model.hidden_size=64", "model.heads=4", "model.intermediate_size=128"),
    *("quant=bf16", "device=cpu", "eval=none", "lora.rank=4", f"task.max_completion_tokens={LIMIT}"),
    "optim.warmup_steps=0",
]
FIRST, MOVE = 0.15, 0.3  # standard deviations of the first adapter's matrices B, and of their move


@dataclass(frozen=True)
class Answers:
    """Answers in the order of their prompts, each group side by side."""

    prompts: list[list[int]]
    completions: list[list[int]]
    rewards: list[float]
    group: int
    eos: int
    pad: int

    @property
    def lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.completions]

    @property
    def finished(self) -> list[bool]:
        return [tokens[-1] == self.eos for tokens in self.completions]

    def rows(self, rows: Iterable[int]) -> Answers:
        chosen = [*rows]
        of = [[values[i] for i in chosen] for values in (self.prompts, self.completions, self.rewards)]
        return replace(self, prompts=of[0], completions=of[1], rewards=of[2])

    def without_dead_groups(self) -> Answers:
        groups = [range(i, i + self.group) for i in range(0, len(self.rewards), self.group)]
        return self.rows(i for group in groups if len({self.rewards[i] for i in group}) > 1 for i in group)


@dataclass(frozen=True)
class Numbers:
    """What one trainer makes of answers, with the first adapter and after a move of it, rewards and old ones kept."""

    advantages: list[float]
    dead: float  # share of groups that the trainer reports as without signal; NaN if it reports none
    tokens: int  # that are in the loss
    entropy: float  # as the trainer reports it, in nats
    kl: float  # likewise, to its reference; NaN if it reports none
    loss: tuple[float, float]
    gradient: tuple[torch.Tensor, torch.Tensor]  # each (n,) FP64, of the adapter's matrices in the order of their names
    clipped: float  # share of tokens that the clip has touched after the move, as the trainer reports it
    logged: dict[str, float] = field(default_factory=dict)  # all it logs by its names; of clips after the move

    @property
    def norm(self) -> tuple[float, float]:
        first, moved = self.gradient
        return float(first.norm()), float(moved.norm())


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The norm of the difference of two gradients over that of the second."""
    return float((one - other).norm() / other.norm())


def flat(parameters: Iterable[tuple[str, torch.Tensor]]) -> torch.Tensor:
    """One vector in FP64 of tensors of an adapter by name, whatever wraps the model."""
    named = {name[name.index("layers.") :].replace(".default", ""): tensor for name, tensor in parameters}
    return torch.cat([named[name].detach().double().flatten() for name in sorted(named)])


def gradient_of(model: torch.nn.Module) -> torch.Tensor:
    """That of the trained parameters, which is taken from them."""
    found = [(name, p.grad) for name, p in model.named_parameters() if p.requires_grad and p.grad is not None]
    gradient = flat(found)
    model.zero_grad(set_to_none=True)
    return gradient


class Ours:
    """Our policy with its two adapters, and the folders in which others read them."""

    def __init__(self, folder: Path) -> None:
        experiment = build(compose([*WORDS, f"root={folder}"]))
        self.model = experiment.model
        self.policy: Policy = build_policy(experiment, None, "cpu")
        self.lora: Any = experiment.lora
        self.first, self.moved = folder / "first", folder / "moved"
        generator = torch.Generator().manual_seed(0)
        for place, size in ((self.first, FIRST), (self.moved, MOVE)):
            with torch.no_grad():
                for name, parameter in self.policy.model.named_parameters():
                    if "lora_B" in name:
                        parameter += size * torch.randn(parameter.shape, generator=generator)
            self.policy.save(place)

    def answers(self, rewards: Sequence[float] = REWARDS, group: int = GROUP) -> Answers:
        tokenizer: Any = self.policy.tokenizer
        eos, pad = int(tokenizer.eos_token_id), self.policy.pad_id
        generator = torch.Generator().manual_seed(1)

        def tokens(count: int) -> list[int]:
            return torch.randint(0, 200, (count,), generator=generator).tolist()  # bytes, no special tokens

        ends = [*range(0, len(rewards), group), len(rewards)]
        sizes = [PROMPTS[i % len(PROMPTS)] for i in range(len(ends) - 1)]
        prompts = [of for size, (low, high) in zip(sizes, pairwise(ends), strict=True)
                   for of in [tokens(size)] for _ in range(high - low)]  # fmt: skip
        lengths = [LENGTHS[i % len(LENGTHS)] for i in range(len(rewards))]
        completions = [tokens(n) if n == LIMIT else [*tokens(n - 1), eos] for n in lengths]
        return Answers(prompts, completions, [*rewards], group, eos, pad)

    def numbers(self, answers: Answers, words: Sequence[str], parts: int = 1) -> Numbers:
        """Ours with `words`, in micro-batches of at most the tokens of a `parts`-th of the padded batch."""
        experiment = build(compose([*WORDS, *words]))
        self.policy.load(self.first)
        self.policy.train_mode(True)
        if experiment.algo.max_resampling_rounds:
            answers = answers.without_dead_groups()
        groups = groups_of(answers)
        batch = rollout_batch(groups, experiment.algo, self.policy)
        everything = torch.ones_like(batch.advantages, dtype=torch.bool)
        size = Size(batch.input_ids.numel() // parts, recorded=False)
        micro_batches = micro_batches_of(experiment, self.policy, batch, everything, 1, ALONE, size)
        losses, gradients, totals, moved = [], [], StepAccumulator(), {}
        for number, folder in enumerate((self.first, self.moved)):
            self.policy.load(folder)
            self.policy.model.zero_grad(set_to_none=True)
            results = [part for *_, part in add_gradients(experiment, self.policy, micro_batches, None, ALONE).results]
            losses.append(sum(float(part.loss) for part in results))
            gradients.append(gradient_of(self.policy.model))
            if number == 0:
                totals.include(results)
            else:
                moved = {name: sum(float(part.sums[name]) for part in results) for name in results[0].sums}
        found = totals.metrics(1, on_policy=True)
        tokens = sum(answers.lengths)
        moved = {name: value / tokens for name, value in moved.items() if name.startswith("clip_ratio")}
        return Numbers(
            batch.advantages.tolist(), 1 - sum(group.has_signal for group in groups) / len(groups), tokens,
            found["entropy_clean"], found.get("kl", math.nan), (losses[0], losses[1]), (gradients[0], gradients[1]),
            sum(moved.values()), compute.rollout_metrics(groups) | found | moved,
        )  # fmt: skip


def groups_of(answers: Answers) -> list[Group]:
    everything = zip(answers.prompts, answers.completions, answers.rewards, answers.finished, strict=True)
    rollouts = [
        (
            Rollout(
                prompt=Prompt(id=str(i // answers.group), messages=(), answer=""), sample=i % answers.group,
                prompt_ids=prompt, token_ids=tokens, logprobs=[0.0] * len(tokens), entropies=[0.0] * len(tokens),
                text="", finished=finished,
            ),
            Reward(total=reward, correct=reward == 1),
        )
        for i, (prompt, tokens, reward, finished) in enumerate(everything)
    ]  # fmt: skip
    starts = range(0, len(rollouts), answers.group)
    chunks = [rollouts[start : start + answers.group] for start in starts]
    return [Group(rollouts=[one for one, _ in chunk], rewards=[reward for _, reward in chunk]) for chunk in chunks]
