"""Keeps vLLM's copy of the policy equal to the policy, and checks it on a few tokens each time.

The adapter is passed as vLLM documents it: a folder in PEFT's format, here in shared memory. Each version gets a new
id, because vLLM caches adapters and prompts by id. Norm scales go through `vllm.worker`. Adapters are never merged.
"""

# vLLM is installed in an environment without a type checker.
# pyright: reportMissingImports=false
from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from qerl_bench.aqn.injector import scale_of
from qerl_bench.engine.adapter_check import check_prompts, probe_prompts

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    from qerl_bench.model.policy import Policy


class Mirror:
    """The copy of the policy inside `llm`. `request` names the adapter to sample with, after the first `push`."""

    request: LoRARequest

    def __init__(self, llm: LLM, policy: Policy, folder: Path) -> None:
        self.llm, self.policy, self.folder = llm, policy, folder
        self.adapters = 0  # versions pushed so far
        self.adapter: dict[str, torch.Tensor] = {}  # in vLLM
        self.clean = clone(self._scales())
        self.scales: dict[str, torch.Tensor] = {}  # in vLLM
        self.norms_changed = 0  # norms that differ from the checkpoint

    def _scales(self) -> dict[str, torch.Tensor]:
        """The policy's current norm scales, noise included, FP32."""
        norms = self.policy.all_norms
        return {name: scale_of(norm).detach().float() for name, norm in norms.items()}

    @property
    def current(self) -> bool:
        """Whether the copy equals the policy as it is now."""
        return equal(self._scales(), self.scales) and equal(self.policy.adapter_state(), self.adapter)

    def push(self) -> None:
        """Copy what has changed. Raises AssertionError if it did not reach every worker."""
        scales = self._scales()
        if not equal(scales, self.scales):
            self._push_scales(scales)
        state = self.policy.adapter_state()
        if not equal(state, self.adapter):
            self._push_adapter(state)

    def _push_scales(self, scales: dict[str, torch.Tensor]) -> None:
        path = self.folder / "norms.safetensors"
        save_file({name: scale.cpu() for name, scale in scales.items()}, path)
        expected = {
            "norms": len(scales),
            "exact": len(scales),
            "changed": sum(not torch.equal(scale, self.clean[name]) for name, scale in scales.items()),
        }
        for rank, counts in enumerate(self.llm.collective_rpc("qerl_set_norms", args=(str(path),))):
            assert counts == expected, f"norm scales in vLLM's worker {rank}: {counts}, expected {expected}"
        assert self.llm.reset_prefix_cache(), "vLLM kept its prefix cache, which was computed with other norm scales"
        self.scales, self.norms_changed = clone(scales), expected["changed"]

    def _push_adapter(self, state: dict[str, torch.Tensor]) -> None:
        from vllm.lora.request import LoRARequest

        assert self.policy.adapter is not None
        engine = self.llm.llm_engine
        if self.adapters > 0:
            engine.remove_lora(self.adapters)
            shutil.rmtree(self.folder / f"adapter-{self.adapters}")
        self.adapters += 1
        path = self.folder / f"adapter-{self.adapters}"
        self.policy.adapter.save_pretrained(str(path), save_embedding_layers=False)
        self.request = LoRARequest(f"adapter-{self.adapters}", self.adapters, str(path))
        engine.add_lora(self.request)
        loaded = set(engine.list_loras())
        assert loaded == {self.adapters}, f"vLLM holds the adapters {loaded}, expected only number {self.adapters}"
        self.adapter = clone(state)

    def check(self, prompts: list[list[int]]) -> dict[str, float]:
        """The metrics `sync/*`, measured on a few prompts (token ids). Raises AssertionError if the copy is wrong."""
        chosen = probe_prompts(prompts)
        engine, engine_base = self._logprobs(chosen, self.request), self._logprobs(chosen, None)
        with self.policy.kv.sampling(at_pages=False):
            checked = check_prompts(self.policy, chosen, engine, engine_base)
        return checked | {"sync/norms_changed": self.norms_changed}

    def _logprobs(self, prompts: list[list[int]], adapter: LoRARequest | None) -> torch.Tensor:
        """Log-probabilities of all tokens but the first of each prompt, one prompt after the other."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
        outputs = self.llm.generate(
            [{"prompt_token_ids": ids} for ids in prompts], params, lora_request=adapter, use_tqdm=False
        )
        return torch.tensor(
            [
                entry[token].logprob
                for output, ids in zip(outputs, prompts, strict=True)
                for entry, token in zip(output.prompt_logprobs[1:], ids[1:], strict=True)
            ]
        )


def clone(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(tensor, right[name]) for name, tensor in left.items())
