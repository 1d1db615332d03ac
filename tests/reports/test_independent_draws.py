"""Independent draws: a prompt that stands twice in a step is drawn twice, and never copied.

https://github.com/oumi-ai/oumi/issues/1542, https://github.com/vllm-project/vllm/issues/50440 and
https://github.com/huggingface/trl/issues/3675
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qerl_bench.engine.base import Sampling
from qerl_bench.engine.hf import HFEngine, request_key
from qerl_bench.engine.rollout_queue import Limits
from qerl_bench.engine.sampler import Sampler
from qerl_bench.engine.shared import SharedEngine
from qerl_bench.experiment import collect_rollouts
from qerl_bench.parallel import ALONE
from qerl_bench.reward.random import RandomReward
from qerl_core.process.device import PhaseTimer
from qerl_core.records import Prompt, Rollout, numbered
from qerl_core.seeding import derive

SAMPLING = Sampling(samples=4, temperature=1.0, max_tokens=12, seed=3)


def asked(id: str = "gsm8k/train/1", question: str = "7+5=?") -> Prompt:
    return Prompt(id=id, messages=({"role": "user", "content": question},), answer="12", question=question)


@pytest.fixture(scope="module")
def policy(make_policy: Any) -> Any:
    return make_policy(sharp=True, adapted=True)


def groups_of(rollouts: list[Rollout]) -> list[tuple[tuple[int, ...], ...]]:
    """The tokens of each group of four."""
    tokens = [tuple(one.token_ids) for one in rollouts]
    return [tuple(tokens[start : start + 4]) for start in range(0, len(tokens), 4)]


def test_the_first_place_of_a_prompt_keeps_the_draws_of_old_runs() -> None:
    assert request_key(SAMPLING, asked(), 2) == derive(3, "gsm8k/train/1", 2)
    again = replace(asked(), occurrence=1)
    keys = {request_key(SAMPLING, prompt, sample) for prompt in (asked(), again) for sample in range(4)}
    assert len(keys) == 8


def test_places_are_counted_once() -> None:
    a, b = asked("a"), asked("b")
    once = numbered([a, b, a, a, b])
    assert [(prompt.id, prompt.occurrence) for prompt in once] == [("a", 0), ("b", 0), ("a", 1), ("a", 2), ("b", 1)]
    assert numbered(once) == once
    assert numbered(once[2:]) == once[2:]  # a part of a step keeps its places
    assert numbered([once[2], once[2], a]) == [once[2], once[3], a]


@pytest.mark.parametrize("recorded", [False, True])
def test_a_prompt_that_is_given_twice_is_drawn_twice(policy: Any, recorded: bool) -> None:
    """By the plain decoder and by the queue of recorded steps."""
    engine = HFEngine(policy, max_num_seqs=64)
    if recorded:
        engine.sampler = Sampler(policy, Limits(rows=64))
    prompts = [asked(), asked("gsm8k/train/2", "1"), asked(), asked()]
    first, other, second, third = groups_of(engine.generate(prompts, SAMPLING))
    assert len({*first, *second, *third}) == 12
    assert groups_of(engine.generate(prompts[:2], SAMPLING)) == [first, other]  # as where each stands once
    assert groups_of(SharedEngine(engine, ALONE, exact=True).generate(prompts, SAMPLING))[2] == second
    engine.close()


def test_vllm_seeds_each_place_by_itself() -> None:
    from qerl_bench.engine.vllm import engine as vllm

    seen: list[dict[str, Any]] = []
    own = SimpleNamespace(policy=SimpleNamespace(stop_ids={0}))

    def params(**options: Any) -> dict[str, Any]:
        seen.append(options)
        return options

    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=params))
        for prompt in numbered([asked(), asked()]):
            vllm.VLLMEngine._params(own, prompt, range(4), SAMPLING)  # type: ignore[arg-type]
    seeds = [options["seed"] for options in seen]
    assert seeds[0] == derive(3, "gsm8k/train/1") >> 1 and abs(seeds[0] - seeds[1]) > 4


def test_random_rewards_are_drawn_for_each_place() -> None:
    numbers = [0.0]
    rollouts = [
        Rollout(
            prompt=prompt,
            sample=sample,
            prompt_ids=[0],
            token_ids=[0],
            logprobs=numbers,
            entropies=numbers,
            text="",
            finished=True,
        )
        for prompt in numbered([asked()] * 3)
        for sample in range(32)
    ]
    task: Any = SimpleNamespace(rewards=lambda graded: [SimpleNamespace(total=0.0) for _ in graded])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("qerl_bench.reward.random.replace", lambda reward, total: total)
        totals: Any = RandomReward(name="random", p=0.5).rewards(task, rollouts, 5)
    assert totals[:32] != totals[32:64] != totals[64:]
    assert totals[0] == float(derive(5, "gsm8k/train/1", 0) < 0.5 * 2**63)


@pytest.mark.parametrize("draws", [1, 4])
def test_a_step_of_more_prompts_than_rows_copies_nothing(
    make_experiment: Any, policy: Any, tmp_path: Path, draws: int
) -> None:
    """Three rows and eight prompts: of each 8 or 12 completions, which were 4. Also where a step has several draws of
    noise, and the engine sees its prompts in parts."""
    files = {name: tmp_path / f"{name}.jsonl" for name in ("train", "eval")}
    for name, file in files.items():
        rows = [{"question": f"{name}: 1+{i}=?", "answer": f"so #### {i + 1}"} for i in range(3)]
        file.write_text("\n".join(map(json.dumps, rows)))
    experiment = make_experiment(
        "task=gsm8k",
        *(f"task.{name}_file={file}" for name, file in files.items()),
        "rollout.prompts_per_step=8",
        "eval.questions=3",
        "aqn=constant",
        *(("noise.cadence=group", "noise.prompts_per_draw=2") if draws > 1 else ()),
    )
    groups, *_ = collect_rollouts(experiment, policy, experiment.engine.build(policy), 1, PhaseTimer("cpu"))
    drawn = [
        (group.rollouts[0].prompt.id, one.sample, tuple(one.token_ids)) for group in groups for one in group.rollouts
    ]
    assert len(drawn) == 32 and len({id for id, *_ in drawn}) == 3
    assert len({(id, tokens) for id, _, tokens in drawn}) == 32
