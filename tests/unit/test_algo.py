"""Losses and advantages against numbers worked out by hand, and against themselves under every split of a step."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qerl_bench.algo import bnpo, cispo, dapo, dr_grpo, grpo, gspo, reinforce_pp, rloo, sft
from qerl_bench.algo.base import LossInputs
from qerl_bench.algo.kl import KLPenalty
from qerl_bench.algo.loss import step_loss
from qerl_bench.train.batch import advantages_of
from qerl_core.checks import ConfigError

NARROW: dict[str, Any] = {"epsilon_low": 0.2, "epsilon_high": 0.2}
CLIP: dict[str, Any] = {**NARROW, "delta": None, "advantage_eps": 1e-4}
GRPO = grpo.GRPO(name="grpo", **CLIP)
DAPO = dapo.DAPO(
    name="dapo",
    **{**CLIP, "epsilon_high": 0.28},
    max_resampling_rounds=0,
    on_no_signal="stop",
    length_limit=10,
    overlong_share=0.0,
    overlong_factor=1.0,
)
BNPO = bnpo.BNPO(name="bnpo", **CLIP, chunk=2)
DR_GRPO = dr_grpo.DrGRPO(name="dr_grpo", **NARROW, delta=None, length_limit=10)
GSPO = gspo.GSPO(name="gspo", **CLIP)
CISPO = cispo.CISPO(name="cispo", epsilon_low=1.0, epsilon_high=0.2, advantage_eps=1e-4)
RLOO = rloo.RLOO(name="rloo", **NARROW)
REINFORCE_PP = reinforce_pp.ReinforcePlusPlus(name="reinforce_pp", **NARROW, advantage_eps=1e-4, group_baseline=False)
SFT = sft.SFT(name="sft", right_only=False)
ON_POLICY = [GRPO, DAPO, BNPO, DR_GRPO, GSPO, CISPO, RLOO, REINFORCE_PP]
ALGORITHMS = pytest.mark.parametrize("algo", [*ON_POLICY, SFT], ids=lambda algo: algo.name)
NO_KL = KLPenalty(coef=0.0, estimator="k3", ratio_weighted=True, every=0)


def loss_of_one_batch(
    algo: Any, kl: KLPenalty = NO_KL, **terms: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of a step that is one micro-batch."""
    return step_loss(algo, kl, LossInputs(**terms), algo.loss_weights(terms["mask"].sum(1)))


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
    loss, indicators = loss_of_one_batch(GRPO, **example)
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
    loss, indicators = loss_of_one_batch(DAPO, **example)
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
    loss, indicators = loss_of_one_batch(
        SFT, logprobs=logprobs, old_logprobs=logprobs.detach(), advantages=torch.zeros(2), mask=mask
    )
    assert loss.item() == pytest.approx(3.5 / 3, abs=1e-12)
    assert indicators == {}
    loss.backward()
    expected = torch.tensor([[-1 / 3, -1 / 3, 0], [-1 / 3, 0, 0]], dtype=torch.float64)
    assert torch.allclose(logprobs.grad, expected, rtol=0, atol=1e-15)
    with pytest.raises(AssertionError):
        SFT.advantages(torch.zeros(1, 2), torch.ones(1, 2))


def test_on_policy_step_is_the_plain_policy_gradient() -> None:
    """With old = new (one update per rollout) the loss is -A per token and its gradient -A / weight, clips or not."""
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]], dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1], [1, 0]], dtype=torch.bool)
    advantages = torch.tensor([2.0, -1.0], dtype=torch.float64)
    loss, indicators = loss_of_one_batch(
        GRPO, logprobs=logprobs, old_logprobs=logprobs.detach(), advantages=advantages, mask=mask
    )
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
        terms = LossInputs(
            logprobs=logprobs, old_logprobs=old, advantages=torch.tensor([sign], dtype=torch.float64), mask=mask
        )
        indicators = algo.token_loss(terms).indicators
        clipped = {key: value.tolist() for key, value in indicators.items()}
        expected = {key: [[False, False]] for key in clipped}
        if sign == advantage:
            expected[name] = [[False, True]]
        assert clipped == expected


def test_a_ratio_exactly_on_the_boundary_is_not_clipped() -> None:
    """epsilon 0.5 puts the boundaries on numbers that exp can hit: exp(0) = 1 is inside, and halves are exact."""
    algo = replace(GRPO, epsilon_low=0.5, epsilon_high=1.0)
    for ratio, advantage in ((0.5, -1.0), (2.0, 1.0)):
        logprobs = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
        assert logprobs.exp().item() == ratio
        mask = torch.ones(1, 1, dtype=torch.bool)
        old = torch.zeros(1, 1, dtype=torch.float64)
        terms = LossInputs(logprobs=logprobs, old_logprobs=old, advantages=torch.tensor([advantage]), mask=mask)
        indicators = algo.token_loss(terms).indicators
        assert not any(bool(indicator.any()) for indicator in indicators.values())


