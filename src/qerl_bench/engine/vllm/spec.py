"""engine=vllm: sampling with an unmodified vLLM that holds a copy of the policy.

Before it samples, the copy is made equal to the policy (adapter and norm scales, noise included) and compared with it.
vLLM returns no entropies, so the trainer's forward pass finds them, with the same noise, on the tokens that were drawn.
Left out: training without an adapter, which would mean writing every weight again each step; and sleep level 2, which
would mean reading them again.
"""

# vLLM has an environment of its own, without a type checker.
# pyright: reportMissingImports=false
from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_bench.checks import is_number, require, require_count
from qerl_bench.engine.base import RolloutEngine, Sampling, new_tokens, require_room, rollout_of
from qerl_bench.engine.vllm.install import require_device, require_supported, takes_codes
from qerl_bench.records import Prompt, Rollout
from qerl_bench.seeding import derive

if TYPE_CHECKING:
    from qerl_bench.config import Experiment
    from qerl_bench.engine.vllm.base import Base
    from qerl_bench.model.policy import Policy

log = logging.getLogger(__name__)
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}  # of the dtypes that a model may compute in
SHAPE = {"max_position_embeddings", "hidden_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers"}
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the values that vLLM takes for max_lora_rank


@dataclass(frozen=True, kw_only=True)
class VLLM:
    """Sample with vLLM; what each field means is said in conf/engine/vllm.yaml."""

    name: str
    isolation: str
    dequantize: bool
    max_num_seqs: int
    max_model_len: int | None
    kv_cache_gib: float
    enforce_eager: bool
    sleep_level: int
    tensor_parallel_size: int
    score_batch_size: int

    def __post_init__(self) -> None:
        require(self.isolation in ("child", "same"), f"engine.isolation must be child or same, got {self.isolation!r}")
        for key in ("dequantize", "enforce_eager"):
            value = getattr(self, key)
            require(isinstance(value, bool), f"engine.{key} must be true or false, got {value!r}")
        for key in ("max_num_seqs", "tensor_parallel_size", "score_batch_size"):
            require_count(f"engine.{key}", getattr(self, key))
        if self.max_model_len is not None:
            require_count("engine.max_model_len", self.max_model_len)
        require(
            is_number(self.kv_cache_gib) and self.kv_cache_gib > 0,
            f"engine.kv_cache_gib must be a positive number of GiB, got {self.kv_cache_gib!r}",
        )
        require(
            self.sleep_level in (0, 1) and not isinstance(self.sleep_level, bool),
            f"engine.sleep_level must be 0 or 1, got {self.sleep_level!r}; level 2 would drop the weights and read "
            "them again from disk in each step",
        )
        require(
            self.isolation == "child" or self.tensor_parallel_size == 1,
            f"engine.isolation=same is one process, and engine.tensor_parallel_size={self.tensor_parallel_size} needs several; "
            "use engine.isolation=child",
        )

    def check_with(self, experiment: Experiment) -> None:
        rank = experiment.lora.rank
        require(
            1 <= rank <= RANKS[-1],
            f"engine=vllm takes over adapters of rank 1 to {RANKS[-1]} each step, and lora={experiment.lora.name} has "
            f"lora.rank={rank}. Use a rank in that range, or engine=hf",
        )
        limit = max(experiment.task.max_completion_tokens, getattr(experiment.eval, "max_tokens", None) or 0)
        require(
            self.max_model_len is None or limit < self.max_model_len,
            f"engine.max_model_len={self.max_model_len} leaves no room for a prompt: completions may have {limit} "
            "tokens. Make it larger, or task.max_completion_tokens and eval.max_tokens smaller",
        )
        shape = experiment.model.config() or {}
        if shape.keys() >= SHAPE:
            require_cache(self, shape, ITEM_BYTES[experiment.model.dtype])

    def check(self, experiment: Experiment) -> None:
        device = require_supported()
        if experiment.device != "auto":
            require_device(experiment.device)
        takes_codes(experiment.quant, self.dequantize, device)

    def build(self, policy: Policy) -> RolloutEngine:
        from qerl_bench.engine.vllm.base import Base

        program = require_device(policy.device.type)
        return VllmEngine(self, policy, Base.of(policy.model, self.dequantize, policy.device.type), program)


