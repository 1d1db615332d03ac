"""Whole rollouts through the kernels, under the interpreter or on a GPU, where they are recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qerl_bench.config import build, compose
from qerl_bench.engine import hf_reference
from qerl_bench.engine.base import Sampling
from qerl_bench.engine.rollout_queue import Limits
from qerl_bench.engine.sampler import Sampler, decode
from qerl_bench.model.kernels import FusedLinears, LoRALinear
from qerl_bench.model_setup import build_policy
from tests.models import builds

KEYS = [2**62 + 1, 5, 6, 7]
PROMPTS = [[(7 * i) % 250 for i in range(70)], [5, 6, 7]]
LENGTHS = [2, None, 4, 1]
pytestmark = pytest.mark.usefixtures("whole_policies")


@pytest.fixture
def fused_policy(make_policy: Callable[..., Any], device: str) -> Any:
    """With kernels for everything between the matmuls. In FP32, which is exact enough to draw the same tokens."""
    words = ("model.heads=4", "model.kv_heads=2", f"device={device}")
    policy = make_policy(*words, quant="bf16", sharp=True, adapted=True, device=device)
    policy.fused = True
    return policy


@torch.inference_mode()
def test_rollouts_are_those_of_transformers(fused_policy: Any) -> None:
    """A batch that is refilled, a prompt with a whole page that rows share, exact lengths beside stop tokens."""
    sampling = Sampling(samples=2, temperature=1.0, max_tokens=5, seed=0)
    wanted = hf_reference.decode(fused_policy, PROMPTS, sampling, KEYS, LENGTHS)
    found = decode(fused_policy, PROMPTS, sampling, KEYS, LENGTHS, Limits(rows=2))
    for one, other, length in zip(found, wanted, LENGTHS, strict=True):
        assert one[0] == other[0] and len(one[0]) == (length or len(one[0]))
        assert one[1] == pytest.approx(other[1], abs=5e-5)
        assert one[2] == pytest.approx(other[2], abs=5e-5)


@pytest.mark.parametrize("key_heads", [1, 2])
@pytest.mark.parametrize("architecture", ["gemma3_text", "qwen3"])
def test_norms_of_heads_get_parts_of_a_joined_matmul(
    architecture: str,
    key_heads: int,
    tmp_path: Path,
    device: str,
    listen: Callable[..., list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of queries and keys are strided there, and of a single head they stay so in any view."""
    monkeypatch.setitem(builds.COMMON, "num_key_value_heads", key_heads)
    options = [*builds.WORDS, f"model.id={builds.build(architecture, tmp_path)}", f"device={device}", "quant=bf16"]
    policy = build_policy(build(compose([*options, "task=even_characters", "task.template=chat"])), None, device)
    policy.fused = True
    for module in policy.model.modules():
        if isinstance(module, LoRALinear):
            module.fused = True
    joined, sampling = listen(FusedLinears, "__call__"), Sampling(samples=2, temperature=1.0, max_tokens=2, seed=0)
    with torch.inference_mode():
        found, wanted = (how(policy, PROMPTS[1:], sampling, KEYS[:2]) for how in (decode, hf_reference.decode))
    assert joined
    for one, other in zip(found, wanted, strict=True):
        assert one[0] == other[0] and one[1] == pytest.approx(other[1], abs=5e-5)


def test_noise_on_adapters_comes_and_goes_in_recordings(fused_policy: Any, make_noise: Callable[..., Any]) -> None:
    """Recordings know the addresses of the matrices: other numbers are there, and the same ones again."""
    sampling = Sampling(samples=2, temperature=1.0, max_tokens=3, seed=0)
    sampler = Sampler(fused_policy, Limits(rows=2, kept_gib=1.0))

    @torch.inference_mode()
    def sampled() -> list[hf_reference.Completion]:
        found = sampler.decode(PROMPTS[1:], sampling, KEYS[:2])
        wanted = hf_reference.decode(fused_policy, PROMPTS[1:], sampling, KEYS[:2])
        for one, other in zip(found, wanted, strict=True):
            assert one[0] == other[0] and one[1] == pytest.approx(other[1], abs=5e-5)
        sampler.sleep()
        return found

    plain, kept = sampled(), sampler.kept
    with make_noise({}, 0.5, adapters=fused_policy.noise.adapters).for_rollout(1, 0):
        noisy = sampled()
    assert max(abs(one[1][0] - other[1][0]) for one, other in zip(noisy, plain, strict=True)) > 0.1
    for one, other in zip(sampled(), plain, strict=True):
        assert one[0] == other[0] and one[1] == pytest.approx(other[1], abs=2e-6)
    assert sampler.kept is kept is not None
