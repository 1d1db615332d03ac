"""What a rollout engine is: prompts in, completions with their log-probabilities out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from qerl_bench.errors import require
from qerl_bench.records import Prompt, Rollout

if TYPE_CHECKING:
    from qerl_bench.config import Experiment
    from qerl_bench.policy import Policy


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
        """Take over the policy as it is now, noise included, and prove it on `prompts`: metrics.SYNCED, or nothing."""
        ...

    def require_room(self, prompts: list[Prompt], sampling: Sampling) -> None:
        """Raise BadInput unless it can read every prompt and a completion of full length behind it."""
        ...

    def generate(self, prompts: list[Prompt], sampling: Sampling) -> list[Rollout]:
        """`sampling.samples` completions of each prompt, grouped by prompt in the order given.

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
        """Raise BadInput if this engine cannot sample for `experiment`. Called while it is built; imports no torch."""
        ...

    def check(self, experiment: Experiment) -> None:
        """Raise BadInput if what is installed cannot sample for `experiment`. Called before anything is written."""
        ...

    def build(self, policy: Policy) -> RolloutEngine: ...


def require_room(policy: Policy, prompts: list[Prompt], sampling: Sampling, max_model_len: int | None = None) -> None:
    """`RolloutEngine.require_room` of an engine that reads what the model does, or at most `max_model_len` tokens."""
    context = policy.model.config.max_position_embeddings
    reader, remedy = "the model reads", "use a model of longer context"
    if max_model_len is not None and max_model_len < context:
        context, reader, remedy = max_model_len, "engine.max_model_len allows", "make that larger"
    lengths = [len(policy.prompt_ids(prompt.messages)) for prompt in prompts]
    longest = max(lengths, default=0)
    too_long = sum(length + sampling.max_tokens > context for length in lengths)
    require(
        too_long == 0,
        f"{too_long} of {len(prompts)} prompts do not fit: {reader} {context} tokens, the longest prompt has "
        f"{longest}, and a completion may have {sampling.max_tokens}; {remedy}, use a smaller limit "
        "(task.max_completion_tokens, or eval.max_tokens where an evaluation sets it), or leave out long questions",
    )
