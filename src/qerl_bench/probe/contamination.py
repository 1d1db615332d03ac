"""Whether a model has seen a task's questions: how much of their ends it writes when it is given their beginnings.

The first part of a question stands as plain text, without instruction or chat template, and the model goes on greedily.
Generated word problems, which nobody can have seen, say how much of an end can be guessed. Left out: log-probabilities,
which tell texts that were seen from others less surely, and answers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial

from qerl_bench.engine.base import RolloutEngine, Sampling
from qerl_bench.model.policy import Policy
from qerl_bench.probe.measure import training_questions
from qerl_bench.probe.parts import Keep
from qerl_bench.task.base import Task
from qerl_bench.task.chat_template import plain_ids
from qerl_bench.task.word_problems import random_problem
from qerl_core.checks import require
from qerl_core.process.progress import phase
from qerl_core.records import Prompt
from qerl_core.seeding import derive

GIVEN = 0.6  # of a question's tokens
STEPS, DISTRACTORS, MAX_NUMBER = 5, 1, 60  # of generated problems, which are then about as long as GSM8K's
Completed = dict[str, int]  # of a question: tokens `left` out, right `first` ones, and `common` ones in order


def questions(task: Task, count: int) -> dict[str, list[str]]:
    """`count` questions of each part of the task, and generated ones; none if `count` is 0.

    Raises ConfigError if one is too short to be cut, or if the task has not so many.
    """
    if count == 0:
        return {}
    draw = random.Random(derive("contamination"))
    train, test = training_questions(task, count, "contamination"), task.eval_prompts(count)
    generated = [random_problem(draw, STEPS, DISTRACTORS, MAX_NUMBER).question for _ in range(count)]
    asked = {"training part": [one.question for one in train], "test part": [one.question for one in test]}
    require(
        all(len(text.split()) > 1 for texts in asked.values() for text in texts),
        f"contamination={count} completes questions of several words, and task={task.name} has others; leave it out",
    )
    return {**asked, "generated, seen by nobody": generated}


def contamination(
    keep: Keep, asked: Mapping[str, Sequence[str]], policy: Policy | None, engine: RolloutEngine | None
) -> dict[str, list[Completed]]:
    """How far each question was completed, by kind; without a policy all must be known."""

    def complete(kind: str, texts: Sequence[str]) -> list[Completed]:
        assert policy is not None and engine is not None, f"{kind} is not known"
        with phase(f"completing {len(texts)} questions: {kind}"):
            return completed(engine, [plain_ids(policy.tokenizer, text) for text in texts])

    return {kind: keep(f"contamination {kind}", partial(complete, kind, texts)) for kind, texts in asked.items()}


def completed(engine: RolloutEngine, ids: Sequence[Sequence[int]]) -> list[Completed]:
    """Of token ids of whole questions, at least two each."""
    cuts = [int(GIVEN * len(one)) or 1 for one in ids]
    rests = [[*one[cut:]] for one, cut in zip(ids, cuts, strict=True)]
    prompts = [
        Prompt(id=f"contamination/{at}", messages=(), answer="", token_ids=tuple(one[:cut]))
        for at, (one, cut) in enumerate(zip(ids, cuts, strict=True))
    ]
    how = Sampling(samples=1, temperature=0.0, max_tokens=max(map(len, rests)), seed=derive("contamination"))
    written = [rollout.token_ids for rollout in engine.generate(prompts, how)]
    return [compared(rest, end[: len(rest)]) for rest, end in zip(rests, written, strict=True)]


def compared(rest: Sequence[int], written: Sequence[int]) -> Completed:
    same = [one == other for one, other in zip(rest, written, strict=False)]
    first = same.index(False) if False in same else len(same)
    return {"left": len(rest), "first": first, "common": common(rest, written)}


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the longest sequence that is in both in this order, not always side by side: that of ROUGE-L."""
    lengths = [0] * (len(other) + 1)  # of what was read of `one`, and the beginnings of `other`
    for token in one:
        before = lengths.copy()
        for at, candidate in enumerate(other):
            lengths[at + 1] = before[at] + 1 if token == candidate else max(before[at + 1], lengths[at])
    return lengths[-1]
