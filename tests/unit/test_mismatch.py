"""The gap between sampler and trainer: its two parts, the importance weights for it, and the warning."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from qerl_bench.algo.base import LossInputs
from qerl_bench.algo.importance_sampling import ImportanceSampling
from qerl_bench.algo.loss import step_loss
from qerl_bench.train.batch import Batch, make_batch
from qerl_bench.train.update import make_optimizer, update
from qerl_core.metrics import compute, definitions

Maker = Callable[..., Any]
NO_RUN: Any = None  # a run directory is needed only if something is not finite
LENGTHS = (4, 1, 9, 6, 3, 12)


def _spec(**changed: Any) -> ImportanceSampling:
    usual = {"mode": "truncate", "level": "token", "clip_max": 2.0, "clip_min": None}
    usual |= {"warn_ess": 0.5, "split_mismatch": True}
    return ImportanceSampling(**{**usual, **changed})


def _state(policy: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in policy.trainable])


# --- weights by hand -------------------------------------------------------------------------------------------------

# Three completions of 3, 1 and 0 tokens behind a prompt token. Ratios old / sampler: 2, 4, 1/8 and 3.
MASK = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
RATIOS = torch.tensor([[7.0, 2.0, 4.0, 0.125], [7.0, 3.0, 7.0, 7.0], [7.0, 7.0, 7.0, 7.0]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"clip_max": 2.5}, [[1, 2, 2.5, 0.125], [1, 2.5, 1, 1]]),
        ({"clip_max": 3.5, "mode": "mask"}, [[1, 2, 0, 0.125], [1, 3, 1, 1]]),
        ({"clip_max": 3.5, "mode": "mask", "clip_min": 0.5}, [[1, 2, 0, 0], [1, 3, 1, 1]]),
        ({"level": "sequence", "clip_max": 2.5}, [[1, 1, 1, 1], [1, 2.5, 1, 1]]),  # 2 x 4 / 8 = 1
        ({"level": "sequence", "clip_max": 2.5, "mode": "mask"}, [[1, 1, 1, 1], [1, 0, 1, 1]]),
        ({"level": "sequence", "clip_max": 3.5, "mode": "mask", "clip_min": 0.9}, [[1, 1, 1, 1], [1, 3, 1, 1]]),
    ],
    ids=str,
)
def test_weights_by_hand(changed: dict[str, Any], expected: list[list[float]]) -> None:
    sampler = -torch.rand(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 1
    spec = _spec(**changed)
    raw = spec.importance_weights(sampler + RATIOS.log(), sampler, MASK)
    assert spec.clip_or_mask(raw).tolist() == [pytest.approx(row) for row in [*expected, [1, 1, 1, 1]]]
    assert (raw[~MASK] == 1).all()
    whole = [[1, 1, 1, 1], [1, 3, 1, 1], [1, 1, 1, 1]] if spec.level == "sequence" else torch.where(MASK, RATIOS, 1.0)
    assert torch.allclose(raw, torch.as_tensor(whole, dtype=torch.float64))


def test_the_bounds_themselves_are_kept() -> None:
    raw = torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0])
    assert _spec(mode="mask", clip_min=0.5).clip_or_mask(raw).tolist() == [0, 0.5, 1, 2, 0]
    assert _spec(mode="mask").clip_or_mask(raw).tolist() == [0.25, 0.5, 1, 2, 0]
    assert _spec().clip_or_mask(raw).tolist() == [0.25, 0.5, 1, 2, 2]


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_weights_too_large_for_numbers_are_bounded_like_any(mode: str) -> None:
    mask = torch.ones(1, 50, dtype=torch.bool)
    spec = _spec(level="sequence", mode=mode)
    raw = spec.importance_weights(torch.zeros(1, 50), torch.full((1, 50), -30.0), mask)  # exp(1500)
    assert raw.isfinite().all()
    assert spec.clip_or_mask(raw).tolist() == [[2.0 if mode == "truncate" else 0.0] * 50]


def test_metrics_of_weights_by_hand() -> None:
    raw = torch.tensor([2.0, 4.0, 0.5, 3.0], dtype=torch.float64)
    assert compute.importance_metrics(raw.clamp(max=2.5), raw) == {
        "importance_sampling/weight_mean": (2 + 2.5 + 0.5 + 2.5) / 4,
        "importance_sampling/weight_max": 4.0,
        "importance_sampling/changed_frac": 0.5,
    }


def test_the_loss_with_weights_by_hand(make_experiment: Maker) -> None:
    """GRPO, first update (ratio 1): -A w averaged over each completion's tokens, then over completions; then the KL."""
    experiment = make_experiment("algo=grpo", "kl.coef=0.5", "kl.estimator=k2")
    old = torch.zeros(3, 4, dtype=torch.float64)
    leaf = old.clone().requires_grad_()
    terms = LossInputs(
        logprobs=leaf,
        old_logprobs=old,
        advantages=torch.tensor([3.0, -2.0, 1.0]).double(),
        mask=MASK,
        reference_logprobs=torch.where(MASK, -1.0, 0.0).double(),
        importance_weights=_spec(clip_max=2.5).clip_or_mask(torch.where(MASK, RATIOS, 1.0)),
    )
    loss, _ = step_loss(experiment.algo, experiment.kl, terms, experiment.algo.loss_weights(MASK.sum(1)))
    mean = (-3 * (2 + 2.5 + 0.125) / 3 + 2 * 2.5) / 3
    assert loss.item() == pytest.approx(mean + 0.5 * (0.5 + 0.5) / 3)  # (log p - log p_ref)^2 / 2 = 1/2, not weighted
    loss.backward()
    assert leaf.grad is not None
    assert leaf.grad[0, 2].item() == pytest.approx((-3 * 2.5 + 0.5 * (1 + 0.5)) / 9)  # the KL carries the ratio too
    assert (leaf.grad[~MASK] == 0).all()


