"""Every switch of `noise`: which norms, how large, how often drawn anew, who sees it, what stays, how precise."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from qerl_bench.algo.loss import objective
from qerl_bench.aqn.base import OpenLoop
from qerl_bench.aqn.constant import Constant
from qerl_bench.aqn.injector import Noise, combined
from qerl_bench.aqn.spec import NoiseSpec
from qerl_bench.checks import ConfigError
from qerl_bench.train.batch import make_batch
from qerl_bench.train.update import make_optimizer, update

PLAIN = NoiseSpec(
    norms="blocks",
    relative=False,
    cadence="step",
    batch_prompts=2,
    site="sampler",
    accumulate="none",
    add_dtype="float32",
)


def _norms(count: int = 4, width: int = 4096, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> dict[str, Any]:
    names = [*(f"model.layers.{i}.input_layernorm" for i in range(count - 1)), "model.norm"]
    norms = {name: Qwen2RMSNorm(width).to(dtype) for name in names}
    for norm in norms.values():
        norm.weight.data.fill_(scale)
    return norms


def _noise(
    norms: dict[str, Any], sigma: float = 1e-2, seed: int = 0, factors: dict[str, float] | None = None, **changed: Any
) -> Noise:
    controller = OpenLoop(Constant(name="constant", level=sigma), 100, factors)
    return Noise(replace(PLAIN, **changed), controller, norms, seed)


def _scales(noise: Noise, step: int, draw: int = 0) -> torch.Tensor:
    """All scales (norms, width) as the sampler sees them in one draw, in FP64."""
    with noise.sampler(step, draw):
        return torch.stack([norm.weight.detach().double() for norm in noise.norms.values()])


# --- which norms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "count", "final"), [("blocks", 6, False), ("blocks_final", 7, True), ("missed", 0, False)]
)
def test_which_norms_are_perturbed(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], choice: str, count: int, final: bool
) -> None:
    words = ("model.layers=3", f"noise.norms={choice}", "aqn=constant")
    policy, experiment = make_policy("model.layers=3"), make_experiment(*words)
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    with policy.noise_of(experiment).sampler(1, 0) as report:
        during = policy.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], during[name])}
    assert report.sigma == 1e-2
    assert report.norms_perturbed == len(changed) == count
    assert ("model.norm.weight" in changed) is final
    assert (report.sigma_realised == 0) is (count == 0)
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.model.state_dict().items())


def test_the_shipped_hook_does_nothing_and_says_so(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    policy = make_policy()
    noise = policy.noise_of(make_experiment("recipe=as_released", "steps=10"))
    assert "reaches no norm" in caplog.text
    input_ids = torch.randint(0, 256, (2, 9))
    with torch.no_grad():
        clean = policy.model(input_ids=input_ids).logits
        with noise.sampler(5, 0) as report:
            assert torch.equal(policy.model(input_ids=input_ids).logits, clean)
    assert report.sigma > 0
    assert (report.norms_perturbed, report.sigma_realised, report.scales_changed) == (0, 0.0, 0.0)


# --- how large -------------------------------------------------------------------------------------------------------


def test_relative_noise_scales_with_each_scale_and_absolute_does_not() -> None:
    norms = _norms(count=2)
    torch.manual_seed(0)
    for norm in norms.values():
        norm.weight.data.uniform_(-4, 4)
    norms["model.norm"].weight.data[:7] = 0.0
    clean = torch.stack([norm.weight.detach().double() for norm in norms.values()])
    absolute = _scales(_noise(norms), 1) - clean
    noise = _noise(norms, relative=True)
    relative = _scales(noise, 1) - clean
    assert torch.allclose(relative, absolute * clean.abs(), rtol=0, atol=1e-6)  # the same normals, times |w|
    assert not relative[1, :7].any()
    with noise.sampler(1, 0) as report:
        assert report.sigma_realised == pytest.approx(1e-2, rel=5 * 0.008)
        assert report.scales_changed == pytest.approx(1 - 7 / 8192, abs=2 / 8192)


def test_factors_share_the_noise_out_and_zero_leaves_a_norm_alone() -> None:
    norms = _norms(count=3)
    first, second, final = norms
    noise = _noise(norms, factors={first: 2.0, second: 0.5, final: 0.0})
    with noise.sampler(1, 0) as report:
        sizes = [(norm.weight.double() - 1).std().item() for norm in norms.values()]
    assert sizes == pytest.approx([2e-2, 5e-3, 0.0], rel=5 * 0.011)
    assert report.norms_perturbed == 2


@pytest.mark.parametrize("scale", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("sigma", [1e-2, 1e-3, 1e-4])
def test_bfloat16_addition_loses_small_noise(sigma: float, scale: float) -> None:
    """At a power of two, BF16 steps are scale / 128 upwards and scale / 256 downwards: half of one must be reached."""
    up, down = scale / 256, scale / 512
    share = 0.5 * math.erfc(up / sigma / 2**0.5) + 0.5 * math.erfc(down / sigma / 2**0.5)
    with _noise(_norms(dtype=torch.bfloat16, scale=scale), sigma, add_dtype="bfloat16").sampler(1, 0) as report:
        assert report.scales_changed == pytest.approx(share, abs=5 * 0.004)
    with _noise(_norms(dtype=torch.bfloat16, scale=scale), sigma).sampler(1, 0) as report:
        assert report.scales_changed > 0.95
        assert report.sigma_realised == pytest.approx(sigma, rel=5 * 0.0055)
        assert report.norms_perturbed == 4


def test_bfloat16_addition_by_hand() -> None:
    """At 1.0 BF16 steps are 2^-7 upwards and 2^-8 downwards; ties go to the even neighbour."""
    norms = _norms(count=1, width=6)
    noise = _noise(norms, add_dtype="bfloat16")
    noise.added = {"model.norm": torch.tensor([0.003, 0.0039, 0.005, -0.0019, -0.0021, -0.004])}
    with noise.trainer():
        assert norms["model.norm"].weight.dtype == torch.float32  # the sum is stored as the scale was
        assert ((norms["model.norm"].weight - 1) * 256).tolist() == [0, 0, 2, 0, -1, -1]


# --- how often drawn anew --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cadence", "expected"),
    [
        ("run", [(0, [1, 2, 3, 4, 5])]),
        ("step", [(0, [1, 2, 3, 4, 5])]),
        ("batch", [(7, [1, 2]), (8, [3, 4]), (9, [5])]),
        ("group", [(7, [1]), (8, [2]), (9, [3]), (10, [4]), (11, [5])]),
    ],
)
def test_prompts_that_share_a_draw(cadence: str, expected: list[tuple[int, list[int]]]) -> None:
    """With seven draws behind them; a step's only draw is used again for prompts that come later."""
    assert list(replace(PLAIN, cadence=cadence).draws([1, 2, 3, 4, 5], 7)) == expected
    assert list(replace(PLAIN, cadence=cadence).draws([], 7)) == []


