"""Attention with sinks and soft-capped scores: against the formulas, with windows and shared key heads."""

from __future__ import annotations

import pytest
import torch

from qerl_bench.model.attention import softcapped, with_sinks

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
