"""What an adapter loses when it is rounded together with its base: accuracy, KL, and what is left of the update."""

from __future__ import annotations

from typing import Any

from qerl_bench.dose import kl_to
from qerl_bench.engine.base import RolloutEngine
from qerl_bench.eval.base import with_error
from qerl_bench.model.policy import Policy
from qerl_bench.probe.answers import sample_answers
from qerl_bench.task.base import Task
from qerl_bench.train.spec import TrainSpec
from qerl_core.process.progress import phase
from qerl_core.records import Rollout
from qerl_core.statistics import over_samples, paired_difference

DRAW = "merging"  # the random numbers of all answers


def merging_cost(
    task: Task, train: TrainSpec, policy: Policy, engine: RolloutEngine, questions: int | None, samples: int
) -> dict[str, Any]:
    """The policy with its adapter apart, base and adapter merged, and the base alone, asked alike: plain data.

    `samples` answers to each of the first held-out `questions` (None: all) at temperature 1, with equal random numbers.
    Differences of accuracy are paired, and KL is in nats a token, as mismatch/kl: both from the adapter apart, on the
    answers of which KL is measured.
    """
    merging = policy.merging
    assert merging is not None
    prompts = task.eval_prompts(questions)
    right: dict[str, list[list[float]]] = {}
    kl: dict[str, float] = {}

    def ask(name: str) -> list[Rollout]:
        asked = sample_answers(task, engine, prompts, 1.0, samples, DRAW)
        marks = [float(row["correct"]) for row in asked.rows]
        right[name] = [marks[start : start + samples] for start in range(0, len(marks), samples)]
        return asked.rollouts

    def measured(name: str, apart: list[Rollout]) -> None:
        ask(name)
        with phase("scoring the answers of the adapter apart"):
            kl[name] = kl_to(train, 1.0, policy, apart)

    apart = ask("apart")
    with merging.active():
        measured("merged", apart)
    with policy.without_adapter():
        measured("base", apart)
    differences = {name: paired_difference(right["apart"], right[name]) for name in kl}
    return {
        "questions": len(prompts),
        "samples": samples,
        "accuracy": {name: over_samples(rows).value for name, rows in right.items()},
        "difference": {name: {"value": one.value, "stderr": one.known_stderr} for name, one in differences.items()},
        "kl": kl,
        "update_kept": merging.update_kept(),
    }


def cost_table(cost: dict[str, Any]) -> str:
    """A table of `merging_cost`."""
    names = {"apart": "adapter apart", "merged": "rounded together", "base": "base alone"}
    lines = [f"{cost['questions']} held-out questions x {cost['samples']}, temperature 1"]
    lines += [f"{'':16}  {'accuracy':>8}  {'minus apart':>15}  {'KL, nats/token':>14}"]
    for key, name in names.items():
        one = cost["difference"].get(key)
        gap = "" if one is None else with_error(100 * one["value"], one["stderr"] and 100 * one["stderr"], "+.1f")
        kl = "" if one is None else f"{cost['kl'][key]:.2g}"
        lines.append(f"{name:16}  {100 * cost['accuracy'][key]:6.1f} %  {gap:>15}  {kl:>14}".rstrip())
    return "\n".join([*lines, f"rounding keeps {cost['update_kept']:.1%} of the adapter's update"])
