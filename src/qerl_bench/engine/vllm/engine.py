"""Sampling with an unmodified vLLM that holds a copy of the policy.

Before sampling, the copy is made equal to the policy (adapter and norm scales, noise included) and checked. vLLM
returns no entropies, so the trainer computes them in a forward pass over the drawn tokens, with the same noise.
"""

# vLLM is installed in an environment without a type checker.
# pyright: reportMissingImports=false
from __future__ import annotations

import logging
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from qerl_bench.engine.base import Sampling, exact_lengths, make_rollouts, require_room
from qerl_bench.engine.vllm.checkpoint import BaseCheckpoint
from qerl_bench.engine.vllm.options import KV_CACHE, RANKS, VLLMOptions
from qerl_bench.engine.vllm.process import answer, device_memory_gib, exchange_folder, start, stop
from qerl_bench.engine.vllm.sync import Mirror
from qerl_bench.model.policy import Policy
from qerl_bench.quant.base import NOT_ROUNDED
from qerl_bench.train.batch import make_batch
from qerl_bench.train.nonfinite import require_finite_logits
from qerl_core.checks import require
from qerl_core.records import Prompt, Rollout, numbered
from qerl_core.seeding import derive

log = logging.getLogger(__name__)


def samples_by_request(prompt: Prompt, sampling: Sampling) -> list[range]:
    """The samples of each vLLM request for `prompt`: all in one request, or one request each if lengths are exact."""
    if prompt.new_tokens is None:
        return [range(sampling.samples)]
    return [range(i, i + 1) for i in range(sampling.samples)]


