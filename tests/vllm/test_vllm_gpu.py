"""vLLM with Marlin on a GPU: the packed weights that are trained, in BF16, against this project's own sampling."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from qerl_bench.engine.base import Sampling
from qerl_bench.engine.hf import HFEngine
from qerl_bench.engine.vllm.process import device_memory_gib, is_running
from qerl_bench.model_setup import build_policy
from qerl_bench.train.batch import make_batch

pytestmark = pytest.mark.gpu
TIE = 0.13  # nats between two tokens that BF16 logits of size 16 to 32 cannot tell apart: one unit in the last place
BLOCKS = 4
KV_GIB = 2.0


@pytest.fixture(
    scope="module",
    params=[("nvfp4", "child", "false"), ("mxfp4", "same", "true")],
    ids=["nvfp4, another process, captured graphs", "mxfp4, this process, eager"],
)
def case(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def policy(case: tuple[str, str, str], make_experiment: Callable[..., Any]) -> Any:
    """Of the least widths that Marlin takes; untrained, with tokens several nats apart."""
    words = ("model.hidden_size=512", "model.heads=8", "model.kv_heads=2", "model.intermediate_size=1024")
    shape = (*words, f"model.layers={BLOCKS}", "model.dtype=bfloat16", "lora.rank=32", "device=cuda")
    policy = build_policy(make_experiment(f"quant={case[0]}", *shape), None, "cuda")
    generator = torch.Generator("cuda").manual_seed(1)
    with torch.no_grad():
        scale = policy.model.model.norm.weight
        scale.copy_(5 * torch.randn(scale.shape, generator=generator, device="cuda"))
        for name, parameter in policy.model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator, device="cuda"))
    return policy


@pytest.fixture(scope="module")
def engine(case: tuple[str, str, str], policy: Any, make_experiment: Callable[..., Any]) -> Iterator[Any]:
    """It holds little but its KV cache, which must be gone at the end. Kernels and work space of this process stay."""
    torch.cuda.empty_cache()
    before = device_memory_gib()
    size = (f"engine.kv_cache_gib={KV_GIB}", "engine.max_num_seqs=16", "model.dtype=bfloat16")
    words = ("engine=vllm", "device=cuda", f"engine.isolation={case[1]}", f"engine.enforce_eager={case[2]}", *size)
    engine = make_experiment(*words).engine.build(policy)
    yield engine
    pids = {worker["pid"] for worker in engine.workers} - {os.getpid()}
    engine.close()
    assert not any(is_running(pid) for pid in pids)
    torch.cuda.empty_cache()
    assert device_memory_gib() < before + 0.2 * KV_GIB


def _logprobs(policy: Any, prompt: list[int], *completions: list[int]) -> torch.Tensor:
    batch = make_batch([prompt] * len(completions), list(completions), policy.pad_id, policy.device)
    with torch.no_grad():
        return policy.token_stats(batch.input_ids, batch.mask, 1.0).logprobs[batch.mask]


def test_packed_layers_run_in_marlin(engine: Any) -> None:
    inner = [kernel for layer, kernel in engine.record()["kernels"].items() if "layers." in layer]
    assert len(inner) == 4 * BLOCKS and all("Marlin" in kernel for kernel in inner)


@pytest.mark.parametrize("sigma", [0.0, 0.05])
def test_greedy_completions_part_only_at_ties(
    policy: Any, engine: Any, make_prompts: Any, make_noise: Any, sigma: float
) -> None:
    prompts, greedy = make_prompts(8), Sampling(samples=1, temperature=0.0, max_tokens=24, seed=0)
    with make_noise(policy.norms, sigma).for_rollout(1, 0) as report:
        assert engine.sync(prompts)["sync/norms_changed"] == report.norms_perturbed == (2 * BLOCKS if sigma else 0)
        ours, theirs = (e.generate(prompts, greedy) for e in (HFEngine(policy, 8), engine))
        agreed = 0
        for a, b in zip(ours, theirs, strict=True):
            pairs = list(zip(a.token_ids, b.token_ids, strict=False))
            first = next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
            agreed += first
            if first < len(pairs):
                gap = _logprobs(policy, a.prompt_ids + a.token_ids[:first], [pairs[first][0]], [pairs[first][1]])
                assert gap.diff().abs().item() <= TIE
    assert agreed > 0.5 * sum(len(r.token_ids) for r in ours)


def test_sleep_gives_memory_up_and_waking_brings_the_policy_back(engine: Any, make_prompts: Any) -> None:
    found = engine.sync(make_prompts())
    memory = engine.sleep()
    assert memory["memory/device_train_gib"] < memory["memory/device_rollout_gib"] - 0.95 * KV_GIB
    assert engine.sync(make_prompts()) == pytest.approx(found, abs=0.02)  # vLLM's LoRA kernels add in any order