def test_the_same_draw_twice_does_not_accumulate_twice() -> None:
    noise = _noise(_norms(width=64), accumulate="all")
    assert torch.equal(_scales(noise, 1), _scales(noise, 1))
    assert not torch.equal(_scales(noise, 1), _scales(noise, 2))


@pytest.mark.parametrize("cadence", ["step", "batch", "group"])
def test_every_step_and_every_draw_has_noise_of_its_own(cadence: str) -> None:
    noise = _noise(_norms(width=256), cadence=cadence)
    drawn = [_scales(noise, step, draw) for step in (1, 2) for draw in (0, 1, 2)]
    for i, one in enumerate(drawn):
        for other in drawn[:i]:
            assert abs(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]) < 5 / one.numel() ** 0.5
    again = _noise(_norms(width=256), cadence=cadence)
    assert torch.equal(_scales(again, 2, 1), drawn[4])  # whatever was drawn before
    assert not torch.equal(_scales(_noise(_norms(width=256), cadence=cadence, seed=1), 2, 1), drawn[4])


def test_cadence_run_keeps_one_draw() -> None:
    noise = _noise(_norms(width=64), cadence="run")
    assert torch.equal(_scales(noise, 1), _scales(noise, 9))


def test_metrics_of_several_draws_by_hand() -> None:
    noise = _noise(_norms(count=2, width=3), cadence="group")
    reports = []
    for draw in range(3):
        with noise.sampler(1, draw) as report:
            reports.append(report)
    squares = [((_scales(noise, 1, draw) - 1) ** 2).mean().item() for draw in range(3)]
    found = combined(reports)
    assert found["aqn/sigma_realised"] == pytest.approx((sum(squares) / 3) ** 0.5, rel=1e-9)
    assert (found["aqn/sigma"], found["aqn/norms_perturbed"], found["aqn/scales_changed"]) == (1e-2, 2, 1.0)


