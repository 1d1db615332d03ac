"""The numbers of a probe, by hand: accuracy, pass@k, groups with signal, entropies by place, the limit that does."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qerl_bench.commands.probe import check, parse_options
from qerl_bench.dose import Dose
from qerl_bench.probe import rise
from qerl_bench.probe.answers import SCHEMA, TOP_P, AnswerSet, numbers, sample_answers, sampling, table
from qerl_bench.probe.one_model import best_of
from qerl_bench.probe.parts import Parts
from qerl_core.checks import ConfigError
from qerl_core.records import Prompt, Rollout
from qerl_studies.probes.advice import advice, learnable
from qerl_studies.probes.numbers import PARTS, accuracy, by_part, enough_tokens, pass_at, signal
from qerl_studies.probes.over_units import mean_of, minus, right_at


def rollout(question: str, sample: int, entropies: list[float], text: str = "", finished: bool = True) -> Rollout:
    prompt = Prompt(id=question, messages=({"role": "user", "content": question},), answer="4", question=question)
    ids = list(range(len(entropies)))
    return Rollout(
        prompt=prompt, sample=sample, prompt_ids=[1], token_ids=ids, logprobs=[-1.0] * len(ids), entropies=entropies,
        text=text, finished=finished,
    )  # fmt: skip


def found(correct: list[int], samples: int) -> dict[str, Any]:
    return {"correct": correct, "lenient": correct, "samples": samples}


def test_accuracy_pass_at_k_and_groups_with_signal_are_what_counting_all_choices_gives() -> None:
    counts, samples = [0, 2, 5, 3], 5
    answers = [[i < right for i in range(samples)] for right in counts]
    one = found(counts, samples)
    assert accuracy(one).value == pytest.approx(np.mean(answers))
    assert accuracy(one).stderr == pytest.approx(np.std([sum(row) / 5 for row in answers], ddof=1) / 2)
    for k in (1, 2, 4):
        chosen = [[any(group) for group in combinations(row, k)] for row in answers]
        assert pass_at(one, k).value == pytest.approx(np.mean(chosen))
        mixed = [[0 < sum(group) < k for group in combinations(row, k)] for row in answers]
        assert signal(one, k).value == pytest.approx(np.mean(mixed))
    assert signal(one, 8) == signal(one, 5)
    assert accuracy(one).low < accuracy(one).value < accuracy(one).high
    few = accuracy(found([0, 0, 0, 4], 4))  # 25 points, and Student's t is 80 wide on either side
    assert (few.low, few.high) == (0.0, 1.0) and few.half_width > 0.75


def test_entropies_are_told_apart_by_their_place_in_the_completion() -> None:
    sums, tokens = by_part([[float(i) for i in range(20)], [7.0], [1.0, 3.0]])
    assert list(tokens) == [2 + 2, 2, 2, 2, 2, 2 + 1, 2, 2, 2, 2]
    assert list(sums) == [0 + 1 + 7 + 1, 5, 9, 13, 17, 10 + 11 + 3, 25, 29, 33, 37]
    assert len(sums) == PARTS and by_part([[]])[1].sum() == 0


def test_the_smallest_limit_that_cuts_few_is_found() -> None:
    rows = [{"tokens": n, "finished": True} for n in range(1, 101)]
    assert enough_tokens(rows) == 97 and enough_tokens(rows[:10]) == 10
    cut = [{**row, "finished": row["tokens"] <= 97} for row in rows]
    assert enough_tokens(cut) == 97
    assert enough_tokens([{**row, "finished": row["tokens"] <= 96} for row in rows]) is None


def test_each_temperature_has_its_own_numbers_and_its_way_of_asking() -> None:
    greedy, cool, plain = (sampling(t, 8, 16, "answers") for t in (0, 0.6, 1))
    assert (greedy.samples, cool.samples) == (1, 8) and (greedy.top_p, cool.top_p, plain.top_p) == (1, TOP_P, 1)
    assert len({greedy.seed, cool.seed, plain.seed, sampling(1, 8, 16, "answers/3").seed}) == 4


def test_rows_hold_every_answer_and_the_texts_of_the_first_questions(make_experiment: Any) -> None:
    task = make_experiment("task=arithmetic", "task.answer_format=boxed").task

    class Engine:
        def generate(self, prompts: list[Prompt], how: Any) -> list[Rollout]:
            texts = ["\\boxed{4}", "it is 4", "\\boxed{5}", "4 \\boxed{4}"]
            return [
                rollout(p.id, s, [0.5, 1.5], texts[2 * i + s], finished=s == 0)
                for i, p in enumerate(prompts) for s in range(how.samples)
            ]  # fmt: skip

    prompts = [rollout("a", 0, []).prompt, rollout("b", 0, []).prompt]
    asked = sample_answers(task, Engine(), prompts, 1, 2, "answers")  # type: ignore[arg-type]
    one = numbers(asked)
    assert one["correct"] == [1, 1] and one["lenient"] == [1, 0]
    assert (one["found"], one["finished"], one["tokens"], one["entropy"]) == (0.75, 0.5, 2.0, 1.0)
    assert one["entropy_by_part"] == [0.5, *[None] * 4, 1.5, *[None] * 4]
    rows = table([asked], texts=1)
    assert rows.schema == SCHEMA and rows["entropy"].to_pylist() == [2.0] * 4
    assert rows["completion"].to_pylist() == ["\\boxed{4}", "it is 4", None, None]
    assert rows["lenient"].to_pylist() == [True, False, False, False]


def test_differences_between_formats_are_paired_by_question() -> None:
    first, second = found([4, 0, 2], 4), found([3, 0, 1], 4)
    record = {"formats": {"bf16": {"temperatures": {"1": first}}, "nvfp4": {"temperatures": {"1": second}}}}
    gap = mean_of([record], "nvfp4", minus("bf16", right_at("1")))
    assert gap.value == pytest.approx(-2 / 12) and gap.stderr < accuracy(first).stderr


def test_the_best_answer_format_reads_most_right_answers_then_most_answers() -> None:
    one = {name: {"correct": [right], "found": share} for name, right, share in (("a", 1, 0.2), ("b", 1, 0.9))}
    assert best_of(one, "a") == "b" and best_of(one | {"c": {"correct": [2], "found": 0.1}}, "a") == "c"
    assert best_of({"a": one["a"], "b": one["a"]}, "b") == "b"


def test_a_search_for_a_rise_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entropy is 1 plus sigma. The first attempt ends in its fourth sampling; no sigma is sampled twice."""
    sampled: list[float] = []
    limit = [3]

    def noisy_samples(*given: Any) -> float:
        if len(sampled) == limit[0]:
            raise KeyboardInterrupt
        sampled.append(given[4])
        return given[4]

    doses = [Dose(sigma=sigma, entropy=1 + sigma, kl=sigma, accuracy=0.0) for sigma in (0.0, 0.4)]
    monkeypatch.setattr(rise, "noisy_samples", noisy_samples)
    monkeypatch.setattr(rise, "mean_entropy", lambda sigma: 1 + sigma)
    monkeypatch.setattr(rise, "curve", lambda *given: doses)
    monkeypatch.setattr(rise, "on_base_of", lambda *given: nullcontext((None, None)))
    task = SimpleNamespace(train_prompts=lambda *given: [], max_completion_tokens=4)
    experiment: Any = SimpleNamespace(task=task, sampled=None, noise=None, rollout=None)
    nothing: Any = None

    def search(*keep: Any) -> dict[str, Any]:
        return rise.sigma_of_rise(experiment, nothing, nothing, 0.4, 1, 1, *keep)

    with pytest.raises(KeyboardInterrupt):
        search(Parts(tmp_path, "the same question"))
    limit[0] = 100
    found = search(Parts(tmp_path, "the same question"))
    assert len(sampled) == len({*sampled}) > 4
    assert search() == found == search(Parts(tmp_path, "another question"))
    assert len(sampled) == 3 * len({*sampled})


