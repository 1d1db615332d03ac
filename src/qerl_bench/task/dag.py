"""task=dag: values that depend on each other, in arithmetic modulo 23. `c = a * b . a = 7 . b = 4 . ? c :`

The statements are shuffled, some are not needed, and a completion works out the needed ones in an order that is
possible: `a = 7 ; b = 4 ; c = a * b = 7 * 4 = 5 ;`. The number of operations is a ladder of difficulty: demonstrations,
RL and evaluation each have their own rungs. Arithmetic modulo a prime keeps all numbers small, so depth is what is hard
(as in iGSM, arXiv 2407.20311).

Explained demonstrations say what the question says before they put numbers in, and work out each operand just before
what needs it. Terse ones leave the names out, and their order is any that is possible. Then a model has to find a
statement, and the value of a name in it, for one and the same word, after a name that nothing foretold: 10 M parameters
learned the arithmetic from such demonstrations, but not the looking up (studies/dag-2026).
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from qerl_bench.task.symbolic import OPERATORS, SymbolicProblem, SymbolicTask, calculate
from qerl_core.checks import check_fields, one_of, require
from qerl_core.records import Prompt, Reward
from qerl_core.seeding import derive

MODULUS = 23
NAMES = tuple(string.ascii_letters)
MAX_OPERATIONS, MAX_DISTRACTORS = 16, 8
SOLUTIONS = ("explained", "terse")
FINAL = re.compile(r"(?:^|; )([a-zA-Z]) = (?:[^;]+ = )?(\d+) ;$")

Definition = int | tuple[str, str, str]  # a number, or (name, operator, name)


@dataclass(frozen=True, kw_only=True)
class Dag(SymbolicTask):
    """`operations` are the rungs of RL, `pretrain_operations` those of the demonstrations, `eval_operations` those of
    the held-out problems; each rung is equally likely. `distractors` lists how many unneeded statements there are.
    `solution` says how a problem is worked out, in demonstrations and for a reward."""

    operations: list[int]
    pretrain_operations: list[int]
    eval_operations: list[int]
    distractors: list[int]
    solution: str

    def __post_init__(self) -> None:
        super().__post_init__()
        ladders = dict.fromkeys(("operations", "pretrain_operations", "eval_operations"), (1, MAX_OPERATIONS))
        for key, (least, most) in (ladders | {"distractors": (0, MAX_DISTRACTORS)}).items():
            counts = getattr(self, key)
            valid = (
                isinstance(counts, list) and counts != [] and all(type(n) is int and least <= n <= most for n in counts)
            )
            require(valid, f"task.{key} must list whole numbers, each {least}..{most}, got {counts!r}")
        check_fields(self, "task", solution=one_of(*SOLUTIONS))

    def options(self) -> str:
        return f"operations={self.operations}, eval_operations={self.eval_operations}"

    def warm_start_overrides(self) -> list[str]:
        """What decides the demonstrations."""
        lists = ("pretrain_operations", "distractors")
        words = [f"task.{key}={getattr(self, key)}".replace(" ", "") for key in lists]
        return [f"task={self.name}", *words, f"task.solution={self.solution}"]

    def random_problem(self, draw: random.Random, split: str) -> SymbolicProblem:
        rungs = self.operations if split == "train" else self.eval_operations
        return random_graph(draw, draw.choice(rungs), draw.choice(self.distractors))[0]

    def random_demonstration(self, draw: random.Random) -> tuple[SymbolicProblem, str]:
        problem, drawn = random_graph(draw, draw.choice(self.pretrain_operations), draw.choice(self.distractors))
        order = drawn if self.solution == "terse" else depth_first(problem.question)
        return problem, worked_out(problem.question, order, self.solution)

    def reward(self, prompt: Prompt, completion: str, finished: bool = True) -> Reward:
        """1 if every step follows and the last gives the value that was asked for.

        A right value alone may be luck: one of 23 is, and 0 answers a tenth of all problems. A completion that was cut
        off has no last step.
        """
        asked, steps = prompt.question.split()[-2], " ".join(completion.split())
        last = FINAL.search(steps) if finished else None
        answer = last[2] if last is not None and last[1] == asked else None
        right = answer == prompt.answer
        correct = right and follows(prompt.question, steps, self.solution)
        parts = {"correct": float(correct), "answer": float(right)}
        return Reward(total=float(correct), correct=correct, parts=parts, answer=answer)


def random_graph(draw: random.Random, operations: int, distractors: int) -> tuple[SymbolicProblem, list[str]]:
    """A problem whose answer needs exactly `operations` operations, and the names to work out, in a possible order."""
    names = iter(draw.sample(NAMES, len(NAMES)))
    needed: dict[str, Definition] = {}  # in an order in which each value can be worked out
    open_results: list[str] = []  # results that nothing uses yet; the last one that is left is the question

    def other() -> str:
        """A value that is no open result: an old one, or a new given number."""
        used = [name for name in needed if name not in open_results]
        if used and draw.random() < 0.5:
            return draw.choice(used)
        name = next(names)
        needed[name] = draw.randrange(MODULUS)
        return name

    for left in reversed(range(operations)):  # later operations, each of which can join two open results
        choices = [n for n in (0, 1, 2) if n <= len(open_results) <= left + n]
        operands = [open_results.pop(draw.randrange(len(open_results))) for _ in range(draw.choice(choices))]
        operands += [other() for _ in range(2 - len(operands))]
        draw.shuffle(operands)
        name = next(names)
        needed[name] = (operands[0], draw.choice(OPERATORS), operands[1])
        open_results.append(name)
    (asked,) = open_results
    stated = dict(needed)
    for _ in range(distractors):
        known = list(stated)
        stated[next(names)] = (draw.choice(known), draw.choice(OPERATORS), draw.choice(known))
    order = list(stated)
    draw.shuffle(order)
    statements = [f"{name} = {expression(stated[name])} ." for name in order]
    values = worked_through(needed, lambda left, op, right: calculate(left, op, right) % MODULUS)
    calculations = worked_through(needed, derive)  # a hash of how each value comes about, whatever it is called
    question = f"{' '.join(statements)} ? {asked} :"
    return SymbolicProblem(question=question, answer=str(values[asked]), key=str(calculations[asked])), list(needed)


def read_question(question: str) -> tuple[dict[str, Definition], str]:
    """The definition of each name, and the name that is asked for."""
    statements, _, asked = question.removesuffix(" :").rpartition(" ? ")
    stated: dict[str, Definition] = {}
    for statement in statements.removesuffix(" .").split(" . "):
        name, _, *words = statement.split()
        stated[name] = int(words[0]) if len(words) == 1 else (words[0], words[1], words[2])
    return stated, asked


def depth_first(question: str) -> list[str]:
    """The names that the answer needs, each after its operands, the first operand and all that it needs first."""
    stated, asked = read_question(question)
    order: list[str] = []

    def visit(name: str) -> None:
        if name not in order:
            for operand in operands_of(stated[name]):
                visit(operand)
            order.append(name)

    visit(asked)
    return order


def worked_out(question: str, order: Iterable[str], solution: str) -> str:
    """The steps that work out the names in this order, each of which comes after its operands."""
    stated, _ = read_question(question)
    values: dict[str, int] = {}
    return " ".join(step(name, stated[name], values, solution) for name in order)


def follows(question: str, steps: str, solution: str) -> bool:
    """Whether each step states what the question says, with the right numbers, which earlier steps worked out."""
    stated, _ = read_question(question)
    values: dict[str, int] = {}
    for given in steps.removesuffix(" ;").split(" ; "):
        name = given.split(" ", 1)[0]
        if name not in stated or not values.keys() >= {*operands_of(stated[name])}:
            return False
        if f"{given} ;" != step(name, stated[name], values, solution):
            return False
    return True


def operations_needed(question: str) -> int:
    """How many operations the answer of a question needs."""
    stated, _ = read_question(question)
    return sum(not isinstance(stated[name], int) for name in depth_first(question))


def worked_through(definitions: dict[str, Definition], operation: Callable[[int, str, int], int]) -> dict[str, int]:
    """What each name becomes if `operation` joins what its operands became; a definition uses only names before it."""
    results: dict[str, int] = {}
    for name, definition in definitions.items():
        if isinstance(definition, int):
            results[name] = definition
        else:
            left, op, right = definition
            results[name] = operation(results[left], op, results[right])
    return results


def operands_of(definition: Definition) -> tuple[str, ...]:
    return () if isinstance(definition, int) else (definition[0], definition[2])


def expression(definition: Definition) -> str:
    return str(definition) if isinstance(definition, int) else " ".join(definition)


def step(name: str, definition: Definition, values: dict[str, int], solution: str) -> str:
    """`c = a * b = 7 * 4 = 5 ;`, terse `c = 7 * 4 = 5 ;`, of a given number `a = 7 ;`. Adds the value to `values`."""
    if isinstance(definition, int):
        values[name] = definition
        return f"{name} = {definition} ;"
    left, op, right = definition
    values[name] = calculate(values[left], op, values[right]) % MODULUS
    names = "" if solution == "terse" else f"{expression(definition)} = "
    return f"{name} = {names}{values[left]} {op} {values[right]} = {values[name]} ;"
