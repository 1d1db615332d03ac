"""Losses and advantages against numbers worked out by hand, and against themselves under every split of a step."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl_bench.algo.base import Totals
from qerl_bench.algo.dapo import Dapo
from qerl_bench.algo.grpo import Grpo
from qerl_bench.algo.sft import Sft
from qerl_bench.errors import BadInput

GRPO = Grpo(name="grpo", epsilon_low=0.2, epsilon_high=0.2, advantage_eps=1e-4)
DAPO = Dapo(name="dapo", epsilon_low=0.2, epsilon_high=0.28, advantage_eps=1e-4)
SFT = Sft(name="sft")
ALGORITHMS = pytest.mark.parametrize("algo", [GRPO, DAPO, SFT], ids=lambda algo: algo.name)


def _example() -> dict[str, torch.Tensor]:
    """Two groups of two: ratios, lengths and rewards for which the numbers below were worked out on paper."""
    ratio = torch.tensor(
        [
            [1.0, 1.5, 7.0],  # A > 0: 1.5 is clipped; the third token is padding
            [0.5, 1.0, 1.25],  # A < 0: 0.5 is clipped, 1.25 is not
            [1.25, 7.0, 7.0],  # A > 0: clipped by GRPO at 1.2, not by DAPO at 1.28
            [1.0, 0.9, 0.0],  # A < 0
        ],
        dtype=torch.float64,
    )
    old = torch.tensor([[-1.0, -2.0, -3.0]] * 4, dtype=torch.float64)
    with torch.no_grad():
        logprobs = old + ratio.clamp(min=1e-9).log()
    return {
        "logprobs": logprobs.requires_grad_(),
        "old_logprobs": old,
        "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=torch.float64),
        "mask": torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]], dtype=torch.bool),
    }


def test_grpo_by_hand() -> None:
    example = _example()
    loss, indicators = GRPO.loss(**example, totals=Totals(sequences=4, tokens=8))
    rows = [-(1.0 + 1.2) / 2, (0.8 + 1.0 + 1.25) / 3, -0.5 * 1.2, 0.5 * (1.0 + 0.9) / 2]
    assert loss.item() == pytest.approx(sum(rows) / 4, abs=1e-12)
    loss.backward()
    gradient = [  # d(-r A)/d logprob = -r A where the clip lets it through, over row length and number of rows
        [-1.0 / 8, 0, 0],
        [0, 1.0 / 12, 1.25 / 12],
        [0, 0, 0],
        [0.5 * 1.0 / 8, 0.5 * 0.9 / 8, 0],
    ]
    assert torch.allclose(example["logprobs"].grad, torch.tensor(gradient, dtype=torch.float64), rtol=0, atol=1e-12)
    assert indicators["clip_ratio/low_mean"].nonzero().tolist() == [[1, 0]]
    assert indicators["clip_ratio/high_mean"].nonzero().tolist() == [[0, 1], [2, 0]]


def test_dapo_by_hand() -> None:
    example = _example()
    loss, indicators = DAPO.loss(**example, totals=Totals(sequences=4, tokens=8))
    tokens = [-1.0, -1.28, 0.8, 1.0, 1.25, -0.5 * 1.25, 0.5 * 1.0, 0.5 * 0.9]
    assert loss.item() == pytest.approx(sum(tokens) / 8, abs=1e-12)
    loss.backward()
    gradient = [[-1.0 / 8, 0, 0], [0, 1.0 / 8, 1.25 / 8], [-0.5 * 1.25 / 8, 0, 0], [0.5 / 8, 0.45 / 8, 0]]
    assert torch.allclose(example["logprobs"].grad, torch.tensor(gradient, dtype=torch.float64), rtol=0, atol=1e-12)
    assert indicators["clip_ratio/low_mean"].nonzero().tolist() == [[1, 0]]
    assert indicators["clip_ratio/high_mean"].nonzero().tolist() == [[0, 1]]


def test_sft_by_hand() -> None:
    logprobs = torch.tensor([[-1.0, -2.0, -9.0], [-0.5, -9.0, -9.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]], dtype=torch.bool)
    loss, indicators = SFT.loss(logprobs, logprobs.detach(), torch.zeros(2), mask, Totals(sequences=2, tokens=3))
    assert loss.item() == pytest.approx(3.5 / 3, abs=1e-12)
    assert indicators == {}
    loss.backward()
    expected = torch.tensor([[-1 / 3, -1 / 3, 0], [-1 / 3, 0, 0]], dtype=torch.float64)
    assert torch.allclose(logprobs.grad, expected, rtol=0, atol=1e-15)
    with pytest.raises(AssertionError):
        SFT.advantages(torch.zeros(1, 2))


def test_on_policy_step_is_the_plain_policy_gradient() -> None:
    """With old = new (one update per rollout) the loss is -A per token and its gradient -A / weight, clips or not."""
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1], [1, 0]], dtype=torch.bool)
    advantages = torch.tensor([2.0, -1.0], dtype=torch.float64)
    loss, indicators = GRPO.loss(logprobs, logprobs.detach(), advantages, mask, Totals(sequences=2, tokens=3))
    loss.backward()
    assert loss.item() == pytest.approx((-2.0 + 1.0) / 2, abs=1e-12)
    assert torch.allclose(
        logprobs.grad, torch.tensor([[-0.5, -0.5], [0.5, 0.0]], dtype=torch.float64), rtol=0, atol=1e-12
    )
    assert not any(indicator.any() for indicator in indicators.values())


# The ratio is exp(difference). These are the doubles next to the boundary on either side, and the boundary's own.
@pytest.mark.parametrize(
    ("algo", "boundary", "advantage", "name"),
    [
        (GRPO, 0.8, -1.0, "clip_ratio/low_mean"),
        (GRPO, 1.2, 1.0, "clip_ratio/high_mean"),
        (DAPO, 0.8, -1.0, "clip_ratio/low_mean"),
        (DAPO, 1.28, 1.0, "clip_ratio/high_mean"),
    ],
)
def test_clip_indicators_at_the_boundary(algo: Any, boundary: float, advantage: float, name: str) -> None:
    """Clipped means strictly outside, and only on the side where the sign of the advantage makes the clip bite."""
    inside, outside = (boundary + 1e-6, boundary - 1e-6) if boundary < 1 else (boundary - 1e-6, boundary + 1e-6)
    logprobs = torch.tensor([[inside, outside]], dtype=torch.float64).log()
    mask = torch.ones(1, 2, dtype=torch.bool)
    old = torch.zeros_like(logprobs)
    for sign in (advantage, -advantage, 0.0):
        _, indicators = algo.loss(logprobs, old, torch.tensor([sign], dtype=torch.float64), mask, Totals(1, 2))
        clipped = {key: value.tolist() for key, value in indicators.items()}
        expected = {key: [[False, False]] for key in clipped}
        if sign == advantage:
            expected[name] = [[False, True]]
        assert clipped == expected


def test_a_ratio_exactly_on_the_boundary_is_not_clipped() -> None:
    """epsilon 0.5 puts the boundaries on numbers that exp can hit: exp(0) = 1 is inside, and halves are exact."""
    algo = Grpo(name="grpo", epsilon_low=0.5, epsilon_high=1.0, advantage_eps=1e-4)
    for ratio, advantage in ((0.5, -1.0), (2.0, 1.0)):
        logprobs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
        assert logprobs.exp().item() == ratio
        mask = torch.ones(1, 1, dtype=torch.bool)
        _, indicators = algo.loss(
            logprobs, torch.zeros(1, 1, dtype=torch.float64), torch.tensor([advantage]), mask, Totals(1, 1)
        )
        assert not any(bool(indicator.any()) for indicator in indicators.values())


def test_padding_has_no_part_in_anything() -> None:
    """Whatever stands off the mask, extreme ratios included, changes neither loss nor gradient nor indicators."""
    for algo in (GRPO, DAPO, SFT):
        results = []
        for filler in (-1.0, -60.0, 0.0):
            example = _example()
            with torch.no_grad():
                example["logprobs"][~example["mask"]] = filler
            loss, indicators = algo.loss(**example, totals=Totals(sequences=4, tokens=8))
            loss.backward()
            results.append((loss.item(), example["logprobs"].grad, {k: v.tolist() for k, v in indicators.items()}))
        for other in results[1:]:
            assert other[0] == results[0][0]
            assert torch.equal(other[1], results[0][1])
            assert other[2] == results[0][2]


# --- the split of a step ---------------------------------------------------------------------------------------------


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    """Completion lengths of a step (0 allowed, not all 0), the cuts of its split, and a seed."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=2, max_size=9).filter(any))
    cuts = draw(st.lists(st.integers(1, len(lengths) - 1), unique=True).map(sorted))
    return lengths, cuts, draw(st.integers(0, 2**20))