RISE = {"sigma": 0.12, "rise": 0.11, "kl": 0.03}


def record(correct: list[int]) -> dict[str, Any]:
    asked = AnswerSet(temperature=1, samples=2, rollouts=[], rows=[], seconds=1.0)
    plain = {**found(correct, asked.samples), "finished": 1.0, "enough_tokens": 17}
    return {
        "options": {"rise": 0.1},
        "answer_formats": {"boxed": {"correct": [1, 1, 0, 0]}, "tags": {"correct": [0] * 4}},
        "answer_format": "boxed",
        "max_completion_tokens": 64,
        "group": 8,
        "formats": {
            "bf16": {"temperatures": {"0": plain, "1": plain}, "rise": RISE, "norm_scale": 0.3},
            "nvfp4": {"temperatures": {"1": plain}, "rise": {"sigma": None, "tried": []}},
        },
    }


def test_advice_names_the_options_with_their_numbers() -> None:
    lines = advice(record([0, 1, 1, 1]))
    assert "task.answer_format=boxed" in lines[0] and "50% in boxed, 0% in tags" in lines[0]
    assert "task.max_completion_tokens=32" in lines[1]
    assert "bf16" in lines[2] and "aqn.level=0.12" in lines[2] and "(0.4 of" in lines[2] and "no sigma" in lines[3]
    assert "37.5 [" in lines[4] and "75 [" in lines[4]
    wordless = record([0, 1, 1, 1])
    wordless["answer_formats"]["boxed"]["correct"] = [0] * 4
    assert "task.answer_format" not in advice(wordless)[0] and "boxed, tags" in advice(wordless)[0]
    cut = record([0, 1, 1, 1])
    cut["formats"]["bf16"]["temperatures"]["0"] |= {"enough_tokens": None, "finished": 0.9}
    assert "above 64: 10%" in advice(cut)[1]


