"""engine=hf: sampling in the training process, from the same weights that are trained.

There is nothing to synchronize: base, adapter and noise are the trainer's. On a GPU with fused kernels each decoding
step is replayed as a CUDA graph (hf_graph.py); otherwise transformers decodes (hf_reference.py). Each token is drawn by
inverse CDF from a uniform number that belongs to its request and position, so batching changes completions only through
rounding.

A *request* is one sample of one prompt. A *chunk* is at most `max_num_seqs` requests that are sampled together.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qerl_bench.checks import check_fields, count
from qerl_bench.engine.base import RolloutEngine, Sampling, exact_lengths, make_rollout, require_room
from qerl_bench.progress import bar
from qerl_bench.records import Prompt, Rollout
from qerl_bench.seeding import derive

if TYPE_CHECKING:
    from collections.abc import Mapping

    from qerl_bench.model.policy import Policy
    from qerl_bench.quant.base import WeightFormat

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HF:
    """Sample in the training process."""

    name: str
    max_num_seqs: int

    def __post_init__(self) -> None:
        check_fields(self, "engine", max_num_seqs=count())

    def check_with(self, shape: Mapping[str, Any], dtype: str, lora_rank: int, longest_completion: int) -> None:
        """Works with every experiment."""

    def check(self, device: str, quant: WeightFormat) -> None:
        """Needs no further package."""

    def build(self, policy: Policy) -> RolloutEngine:
        return HFEngine(policy, self.max_num_seqs)


class HFEngine:
    """Batched sampling from `policy`, in chunks of at most `max_num_seqs` requests."""

    def __init__(self, policy: Policy, max_num_seqs: int) -> None:
        from qerl_bench.engine import hf_graph, hf_reference

        self.policy = policy
        self.max_num_seqs = max_num_seqs
        reason = hf_graph.eager_reason(policy)
        self.decoding = "cuda graphs" if reason is None else f"eager: {reason}"
        self.decode = hf_graph.decode if reason is None else hf_reference.decode
        log.info("sampling: %s", self.decoding)

    def sync(self, prompts: list[Prompt]) -> dict[str, float]:
        """Nothing to copy: the policy itself samples."""
        return {}

    def sleep(self) -> dict[str, float]:
        """Nothing to release: the KV cache is freed after each chunk."""
        return {}

    def record(self) -> dict[str, Any]:
        return {"engine": "hf", "copies_of_weights": 1, "decoding": self.decoding}

    def require_room(self, prompts: list[Prompt], sampling: Sampling) -> None:
        require_room(self.policy, prompts, sampling)

    def prompts_at_once(self, samples: int) -> int:
        return max(1, self.max_num_seqs // samples)

    def generate(self, prompts: list[Prompt], sampling: Sampling) -> list[Rollout]:
        self.require_room(prompts, sampling)
        rollouts: list[Rollout] = []
        prompts_per_chunk = self.prompts_at_once(sampling.samples)
        starts = range(0, len(prompts), prompts_per_chunk)
        for start in bar(starts, "sampling") if len(starts) > 1 else starts:
            for first in range(0, sampling.samples, self.max_num_seqs):  # a large group takes several chunks
                samples = range(first, min(first + self.max_num_seqs, sampling.samples))
                rollouts += self._sample_chunk(prompts[start : start + prompts_per_chunk], samples, sampling)
        return rollouts

    def close(self) -> None:
        """Nothing to release."""

    def _sample_chunk(self, prompts: list[Prompt], samples: range, sampling: Sampling) -> list[Rollout]:
        import torch

        from qerl_bench.train.nonfinite import require_finite_logits

        requests = [(prompt, sample) for prompt in prompts for sample in samples]
        prompt_ids = [self.policy.ids_of(prompt) for prompt in prompts]
        keys = [request_key(sampling, prompt.id, sample) for prompt, sample in requests]
        lengths = [length for prompt in prompts for length in exact_lengths(prompt, samples, sampling)]
        with torch.inference_mode():
            completions = self.decode(self.policy, prompt_ids, sampling, keys, lengths)
        rollouts = [
            make_rollout(self.policy, prompt, sample, prompt_ids[i // len(samples)], *completions[i], sampling)
            for i, (prompt, sample) in enumerate(requests)
        ]
        require_finite_logits(self.policy, rollouts)
        return rollouts


def request_key(sampling: Sampling, prompt_id: str, sample: int) -> int:
    """The seed of a request's random numbers, one for each position."""
    return derive(sampling.seed, prompt_id, sample)
