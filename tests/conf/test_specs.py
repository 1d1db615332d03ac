"""Option classes and their YAML: same fields, defaults in the YAML alone, nothing that changes after the check."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from qerl_bench.algo.importance_sampling import ImportanceSampling
from qerl_bench.algo.kl import KLPenalty
from qerl_bench.aqn.spec import NoiseSpec
from qerl_bench.config import build, compose
from qerl_bench.experiment_spec import Experiment
from qerl_bench.train.spec import OptimSpec, RolloutSpec, TrainSpec
from qerl_core.checks import ConfigError
from qerl_core.options.model_names import short_name
from qerl_core.options.names import load_option
from qerl_core.process.installation import CONF_DIR

WHOLE = {"experiment", "recipe", "claim"}  # folders whose files set several axes, or none
GROUPS = sorted(path for path in CONF_DIR.glob("*/**/*.yaml") if path.relative_to(CONF_DIR).parts[0] not in WHOLE)
FILES = pytest.mark.parametrize("path", GROUPS, ids=lambda path: str(path.relative_to(CONF_DIR).with_suffix("")))
HYDRA = {"defaults", "hydra"}


def _load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def _option(path: Path) -> dict[str, Any]:
    """The content of a file; of a preset with what it takes from another option."""
    node = _load(path)
    if not any(isinstance(entry, str) for entry in node.get("defaults", [])):
        return node
    group, *option = path.relative_to(CONF_DIR).with_suffix("").parts
    return {str(key): value for key, value in load_option([CONF_DIR], group, "/".join(option)).items_ex(resolve=False)}


def _class(target: str) -> Any:
    module, _, name = target.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _fields(spec: Any) -> set[str]:
    return {field.name for field in dataclasses.fields(spec)}


def _check_spec(spec: Any) -> None:
    assert dataclasses.is_dataclass(spec), spec
    parameters = spec.__dataclass_params__
    assert parameters.frozen and parameters.eq, f"{spec.__name__} must be frozen"
    for field in dataclasses.fields(spec):
        assert field.kw_only, f"{spec.__name__}.{field.name} must be keyword-only"
        empty = (dataclasses.MISSING, dataclasses.MISSING)
        assert (field.default, field.default_factory) == empty, f"{spec.__name__}.{field.name} has a default in Python"


@FILES
def test_yaml_and_class_have_the_same_fields(path: Path) -> None:
    node = _option(path)
    nested = {next(iter(entry)).split("@")[1] for entry in node.pop("defaults", [])}  # specs inside this one
    assert set(node) - {"_target_"} | nested == _fields(_class(node["_target_"]))


@FILES
def test_the_class_is_frozen_keyword_only_and_without_defaults(path: Path) -> None:
    _check_spec(_class(_option(path)["_target_"]))


@FILES
def test_the_file_starts_with_target_and_name(path: Path) -> None:
    node = _option(path)
    assert list(node)[:2] == ["_target_", "name"]
    assert node["_target_"].startswith("qerl_bench.")
    others = ("default", "quick", "reasoning_gym")  # the last is named by the generator that it uses
    option = "-".join(path.relative_to(CONF_DIR).with_suffix("").parts[1:])
    name = short_name(node["id"]) if path.parent.name == "model" and node.get("id") else node["name"]
    assert name == option or path.stem in (*others, "hub"), "runs are named by their options"


def test_the_root_and_its_class_have_the_same_keys() -> None:
    node = _load(CONF_DIR / "run.yaml")
    groups = {folder.name for folder in CONF_DIR.iterdir() if folder.is_dir()} - WHOLE
    assert (set(node) - HYDRA) | groups == _fields(Experiment)
    assert {next(iter(entry)) for entry in node["defaults"] if isinstance(entry, dict)} >= groups
    specs = {
        "rollout": RolloutSpec,
        "optim": OptimSpec,
        "train": TrainSpec,
        "kl": KLPenalty,
        "noise": NoiseSpec,
        "importance_sampling": ImportanceSampling,
    }
    for key, spec in specs.items():
        assert node[key]["_target_"] == f"{spec.__module__}.{spec.__name__}"
        assert set(node[key]) - {"_target_"} == _fields(spec)


ROOT_SPECS = [Experiment, RolloutSpec, OptimSpec, TrainSpec, KLPenalty, NoiseSpec, ImportanceSampling]


@pytest.mark.parametrize("spec", ROOT_SPECS)
def test_the_specs_of_the_root_are_frozen_too(spec: Any) -> None:
    _check_spec(spec)


def test_a_built_experiment_cannot_be_changed() -> None:
    experiment = build(compose())
    for part in (experiment, experiment.optim, experiment.rollout, experiment.quant, experiment.lora, experiment.task):
        field = dataclasses.fields(part)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, field, "other")


def test_every_target_of_an_axis_offers_what_the_loop_calls() -> None:
    needed = {
        "quant": ("bits_per_weight", "unsupported_reason", "check_width", "kernel_layout"),
        "quantizer": ("calibration", "prepare", "pack"),
        "aqn": ("sigma", "check_with", "controller"),
        "algo": ("on_policy", "max_resampling_rounds", "on_no_signal", "advantages", "loss_weights", "token_loss"),
        "model": ("load", "warm_start_overrides"),
        "engine": ("check", "check_with", "build"),
        "lora": ("check_with",),
        "task": (
            *("check", "check_with", "train_prompts", "eval_prompts", "demonstrations"),
            *("rewards", "reward", "normalize"),
            "warm_start_overrides",
        ),
        "eval": ("check", "evaluate"),
        "reward": ("check_with", "rewards"),
        "logger": ("check", "mirror"),
    }
    for path in GROUPS:
        spec = _class(_option(path)["_target_"])
        for name in needed.get(path.relative_to(CONF_DIR).parts[0], ()):
            assert hasattr(spec, name) or name in _fields(spec), f"{spec.__name__} lacks {name}"


# --- the learning rate -----------------------------------------------------------------------------------------------


@functools.cache
def _default_optim() -> OptimSpec:
    return build(compose()).optim


def _optim(**changed: Any) -> OptimSpec:
    return dataclasses.replace(_default_optim(), **{"lr": 1.0, "schedule": "constant", "warmup_steps": 0, **changed})


def _rates(total: int, **changed: Any) -> list[float]:
    return [_optim(**changed).lr_at(step, total) for step in range(1, total + 1)]


def test_a_constant_rate() -> None:
    assert _rates(4) == [1.0] * 4
    assert _rates(5, warmup_steps=3) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_a_linear_rate_falls_evenly_and_would_reach_zero_one_step_after_the_end() -> None:
    assert _rates(4, schedule="linear") == pytest.approx([4 / 5, 3 / 5, 2 / 5, 1 / 5])
    assert _rates(5, schedule="linear", warmup_steps=1) == pytest.approx([0.5, 4 / 5, 3 / 5, 2 / 5, 1 / 5])


def test_a_cosine_rate() -> None:
    expected = [0.5 * (1 + math.cos(math.pi * k / 4)) for k in (1, 2, 3)]
    assert _rates(3, schedule="cosine") == pytest.approx(expected)
    assert _optim(schedule="cosine").lr_at(3, 3) > 0


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_every_step_learns_something_and_none_exceeds_the_peak(schedule: str, warmup: int) -> None:
    for total in range(warmup + 1, warmup + 20):
        rates = _rates(total, schedule=schedule, warmup_steps=warmup, lr=3e-4)
        assert all(0 < rate <= 3e-4 for rate in rates)
        falling = rates[warmup:]
        assert all(a >= b for a, b in itertools.pairwise(falling))
        assert all(a < b for a, b in itertools.pairwise(rates[:warmup]))


@pytest.mark.parametrize(
    "changed",
    [
        {"lr": 0.0},
        {"lr": math.nan},
        {"lr": math.inf},
        {"lr": "1e-5"},
        {"lr": True},
        {"warmup_steps": -1},
        {"weight_decay": -0.1},
        {"weight_decay": math.nan},
        {"max_grad_norm": 0},
        {"schedule": None},
    ],
    ids=str,
)
def test_rates_that_make_no_sense_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"optim.{next(iter(changed))}"):
        _optim(**changed)
