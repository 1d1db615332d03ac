"""eval=lm_eval: the task's held-out questions through lm-eval, the harness that published numbers come from.

lm-eval asks and counts; our engine answers and the task's strict reward judges, so the accuracy is the greedy one of
eval=task to the question. What was asked is left in the run directory as a JSONL file and a task YAML. Left out:
lm-eval's own benchmarks, which want a network, and its `simple_evaluate`, which reseeds every global random generator.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_bench.config import require_count
from qerl_bench.errors import require_package
from qerl_bench.evals.base import Evaluation
from qerl_bench.evals.probe import adapter_probe
from qerl_bench.evals.task import judge, scored
from qerl_bench.records import Prompt
from qerl_bench.rundir import write_atomically
from qerl_bench.task.base import Task

if TYPE_CHECKING:
    from qerl_bench.engine.base import RolloutEngine
    from qerl_bench.policy import Policy
    from qerl_bench.rundir import RunDir

TASK_VERSION = 1  # of the task that lm-eval sees: raise it when prompts, limits or judgement change their meaning


@dataclass(frozen=True, kw_only=True)
class LmEval:
    """Greedy accuracy on held-out questions, measured through lm-eval."""

    name: str
    questions: int | None

    def __post_init__(self) -> None:
        if self.questions is not None:
            require_count("eval.questions", self.questions)

    def check(self) -> None:
        """Raise BadInput unless lm-eval is installed."""
        require_package("lm_eval", "eval=lm_eval", "eval")

    def evaluate(self, policy: Policy, engine: RolloutEngine, task: Task, run: RunDir, seed: int) -> Evaluation:
        from lm_eval.evaluator import evaluate
        from lm_eval.tasks import TaskManager

        from qerl_bench.evals.lm_eval_model import EngineLM

        prompts = task.eval_prompts(self.questions)
        folder = (run.path / "lm_eval").resolve()
        write_task(folder, task, prompts, policy)
        tasks = TaskManager(include_path=folder, include_defaults=False).load([task.name])
        lm = EngineLM(policy, engine)
        found: Any = evaluate(lm, tasks, bootstrap_iters=0)

        rollouts = [replace(rollout, prompt=prompt) for prompt, rollout in zip(prompts, lm.rollouts, strict=True)]
        rows = judge(task, rollouts, "greedy")
        asked = [policy.prompt_ids(prompt.messages) for prompt in prompts]
        assert [rollout.prompt_ids for rollout in rollouts] == asked, "lm-eval changed the prompts"
        counted = {sample["doc"]["id"]: bool(sample["correct"]) for sample in found["samples"][task.name]}
        assert counted == {row["question"]: row["correct"] for row in rows}, "lm-eval judged other answers"
        settings = {
            "samples": 1,
            "temperature": 0.0,
            "max_tokens": task.max_completion_tokens,
            "shots": found["n-shot"][task.name],
            "lm_eval": metadata.version("lm_eval"),
            "task_version": found["versions"][task.name],
        }
        settings |= adapter_probe(policy, rollouts)
        return Evaluation(scores=scored(rows, "greedy", 1, 1), samples=rows, settings=settings)


def write_task(folder: Path, task: Task, prompts: list[Prompt], policy: Policy) -> None:
    """Write the questions to `folder`/<task>.jsonl and their lm-eval task to `folder`/<task>.yaml."""
    import yaml

    data = folder / f"{task.name}.jsonl"
    texts = [policy.prompt_text(prompt.messages) for prompt in prompts]
    rows = [
        {"id": prompt.id, "text": text, "messages": prompt.messages, "gold": prompt.answer}
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    mean = {"aggregation": "mean", "higher_is_better": True}
    folder.mkdir(exist_ok=True)
    write_atomically(data, "".join(json.dumps(row) + "\n" for row in rows))
    described = {
        "task": task.name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "text",
        "doc_to_target": "gold",
        "num_fewshot": 0,
        "generation_kwargs": {"do_sample": False, "max_gen_toks": task.max_completion_tokens, "until": []},
        "metric_list": [{"metric": "correct", **mean}, {"metric": "reward", **mean}],
        "metadata": {"version": TASK_VERSION, "judge": spec_of(task)},
    }
    judged_by = "class: !function qerl_bench.evals.lm_eval_task.HeldOut\n"
    write_atomically(folder / f"{task.name}.yaml", judged_by + yaml.safe_dump(described, sort_keys=False))


def spec_of(spec: Any) -> dict[str, Any]:
    """The config node that a spec was made from, with those of the specs inside it."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    node = {key: spec_of(value) if is_dataclass(value) else value for key, value in values.items()}
    return {"_target_": f"{type(spec).__module__}.{type(spec).__qualname__}", **node}
