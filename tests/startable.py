"""What lets any config start here: words in the place of what a CPU without a network lacks, or what takes long."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tests.conftest import compose

TINY, RANDOM = "model=tiny_untrained", "reward=random"


class Change(NamedTuple):
    why: str
    where: Callable[[Any], bool]  # of the config that the words before make
    words: tuple[str, ...]  # ROWS: the folder of generated questions


def trained_on_rows(cfg: Any) -> bool:
    return "train_file" in cfg.task


CHANGES = (
    Change("a model of the hub, or of a GPU's size", lambda cfg: True, (TINY, "device=cpu")),
    Change("random weights are never right, and equal rewards leave no gradient", lambda cfg: True, (RANDOM,)),
    Change("without rewards", lambda cfg: cfg.algo.name == "sft", ("reward=task",)),
    Change("vLLM has an environment of its own", lambda cfg: cfg.engine.name == "vllm", ("engine=hf",)),
    Change(
        "a data set of the hub: generated questions, in its columns",
        trained_on_rows,
        ("task.train_file=ROWS/train.jsonl", "task.eval_file=ROWS/eval.jsonl"),
    ),
    Change(
        "this data set has no worked solutions, and the file says to give a text",
        lambda cfg: trained_on_rows(cfg) and cfg.task.train.marker is None and "calibration" in cfg.quantizer,
        ("quantizer.calibration.file=ROWS/train.jsonl",),
    ),
    Change("noise begins at the second stage", lambda cfg: cfg.aqn.name != "none", ("steps=2",)),
    Change("seconds", lambda cfg: cfg.aqn.name == "none", ("steps=1",)),
    Change(
        "seconds",
        lambda cfg: True,
        ("optim.warmup_steps=0", "rollout.prompts_per_step=2", "rollout.group_size=4", "task.max_completion_tokens=4"),
    ),
    Change(
        "seconds: some bases have a size and a warm start of their own",
        lambda cfg: True,
        ("model.layers=1", "model.hidden_size=128", "model.intermediate_size=128", "model.warm_start_steps=0"),
    ),
    Change("seconds", lambda cfg: cfg.task.name == "shape", ("task.prompt_tokens=8", "task.completion_tokens=4")),
    Change(
        "seconds",
        lambda cfg: cfg.eval.name != "none",
        ("eval.questions=1", "eval.samples=2", "eval.max_tokens=4"),
    ),
    Change("seconds", lambda cfg: "calibration" in cfg.quantizer, ("quantizer.calibration.samples=4",)),
)


def startable(words: Sequence[str], folder: Path) -> list[str]:
    """`words` of a run, and behind them all changes that apply to their config. Questions are written to `folder`.

    Keys of a model or an engine that the one in its place lacks, such as model.context, are left out.
    """
    cfg = compose([*words, TINY, RANDOM])
    changes = {word.partition("=")[0]: word for one in CHANGES if one.where(cfg) for word in one.words}
    rows = folder / cfg.task.name
    if trained_on_rows(cfg):
        write_rows(rows, cfg.task)
    chosen = [word for word in changes.values() if word.startswith(("model=", "reward=", "engine="))]
    put = cfg if chosen == [TINY, RANDOM] else compose([*words, *chosen])
    lacking = [f"~{axis}.{key}" for axis, known in keys_of(*chosen).items() for key in put[axis] if key not in known]
    return [*words, *(word.replace("ROWS", str(rows)) for word in changes.values()), *lacking]


@cache
def keys_of(*chosen: str) -> dict[str, set[str]]:
    """The keys of the model and of the engine that these words choose."""
    cfg = compose([*chosen])
    return {axis: {*cfg[axis]} for axis in ("model", "engine")}


def write_rows(folder: Path, task: Any) -> None:
    """Eight sums to train on, and two to be asked, in the columns of `task`; `text` is for calibration."""
    folder.mkdir(exist_ok=True)
    for split, source, numbers in (("train", task.train, range(8)), ("eval", task.eval, range(8, 10))):
        with open(folder / f"{split}.jsonl", "w") as file:
            for number in numbers:
                said, total = f"{number} + 5 = {number + 5}.", str(number + 5)
                answer = total if source.marker is None else f"{said}\n{source.marker} {total}"
                row = {source.question[0]: f"What is {number} + 5?", source.answer[0]: answer, "text": said}
                file.write(json.dumps(row) + "\n")
