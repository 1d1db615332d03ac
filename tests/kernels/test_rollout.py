"""Whole rollouts through the kernels, under the interpreter or on a GPU, where they are recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from qerl_bench.engine import hf_graph, hf_reference
from qerl_bench.engine.base import Sampling
from qerl_bench.engine.rollout_queue import Limits

KEYS = [2**62 + 1, 5, 6, 7, 8, 9]
PROMPTS = [[(7 * i) % 250 for i in range(70)], [5, 6, 7]]
LENGTHS = [2, None, 4, None, 3, 1]


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
    sampling = Sampling(samples=3, temperature=1.0, max_tokens=5, seed=0)
    wanted = hf_reference.decode(fused_policy, PROMPTS, sampling, KEYS, LENGTHS)
    found = hf_graph.decode(fused_policy, PROMPTS, sampling, KEYS, LENGTHS, Limits(rows=2))
    for one, other, length in zip(found, wanted, LENGTHS, strict=True):
        assert one[0] == other[0] and len(one[0]) == (length or len(one[0]))
        assert one[1] == pytest.approx(other[1], abs=5e-5)
        assert one[2] == pytest.approx(other[2], abs=5e-5)
