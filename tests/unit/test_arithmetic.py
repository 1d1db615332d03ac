"""The built-in task: right answers by a second calculation, splits that never meet, demonstrations as configured."""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import Any

import pytest

from qerl_bench.config import build, compose
from qerl_bench.experiment_spec import Experiment
from qerl_bench.task.arithmetic import Arithmetic
from qerl_bench.task.grader.extract import answer_block, well_formed
from qerl_bench.task.operation_chains import GeneratedTask
from qerl_core.checks import ConfigError
from qerl_core.options.fingerprint import as_dict, fingerprint
from qerl_core.records import Prompt
from qerl_core.rundir.finished_run import with_later_keys

SHARES = {"guess": 0.25, "hasty": 0.35, "careful": 0.4}


def _task(**changed: Any) -> Arithmetic:
    options = {
        "name": "arithmetic",
        "operations": [2, 3],
        "operators": "+-",
        "max_start": 20,
        "max_operand": 9,
        "max_completion_tokens": 48,
        "instruction": "system",
        "template": "chat",
        "answer_format": "tags",
        "correct_weight": 1.0,
        "format_weight": 0.2,
        "procedures": SHARES,
        "pretrain_procedures": SHARES,
    }
    return Arithmetic(**{**options, **changed})


CONFIGS = [
    {},
    {"operations": [1, 4], "operators": "+-*"},
    {"operations": [1, 2], "operators": "*", "max_start": 30},
    {"operations": [5], "operators": "-"},
    {"operations": [3], "operators": "*-"},
    {"operations": [8], "operators": "+-*", "max_start": 99, "max_operand": 99},
]
VARIED = pytest.mark.parametrize("changed", CONFIGS, ids=str)


def _question(prompt: Prompt) -> str:
    return prompt.messages[-1]["content"]


def _parsed(question: str) -> tuple[int, list[tuple[str, int]]]:
    assert re.fullmatch(r"[0-9]+(?:[+*-][0-9]+)+=\?", question), question
    start, *pairs = re.findall(r"([+*-]?)([0-9]+)", question)
    return int(start[1]), [(op, int(operand)) for op, operand in pairs]


def _values(question: str) -> list[int]:
    """The running values from left to right, multiplication no stronger than the rest."""
    start, steps = _parsed(question)
    values = [start]
    for op, operand in steps:
        values.append(eval(f"({values[-1]}){op}({operand})"))
    return values


# --- problems --------------------------------------------------------------------------------------------------------


@VARIED
def test_gold_answers_and_limits(changed: dict[str, Any]) -> None:
    task = _task(**changed)
    for step in range(20):
        for prompt in task.train_prompts(step, 25, seed=1):
            start, steps = _parsed(_question(prompt))
            values = _values(_question(prompt))
            assert prompt.answer == str(values[-1])
            assert min(values) >= 0
            assert 1 <= start <= task.max_start and len(steps) in task.operations
            for op, operand in steps:
                assert 2 <= operand <= 5 if op == "*" else 1 <= operand <= task.max_operand


@VARIED
def test_only_the_chosen_operators_appear(changed: dict[str, Any]) -> None:
    task = _task(**changed)
    seen = {op for prompt in task.train_prompts(1, 100, seed=0) for op, _ in _parsed(_question(prompt))[1]}
    assert seen == set(task.operators)


def test_lengths_are_drawn_evenly() -> None:
    lengths = Counter(
        len(_parsed(_question(p))[1]) for step in range(40) for p in _task().train_prompts(step, 50, seed=0)
    )
    assert set(lengths) == {2, 3}
    assert abs(lengths[2] - 1000) < 5 * 22.4  # binomial standard deviation of 2000 draws


@VARIED
def test_train_and_held_out_problems_never_meet(changed: dict[str, Any]) -> None:
    task = _task(**changed)
    held_out = {prompt.id for prompt in task.eval_prompts(20)}
    shown: set[str] = set()
    for step in range(40):
        shown |= {prompt.id for prompt in task.train_prompts(step, 50, seed=step % 3)}
        shown |= {demonstration.prompt.id for demonstration in task.demonstrations(step, 50, seed=step % 3)}
    assert len(held_out) == 20 and len(shown) > 100
    assert not held_out & shown


def test_thousands_of_problems_of_either_split_never_meet() -> None:
    held_out = {prompt.id for prompt in _task().eval_prompts(1500)}
    shown = {prompt.id for step in range(40) for prompt in _task().train_prompts(step, 100, seed=step)}
    assert len(held_out) == 1500 and len(shown) > 3000 and not held_out & shown