# --- a step with noise -----------------------------------------------------------------------------------------------


def _world(make_policy: Maker, make_experiment: Maker, *words: str, sigma: float = 0.3) -> tuple[Any, Any, Batch]:
    """A noisy experiment, its policy, and what an engine with small errors of its own sampled under the noise."""
    noise = ("aqn=constant", f"aqn.level={sigma}") if sigma else ()
    words = ("train.micro_batch_tokens=100", "train.mismatch_share=1", "rollout.temperature=0.8", *noise, *words)
    experiment = make_experiment("quant=nvfp4", *words)
    policy = make_policy(*words, adapted=True)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 256, (2 + i,), generator=generator).tolist() for i in range(6)]
    completions = [torch.randint(0, 256, (length,), generator=generator).tolist() for length in LENGTHS]
    bare = make_batch(prompts, completions, policy.pad_id, policy.device)
    with torch.no_grad(), policy.noise.for_rollout(1, 0):
        noisy = policy.token_stats(bare.input_ids, bare.mask, 0.8).logprobs
    engine = torch.where(bare.mask, noisy + 0.1 * torch.randn(noisy.shape, generator=generator), 0.0)
    advantages = torch.tensor([1.0, -0.5, 0.0, 2.0, -1.5, 0.0])
    return experiment, policy, dataclasses.replace(bare, sampler_logprobs=engine, advantages=advantages)


def _run(experiment: Any, policy: Any, batch: Batch) -> tuple[dict[str, float], torch.Tensor]:
    optimizer = make_optimizer(policy, experiment.optim)
    found = update(experiment, policy, optimizer, batch, NO_RUN, 1)
    del found["train/micro_batches"]
    moments = torch.cat([optimizer.state[p]["exp_avg"].flatten() for p in policy.trainable])
    return found, moments


