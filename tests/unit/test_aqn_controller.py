"""Schedules that depend on more than the step: on entropy, on each layer's error, on the error of a format."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from qerl_bench.aqn.entropy import EntropyController, EntropyTarget
from qerl_bench.aqn.norm_errors import NormErrors
from qerl_bench.model_setup import build_noise
from qerl_bench.quantizer.apply import quantize_model
from qerl_core.checks import ConfigError
from qerl_core.metrics import definitions

SETTINGS = {
    "target_start": 0.3,
    "target_end": 0.2,
    "sigma_start": 1e-2,
    "sigma_min": 1e-3,
    "sigma_max": 0.5,
    "integral_gain": 0.5,
    "proportional_gain": 0.0,
    "smoothing": 1.0,
}


def _spec(**changed: Any) -> EntropyTarget:
    return EntropyTarget(name="entropy", **(SETTINGS | changed))


def _plant(sigma: float, step: int, noise: float, rng: random.Random) -> float:
    """A policy whose own entropy decays while it learns, and to which noise of size sigma adds."""
    return (0.25 * math.exp(-step / 40) + 0.05 + 0.6 * sigma**0.7) * (1 + noise * rng.gauss(0, 1))


# --- the loop --------------------------------------------------------------------------------------------------------


def test_decisions_are_documented_metrics() -> None:
    assert set(EntropyController(_spec(), 5).update(1, 0.24)) == set(definitions.NOISE_CONTROLLER)


def test_two_decisions_by_hand() -> None:
    """Targets 0.3 and 0.275; errors 0.2 and then, the measurement smoothed by halves, (0.275 - 0.255) / 0.275."""
    loop = EntropyController(_spec(smoothing=0.5, proportional_gain=2.0), 5)
    assert loop.sigma(1) == 1e-2
    first = loop.update(1, 0.24)
    assert first["aqn/entropy_target"] == 0.3
    assert first["aqn/entropy_smoothed"] == 0.24
    assert first["aqn/sigma_next"] == pytest.approx(1e-2 * math.exp(0.5 * 0.2 + 2.0 * 0.2), rel=1e-12)
    second = loop.update(2, 0.27)
    error = (0.275 - 0.255) / 0.275
    assert second["aqn/entropy_target"] == pytest.approx(0.275)
    assert second["aqn/entropy_smoothed"] == pytest.approx(0.255)
    assert loop.sigma(3) == second["aqn/sigma_next"]
    assert loop.sigma(3) == pytest.approx(1e-2 * math.exp(0.5 * (0.2 + error) + 2.0 * error), rel=1e-12)


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("gains", [{}, {"integral_gain": 1.0, "smoothing": 0.5}, {"proportional_gain": 0.5}])
def test_the_loop_holds_its_target_within_ten_per_cent(noise: float, gains: dict[str, float]) -> None:
    loop, rng = EntropyController(_spec(**gains), 150), random.Random(0)
    measured, targets = [], []
    for step in range(1, 151):
        measured.append(_plant(loop.sigma(step), step, noise, rng))
        targets.append(loop.update(step, measured[-1])["aqn/entropy_target"])
    for end in range(60, 151):
        window = range(end - 10, end)
        mean = sum(measured[i] / targets[i] for i in window) / 10
        assert mean == pytest.approx(1.0, abs=0.1), end


def test_without_the_loop_the_same_policy_misses_the_target() -> None:
    """The test above could pass for a policy that needs no controller; this one says that it does."""
    rng = random.Random(0)
    assert _plant(1e-2, 100, 0.0, rng) < 0.6 * _spec().target(100, 150)


@pytest.mark.parametrize(("entropy", "side", "bound"), [(1e-3, 1.0, 0.5), (10.0, -1.0, 1e-3)])
def test_bounds_hold_and_the_integral_does_not_wind_up(entropy: float, side: float, bound: float) -> None:
    loop = EntropyController(_spec(), 1000)
    for step in range(1, 500):
        found = loop.update(step, entropy)
        assert 1e-3 <= found["aqn/sigma_next"] <= 0.5 * (1 + 1e-12)
    assert found["aqn/sigma_next"] == pytest.approx(bound)
    assert found["aqn/saturated"] == side
    # one step after the error changes its sign, the output leaves the bound
    target = loop.spec.target(500, 1000)
    turned = loop.update(500, target * (1.2 if side > 0 else 0.8))
    assert turned["aqn/saturated"] == 0.0
    assert turned["aqn/sigma_next"] == pytest.approx(bound * math.exp(-0.5 * 0.2 * side), rel=1e-9)


def test_saturation_is_told_once_each_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="qerl_bench")
    loop = EntropyController(_spec(), 1000)
    for step in range(1, 60):
        loop.update(step, 10.0)
    for step in range(60, 90):
        loop.update(step, 1e-3)
    told = [record.getMessage().split(": ")[-1] for record in caplog.records]
    assert told == ["needs less noise than sigma_min", "within the bounds", "needs more noise than sigma_max"]


def test_the_state_survives_json_and_continues_exactly() -> None:
    rng = random.Random(1)
    entropies = [0.25 * math.exp(rng.gauss(0, 0.2)) for _ in range(40)]
    straight = EntropyController(_spec(smoothing=0.3, proportional_gain=0.1), 40)
    expected = [straight.update(step, entropy) for step, entropy in enumerate(entropies, start=1)]
    before, after = (EntropyController(_spec(smoothing=0.3, proportional_gain=0.1), 40) for _ in range(2))
    for step in range(1, 18):
        before.update(step, entropies[step - 1])
    after.restore(json.loads(json.dumps(before.state())))
    assert after.sigma(18) == expected[16]["aqn/sigma_next"]
    assert [after.update(step, entropies[step - 1]) for step in range(18, 41)] == expected[17:]


def test_target_curve() -> None:
    spec = _spec()
    assert [spec.target(step, 3) for step in (1, 2, 3)] == pytest.approx([0.3, 0.25, 0.2])
    assert spec.target(1, 1) == 0.3


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"target_start": 0.0}, r"aqn\.target_start"),
        ({"target_end": float("nan")}, "target_end"),
        ({"sigma_min": 0.0}, "sigma_min"),
        ({"sigma_start": 1.0}, "sigma_min <= sigma_start <= sigma_max"),
        ({"sigma_max": float("inf")}, "sigma_max"),
        ({"integral_gain": 0}, "integral_gain"),
        ({"proportional_gain": -0.1}, "proportional_gain"),
        ({"smoothing": 0.0}, "smoothing"),
        ({"smoothing": 1.5}, "smoothing"),
    ],
)
def test_loops_that_make_no_sense_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _spec(**changed)


# --- sigma by layer --------------------------------------------------------------------------------------------------


def test_error_of_a_norm_is_that_of_the_layers_it_feeds() -> None:
    block = "model.layers.0"
    errors = dict.fromkeys((f"{block}.self_attn.o_proj", f"{block}.mlp.down_proj"), 9.0)
    errors |= {f"{block}.self_attn.{part}_proj": error for part, error in zip("qkv", (0.1, 0.2, 0.2), strict=True)}
    errors |= {f"{block}.mlp.gate_proj": 0.3, f"{block}.mlp.up_proj": 0.4}
    feeds = {
        "first": [f"{block}.self_attn.{part}_proj" for part in "qkv"],
        "second": [f"{block}.mlp.gate_proj", f"{block}.mlp.up_proj"],
    }
    norm_errors = NormErrors(feeds, "model.norm", errors)
    expected = {"first": (0.09 / 3) ** 0.5, "second": 0.125**0.5}
    assert norm_errors.error_per_norm() == pytest.approx(expected)
    level = ((0.03 + 0.125) / 2) ** 0.5
    assert norm_errors.scale_by_error() == (
        pytest.approx(level),
        pytest.approx({name: error / level for name, error in expected.items()} | {"model.norm": 0.0}),
    )
    with pytest.raises(ConfigError, match=r"experts behind first\. Use"):
        NormErrors({"first": ["experts"]}, None, errors).error_per_norm()


@pytest.mark.parametrize("norms", ["blocks", "blocks_final"])
def test_layerwise_noise_follows_the_measured_errors(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any], norms: str
) -> None:
    policy = make_policy(width=64)
    experiment = make_experiment(
        "model.hidden_size=64", "aqn=layerwise", "quant=nvfp4", "aqn@aqn.schedule=constant", f"noise.norms={norms}"
    )
    for name, report in policy.layers.items():  # errors of a made-up format that spoils the second block's MLP
        policy.layers[name] = replace(report, relative_error=0.3 if "layers.1.mlp" in name else 0.1)
    noise = build_noise(experiment, policy.model, policy.structure, policy.layers)
    sizes = {}
    for step in range(1, 101):
        with noise.for_rollout(step, 0) as report:
            assert report.norms_perturbed == 4
            for name, norm in noise.norms.items():
                sizes.setdefault(name, []).append((norm.weight.double() - 1).square().mean().item())
    measured = [(sum(values) / 100) ** 0.5 for values in sizes.values()]
    mean = ((3 * 0.1**2 + 0.3**2) / 4) ** 0.5
    expected = [1e-2 * error / mean for error in (0.1, 0.1, 0.1, 0.3)]
    assert measured[:4] == pytest.approx(expected, rel=5 / (2 * 6400) ** 0.5)
    assert measured[4:] == [0.0] * (len(measured) - 4)


def test_layerwise_noise_needs_errors(make_policy: Callable[..., Any], make_experiment: Callable[..., Any]) -> None:
    """A checkpoint that was packed before comes without a report of errors."""
    policy = make_policy()
    for name, report in policy.layers.items():
        policy.layers[name] = replace(report, relative_error=0.0)
    with pytest.raises(ConfigError, match="this model came packed"):
        build_noise(make_experiment("aqn=layerwise", "quant=nvfp4"), policy.model, policy.structure, policy.layers)


# --- noise of the size of a format's error ---------------------------------------------------------------------------


def test_noise_of_the_size_of_a_formats_error(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any]
) -> None:
    """||W diag(factor) - W|| over all fed layers against ||Q(W) - W||, the two measured independently."""
    policy = make_policy(quant="bf16", width=64)
    experiment = make_experiment(
        "model.hidden_size=64", "quant=bf16", "aqn=format_error", "quant@aqn.format=nvfp4", "noise.relative=true"
    )
    noise = build_noise(experiment, policy.model, policy.structure, policy.layers)
    assert noise.controller.sigma(1) == pytest.approx(0.095, abs=0.01)  # what NVFP4 loses on Gaussian weights
    weights = {name: policy.model.get_submodule(name).base_layer.weight.detach().clone() for name in policy.layers}
    noisy = []
    for step in range(1, 51):
        with noise.for_rollout(step, 0):
            factor = policy.norms["model.layers.0.input_layernorm"].weight.detach() / 1.0
        weight = weights["model.layers.0.self_attn.q_proj"]
        noisy.append(((weight * (factor - 1)[None, :]).norm() / weight.norm()).item() ** 2)
    model = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(64, 64, bias=False)})
    model["q_proj"].weight.data.copy_(weights["model.layers.0.self_attn.q_proj"])
    packed = quantize_model(model, experiment.aqn.format).reports["q_proj"].relative_error
    assert (sum(noisy) / 50) ** 0.5 == pytest.approx(packed, rel=0.08)
    assert all(
        torch.equal(policy.model.get_submodule(name).base_layer.weight, weight) for name, weight in weights.items()
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["aqn=layerwise"], "quantizes nothing"),
        (["aqn=layerwise", "quant=nvfp4", "aqn@aqn.schedule=entropy"], r"aqn\.schedule"),
        (["aqn=format_error"], r"noise\.relative=true"),
        (["aqn=format_error", "quant=nvfp4", "noise.relative=true"], "Use quant=bf16"),
        (["aqn=format_error", "noise.relative=true", "quant@aqn.format=bf16"], "choose a 4-bit format"),
        (["aqn=entropy", "recipe=as_released"], r"noise\.norms=missed"),
    ],
)
def test_combinations_that_make_no_sense_are_refused(
    make_experiment: Callable[..., Any], words: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_experiment(*words)
