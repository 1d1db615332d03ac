"""The records that cross borders between task, engine, algorithm and evaluator.

Everything here is plain data and imports no torch, so tasks and analysis can be used without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Message = dict[str, str]  # {"role": "system" | "user", "content": text}, as chat templates take it
RENDERED = "rendered"  # role of a single message that is the whole prompt as text: no chat template is applied to it


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One question. `id` is unique within its task and split and stable between runs.

    Where lengths are what a run is about, `token_ids` are the prompt, and no tokenizer or chat template is asked;
    `new_tokens` are the exact lengths of its completions, sample by sample, which then no stop token ends.
    """

    id: str
    messages: tuple[Message, ...]
    answer: str  # the gold answer as the task's reward reads it
    question: str = ""  # the bare question, without instruction or template
    token_ids: tuple[int, ...] | None = None
    new_tokens: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Demonstration:
    """A prompt with a completion to imitate, for algo=sft."""

    prompt: Prompt
    completion: str


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One sampled completion. `token_ids` ends with the stop token when `finished` is true, unless its prompt says how
    long it is to be.

    `logprobs` and `entropies` (nats, full vocabulary) belong to the policy that sampled, noise included, at the
    rollout temperature; one number per token of `token_ids`.
    """

    prompt: Prompt
    sample: int  # 0..G-1 within the prompt's group
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    entropies: list[float]
    text: str  # decoded completion without the stop token
    finished: bool  # it ended below the token limit, or with a stop token; false = cut at the limit


@dataclass(frozen=True, kw_only=True)
class Reward:
    """`total` is what the algorithm optimises; `parts` are its addends before weighting, each in [0, 1].

    `answer` is the answer that was judged, in a form that is the same for every way to write it; None: none was found.
    """

    total: float
    correct: bool
    parts: dict[str, float] = field(default_factory=dict)
    answer: str | None = None


@dataclass(frozen=True, kw_only=True)
class Group:
    """The G completions of one prompt and what they earned."""

    rollouts: list[Rollout]
    rewards: list[Reward]

    @property
    def degenerate(self) -> bool:
        """All rewards are equal, so that no completion is better than another."""
        return len({reward.total for reward in self.rewards}) == 1