def require_cache(spec: VLLM, shape: Mapping[str, Any], item_bytes: int) -> int:
    """The most tokens of a sequence of the model whose config.json holds `shape`. Raises ConfigError unless the KV cache
    of each device has room for one of that length."""
    longest = min(filter(None, (spec.max_model_len, shape["max_position_embeddings"])))
    head = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    heads = max(1, shape["num_key_value_heads"] // spec.tensor_parallel_size)
    per_token = 2 * shape["num_hidden_layers"] * heads * head * item_bytes  # keys and values
    room = int(spec.kv_cache_gib * 2**30 / per_token)
    require(
        room >= longest,
        f"engine.kv_cache_gib={spec.kv_cache_gib} holds {room} tokens, less than one sequence of {longest}; make it "
        "larger, or engine.max_model_len smaller",
    )
    return longest


def requests(prompt: Prompt, sampling: Sampling) -> list[range]:
    """The samples of a prompt, by the requests that draw them: one for all, or one each where lengths are given."""
    together = prompt.new_tokens is None
    return [range(sampling.samples)] if together else [range(i, i + 1) for i in range(sampling.samples)]


class VllmEngine:
    """A running vLLM and its mirror of `policy`. `program` is the distribution and version, for the record."""

    def __init__(self, spec: VLLM, policy: Policy, base: Base, program: str) -> None:
        from qerl_bench.engine.vllm import process as vllm_process
        from qerl_bench.engine.vllm.sync import Mirror

        self.spec, self.policy, self.program = spec, policy, program
        self.on_gpu = policy.device.type == "cuda"
        self.max_model_len = require_cache(spec, policy.model.config.to_dict(), policy.model.dtype.itemsize)
        self.base = base
        self.asleep = False
        self.before_gib = vllm_process.device_memory_gib() if self.on_gpu else None
        with ExitStack() as failed, tempfile.TemporaryDirectory(prefix="qerl-bench-base-") as folder:
            base.write(Path(folder))
            self.llm = vllm_process.start(Path(folder), spec.isolation, **self._options())
            self.workers: list[dict[str, Any]] = []
            failed.callback(self._stop)
            self.workers = self.llm.collective_rpc("qerl_started")
            room = 4 * sum(tensor.nbytes for tensor in policy.adapter_state().values())
            self.folder = failed.enter_context(vllm_process.exchange_folder(room))
            self.mirror = Mirror(self.llm, policy, self.folder)
            self._resources = failed.pop_all()
        used = ", ".join(sorted(set(self.workers[0]["kernels"].values())))
        log.info("%s samples with %s; kernels: %s", program, base.label, used)
        if not self.on_gpu and spec.sleep_level > 0:
            log.info("on a CPU vLLM cannot sleep, so that engine.sleep_level=%d changes nothing", spec.sleep_level)

    def _options(self) -> dict[str, Any]:
        rank = next(rank for rank in RANKS if rank >= self.policy.adapter.peft_config["default"].r)  # type: ignore[union-attr]
        options = {
            "dtype": str(self.policy.model.dtype).removeprefix("torch."),
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.spec.max_num_seqs,
            "kv_cache_memory_bytes": int(self.spec.kv_cache_gib * 2**30),
            "tensor_parallel_size": self.spec.tensor_parallel_size,
            "enforce_eager": self.spec.enforce_eager or not self.on_gpu,
            "enable_sleep_mode": self.on_gpu and self.spec.sleep_level > 0,
            "enable_lora": True,
            "max_lora_rank": rank,
            "max_loras": 1,
        }
        return options if self.on_gpu else options | {"block_size": 32}  # tokens; the least on a CPU

    def sync(self, prompts: list[Prompt]) -> dict[str, float]:
        self._wake()
        self.mirror.push()
        return self.mirror.probe([self.policy.ids_of(prompt) for prompt in prompts])

    def _wake(self) -> None:
        import torch

        if self.asleep:
            torch.cuda.empty_cache()  # what training no longer uses
            self.llm.wake_up()
            self.asleep = False

    def sleep(self) -> dict[str, float]:
        from qerl_bench.engine.vllm.process import device_memory_gib

        if not self.on_gpu:
            return {}
        awake = device_memory_gib()
        if self.spec.sleep_level > 0 and not self.asleep:
            self.llm.sleep(level=self.spec.sleep_level)
            self.asleep = True
        return {"memory/device_rollout_gib": awake, "memory/device_train_gib": device_memory_gib()}

    def require_room(self, prompts: list[Prompt], sampling: Sampling) -> None:
        require_room(self.policy, prompts, sampling, self.max_model_len)

    def generate(self, prompts: list[Prompt], sampling: Sampling) -> list[Rollout]:
        from qerl_bench.train.nonfinite import require_finite_logits

        self.require_room(prompts, sampling)
        prompt_ids = [self.policy.ids_of(prompt) for prompt in prompts]
        if self.asleep or not self.mirror.current:
            self.sync(prompts)
        asked = [(i, part) for i, prompt in enumerate(prompts) for part in requests(prompt, sampling)]
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt_ids[i]} for i, _ in asked],
            [self._params(prompts[i], samples, sampling) for i, samples in asked],
            lora_request=self.mirror.request,
            use_tqdm=False,
        )
        drawn = [sorted(output.outputs, key=lambda completion: completion.index) for output in outputs]
        token_ids = [list(completion.token_ids) for group in drawn for completion in group]
        owners = [i for (i, _), group in zip(asked, drawn, strict=True) for _ in group]
        entropies = self._entropies([prompt_ids[i] for i in owners], token_ids, sampling.temperature or 1.0)
        logprobs = [completion.logprobs for group in drawn for completion in group]
        rollouts = [
            rollout_of(
                self.policy,
                prompts[owner],
                row % sampling.samples,
                prompt_ids[owner],
                ids,
                [entry[token].logprob for entry, token in zip(entries, ids, strict=True)],
                entropy,
                sampling,
            )
            for row, (owner, ids, entries, entropy) in enumerate(
                zip(owners, token_ids, logprobs, entropies, strict=True)
            )
        ]
        require_finite_logits(self.policy, rollouts)
        return rollouts

    def _params(self, prompt: Prompt, samples: range, sampling: Sampling) -> Any:
        """How these samples of the prompt are drawn, which are of one length if that is given.

        Sample i has this prompt's seed + i, whichever request it is in: vLLM counts up from the seed of a request. An
        exact length is a limit without stop tokens; `min_tokens` would make them impossible to draw.
        """
        from vllm import SamplingParams

        exact = new_tokens(prompt, samples, sampling)[0]
        return SamplingParams(
            n=len(samples),
            temperature=sampling.temperature,
            top_p=sampling.top_p,  # below 1, the log-probabilities too are of the tokens that it keeps
            max_tokens=exact or sampling.max_tokens,
            seed=(derive(sampling.seed, prompt.id) >> 1) + samples.start,  # halved: room to count up
            stop_token_ids=sorted(self.policy.stop_ids) if exact is None else [],
            ignore_eos=True,  # these stop tokens and no others
            logprobs=0,  # of the token drawn
            detokenize=False,
        )

    def _entropies(
        self, prompts: list[list[int]], completions: list[list[int]], temperature: float
    ) -> list[list[float]]:
        """Of the trainer with the noise that is in it now, in nats, for each token of the completions."""
        import torch

        from qerl_bench.train.batch import make_batch

        batch = make_batch(prompts, completions, self.policy.pad_id, self.policy.device)
        entropies: list[list[float]] = [[] for _ in prompts]
        for rows in batch.micro_batches(self.spec.score_batch_size, torch.ones_like(batch.lengths, dtype=torch.bool)):
            part = batch.rows(rows)
            with torch.no_grad():
                found = self.policy.token_stats(part.input_ids, part.mask, temperature).entropy
            for row, values, mask in zip(rows.tolist(), found, part.mask, strict=True):
                entropies[row] = values[mask].tolist()
        return entropies

    def record(self) -> dict[str, Any]:
        first = self.workers[0]
        return {
            "engine": "vllm",
            "program": self.program,
            "isolation": self.spec.isolation,
            "weights": self.base.label,
            "kernels": first["kernels"],
            "lora": first["lora"],
            "norm_dtype": first["norm_dtype"],
            "copies_of_weights": 2,  # the policy's, and vLLM's
            "policy_linear_bytes": self.base.resident_bytes(),
            # Of each worker, embeddings and room for the adapter included. On a CPU vLLM hides them from PyTorch.
            "engine_weight_bytes": [worker["weight_bytes"] for worker in self.workers] if self.on_gpu else None,
            "kv_cache_gib": self.spec.kv_cache_gib,
            "device_gib_before_start": self.before_gib,
        }

    def close(self) -> None:
        with self._resources:
            if self.spec.isolation == "same" and self.on_gpu and self.spec.sleep_level > 0 and not self.asleep:
                self.llm.sleep(level=2)  # its weights and KV cache would stay until this process ends

    def _stop(self) -> None:
        from qerl_bench.engine.vllm.process import stop

        pids = {pid for worker in self.workers for pid in (worker["pid"], worker["parent"])}
        stop(self.llm, self.spec.isolation, sorted(pids - {os.getpid(), os.getppid()}))
