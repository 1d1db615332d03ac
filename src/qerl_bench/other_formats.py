"""eval.also: the answers of a trained policy in further weight formats, after the last step of a run.

Whether a format costs right answers while it learns or while it answers is seen where one policy answers in several.
Questions, seeds and settings are those of the last evaluation.
"""

from __future__ import annotations

import logging

import pandas as pd

from qerl_bench.eval.base import metrics_of
from qerl_bench.run_setup import Setup, ask
from qerl_bench.train.nonfinite import during
from qerl_core.process.out_of_memory import memory_for
from qerl_core.process.progress import phase

log = logging.getLogger(__name__)


def answers_in_other_formats(setup: Setup, step: int) -> dict[str, float]:
    """The scores of the policy in each format of `eval.also`, as metrics eval/in/FORMAT/...

    Its answers go to samples_in_formats.parquet, with a column `format`.
    """
    experiment, run = setup.experiment, setup.run
    found: dict[str, float] = {}
    answers: list[pd.DataFrame] = []
    for name, other in experiment.also_answering.items():
        with during(f"evaluation in {name}"), memory_for("evaluation"), phase(f"evaluation in {name}"):
            evaluation = ask(setup, experiment.eval, other, "eval.also")
        assert evaluation is not None  # eval.also belongs to eval=task
        log.info("step %d, answered in %s: %s", step, name, ", ".join(map(str, evaluation.scores)))
        metrics = metrics_of(evaluation.scores)
        found |= {metric.replace("eval/", f"eval/in/{name}/", 1): value for metric, value in metrics.items()}
        answers.append(pd.DataFrame(evaluation.samples).assign(step=step, format=name))
    if answers:
        with run.replacing("samples_in_formats.parquet") as file:
            pd.concat(answers, ignore_index=True).to_parquet(file, index=False)
    return found
