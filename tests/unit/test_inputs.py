"""A continued run goes on with the files and data that it began with: what counts, one change at a time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qerl_bench.commands.run import run_experiment
from qerl_bench.config import build, compose
from qerl_bench.eval.inputs import inputs_of
from qerl_core.checks import ConfigError
from tests.models import builds
from tests.short_runs import killed_in_step

MODEL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def set_key(file: Path, key: str, value: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))


def replaced(old: str, new: str) -> Callable[[Path], object]:
    def change(file: Path) -> None:
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))

    return change


CHANGES: dict[str, tuple[str, Callable[[Path], object], str | None]] = {  # file, change, and what is named
    "one merge more": (
        "m/tokenizer.json",
        lambda file: file.write_text(file.read_text().replace('"merges": []', '"merges": [["a", "b"]]')),
        "tokenizer.json",
    ),
    "another template": (
        "m/chat_template.jinja",
        lambda file: file.write_text("{{ messages }}"),
        "chat_template.jinja",
    ),
    "another end": ("m/generation_config.json", lambda f: set_key(f, "eos_token_id", 3), "generation_config.json"),
    "another epsilon": ("m/config.json", lambda file: set_key(file, "rms_norm_eps", 1e-3), "config.json"),
    "another rotary base": ("m/config.json", lambda file: set_key(file, "rope_theta", 5e5), "config.json"),
    "no tokenizer_config.json": ("m/tokenizer_config.json", Path.unlink, "tokenizer_config.json"),
    "code of its own": ("m/modeling.py", Path.touch, "modeling.py"),
    "a training answer": ("train.jsonl", replaced("#### 6", "#### 7"), "the training data"),
    "rows in another order": (
        "train.jsonl",
        lambda file: file.write_text("".join(reversed(file.read_text().splitlines(keepends=True)))),
        "the training data",
    ),
    "a held-out question": ("eval.jsonl", replaced("What is 30", "How much is 30"), "the held-out data"),
    "a held-out answer": ("eval.jsonl", replaced("#### 35", "#### 36"), "the held-out data"),
    "the program that wrote the config": (
        "m/config.json",
        lambda file: set_key(file, "transformers_version", "9.9"),
        None,
    ),
    "a page about the model": ("m/README.md", Path.touch, None),
    "a held-out question that is not asked": ("eval.jsonl", replaced("What is 38", "How much is 38"), None),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    builds.build("llama", folder / "m")
    for name, numbers in (("train", range(20)), ("eval", range(30, 40))):
        lines = [{"question": f"What is {n} plus 1?", "answer": f"So.\n#### {n + 1}"} for n in numbers]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def config_of(folder: Path, *more: str) -> Any:
    """The config; files that changed are read again."""
    files = [f"task.{name}_file={folder}/{name}.jsonl" for name in ("train", "eval")]
    sizes = [
        "task.max_completion_tokens=4",
        "rollout.prompts_per_step=2",
        "rollout.group_size=2",
        "optim.warmup_steps=0",
    ]
    asked = ["eval.questions=6", "eval.samples=1", "model=hub", f"model.id={folder / 'm'}", "model.dtype=float32"]
    return compose(["device=cpu", "task=gsm8k", *files, *sizes, *asked, *more])


@pytest.mark.parametrize("change", CHANGES)
def test_each_input_counts_and_nothing_else(change: str, original: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(original, tmp_path / "copy")
    before = inputs_of(build(config_of(folder)), folder / "m", None)
    assert {*before} >= {*MODEL, "the training data", "the held-out data"}
    file, happen, named = CHANGES[change]
    happen(folder / file)
    after = inputs_of(build(config_of(folder)), folder / "m", None)
    assert [name for name in {**before, **after} if before.get(name) != after.get(name)] == ([named] if named else [])


def test_demonstrations_and_the_text_of_a_quantizer_count(original: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(original, tmp_path / "copy")
    (folder / "text.txt").write_text("a")
    sft = ["algo=sft", "quant=nvfp4", "quantizer=gptq", f"quantizer.calibration.file={folder / 'text.txt'}"]

    def inputs() -> dict[str, str]:
        return inputs_of(build(config_of(folder, *sft)), None, {"digest": "sha256:1f"})

    before = inputs()
    assert [*before][:2] == ["the GGUF file", "the calibration text"]  # and no file that was made of it
    replaced("So.\\n#### 6", "Thus.\\n#### 6")(folder / "train.jsonl")
    (folder / "text.txt").write_text("b")
    changed = {name for name, digest in inputs().items() if before[name] != digest}
    assert changed == {"the calibration text", "the demonstrations"}


def test_questions_that_a_package_generates_count(make_config: Callable[..., Any]) -> None:
    """As reasoning-gym draws others in another version."""
    experiment = build(make_config())
    before = inputs_of(experiment, None, None)

    def answered_by_1(prompts: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: [replace(prompt, answer="1") for prompt in prompts(*given)]

    task: Any = replace(experiment.task)
    for name in ("train_prompts", "eval_prompts"):
        object.__setattr__(task, name, answered_by_1(getattr(task, name)))
    after = inputs_of(replace(experiment, task=task), None, None)
    assert before.keys() == after.keys() == {"the training data", "the held-out data"}
    assert not before.items() & after.items()


def named_run(root: Path) -> list[str]:
    return [f"root={root}", "name=run", "steps=2", "save_every=1"]


@pytest.mark.parametrize("change", ["one merge more", "a held-out answer"])
def test_a_run_is_refused_before_a_step_and_whole_when_the_input_is_back(
    change: str, original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qerl_studies.figures.run.run_figures", lambda folder: None)
    folder = shutil.copytree(original, tmp_path / "copy")
    config = config_of(folder, *named_run(tmp_path))
    with killed_in_step(2):
        run_experiment(build(config), config)
    file, happen, named = CHANGES[change]
    kept = (folder / file).read_bytes()
    happen(folder / file)
    before = (tmp_path / "runs" / "run" / "metrics.jsonl").read_bytes()
    config = config_of(folder, *named_run(tmp_path))
    with pytest.raises(ConfigError, match=f"other contents of {named}. Put them back"):
        run_experiment(build(config), config)
    assert (tmp_path / "runs" / "run" / "metrics.jsonl").read_bytes() == before
    (folder / file).write_bytes(kept)
    config = config_of(folder, *named_run(tmp_path))
    run_experiment(build(config), config)
    assert (tmp_path / "runs" / "run" / "done.json").exists()
