"""eval=lm_eval eval.protocol=standard: GSM8K and MATH-500 as lm-eval asks them, to compare with published numbers.

Prompts, few-shot examples, stop strings, token limit (256) and metrics are lm-eval's own. Only the questions come from
the task, so no network is needed, and the completions from our engine. The numbers differ from those of eval=task:
there is no chat template and no instruction, and answers are extracted leniently.

    gsm8k    5 examples from the train split; strict_match reads the number after ####, flexible_extract the last
             number, or an ellipsis or $$ behind it
    math500  minerva_math500: 4 fixed examples; math_verify compares the answer it finds in the text

Left out: exact_match of minerva_math500, which needs an antlr version that Hydra excludes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl_bench.task.dataset import DatasetTask
from qerl_bench.task.sources import QuestionRow
from qerl_core.checks import ConfigError
from qerl_core.rundir.durable import write_atomically

FEWSHOT_SEED = 1234  # lm-eval's default


@dataclass(frozen=True)
class Benchmark:
    """A task of lm-eval. `metrics` maps each of our modes to lm-eval's (filter, metric) that decides what is right."""

    task: str
    metrics: dict[str, tuple[str, str]]


BENCHMARKS = {
    "gsm8k": Benchmark(
        "gsm8k",
        {"strict_match": ("strict-match", "exact_match"), "flexible_extract": ("flexible-extract", "exact_match")},
    ),
    "math500": Benchmark("minerva_math500", {"math_verify": ("none", "math_verify")}),
}


def benchmark_of(name: str) -> Benchmark:
    """The benchmark for task `name`. Raises ConfigError if there is none."""
    if name not in BENCHMARKS:
        raise ConfigError(
            f"eval.protocol=standard needs task={' or task='.join(BENCHMARKS)}, not task={name}. Use "
            "eval.protocol=held_out, or evaluate the finished run on one of them: qerl-bench eval RUN_DIR "
            "eval=lm_eval eval.protocol=standard task=gsm8k"
        )
    return BENCHMARKS[name]


def write_benchmark(folder: Path, task: DatasetTask, questions: int | None) -> list[str]:
    """Write the questions and lm-eval's task description to `folder`; return the question ids in order."""
    import yaml

    folder.mkdir(parents=True, exist_ok=True)
    description = gsm8k() if task.name == "gsm8k" else minerva_math500()
    rows = {"test": task.rows("test")[:questions]}
    if task.name == "gsm8k":
        rows["train"] = task.rows("train")
    files = {split: folder / f"{description['task']}_{split}.jsonl" for split in rows}
    for split, file in files.items():
        write_atomically(file, "".join(json.dumps(raw(task.name, row)) + "\n" for row in rows[split]))
    description |= {"dataset_path": "json", "dataset_kwargs": {"data_files": {k: v.name for k, v in files.items()}}}
    class_line = "class: !function qerl_bench.eval.lm_eval.task.Standard\n"
    write_atomically(folder / f"{description['task']}.yaml", class_line + yaml.safe_dump(description, sort_keys=False))
    return [f"{task.name}/test/{row.line}" for row in rows["test"]]


def raw(name: str, row: QuestionRow) -> dict[str, str]:
    """A row with the columns that lm-eval expects."""
    if name == "gsm8k":
        return {"question": row.question, "answer": row.answer}
    return {"problem": row.question, "answer": row.gold}


def gsm8k() -> dict[str, Any]:
    """lm-eval's own description of gsm8k, without the location of its data."""
    import lm_eval
    import yaml

    description = yaml.safe_load((Path(lm_eval.__file__).parent / "tasks" / "gsm8k" / "gsm8k.yaml").read_text())
    return {key: value for key, value in description.items() if key not in ("tag", "dataset_path", "dataset_name")}


def minerva_math500() -> dict[str, Any]:
    """lm-eval's description of minerva_math500 with math_verify as its only metric."""
    import yaml

    return yaml.safe_load(Path(__file__).with_name("minerva_math500.yaml").read_text(encoding="utf-8"))