def _loops(later: torch.Tensor, earlier: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    gaps = [float(a) - float(b) for a, b in zip(later[mask], earlier[mask], strict=True)]
    weights = [math.exp(gap) for gap in gaps]
    return {
        "kl": math.fsum(w - gap - 1 for w, gap in zip(weights, gaps, strict=True)) / len(gaps),
        "logp_abs_max": max(map(abs, gaps)),
        "ess": math.fsum(weights) ** 2 / (len(gaps) * math.fsum(w * w for w in weights)),
    }


@pytest.mark.parametrize("site", ["rollout", "rollout_and_old_logprobs", "rollout_and_training"])
def test_the_mismatch_splits_into_kernel_and_noise(make_policy: Maker, make_experiment: Maker, site: str) -> None:
    experiment, policy, batch = _world(make_policy, make_experiment, f"noise.site={site}")
    with torch.no_grad():
        clean = policy.token_stats(batch.input_ids, batch.mask, 0.8).logprobs
        with policy.noise.for_rollout(1, 0):
            noisy = policy.token_stats(batch.input_ids, batch.mask, 0.8).logprobs
    engine, mask = batch.sampler_logprobs, batch.mask
    trains = noisy if site == "rollout_and_training" else clean
    found, _ = _run(experiment, policy, batch)
    kernel, noise = _loops(noisy, engine, mask), _loops(trains, noisy, mask)
    for name in ("kl", "logp_abs_max", "ess"):
        assert found[f"mismatch/kernel_{name}"] == pytest.approx(kernel[name], rel=1e-3, abs=1e-7)
        assert found[f"mismatch/noise_{name}"] == pytest.approx(noise[name], rel=1e-3, abs=1e-7)
        assert found[f"mismatch/{name}"] == pytest.approx(_loops(trains, engine, mask)[name], rel=1e-3, abs=1e-7)
    if site == "rollout_and_training":
        assert [found[f"mismatch/noise_{name}"] for name in ("kl", "logp_abs_max", "ess")] == [0, 0, 1]
    else:
        assert min(noise["kl"], kernel["kl"]) > 1e-3 and abs(noise["kl"] / kernel["kl"] - 1) > 0.1
    sequences = [float((trains - engine)[row][mask[row]].double().sum()) for row in range(6)]
    size = math.fsum(map(math.exp, sequences)) ** 2 / (6 * math.fsum(math.exp(2 * gap) for gap in sequences))
    assert found["mismatch/ess_sequence"] == pytest.approx(size, rel=1e-3) and size < 0.99


def test_without_noise_all_mismatch_is_the_kernels(make_policy: Maker, make_experiment: Maker) -> None:
    experiment, policy, batch = _world(make_policy, make_experiment, sigma=0)
    found, _ = _run(experiment, policy, batch)
    for name, nothing in (("kl", 0), ("logp_abs_max", 0), ("ess", 1)):
        assert found[f"mismatch/noise_{name}"] == nothing
        assert found[f"mismatch/kernel_{name}"] == found[f"mismatch/{name}"] != nothing


@pytest.mark.parametrize(
    ("words", "sigma", "passes"),
    [
        ((), 0.3, 2 * 2),  # two micro-batches, twice
        (("train.updates_per_batch=2",), 0.3, 2 * 2 + 1),  # once more for the micro-batch that teaches
        (("importance_sampling.split_mismatch=false",), 0.3, 2),
        ((), 0, 2),
        (("noise.site=rollout_and_old_logprobs",), 0.3, 2 * 2),  # this pass is needed anyway
        (("noise.site=rollout_and_old_logprobs", "importance_sampling.split_mismatch=false"), 0.3, 2 * 2),
        (("noise.cadence=group",), 0.3, 2),
    ],
    ids=str,
)
def test_the_split_costs_one_forward_pass_with_noise_and_none_without(
    make_policy: Maker,
    make_experiment: Maker,
    listen: Maker,
    words: tuple[str, ...],
    sigma: float,
    passes: int,
) -> None:
    experiment, policy, batch = _world(make_policy, make_experiment, *words, sigma=sigma)
    seen = listen(policy, "token_stats")
    found, _ = _run(experiment, policy, batch)
    assert len(seen) == passes
    named = {name for name in found if name in definitions.MISMATCH_SPLIT}
    absent = "importance_sampling.split_mismatch=false" in words or "noise.cadence=group" in words
    assert named == (set() if absent else set(definitions.MISMATCH_SPLIT))
    assert not set(found) & set(definitions.IMPORTANCE_SAMPLING)


@pytest.mark.parametrize("words", [(), ("kl.coef=0.1", "train.updates_per_batch=2"), ("algo=rloo",)], ids=str)
def test_measuring_changes_nothing(make_policy: Maker, make_experiment: Maker, words: tuple[str, ...]) -> None:
    """Bit for bit the same step, split or not; and without weights, whatever the bounds of weights may be."""
    results = []
    for more in (
        (),
        ("importance_sampling.split_mismatch=false",),
        ("importance_sampling.clip_max=1.0", "importance_sampling.level=sequence"),
    ):
        experiment, policy, batch = _world(make_policy, make_experiment, *words, *more)
        found, _ = _run(experiment, policy, batch)
        results.append(
            ({name: value for name, value in found.items() if name not in definitions.MISMATCH_SPLIT}, _state(policy))
        )
    (first, state), *others = results
    for found, other in others:
        assert found == first and torch.equal(other, state)


def _bounds(mode: str, level: str) -> tuple[str, ...]:
    words = (f"importance_sampling.mode={mode}", f"importance_sampling.level={level}")
    return *words, "importance_sampling.clip_max=1.1", *(["importance_sampling.clip_min=0.8"] * (mode == "mask"))


@pytest.mark.parametrize(
    ("algo", "mode", "level"),  # every two of them meet
    [
        *(("grpo", "truncate", "token"), ("grpo", "mask", "sequence"), ("dapo", "truncate", "sequence")),
        *(("dapo", "mask", "token"), ("rloo", "truncate", "token"), ("rloo", "mask", "sequence")),
    ],
)
def test_a_step_with_weights_is_the_same_however_it_is_split(
    make_policy: Maker, make_experiment: Maker, algo: str, mode: str, level: str
) -> None:
    results = []
    for tokens in (1000, 20, 60):
        words = (*_bounds(mode, level), f"algo={algo}", f"train.micro_batch_tokens={tokens}", "optim.max_grad_norm=1e9")
        experiment, policy, batch = _world(make_policy, make_experiment, *words)
        results.append(_run(experiment, policy, batch))
    (first, moments), *others = results
    assert 0 < first["importance_sampling/changed_frac"] < 1
    for found, other in others:
        assert found == pytest.approx(first, rel=1e-4, abs=1e-6)
        assert torch.allclose(other, moments, rtol=0, atol=2e-6 * float(moments.abs().max()))
    experiment, policy, batch = _world(make_policy, make_experiment, f"algo={algo}", "optim.max_grad_norm=1e9")
    _, plain = _run(experiment, policy, batch)
    assert (plain - moments).abs().max() > 0.01 * moments.abs().max()


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("site", ["rollout", "rollout_and_old_logprobs"])
def test_the_weights_of_a_step_from_scratch(
    make_policy: Maker, make_experiment: Maker, mode: str, level: str, site: str
) -> None:
    """Of the policy that the ratio divides by, so that weight times ratio is new over sampler at every site."""
    bounds = _bounds(mode, level)
    experiment, policy, batch = _world(
        make_policy, make_experiment, *bounds, f"noise.site={site}", "train.updates_per_batch=2"
    )
    with torch.no_grad():
        old = policy.token_stats(batch.input_ids, batch.mask, 0.8).logprobs
        if site == "rollout_and_old_logprobs":
            with policy.noise.for_rollout(1, 0):
                old = policy.token_stats(batch.input_ids, batch.mask, 0.8).logprobs
    raw, used = [], []
    for row in range(6):
        gaps = [float(g) for g in (old - batch.sampler_logprobs)[row][batch.mask[row]]]
        whole = "importance_sampling.level=sequence" in bounds
        weights = [math.exp(math.fsum(gaps))] * len(gaps) if whole else [math.exp(gap) for gap in gaps]
        raw += weights
        if "importance_sampling.mode=mask" in bounds:
            used += [w if 0.8 <= w <= 1.1 else 0.0 for w in weights]
        else:
            used += [min(w, 1.1) for w in weights]
    found, _ = _run(experiment, policy, batch)
    assert {name: found[name] for name in definitions.IMPORTANCE_SAMPLING} == pytest.approx(
        {
            "importance_sampling/weight_mean": math.fsum(used) / len(used),
            "importance_sampling/weight_max": max(raw),
            "importance_sampling/changed_frac": sum(u != r for u, r in zip(used, raw, strict=True)) / len(used),
        },
        rel=1e-4,
    )
    assert found["importance_sampling/changed_frac"] > 0


def test_a_sample_of_the_micro_batches_measures_noise_and_says_how_much(
    make_policy: Maker, make_experiment: Maker
) -> None:
    """Of six micro-batches of one completion each, half: the numbers are those of these three alone."""
    words = ("train.micro_batch_tokens=20", "optim.max_grad_norm=1e9")
    full, whole = _run(*_world(make_policy, make_experiment, *words))
    half, sampled = _run(*_world(make_policy, make_experiment, *words, "train.mismatch_share=0.5"))
    least, _ = _run(*_world(make_policy, make_experiment, *words, "train.mismatch_share=0.01"))
    assert torch.equal(whole, sampled) and full["mismatch/measured_frac"] == 1
    assert 0 < least["mismatch/measured_frac"] < half["mismatch/measured_frac"] < 1
    moved = {name for name in full if half[name] != full[name]}
    assert {"mismatch/measured_frac", "mismatch/noise_kl"} <= moved <= set(definitions.MISMATCH_SPLIT)
    for found in (half, least):
        assert 0 < found["mismatch/noise_logp_abs_max"] <= full["mismatch/noise_logp_abs_max"]


# --- by position, and to the base ------------------------------------------------------------------------------------


def test_mismatch_by_position_is_that_of_the_tokens_there(make_policy: Maker, make_experiment: Maker) -> None:
    experiment, policy, batch = _world(make_policy, make_experiment, sigma=0)
    with torch.no_grad():
        trains = policy.token_stats(batch.input_ids, batch.mask, 0.8).logprobs
    found, _ = _run(experiment, policy, batch)
    for first, end in ((1, 4), (4, 16)):
        inside = torch.zeros_like(batch.mask)
        for row in range(len(LENGTHS)):
            inside[row, batch.mask[row].nonzero()[first - 1 : end - 1, 0]] = True
        kl = _loops(trains, batch.sampler_logprobs, inside)["kl"]
        assert found[f"mismatch/kl_by_position_{first}"] == pytest.approx(kl, rel=1e-3) and kl > 0
    assert not {f"mismatch/kl_by_position_{first}" for first in definitions.POSITIONS[2:]} & set(found)


def test_the_bins_of_positions_are_eight_powers_of_four() -> None:
    ends = [1, 3, 4, 15, 16, 63, 64, 255, 256, 1023, 1024, 4095, 4096, 16383, 16384, 10**6]
    gaps = torch.arange(1.0, len(ends) + 1).double() / 10
    found = compute.kl_by_position(gaps, torch.zeros_like(gaps), torch.tensor(ends))
    k3 = (gaps.exp() - gaps - 1).view(-1, 2).mean(1).tolist()
    assert [*found] == [*definitions.BY_POSITION] and [*found.values()] == pytest.approx(k3)
    assert compute.kl_by_position(gaps[:1], gaps[:1], torch.tensor([64])) == {"mismatch/kl_by_position_64": 0.0}


def test_shares_by_sign_by_hand() -> None:
    """Gaps of ln 2 up and down: k3 is 1 - ln 2 and ln 2 - 1/2. A token of advantage 0, far off, counts nowhere."""
    up, down = 1 - math.log(2), math.log(2) - 0.5
    gaps = torch.tensor([1, -1, 1, -1, -1, 0, 50]).double() * math.log(2)
    advantages = torch.tensor([2.0, 0.5, -1, -1e-3, -7, -1, 0]).double()
    whole = 2 * up + 3 * down
    found = compute.kl_by_sign(gaps - 1, torch.full_like(gaps, -1), advantages)
    assert [*found] == [*definitions.BY_SIGN]
    assert [*found.values()] == pytest.approx([2 * down / whole, up / whole, down / whole, up / whole], rel=1e-12)
    assert sum(found.values()) == pytest.approx(1, abs=1e-15)
    lone = compute.kl_by_sign(gaps[1:2], torch.zeros(1).double(), advantages[4:5])
    assert [*lone.values()] == [1, 0, 0, 0]
    small = torch.tensor([1e-4, -1e-4]).double()
    assert [*compute.kl_by_sign(small, 0 * small, small).values()] == pytest.approx([0.5, 0, 0, 0.5], rel=1e-3)
    assert compute.kl_by_sign(small / 100, 0 * small, small) == {}  # as small as FP32 rounds log-probabilities


def test_without_a_gap_or_an_advantage_there_is_no_share() -> None:
    gaps, some = torch.tensor([0.3, -0.2]).double(), torch.tensor([1.0, -1.0]).double()
    for trainer, advantages in ((0 * gaps, some), (gaps, 0 * some), (1e4 * gaps, some)):
        assert compute.kl_by_sign(trainer, 0 * gaps, advantages) == {}


@pytest.mark.parametrize("words", [(), ("importance_sampling.split_mismatch=false", "kl.coef=0.1")])
def test_shares_by_sign_are_of_the_tokens_trained_on(
    make_policy: Maker, make_experiment: Maker, words: tuple[str, ...]
) -> None:
    experiment, policy, batch = _world(make_policy, make_experiment, *words)
    with torch.no_grad():
        trains = policy.token_stats(batch.input_ids, batch.mask, 0.8).logprobs
    found, _ = _run(experiment, policy, batch)
    sums = dict.fromkeys(definitions.BY_SIGN, 0.0)
    for row, column in batch.mask.nonzero().tolist():
        gap, advantage = float(trains[row, column] - batch.sampler_logprobs[row, column]), float(batch.advantages[row])
        if advantage:
            sign, side = "negative" if advantage < 0 else "positive", "below" if gap < 0 else "above"
            sums[f"mismatch/kl_frac_{sign}_{side}"] += math.exp(gap) - gap - 1
    whole = math.fsum(sums.values())
    for name, part in sums.items():
        assert found[name] == pytest.approx(part / whole, rel=1e-3) and part > 0


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("noise.site=rollout_and_training",),
        ("kl.coef=0.1", "train.updates_per_batch=2"),
        ("importance_sampling.mode=truncate",),
    ],
    ids=str,
)
def test_kl_to_the_base_is_that_of_the_policy_without_noise_and_changes_nothing(
    make_policy: Maker, make_experiment: Maker, words: tuple[str, ...]
) -> None:
    experiment, policy, batch = _world(make_policy, make_experiment, *words)
    with torch.no_grad():
        clean = policy.token_stats(batch.input_ids, batch.mask, 0.8).logprobs
        with policy.without_adapter():
            base = policy.token_stats(batch.input_ids, batch.mask, 0.8).logprobs
    off, moments = _run(experiment, policy, batch)
    found, same = _run(*_world(make_policy, make_experiment, *words, "kl.every=1"))
    kl = found.pop("kl_to_base")
    assert kl == pytest.approx(_loops(base, clean, batch.mask)["kl"], rel=1e-3) and kl > 1e-3
    assert found == off and torch.equal(same, moments)


