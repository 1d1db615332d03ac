"""The evaluation before the first step, made once for all runs whose untrained policies answer alike.

A fresh adapter adds exactly 0, and noise is off in evaluations. So what is answered depends on the base, on how it is
computed and sampled, and on the questions, and not on how a run will train: on nothing in OF_TRAINING. All else is in
the key, also what is not known to matter. Left out: vLLM, whose completions depend on what it has sampled before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_bench.eval.base import Evaluation, Evaluator, Score
from qerl_bench.eval.task import TaskEvaluation
from qerl_bench.model.check_cache import key_of
from qerl_bench.task.base import Task
from qerl_core.process.gpu_share import runs_on_gpu
from qerl_core.rundir.checksums import digest
from qerl_core.rundir.environment import kernel_tables

if TYPE_CHECKING:
    from qerl_bench.model.policy import Policy

OF_TRAINING = {
    *("name", "root", "steps", "device", "save_every", "save_on_term", "checkpoints", "logger"),
    *("algo", "reward", "kl", "importance_sampling", "optim", "aqn", "noise"),
}
OF_TRAINING_IN = {  # fields of an option; the device is in the key by its name
    "rollout": ("prompts_per_step", "group_size", "temperature", "lag"),
    "train": (
        *("updates_per_batch", "micro_batch_tokens", "mismatch_share"),
        *("entropy_coef", "on_nonfinite", "kept_groups"),
    ),
    "eval": ("at", "at_greedy", "also", "every", "every_questions"),
}
MAX_SMALL_BYTES = 2**26  # of a file beside the weights, which counts by its content


def key_of_untrained(
    options: Mapping[str, Any], policy: Policy, remote_code: Mapping[str, str] | None, ranks: int
) -> dict[str, Any] | None:
    """All that the evaluation of an untrained policy depends on; None if some of it is not known.

    `options` are the specs and values of the run, by name, and `ranks` the processes that share its work.
    """
    import torch

    evaluator, engine, quantizer = (options[name] for name in ("eval", "engine", "quantizer"))
    if not isinstance(evaluator, TaskEvaluation) or engine.name != "hf" or not adds_nothing(policy):
        return None
    gpu = torch.cuda.get_device_name() if policy.device.type == "cuda" else None
    known = {name: value for name, value in options.items() if name not in OF_TRAINING}
    for name, fields in OF_TRAINING_IN.items():
        known[name] = {field: value for field, value in asdict(known[name]).items() if field not in fields}
    prompts = [asdict(prompt) for prompt in options["task"].eval_prompts(evaluator.questions)]
    known |= {
        "questions": hashlib.sha256(json.dumps(prompts).encode()).hexdigest(),
        "files": files_of(policy.folder),
        "installed": hashlib.sha256(repr(installed()).encode()).hexdigest(),
        "ranks": ranks,
        "threads": torch.get_num_threads(),
        "runs_on_gpu": runs_on_gpu() if gpu else None,
        "kernel_tables": kernel_tables(gpu),
        "gib": torch.cuda.mem_get_info()[1] // 2**30 if gpu else None,
    }
    return key_of(policy.digest, policy.folder, remote_code, quantizer, known, policy.device.type)


def adds_nothing(policy: Policy) -> bool:
    """Whether the adapter, if there is one, has a B of zeros in each layer."""
    return not any(tensor.any() for name, tensor in policy.adapter_state().items() if "lora_B" in name)


def files_of(folder: Path | None) -> dict[str, Any]:
    """The files of a checkpoint: small ones by their content, weights by size and time of change too.

    The digest of large weights (`model/digest.py`) samples them.
    """
    files = {} if folder is None else {file.name: file for file in sorted(folder.iterdir()) if file.is_file()}
    return {
        name: digest(file) if small(file) else [file.stat().st_size, file.stat().st_mtime_ns]
        for name, file in files.items()
    }


def small(file: Path) -> bool:
    return file.suffix != ".safetensors" and file.stat().st_size <= MAX_SMALL_BYTES


@cache
def installed() -> list[tuple[str, str]]:
    """Name and version of every installed package: a grader or a tokenizer may be in any. Read once, as `versions`."""
    return sorted({(str(package.name), package.version) for package in metadata.distributions()})


def evaluation_of(measured: Mapping[str, Any] | None, evaluator: Evaluator, task: Task) -> Evaluation | None:
    """What `asdict` of an evaluation was made from; None if that is not one of all questions of `evaluator`, or if its
    scores are not those of its samples."""
    if measured is None or not isinstance(evaluator, TaskEvaluation):
        return None
    try:
        made = Evaluation(scores=[Score(**score) for score in measured["scores"]], samples=measured["samples"])
        asked = len(task.eval_prompts(evaluator.questions))
        whole = evaluator.scores(made.samples, asked) == made.scores
        return replace(made, settings=dict(measured["settings"])) if whole else None
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
        return None
