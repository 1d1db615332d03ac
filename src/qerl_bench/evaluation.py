"""Evaluates the policy of a run in the format of `eval.quant`, and after the last step in those of `eval.also`.

Whether a format costs right answers while it learns or while it answers is seen where one policy answers in several.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd

from qerl_bench.eval import formats
from qerl_bench.eval.base import Evaluation, Evaluator, Score, metrics_of
from qerl_bench.eval.record import record_evaluation
from qerl_bench.eval.task import GreedyEvaluation, SampledEvaluation, TaskEvaluation
from qerl_bench.eval.untrained import evaluation_of, key_of_untrained
from qerl_bench.eval.validation import metrics_of_validation, reduced
from qerl_bench.experiment_spec import Experiment
from qerl_bench.model.check_cache import exclusively, locks, recall, remember
from qerl_bench.quant.kv_kinds import kv_record
from qerl_bench.run_setup import Setup, on_base_of
from qerl_bench.train.nonfinite import blaming
from qerl_core.process.out_of_memory import memory_for
from qerl_core.process.progress import phase

log = logging.getLogger(__name__)


def evaluate_policy(
    setup: Setup, evaluator: Evaluator, other: Experiment | None = None, key: str = "eval.quant"
) -> Evaluation | None:
    """What `evaluator` says of the policy on the base of `other`, which the settings name.

    By default that is the base in `eval.quant` by `eval.quantizer`. Errors name `key`.
    """
    experiment, policy, engine, run, state, world = setup
    other = experiment.answering if other is None else other
    with on_base_of(other, key, experiment, policy, engine, state) as (evaluated, sampler):
        with evaluated.kv.answering():
            evaluation = evaluator.evaluate(evaluated, sampler, experiment.task, run, experiment.seed, world)
        sampler.sleep()  # training needs its memory, and its counts are those of an evaluation
    quant = experiment.merged_into or experiment.quant if other is experiment else other.quant
    settings = {"quant": quant.name, "quantizer": other.quantizer.name} | kv_record(eval=evaluated.kv.kinds.eval)
    return evaluation and replace(evaluation, settings=evaluation.settings | settings)


def evaluate_untrained(setup: Setup) -> Evaluation | None:
    """`evaluate_policy` before any training; what it gave before, if an equal policy was asked the same.

    Of runs that ask the same at one time, one asks and the others wait. Runs with other seeds share greedy answers.
    """
    experiment, policy, world = setup.experiment, setup.policy, setup.world
    folder = Path(experiment.root) / "cache" / "evaluations"
    key = key_of_untrained(vars(experiment), policy, experiment.model.remote_code(), world.size)
    if experiment.answering.quantizer.calibration is not None:
        key = None  # codes of a text that may be another one
    with exclusively(key if world.first else None, locks(), "the same evaluation of an untrained policy"):
        known = world.from_first(lambda: recall(key, folder))
        if (earlier := evaluation_of(known, experiment.eval, experiment.task)) is not None:
            log.info(
                "evaluated before, with equal weights, questions, options, code and card: the answers are in %s", folder
            )
            return earlier
        evaluation = _asked_now(setup, key, folder / "greedy")
        if world.first and evaluation is not None and setup.state.shortages.limits.value is None:
            remember(key, asdict(evaluation), folder)
        return evaluation


def _asked_now(setup: Setup, key: Mapping[str, Any] | None, folder: Path) -> Evaluation | None:
    """`evaluate_policy`, but for greedy answers that a run with another seed has kept in `folder`: none draws them."""
    experiment, world, evaluator = setup.experiment, setup.world, setup.experiment.eval
    if key is None or not isinstance(evaluator, TaskEvaluation) or evaluator.top_p < 1:
        return evaluate_policy(setup, evaluator)  # below 1 the greedy ones are compared with the trainer each time
    key = {**key, "options": {name: value for name, value in key["options"].items() if name != "seed"}}
    greedily = GreedyEvaluation(**vars(evaluator))
    known = world.from_first(lambda: recall(key, folder))
    if (greedy := evaluation_of(known, greedily, experiment.task)) is not None:
        log.info("greedy answers are those of a run with another seed, in %s", folder)
        asked = evaluate_policy(setup, SampledEvaluation(**vars(evaluator)))
        assert asked is not None
        return replace(asked, scores=greedy.scores + asked.scores, samples=greedy.samples + asked.samples)
    evaluation = evaluate_policy(setup, evaluator)
    if world.first and evaluation is not None and setup.state.shortages.limits.value is None:
        rows = [row for row in evaluation.samples if row["mode"] == "greedy"]
        remember(key, asdict(Evaluation(scores=greedily.scores(rows, len(rows)), samples=rows)), folder)
    return evaluation


def evaluate(setup: Setup, step: int, known: Mapping[str, Any] | None = None, untrained: bool = False) -> list[Score]:
    """Evaluate the policy without noise and record the scores in its run; no scores with eval=none.

    Step 0 is the quantized base before any training. If it is `untrained`, the answers may be those of another run.
    What is `known` of the questions goes to the settings on record.
    """
    experiment, run = setup.experiment, setup.run
    with blaming(f"evaluation after step {step}"), memory_for("evaluation"), phase("evaluation"):
        evaluation = evaluate_untrained(setup) if untrained else evaluate_policy(setup, experiment.eval)
    if evaluation is None:
        return []
    evaluation = replace(evaluation, settings=evaluation.settings | dict(known or {}))
    scores = record_evaluation(run, experiment.task.name, step, evaluation)
    log.info("step %d, %d questions: %s", step, scores[0].n, ", ".join(map(str, scores)))
    if setup.world.first:
        formats.report(run, experiment.task, evaluation, step)
    return scores


def validate(setup: Setup, step: int) -> dict[str, float]:
    """The point of the curve of held-out accuracy at `step`; it is on record only as these metrics."""
    with blaming(f"validation after step {step}"), memory_for("evaluation"), phase("validation"):
        evaluation = evaluate_policy(setup, reduced(setup.experiment.eval, setup.experiment.task))
    assert evaluation is not None
    return metrics_of_validation(evaluation.samples)


def answers_in_other_formats(setup: Setup, step: int) -> dict[str, float]:
    """The scores of the policy in each format of `eval.also`, as metrics eval/in/FORMAT/...

    Its answers go to samples_in_formats.parquet, with a column `format`.
    """
    experiment, run = setup.experiment, setup.run
    in_formats: dict[str, float] = {}
    answers: list[pd.DataFrame] = []
    for name, other in experiment.also_answering.items():
        with blaming(f"evaluation in {name}"), memory_for("evaluation"), phase(f"evaluation in {name}"):
            evaluation = evaluate_policy(setup, experiment.eval, other, "eval.also")
        assert evaluation is not None  # eval.also belongs to eval=task
        log.info("step %d, answered in %s: %s", step, name, ", ".join(map(str, evaluation.scores)))
        metrics = metrics_of(evaluation.scores)
        in_formats |= {metric.replace("eval/", f"eval/in/{name}/", 1): value for metric, value in metrics.items()}
        answers.append(pd.DataFrame(evaluation.samples).assign(step=step, format=name))
    if answers:
        with run.replacing("samples_in_formats.parquet") as file:
            pd.concat(answers, ignore_index=True).to_parquet(file, index=False)
    return in_formats
