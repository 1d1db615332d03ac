"""engine=hf: sampling with the very model that is trained, through transformers, with a KV cache.

There is nothing to synchronise: same packed weights, same adapter, same noise. Tokens are drawn by inverse CDF from one
uniform number per (request, position), so batching cannot change a completion other than through rounding. On a GPU
the same numbers are made by the kernel that draws (`qerl_kernels.sampling`), and steps are replayed (`hf_graph`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from qerl_bench.checks import require_count
from qerl_bench.engine.base import RolloutEngine, Sampling, new_tokens, require_room, rollout_of
from qerl_bench.progress import bar
from qerl_bench.records import Prompt, Rollout
from qerl_bench.seeding import derive

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache

    from qerl_bench.config import Experiment
    from qerl_bench.model.policy import Policy

log = logging.getLogger(__name__)
Completion = tuple[list[int], list[float], list[float]]  # token ids, their log-probabilities, entropies


@dataclass(frozen=True, kw_only=True)
class HF:
    """Sample with transformers inside the training process."""

    name: str
    max_num_seqs: int

    def __post_init__(self) -> None:
        require_count("engine.max_num_seqs", self.max_num_seqs)

    def check_with(self, experiment: Experiment) -> None:
        """Samples for every experiment."""

    def check(self, experiment: Experiment) -> None:
        """Needs nothing."""

    def build(self, policy: Policy) -> RolloutEngine:
        return HfEngine(policy, self.max_num_seqs)


class HfEngine:
    """Batched sampling from `policy`, at most `max_num_seqs` sequences side by side."""

    def __init__(self, policy: Policy, max_num_seqs: int) -> None:
        from qerl_bench.engine import hf_graph

        self.policy = policy
        self.max_num_seqs = max_num_seqs
        reason = hf_graph.eager_reason(policy)
        self.decoding = "cuda graphs" if reason is None else f"eager: {reason}"
        self.decode = hf_graph.decode if reason is None else decode
        log.info("sampling: %s", self.decoding)

    def sync(self, prompts: list[Prompt]) -> dict[str, float]:
        """Nothing to bring over: the policy itself samples."""
        return {}

    def sleep(self) -> dict[str, float]:
        """Nothing to give up."""
        return {}

    def record(self) -> dict[str, Any]:
        return {"engine": "hf", "copies_of_weights": 1, "decoding": self.decoding}

    def require_room(self, prompts: list[Prompt], sampling: Sampling) -> None:
        require_room(self.policy, prompts, sampling)

    def generate(self, prompts: list[Prompt], sampling: Sampling) -> list[Rollout]:
        self.require_room(prompts, sampling)
        rollouts: list[Rollout] = []
        per_round = max(1, self.max_num_seqs // sampling.samples)
        starts = range(0, len(prompts), per_round)
        for start in bar(starts, "sampling") if len(starts) > 1 else starts:
            for first in range(0, sampling.samples, self.max_num_seqs):  # more than one round where a group is larger
                numbers = range(first, min(first + self.max_num_seqs, sampling.samples))
                rollouts += self._round(prompts[start : start + per_round], numbers, sampling)
        return rollouts

    def close(self) -> None:
        """Nothing is held between calls: the KV cache lives for one round."""

    def _round(self, prompts: list[Prompt], samples: range, sampling: Sampling) -> list[Rollout]:
        import torch

        from qerl_bench.train.nonfinite import require_finite_logits

        requests = [(prompt, sample) for prompt in prompts for sample in samples]
        prompt_ids = [self.policy.ids_of(prompt) for prompt in prompts]
        keys = [request_key(sampling, prompt.id, sample) for prompt, sample in requests]
        lengths = [length for prompt in prompts for length in new_tokens(prompt, samples, sampling)]
        with torch.inference_mode():
            drawn = self.decode(self.policy, prompt_ids, sampling, keys, lengths)
        rollouts = [
            rollout_of(self.policy, prompt, sample, prompt_ids[i // len(samples)], *drawn[i], sampling)
            for i, (prompt, sample) in enumerate(requests)
        ]
        require_finite_logits(self.policy, rollouts)
        return rollouts


def request_key(sampling: Sampling, prompt_id: str, sample: int) -> int:
    """The key of a request's random numbers, which go by position."""
    return derive(sampling.seed, prompt_id, sample)


class Read(NamedTuple):
    """What the model made of P prompts, padded on the left to W tokens."""

    mask: torch.Tensor  # (P, W), 0 at padding
    cache: DynamicCache
    position: torch.Tensor  # (P, 1) of the last token
    logits: torch.Tensor  # (P, V) behind it


