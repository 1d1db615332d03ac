"""Keeping vLLM's copy of the policy equal to the policy, and proving it on some tokens each time.

The adapter goes the documented way, a folder in PEFT's format, which lies in memory; each version gets an id of its
own, since vLLM caches adapters and prompts by id. Norm scales go through vllm_worker. Nothing is ever merged.
"""

# vLLM has an environment of its own, without a type checker.
# pyright: reportMissingImports=false
from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from qerl_bench.aqn.injector import scale_of
from qerl_bench.aqn.norm_consumers import FINAL_NORM
from qerl_bench.checks import require
from qerl_bench.train.batch import make_batch

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    from qerl_bench.model.policy import Policy

PROBES = 4  # prompts
PROBED = 128  # tokens of each at most
# Largest mean |engine - trainer| of log-probabilities at temperature 1, nats. Other kernels round otherwise: in FP32 by
# 1e-6 to 1e-5, in 16 bits by 0.01 to 0.1, more where logits are large.
BOUND = {torch.float32: 1e-4, torch.bfloat16: 0.2, torch.float16: 0.2}


class Mirror:
    """The policy inside `llm`. `request` names the adapter to sample with, once something was pushed."""

    request: LoRARequest

    def __init__(self, llm: LLM, policy: Policy, folder: Path) -> None:
        self.llm, self.policy, self.folder = llm, policy, folder
        self.adapters = 0  # versions so far
        self.adapter: dict[str, torch.Tensor] = {}  # as vLLM has it
        self.clean = clone(self._scales())
        self.scales: dict[str, torch.Tensor] = {}  # as vLLM has them
        self.changed = 0  # norms that differ from the checkpoint's

    def _scales(self) -> dict[str, torch.Tensor]:
        """The scales that the policy computes with now, noise included, FP32."""
        sites = self.policy.norms | {FINAL_NORM: self.policy.model.get_submodule(FINAL_NORM)}
        return {name: scale_of(norm).detach().float() for name, norm in sites.items()}

    @property
    def current(self) -> bool:
        """Whether vLLM has the policy as it is now."""
        return equal(self._scales(), self.scales) and equal(self.policy.adapter_state(), self.adapter)

    def push(self) -> None:
        """Bring over what has changed. Raises AssertionError if it did not arrive everywhere."""
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
        for rank, found in enumerate(self.llm.collective_rpc("qerl_set_norms", args=(str(path),))):
            assert found == expected, f"norm scales in vLLM's worker {rank}: {found}, expected {expected}"
        assert self.llm.reset_prefix_cache(), "vLLM kept its prefix cache, which was computed with other norm scales"
        self.scales, self.changed = clone(scales), expected["changed"]

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
        held = set(engine.list_loras())
        assert held == {self.adapters}, f"vLLM holds the adapters {held}, expected only number {self.adapters}"
        self.adapter = clone(state)

    def probe(self, prompts: list[list[int]]) -> dict[str, float]:
        """metrics.WEIGHT_SYNC on a few prompts, token ids. Raises AssertionError if engine and trainer are too far apart."""
        chosen = [ids[:PROBED] for ids in prompts if len(ids) > 1][:PROBES]
        require(bool(chosen), "no prompt has two tokens, so that nothing is left to compare vLLM with the trainer on")
        first, rest = [ids[:1] for ids in chosen], [ids[1:] for ids in chosen]
        batch = make_batch(first, rest, self.policy.pad_id, self.policy.device)
        assert self.policy.adapter is not None
        with torch.no_grad():
            ours = self.policy.token_stats(batch.input_ids, batch.mask, 1.0).logprobs[batch.mask].cpu()
            with self.policy.adapter.disable_adapter():  # and nothing else: norm scales stay as they were pushed
                ours_base = self.policy.token_stats(batch.input_ids, batch.mask, 1.0).logprobs[batch.mask].cpu()
        theirs, theirs_base = self._logprobs(chosen, self.request), self._logprobs(chosen, None)
        found = {
            "sync/adapter_effect": mean_gap(ours, ours_base),
            "sync/adapter_effect_engine": mean_gap(theirs, theirs_base),
            "sync/gap": mean_gap(theirs, ours),
            "sync/gap_base": mean_gap(theirs_base, ours_base),
            "sync/norms_changed": self.changed,
        }
        bound = BOUND[self.policy.model.dtype]
        for name in ("sync/gap", "sync/gap_base"):
            assert found[name] <= bound, f"vLLM does not compute what is trained: {name} is over {bound} nats, {found}"
        assert found["sync/adapter_effect"] == 0 or found["sync/adapter_effect_engine"] > 0, (
            f"vLLM answers with the base model: the adapter changes nothing there, {found}"
        )
        return found

    def _logprobs(self, prompts: list[list[int]], adapter: LoRARequest | None) -> torch.Tensor:
        """Log-probabilities of all tokens but the first of each prompt, one behind the other."""
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


def mean_gap(left: torch.Tensor, right: torch.Tensor) -> float:
    return (left.double() - right.double()).abs().mean().item()
