"""The matmul of gate and up that ends with SwiGLU or GeGLU: the bits of two kernels, and where one can do both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from qerl_kernels import decode, decoder_layer
from qerl_kernels.decode_configs import MMA_V2, WGMMA, Config, by_rule, choose
from qerl_kernels.layout import KernelWeight
from tests.kernels.test_decode import activations, extras, random_weight

hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a GPU of compute capability 9 (wgmma)",
)


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize(("name", "m"), [("swiglu", 1), ("geglu", 1), ("swiglu", 40), ("swiglu", 200)])
def test_one_kernel_has_the_bits_of_two(name: str, m: int) -> None:
    """Whole blocks of rows and a rest, K in parts or not, formats, scales of rows, bias, one adapter, two and none."""
    k = 1024
    for half, ranks, rows, split in (
        (512, (32, 32), 64, 1), (512, (64, 64), 128, 2), (256, (8, 8), 64, 2), (1040, (24,), 64, 1), (48, (), 128, 2),
    ):  # fmt: skip
        for format_name in ("nvfp4", "int8") if half == 1040 else ("mxfp4",) if half == 48 else ("nvfp4",):
            weight, x = random_weight(format_name, 2 * half, k, "cuda"), activations(m, k, "cuda")
            more: dict[str, Any] = extras(m, 2 * half, sum(ranks), "cuda") if ranks else {"scale": 0.25}
            more["parts"] = (half, half) if len(ranks) == 2 else ()
            if len(ranks) == 2:  # the zeros beside the blocks are not read
                own = torch.block_diag(*(torch.ones(half, rank, device="cuda") for rank in ranks)) > 0
                more["lora"] = (more["lora"][0], more["lora"][1].where(own, torch.nan), more["lora"][2])
            config = replace(by_rule((2 * half, k), m, WGMMA, format_name), split=split, separate=False)
            config = replace(config, rows=rows, warps=rows // 16)
            both = decode.decode_gemm(x, weight, config=config, **more)
            wanted = getattr(decoder_layer, name)(*both.chunk(2, dim=1))
            found = decode.decode_gemm(x, weight, config=config, gated=name, **more)
            assert found.shape == (m, half) and bool(wanted.isfinite().all())
            assert torch.equal(found, wanted), (half, ranks, config, format_name)


@hopper
@pytest.mark.gpu
def test_tiles_of_the_table() -> None:
    """Those of gate and up of a 7B, for a smaller layer of its width."""
    shape = (2112, 3584)
    weight = random_weight("nvfp4", *shape, "cuda")
    for m in (1, 16, 32, 64):
        config, x = choose("NVIDIA H200", (37888, 3584), m), activations(m, shape[1], "cuda")
        lora = extras(m, shape[0], 32, "cuda")["lora"]
        both = decode.decode_gemm(x, weight, 2.0**-12, lora=lora, config=config)
        found = decode.decode_gemm(x, weight, 2.0**-12, lora=lora, config=config, gated="swiglu")
        assert torch.equal(found, decoder_layer.swiglu(*both.chunk(2, dim=1))), m


def test_where_one_kernel_can_do_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper, without a second kernel for partial sums, for halves of whole tiles and equal adapters."""
    weight = random_weight("nvfp4", 512, 128, "cpu")
    assert not decode.can_gate(weight, 4, 0)
    kernels: dict[str, Config] = {WGMMA: by_rule((512, 128), 4), MMA_V2: by_rule((512, 128), 4, MMA_V2)}
    monkeypatch.setattr(decode, "_gpu", lambda _: "another")
    for kernel, config in kernels.items():
        monkeypatch.setattr(decode, "kernel_of", lambda _, kernel=kernel: kernel)
        monkeypatch.setattr(decode, "choose", lambda *_, config=config: config)
        assert decode.can_gate(weight, 4, 0) == (kernel == WGMMA)
    monkeypatch.setattr(decode, "kernel_of", lambda _: WGMMA)
    config = replace(kernels[WGMMA], split=2)

    def can(config: Config = config, weight: KernelWeight = weight, rank: int = 0, parts: tuple[int, ...] = ()) -> bool:
        monkeypatch.setattr(decode, "choose", lambda *_: config)
        return decode.can_gate(weight, 4, rank, parts)

    assert can() and can(rank=128, parts=(256, 256)) and can(replace(config, split=1, separate=True))
    assert not can(replace(config, separate=True)) and not can(rank=129) and not can(parts=(128, 384))
    assert not can(weight=random_weight("nvfp4", 80, 128, "cpu"))
    monkeypatch.setattr(decode, "GATES", False)
    assert not can()