# --- what stays ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("add_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("accumulate", "walking"), [("none", 0), ("final", 1), ("all", 4)])
def test_accumulated_noise_is_a_random_walk(accumulate: str, walking: int, add_dtype: str) -> None:
    """After n steps a walk is sqrt(n) sigma away; noise that is drawn anew stays at sigma."""
    noise = _noise(_norms(dtype=torch.bfloat16), 5e-2, accumulate=accumulate, add_dtype=add_dtype)
    for step in range(1, 17):
        scales = _scales(noise, step)
    sizes = ((scales - 1).square().mean(1).sqrt() / 5e-2).tolist()
    assert sizes == pytest.approx([1.0] * (4 - walking) + [4.0] * walking, rel=0.06)
    assert all(bool((norm.weight == 1).all()) for norm in noise.norms.values())  # the trainer's scales stay clean


def test_a_walk_by_hand_and_it_stays_when_sigma_is_zero() -> None:
    noise = _noise(_norms(width=64), accumulate="all")
    fresh = _noise(_norms(width=64))
    steps = [_scales(fresh, step) - 1 for step in (1, 2, 3)]
    walk = [_scales(noise, step) - 1 for step in (1, 2, 3)]
    for n, position in enumerate(walk, start=1):
        assert torch.allclose(position, sum(steps[:n]), rtol=0, atol=1e-6)
    noise.controller = OpenLoop(Constant(name="constant", level=0.0), 100)
    with noise.sampler(4, 0) as report:
        assert report.sigma == 0 and report.norms_perturbed == 4
    assert torch.equal(_scales(noise, 5) - 1, walk[-1])


@pytest.mark.parametrize("accumulate", ["none", "final", "all"])
def test_noise_continues_exactly_after_a_checkpoint(tmp_path: Any, accumulate: str) -> None:
    straight = _noise(_norms(width=64), accumulate=accumulate)
    expected = [_scales(straight, step) for step in range(1, 7)]
    before = _noise(_norms(width=64), accumulate=accumulate)
    for step in range(1, 4):
        _scales(before, step)
    torch.save(before.state(), tmp_path / "noise.pt")
    after = _noise(_norms(width=64), accumulate=accumulate)
    after.restore(torch.load(tmp_path / "noise.pt", weights_only=True))
    assert all(torch.equal(_scales(after, step), expected[step - 1]) for step in range(4, 7))


# --- who sees it -----------------------------------------------------------------------------------------------------


def test_the_trainer_repeats_the_samplers_noise_and_gives_it_back() -> None:
    noise = _noise(_norms(width=64))
    sampled = _scales(noise, 3)
    with noise.trainer():
        assert torch.equal(torch.stack([norm.weight.double() for norm in noise.norms.values()]), sampled)
    assert all(bool((norm.weight == 1).all()) for norm in noise.norms.values())


def test_scales_that_are_trained_get_their_gradient_through_the_noise() -> None:
    """d/dw of sum((w + z) x) is the normalised x, whatever z; twice the backward pass, twice the gradient."""
    norms = _norms(count=1, width=8)
    norm = norms["model.norm"]
    noise = _noise(norms, 0.5)
    with noise.sampler(1, 0):
        pass
    x = torch.randn(3, 8)
    expected = (x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()).sum(0)
    with noise.trainer():
        assert not norm.weight.is_leaf
        norm(x).sum().backward()
        norm(x).sum().backward()
    assert torch.allclose(norm.weight.grad, 2 * expected, atol=1e-5)


def _refuse(case: Any) -> None:
    raise AssertionError(case)