def test_the_share_of_held_out_problems_is_an_eighth() -> None:
    """Of all problems with one operation; disjoint and together complete."""
    task = _task(operations=[1], max_start=50)
    train: set[str] = set()
    for step in range(60):
        train |= {_question(prompt) for prompt in task.train_prompts(step, 60, seed=0)}
    held_out = {_question(prompt) for prompt in task.eval_prompts(90)}
    everything = {f"{a}{op}{b}=?" for a in range(1, 51) for op in "+-" for b in range(1, 10) if op == "+" or b <= a}
    assert train | held_out <= everything and not train & held_out
    assert len(train) / len(everything) == pytest.approx(7 / 8, abs=0.05)


def test_problems_are_different_within_a_step() -> None:
    prompts = _task().train_prompts(1, 500, seed=0)
    assert len({prompt.id for prompt in prompts}) == len({_question(prompt) for prompt in prompts}) == 500


def test_prompts_are_a_pure_function_of_step_count_and_seed() -> None:
    task, again = _task(), _task()
    reference = task.train_prompts(3, 20, seed=5)
    task.train_prompts(9, 7, seed=1)
    assert again.train_prompts(3, 20, seed=5) == reference
    assert task.train_prompts(3, 12, seed=5) == reference[:12]
    assert task.train_prompts(4, 20, seed=5) != reference
    assert task.train_prompts(3, 20, seed=6) != reference
    shown = task.demonstrations(3, 20, seed=5)
    assert again.demonstrations(3, 20, seed=5) == shown
    assert task.demonstrations(3, 12, seed=5) == shown[:12]
    assert task.demonstrations(4, 20, seed=5) != shown != task.demonstrations(3, 20, seed=6)


def test_held_out_problems_are_always_the_same() -> None:
    assert _task().eval_prompts(30) == _task().eval_prompts(100)[:30]
    assert len(_task().eval_prompts(None)) == 1024


def test_the_instruction_names_the_format() -> None:
    [prompt] = _task().train_prompts(1, 1, seed=0)
    assert [message["role"] for message in prompt.messages] == ["system", "user"]
    assert all(tag in prompt.messages[0]["content"] for tag in ("<think>", "</think>", "<answer>", "</answer>"))


# --- rewards ---------------------------------------------------------------------------------------------------------


def test_rewards_by_hand() -> None:
    task = _task()
    prompt = Prompt(id="p", messages=(), answer="33")
    table = {
        "<think>17+25=42;42-9=33</think><answer>33</answer>": (1.2, True, 1.0),
        "<think></think><answer>33</answer>": (1.2, True, 1.0),
        "<answer>33</answer>": (1.0, True, 0.0),
        "<think>17+25=42</think><answer>42</answer>": (0.2, False, 1.0),
        "33": (0.0, False, 0.0),
        "": (0.0, False, 0.0),
    }
    for completion, (total, correct, formed) in table.items():
        reward = task.reward(prompt, completion)
        assert (reward.total, reward.correct) == (pytest.approx(total), correct), completion
        assert reward.parts == {"correct": float(correct), "format": formed}


def test_weights_weigh() -> None:
    task = _task(correct_weight=3.0, format_weight=0.5)
    assert task.reward(Prompt(id="p", messages=(), answer="1"), "<think></think><answer>1</answer>").total == 3.5


# --- demonstrations --------------------------------------------------------------------------------------------------


def _procedure(question: str, completion: str) -> str:
    """Which procedure wrote this, told from the lines it shows; every line and the answer must be right for it."""
    values = _values(question)
    _, steps = _parsed(question)
    match = re.fullmatch(r"<think>(.*)</think><answer>([0-9]+)</answer>", completion)
    assert match, completion
    lines = match[1].split(";") if match[1] else []
    full = [f"{values[i]}{op}{operand}={values[i + 1]}" for i, (op, operand) in enumerate(steps)]
    assert lines == full[: len(lines)]
    name = {0: "guess", len(steps) - 1: "hasty", len(steps): "careful"}[len(lines)]
    assert int(match[2]) == (values[-1] if name != "hasty" else values[-2])
    return name