@pytest.mark.parametrize(
    ("correct", "word"),
    [
        ([0, 1, 1, 1], "open, too few questions to tell (4)"),
        ([0, 1, 1, 1] * 16, "yes"),
        ([2, 2, 2, 1] * 16, "no"),  # too easy
        ([0, 0, 0, 2] * 16, "no"),  # no group is mixed
        ([0] * 4, "open, too few questions to tell (4)"),  # Wilson's interval ends at 49 %
        ([0] * 64, "no"),
        ([0, 0, 1] * 24, "open, too few questions to tell (72)"),  # 16.7 % right, of which the interval goes below 15 %
        ([1], "open, too few questions to tell (1)"),
    ],
)
def test_there_is_something_to_learn_if_intervals_say_so(correct: list[int], word: str) -> None:
    assert learnable(record(correct)).startswith(f"something to learn: {word}")


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("temperatures=0,0.6", "temperatures must .* with 1.* got 0, 0.6"),
        ("answer_formats=box", "each of answer_formats must be .*boxed.* got 'box'"),
        ("sigmas=0", "each of sigmas must be .* got 0"),
        ("split=test", "split must be one of train, held_out, got 'test'"),
        ("rise=2", "rise must be .* got 2"),
        ("samples=1", "samples must be .* at least 2, got 1"),
        ("quant=nvfp4", "formats=bf16,nvfp4"),
        ("rollout.quant=nvfp4", r"takes no rollout\.quant: .*formats=bf16,nvfp4"),
        ("rollout.kv=fp8", r"takes no rollout\.kv: .*train\.kv"),
        ("eval.kv=fp8", r"takes no eval\.kv: .*train\.kv"),
    ],
)
def test_a_wrong_option_is_refused(word: str, says: str) -> None:
    options, words = parse_options(["model=tiny", "task=arithmetic", word])
    with pytest.raises(ConfigError, match=says):
        check(options, words)


def test_words_of_a_run_are_told_from_those_of_the_probe() -> None:
    options, words = parse_options(
        ["model=hub", "task.answer_format=boxed", "formats=bf16,nf4", "questions=8", "seed=3"]
    )
    assert words == ["model=hub", "task.answer_format=boxed", "seed=3"]
    assert options.formats == ["bf16", "nf4"] and options.questions == 8
