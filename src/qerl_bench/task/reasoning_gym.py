"""task=reasoning_gym: logic, algorithmic and code-like problems from the package reasoning-gym, each with its verifier.

`task.name` chooses a generator and `task.options` sets its difficulty. The verifier's score, 0 to 1, is the correctness
part of the reward; only a full score counts as correct, and with `partial` false it alone is paid. A prompt's id holds
the seed and number of its problem, and the problem is generated again to grade a completion. REFUSED lists generators
that we found unfit in the release that the extra `reasoning` pins; the tests look for the same faults in all others.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from qerl_bench.task.grader.extract import extract, well_formed
from qerl_bench.task.grader.last_number import last_words_are
from qerl_bench.task.prompt_task import PromptTask, no_demonstrations
from qerl_bench.task.split import distinct_problems
from qerl_core.checks import ConfigError, check_fields, flag, require, require_package
from qerl_core.records import Demonstration, Prompt, Reward

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

PROBLEMS = 10_000  # of one seed
MAX_ANSWER = 2000  # characters; a longer answer earns nothing
JUST_BELOW = math.nextafter(1.0, 0.0)  # what rounding raised above a full score: parts of one, such as nine ninths
_TEXT = re.compile(r"\\text(?:bf|it|rm|tt)?\{([^{}]*)\}")  # how models set words in a box

_EXECUTES = "its verifier runs the answer as code"
_VARIES = "its problems differ between processes, so a run could not be repeated"
_GLOBAL = "it uses Python's global random generator, so its problems depend on what ran before"
_GULLIBLE = "its verifier gives full marks to meaningless answers"
REFUSED = {
    **dict.fromkeys(("binary_matrix", "countdown", "intermediate_integration", "n_queens"), _EXECUTES),
    **dict.fromkeys(("puzzle24", "simple_integration", "spiral_matrix", "string_insertion"), _EXECUTES),
    **dict.fromkeys(("isomorphic_strings", "knight_swap", "ransom_note", "word_ladder"), _VARIES),
    "polynomial_multiplication": f"{_EXECUTES}, and {_VARIES}",
    "codeio": f"{_VARIES}, and {_GLOBAL}",
    "list_functions": _GLOBAL,
    **dict.fromkeys(("complex_arithmetic", "game_of_life_halting"), _GULLIBLE),
    "coin_flip": "its verifier never returns from an answer such as 1e999999999",
    "composite": "it needs the options of several others",
}


@dataclass(frozen=True, kw_only=True)
class ReasoningGym(PromptTask):
    """`options` are the keyword arguments of the generator's own config, such as {n_people: 5}."""

    options: dict[str, Any]
    partial: bool

    held_out_questions = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, "task", partial=flag)
        require(
            self.name not in REFUSED,
            f"task.name={self.name} of reasoning-gym cannot be used: {REFUSED.get(self.name)}. docs/tasks.md "
            "lists others",
        )
        reserved = sorted({"seed", "size"} & self.options.keys())
        require(not reserved, f"task.options sets {', '.join(reserved)}, which the run sets itself; leave it out")

    def check(self) -> None:
        """Raise ConfigError if the package is missing, or has no such generator or options."""
        self._prompts("train", 0, 1)

    def demonstrations(self, step: int, count: int, seed: int) -> list[Demonstration]:
        raise no_demonstrations("reasoning_gym")

    def reward(self, prompt: Prompt, completion: str, finished: bool = True) -> Reward:
        text = extract(completion, self.answer_format, finished)
        answer = None if text is None else _TEXT.sub(r"\1", text)
        formed = well_formed(completion, self.answer_format, finished)
        seed, number = map(int, prompt.id.rpartition("/")[2].split("-"))
        score = 0.0 if answer is None or len(answer) > MAX_ANSWER else self._score(answer, seed, number, prompt)
        score = score if self.partial else float(score == 1.0)
        return Reward(
            total=self.correct_weight * score + self.format_weight * formed,
            correct=score == 1.0,
            parts={"correct": score, "format": float(formed)},
            answer=answer,
        )

    def lenient(self, prompt: Prompt, completion: str, finished: bool) -> bool | None:
        """Whether the last number is right or, where the answer is no number, whether the last words are its words."""
        by_number = super().lenient(prompt, completion, finished)
        return last_words_are(prompt.answer, completion, finished) if by_number is None else by_number

    def _score(self, answer: str, seed: int, number: int, prompt: Prompt) -> float:
        problem = _problem(self.name, json.dumps(self.options), seed, number)
        assert _gold(problem) == prompt.answer, f"{prompt.id} now gives a different problem"
        generator = _generator(self.name, json.dumps(self.options), seed)
        try:
            with redirect_stdout(io.StringIO()):
                score = float(generator.score_answer(answer, problem))
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
            return 0.0  # the verifier failed on unexpected text
        return min(max(score, 0.0), 1.0 if score <= 1.0 else JUST_BELOW)

    def _prompts(self, split: str, seed: int, count: int) -> list[Prompt]:
        require_package("reasoning_gym", "task=reasoning_gym", "reasoning")
        seed %= 2**31  # some generators use NumPy's, which take no larger seed
        return distinct_problems(
            (self._prompt(split, seed, number) for number in itertools.count()),
            count,
            held_out=split == "test",
            key=lambda prompt: self.normalize(prompt.question),
            task=f"task=reasoning_gym task.name={self.name}",
            options=f"options={self.options}; make them harder, or ask for fewer",
        )

    def _prompt(self, split: str, seed: int, number: int) -> Prompt | None:
        if number >= PROBLEMS:
            return None
        problem = _problem(self.name, json.dumps(self.options), seed, number)
        id = f"{self.name}/{split}/{seed}-{number}"
        return self.prompt_template.prompt(id, problem["question"], _gold(problem))


@lru_cache(maxsize=8)
def _generator(name: str, options: str, seed: int) -> ProceduralDataset:
    """The generator with its options (as JSON). Raises ConfigError if the name or an option is unknown."""
    from reasoning_gym.factory import DATASETS, create_dataset

    known = sorted(DATASETS.keys() - REFUSED.keys())
    require(name in known, f"reasoning-gym has no task.name={name}; it has {', '.join(known)}")
    try:
        return create_dataset(name, seed=seed, size=PROBLEMS, **json.loads(options))
    except (AssertionError, TypeError, ValueError) as error:  # its configs check their values with assert
        raise ConfigError(f"task.options={options} does not suit task.name={name}: {error}") from error


@lru_cache(maxsize=4096)
def _problem(name: str, options: str, seed: int, number: int) -> dict[str, Any]:
    with redirect_stdout(io.StringIO()):  # one generator prints
        return _generator(name, options, seed)[number]


def _gold(problem: dict[str, Any]) -> str:
    """A correct answer; empty if the generator gives none and only the verifier knows."""
    return str(problem["answer"] or "")
