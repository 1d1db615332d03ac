"""Kernels that start before earlier ones have ended wait for what they read: the same bits as one after the other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from qerl_kernels import decode, layout, nvfp4
from qerl_kernels.decoder_layer import add_norm, swiglu
from qerl_kernels.overlap import overlapping
from qerl_kernels.projection import project

WIDTH, INNER, RANK, BLOCKS = 1024, 2560, 32, 4

hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs a GPU of compute capability 9 (wgmma)",
)


def test_targets_without_it(gpu: Callable[..., None]) -> None:
    """A launch with an attribute that the GPU does not know would fail."""
    capability = (8, 9)
    gpu(get_device_capability=lambda _: capability)
    overlapping.cache_clear()
    assert overlapping(torch.device("cpu")) == overlapping(torch.device("cuda", 0)) == {"PDL": False}
    capability = (9, 0)
    assert overlapping(torch.device("cuda", 1)) == {"PDL": True, "launch_pdl": True}
    overlapping.cache_clear()


Block = Callable[[torch.Tensor, torch.Tensor, Callable[[], None], bool], tuple[torch.Tensor, torch.Tensor]]


def _block(seed: int) -> Block:
    """A transformer's MLP with adapters of its own; `between` is called behind each kernel."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).bfloat16().cuda()

    def packed(*shape: int) -> tuple[layout.KernelWeight, float]:
        tensors = nvfp4.pack(random(*shape), torch.bfloat16)
        return layout.repack("nvfp4", tensors, (shape[0], shape[1])), 1 / float(tensors["weight_global_scale"])

    gate_up, down = packed(2 * INNER, WIDTH), packed(WIDTH, INNER)
    a, b, c, d = random(RANK, WIDTH), random(2 * INNER, RANK), random(RANK, INNER), random(WIDTH, RANK)
    scale = torch.ones(WIDTH, device="cuda")

    def run(
        x: torch.Tensor, delta: torch.Tensor, between: Callable[[], None], beside: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, h = add_norm(x, delta, scale, 1e-5)
        between()
        low = project(h, a, beside)
        between()
        h = decode.decode_gemm(h, *gate_up, lora=(low, b, 0.5), beside=beside)
        between()
        h = swiglu(*h.split([INNER, INNER], dim=1))
        between()
        low = project(h, c, beside)
        between()
        return x, decode.decode_gemm(h, *down, lora=(low, d, 0.5), beside=beside)

    return run


@hopper
@pytest.mark.gpu
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("rows", [1, 40, 64, 200])
def test_replays_of_a_chain_are_what_waiting_in_between_gives(rows: int, beside: bool) -> None:
    """200 replays of a graph of 24 kernels, on ten inputs; all that it writes was poisoned or is of another input.

    Matmuls beside x A^T give the bits of one kernel after the other.
    """
    blocks = [_block(seed) for seed in range(BLOCKS)]
    generator = torch.Generator().manual_seed(rows)
    inputs = [torch.randn(2, rows, WIDTH, generator=generator).bfloat16().cuda() for _ in range(10)]

    def chain(
        x: torch.Tensor, delta: torch.Tensor, between: Callable[[], None], beside: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for block in blocks:
            x, delta = block(x, delta, between, beside)
            between()
        return x, delta

    wanted = [torch.stack(chain(pair[0], pair[1], torch.cuda.synchronize, False)) for pair in inputs]
    assert all(bool(one.isfinite().all()) for one in wanted) and not torch.equal(wanted[0], wanted[1])
    static = torch.empty_like(inputs[0])
    graph = torch.cuda.CUDAGraph()
    chain(static[0], static[1], lambda: None, beside)  # compiles
    with torch.cuda.graph(graph):
        results = chain(static[0], static[1], lambda: None, beside)
    for replay in range(200):
        static.copy_(inputs[replay % 10])
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        assert torch.equal(torch.stack(results), wanted[replay % 10]), replay
