"""eval=lm_eval: evaluation through lm-eval, the harness behind most published numbers.

lm-eval asks the questions and computes the metrics; our engine answers with the policy in training. With
eval.protocol=held_out the questions and the reward are the task's own, so the accuracy equals the greedy one of
eval=task, question by question. With eval.protocol=standard they are lm-eval's own benchmarks (standard.py). The
questions are saved as JSONL files and a task YAML in the run directory. Left out: lm-eval's `simple_evaluate`, which
reseeds all global random generators.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_bench.engine.adapter_check import check_completions
from qerl_bench.eval.base import Evaluation
from qerl_bench.eval.lm_eval.standard import FEWSHOT_SEED, benchmark_of, write_benchmark
from qerl_bench.eval.task import accuracy_score, grade_rollouts, sample_key, scores_of
from qerl_bench.parallel import ALONE, World
from qerl_bench.quant.base import KEYS_AND_VALUES
from qerl_bench.task import base
from qerl_bench.task.base import Task
from qerl_core.checks import check_fields, count, one_of, optional, require_package, text
from qerl_core.records import Prompt, Rollout
from qerl_core.rundir.durable import write_atomically

if TYPE_CHECKING:
    from qerl_bench.engine.base import RolloutEngine
    from qerl_bench.model.policy import Policy
    from qerl_core.rundir.run_dir import RunDir

PROTOCOLS = ("held_out", "standard")
DEFAULT_TOKENS = 256  # lm-eval's limit if a task sets none
INVALID = "[invalid]"  # the answer that lm-eval's filters give to a text without one
TASK_VERSION = 2  # of the task that lm-eval sees; increase it when prompts, limits or grading change


@dataclass(frozen=True, kw_only=True)
class LMEval:
    """Greedy accuracy, measured through lm-eval."""

    name: str
    protocol: str
    questions: int | None
    quant: str | None
    quantizer: str | None
    kv: str | None

    def __post_init__(self) -> None:
        check_fields(self, "eval", protocol=one_of(*PROTOCOLS), questions=optional(count()), quant=optional(text))
        check_fields(self, "eval", quantizer=optional(text), kv=optional(one_of(*KEYS_AND_VALUES)))

    def check(self, task: Task) -> None:
        """Raise ConfigError if lm-eval or its benchmark is missing, or the task has too few held-out questions."""
        require_package("lm_eval", "eval=lm_eval", "eval")
        if self.protocol == "standard":
            benchmark_of(task.name)
        base.held_out(task, self.questions)

    def evaluate(
        self, policy: Policy, engine: RolloutEngine, task: Task, run: RunDir, seed: int, world: World = ALONE
    ) -> Evaluation:
        folder = (run.path / "lm_eval").resolve()
        evaluate = standard if self.protocol == "standard" else held_out
        return evaluate(policy, engine, task, folder, self.questions, world)


def held_out(
    policy: Policy, engine: RolloutEngine, task: Task, folder: Path, questions: int | None, world: World
) -> Evaluation:
    """Evaluate on the task's own questions, with its prompts and its reward."""
    prompts = task.eval_prompts(questions)
    write_task(folder, task, prompts, policy)
    report, completions = run_lm_eval(policy, engine, folder, task.name, world)
    rollouts = [replace(rollout, prompt=prompt) for prompt, rollout in zip(prompts, completions, strict=True)]
    rows = world.split(lambda share: grade_rollouts(task, share, "greedy"), rollouts)
    prompt_ids = [policy.prompt_ids(prompt.messages) for prompt in prompts]
    assert [rollout.prompt_ids for rollout in rollouts] == prompt_ids, "lm-eval changed the prompts"
    correct = {sample["doc"]["id"]: bool(sample["correct"]) for sample in report["samples"][task.name]}
    known = [row for row in rows if row["finished"]]  # lm-eval takes one that was cut off for a whole one
    assert all(correct[row["question"]] == row["correct"] for row in known), "lm-eval graded other completions"
    settings = settings_of(report, task.name, task.max_completion_tokens) | check_completions(policy, rollouts)
    return Evaluation(scores=scores_of(rows, "greedy", 1, 1), samples=rows, settings=settings)


