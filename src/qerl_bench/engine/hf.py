"""engine=hf: sampling in the training process, from the same weights that are trained.

There is nothing to synchronize: base, adapter and noise are the trainer's. On a GPU with fused kernels each decoding
step is replayed as a CUDA graph over rows that a queue refills (hf_graph.py); otherwise transformers decodes in chunks
(hf_reference.py). Each token is drawn by inverse CDF from a uniform number that belongs to its request and position, so
batching changes completions only through rounding, and with `invariant` not at all.

A *request* is one sample of one prompt. A *chunk* is at most `max_num_seqs` requests that are sampled together.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from qerl_bench.engine.base import RolloutEngine, Sampling, exact_lengths, make_rollouts, require_room
from qerl_bench.engine.rollout_queue import Limits
from qerl_bench.quant.base import KEYS_AND_VALUES
from qerl_core.checks import TrainingStopped, check_fields, count, flag, number, optional, positive, require
from qerl_core.process.gpu_share import release
from qerl_core.process.out_of_memory import NO_MEMORY, held_unused, shortage
from qerl_core.process.progress import COMPLETIONS, phase
from qerl_core.records import Prompt, Rollout, numbered
from qerl_core.seeding import derive

if TYPE_CHECKING:
    from collections.abc import Mapping

    from qerl_bench.model.policy import Policy
    from qerl_bench.quant.base import WeightFormat
    from qerl_bench.train.trainer_state import TrainerState

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class HF:
    """Sample in the training process."""

    name: str
    max_num_seqs: int
    cache_gib: float | None
    dequantized_gib: float
    kept_gib: float
    prefill_tokens: int
    invariant: bool
    tf32: bool

    kv_formats: ClassVar = KEYS_AND_VALUES

    def __post_init__(self) -> None:
        check_fields(
            self,
            "engine",
            max_num_seqs=count(),
            cache_gib=optional(positive),
            dequantized_gib=number(least=0),
            kept_gib=number(least=0),
            prefill_tokens=count(),
            invariant=flag,
            tf32=flag,
        )

    def check_with(self, shape: Mapping[str, Any], dtype: str, lora_rank: int, longest_completion: int) -> None:
        require(
            lora_rank == 0 or not self.tf32,
            "engine.tf32=true computes with rounded copies of weights that are trained in FP32, and beside an adapter "
            "none are. Use engine.tf32=false, or lora=none",
        )

    def check(self, device: str, quant: WeightFormat) -> None:
        """Needs no further package."""

    def build(self, policy: Policy) -> RolloutEngine:
        return HFEngine(
            policy,
            self.max_num_seqs,
            cache_gib=self.cache_gib,
            dequantized_gib=self.dequantized_gib,
            kept_gib=self.kept_gib,
            prefill_tokens=self.prefill_tokens,
            invariant=self.invariant,
            tf32=self.tf32,
        )


class HFEngine:
    """Sampling from `policy`, at most `max_num_seqs` requests at a time, within other limits, those of `Limits`.

    With `tf32` FP32 matmuls on a GPU read 10 bits of the mantissa.
    """

    def __init__(self, policy: Policy, max_num_seqs: int, *, tf32: bool = False, **limits: Any) -> None:
        from qerl_bench.engine.recordable import eager_reason
        from qerl_bench.engine.sampler import Sampler
        from qerl_bench.train.trainer_state import TrainerState

        self.policy, self.tf32 = policy, tf32 and policy.device.type == "cuda"
        self.configured = self.limits = Limits(rows=max_num_seqs, **limits)
        reason = eager_reason(policy)
        self.sampler = Sampler(policy, self.limits) if reason is None else None
        self.state = TrainerState()  # alone, until it joins a run
        self.decoding = "cuda graphs" if reason is None else f"eager: {reason}"
        log.info("sampling: %s", self.decoding)

    def join(self, state: TrainerState) -> None:
        self.state = state

    @property
    def holds_memory(self) -> bool:
        return self.sampler is not None and self.sampler.holds_memory

    def release(self) -> None:
        if self.sampler is not None:
            self.sampler.release()

    def sync(self, prompts: list[Prompt]) -> dict[str, float]:
        """Nothing to copy: the policy itself samples."""
        return {}

    def sleep(self) -> dict[str, float]:
        """Release 16-bit copies, and all else that does not fit into `kept_gib`. Returns ENGINE_HF metrics.

        Of what is rounded, the share that became zero since the last call is one of them.
        """
        from qerl_bench.model.rounded import shares, take_counts

        metrics = {} if self.sampler is None else self.sampler.sleep()
        return metrics | shares([take_counts(self.policy, sampling=True)], "_rollout")

    def record(self) -> dict[str, Any]:
        from qerl_bench.model.kernels import SCALED

        record: dict[str, Any] = {"engine": "hf", "copies_of_weights": 1, "decoding": self.decoding}
        record |= {"max_num_seqs": self.configured.rows, "invariant": self.limits.invariant, "order": "as given"}
        record["tf32"] = self.tf32
        record["kernels"] = self.policy.kernels  # of each layer
        if self.policy.rounding is not None:
            record["layers_in_fp8"] = sum(kernel == SCALED for kernel in self.policy.kernels.values())
        if self.sampler is None:
            return record
        return record | self.sampler.record()

    def require_room(self, prompts: list[Prompt], sampling: Sampling) -> None:
        require_room(self.policy, prompts, sampling)

    @property
    def rows_at_once(self) -> int:
        """Rows of a chunk without a queue. Invariant: one, since alone a request has no company to depend on."""
        return 1 if self.limits.invariant else self.limits.rows

    def prompts_at_once(self, samples: int) -> int:
        """As configured, whatever memory there was: ranks have to agree about it."""
        if self.sampler is None:
            return max(1, (1 if self.configured.invariant else self.configured.rows) // samples)
        if self.configured.invariant:  # a completion does not depend on what else is sampled
            return max(1, self.configured.rows // samples)
        return sys.maxsize  # the queue fills its rows from all of them

    def generate(self, prompts: list[Prompt], sampling: Sampling) -> list[Rollout]:
        from qerl_core.process.device import tf32_matmuls

        prompts = numbered(prompts)
        prompt_ids = require_room(self.policy, prompts, sampling)
        shortages = self.state.shortages
        self._limit(replace(self.configured, **(shortages.limits.value or {})))
        while True:
            try:
                with tf32_matmuls(self.tf32):
                    return self._generate(prompts, prompt_ids, sampling)
            except Exception as error:
                said = shortage(error)
                again = said is not None and held_unused(said) and shortages.limits.may_repeat(shortages.step)
                limits = self.limits if again else self.limits.smaller(len(prompts) * sampling.samples)
                if said is None or limits is None:
                    raise
                if sampling.fixed_rows and limits.rows != self.limits.rows:
                    raise TrainingStopped(
                        f"sampling: {NO_MEMORY} ({said}) with engine.max_num_seqs={self.limits.rows}, and fewer at a "
                        "time round otherwise, which parallel.exact=true forbids. Continue with parallel.exact=false, "
                        "or begin again with a smaller engine.max_num_seqs, the same in all runs to compare"
                    ) from error
                how = " as it was" if again else f", at most {limits.rows} completions at a time"
                log.warning("%s (%s); sampling again%s", NO_MEMORY, said, how)
            if self.sampler is not None:
                self.sampler.release()
            if not again:
                self._limit(limits)
                smaller = {name: value for name, value in vars(limits).items() if value != vars(self.configured)[name]}
                shortages.limits.shrink(smaller, shortages.step)
            if self.state.passes is not None:
                self.state.passes.release()  # training records them again, if there is room then
            release()  # only now: until here the traceback holds what was computed

    def _limit(self, limits: Limits) -> None:
        if limits == self.limits:
            return
        self.limits = limits
        if self.sampler is not None:
            self.sampler.release()
            self.sampler.limits = limits

    def _generate(self, prompts: list[Prompt], prompt_ids: list[list[int]], sampling: Sampling) -> list[Rollout]:
        """`generate` within the present limits."""
        if self.sampler is not None:
            return self._sample(prompts, prompt_ids, range(sampling.samples), sampling)
        from qerl_bench.engine.dequantized import operands_kept

        rollouts: list[Rollout] = []
        prompts_per_chunk = max(1, self.rows_at_once // sampling.samples)
        completions = len(prompts) * sampling.samples
        with operands_kept(self.policy.model), phase("sampling", completions, COMPLETIONS) as progress:
            for start in range(0, len(prompts), prompts_per_chunk):
                for first in range(0, sampling.samples, self.rows_at_once):  # a large group takes several chunks
                    samples = range(first, min(first + self.rows_at_once, sampling.samples))
                    part = slice(start, start + prompts_per_chunk)
                    progress.next = len(prompts[part]) * len(samples)
                    chunk = self._sample(prompts[part], prompt_ids[part], samples, sampling)
                    rollouts += chunk
                    progress.advance(len(chunk))
        return rollouts

    def close(self) -> None:
        self.release()

    def _sample(
        self, prompts: list[Prompt], prompt_ids: list[list[int]], samples: range, sampling: Sampling
    ) -> list[Rollout]:
        """These samples of each prompt, all in one call of the decoder."""
        import torch

        from qerl_bench.engine import hf_reference
        from qerl_bench.train.nonfinite import require_finite_logits

        requests = [(prompt, sample) for prompt in prompts for sample in samples]
        keys = [request_key(sampling, prompt, sample) for prompt, sample in requests]
        lengths = [length for prompt in prompts for length in exact_lengths(prompt, samples, sampling)]
        inference = torch.inference_mode(not self.policy.is_sharded)  # whose tensors could not be trained with
        with inference, torch.no_grad(), self.policy.kv.sampling(at_pages=True):
            if self.sampler is None:
                completions = hf_reference.decode(self.policy, prompt_ids, sampling, keys, lengths)
            else:
                completions = self.sampler.decode(prompt_ids, sampling, keys, lengths)
        repeated = [ids for ids in prompt_ids for _ in samples]
        rollouts = make_rollouts(self.policy, requests, repeated, completions, sampling)
        require_finite_logits(self.policy, rollouts)
        return rollouts


def request_key(sampling: Sampling, prompt: Prompt, sample: int) -> int:
    """The seed of a request's random numbers, one for each position."""
    return derive(sampling.seed, prompt.draw, sample)
