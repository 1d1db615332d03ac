"""task=even_characters: a reward that every model earns some of, trained or not, to see that all parts of a run move.

The reward of a completion is the number of different characters with an even code point, over that of all characters.
Completions of random tokens earn about a third, and hardly two earn the same, so each group has a gradient. Who repeats
one character, as random weights do greedily, earns next to nothing. A higher reward means nothing. Left out:
demonstrations.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import repeat

from qerl_bench.algo.base import Algorithm
from qerl_bench.task.base import TaskBase
from qerl_bench.task.prompt_task import no_demonstrations
from qerl_bench.task.prompts import PromptTemplate
from qerl_bench.task.split import distinct_problems
from qerl_core.checks import check_fields, count
from qerl_core.records import Demonstration, Prompt, Reward

ENOUGH = 0.4  # a share that few completions of random tokens reach


@dataclass(frozen=True, kw_only=True)
class EvenCharacters(TaskBase):
    """The fields of conf/task/even_characters.yaml."""

    name: str
    template: str
    max_completion_tokens: int

    def __post_init__(self) -> None:
        _ = self._template  # checks its options
        check_fields(self, "task", max_completion_tokens=count())

    def check_with(self, algo: Algorithm, eval_name: str, group_size: int) -> None:
        if not algo.on_policy:
            raise no_demonstrations(self.name)

    def demonstrations(self, step: int, count: int, seed: int) -> list[Demonstration]:
        raise no_demonstrations(self.name)

    def reward(self, prompt: Prompt, completion: str, finished: bool = True) -> Reward:
        """Different even characters over all characters, 0 for an empty completion; correct above ENOUGH."""
        different = sum(ord(character) % 2 == 0 for character in {*completion})
        share = different / max(1, len(completion))
        answer = ("even" if share > ENOUGH else "odd") if completion else None
        return Reward(total=share, correct=answer == prompt.answer, answer=answer)

    @property
    def _template(self) -> PromptTemplate:
        return PromptTemplate(answer_format="auto", instruction="none", template=self.template)

    def _prompts(self, split: str, seed: int, count: int) -> list[Prompt]:
        draw = random.Random(seed)
        questions = (f"Write about {draw.randrange(100_000)}." for _ in repeat(None))
        prompts = (self._template.prompt(f"{self.name}/{split}/{asked}", asked, "even") for asked in questions)
        return distinct_problems(
            prompts, count, split == "test", lambda prompt: prompt.question, f"task={self.name}", "five digits"
        )
