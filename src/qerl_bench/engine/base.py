"""The protocols of rollout engines: prompts in, completions with their log-probabilities out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from qerl_bench.model.context import longest_context, rope_switch
from qerl_core.checks import require
from qerl_core.records import Prompt, Rollout

if TYPE_CHECKING:
    from qerl_bench.model.policy import Policy
    from qerl_bench.quant.base import WeightFormat

Completion = tuple[list[int], list[float], list[float]]  # token ids, their log-probabilities, entropies


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to complete prompts. `seed` is hashed with each prompt's id, occurrence and sample number, so a completion
    does not depend on what else is in the batch. Temperature 0 means greedy decoding.

    `top_p` keeps the smallest set of most likely tokens whose probabilities sum to at least top_p, and all tokens
    exactly as likely as the last of them; 1 keeps all. It changes which tokens are drawn but not what engine=hf
    reports: log-probabilities and entropies are over all tokens, so they can be compared with the trainer's.
    """

    samples: int
    temperature: float
    max_tokens: int
    seed: int
    top_p: float = 1.0
    fixed_rows: bool = False  # as many at a time as set, or none: not fewer where memory runs out


class RolloutEngine(Protocol):
    """Samples from the policy in training.

    One that does so in the memory of training may be a `SharesMemory` of `train/trainer_state.py` too.
    """

    def sync(self, prompts: list[Prompt]) -> dict[str, float]:
        """Copy the policy as it is now, noise included, and check the copy on `prompts`.

        Returns the `sync/*` metrics; empty for an engine without weights of its own.
        """
        ...

    def require_room(self, prompts: list[Prompt], sampling: Sampling) -> None:
        """Raise ConfigError unless every prompt, followed by a completion of maximal length, fits into the context."""
        ...

    def generate(self, prompts: list[Prompt], sampling: Sampling) -> list[Rollout]:
        """`sampling.samples` completions of each prompt, grouped by prompt, in the order given.

        A prompt that is given twice is drawn twice, as two occurrences.

        The completions of a prompt with `new_tokens` have exactly these lengths; stop tokens are drawn but ignored. An
        engine that cannot do that raises ConfigError. Samples come from the policy as it is now, even without `sync`.
        Raises TrainingStopped if logits are not finite.
        """
        ...

    def prompts_at_once(self, samples: int) -> int:
        """How many prompts with `samples` completions each it samples together."""
        ...

    def sleep(self) -> dict[str, float]:
        """Release memory that training can use until the next call. Returns memory metrics, if there are any."""
        ...

    def record(self) -> dict[str, Any]:
        """What samples: program, kernels, copies of the weights. Plain data for engine.json."""
        ...

    def close(self) -> None:
        """Release all resources."""


class WrappedEngine:
    """What an engine around another leaves to it."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine

    def sync(self, prompts: list[Prompt]) -> dict[str, float]:
        return self.engine.sync(prompts)

    def require_room(self, prompts: list[Prompt], sampling: Sampling) -> None:
        self.engine.require_room(prompts, sampling)

    def prompts_at_once(self, samples: int) -> int:
        return self.engine.prompts_at_once(samples)

    def close(self) -> None:
        self.engine.close()


def innermost(engine: RolloutEngine) -> RolloutEngine:
    while isinstance(engine, WrappedEngine):
        engine = engine.engine
    return engine


class EngineSpec(Protocol):
    """An engine option."""

    @property
    def name(self) -> str: ...
    @property
    def kv_formats(self) -> Collection[str]:
        """What keys and values can be rounded to as they are written, `none` among them."""
        ...

    def check_with(self, shape: Mapping[str, Any], dtype: str, lora_rank: int, longest_completion: int) -> None:
        """Raise ConfigError if this engine cannot sample for such an experiment. Called when a config is built.

        `shape` is the model's config.json as far as it is known, `longest_completion` the largest token limit.
        """
        ...

    def check(self, device: str, quant: WeightFormat) -> None:
        """Raise ConfigError if the installed packages cannot sample. Called before anything is written."""
        ...

    def build(self, policy: Policy) -> RolloutEngine: ...


def exact_lengths(prompt: Prompt, samples: range, sampling: Sampling) -> list[int | None]:
    """The exact lengths of these samples of `prompt`; None for samples that end at a stop token.

    Raises ConfigError if a sample has no length, or one above the limit.
    """
    if prompt.new_tokens is None:
        return [None] * len(samples)
    known, longest = len(prompt.new_tokens), max(prompt.new_tokens, default=0)
    require(
        samples.stop <= known and min(prompt.new_tokens) >= 1 and longest <= sampling.max_tokens,
        f"prompt {prompt.id} gives exact lengths of {known} completions, the longest {longest} tokens; it must give "
        f"{samples.stop} lengths of 1 to {sampling.max_tokens} tokens. Let the task draw rollout.group_size lengths, "
        "none above task.max_completion_tokens",
    )
    return [prompt.new_tokens[sample] for sample in samples]


def make_rollouts(
    policy: Policy,
    requests: Sequence[tuple[Prompt, int]],
    prompt_ids: Sequence[list[int]],
    completions: Sequence[Completion],
    sampling: Sampling,
) -> list[Rollout]:
    """The records of the completions of `requests`, each a prompt, which has `prompt_ids`, and a sample of it."""
    stopped, written = [], []
    for (prompt, sample), (ids, *_) in zip(requests, completions, strict=True):
        exact = None if prompt.new_tokens is None else prompt.new_tokens[sample]
        assert exact in (None, len(ids)), (prompt.id, sample, len(ids), prompt.new_tokens)
        stopped.append(exact is None and ids[-1] in policy.stop_ids)
        written.append(ids[:-1] if stopped[-1] else ids)
    texts = policy.completion_texts(prompt_ids, written)
    return [
        Rollout(
            prompt=prompt,
            sample=sample,
            prompt_ids=of_prompt,
            token_ids=token_ids,
            logprobs=logprobs,
            entropies=entropies,
            text=text,
            finished=stop or (prompt.new_tokens is not None and len(token_ids) < sampling.max_tokens),
        )
        for (prompt, sample), of_prompt, (token_ids, logprobs, entropies), stop, text in zip(
            requests, prompt_ids, completions, stopped, texts, strict=True
        )
    ]


def require_room(
    policy: Policy, prompts: list[Prompt], sampling: Sampling, max_model_len: int | None = None
) -> list[list[int]]:
    """The token ids of `prompts`.

    Raises ConfigError unless they and their completions fit into the model's context and into `max_model_len`.
    """
    context = longest_context(policy.model)
    limit, remedy = "the model reads", "use a model with a longer context"
    if context is not None and context == rope_switch(policy.model.config.get_text_config().to_dict()):
        limit = "with its first rotary factors (longrope) the model reads"
    if max_model_len is not None and (context is None or max_model_len < context):
        context, limit, remedy = max_model_len, "engine.max_model_len allows", "make that larger"
    prompt_ids = policy.ids_of_each(prompts)
    lengths = [len(ids) for ids in prompt_ids]
    longest = max(lengths, default=0)
    too_long = 0 if context is None else sum(length + sampling.max_tokens > context for length in lengths)
    require(
        too_long == 0,
        f"{too_long} of {len(prompts)} prompts do not fit: {limit} {context} tokens, the longest prompt has "
        f"{longest}, and a completion may have {sampling.max_tokens}; {remedy}, lower the completion limit "
        "(task.max_completion_tokens, or eval.max_tokens if an evaluation sets it), or leave out long questions",
    )
    return prompt_ids