def read_prompts(policy: Policy, prompt_ids: list[list[int]]) -> Read:
    """Read each prompt once."""
    import torch
    from transformers import DynamicCache

    device = policy.device
    width = max(len(ids) for ids in prompt_ids)
    tokens = torch.tensor([[policy.pad_id] * (width - len(ids)) + ids for ids in prompt_ids], device=device)  # (P, W)
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids], device=device)
    cache = DynamicCache(config=policy.model.config)
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    output = policy.model(
        input_ids=tokens,
        attention_mask=mask,
        position_ids=position,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return Read(mask, cache, position[:, -1:], output.logits[:, -1])


class Ends:
    """When each of N requests is done: at a stop token, or at the exact length that it has in `lengths`."""

    def __init__(self, policy: Policy, sampling: Sampling, count: int, lengths: Sequence[int | None] | None) -> None:
        import torch

        exact = lengths or [None] * count
        self.stop = torch.tensor(sorted(policy.stop_ids), device=policy.device)
        self.exact = torch.tensor([length or 0 for length in exact], device=policy.device)  # (N,) 0: at a stop token
        self.most = max(sampling.max_tokens if length is None else length for length in exact)

    def at(self, drawn: int, tokens: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Whether the requests `rows` (R,) are done with `drawn` tokens, the latest of which are `tokens` (R, T)."""
        import torch

        exact = self.exact[rows]
        return torch.where(exact > 0, drawn >= exact, torch.isin(tokens, self.stop).any(1))

    def lengths(self, ids: torch.Tensor) -> torch.Tensor:
        """The length (N,) of each request, of what was drawn (N, T) and may go on behind its end."""
        import torch

        ends = torch.isin(ids, self.stop)
        stopped = torch.where(ends.any(1), ends.int().argmax(1) + 1, self.most)
        return torch.where(self.exact > 0, self.exact, stopped)


def decode(
    policy: Policy,
    prompt_ids: list[list[int]],
    sampling: Sampling,
    keys: list[int],
    lengths: Sequence[int | None] | None = None,
) -> list[Completion]:
    """Token ids, log-probabilities and entropies of each request, named by its key: the same number of requests for
    each prompt, those of one prompt side by side. A request with a number in `lengths` gets exactly so many tokens.

    Prompts are read once; the cache is then repeated for the samples of a group. Rows that are done leave the batch as
    soon as they are half of it.
    """
    import torch

    from qerl_kernels.sampling import draw, draw_seeded, uniforms

    device, count = policy.device, len(keys)
    ends = Ends(policy, sampling, count, lengths)
    samples = count // len(prompt_ids)
    read = read_prompts(policy, prompt_ids)
    cache = read.cache
    cache.batch_repeat_interleave(samples)
    mask, position, logits = (x.repeat_interleave(samples, 0) for x in (read.mask, read.position, read.logits))
    rows = torch.arange(count, device=device)  # which request each row of the batch belongs to
    ids = torch.full((count, sampling.max_tokens), -1, dtype=torch.long, device=device)
    logprobs, entropies = (torch.zeros(count, sampling.max_tokens, device=device) for _ in range(2))
    alive = torch.ones(count, dtype=torch.bool, device=device)
    seeds = torch.tensor(keys, device=device)
    numbers = None if policy.fused else torch.from_numpy(uniforms(keys, sampling.max_tokens)).to(device)
    for t in range(ends.most):
        if numbers is None:
            token, logprob, entropy = draw_seeded(logits, sampling.temperature, seeds[rows], t, top_p=sampling.top_p)
        else:
            token, logprob, entropy = draw(logits, sampling.temperature, numbers[rows, t], top_p=sampling.top_p)
        writing = rows[alive]
        ids[writing, t], logprobs[writing, t], entropies[writing, t] = token[alive], logprob[alive], entropy[alive]
        alive = alive & ~ends.at(t + 1, token[:, None], rows)
        left = int(alive.sum())
        if left == 0 or t + 1 == ends.most:
            break
        if left <= len(rows) // 2:
            keep = alive.nonzero()[:, 0]
            cache.batch_select_indices(keep)
            rows, token, mask, position, alive = rows[keep], token[keep], mask[keep], position[keep], alive[keep]
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        position = position + 1
        output = policy.model(
            input_ids=token[:, None], attention_mask=mask, position_ids=position, past_key_values=cache, use_cache=True
        )
        logits = output.logits[:, -1]
    return completions((ids >= 0).sum(1), ids, logprobs, entropies)


def completions(
    lengths: torch.Tensor, ids: torch.Tensor, logprobs: torch.Tensor, entropies: torch.Tensor
) -> list[Completion]:
    """What was drawn, each row (N, T) cut to its length (N,)."""
    columns = (column.tolist() for column in (lengths, ids, logprobs, entropies))
    return [(row[:n], logps[:n], nats[:n]) for n, row, logps, nats in zip(*columns, strict=True)]