def standard(
    policy: Policy, engine: RolloutEngine, task: Task, folder: Path, questions: int | None, world: World
) -> Evaluation:
    """Evaluate on a benchmark of lm-eval with its own prompts and metrics; each metric is a mode."""
    benchmark = benchmark_of(task.name)
    ids = write_benchmark(folder, task, questions)  # type: ignore[arg-type] # only data sets have these names
    report, rollouts = run_lm_eval(policy, engine, folder, benchmark.task, world)
    rows, scores = [], []
    for mode, (filter_name, metric) in benchmark.metrics.items():
        samples = [sample for sample in report["samples"][benchmark.task] if sample["filter"] == filter_name]
        samples.sort(key=lambda sample: sample["doc_id"])
        graded = [
            {
                **sample_key(mode, Prompt(id=id, messages=(), answer=sample["target"]), 0),
                "correct": bool(sample[metric]),
                "answer": None if sample["filtered_resps"][0] == INVALID else sample["filtered_resps"][0],
                "completion": rollout.text,
                "tokens": len(rollout.token_ids),
                "finished": rollout.finished or sample["resps"][0][0] != rollout.text,  # or it reached a stop string
            }
            for id, sample, rollout in zip(ids, samples, rollouts, strict=True)
        ]
        rows += graded
        scores.append(accuracy_score(f"eval/lm_eval_{mode}", graded, 1))
    settings = settings_of(report, benchmark.task, DEFAULT_TOKENS) | check_completions(policy, rollouts)
    return Evaluation(scores=scores, samples=rows, settings=settings)


def run_lm_eval(
    policy: Policy, engine: RolloutEngine, folder: Path, name: str, world: World
) -> tuple[Any, list[Rollout]]:
    """lm-eval's report for the task in `folder`, and one completion for each question.

    The ranks share its work, unless one would have no question, which lm-eval does not allow: then each does all of it.
    """
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager

    from qerl_bench.eval.lm_eval.model import EngineLM

    tasks = TaskManager(include_path=folder, include_defaults=False).load([name])
    task = tasks["tasks"][name]
    task.set_fewshot_seed(FEWSHOT_SEED)
    lm = EngineLM(policy, engine, world if len(task.eval_docs) >= world.size else ALONE)
    report = evaluate(lm, tasks, bootstrap_iters=0)  # None on other ranks than 0
    return world.gather(report)[0], lm.rollouts


def settings_of(report: Any, name: str, max_tokens: int) -> dict[str, Any]:
    return {
        "samples": 1,
        "temperature": 0.0,
        "max_tokens": max_tokens,
        "shots": report["n-shot"][name],
        "lm_eval": metadata.version("lm_eval"),
        "lm_eval_task": name,
        "task_version": report["versions"][name],
    }


def write_task(folder: Path, task: Task, prompts: list[Prompt], policy: Policy) -> None:
    """Write the questions to `folder`/<task>.jsonl and the lm-eval task that asks them to `folder`/<task>.yaml."""
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
    description = {
        "task": task.name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": data.name}},  # relative to the YAML: run directories may be moved
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "text",
        "doc_to_target": "gold",
        "num_fewshot": 0,
        "generation_kwargs": {"do_sample": False, "max_gen_toks": task.max_completion_tokens, "until": []},
        "metric_list": [{"metric": "correct", **mean}, {"metric": "reward", **mean}],
        "metadata": {"version": TASK_VERSION, "judge": config_node(task)},
    }
    class_line = "class: !function qerl_bench.eval.lm_eval.task.HeldOut\n"
    write_atomically(folder / f"{task.name}.yaml", class_line + yaml.safe_dump(description, sort_keys=False))


def config_node(spec: Any) -> dict[str, Any]:
    """The config that a spec was built from, nested specs included."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    node = {key: config_node(value) if is_dataclass(value) else value for key, value in values.items()}
    return {"_target_": f"{type(spec).__module__}.{type(spec).__qualname__}", **node}
