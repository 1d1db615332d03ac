"""rollout.lag: which adapter samples, that nothing else of a step changes, and that a continued run keeps it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from qerl_bench.config import build
from qerl_bench.experiment import collect_rollouts
from qerl_bench.model_setup import build_policy
from qerl_bench.train.lag import Lag
from qerl_core.process.device import PhaseTimer
from tests.short_runs import steps_of

RUN = ("task=even_characters", "optim.lr=0.05", "quant=nvfp4", "eval=none", "steps=5", "save_every=1")


def _run(make_config: Callable[..., Any], root: Path, name: str, *words: str) -> list[dict[str, Any]]:
    return steps_of(make_config, root, name, *RUN, *words)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_the_numbers_of_so_many_steps_ago_are_there_while_sampling_alone(steps: int) -> None:
    trained = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))]
    place = [one.data_ptr() for one in trained]
    lag, seen = Lag(trained, steps), []
    for step in range(1, 7):  # before step t they hold t - 1
        with lag.sampling() as said:
            assert trained[0].tolist() == [trained[1].item()] * 2
            seen.append(int(trained[1].item()))
            assert said == ({"rollout/lag": step - 1 - seen[-1]} if steps else {})
        assert [one.tolist() for one in trained] == [[step - 1.0] * 2, [step - 1.0]]
        with torch.no_grad():
            for one in trained:
                one += 1
        if step == 3:  # a new process
            state, lag = lag.state(), Lag(trained, steps)
            lag.restore(state)
    assert seen == [max(0, step - 1 - steps) for step in range(1, 7)]
    assert [one.data_ptr() for one in trained] == place


def test_a_failure_while_sampling_leaves_the_present_numbers() -> None:
    trained = [torch.nn.Parameter(torch.zeros(2))]
    lag = Lag(trained, 1)
    with lag.sampling():
        pass
    trained[0].data.add_(1)
    with pytest.raises(RuntimeError), lag.sampling():
        assert trained[0].tolist() == [0, 0]
        raise RuntimeError
    assert trained[0].tolist() == [1, 1]


@pytest.mark.parametrize("words", [(), ("lora.train_norms=true",), ("quant=bf16", "lora=none")], ids=str)
def test_a_step_samples_what_the_checkpoint_of_that_time_writes(
    make_config: Callable[..., Any], tmp_path: Path, no_figures: None, words: tuple[str, ...]
) -> None:
    _run(make_config, tmp_path, "run", *words, "rollout.lag=2")
    folder = tmp_path / "runs" / "run"
    kept = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]
    experiment = build(make_config(*RUN, *words))
    for step in (3, 4, 5):
        policy = build_policy(experiment, None, "cpu")
        if step > 3:
            policy.load(folder / "checkpoints" / f"step_{step - 3:06d}")
        groups, *_ = collect_rollouts(experiment, policy, experiment.engine.build(policy), step, PhaseTimer("cpu"))
        expected = [one.text for one in groups[0].rollouts]
        assert [one["completion"] for one in kept if one["step"] == step] == expected


@pytest.mark.parametrize(
    "words",
    [(), ("aqn=constant", "noise.where=adapters"), ("rollout.merge=true", "train.merge=ste"), ("rollout.quant=mxfp4",)],
    ids=str,
)
def test_a_continued_run_keeps_its_lag_to_the_bit(
    make_config: Callable[..., Any], tmp_path: Path, no_figures: None, words: tuple[str, ...]
) -> None:
    words = (*words, "rollout.lag=2")
    straight = _run(make_config, tmp_path, "run", *words)
    folder = tmp_path / "runs" / "run"
    (folder / "done.json").unlink()
    for step in (4, 5):
        shutil.rmtree(folder / "checkpoints" / f"step_{step:06d}")
    state = torch.load(folder / "checkpoints" / "step_000003" / "trainer.pt", weights_only=True)
    assert len(state["lag"]) == 2
    assert _run(make_config, tmp_path, "run", *words) == straight
    assert [record["rollout/lag"] for record in straight] == [0, 1, 2, 2, 2]


def test_mismatch_shows_the_lag_and_none_is_none(
    make_config: Callable[..., Any], tmp_path: Path, no_figures: None
) -> None:
    found = {lag: _run(make_config, tmp_path, f"lag{lag}", f"rollout.lag={lag}") for lag in (0, 1, 3)}
    plain = _run(make_config, tmp_path, "plain")
    assert found[0] == plain and not any(key.startswith("rollout/lag") for key in plain[0])
    state = torch.load(tmp_path / "runs/lag0/checkpoints/step_000005/trainer.pt", weights_only=True)
    assert "lag" not in state
    assert found[1][0].items() - {("rollout/lag", 0)} == found[0][0].items()  # nothing is behind in the first step
    assert found[1][1]["mismatch/kl"] > 100 * found[0][1]["mismatch/kl"]
    assert found[3][4]["mismatch/kl"] > found[1][4]["mismatch/kl"] > 100 * found[0][4]["mismatch/kl"]
    assert found[3][4]["mismatch/ess"] < found[1][4]["mismatch/ess"] < 1
