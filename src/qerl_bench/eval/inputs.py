"""What the numbers of a run are made of, beside its config, weights and code: files of the model, texts and data.

A continued run must find them as they were (`rundir/attempts.py`). Left out: what a package brings, such as the
questions of lm-eval, whose versions are recorded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from qerl_bench.eval.base import Evaluator
from qerl_bench.quantizer.base import Quantizer
from qerl_bench.task.base import Task
from qerl_bench.train.spec import Specs
from qerl_core.records import Prompt
from qerl_core.rundir.checksums import digest

READ = (  # of a model's folder, beside weights: what transformers reads, or may read in the place of another
    *("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*", "*.jinja", "vocab*", "merges.txt", "*.model", "*.tiktoken", "*.py"),
)
UNASKED: Any = object()  # questions of an evaluation that asks the task nothing
WRITTEN_BY = ("transformers_version", "_name_or_path")  # keys that say who wrote a config, not what it says


class Inputs(Specs, Protocol):
    """What an `Experiment` has of them."""

    @property
    def task(self) -> Task: ...
    @property
    def eval(self) -> Evaluator: ...
    @property
    def quantizer(self) -> Quantizer: ...


def inputs_of(experiment: Inputs, folder: Path | None, origin: Mapping[str, Any] | None) -> dict[str, str]:
    """The digest of each input by its name, as a message calls it.

    `folder` has the model's files, if any does; `origin` describes the GGUF file that they were made of.
    """
    inputs = {"the GGUF file": origin["digest"]} if origin is not None else files_beside_weights(folder)
    task, text = experiment.task, getattr(experiment.quantizer.calibration, "file", None)
    if text is not None:
        inputs["the calibration text"] = digest(Path(text))
    stored, prompts = task.stored_prompts(), experiment.rollout.prompts_per_step
    trained = [*stored, *task.train_prompts(1, prompts, experiment.seed)]
    if not experiment.algo.on_policy:
        shown = task.demonstrations(1, len(stored) or prompts, experiment.seed)
        inputs["the demonstrations"] = _digest([prompt_text(one.prompt), one.completion] for one in shown)
    inputs["the training data"] = _digest(map(prompt_text, trained))
    if (questions := getattr(experiment.eval, "questions", UNASKED)) is not UNASKED:
        inputs["the held-out data"] = _digest(map(prompt_text, task.eval_prompts(questions)))
    return inputs


def files_beside_weights(folder: Path | None) -> dict[str, str]:
    """The digest of each file of a checkpoint that is read beside the weights, by name."""
    found = {} if folder is None else {file.name: file for name in READ for file in folder.glob(name) if file.is_file()}
    return {name: digest_of_file(found[name]) for name in sorted(found)}


def digest_of_file(path: Path) -> str:
    """SHA-256 of a file; of the JSON of a config without who wrote it, which is another on another machine."""
    if path.name not in ("config.json", "generation_config.json"):
        return digest(path)
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        return digest(path)
    said = {key: value for key, value in content.items() if key not in WRITTEN_BY} if isinstance(content, dict) else {}
    return _digest([said or content])


def prompt_text(prompt: Prompt) -> list[Any]:
    return [prompt.id, prompt.messages, prompt.answer, prompt.token_ids, prompt.new_tokens]


def _digest(parts: Iterable[Any]) -> str:
    state = hashlib.sha256()
    for part in parts:
        state.update(json.dumps(part, sort_keys=True, default=str).encode() + b"\n")
    return state.hexdigest()