def test_padding_has_no_part_in_anything() -> None:
    """Whatever stands off the mask, extreme ratios included, changes neither loss nor gradient nor indicators."""
    for algo in (*ON_POLICY, SFT):
        results = []
        for filler in (-1.0, -60.0, 0.0):
            example = _example()
            with torch.no_grad():
                example["logprobs"][~example["mask"]] = filler
            loss, indicators = loss_of_one_batch(algo, **example)
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
@given(step=steps(), coef=st.sampled_from([0.0, 0.1]))
def test_loss_and_gradient_do_not_depend_on_the_split(
    algo: Any, step: tuple[list[int], list[int], int], coef: float
) -> None:
    lengths, cuts, seed = step
    logprobs, old, advantages, mask = _random_step(lengths, seed)
    kl, reference = replace(NO_KL, coef=coef), old - 0.1
    weights = algo.loss_weights(mask.sum(1))

    def run(bounds: list[int]) -> tuple[float, torch.Tensor, dict[str, list[Any]]]:
        leaf = logprobs.clone().requires_grad_()
        value, marks = 0.0, {}
        for low, high in zip([0, *bounds], [*bounds, len(lengths)], strict=True):
            rows = slice(low, high)
            terms = LossInputs(
                logprobs=leaf[rows],
                old_logprobs=old[rows],
                advantages=advantages[rows],
                mask=mask[rows],
                reference_logprobs=reference[rows],
            )
            loss, indicators = step_loss(algo, kl, terms, weights[rows])
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
    loss, _ = loss_of_one_batch(algo, logprobs=logprobs, old_logprobs=old, advantages=advantages, mask=mask)
    rows: list[list[float]] = []
    for row in range(len(lengths)):
        new_row, old_row = logprobs[row][mask[row]].tolist(), old[row][mask[row]].tolist()
        a, total = advantages[row].item(), sum(new_row) - sum(old_row)
        terms = []
        for new, before in zip(new_row, old_row, strict=True):
            ratio = math.exp(new - before)
            if algo.name == "gspo":
                ratio = math.exp(total / len(new_row))
            if algo.name == "rloo":
                ratio = math.exp(total)
            if algo.name == "sft":
                terms.append(-new)
            elif algo.name == "cispo":
                terms.append(-max(1 - algo.epsilon_low, min(1 + algo.epsilon_high, ratio)) * a * new)
            else:
                clipped = max(1 - algo.epsilon_low, min(1 + algo.epsilon_high, ratio))
                terms.append(-min(ratio * a, clipped * a))
        rows.append(terms)
    means = [sum(terms) / len(terms) if terms else 0.0 for terms in rows]
    if algo.name in ("grpo", "gspo", "rloo"):
        expected = sum(means) / len(rows)
    elif algo.name == "dr_grpo":
        expected = sum(map(sum, rows)) / (len(rows) * algo.length_limit)
    elif algo.name == "bnpo":
        chunks = [rows[i : i + algo.chunk] for i in range(0, len(rows), algo.chunk)]
        expected = sum(sum(map(sum, chunk)) / max(1, sum(map(len, chunk))) for chunk in chunks) / len(chunks)
    else:
        expected = sum(map(sum, rows)) / sum(map(len, rows))
    assert loss.item() == pytest.approx(expected, abs=1e-12)


# --- advantages ------------------------------------------------------------------------------------------------------

GROUPED = pytest.mark.parametrize("algo", [GRPO, DAPO, BNPO, GSPO, CISPO], ids=lambda algo: algo.name)


def lengths_of(rewards: torch.Tensor) -> torch.Tensor:
    return torch.ones(rewards.shape, dtype=torch.long)


@GROUPED
def test_advantages_by_hand(algo: Any) -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [1.2, 0.2, 1.2, 0.2]], dtype=torch.float64)
    first = math.sqrt((0.75**2 + 3 * 0.25**2) / 3)  # Bessel: divided by G - 1
    second = math.sqrt(4 * 0.5**2 / 3)
    expected = [
        [0.75 / (first + 1e-4), *[-0.25 / (first + 1e-4)] * 3],
        [0.5 / (second + 1e-4), -0.5 / (second + 1e-4)] * 2,
    ]
    assert torch.allclose(
        algo.advantages(rewards, lengths_of(rewards)), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12
    )


