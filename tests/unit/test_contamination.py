"""Completing questions from their beginnings: what is counted, and a model that knows some of them by heart."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from qerl_bench.probe.contamination import GIVEN, common, compared, completed, contamination, questions
from qerl_bench.probe.parts import Parts, anew
from qerl_bench.task.chat_template import plain_ids
from qerl_core.checks import ConfigError
from qerl_core.records import Prompt, Rollout
from qerl_studies.effects.estimate import share
from qerl_studies.probes.page import tables

TEXTS = ["Ann has 3 pens and buys 4.", "How many legs do 7 cats have?", "Bob eats half of 8 figs."]


class Knows:
    """An engine that completes the sequences that it was given, and writes 0 after all others."""

    def __init__(self, *known: list[int]) -> None:
        self.known, self.asked = known, []  # type: ignore[var-annotated]

    def generate(self, prompts: list[Prompt], how: Any) -> list[Rollout]:
        self.asked += [prompts]
        assert (how.samples, how.temperature) == (1, 0)
        return [self.rollout(prompt, list(prompt.token_ids or ()), how.max_tokens) for prompt in prompts]

    def rollout(self, prompt: Prompt, ids: list[int], most: int) -> Rollout:
        ends = [one[len(ids) :] for one in self.known if one[: len(ids)] == ids]
        written = [*(ends[0] if ends else []), *[0] * most][:most]
        return Rollout(
            prompt=prompt, sample=0, prompt_ids=ids, token_ids=written, logprobs=[], entropies=[], text="",
            finished=False,
        )  # fmt: skip


def test_what_is_left_out_is_what_is_compared() -> None:
    known, other = [*range(1, 11)], [*range(21, 46)]
    engine: Any = Knows(known)
    assert completed(engine, [known, other]) == [
        {"left": 4, "first": 4, "common": 4},
        {"left": 10, "first": 0, "common": 0},
    ]
    (prompts,) = engine.asked
    assert [prompt.token_ids for prompt in prompts] == [(1, 2, 3, 4, 5, 6), tuple(range(21, 36))]
    assert len(prompts[1].token_ids) == GIVEN * 25 and not prompts[0].messages


def test_an_end_that_differs_late_is_not_completed_and_its_beginning_counts() -> None:
    assert compared([1, 2, 3, 4], [1, 2, 9, 4]) == {"left": 4, "first": 2, "common": 3}
    assert compared([1, 2, 3, 4], [1, 2, 3]) == {"left": 4, "first": 3, "common": 3}  # it stopped
    assert compared([1, 2, 3, 4], [5, 1, 2, 3]) == {"left": 4, "first": 0, "common": 3}


def test_the_longest_common_sequence_is_that_of_all_choices() -> None:
    draw = np.random.default_rng(0)
    for _ in range(30):
        one, other = (draw.integers(0, 4, size).tolist() for size in draw.integers(1, 7, 2))
        chosen = ({part for n in range(1, 8) for part in combinations(of, n)} for of in (one, other))
        assert common(one, other) == max(map(len, set.intersection(*chosen)), default=0)


@pytest.mark.parametrize("text", ["", "2+2=?"])
def test_a_question_that_cannot_be_cut_is_refused(text: str) -> None:
    prompt = Prompt(id="a", messages=(), answer="4", question=text)
    task: Any = SimpleNamespace(
        name="sums", train_prompts=lambda *_: [prompt], eval_prompts=lambda _: [prompt], stored_prompts=list
    )
    with pytest.raises(ConfigError, match=r"contamination=4.*task=sums"):
        questions(task, 4)


def test_both_parts_of_a_task_are_asked_and_generated_questions_beside_them(make_experiment: Any) -> None:
    task = make_experiment("task=word_problems").task
    asked = questions(task, 5)
    assert [*asked] == ["training part", "test part", "generated, seen by nobody"]
    assert (
        all(len({*texts}) == 5 for texts in asked.values())
        and len({text for texts in asked.values() for text in texts}) == 15
    )
    assert asked["test part"] == [prompt.question for prompt in task.eval_prompts(5)]
    assert asked == questions(task, 5) and questions(task, 0) == {}


def test_what_was_completed_is_not_completed_again(tmp_path: Path) -> None:
    engine: Any = Knows()
    policy: Any = SimpleNamespace(tokenizer=None)
    texts = {"a": TEXTS[:2], "b": TEXTS[2:]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qerl_bench.probe.contamination.plain_ids", lambda tokenizer, text: [*text.encode()])
        found = contamination(Parts(tmp_path, "key"), texts, policy, engine)
    assert contamination(Parts(tmp_path, "key"), texts, None, None) == found and len(engine.asked) == 2


@pytest.fixture(scope="module")
def heart(make_policy: Any) -> Any:
    """A tiny model that was trained on TEXTS until it knew them."""
    policy = make_policy("lora=none", quant="bf16")
    ids = [plain_ids(policy.tokenizer, text) for text in TEXTS]
    weights = [*policy.model.parameters()]
    for weight in weights:
        weight.requires_grad_(True)
    optimizer = torch.optim.Adam(weights, lr=2e-2)
    for _ in range(120):
        losses = [policy.model(input_ids=(one := torch.tensor([each])), labels=one).loss for each in ids]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
    return policy


def test_a_model_that_was_trained_on_questions_completes_these_and_no_others(
    heart: Any, make_policy: Any, make_experiment: Any
) -> None:
    spec = make_experiment("lora=none", "quant=bf16").engine
    others = ["Zoe owns 9 maps and sells 2.", "What do 12 hats cost at 3 coins?"]
    asked = {"known": TEXTS, "others": others}
    found = contamination(anew, asked, heart, spec.build(heart))
    fresh = make_policy("lora=none", quant="bf16")
    unseen = contamination(anew, asked, fresh, spec.build(fresh))
    assert all(one["first"] == one["common"] == one["left"] > 5 for one in found["known"])
    for one in (*found["others"], *unseen["known"], *unseen["others"]):
        assert one["first"] < one["left"] / 2


def test_the_page_has_a_row_for_each_kind() -> None:
    each = [{"left": 10, "first": 10, "common": 10}, {"left": 20, "first": 5, "common": 10}]
    one = {"answer_formats": {}, "formats": {}, "contamination": {"test part": each, "generated": each[1:] * 2}}
    assert "contamination" not in str([*tables(one | {"contamination": {}})])
    ((heads, lines),) = tables(one)["Questions completed from their beginnings"]
    assert len(heads) == len(lines[0]) and [line[:3] for line in lines] == [
        ["test part", "2", "15"], ["generated", "2", "20"],
    ]  # fmt: skip
    half = share([True, False])
    low, high = (100 * end for end in (half.low, half.high))
    assert lines[0][3] == f"50.0 [{low:.1f}, {high:.1f}]" and lines[1][3].startswith("0.0 [0.0, ")
    assert lines[0][4].startswith("62.5 [") and lines[0][5].startswith("75.0 [")
