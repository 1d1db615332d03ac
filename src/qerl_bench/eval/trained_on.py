"""Which questions of an evaluation a run was trained on: those of one task may stand in the training split of another.

Big-Math and DAPO-Math were collected from the competitions that runs are evaluated on. Left out: tasks that generate
their training questions, and questions in other words.
"""

from __future__ import annotations

import logging

from qerl_bench.task.base import Task
from qerl_bench.task.dataset import DatasetTask
from qerl_bench.task.sources import MAX_EXAMPLES
from qerl_core.checks import ConfigError, require

log = logging.getLogger(__name__)


def without_trained(task: Task, questions: int | None, trained: Task) -> tuple[Task, dict[str, int | None]]:
    """`task` without the questions that are also in the training split of `trained`, as task.leaks says; and how many
    of its first `questions` were, for eval.json: None if that split cannot be read, nothing if there is none to
    compare.

    Raises ConfigError with task.leaks=refuse, and if no question is left.
    """
    if _data(task) == _data(trained):
        return task, {}
    try:
        learned = {trained.normalize(prompt.question): prompt for prompt in trained.stored_prompts()}
    except ConfigError as error:
        log.warning("the questions are not compared with those that the run trained on: %s", error)
        return task, {"trained_on": None}
    if not learned:
        return task, {}
    held_out = task.eval_prompts(questions)
    seen = [(prompt, twin) for prompt in held_out if (twin := learned.get(task.normalize(prompt.question)))]
    if not seen:
        return task, {"trained_on": 0}
    examples = "; ".join(f"{one.id} = {twin.id}: {one.question[:60]!r}" for one, twin in seen[:MAX_EXAMPLES])
    summary = (
        f"{len(seen)} of {len(held_out)} held-out questions of task={task.name} are also in the training split of the "
        f"run, task={trained.name}"
    )
    if not isinstance(task, DatasetTask):
        log.warning("%s (%s)", summary, examples)
        return task, {"trained_on": len(seen)}
    require(
        task.leaks == "drop",
        f"{summary} ({examples}): their accuracy would measure memory. Leave them out with task.leaks=drop, or "
        "evaluate on other questions",
    )
    rest = task.without(learned)
    require(bool(rest.rows("test")), f"{summary} ({examples}): no question is left; evaluate on other questions")
    log.warning("%s and are left out (%s)", summary, examples)
    return rest, {"trained_on": len(seen)}


def _data(task: Task) -> object:
    """What decides which questions a task has; it compares the two splits of one data set by itself."""
    if not isinstance(task, DatasetTask):
        return task
    return task.train, task.eval, task.train_file, task.eval_file
