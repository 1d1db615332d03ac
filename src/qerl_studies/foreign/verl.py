"""Runs of verl: for each a file of its logger `file`, ARM-sSEED.jsonl, and beside it what else it wrote.

    ARM-sSEED.jsonl                 trainer.logger=[file]: a line {"step": ..., "data": {...}} for each step
    ARM-sSEED.yaml (or .json)       its config, such as OmegaConf.save(config); or .hydra/config.yaml in ARM-sSEED/
    ARM-sSEED/rollout/STEP.jsonl    trainer.rollout_data_dir: scores, with which the log is compared
    ARM-sSEED/validation/STEP.jsonl trainer.validation_data_dir: answers to validation questions

verl has several seeds (data, sampling, loader) and no one seed of a run, so the name of the file says which it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qerl_core.checks import ConfigError, require
from qerl_core.rundir.read_files import read_yaml
from qerl_studies.foreign.files import inside, read_json, read_lines
from qerl_studies.foreign.formulas import of_completions
from qerl_studies.foreign.gather import ForeignRun, check_against, check_order, flat_options, named_seed, numbers_of
from qerl_studies.runs.reported import LARGEST

SCORE = "critic/score/mean"
MODES = ("greedy", "sampled")
ASKED = "actor_rollout_ref.rollout.val_kwargs"
RUNS_HELP = "a file ARM-sSEED.jsonl for each run, which trainer.logger=[console,file] writes"


def read(root: Path, answers: str | None = None) -> list[ForeignRun]:
    """The runs in `root`. `answers` says how validation answers were drawn, greedy or sampled, if no config does.

    Raises ConfigError without a run, and for a file that cannot be read.
    """
    files = [file for file in sorted(root.rglob("*.jsonl")) if inside(root, file) and _is_log(file)]
    require(bool(files), f"{root} has no run of verl: give a folder with {RUNS_HELP}")
    return [_run(root, file, answers) for file in files]


def _is_log(file: Path) -> bool:
    """Whether the first line is one of the logger; dumps have inputs and outputs there."""
    try:
        _, first = next(read_lines(file), (0, None))
    except ConfigError:
        return not file.stem.isdigit()  # a damaged log is named later, a damaged dump is none
    return isinstance(first, dict) and isinstance(first.get("data"), dict) and "input" not in first


def _run(root: Path, file: Path, answers: str | None) -> ForeignRun:
    name = file.relative_to(root).with_suffix("").as_posix()
    run = ForeignRun(name, file.relative_to(root).as_posix(), {}, seed=named_seed(name))
    run.options = _options(root, file)
    steps = []
    for number, line in read_lines(file):
        where = f"{file}, line {number}"
        require(isinstance(line, dict) and isinstance(line.get("data"), dict), f"{where} is no line of verl's logger")
        step = line.get("step")
        require(type(step) is int and step >= 0, f"{where}: step must be a whole number, got {step!r}")
        assert isinstance(step, int)
        numbers = numbers_of(line["data"])
        if SCORE in numbers:
            steps.append(step)
        run.logged[step] = numbers | run.logged.get(step, {})
    check_order(run, steps)
    folder = file.with_suffix("")
    scores = {step: [one["score"] for one in lines] for step, lines in _dumps(root, folder / "rollout", run)}
    run.counts = {str(step): len(values) for step, values in scores.items()}
    check_against(run, SCORE, {step: of_completions(np.array(values, float)) for step, values in scores.items()})
    if not scores:
        run.notes.append("no rollout dump: the logged scores could not be compared with completions")
    if not run.options:
        run.notes.append(
            "no config beside a log: in what arms differ, and how entropy and KL are averaged, is not known"
        )
    _validation(root, folder / "validation", run, answers)
    planned = run.options.get("trainer.total_training_steps")
    if type(planned) is int and planned > max(run.logged, default=0):
        run.refused.append(f"it stopped at step {max(run.logged, default=0)} of {planned}")
    return run


def _options(root: Path, file: Path) -> dict[str, Any]:
    places = [file.with_suffix(".yaml"), file.with_suffix(".json"), file.with_suffix("") / ".hydra" / "config.yaml"]
    found = next((place for place in places if place.is_file() and inside(root, place)), None)
    if found is None:
        return {}
    return flat_options(read_json(found) if found.suffix == ".json" else read_yaml(found))


def _dumps(root: Path, folder: Path, run: ForeignRun) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The completions of each step, as verl wrote them. Raises ConfigError for a file that is no dump."""
    for file in sorted(folder.glob("*.jsonl"), key=lambda one: one.name.zfill(20)):
        if file.stem.isdecimal() and inside(root, file):
            lines = [line for _, line in read_lines(file)]
            right = all(isinstance(one, dict) and _is_score(one.get("score")) for one in lines)
            require(right and bool(lines), f"{file} is no dump of verl's generations: each line needs a score")
            if any(one.get("step") != int(file.stem) for one in lines):
                run.refused.append(f"{folder.name}/{file.name} has completions of other steps: a rerun?")
            yield int(file.stem), lines


def _is_score(value: Any) -> bool:
    return isinstance(value, int | float) and -LARGEST <= value <= LARGEST


def _validation(root: Path, folder: Path, run: ForeignRun, answers: str | None) -> None:
    """Right answers by question, if the dumps have `acc`, and if it is known how the answers were drawn."""
    dumps = [*_dumps(root, folder, run)]
    if not dumps:
        run.notes.append("no validation dump: held-out accuracy is known for all questions together, if at all")
        return
    mode = answers or _mode(run.options)
    if mode is None:
        run.notes.append("validation answers: greedy or sampled is not known; give answers=greedy or answers=sampled")
        return
    for step, lines in dumps:
        if not all(one.get("acc") in (0, 1, True, False) for one in lines):
            run.notes.append("validation answers have no `acc` of 0 or 1, so which of them are right is not known")
            return
        for one in lines:
            key = (f"eval/accuracy_{mode}", step, question_of(one))
            right, count = run.answers.get(key, (0, 0))
            run.answers[key] = right + int(one["acc"]), count + 1


def question_of(line: Mapping[str, Any]) -> str:
    """A name for what was asked, the same in all arms: a digest of prompt and reference."""
    text = f"{line.get('input')}\0{line.get('gts')}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]


def _mode(options: Mapping[str, Any]) -> str | None:
    """How validation answers were drawn: by do_sample and temperature, both of which verl's config has."""
    drawn, temperature = options.get(f"{ASKED}.do_sample"), options.get(f"{ASKED}.temperature")
    if not isinstance(drawn, bool):
        return None
    return "sampled" if drawn and temperature != 0 else "greedy"