class VLLMEngine:
    """A running vLLM that mirrors `policy`. `program` is its distribution and version, for engine.json."""

    def __init__(self, options: VLLMOptions, policy: Policy, base: BaseCheckpoint, program: str) -> None:
        self.options, self.policy, self.program = options, policy, program
        self.on_gpu = policy.device.type == "cuda"
        self.max_model_len = options.max_sequence_length(policy.model.config.to_dict(), policy.model.dtype.itemsize)
        self.base = base
        self.asleep = False
        self.before_gib = device_memory_gib() if self.on_gpu else None
        with ExitStack() as resources, tempfile.TemporaryDirectory(prefix="qerl-bench-base-") as folder:
            base.write(Path(folder))
            self.llm = start(Path(folder), options.isolation, list(policy.all_norms), **self._vllm_options())
            self.workers: list[dict[str, Any]] = []
            resources.callback(self._stop)
            self.workers = self.llm.collective_rpc("qerl_started")
            room = 4 * sum(tensor.nbytes for tensor in policy.adapter_state().values())
            self.folder = resources.enter_context(exchange_folder(room))
            self.mirror = Mirror(self.llm, policy, self.folder)
            self._resources = resources.pop_all()
        used = ", ".join(sorted(set(self.workers[0]["kernels"].values())))
        log.info("%s samples with %s; kernels: %s", program, base.label, used)
        if not self.on_gpu and options.sleep_level > 0:
            log.info("vLLM cannot sleep on a CPU, so engine.sleep_level=%d has no effect", options.sleep_level)

    def _vllm_options(self) -> dict[str, Any]:
        rank = next(rank for rank in RANKS if rank >= self.policy.adapter.peft_config["default"].r)  # type: ignore[union-attr]
        options = {
            "dtype": str(self.policy.model.dtype).removeprefix("torch."),
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.options.max_num_seqs,
            "kv_cache_memory_bytes": int(self.options.kv_cache_gib * 2**30),
            "tensor_parallel_size": self.options.tensor_parallel_size,
            "enforce_eager": self.options.enforce_eager or not self.on_gpu,
            "enable_sleep_mode": self.on_gpu and self.options.sleep_level > 0,
            "enable_lora": True,
            "max_lora_rank": rank,
            "max_loras": 1,
        }
        if (kind := self.policy.kv.kinds.rollout) != NOT_ROUNDED:
            require(
                self.on_gpu,
                f"rollout.kv={kind}: vLLM keeps a scale for each token and head on a GPU alone. Use engine=hf, or "
                "rollout.kv=none",
            )
            options["kv_cache_dtype"] = KV_CACHE[kind]
        return options if self.on_gpu else options | {"block_size": 32}  # tokens; the smallest size on a CPU

    def sync(self, prompts: list[Prompt]) -> dict[str, float]:
        with answer("take the policy's weights", self._pids):
            self._wake()
            self.mirror.push()
            return self.mirror.check([self.policy.ids_of(prompt) for prompt in prompts])

    def _wake(self) -> None:
        if self.asleep:
            torch.cuda.empty_cache()  # memory that training no longer uses
            self.llm.wake_up()
            self.asleep = False

    def sleep(self) -> dict[str, float]:
        if not self.on_gpu:
            return {}
        awake = device_memory_gib()
        if self.options.sleep_level > 0 and not self.asleep:
            with answer("sleep", self._pids):
                self.llm.sleep(level=self.options.sleep_level)
            self.asleep = True
        return {"memory/device_rollout_gib": awake, "memory/device_train_gib": device_memory_gib()}

    def require_room(self, prompts: list[Prompt], sampling: Sampling) -> None:
        require_room(self.policy, prompts, sampling, self.max_model_len)

    def prompts_at_once(self, samples: int) -> int:
        return max(1, self.options.max_num_seqs // samples)

    def generate(self, prompts: list[Prompt], sampling: Sampling) -> list[Rollout]:
        prompts = numbered(prompts)
        prompt_ids = require_room(self.policy, prompts, sampling, self.max_model_len)
        if self.asleep or not self.mirror.current:
            self.sync(prompts)
        requests = [(i, part) for i, prompt in enumerate(prompts) for part in samples_by_request(prompt, sampling)]
        with answer(f"sample {len(prompts) * sampling.samples} completions", self._pids):
            outputs = self.llm.generate(
                [{"prompt_token_ids": prompt_ids[i]} for i, _ in requests],
                [self._params(prompts[i], samples, sampling) for i, samples in requests],
                lora_request=self.mirror.request,
                use_tqdm=False,
            )
        drawn = [sorted(output.outputs, key=lambda completion: completion.index) for output in outputs]
        token_ids = [list(completion.token_ids) for group in drawn for completion in group]
        owners = [i for (i, _), group in zip(requests, drawn, strict=True) for _ in group]
        repeated = [prompt_ids[i] for i in owners]
        entropies = self._entropies(repeated, token_ids, sampling.temperature or 1.0)
        entries = [completion.logprobs for group in drawn for completion in group]
        logprobs = [
            [entry[token].logprob for entry, token in zip(one, ids, strict=True)]
            for one, ids in zip(entries, token_ids, strict=True)
        ]
        of_prompts = [(prompts[i], row % sampling.samples) for row, i in enumerate(owners)]
        completions = [*zip(token_ids, logprobs, entropies, strict=True)]
        rollouts = make_rollouts(self.policy, of_prompts, repeated, completions, sampling)
        require_finite_logits(self.policy, rollouts)
        return rollouts

    def _params(self, prompt: Prompt, samples: range, sampling: Sampling) -> Any:
        """vLLM's parameters for these samples of the prompt, which have the same exact length if they have one.

        Sample i gets the prompt's seed + i whichever request it is in, because vLLM counts up from a request's seed. An
        exact length is a limit without stop tokens; vLLM's `min_tokens` would make stop tokens impossible to draw.
        """
        from vllm import SamplingParams

        exact = exact_lengths(prompt, samples, sampling)[0]
        return SamplingParams(
            n=len(samples),
            temperature=sampling.temperature,
            top_p=sampling.top_p,  # below 1, log-probabilities too are over the tokens it keeps
            max_tokens=exact or sampling.max_tokens,
            seed=(derive(sampling.seed, prompt.draw) >> 1) + samples.start,  # halved to leave room for counting up
            stop_token_ids=sorted(self.policy.stop_ids) if exact is None else [],
            ignore_eos=True,  # only these stop tokens
            logprobs=0,  # only of the drawn token
            detokenize=False,
        )

    def _entropies(
        self, prompts: list[list[int]], completions: list[list[int]], temperature: float
    ) -> list[list[float]]:
        """Entropy in nats of each completion token, from the trainer's forward pass with the current noise."""
        batch = make_batch(prompts, completions, self.policy.pad_id, self.policy.device)
        entropies: list[list[float]] = [[] for _ in prompts]
        for rows in batch.lengths.argsort(descending=True).split(self.options.score_batch_size):
            part = batch.rows(rows)
            with torch.no_grad(), self.policy.kv.sampling(at_pages=False):
                entropy = self.policy.token_stats(part.input_ids, part.mask, temperature).entropy
            for row, values, mask in zip(rows.tolist(), entropy, part.mask, strict=True):
                entropies[row] = values[mask].tolist()
        return entropies

    def record(self) -> dict[str, Any]:
        first = self.workers[0]
        return {
            "engine": "vllm",
            "program": self.program,
            "isolation": self.options.isolation,
            "weights": self.base.label,
            "kernels": first["kernels"],
            "lora": first["lora"],
            "norm_dtype": first["norm_dtype"],
            "copies_of_weights": 2,  # the policy's and vLLM's
            "policy_linear_bytes": self.base.resident_bytes(),
            # Of each worker, with embeddings and room for the adapter. On a CPU vLLM hides its weights from PyTorch.
            "engine_weight_bytes": [worker["weight_bytes"] for worker in self.workers] if self.on_gpu else None,
            "kv_cache_gib": self.options.kv_cache_gib,
            "device_gib_before_start": self.before_gib,
        }

    def close(self) -> None:
        with self._resources:
            if self.options.isolation == "same" and self.on_gpu and self.options.sleep_level > 0 and not self.asleep:
                self.llm.sleep(level=2)  # otherwise weights and KV cache stay until this process ends

    @property
    def _pids(self) -> list[int]:
        """The processes of vLLM, those of its engine and of its workers; none if it runs in this one."""
        pids = {pid for worker in self.workers for pid in (worker["pid"], worker["parent"])}
        return sorted(pids - {os.getpid(), os.getppid()})

    def _stop(self) -> None:
        stop(self.llm, self.options.isolation, self._pids)
