"""The estimate of one composed run: what the table needs of it is asked of its model and task, without weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

from qerl_bench.config import build
from qerl_bench.estimate.cards import CARDS, Card
from qerl_bench.estimate.estimate import RunEstimate, estimate, uncovered
from qerl_bench.estimate.sizes import sizes_of
from qerl_bench.estimate.table import Length, table
from qerl_bench.estimate.work import Work
from qerl_bench.experiment_spec import Experiment
from qerl_bench.model.base import Model
from qerl_bench.model.qwen2 import MadeHere
from qerl_bench.task.base import Task
from qerl_core.checks import ConfigError, require
from qerl_core.options.fingerprint import flat

CHARACTERS = 4  # of English in a token of a released model's tokenizer, about; one here (bytes)
PROMPTS = 64  # that are looked at for their length


class GivenLengths(NamedTuple):
    """What the user says of lengths, in tokens; None: from the table, and from the task's questions."""

    tokens: float | None = None
    prompt_tokens: float | None = None


NOTHING = GivenLengths()


def of_point(
    tree: dict[str, Any],
    card: Card | None,
    per_card: int,
    given: GivenLengths = NOTHING,
    tasks: list[Task] | None = None,
) -> RunEstimate | list[str]:
    """The estimate of the run of a composed config, or why there is none. Raises ConfigError if it could not run.

    Points of a sweep share `tasks`, so that those of one task read its questions once.
    """
    experiment = build(tree)  # type: ignore[arg-type]  # a tree is as good as a DictConfig here
    if tasks is not None:
        if experiment.task not in tasks:
            tasks.append(experiment.task)
        experiment = replace(experiment, task=tasks[tasks.index(experiment.task)])
    return of_experiment(experiment, flat(tree), card, per_card, given)


def of_experiment(
    experiment: Experiment, config: Mapping[str, Any], card: Card | None, per_card: int, given: GivenLengths = NOTHING
) -> RunEstimate | list[str]:
    """As `of_point`, of a built experiment and its flat config."""
    if card is None or experiment.device == "cpu":
        there = f"card={'|'.join(CARDS)} estimates a GPU"
        return [f"no committed table covers a CPU: steps=2 shows what a step takes here, and {there}"]
    if not experiment.algo.on_policy:
        return [f"algo={experiment.algo.name} samples no completions: no committed run on a GPU is without"]
    sizes = sizes_of(experiment.model)
    if missing := [*uncovered(config), *([sizes] if isinstance(sizes, str) else [])]:
        return missing
    assert not isinstance(sizes, str)
    tokens, said = completion_tokens(experiment.task, experiment.model, given)
    prompt, about = prompt_tokens(experiment.task, experiment.model, given)
    questions = 0
    if hasattr(experiment.eval, "samples") and getattr(experiment.eval, "questions", None) is None:
        questions = len(experiment.task.eval_prompts(None))
    work = Work.of(config, sizes, experiment.quant.bits_per_weight, prompt, tokens, questions, per_card)
    rates, runs, _ = table()
    return estimate(work, card, rates, runs, [said, about])


def completion_tokens(task: Task, model: Model, given: GivenLengths) -> tuple[float, str]:
    """Mean tokens of a completion, and where they are from."""
    limit = task.max_completion_tokens
    if given.tokens is not None:
        require(
            given.tokens <= limit,
            f"tokens={given.tokens:g} is above task.max_completion_tokens={limit}: say less, or make that larger",
        )
        return given.tokens, f"completions of {given.tokens:g} tokens, as you say"
    if isinstance(exact := getattr(task, "completion_tokens", None), int):
        return exact, f"completions of {exact:,} tokens, as task={task.name} makes them"
    known = [one for one in table().lengths if one.task == task.name]
    if not known:
        where = f"at most: task={task.name} is in no table"
        return limit, f"{where}, so completions are counted at their limit of {limit:,} tokens; tokens=N says less"
    near = min(known, key=lambda one: (one.model != model.name, abs(one.limit - limit)))
    tokens = min(near.tokens, limit)
    return tokens, f"completions of {tokens:.0f} tokens, {of_whom(near)}"


def of_whom(length: Length) -> str:
    return f"as {length.model} wrote for task={length.task} with a limit of {length.limit:,}; tokens=N for yours"


def prompt_tokens(task: Task, model: Model, given: GivenLengths) -> tuple[float, str]:
    """Mean tokens of a prompt, and where they are from."""
    if given.prompt_tokens is not None:
        return given.prompt_tokens, f"prompts of {given.prompt_tokens:g} tokens, as you say"
    if isinstance(exact := getattr(task, "prompt_tokens", None), int):
        return exact, f"prompts of {exact:,} tokens, as task={task.name} makes them"
    try:
        prompts = task.train_prompts(1, PROMPTS, seed=0)
    except ConfigError as error:
        raise ConfigError(f"{str(error).rstrip('.')}. Or say how long prompts are: prompt_tokens=N") from error
    letters = fmean(sum(len(message["content"]) for message in prompt.messages) for prompt in prompts)
    each = 1 if isinstance(model, MadeHere) else CHARACTERS
    return letters / each, f"prompts of about {letters / each:.0f} tokens, {letters:.0f} letters"
