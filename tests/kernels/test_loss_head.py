"""The fused loss head against the plain one in FP64, gradients included, over odd shapes."""

from __future__ import annotations

import pytest
import torch

from qerl_kernels.loss_head import linear_scores, plain_scores
from qerl_kernels.scratch import scratch


def _inputs(rows: int, width: int, vocabulary: int, device: str, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(rows + vocabulary)
    hidden = torch.randn(rows, width, generator=generator)
    weight, bias = (torch.randn(*shape, generator=generator) / 2 for shape in ((vocabulary, width), (vocabulary,)))
    targets = torch.randint(0, vocabulary, (rows,), generator=generator)
    return *(x.to(dtype).to(device) for x in (hidden, weight, bias)), targets.to(device)


def _reference(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, ...]:
    """Scores of the logits as they are rounded, and both gradients with respect to `hidden`, in FP64."""
    logits = torch.nn.functional.linear(hidden, weight, bias).double().requires_grad_()
    scaled = torch.log_softmax(logits / temperature, -1)
    logprob = scaled.gather(-1, targets[:, None])[:, 0]
    entropy = -(scaled.exp() * scaled).nan_to_num().sum(-1)
    slopes = [torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] @ weight.double() for x in (logprob, entropy)]
    t1 = torch.log_softmax(logits, -1)
    greedy = (logits.argmax(-1) == targets).double()
    return logprob, entropy, -(t1.exp() * t1).sum(-1), greedy, *slopes


def _close(found: torch.Tensor, wanted: torch.Tensor, bound: float) -> bool:
    """Relative to the norm; a gradient that should be 0 is left at the rounding of numbers around 1."""
    return bool((found.double() - wanted).norm() <= bound * wanted.norm() + 1e-7)


def _same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal but for the few tokens whose own logit rounds to another bfloat16 in a matmul of another shape."""
    error = (found.double() - wanted).abs()
    return bool(error.median() < 3e-5) and bool(error.max() < (0.05 if len(error) > 100 else 3e-5))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(
    ("rows", "width", "vocabulary", "max_logits"), [(7, 16, 97, 200), (1, 8, 1, 1), (5, 16, 5003, 9999)]
)
def test_values_and_gradients(
    device: str, rows: int, width: int, vocabulary: int, max_logits: int, temperature: float
) -> None:
    """Pieces of two rows or one; the shared buffer is full of NaN before, so whatever is read was written."""
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        if device == "cpu" and dtype == torch.bfloat16:
            continue  # the interpreter cannot
        hidden, weight, bias, targets = _inputs(rows, width, vocabulary, device, dtype)
        wanted = _reference(hidden, weight, bias, targets, temperature)
        hidden.requires_grad_()
        scratch((2 * rows, vocabulary), torch.float32, hidden.device).fill_(torch.nan)
        scores = linear_scores(hidden, weight, bias, targets, temperature, True, max_logits)
        assert all(_same(one, other) for one, other in zip(scores, wanted, strict=False))
        pull = torch.randn(2, rows, generator=torch.Generator().manual_seed(1)).to(device)
        (grad,) = torch.autograd.grad((scores[0] * pull[0]).sum() + (scores[1] * pull[1]).sum(), hidden)
        assert _close(grad, pull[0, :, None] * wanted[4] + pull[1, :, None] * wanted[5], bound)
        again = linear_scores(hidden, weight, bias, targets, temperature, False, max_logits)
        assert all(torch.equal(a, b) for a, b in zip(again, scores, strict=True))
        assert not any(score.requires_grad for score in again[1:])
        (grad,) = torch.autograd.grad(again[0], hidden, pull[0])
        assert _close(grad, pull[0, :, None] * wanted[4], bound)


def test_impossible_tokens_and_ties(device: str) -> None:
    """A vocabulary masked with -inf has no part in the entropy, and of equal logits the first is the likeliest."""
    bias = torch.tensor([-torch.inf, 0.0, 0.0, -torch.inf], device=device)
    hidden, weight = torch.zeros(2, 8, device=device), torch.zeros(4, 8, device=device)
    for temperature in (1.0, 0.5):
        logprob, entropy, entropy_t1, likeliest = linear_scores(
            hidden, weight, bias, torch.tensor([1, 2], device=device), temperature
        )
        for score in (-logprob, entropy, entropy_t1):
            assert score.tolist() == pytest.approx([0.6931472] * 2, abs=1e-6)
        assert likeliest.tolist() == [1, 0]


def test_a_certain_token(device: str) -> None:
    """Log-probability and entropy stop at 0 exactly, however sums round."""
    hidden, weight = torch.ones(1, 8, device=device), torch.full((300, 8), -50.0, device=device)
    weight[7] = 50.0
    logprob, entropy, _, likeliest = linear_scores(hidden, weight, None, torch.tensor([7], device=device), 1.0)
    assert (logprob.item(), entropy.item(), likeliest.item()) == (0, 0, 1)


@pytest.mark.gpu
def test_a_large_vocabulary_in_bfloat16() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    hidden, weight, _, targets = _inputs(1000, 256, 152_064, "cuda", torch.bfloat16)
    wanted = _reference(hidden[:200], weight, None, targets[:200], 0.9)
    hidden.requires_grad_()
    scores = linear_scores(hidden, weight, None, targets, 0.9, max_logits=300 * 152_064)
    assert all(_same(a[:200], b) for a, b in zip(scores, wanted, strict=False))
    (grad,) = torch.autograd.grad(scores[0].sum(), hidden)
    assert _close(grad[:200], wanted[4], 1e-2)
    assert bool((scores[0] <= 0).all()) and bool((scores[1] >= 0).all())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden": torch.zeros(3, 5)}, "shape"),
        ({"hidden": torch.zeros(3, 4, dtype=torch.bfloat16)}, "float32"),
        ({"hidden": torch.zeros(4, 3).t()}, "contiguous"),
        ({"targets": torch.zeros(2, dtype=torch.int64)}, "shape"),
        ({"weight": torch.zeros(9, 4, requires_grad=True)}, "frozen"),
        ({"temperature": 0.0}, "positive"),
        ({}, "reference"),  # a CPU without the interpreter
    ],
)
def test_wrong_arguments_are_explained(changed: dict, message: str) -> None:
    arguments = {
        "hidden": torch.zeros(3, 4), "weight": torch.zeros(9, 4), "bias": None,
        "targets": torch.zeros(3, dtype=torch.int64), "temperature": 1.0,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        linear_scores(**(arguments | changed))


def test_the_reference_is_the_one_of_the_plain_head() -> None:
    hidden, weight, bias, targets = _inputs(6, 16, 40, "cpu", torch.float32)
    wanted = _reference(hidden, weight, bias, targets, 0.7)
    found = plain_scores(hidden @ weight.t() + bias, targets, 0.7, False)
    assert all(torch.allclose(a.double(), b, atol=1e-5) for a, b in zip(found, wanted, strict=False))