def _random_step(lengths: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths) + 2  # columns of prompt come first
    shape = (len(lengths), width)
    old = -5 * torch.rand(shape, generator=generator, dtype=torch.float64)
    logprobs = old + 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64)
    advantages = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    mask = torch.zeros(shape, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, 2 : 2 + length] = True
    return logprobs, old, advantages, mask


@ALGORITHMS
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(step=steps())
def test_loss_and_gradient_do_not_depend_on_the_split(algo: Any, step: tuple[list[int], list[int], int]) -> None:
    lengths, cuts, seed = step
    logprobs, old, advantages, mask = _random_step(lengths, seed)
    totals = Totals(sequences=len(lengths), tokens=int(mask.sum()))

    def run(bounds: list[int]) -> tuple[float, torch.Tensor, dict[str, list[Any]]]:
        leaf = logprobs.clone().requires_grad_()
        value, marks = 0.0, {}
        for low, high in zip([0, *bounds], [*bounds, len(lengths)], strict=True):
            rows = slice(low, high)
            loss, indicators = algo.loss(leaf[rows], old[rows], advantages[rows], mask[rows], totals)
            loss.backward()
            value += loss.item()
            for name, indicator in indicators.items():
                marks.setdefault(name, []).extend(indicator.tolist())
        assert leaf.grad is not None
        return value, leaf.grad, marks

    whole, parts = run([]), run(cuts)
    assert parts[0] == pytest.approx(whole[0], abs=1e-12)
    assert torch.allclose(parts[1], whole[1], rtol=0, atol=1e-12)
    assert parts[2] == whole[2]