@pytest.mark.parametrize("site", ["sampler", "old", "trainer"])
def test_which_log_probabilities_carry_the_noise(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, site: str
) -> None:
    policy = make_policy(sharp=True, adapted=True)
    experiment = make_experiment("aqn=constant", "aqn.level=0.1", f"noise.site={site}")
    noise = policy.noise_of(experiment)
    batch = make_batch([[5, 6, 7], [8, 9]], [[1, 2, 3], [4, 5]], policy.pad_id, policy.device)
    clean = policy.token_stats(batch.input_ids, batch.mask, 1.0)
    with noise.sampler(1, 0), torch.no_grad():
        noisy = policy.token_stats(batch.input_ids, batch.mask, 1.0)
    assert (noisy.logprobs - clean.logprobs).abs().max() > 1e-3
    batch = make_batch(
        [[5, 6, 7], [8, 9]],
        [[1, 2, 3], [4, 5]],
        policy.pad_id,
        policy.device,
        [noisy.logprobs[0, 3:6].tolist(), noisy.logprobs[1, 2:4].tolist()],
        torch.tensor([1.0, -0.5]),
    )
    policy.noise = noise
    seen: list[Any] = []

    def listening(algo: Any, kl: Any, terms: Any, weights: Any) -> Any:
        seen.append(terms)
        return objective(algo, kl, terms, weights)

    monkeypatch.setattr("qerl_bench.train.update.objective", listening)
    found = update(experiment, policy, make_optimizer(policy, experiment.optim), batch, 1, _refuse)
    (terms,) = seen
    expected = {"sampler": (clean, clean), "old": (clean, noisy), "trainer": (noisy, noisy)}[site]
    for used, stats in zip((terms.logprobs, terms.old_logprobs), expected, strict=True):
        assert torch.allclose(used[terms.mask], stats.logprobs[batch.mask], rtol=0, atol=1e-5)  # longest first
    # the reported entropy is the clean policy's at every site; the mismatch is what the trainer really has against it
    assert found["entropy_clean"] == pytest.approx(clean.entropy[batch.mask].mean().item(), rel=1e-5)
    assert (found["mismatch/logp_abs_max"] < 1e-5) is (site == "trainer")


# --- what it costs ---------------------------------------------------------------------------------------------------


class _Operations(TorchDispatchMode):
    """Counts the operations of a forward pass and the bytes of the tensors they make."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.names.append(str(func))
        self.bytes += sum(
            t.nbytes for t in (made if isinstance(made, tuple) else (made,)) if isinstance(t, torch.Tensor)
        )
        return made


def test_noise_adds_no_operation_and_no_tensor_to_the_forward_pass(make_policy: Callable[..., Any]) -> None:
    policy = make_policy()
    input_ids = torch.randint(0, 256, (2, 9))
    with torch.no_grad():
        policy.model(input_ids=input_ids)
        with _Operations() as clean:
            policy.model(input_ids=input_ids)
        parameters = [tensor.shape for tensor in policy.model.state_dict().values()]
        with policy.perturbed(0.05, seed=3):
            with _Operations() as noisy:
                policy.model(input_ids=input_ids)
            assert [tensor.shape for tensor in policy.model.state_dict().values()] == parameters
    assert noisy.names == clean.names
    assert noisy.bytes == clean.bytes


def test_a_noise_step_costs_milliseconds_at_seven_billion_parameters() -> None:
    """56 norms of width 3584, as in Qwen2.5-7B: in and out in well under the time of one decoded token batch."""
    noise = _noise(_norms(count=56, width=3584, dtype=torch.bfloat16))
    seconds = []
    for step in range(1, 4):
        started = time.perf_counter()
        with noise.sampler(step, 0):
            pass
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.25  # measured: see docs/aqn.md; a loaded machine is allowed much more


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"norms": "all"}, "blocks, blocks_final, missed"),
        ({"relative": 1}, "true or false"),
        ({"cadence": "token"}, "run, step, batch, group"),
        ({"batch_prompts": 0}, "at least 1"),
        ({"batch_prompts": True}, "at least 1"),
        ({"site": "everywhere"}, "sampler, old, trainer"),
        ({"accumulate": True}, "none, final, all"),
        ({"add_dtype": "float16"}, "float32, bfloat16"),
        ({"site": "rollout_and_training", "cadence": "group"}, r"Use noise\.cadence=step"),
        ({"site": "rollout_and_old_logprobs", "cadence": "batch"}, r"Use noise\.cadence=step"),
        ({"accumulate": "all", "cadence": "run"}, r"Use noise\.accumulate=none"),
    ],
)
def test_injections_that_make_no_sense_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(PLAIN, **changed)
