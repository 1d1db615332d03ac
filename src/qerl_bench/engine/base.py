"""What a rollout engine is: prompts in, completions with their log-probabilities out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from qerl_bench.checks import require
from qerl_bench.records import Prompt, Rollout

if TYPE_CHECKING:
    from qerl_bench.config import Experiment
    from qerl_bench.model.policy import Policy


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to complete prompts. `seed` is hashed with each prompt's id and sample number, so a completion depends on
    nothing else that happens to be in the batch. Temperature 0 means greedy decoding.

    `top_p` keeps the fewest likeliest tokens whose probabilities add up to at least that much, and those exactly as
    likely as the last of them; 1 keeps all. It changes what is drawn, not what engine=hf reports: log-probabilities
    and entropies are those of all tokens, so that they can be compared with the trainer's."""

    samples: int
    temperature: float
    max_tokens: int
    seed: int
    top_p: float = 1.0


class RolloutEngine(Protocol):
    """Samples from the policy that is being trained."""

    def sync(self, prompts: list[Prompt]) -> dict[str, float]:
        """Take over the policy as it is now, noise included, and prove it on `prompts`: metrics.WEIGHT_SYNC, or nothing."""
        ...

    def require_room(self, prompts: list[Prompt], sampling: Sampling) -> None:
        """Raise ConfigError unless it can read every prompt and a completion of full length behind it."""
        ...

    def generate(self, prompts: list[Prompt], sampling: Sampling) -> list[Rollout]:
        """`sampling.samples` completions of each prompt, grouped by prompt in the order given.

        Where a prompt has `new_tokens`, its completions have exactly these lengths: no stop token ends them, and none
        is made less likely. An engine that cannot do that raises ConfigError.
        They come from the policy as it is now, whether or not `sync` was called. Raises TrainingStopped if its logits
        are not finite.
        """
        ...

    def sleep(self) -> dict[str, float]:
        """Give up what training could use until the next call; metrics of memory, if there are any."""
        ...

    def record(self) -> dict[str, Any]:
        """What samples, for engine.json: program, kernels, copies of the weights. Plain data."""
        ...

    def close(self) -> None:
        """Give back every resource."""


class EngineSpec(Protocol):
    """An engine option: `build` needs the policy, which exists only at run time."""

    @property
    def name(self) -> str: ...

    def check_with(self, experiment: Experiment) -> None:
        """Raise ConfigError if this engine cannot sample for `experiment`. Called while it is built; imports no torch."""
        ...

    def check(self, experiment: Experiment) -> None:
        """Raise ConfigError if what is installed cannot sample for `experiment`. Called before anything is written."""
        ...

    def build(self, policy: Policy) -> RolloutEngine: ...


def new_tokens(prompt: Prompt, samples: range, sampling: Sampling) -> list[int | None]:
    """The exact lengths of these samples of `prompt`, None where a stop token ends them. Raises ConfigError for lengths
    that the samples do not have, or that the limit does not allow."""
    if prompt.new_tokens is None:
        return [None] * len(samples)
    known, longest = len(prompt.new_tokens), max(prompt.new_tokens, default=0)
    require(
        samples.stop <= known and min(prompt.new_tokens) >= 1 and longest <= sampling.max_tokens,
        f"prompt {prompt.id} gives exact lengths of {known} completions, the longest {longest} tokens; they must be "
        f"those of {samples.stop} samples, of 1 to {sampling.max_tokens} tokens. Let the task draw as many as "
        "rollout.group_size, and none above task.max_completion_tokens",
    )
    return [prompt.new_tokens[sample] for sample in samples]


def rollout_of(
    policy: Policy,
    prompt: Prompt,
    sample: int,
    prompt_ids: list[int],
    token_ids: list[int],
    logprobs: list[float],
    entropies: list[float],
    sampling: Sampling,
) -> Rollout:
    """The record of one completion; `logprobs` and `entropies` have a number for each of its tokens."""
    if prompt.new_tokens is None:
        stopped = finished = token_ids[-1] in policy.stop_ids
    else:
        assert len(token_ids) == prompt.new_tokens[sample], (prompt.id, sample, len(token_ids), prompt.new_tokens)
        stopped, finished = False, len(token_ids) < sampling.max_tokens
    return Rollout(
        prompt=prompt,
        sample=sample,
        prompt_ids=prompt_ids,
        token_ids=token_ids,
        logprobs=logprobs,
        entropies=entropies,
        text=str(policy.tokenizer.decode(token_ids[:-1] if stopped else token_ids)),
        finished=finished,
    )


def require_room(policy: Policy, prompts: list[Prompt], sampling: Sampling, max_model_len: int | None = None) -> None:
    """`RolloutEngine.require_room` of an engine that reads what the model does, or at most `max_model_len` tokens."""
    context = policy.model.config.max_position_embeddings
    reader, remedy = "the model reads", "use a model of longer context"
    if max_model_len is not None and max_model_len < context:
        context, reader, remedy = max_model_len, "engine.max_model_len allows", "make that larger"
    lengths = [len(policy.ids_of(prompt)) for prompt in prompts]
    longest = max(lengths, default=0)
    too_long = sum(length + sampling.max_tokens > context for length in lengths)
    require(
        too_long == 0,
        f"{too_long} of {len(prompts)} prompts do not fit: {reader} {context} tokens, the longest prompt has "
        f"{longest}, and a completion may have {sampling.max_tokens}; {remedy}, use a smaller limit "
        "(task.max_completion_tokens, or eval.max_tokens where an evaluation sets it), or leave out long questions",
    )