@ALGORITHMS
@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(step=steps())
def test_loss_against_loops(algo: Any, step: tuple[list[int], list[int], int]) -> None:
    """The definitions once more, token by token, without tensors."""
    lengths, _, seed = step
    logprobs, old, advantages, mask = _random_step(lengths, seed)
    loss, _ = algo.loss(logprobs, old, advantages, mask, Totals(len(lengths), int(mask.sum())))
    rows: list[list[float]] = []
    for row in range(len(lengths)):
        terms = []
        for column in mask[row].nonzero().flatten().tolist():
            if algo.name == "sft":
                terms.append(-logprobs[row, column].item())
                continue
            ratio, a = math.exp(logprobs[row, column].item() - old[row, column].item()), advantages[row].item()
            clipped = max(1 - algo.epsilon_low, min(1 + algo.epsilon_high, ratio))
            terms.append(-min(ratio * a, clipped * a))
        rows.append(terms)
    if algo.name == "grpo":
        expected = sum(sum(terms) / len(terms) if terms else 0.0 for terms in rows) / len(rows)
    else:
        expected = sum(map(sum, rows)) / sum(map(len, rows))
    assert loss.item() == pytest.approx(expected, abs=1e-12)


# --- advantages ------------------------------------------------------------------------------------------------------

GROUPED = pytest.mark.parametrize("algo", [GRPO, DAPO], ids=lambda algo: algo.name)


@GROUPED
def test_advantages_by_hand(algo: Any) -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.2, 0.2, 1.2, 0.2]], dtype=torch.float64)
    first = math.sqrt((0.75**2 + 3 * 0.25**2) / 3)  # Bessel: divided by G - 1
    second = math.sqrt(4 * 0.5**2 / 3)
    expected = [
        [0.75 / (first + 1e-4), *[-0.25 / (first + 1e-4)] * 3],
        [0.5 / (second + 1e-4), -0.5 / (second + 1e-4)] * 2,
    ]
    assert torch.allclose(algo.advantages(rewards), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


@GROUPED
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_advantages_sum_to_zero_within_each_group(algo: Any, data: st.DataObject) -> None:
    groups, size = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 16))
    values = st.lists(st.sampled_from([0.0, 0.2, 1.0, 1.2]), min_size=groups * size, max_size=groups * size)
    rewards = torch.tensor(data.draw(values)).view(groups, size)  # FP32, as in a run
    assert algo.advantages(rewards).sum(1).abs().max() < 1e-4


@GROUPED
@pytest.mark.parametrize("reward", [0.0, 0.1, 0.2, 0.7, 1.0, 1.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_group_of_equal_rewards_has_no_advantage_at_all(algo: Any, reward: float, dtype: torch.dtype) -> None:
    """Exactly 0: rounding of the mean, divided by a standard deviation of the same rounding, would be a gradient."""
    for size in range(2, 33):
        rewards = torch.full((2, size), reward, dtype=dtype)
        rewards[1, 0] += 0.5
        advantages = algo.advantages(rewards)
        assert torch.equal(advantages[0], torch.zeros(size, dtype=dtype)), size
        assert advantages[1, 0] > 0.5 and (advantages[1, 1:] < 0).all()


@pytest.mark.parametrize(
    "changed",
    [{"epsilon_low": 0.0}, {"epsilon_low": 1.0}, {"epsilon_high": 0.0}, {"epsilon_high": -1.0}, {"advantage_eps": 0.0}],
)
@pytest.mark.parametrize("kind", [Grpo, Dapo])
def test_values_that_make_no_sense_are_refused(kind: Any, changed: dict[str, float]) -> None:
    with pytest.raises(BadInput, match=next(iter(changed))):
        kind(**{"name": "x", "epsilon_low": 0.2, "epsilon_high": 0.2, "advantage_eps": 1e-4, **changed})
