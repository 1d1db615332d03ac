"""Graders side by side: how often each takes a wrong answer, or withholds a right one.

    python benchmarks/graders.py FOLDER [--every 10] [--only math-verify] [--cases] [--kinds]

FOLDER has math500.jsonl, aime24.jsonl, aime25.jsonl and amc2023.jsonl, of whose reference answers answer_variants.py
writes 20 right and 20 wrong ones each. A grader reads them in the format it asks for. verl's rules are read from its
package (verl/utils/reward_score) without importing the rest of it; whatever is not installed is left out by name.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from answer_variants import other_of, value_of, variants

from qerl_bench.task.grader.grader import Grader
from qerl_bench.task.grader.latex import is_found_in

SETS = ("math500", "aime24", "aime25", "amc2023")
BOXED, HASH, COLON = "So $\\boxed{<answer>}$.", "So\n#### <answer>", "So\nAnswer: <answer>"
Rule = Callable[[str, str], bool]  # of a reference answer and a completion
Judge = tuple[str, Rule]  # with the form of completions that the rule asks for


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the data sets lie")
    parser.add_argument("--every", type=int, default=1, help="take each so manyth reference alone")
    parser.add_argument("--only", help="a grader by its name, instead of all")
    parser.add_argument("--kinds", action="store_true", help="also the disagreements by kind, and examples")
    parser.add_argument("--cases", action="store_true", help="the cases of the package reward-doctor instead")
    chosen = parser.parse_args()
    for name, judge in judges().items():
        if chosen.only not in (None, name):
            continue
        counts, missed = judged_cases(judge) if chosen.cases else judged(judge, chosen.folder, chosen.every)
        print(name, *(f"{group}: {wrong} of {total}" for group, (wrong, total) in sorted(counts.items())), sep="; ")
        for kind, texts in sorted(missed.items()) if chosen.kinds else ():
            print(f"    {kind}: {len(texts)}, such as {texts[:4]}")


def golds_of(folder: Path, name: str) -> list[str]:
    return [str(json.loads(line)["answer"]).strip() for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def judged(judge: Judge, folder: Path, every: int) -> tuple[dict[str, tuple[int, int]], dict[str, list[str]]]:
    """(errors, number) of right and wrong answers, to all references and to numbers; errors by kind."""
    form, rule = judge
    errors: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    missed: dict[str, list[str]] = defaultdict(list)
    for name in SETS:
        golds = golds_of(folder, name)
        for index, gold in list(enumerate(golds))[::every]:
            for kind, text, right in variants(gold, other_of(golds, index)):
                groups = ["all"] + ["numbers"] * (value_of(gold) is not None)
                error = rule(gold, form.replace("<answer>", text)) != right
                for group in groups:
                    key = f"{group}, {'withheld' if right else 'taken'}"
                    errors[key] += error
                    totals[key] += 1
                if error:
                    missed[f"{'withheld' if right else 'taken'}, {kind}"].append(f"{gold} <- {text}")
    return {key: (errors[key], totals[key]) for key in totals}, missed


def judges() -> dict[str, Judge]:
    found: dict[str, Judge] = {f"ours, {equality}": (BOXED, _ours(equality)) for equality in ("math", "numeric")}
    found["math-verify"] = (BOXED, is_found_in)
    found["lm-eval gsm8k, strict"] = (HASH, _lm_eval(r"#### (\-?[0-9\.\,]+)", 0))
    found["lm-eval gsm8k, flexible"] = (HASH, _lm_eval(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", -1))
    for name, form in (("gsm8k", HASH), ("math_reward", BOXED), ("math_dapo", COLON)):
        if (rule := _verl(name)) is None:
            print(f"left out: verl's {name}, since verl is not installed")
        else:
            found[f"verl, {name}"] = (form, rule)
    return found


def _ours(equality: str) -> Rule:
    grader = Grader(answer_format="auto", equality=equality, correct_weight=1.0, format_weight=0.0)
    return lambda gold, completion: grader.reward(gold, completion).correct


def _lm_eval(pattern: str, which: int) -> Rule:
    """lm-eval's filter `regex` and its metric exact_match with the options of its task gsm8k."""
    from lm_eval.api.metrics import exact_match_fn
    from lm_eval.filters.extraction import RegexFilter

    find = RegexFilter(regex_pattern=pattern, group_select=which)
    ignored = [",", "\\$", "(?s).*#### ", "\\.$"]

    def rule(gold: str, completion: str) -> bool:
        answer = find.apply([[completion]], [{}])
        [first] = next(iter(answer))
        scores = exact_match_fn(
            predictions=[first], references=[f"#### {gold}"], regexes_to_ignore=ignored, ignore_case=True
        )
        return bool(scores["exact_match"])

    return rule


def _verl(name: str) -> Rule | None:
    try:
        place = importlib.util.find_spec("verl")
    except ValueError:
        place = None
    if place is None or not place.submodule_search_locations:
        return None
    module = _module(Path(place.submodule_search_locations[0]) / "utils" / "reward_score" / f"{name}.py")

    def rule(gold: str, completion: str) -> bool:
        try:
            score = module.compute_score(completion, gold)
        except (AssertionError, IndexError):  # what it raises ends a run of verl's; here it is no answer
            return False
        return bool(score["acc"] if isinstance(score, dict) else score)

    return rule


def _module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"rule_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def judged_cases(judge: Judge) -> tuple[dict[str, tuple[int, int]], dict[str, list[str]]]:
    """The same of the cases of reward-doctor that are no judgement calls, whose answers stand in boxes where they are
    answers alone; whole completions of it are read as they are."""
    corpus = importlib.import_module("reward_doctor.corpus")
    form, rule = judge
    errors: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    missed: dict[str, list[str]] = defaultdict(list)
    for case in corpus.load():
        alone = case.category in ("equivalence", "distinction") and "boxed" not in case.completion
        text = form.replace("<answer>", case.completion) if alone else case.completion
        key = "withheld" if case.expect else "taken"
        error = rule(case.reference, text) != case.expect
        errors[key] += error
        totals[key] += 1
        if error:
            missed[f"{key}, {case.category}"].append(f"{case.reference} <- {case.completion}")
    return {key: (errors[key], totals[key]) for key in totals}, missed


if __name__ == "__main__":
    main()
