"""The choice of a family of reasoning-gym, by made-up numbers, and the designs of its study."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from qerl_bench.config import build, compose
from qerl_studies.design.design import Design, read_design
from tests.scripts import ROOT, script

GYM = ROOT / "studies" / "real-2026" / "gym"
CHOOSE = script("studies/real-2026/gym/choose.py")
FAMILIES: dict[str, Any] = CHOOSE.FAMILIES
SIZES = ("05b", "15b")


def probe(
    copy: int, right: list[int], gap: int = 0, cut: float = 0.0, tokens: float = 100.0, enough: int | None = 90
) -> dict[str, Any]:
    """A record of one copy: right answers of eight to each question, so many more of them leniently."""
    counted = {"samples": 8, "correct": right}
    asked = {"finished": 1 - cut, "tokens": tokens, "enough_tokens": enough}
    lenient = [right[0] + gap, *right[1:]]
    temperatures = {"0": asked, "1": {**counted, **asked, "lenient": lenient}}
    return {"base": copy, "formats": {"bf16": {**counted, "temperatures": temperatures}}, "doses": {}}


MIXED = [0, 8, 4, 4]  # half right, half of the groups mixed
GOOD: dict[str, Any] = {"right": MIXED}


def chosen(folder: Path, **looks: dict[str, Any]) -> str:
    """What the rule says of families whose first copy is GOOD; the second differs from it by size as given."""
    for name, look in looks.items():
        for size in SIZES:
            out = folder / f"{size}-{name}"
            out.mkdir(parents=True)
            second = look.get(size, {})
            (out / "probes.json").write_text(json.dumps([probe(1, **GOOD), probe(2, **{**GOOD, **second})]))
    return CHOOSE.choice(folder).splitlines()[-1]


def test_of_those_that_pass_the_most_mixed_groups_on_the_size_with_fewer_are_taken(tmp_path: Path) -> None:
    more = {"right": [4, 4, 4, 4]}
    said = chosen(
        tmp_path, needle_haystack={"05b": more}, word_sorting={"05b": more, "15b": more}, color_cube_rotation={}
    )
    assert said.startswith("On both sizes the rule takes word_sorting: `task.name=word_sorting +task.options={")
    assert said.endswith(" task.max_completion_tokens=128`")


def test_of_equal_ones_the_shorter_answers_are_taken(tmp_path: Path) -> None:
    said = chosen(tmp_path, needle_haystack={"15b": {"tokens": 200}}, word_sorting={"15b": {"tokens": 190}})
    assert said.startswith("On both sizes the rule takes word_sorting:")


@pytest.mark.parametrize(
    "fails",
    [
        {"right": [8, 8, 8, 4]},  # too easy: 0.69 of both copies
        {"right": [0, 0, 0, 0], "gap": 0},  # too few mixed groups: a quarter
        {"gap": 2},  # lenient is 3.1 points above strict
        {"gap": -2},
        {"cut": 0.07},
    ],
)
def test_a_family_that_fails_on_one_size_is_not_taken(fails: dict[str, Any], tmp_path: Path) -> None:
    said = chosen(tmp_path, needle_haystack={"15b": fails, "05b": {}}, word_sorting={"15b": {"tokens": 400}})
    assert said.startswith("On both sizes the rule takes word_sorting:")
    alone = chosen(tmp_path / "alone", needle_haystack={"05b": fails})
    assert alone.startswith("On 15b the rule takes needle_haystack:")
    assert chosen(tmp_path / "none", needle_haystack={"05b": fails, "15b": fails}) == "No family passes."


def test_what_a_guess_gets_right_is_no_signal(tmp_path: Path) -> None:
    """At pass@1 of 0.31 a family that is guessed right in a quarter fails, another passes."""
    mixed = {size: {"right": [1, 1, 1, 1]} for size in SIZES}
    assert chosen(tmp_path / "guessed", family_relationships=mixed) == "No family passes."
    assert chosen(tmp_path / "other", word_sorting=mixed).startswith("On both sizes the rule takes word_sorting")


@pytest.mark.parametrize(("enough", "limit"), [(128, 128), (129, 256), (385, 512), (None, 512)])
def test_the_limit_is_enough_for_the_copy_that_needs_most(enough: int | None, limit: int, tmp_path: Path) -> None:
    said = chosen(tmp_path, needle_haystack={"05b": {"enough": enough}})
    assert said.endswith(f" task.max_completion_tokens={limit}`")


def test_a_family_counts_with_both_copies_of_both_sizes(tmp_path: Path) -> None:
    chosen(tmp_path, needle_haystack={}, word_sorting={})
    (tmp_path / "15b-needle_haystack" / "probes.json").write_text(json.dumps([probe(1, **GOOD)]))
    assert CHOOSE.choice(tmp_path).splitlines()[-1].startswith("On both sizes the rule takes word_sorting")
    (tmp_path / "15b-word_sorting" / "probes.json").unlink()
    assert CHOOSE.choice(tmp_path).splitlines()[-1].startswith("On 05b the rule takes")


def test_sizes_without_a_family_in_common_take_their_own(tmp_path: Path) -> None:
    cut = {"cut": 0.07}
    chosen(tmp_path, needle_haystack={"15b": cut}, word_sorting={"05b": cut})
    said = CHOOSE.choice(tmp_path).splitlines()[-2:]
    assert [line.partition(":")[0] for line in said] == [
        "On 05b the rule takes needle_haystack",
        "On 15b the rule takes word_sorting",
    ]


def designed(name: str, family: str = "needle_haystack") -> Design:
    return read_design(GYM / name, FAMILIES[family]["words"])


def test_families_are_asked_in_bf16_alone_as_the_study_asks_them() -> None:
    probes, study = designed("probes.yaml"), designed("study.yaml")
    assert probes.formats == ["bf16"] and probes.bases == (1, 2)
    assert probes.option(probes.reference, "task") == study.option(study.reference, "task")
    assert study.limits.pass_at_1 == probes.limits.pass_at_1 and study.limits.mixed_groups == probes.limits.mixed_groups
    assert probes.samples_per_group == CHOOSE.GROUP == probes.probe.samples
    assert CHOOSE.LIMITS[-1] == probes.option(probes.reference, "task")["max_completion_tokens"]


def test_the_study_is_that_of_the_05b_on_another_task() -> None:
    gym, before = (yaml.safe_load((GYM.parent / name).read_text()) for name in ("gym/study.yaml", "05b/study.yaml"))
    others = [word for word in before["common"] if not word.startswith(("task", "eval.questions"))]
    assert [word for word in gym["common"] if not word.startswith(("task", "eval.questions"))] == others
    assert gym["arms"] == {name: arm for name, arm in before["arms"].items() if arm["tier"] == 1}
    assert all(gym[key] == before[key] for key in ("seeds", "probe", "dose", "gates"))
    assert gym["primary"] == {**before["primary"], "looks": {4: 0.05}} and gym["units"] == {"dither": [1, 2, 3, 4]}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_questions_enough_that_no_one_answer_gets_right(name: str) -> None:
    pytest.importorskip("reasoning_gym", reason="the extra `reasoning` is not installed (it needs a C compiler)")
    probes = designed("probes.yaml", name)
    task = build(compose(probes.base_words(probes.reference, 1))).task
    prompts = [*task.train_prompts(1, 256, 1), *task.eval_prompts(64)]
    assert len({task.normalize(prompt.question) for prompt in prompts}) >= 0.98 * len(prompts)
    most = Counter(prompt.answer for prompt in prompts).most_common(1)[0][1] / len(prompts)
    assert most <= FAMILIES[name]["guess"] + 0.06
    for prompt in prompts[-8:]:
        assert task.reward(prompt, f"\\boxed{{{prompt.answer}}}").correct
