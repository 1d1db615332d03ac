"""What the first noise of a run does: entropy and KL against loops, its size beside the norm scales, and the line."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qerl_bench import dose
from qerl_bench.commands.run import run_experiment
from qerl_bench.config import build
from qerl_bench.experiment import collect_rollouts, rollout_sampling
from qerl_bench.model_setup import build_noise
from qerl_bench.train.memory_plan import Size
from qerl_core.metrics import compute, definitions
from qerl_core.process.device import PhaseTimer
from qerl_core.records import Prompt, Rollout
from qerl_core.seeding import derive

NOISE = ("aqn=constant", "aqn.level=0.3", "quant=bf16", "rollout.temperature=0.8", "rollout.group_size=3")


def logprobs(policy: Any, rollout: Any, temperature: float) -> np.ndarray:
    """(T, V) in FP64: the distribution of each completion token, of the policy as it is now."""
    ids = torch.tensor([rollout.prompt_ids + rollout.token_ids])
    with torch.no_grad():
        logits = policy.model(input_ids=ids).logits[0, len(rollout.prompt_ids) - 1 : -1].double() / temperature
    return logits.log_softmax(-1).numpy()


def mean_entropy(policy: Any, rollouts: list[Any], temperature: float) -> float:
    rows = [row for rollout in rollouts for row in logprobs(policy, rollout, temperature)]
    return float(np.mean([-(np.exp(row) * row).sum() for row in rows]))


def noisy_policy(make_policy: Callable[..., Any], experiment: Any) -> Any:
    policy = make_policy(quant="bf16", sharp=True, adapted=True)
    policy.noise = build_noise(experiment, policy.model, policy.structure, policy.layers)
    return policy


def test_entropy_and_kl_of_the_first_noise_against_loops(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any]
) -> None:
    experiment = make_experiment(*NOISE, "importance_sampling.split_mismatch=false", "rollout.prompts_per_step=2")
    policy, sampling = noisy_policy(make_policy, experiment), rollout_sampling(experiment, 1)
    engine = experiment.engine.build(policy)
    _, groups, _ = collect_rollouts(experiment, policy, engine, 1, PhaseTimer("cpu"))
    found = dose.first_dose(experiment, policy, engine, groups, sampling)
    noisy = [rollout for group in groups for rollout in group.rollouts]
    quiet = engine.generate([group.rollouts[0].prompt for group in groups], sampling)
    with policy.noise.for_training():
        with_noise = mean_entropy(policy, noisy, 0.8)
        sampled = [logprobs(policy, rollout, 0.8) for rollout in noisy]
    without = mean_entropy(policy, quiet, 0.8)
    gaps = [
        clean[place, token] - rows[place, token]
        for rollout, rows in zip(noisy, sampled, strict=True)
        for clean in [logprobs(policy, rollout, 0.8)]
        for place, token in enumerate(rollout.token_ids)
    ]
    scales = np.concatenate([norm.weight.detach().float().abs().numpy() for norm in policy.noise.norms.values()])
    assert found == {
        "aqn/dose_entropy": pytest.approx(with_noise / without, rel=1e-4),
        "aqn/dose_kl": pytest.approx(float(np.mean(np.exp(gaps) - np.array(gaps) - 1)), rel=1e-3),
        "aqn/sigma_share": pytest.approx(0.3 / np.median(scales)),
    }
    assert abs(with_noise / without - 1) > 0.01 and found["aqn/dose_kl"] > 0.01  # else equal numbers would pass as well
    assert mean_entropy(policy, quiet, 0.8) == without  # the noise is gone


@pytest.mark.parametrize(
    ("words", "share"), [((), 0.3), (("noise.relative=true",), 0.3), (("noise.where=adapters", "quant=nvfp4"), None)]
)
def test_sigma_as_a_share_of_the_scales(
    words: tuple[str, ...],
    share: float | None,
    make_policy: Callable[..., Any],
    make_experiment: Callable[..., Any],
) -> None:
    """Scales of 1 that differ in sign; relative noise is a share by itself, and so is noise on adapters."""
    experiment = make_experiment(*NOISE, *words)
    policy = noisy_policy(make_policy, experiment)
    if words == ():
        with torch.no_grad():
            for norm in policy.noise.norms.values():
                norm.weight.copy_(torch.where(torch.arange(len(norm.weight)) % 2 == 0, -1.0, 1.0))
    with policy.noise.for_rollout(1, 0):
        pass
    assert policy.noise.scale_share() == ({} if share is None else {"aqn/sigma_share": pytest.approx(share)})


def test_there_is_no_share_of_noise_that_differs_between_norms(
    make_policy: Callable[..., Any], make_experiment: Callable[..., Any]
) -> None:
    noise = noisy_policy(make_policy, make_experiment(*NOISE)).noise
    noise.controller.per_norm_scale = {next(iter(noise.norms)): 2.0}
    with noise.for_rollout(1, 0):
        pass
    assert noise.scale_share() == {}


def test_the_curve_of_any_experiment(make_policy: Callable[..., Any], make_experiment: Callable[..., Any]) -> None:
    """KL rises with sigma; without noise the numbers are those of plain sampling."""
    experiment = make_experiment(*NOISE, "task=even_characters")
    policy = noisy_policy(make_policy, experiment)
    prompts, engine = experiment.task.train_prompts(1, 2, seed=0), experiment.engine.build(policy)
    found = dose.curve(experiment, policy, engine, prompts, (0, 0.2, 0.8), (0, 1))
    assert [one.sigma for one in found] == [0, 0.2, 0.8]
    assert found[0].kl < 1e-6 < found[1].kl < found[2].kl
    longest = experiment.task.max_completion_tokens
    plain = [
        one
        for draw in (0, 1)
        for one in engine.generate(prompts, dose.group_sampling(experiment.rollout, longest, derive("probe", draw)))
    ]
    assert found[0].entropy == pytest.approx(mean_entropy(policy, plain, 0.8), rel=1e-4)
    assert dose.curve(experiment, policy, engine, prompts, [0.2], (0, 1))[0] == found[1]


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize(
    ("words", "first"),
    [
        (("aqn=exp", "aqn.stages=3"), 3),
        (("aqn=constant",), 1),
        (("aqn=entropy",), 1),
        (("aqn=constant", "noise.site=rollout_and_training"), 1),
        (("aqn=constant", "noise.cadence=group"), 1),
        (("aqn=none",), None),
    ],
)
def test_a_run_says_it_once_at_its_first_noisy_step(
    words: tuple[str, ...],
    first: int | None,
    tmp_path: Path,
    make_config: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    cfg = make_config(*words, "task=even_characters", "steps=6", "eval=none", f"root={tmp_path}", "name=a")
    run_experiment(build(cfg), cfg)
    lines = [json.loads(line) for line in (tmp_path / "runs" / "a" / "metrics.jsonl").read_text().splitlines()]
    of_dose = {line["step"]: line for line in lines if definitions.NOISE_DOSE.keys() & line.keys()}
    assert [*of_dose] == ([] if first is None else [first])
    said = [message for message in caplog.messages if message.startswith("first noise")]
    assert len(said) == len(of_dose)
    if first is not None:
        numbers = of_dose[first]
        assert {*definitions.NOISE_DOSE} <= numbers.keys() and numbers["aqn/dose_kl"] > 0
        if "noise.site=rollout_and_training" not in words and "noise.cadence=group" not in words:
            assert numbers["aqn/dose_kl"] == numbers["mismatch/noise_kl"]
        shown = re.search(r"step (\d+): sigma (\S+) .*KL (\S+), entropy x(\S+): changes", said[0])
        assert shown is not None and int(shown[1]) == first and float(shown[2]) == numbers["aqn/sigma"]
        assert float(shown[3]) == pytest.approx(numbers["aqn/dose_kl"], rel=0.51)
        assert float(shown[4]) == pytest.approx(numbers["aqn/dose_entropy"], abs=0.0051)


@pytest.mark.parametrize(
    ("kl", "words"), [(0.0003, "next to nothing"), (0.005, "little"), (0.05, "something"), (1, "much")]
)
def test_the_line_says_what_the_numbers_mean(kl: float, words: str) -> None:
    found = {"aqn/sigma": 0.01, "aqn/sigma_share": 0.0125, "aqn/dose_kl": kl, "aqn/dose_entropy": 1.004}
    line = dose.summary_line(7, found)
    assert line.startswith("first noise, step 7: sigma 0.01 (1.2% of the median norm scale): KL ") and "x1.00" in line
    assert line.endswith(f"changes {words}")
    assert "changes no number" not in dose.summary_line(7, found | {"aqn/norms_perturbed": 1})
    assert "scale), which changes no number: KL " in dose.summary_line(7, found | {"aqn/norms_perturbed": 0})
    del found["aqn/sigma_share"]
    assert "norm scale" not in dose.summary_line(7, found)
    found |= {"aqn/dose_entropy": math.nan}
    del found["aqn/dose_kl"]
    assert dose.summary_line(7, found).endswith(": KL unknown, entropy unknown")


def test_a_policy_that_is_sure_of_everything_has_no_ratio_of_entropies() -> None:
    prompt = Prompt(id="a", messages=(), answer="")
    sure, unsure = (
        Rollout(
            prompt=prompt,
            sample=0,
            prompt_ids=[1],
            token_ids=[2],
            logprobs=[0.0],
            entropies=[one],
            text="",
            finished=True,
        )
        for one in (0.0, 0.5)
    )
    assert math.isnan(compute.entropy_ratio([unsure], [sure])) and compute.entropy_ratio([sure], [unsure]) == 0


# --- memory and precision --------------------------------------------------------------------------------------------


def rolled_out(make_policy: Callable[..., Any], experiment: Any) -> tuple[Any, Any, Any]:
    policy = noisy_policy(make_policy, experiment)
    engine = experiment.engine.build(policy)
    _, groups, _ = collect_rollouts(experiment, policy, engine, 1, PhaseTimer("cpu"))
    return policy, engine, groups


def full(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


WITHOUT_SPLIT = (*NOISE, "importance_sampling.split_mismatch=false", "rollout.prompts_per_step=2")


@pytest.mark.parametrize("most", [1, 2])
def test_passes_are_halved_where_memory_runs_out_and_no_larger_than_micro_batches(
    most: int, make_policy: Callable[..., Any], make_experiment: Callable[..., Any]
) -> None:
    policy, _, groups = rolled_out(make_policy, experiment := make_experiment(*WITHOUT_SPLIT))
    rollouts, whole, tried = [one for group in groups for one in group.rollouts], policy.token_stats, []

    def token_stats(ids: torch.Tensor, *words: Any) -> Any:
        tried.append(tuple(ids.shape))
        return full() if len(ids) > most else whole(ids, *words)

    wanted = dose.kl_to(experiment.train, 0.8, policy, rollouts)
    policy.token_stats = token_stats
    assert dose.kl_to(experiment.train, 0.8, policy, rollouts) == pytest.approx(wanted, rel=1e-4)
    assert tried[0][0] == 6 and tried[-1][0] <= most
    tried.clear()
    longest = max(len(one.prompt_ids) + len(one.token_ids) for one in rollouts)
    small = make_experiment(*WITHOUT_SPLIT, f"train.micro_batch_tokens={longest}")
    for of, planned in ((small, None), (experiment, Size(longest, recorded=False))):
        assert dose.kl_to(of.train, 0.8, policy, rollouts, planned) == pytest.approx(wanted, rel=1e-4)
        assert all(rows * width <= longest for rows, width in tried)


@pytest.mark.parametrize(("what", "lacking"), [("generate", "aqn/dose_entropy"), ("token_stats", "aqn/dose_kl")])
def test_a_run_goes_on_without_a_number_that_there_is_no_memory_for(
    what: str,
    lacking: str,
    make_policy: Callable[..., Any],
    make_experiment: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy, engine, groups = rolled_out(make_policy, experiment := make_experiment(*WITHOUT_SPLIT))
    vars(engine if what == "generate" else policy)[what] = full
    found = dose.first_dose(experiment, policy, engine, groups, rollout_sampling(experiment, 1))
    assert {"aqn/dose_entropy", "aqn/dose_kl"} - found.keys() == {lacking}
    assert len([line for line in caplog.messages if lacking in line and "CUDA out of memory" in line]) == 1
    assert "unknown" in dose.summary_line(1, found | {"aqn/sigma": 0.3})

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("something else")

    vars(engine if what == "generate" else policy)[what] = broken
    with pytest.raises(RuntimeError, match="something else"):
        dose.first_dose(experiment, policy, engine, groups, rollout_sampling(experiment, 1))


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("autocast", [False, True])
def test_the_kl_of_the_dose_is_computed_as_in_training(
    autocast: bool, tmp_path: Path, make_config: Callable[..., Any]
) -> None:
    words = ("importance_sampling.split_mismatch=false", "aqn=constant", "task=even_characters", "eval=none")
    words += ("lora=none", "quant=bf16") if autocast else ()
    cfg = make_config(*words, f"train.autocast={autocast}", "steps=1", f"root={tmp_path}", "name=a")
    run_experiment(build(cfg), cfg)
    (line,) = (json.loads(line) for line in (tmp_path / "runs" / "a" / "metrics.jsonl").read_text().splitlines()[-1:])
    assert line["aqn/dose_kl"] == pytest.approx(line["mismatch/kl"], rel=1e-4) and line["aqn/dose_kl"] > 0
