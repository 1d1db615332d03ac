"""Rollouts are the same, bit for bit, without what makes steps of few rows fast, which the bench can leave out."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qerl_bench.engine.base import Sampling
from qerl_bench.engine.decoder_blocks import Block, weights_in_order
from qerl_bench.engine.rollout_queue import Limits
from qerl_bench.engine.sampler import Sampler
from qerl_bench.model import kernels as kernel_choice
from qerl_kernels import ahead, decode, decoder_layer, projection
from qerl_kernels.layout import KernelWeight

BENCH = Path(__file__).parents[2] / "benchmarks"
WORDS = ("model.dtype=bfloat16", "model.heads=4", "model.kv_heads=2", "lora.rank=16")


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("step_parts")


@pytest.mark.gpu
@pytest.mark.usefixtures("whole_policies")
@pytest.mark.parametrize("rows", [1, 8, 40])
def test_rollouts_do_not_depend_on_the_parts(rows: int, make_policy: Callable[..., Any], parts: Any) -> None:
    """Tokens, log-probabilities and entropies of recorded steps, with an adapter, in groups that share a prompt."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    policy = make_policy(*WORDS, quant="nvfp4", width=512, sharp=True, adapted=True, device="cuda")
    prompts = [[(7 * i) % 250 for i in range(70 + n)] for n in range(max(1, rows // 4))]
    sampling = Sampling(samples=rows // len(prompts), temperature=1.0, max_tokens=80, seed=0)

    def rollouts() -> Any:
        with torch.inference_mode():
            yield {"rollout": Sampler(policy, Limits(rows=rows)).decode(prompts, sampling, [*range(rows)])}

    words = ("none", "ahead", "beside", "rotation", "gate", "all")
    wanted, *others = ([row["rollout"] for row in parts.only(word, rollouts())] for word in words)
    for other in others:
        assert other == wanted


def test_a_bench_leaves_parts_out_and_puts_them_back(parts: Any) -> None:
    def state() -> tuple[int, int, bool, bool]:
        return ahead.AHEAD_BYTES, projection.BESIDE_ROWS, decoder_layer.ROTATES, decode.GATES

    def rows() -> Any:
        yield {"state": state()}

    whole = state()
    assert all(whole)
    for word, wanted in (
        ("all", whole), ("none", (0, 0, False, False)), ("ahead", (whole[0], 0, False, False)),
        ("ahead8+rotation", (8 << 20, 0, True, False)), ("beside+gate", (0, whole[1], False, True)),
    ):  # fmt: skip
        assert [*parts.only(parts.named(word), rows())] == [{"state": wanted, "parts": word}]
        assert state() == whole
    with pytest.raises(ValueError, match="ahed: choose from all, none, ahead"):
        parts.named("ahed+beside")


def test_the_order_is_that_of_the_step(make_policy: Callable[..., Any], stand_in: Callable[..., None]) -> None:
    """Joined weights and single ones, in a chain; experts and unpacked layers break it."""
    words = ("model.dtype=bfloat16", "lora.rank=4")
    policies = {quant: make_policy(*words, adapted=True, quant=quant) for quant in ("nvfp4", "bf16")}
    stand_in(kernel_choice, why_not_fused=lambda *_: None)
    for quant, policy in policies.items():
        kernel_choice.choose_kernels(policy.model, policy.layers, "auto")
        blocks, empty = [], torch.empty(0)
        with kernel_choice.adapters_cast_to(policy.model, torch.bfloat16):
            for layer in policy.model.model.layers:
                attention, mlp = layer.self_attn, layer.mlp
                qkv = kernel_choice.fuse_linears([attention.q_proj, attention.k_proj, attention.v_proj])
                gate_up = kernel_choice.fuse_linears([mlp.gate_proj, mlp.up_proj])
                blocks.append(Block(layer, qkv, gate_up, {}, empty, empty, empty, empty, None))
        found = weights_in_order(blocks)
        assert len(found) == 4 * len(blocks) and len(blocks) > 1
        if quant == "bf16":
            assert found == [None] * len(found)
            continue
        for block, four in zip(blocks, zip(*[iter(found)] * 4, strict=True), strict=True):
            layers = (block.qkv.base, block.module.self_attn.o_proj.base_layer, block.gate_up.base,
                      block.module.mlp.down_proj.base_layer)  # fmt: skip
            for weight, layer in zip(four, layers, strict=True):
                assert isinstance(weight, KernelWeight)
                assert weight.words.data_ptr() == layer.kernel_weight.words.data_ptr()
        with ahead.reading_in_order(found):
            chain = [weight for weight in found if weight is not None]
            assert ahead.behind(chain[3]) is chain[4] and ahead.behind(chain[-1]) is None
        without = weights_in_order([blocks[0]._replace(gate_up=None), blocks[1]])
        assert without[2] is without[3] is None


def test_only_hopper_multiplies_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the rows of the constant; of few rows also where a library computes x A^T faster."""
    x, a = torch.empty(8, 256, dtype=torch.bfloat16), torch.empty(32, 256, dtype=torch.bfloat16)
    assert not projection.runs_beside(x, a)
    for kernel, wanted in ((decode.WGMMA, True), (decode.MMA_V2, False), (None, False)):
        monkeypatch.setattr(projection, "kernel_of", lambda _, kernel=kernel: kernel)
        assert projection.runs_beside(x, a) == wanted
    monkeypatch.setattr(projection, "kernel_of", lambda _: decode.WGMMA)
    inputs, many = (torch.empty(rows, 18944) for rows in (64, 65))
    assert projection.runs_beside(inputs, torch.empty(32, 18944)) and not projection.pays(inputs, inputs[:32])
    assert not projection.runs_beside(many, torch.empty(32, 18944))  # a library's
    assert not projection.runs_beside(inputs, torch.empty(257, 18944))
    monkeypatch.setattr(projection, "BESIDE_ROWS", 7)
    assert not projection.runs_beside(x, a)
