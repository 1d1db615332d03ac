"""The records that task, engine, algorithm and evaluator exchange.

Plain data without torch, so that tasks and analysis can use them without it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

PER_NAT = 1000  # rollouts.jsonl has thousandths of nats, as whole numbers
Message = dict[str, str]  # {"role": "system" | "user", "content": text}, as chat templates take it
RENDERED = "rendered"  # role of a single message that is the whole prompt as text: no chat template is applied to it


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One question. `id` is unique within its task and split, and the same in every run.

    `token_ids`, if given, are the prompt itself: neither tokenizer nor chat template is used. `new_tokens`, if given,
    are the exact lengths of its completions, one for each sample; a stop token does not end them. `occurrence` counts
    the places that it has in one step, from 0: each is drawn by random numbers of its own.
    """

    id: str
    messages: tuple[Message, ...]
    answer: str  # the gold answer as the task's reward reads it
    question: str = ""  # the bare question, without instruction or template
    token_ids: tuple[int, ...] | None = None
    new_tokens: tuple[int, ...] | None = None
    occurrence: int = 0

    @property
    def draw(self) -> str:
        """What the seeds of its completions are derived from."""
        return f"{self.id}#{self.occurrence}" if self.occurrence else self.id


def numbered(prompts: Iterable[Prompt]) -> list[Prompt]:
    """`prompts`, of which those that would be drawn like one before them are further occurrences."""
    taken: set[str] = set()
    after: dict[str, int] = {}  # by id, an occurrence above all that are taken
    told_apart = []
    for prompt in prompts:
        if prompt.draw in taken:
            prompt = replace(prompt, occurrence=after[prompt.id])
        taken.add(prompt.draw)
        after[prompt.id] = max(after.get(prompt.id, 0), prompt.occurrence + 1)
        told_apart.append(prompt)
    return told_apart


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """A prompt with a completion to imitate, for algo=sft."""

    prompt: Prompt
    completion: str


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One sampled completion. If `finished`, `token_ids` ends with the stop token, unless `Prompt.new_tokens` sets its
    length.

    `logprobs` and `entropies` (nats, full vocabulary) have one number per token of `token_ids`. They are those of the
    policy that sampled, noise included, at the rollout temperature.
    """

    prompt: Prompt
    sample: int  # 0..G-1 within the prompt's group
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    entropies: list[float]
    text: str  # decoded completion without the stop token, after a <think> that the prompt ends with
    finished: bool  # ended with a stop token or below the token limit; False: cut at the limit


@dataclass(frozen=True, kw_only=True)
class Reward:
    """`total` is what the algorithm maximizes; `parts` are its summands before weighting, each in [0, 1].

    `answer` is the graded answer in a normal form that does not depend on how it was written; None if none was found.
    """

    total: float
    correct: bool
    parts: dict[str, float] = field(default_factory=dict)
    answer: str | None = None


@dataclass(frozen=True, kw_only=True)
class Group:
    """The G completions of one prompt and their rewards."""

    rollouts: list[Rollout]
    rewards: list[Reward]

    @property
    def has_signal(self) -> bool:
        """Whether the rewards differ. With equal rewards every advantage is 0 and the group teaches nothing."""
        return len({reward.total for reward in self.rewards}) > 1