@GROUPED
@settings(max_examples=50, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_advantages_sum_to_zero_within_each_group(algo: Any, data: st.DataObject) -> None:
    groups, size = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 16))
    values = st.lists(st.sampled_from([0.0, 0.2, 1.0, 1.2]), min_size=groups * size, max_size=groups * size)
    rewards = torch.tensor(data.draw(values)).view(groups, size)  # FP32, as in a run
    assert algo.advantages(rewards, lengths_of(rewards)).sum(1).abs().max() < 1e-4


@GROUPED
@pytest.mark.parametrize("reward", [0.0, 0.1, 0.2, 0.7, 1.0, 1.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_group_of_equal_rewards_has_no_advantage_at_all(algo: Any, reward: float, dtype: torch.dtype) -> None:
    """Exactly 0: rounding of the mean, divided by a standard deviation of the same rounding, would be a gradient."""
    for size in range(2, 33):
        rewards = torch.full((2, size), reward, dtype=dtype)
        rewards[1, 0] += 0.5
        advantages = algo.advantages(rewards, lengths_of(rewards))
        assert torch.equal(advantages[0], torch.zeros(size, dtype=dtype)), size
        assert advantages[1, 0] > 0.5 and (advantages[1, 1:] < 0).all()


@pytest.mark.parametrize(
    ("algo", "changed"),
    [
        *[(GRPO, {"epsilon_low": value}) for value in (0.0, 1.0)],
        *[(GRPO, {"epsilon_high": value}) for value in (0.0, -1.0)],
        (GRPO, {"advantage_eps": 0.0}),
        (GRPO, {"delta": 1.2}),
        (DAPO, {"epsilon_high": 0.0}),
        (DAPO, {"max_resampling_rounds": -1}),
        (DAPO, {"on_no_signal": "cry"}),
        (DAPO, {"overlong_share": 1.0}),
        (DAPO, {"length_limit": 0}),
        (DAPO, {"overlong_factor": -0.1}),
        (BNPO, {"chunk": 0}),
        (DR_GRPO, {"length_limit": 0}),
        (GSPO, {"delta": 0.5}),
        (CISPO, {"epsilon_low": 1.5}),
        (CISPO, {"epsilon_high": 0.0}),
        (RLOO, {"epsilon_low": 2.0}),
        (REINFORCE_PP, {"advantage_eps": 0.0}),
        (REINFORCE_PP, {"group_baseline": "yes"}),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else str(value),
)
def test_values_that_make_no_sense_are_refused(algo: Any, changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changed))):
        replace(algo, **changed)


# --- by hand, the others ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algo", "weights"),
    [
        (GRPO, [1 / 8, 1 / 12, 1 / 4, 1 / 8]),  # lengths 2, 3, 1, 2 of four completions
        (DAPO, [1 / 8] * 4),
        (BNPO, [1 / 10, 1 / 10, 1 / 6, 1 / 6]),  # two chunks, of 5 and of 3 tokens
        (DR_GRPO, [1 / 40] * 4),
        (GSPO, [1 / 8, 1 / 12, 1 / 4, 1 / 8]),
        (CISPO, [1 / 8] * 4),
        (RLOO, [1 / 4] * 4),
        (REINFORCE_PP, [1 / 8] * 4),
        (SFT, [1 / 8] * 4),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_weights_by_hand(algo: Any, weights: list[float]) -> None:
    assert algo.loss_weights(torch.tensor([2, 3, 1, 2])).tolist() == pytest.approx(weights, abs=1e-15)


def test_gspo_by_hand() -> None:
    """Completion 1: ratios 1 and 1.5, sqrt(1.5) = 1.22 is clipped. Completion 2: (0.5 * 1 * 1.25)^(1/3)."""
    example = _example()
    loss, indicators = loss_of_one_batch(GSPO, **example)
    second, fourth = (0.5 * 1.0 * 1.25) ** (1 / 3), 0.9**0.5
    rows = [-1.2, max(second, 0.8), -0.5 * 1.2, 0.5 * fourth]
    assert loss.item() == pytest.approx(sum(rows) / 4, abs=1e-12)
    loss.backward()
    gradient = torch.zeros(4, 3, dtype=torch.float64)
    gradient[1] = second / 3 / 4  # d second / d logprob = second / 3 at each of its tokens
    gradient[3, :2] = 0.5 * fourth / 2 / 4
    assert torch.allclose(example["logprobs"].grad, gradient, rtol=0, atol=1e-12)
    assert indicators["clip_ratio/high_mean"].tolist() == [[1, 1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 0]]


def test_cispo_by_hand() -> None:
    """The weight is capped at 1.2 and has no gradient of its own: every token keeps -w A / 8."""
    example = _example()
    logprobs = example["logprobs"].detach()
    loss, indicators = loss_of_one_batch(CISPO, **example)
    pull = torch.tensor([[1.0, 1.2, 0], [-0.5, -1.0, -1.2], [0.6, 0, 0], [-0.5, -0.45, 0]], dtype=torch.float64) / 8
    assert loss.item() == pytest.approx(-(pull * logprobs).sum().item(), abs=1e-12)
    loss.backward()
    assert torch.allclose(example["logprobs"].grad, -pull, rtol=0, atol=1e-12)
    assert not indicators["clip_ratio/low_mean"].any()


def test_rloo_by_hand() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.2]], dtype=torch.float64)
    expected = [1 - 0.2 / 3, 0 - 1.2 / 3, 0 - 1.2 / 3, 0.2 - 1 / 3]
    assert RLOO.advantages(rewards, lengths_of(rewards))[0].tolist() == pytest.approx(expected, abs=1e-12)
    example = _example()
    loss, _ = loss_of_one_batch(RLOO, **example)
    whole = 0.5 * 1.25  # the ratio of completion 2 as a whole is clipped at 0.8 from below
    rows = [-1.2, max(whole, 0.8), -0.5 * 1.2, 0.5 * 0.9]
    assert loss.item() == pytest.approx(sum(rows) / 4, abs=1e-12)
    loss.backward()
    gradient = torch.zeros(4, 3, dtype=torch.float64)
    gradient[3, :2] = 0.5 * 0.9 / 4
    assert torch.allclose(example["logprobs"].grad, gradient, rtol=0, atol=1e-12)


