"""A policy whose logits are not finite stops the run, wherever it samples; what trains is in test_update_options.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qerl_bench.commands.run import run_experiment
from qerl_bench.config import build
from qerl_bench.engine.base import Sampling
from qerl_bench.engine.hf import HFEngine
from qerl_bench.engine.sampler import Sampler
from qerl_bench.model.policy import Policy
from qerl_bench.model_setup import build_policy
from qerl_bench.train.nonfinite import blaming, require_finite_logits
from qerl_core.checks import TrainingStopped
from qerl_core.exits import exit_in_words
from qerl_core.process.arguments import whole
from qerl_core.records import Prompt

PROMPTS = [Prompt(id=f"test/{i}", messages=({"role": "user", "content": f"{i}+1=?"},), answer="0") for i in range(3)]
SAMPLING = Sampling(samples=2, temperature=1.0, max_tokens=5, seed=1)


def poisoned(policy: Policy) -> Policy:
    with torch.no_grad():
        policy.model.model.layers[1].post_attention_layernorm.weight[3] = math.nan
    return policy


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampling_stops_and_names_the_weight(
    make_policy: Callable[..., Policy], graph: bool, temperature: float
) -> None:
    policy = make_policy()
    engine = HFEngine(policy, max_num_seqs=256)
    if graph:
        engine.sampler = Sampler(policy, engine.limits)
    sampling = replace(SAMPLING, temperature=temperature)
    assert len(engine.generate(PROMPTS, sampling)) == 6
    poisoned(policy)
    says = "6 of 6 completions .* not finite.*prompt test/0: weight model.layers.1.post_attention_layernorm.weight.*"
    with pytest.raises(TrainingStopped, match=says + "another checkpoint"):
        engine.generate(PROMPTS, sampling)


@pytest.mark.parametrize(
    ("column", "value"), [("logprobs", math.nan), ("entropies", math.nan), ("logprobs", -math.inf)]
)
def test_one_number_is_enough(make_policy: Callable[..., Policy], column: str, value: float) -> None:
    """As an engine with weights of its own reports them: the policy itself is sound."""
    policy = make_policy()
    rollouts = HFEngine(policy, max_num_seqs=256).generate(PROMPTS, SAMPLING)
    require_finite_logits(policy, rollouts)
    numbers = getattr(rollouts[3], column)
    rollouts[3] = replace(rollouts[3], **{column: [*numbers[:-1], value]})
    with pytest.raises(TrainingStopped, match=r"1 of 6 completions .*test/1: .*weights and activations are finite"):
        require_finite_logits(policy, rollouts)


@pytest.mark.parametrize(
    ("evaluation", "where"),
    [("eval=task", "evaluation after step 0: 4 of 4"), ("eval=none", "step 1, sampling: 12 of")],
)
def test_a_run_ends_with_one_message_that_says_when(
    make_config: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    evaluation: str,
    where: str,
) -> None:
    monkeypatch.setattr("qerl_bench.run_setup.build_policy", lambda *given: poisoned(build_policy(*given)))
    cfg = make_config("quant=nvfp4", "train.on_nonfinite=skip", evaluation, f"root={tmp_path}", "name=broken")
    with pytest.raises(SystemExit) as end, exit_in_words("stopped"):
        run_experiment(build(cfg), cfg)
    assert end.value.code == 1
    printed = whole(capsys.readouterr().err.strip()).splitlines()[-1]
    assert printed.startswith(where) and "post_attention_layernorm.weight" in printed
    assert not (tmp_path / "runs" / "broken" / "done.json").exists()


def test_only_what_stopped_a_run_is_told_where() -> None:
    with pytest.raises(TrainingStopped, match=r"^step 3: no$"), blaming("step 3"):
        raise TrainingStopped("no")
    with pytest.raises(ZeroDivisionError), blaming("step 3"):
        _ = 1 / 0