def test_demonstrations_mix_the_procedures_in_their_shares() -> None:
    task = _task()
    counts: Counter[str] = Counter()
    for step in range(40):
        for demonstration in task.demonstrations(step, 50, seed=0):
            prompt, completion = demonstration.prompt, demonstration.completion
            name = _procedure(_question(prompt), completion)
            counts[name] += 1
            assert well_formed(completion, "tags")
            reward = task.reward(prompt, completion)
            right = answer_block(completion) == prompt.answer  # a hasty one may be right by luck (... + 3 - 3)
            assert reward.total == pytest.approx(1.2 if right else 0.2)
            assert right or name == "hasty"
    for name, share in SHARES.items():
        assert abs(counts[name] / 2000 - share) < 5 * (share * (1 - share) / 2000) ** 0.5, counts


@pytest.mark.parametrize("only", ["guess", "hasty", "careful"])
@VARIED
def test_a_single_procedure(only: str, changed: dict[str, Any]) -> None:
    operations = [
        n for n in changed.get("operations", [2]) if n > 1
    ]  # with one, hasty and guess show the same: no line
    task = _task(**{**changed, "operations": operations}, procedures={name: float(name == only) for name in SHARES})
    for demonstration in task.demonstrations(1, 40, seed=0):
        assert _procedure(_question(demonstration.prompt), demonstration.completion) == only
        if only == "careful":
            assert task.reward(demonstration.prompt, demonstration.completion).total == pytest.approx(1.2)


# --- what cannot be done ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        {"operations": [1], "operators": "-", "max_start": 1, "max_operand": 1},
        {"operations": [1], "operators": "+", "max_start": 5, "max_operand": 9},
    ],
)
def test_more_problems_than_there_are_is_an_error_and_not_an_endless_search(changed: dict[str, Any]) -> None:
    """There are 1 and 45 problems of these kinds."""
    started = time.process_time()
    for draw in (
        lambda task: task.train_prompts(1, 64, 0),
        lambda task: task.eval_prompts(64),
        lambda task: task.demonstrations(1, 64, 0),
    ):
        with pytest.raises(ConfigError, match=r"cannot make 64 different problems .* widen"):
            draw(_task(**changed))
    assert time.process_time() - started < 10


@pytest.mark.parametrize(
    "changed",
    [
        {"operations": []},
        {"operations": [0]},
        {"operations": [9]},
        {"operations": [2.0]},
        {"operations": [True]},
        {"operators": ""},
        {"operators": "+/"},
        {"max_start": 0},
        {"max_start": 100},
        {"max_operand": 0},
        {"max_operand": True},
        {"max_completion_tokens": 0},
        {"max_completion_tokens": 1.5},
        {"correct_weight": 0.0},
        {"correct_weight": float("nan")},
        {"format_weight": -0.1},
        {"procedures": {"guess": 1.0}},
        {"pretrain_procedures": {**SHARES, "lazy": 1.0}},
        {"procedures": {**SHARES, "lazy": 1.0}},
        {"procedures": {**SHARES, "guess": -0.1}},
        {"procedures": dict.fromkeys(SHARES, 0.0)},
    ],
    ids=str,
)
def test_values_that_make_no_sense_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changed))):
        _task(**changed)


@pytest.mark.parametrize("task", ["arithmetic", "word_problems"])
def test_a_base_is_named_by_what_it_learned_from(task: str) -> None:
    """Other shares are another warm start; those of the run's own demonstrations are not, and it teaches the shares."""

    def warm_start(*words: str) -> Experiment:
        experiment = build(compose(["model=tiny", f"task={task}", *words]))
        overrides = experiment.model.warm_start_overrides()
        assert overrides is not None
        return build(compose([*overrides, *experiment.task.warm_start_overrides()]))

    rare = warm_start("task.pretrain_procedures.careful=0.05")
    assert rare.name != warm_start().name == warm_start("task.procedures.careful=0.05").name
    assert isinstance(rare.task, GeneratedTask) and rare.task.procedures == {**SHARES, "careful": 0.05}


def test_runs_made_before_bases_had_shares_keep_their_name_and_can_be_evaluated() -> None:
    cfg = compose(["model=tiny", "task=arithmetic"])
    earlier = cfg.copy()
    del earlier.task.pretrain_procedures
    assert fingerprint(cfg) == fingerprint(earlier)
    assert with_later_keys(as_dict(earlier))["task"] == as_dict(cfg)["task"]
    assert "pretrain_procedures" not in with_later_keys(as_dict(compose(["task=gsm8k"])))["task"]