def test_reinforce_pp_advantages_by_hand() -> None:
    """Rewards 1, 0, 0, 1 with 1, 2, 3, 4 tokens: mean 0.5 over ten tokens, variance 10 * 0.25 / 9."""
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    lengths = torch.tensor([[1, 2], [3, 4]])
    std = math.sqrt(2.5 / 9)
    found = REINFORCE_PP.advantages(rewards, lengths)
    assert found.flatten().tolist() == pytest.approx([v / (std + 1e-4) for v in (0.5, -0.5, -0.5, 0.5)], abs=1e-12)
    assert (found * lengths).sum().item() == pytest.approx(0, abs=1e-12)
    shifted = replace(REINFORCE_PP, group_baseline=True).advantages(rewards + torch.tensor([[5.0], [0.0]]), lengths)
    centred = torch.tensor([[0.5, -0.5], [-0.5, 0.5]], dtype=torch.float64)  # a group's level no longer matters
    assert torch.allclose(shifted, found.new_tensor((centred / (std + 1e-4)).tolist()), rtol=0, atol=1e-12)
    assert torch.equal(REINFORCE_PP.advantages(torch.full((2, 2), 0.2), lengths), torch.zeros(2, 2))


def test_dr_grpo_and_rloo_do_not_divide_by_the_spread() -> None:
    rewards = torch.tensor([[1.0, 0.0], [0.2, 0.0]], dtype=torch.float64)
    assert DR_GRPO.advantages(rewards, lengths_of(rewards)).tolist() == [[0.5, -0.5], [0.1, -0.1]]
    assert RLOO.advantages(rewards, lengths_of(rewards)).tolist() == [[1.0, -1.0], [0.2, -0.2]]


def test_overlong_penalty_by_hand() -> None:
    """Limit 10, stretch 4: nothing up to 6 tokens, then a quarter a token, all of it at 10."""
    algo = replace(DAPO, overlong_share=0.4)
    assert algo.overlong(torch.tensor([1, 6, 7, 8, 10, 12])).tolist() == pytest.approx([0, 0, 0.25, 0.5, 1, 1])
    lengths = torch.tensor([[3, 10, 8, 6]])
    shaped = torch.tensor([[1.0, 1 - 2 * 1.0, 1 - 2 * 0.5, 1.0]])
    found = replace(algo, overlong_factor=2.0).advantages(torch.ones(1, 4), lengths)
    assert torch.allclose(found, DAPO.advantages(shaped, lengths), rtol=0, atol=1e-5)


# --- KL --------------------------------------------------------------------------------------------------------------


def _kl(estimator: str, weighted: bool, coef: float = 0.5) -> KLPenalty:
    return KLPenalty(coef=coef, estimator=estimator, ratio_weighted=weighted, every=0)


