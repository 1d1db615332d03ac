"""Every format in vLLM, one engine after the other: the values are those that are trained, and the record says how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from qerl_bench.engine.base import Sampling
from qerl_bench.engine.hf import HFEngine
from qerl_core.checks import ConfigError

GREEDY = Sampling(samples=1, temperature=0.0, max_tokens=12, seed=0)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


class UnpackingKernel:
    """Stands in for Marlin, which needs a GPU: unpacks when the weights are loaded, to the letter of the format."""

    block: int

    def __init__(self, config: object = None) -> None:
        self.config = config

    @classmethod
    def is_supported(cls, compute_capability: object = None) -> tuple[bool, None]:
        return True, None

    @classmethod
    def can_implement(cls, config: object) -> tuple[bool, None]:
        return True, None

    def scale(self, layer: Any) -> torch.Tensor:
        raise NotImplementedError

    def process_weights_after_loading(self, layer: Any) -> None:
        codes = layer.weight.data
        values = torch.stack([E2M1[(codes & 15).long()], E2M1[(codes >> 4).long()]], -1).flatten(-2)
        unpacked = values * self.scale(layer).repeat_interleave(self.block, 1)
        layer.weight = torch.nn.Parameter(unpacked, requires_grad=False)

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.weight.to(x.dtype), bias)


@pytest.fixture
def cpu_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM as it would be if it had kernels for 4-bit floats on a CPU."""
    import vllm.model_executor.kernels.linear as linear
    from vllm.platforms.interface import PlatformEnum

    class CpuNvFp4(UnpackingKernel, linear.NvFp4LinearKernel):  # type: ignore[misc]
        block = 16

        def scale(self, layer: Any) -> torch.Tensor:
            return layer.weight_scale.data.float() * layer.weight_global_scale.data.float()

    class CpuMxFp4(UnpackingKernel, linear.MxFp4LinearKernel):  # type: ignore[misc]
        block = 32

        def scale(self, layer: Any) -> torch.Tensor:
            return torch.exp2(layer.weight_scale.data.float() - 127)

    monkeypatch.setattr(linear, "MarlinNvFp4LinearKernel", CpuNvFp4)
    monkeypatch.setitem(linear._POSSIBLE_MXFP4_KERNELS, PlatformEnum.CPU, [CpuMxFp4])


@pytest.mark.parametrize(("quant", "kernel"), [("nvfp4", "CpuNvFp4"), ("mxfp4", "CpuMxFp4")])
def test_packed_weights_are_handed_over_as_they_are(
    make_policy: Callable[..., Any],
    make_noise: Callable[..., Any],
    serving: Callable[..., Any],
    make_prompts: Callable[..., Any],
    cpu_kernels: None,
    quant: str,
    kernel: str,
) -> None:
    policy = make_policy(quant=quant, width=64, sharp=True, adapted=True)
    with serving(policy, packed=True) as engine:
        record = engine.record()
        assert record["weights"] == f"{quant}, packed" and record["copies_of_weights"] == 2
        inner = {layer: found for layer, found in record["kernels"].items() if "layers." in layer}
        assert len(inner) == 8 and all(found.endswith(f" / {kernel}") for found in inner.values())
        with make_noise(policy.norms, 0.1).for_rollout(1, 0):
            assert engine.sync(make_prompts())["sync/norms_changed"] == 4
            ours, theirs = (e.generate(make_prompts(), GREEDY) for e in (HFEngine(policy, 8), engine))
    assert [r.token_ids for r in theirs] == [r.token_ids for r in ours]


def test_nf4_is_handed_over_as_values_and_says_so(
    make_policy: Callable[..., Any], serving: Callable[..., Any], make_prompts: Callable[..., Any]
) -> None:
    policy = make_policy(quant="nf4", width=64, sharp=True, adapted=True)
    with serving(policy) as engine:
        record = engine.record()
        assert record["weights"] == "nf4 values on float32 kernels (no claim about speed)"
        assert set(record["kernels"].values()) == {
            "UnquantizedLinearMethod / cpu_unquantized_gemm",
            "UnquantizedEmbeddingMethod",  # lm_head, which is the tied embedding
        }
        engine.sync(make_prompts())
        ours, theirs = (e.generate(make_prompts(), GREEDY) for e in (HFEngine(policy, 8), engine))
    assert [r.token_ids for r in theirs] == [r.token_ids for r in ours]


def test_packed_weights_without_a_kernel_are_refused(
    make_policy: Callable[..., Any], serving: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigError, match=r"engine\.dequantize=true"), serving(make_policy(quant="nvfp4", width=64)):
        pass


def test_trained_norms_are_brought_over(
    make_policy: Callable[..., Any], serving: Callable[..., Any], make_prompts: Callable[..., Any]
) -> None:
    """In a model of 16 bits too the engine holds them in FP32, where 1e-4 on a scale of 1 is not rounded away."""
    policy = make_policy("lora.train_norms=true", "model.dtype=bfloat16", quant="bf16", width=64)
    with serving(policy) as engine:
        assert engine.record()["weights"] == "bfloat16" and engine.record()["norm_dtype"] == "float32"
        assert engine.sync(make_prompts())["sync/norms_changed"] == 0
        with torch.no_grad():
            for norm in list(policy.norms.values())[:3]:
                norm.weight.add_(1e-4)
        assert engine.sync(make_prompts())["sync/norms_changed"] == 3