def test_kl_to_the_base_is_measured_in_some_steps_and_micro_batches(
    make_policy: Maker, make_experiment: Maker, listen: Maker
) -> None:
    words = ("train.micro_batch_tokens=20", "train.mismatch_share=0.5", "kl.every=2")
    experiment, policy, batch = _world(make_policy, make_experiment, *words, sigma=0)
    passes = listen(policy, "without_adapter")
    optimizer = make_optimizer(policy, experiment.optim)
    counts = []
    for step in (1, 2, 3, 4):
        found = update(experiment, policy, optimizer, batch, NO_RUN, step)
        assert ("kl_to_base" in found) == (step % 2 == 0)
        counts.append(len(passes))
    assert counts == [0, 3, 3, 6]  # of six micro-batches


# --- the warning -----------------------------------------------------------------------------------------------------


def test_a_step_of_few_effective_tokens_is_named(caplog: pytest.LogCaptureFixture) -> None:
    spec = _spec(warn_ess=0.5)
    with caplog.at_level(logging.WARNING, logger="qerl_bench"):
        spec.warn_if_low_ess(6, 0.5)
        spec.warn_if_low_ess(7, 0.4321)
        _spec(warn_ess=0.0).warn_if_low_ess(8, 0.001)
    (record,) = caplog.records
    assert "step 7: mismatch/ess is 0.432, below importance_sampling.warn_ess=0.5" in record.getMessage()


def test_the_effective_share_by_hand() -> None:
    assert compute.ess(torch.log(torch.tensor([1.0, 1.0, 2.0]).double())) == pytest.approx(16 / 18)
    assert compute.ess(torch.tensor([1000.0, 0.0]).double()) == 0.5  # exp(1000) is no number