@pytest.mark.parametrize(
    ("estimator", "values"),
    [("k1", [0.5, -1.0]), ("k2", [0.125, 0.5]), ("k3", [math.exp(-0.5) + 0.5 - 1, math.e - 1 - 1])],
)
def test_kl_estimates_by_hand(estimator: str, values: list[float]) -> None:
    logprobs, reference = torch.tensor([[-1.0, -2.0, 9.0]]), torch.tensor([[-1.5, -1.0, 0.0]])
    mask = torch.tensor([[True, True, False]])
    found = _kl(estimator, weighted=True).estimate(logprobs, reference, mask)
    assert found[0].tolist() == pytest.approx([*values, 0.0], abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_estimates_have_the_right_mean(estimator: str) -> None:
    """Summed over a whole vocabulary with its probabilities, k1 and k3 are KL(p || p_ref) exactly."""
    generator = torch.Generator().manual_seed(0)
    p, reference = (torch.randn(1, 50, generator=generator, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    found = _kl(estimator, weighted=True).estimate(p, reference, torch.ones(1, 50, dtype=torch.bool))
    assert (p.exp() * found).sum().item() == pytest.approx((p.exp() * (p - reference)).sum().item(), abs=1e-12)


@pytest.mark.parametrize(
    ("estimator", "weighted", "right"),
    [("k1", True, True), ("k2", False, True), ("k3", True, True), ("k2", True, False), ("k3", False, False)],
)
def test_which_kl_losses_have_the_gradient_of_the_divergence(estimator: str, weighted: bool, right: bool) -> None:
    """Expected gradient with respect to the logits, over all tokens of a small vocabulary, on policy."""
    generator = torch.Generator().manual_seed(3)
    logits, other = (torch.randn(8, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    reference = other.log_softmax(-1)
    p = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((p.exp() * (p - reference)).sum(), logits)
    logprobs = logits.log_softmax(-1)[None]
    terms = LossInputs(
        logprobs=logprobs,
        old_logprobs=logprobs.detach(),
        advantages=torch.zeros(1, dtype=torch.float64),
        mask=torch.ones(1, 8, dtype=torch.bool),
        reference_logprobs=reference[None],
    )
    estimate = _kl(estimator, weighted).estimate(logprobs, terms.reference_logprobs, terms.mask)
    ratio = GRPO.token_loss(terms).ratio
    expected = (p.exp().detach() * (estimate * ratio if weighted else estimate)[0]).sum()
    (found,) = torch.autograd.grad(expected, logits)
    assert torch.allclose(found, exact, rtol=0, atol=1e-12) == right


def test_kl_is_added_per_token_with_the_weights_of_the_algorithm() -> None:
    example = _example()
    reference = example["old_logprobs"] - 0.3
    plain, _ = loss_of_one_batch(GRPO, **example)
    found, columns = loss_of_one_batch(GRPO, _kl("k2", weighted=False), **example, reference_logprobs=reference)
    x = (example["logprobs"] - reference).detach()
    expected = sum((x[i, :n].square() / 2).mean().item() for i, n in enumerate([2, 3, 1, 2])) / 4
    assert (found - plain).item() == pytest.approx(0.5 * expected, abs=1e-12)
    assert columns["kl"][example["mask"]].tolist() == pytest.approx((x.square() / 2)[example["mask"]].tolist())


@pytest.mark.parametrize(
    "changed",
    [
        {"coef": -0.1},
        {"coef": True},
        {"estimator": "k4"},
        {"ratio_weighted": 1},
        {"estimator": "k1", "ratio_weighted": False},
    ],
)
def test_kl_values_that_make_no_sense_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changed))):
        replace(_kl("k3", weighted=True), **changed)


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        (lambda rewards: rewards.T, r"here \(4, 16\), and gave \(16, 4\)"),
        (lambda rewards: rewards[:, :1], r"gave \(4, 1\)"),
        (lambda rewards: rewards.flatten(), r"gave \(64,\)"),
        (lambda rewards: rewards.tolist(), "gave list"),
        (lambda rewards: None, "gave NoneType"),
    ],
)
def test_advantages_of_another_shape_are_refused(gives: Any, said: str) -> None:
    """Flattened, those of a user's own algorithm would be of other completions."""

    class Own(grpo.GRPO):
        def advantages(self, rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            return gives(rewards)

    rewards = torch.rand(4, 16)
    with pytest.raises(ConfigError, match=f"Own.advantages must give a tensor of the shape of rewards.*{said}"):
        advantages_of(Own(name="own", **CLIP), rewards, torch.ones(4, 16, dtype=torch.int64))
    assert torch.equal(advantages_of(GRPO, rewards, rewards), GRPO.advantages(rewards, rewards))
