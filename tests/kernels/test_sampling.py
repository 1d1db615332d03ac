"""Drawing tokens in one kernel: the reference's tokens, NumPy's numbers, and nothing of the rest of the batch."""

from __future__ import annotations

import pytest
import torch

from qerl_kernels.sampling import draw, draw_seeded, uniforms

KEYS = (5, 2**62 + 12345, 1, 77)
FILTERS = ((0, 1.0), (3, 1.0), (0, 0.6), (20, 0.8), (1, 0.1))


def _logits(width: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    logits = 3 * torch.randn(len(KEYS), width, generator=torch.Generator().manual_seed(width))
    if width > 2:
        logits[0, [0, -1]] = -torch.inf
    return logits.to(dtype).to(device)


@pytest.mark.parametrize(
    ("width", "filters"), [(1, FILTERS[3:]), (3, FILTERS[:1]), (262, FILTERS), (9001, FILTERS[:1])]
)
def test_the_kernel_draws_what_the_reference_draws(device: str, width: int, filters: tuple) -> None:
    """Random numbers at all four places of a Philox block; bfloat16 on a GPU, where its logits tie."""
    names = KEYS[:2] if device == "cpu" else KEYS
    keys = torch.tensor(names, device=device)
    for dtype in (torch.float32,) if device == "cpu" else (torch.float32, torch.bfloat16):
        logits = _logits(width, dtype, device)[: len(names)]
        for position, (top_k, top_p) in enumerate(filters):
            uniform = torch.from_numpy(uniforms(names, 8))[:, position].to(device)
            wanted = draw(logits, 0.7, uniform, top_p, top_k)
            found = draw_seeded(logits, 0.7, keys, position, top_p, top_k)
            later = draw_seeded(logits, 0.7, keys, torch.full_like(keys, position), top_p, top_k)
            assert all(torch.equal(one, other) for one, other in zip(found, later, strict=True))
            assert found[0].tolist() == wanted[0].tolist()
            for one, other in zip(found[1:], wanted[1:], strict=True):
                assert torch.allclose(one, other, rtol=0, atol=1e-5)


def test_greedy_takes_the_first_of_the_likeliest(device: str) -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [-torch.inf, -5.0, -6.0, -7.0]], device=device)
    token, logprob, entropy = draw_seeded(logits, 0.0, torch.tensor([1, 2], device=device), 3)
    wanted = draw(logits, 0.0, torch.zeros(2, device=device))
    assert token.tolist() == [1, 1]
    assert torch.allclose(logprob, wanted[1], atol=1e-6) and torch.allclose(entropy, wanted[2], atol=1e-6)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy about NaN, under the interpreter
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [(0, 1.0), (3, 1.0), (0, 0.6)])
def test_logits_that_are_not_finite_show(device: str, temperature: float, filters: tuple[int, float]) -> None:
    """Of such rows the token is within the vocabulary and the log-probability NaN; minus infinity forbids a token."""
    bad = [[0.0, torch.nan, 1.0], [torch.nan] * 3, [0.0, 1.0, torch.inf], [torch.inf] * 3, [-torch.inf] * 3]
    logits = torch.tensor([*bad, [0.0, -torch.inf, 1.0]], device=device)
    keys, (top_k, top_p) = torch.arange(len(logits), device=device), filters
    numbers = torch.full((len(logits),), 0.5, dtype=torch.float64, device=device)
    for token, logprob, _ in (
        draw(logits, temperature, numbers, top_p, top_k),
        draw_seeded(logits, temperature, keys, 0, top_p, top_k),
    ):
        assert logprob.isfinite().tolist() == [False] * len(bad) + [True]
        assert ((token >= 0) & (token < 3)).all() and token[-1] != 1


def test_a_large_vocabulary_in_bfloat16() -> None:
    """152k tokens: the reference's choice but where a number falls on a border, and twice the same bits."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    generator = torch.Generator("cuda").manual_seed(0)
    logits = (3 * torch.randn(512, 152_064, generator=generator, device="cuda")).bfloat16()
    keys = torch.arange(512, device="cuda")
    for top_k, top_p in FILTERS:
        uniform = torch.from_numpy(uniforms(range(512), 4))[:, 3].cuda()
        wanted = draw(logits, 1.0, uniform, top_p, top_k)
        found, again = (draw_seeded(logits, 1.0, keys, 3, top_p, top_k) for _ in range(2))
        assert (found[0] != wanted[0]).sum() <= 3
        assert torch.allclose(found[2], wanted[2], rtol=0, atol=1e-4)
        assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


def test_a_row_does_not_depend_on_the_others(device: str) -> None:
    logits = _logits(300, torch.float32, device)
    keys = torch.tensor(KEYS, device=device)
    together = draw_seeded(logits, 1.0, keys, 5)
    for row in (0, 2):
        alone = draw_seeded(logits[row : row + 1], 1.0, keys[row : row + 1], 5)
        assert all(torch.equal(a[0], t[row]) for a, t in zip(alone, together, strict=True))
    wide = torch.cat([logits, logits], dim=1)[:, :300]  # rows with gaps between them
    assert all(torch.equal(a, b) for a, b in zip(draw_seeded(wide, 1.0, keys, 5), together, strict=True))


def test_filters_by_hand() -> None:
    """Probabilities 0.4, 0.2, 0.2, 0.1, 0.1: ties at the bound stay in, top-p counts what top-k has left."""
    logits = torch.tensor([[0.4, 0.2, 0.2, 0.1, 0.1]]).log()

    def reachable(top_k: int, top_p: float) -> set[int]:
        numbers = (torch.arange(100, dtype=torch.float64) + 0.5) / 100
        return set(draw(logits.expand(100, -1), 1.0, numbers, top_p, top_k)[0].tolist())

    assert reachable(0, 1.0) == {0, 1, 2, 3, 4}
    assert reachable(1, 1.0) == {0}
    assert reachable(2, 1.0) == {0, 1, 2}  # the second and third are as likely
    assert reachable(4, 1.0) == {0, 1, 2, 3, 4}
    assert reachable(0, 0.39) == {0}
    assert reachable(0, 0.45) == {0, 1, 2}
    assert reachable(0, 0.85) == {0, 1, 2, 3, 4}
    assert reachable(3, 0.49) == {0}  # 0.4 of 0.8
    assert reachable(3, 0.51) == {0, 1, 2}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logits": torch.zeros(8, 2).t()}, "contiguous"),
        ({"logits": torch.zeros(2, 8, dtype=torch.float64)}, "convert"),
        ({"keys": torch.zeros(3, dtype=torch.int64)}, "shape"),
        ({"keys": torch.zeros(2, dtype=torch.int32)}, "int64"),
        ({"temperature": -1.0}, "at least 0"),
        ({"top_p": 0.0}, r"\(0, 1\]"),
        ({}, "reference"),  # a CPU without the interpreter
    ],
)
def test_wrong_arguments_are_explained(changed: dict, message: str) -> None:
    arguments = {
        "logits": torch.zeros(2, 8), "temperature": 1.0, "keys": torch.zeros(2, dtype=torch.int64), "position": 0,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        draw_seeded(**(arguments | changed))
