"""Attention with sinks and soft-capped scores: against the formulas, with windows and shared key heads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from qerl_bench.model import attention
from qerl_bench.model.attention import Kind, softcapped, with_sinks
from qerl_bench.model.packing import Packing

SCALING, SOFTCAP, SIZE, KEYS = 0.3, 1.5, 8, 9
SINKS = torch.tensor([-1.0, 0.5, 2.0, 0.0], dtype=torch.float64)


def _tensors(queries: int) -> list[torch.Tensor]:
    """Four query heads on two key heads, in FP64; values are narrower than keys, as in MLA."""
    generator = torch.Generator().manual_seed(queries)
    shapes = ((2, 4, queries, SIZE), (2, 2, KEYS, SIZE), (2, 2, KEYS, SIZE - 2))
    return [2 * torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def _by_formula(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, seen: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    key, value = (x.repeat_interleave(2, 1) for x in (key, value))
    scores = query @ key.mT * SCALING
    if sinks is None:
        scores = SOFTCAP * (scores / SOFTCAP).tanh()
    scores = scores.masked_fill(~seen, -torch.inf)
    total = scores.exp().sum(-1, keepdim=True)
    return scores.exp() / (total if sinks is None else total + sinks.exp()[:, None, None]) @ value


@pytest.mark.parametrize("kind", ["sinks", "softcap"])
@pytest.mark.parametrize("case", ["causal", "window", "one query"])
def test_sinks_and_soft_caps(kind: str, case: str) -> None:
    """Values, and gradients with respect to queries, keys, values and sinks."""
    queries = 1 if case == "one query" else KEYS
    triangle = torch.ones(KEYS, KEYS, dtype=torch.bool).tril()
    seen = {"causal": triangle, "window": triangle.triu(-2), "one query": torch.ones(1, KEYS, dtype=torch.bool)}[case]
    mask = seen.expand(2, 1, *seen.shape) if case == "window" else None
    tensors, sinks = _tensors(queries), SINKS.clone().requires_grad_()
    if kind == "sinks":
        found, leaves = with_sinks(*tensors, mask, SCALING, sinks), [*tensors, sinks]
    else:
        found, leaves = softcapped(*tensors, mask, SCALING, SOFTCAP), tensors
    wanted = _by_formula(*tensors, seen, sinks if kind == "sinks" else None)
    rounding = 1e-12 if kind == "sinks" else 1e-6  # the soft-capped softmax is in FP32
    torch.testing.assert_close(found, wanted, rtol=0, atol=rounding)
    pull = torch.randn(found.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    gradients = [torch.autograd.grad((x * pull).sum(), leaves) for x in (found, wanted)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=10 * rounding)


# --- packed rows -----------------------------------------------------------------------------------------------------


def _row(device: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], Packing, torch.Tensor]:
    """Four query heads on two key heads of 15 tokens in sequences of 1, 6, 3 and 5, and a pull on the output."""
    mask = torch.zeros(4, 7, dtype=torch.bool, device=device)
    for row, length in enumerate((1, 6, 3, 5)):
        mask[row, 1:length] = True
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(1, heads, 15, 16, generator=generator) for heads in (4, 2, 2, 4)]
    *leaves, pull = (x.to(device, dtype) for x in draw)
    return [leaf.requires_grad_() for leaf in leaves], Packing.from_mask(mask), pull[0].transpose(0, 1)


KINDS = {
    "causal": Kind(SCALING),
    "window": Kind(SCALING, window=3),
    "softcap": Kind(SCALING, softcap=SOFTCAP),
    "sinks": Kind(SCALING, sinks=SINKS.float()),
    "window, sinks": Kind(SCALING, sinks=SINKS.float(), window=3),
}


def _rectangle(kind: Kind) -> torch.Tensor | None:
    return None if kind.window is None else torch.ones(1, 1, 7, 7, dtype=torch.bool).tril().triu(1 - kind.window)


def _outputs(backend: str, kind: Kind, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """The output and the gradients of query, key and value, in FP32 on the host."""
    leaves, packing, pull = _row(device, dtype)
    mask = _rectangle(kind)
    found = attention.BACKENDS[backend](*leaves, mask if mask is None else mask.to(device), kind, packing)
    gradients = torch.autograd.grad((found * pull).float().sum(), leaves)
    return [x.detach().float().cpu() for x in (found, *gradients)]


@pytest.mark.parametrize("name", KINDS)
def test_packed_backends_agree(name: str) -> None:
    """Values and gradients, by the rectangle and by a mask over the row, to the rounding of FP32."""
    for one, other in zip(_outputs("padded", KINDS[name]), _outputs("masked", KINDS[name]), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6)


def test_flash_gets_what_the_reference_uses(flash: Callable[..., None]) -> None:
    """Of both generations of PyTorch's function: offsets, lengths, windows, scaling and shared key heads."""

    def of_2_13(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, ends_k: torch.Tensor, most: int,
        most_k: int, *, scale: float, window_size: tuple[int, int], enable_gqa: bool,
    ) -> torch.Tensor:  # fmt: skip
        assert (ends.tolist(), ends.dtype, most, most_k) == ([0, 1, 7, 10, 15], torch.int32, 6, 6) and enable_gqa
        out = torch.empty_like(q)
        for start, end in zip(ends[:-1].tolist(), ends_k[1:].tolist(), strict=True):
            size = end - start
            seen = torch.ones(size, size, dtype=torch.bool).tril()
            seen = seen if window_size[0] < 0 else seen.triu(-window_size[0])
            one, key, value = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
            part = attention._sdpa(one, key, value, seen[None, None], False, scale)
            out = out.index_copy(0, torch.arange(start, end), part[0].transpose(0, 1))
        return out

    def of_2_10(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor, ends_k: torch.Tensor, most: int,
        most_k: int, is_causal: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        assert is_causal and k.shape == q.shape
        k, v = k[:, ::2], v[:, ::2]
        return of_2_13(q, k, v, ends, ends_k, most, most_k, scale=0.25, window_size=(-1, 0), enable_gqa=True)

    for function, names in ((of_2_13, ("causal", "window")), (of_2_10, ("causal",))):
        flash(function)
        for name in names:
            for one, other in zip(_outputs("flash", KINDS[name]), _outputs("masked", KINDS[name]), strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=2e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("name", ["causal", "window"])
def test_flash_on_a_gpu(name: str) -> None:
    kind = KINDS[name]
    leaves, _, _ = _row("cuda", torch.bfloat16)
    mask = _rectangle(kind)
    if not attention.has_varlen(mask is not None):
        pytest.skip("this PyTorch has no varlen attention of this kind")
    assert attention.packed_backend(leaves[0], leaves[2], mask, kind) == "flash"
    for one, other in zip(_outputs("flash", kind, "cuda", torch.bfloat16), _outputs("masked", kind), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.03)
