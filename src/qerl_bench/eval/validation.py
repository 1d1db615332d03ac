"""Held-out accuracy during training: eval=task on the first few of its questions, at a handful of steps.

The points make a curve and choose the best checkpoint; verdicts and tables use the whole evaluations before the first
step and after the last. At these two steps the points come from the whole evaluation, so all of a curve are of the same
questions and the same random numbers. Nothing here draws from what training draws from.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from qerl_bench.eval.base import Evaluator, with_error
from qerl_bench.eval.paired import read_samples
from qerl_bench.eval.task import TaskEvaluation, by_question, has_lenient
from qerl_bench.logger.base import MetricsMirror
from qerl_bench.task.base import Task
from qerl_core.rundir.checkpoints import checkpoints, step_of
from qerl_core.rundir.run_dir import RunDir
from qerl_core.statistics import over_samples

log = logging.getLogger(__name__)
POINTS = 5  # of a curve, about, if eval.every leaves it open
LEAST_STEPS = 10  # between two of these
SAMPLES = 4  # of each question at most, beside the greedy completion
BEST_BY = "validation/accuracy_sampled"  # several samples of a question tell more than its greedy completion


def spacing(every: int | None, steps: int, save_every: int) -> int:
    """Steps between two points; 0 for none. If `every` leaves it open, they fall on checkpoints where that can be."""
    if every is not None:
        return every
    wanted = max(LEAST_STEPS, round(steps / POINTS))
    return wanted if save_every >= steps else save_every * max(1, round(wanted / save_every))


def is_due(evaluator: Evaluator, step: int, steps: int, save_every: int) -> bool:
    """Whether step `step` of `steps` has a point of its own: not the last, which has a whole evaluation."""
    if not isinstance(evaluator, TaskEvaluation) or step == steps:
        return False
    every = spacing(evaluator.every, steps, save_every)
    return every > 0 and step % every == 0


def is_whole(evaluator: Evaluator, step: int) -> bool:
    """Whether a whole evaluation is wanted after `step`, which is not the last."""
    return isinstance(evaluator, TaskEvaluation) and step in evaluator.at


def evaluation_after(evaluator: Evaluator, step: int) -> Evaluator:
    """The whole evaluation after `step`."""
    return evaluator.after(step) if isinstance(evaluator, TaskEvaluation) else evaluator


def is_on(evaluator: Evaluator, steps: int, save_every: int) -> bool:
    """Whether any step has a point."""
    return isinstance(evaluator, TaskEvaluation) and 0 < spacing(evaluator.every, steps, save_every) < steps


def reduced(evaluator: Evaluator, task: Task) -> TaskEvaluation:
    """The evaluation of one point."""
    assert isinstance(evaluator, TaskEvaluation)
    questions = min(evaluator.every_questions, len(task.eval_prompts(evaluator.questions)))
    return replace(evaluator, questions=questions, samples=min(SAMPLES, evaluator.samples), k=None)


def metrics_of_validation(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The metrics `validation/*` from rows of samples.parquet, those of a question adjacent."""
    metrics: dict[str, float] = {"validation/questions": len({row["question"] for row in rows})}
    for mode in dict.fromkeys(row["mode"] for row in rows):
        chosen = [dict(row) for row in rows if row["mode"] == mode]
        samples = sum(row["question"] == chosen[0]["question"] for row in chosen)
        columns = {"accuracy": "correct"} | ({"lenient": "lenient"} if has_lenient(chosen) else {})
        for name, column in columns.items():
            estimate = over_samples(by_question(chosen, column, samples))
            metrics[f"validation/{name}_{mode}"] = estimate.value
            if (stderr := estimate.known_stderr) is not None:
                metrics[f"validation/{name}_{mode}_stderr"] = stderr
    return metrics


def rows_of_validation(rows: Sequence[dict[str, Any]], point: TaskEvaluation) -> list[dict[str, Any]]:
    """Those rows of a whole evaluation that `point` would sample."""
    questions = [*dict.fromkeys(row["question"] for row in rows)][: point.questions]
    return [row for row in rows if row["question"] in questions and row["sample"] < point.samples]


def log_validation(run: RunDir, mirror: MetricsMirror, step: int, found: dict[str, float]) -> None:
    run.log("validation", step, found)
    mirror.log("validation", step, found)
    accuracies = [name for name in ("validation/accuracy_greedy", "validation/accuracy_sampled") if name in found]
    shown = ", ".join(
        f"{name.removeprefix('validation/')} {with_error(found[name], found.get(f'{name}_stderr'))}"
        for name in accuracies
    )
    log.info("validation after step %d, %d questions: %s", step, found["validation/questions"], shown)


def validation_of_whole(evaluator: Evaluator, task: Task, run: RunDir, step: int) -> dict[str, float]:
    """The metrics of the point that the whole evaluation after `step`, which `run` has kept, contains."""
    rows = read_samples(run.path, step).to_dict("records")
    return metrics_of_validation(rows_of_validation(rows, reduced(evaluator, task)))


def best_checkpoint(run: RunDir) -> int | None:
    """The step of the checkpoint with the best held-out accuracy so far; None if none has a point of that curve."""
    return best_step(run.metrics(), map(step_of, checkpoints(run.path)))


def best_step(records: Iterable[Mapping[str, Any]], steps: Iterable[int]) -> int | None:
    """The earliest of `steps` with the largest BEST_BY in `records` of metrics.jsonl; None if none has a point."""
    wanted = set(steps)
    points = [
        (-record[BEST_BY], record["step"])
        for record in records
        if record["kind"] == "validation" and record["step"] in wanted and record.get(BEST_BY) is not None
    ]
    return min(points)[1] if points else None
