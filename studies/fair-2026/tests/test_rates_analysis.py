"""Part 2 of the fair test, rates: its analysis on planted runs, before there are any."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from qerl_core.checks import ConfigError
from qerl_core.options import user_options
from qerl_core.options.composer import Composer
from qerl_core.statistics import Estimate
from qerl_studies.design.design import read_design
from qerl_studies.runs.collect import write_study
from tests.run_folders import DONE, write_run
from tests.scripts import ROOT, script

PART = ROOT / "studies" / "fair-2026" / "rates"
PAGE = script("studies/fair-2026/rates.py")
FOUND = sys.modules["rates_analysis.contrasts"]  # as the page has it
ARMS = [f"{kind}-{rate}" for rate in FOUND.RATES for kind in FOUND.KINDS]
SESSIONS = ("a", "a", "b", "b", "c", "c", "c", "c")  # of copies 43 to 50
RUN = 0.014  # error of a run


def table(
    seed: int = 0,
    effects: Mapping[str, float] | None = None,
    sessions: Sequence[str] = SESSIONS,
    error: float = RUN,
    shift: float = 0.0,
    rewards: Mapping[str, float] | None = None,
) -> Any:
    """Runs of all arms on a copy for each of `sessions`; the reward of an arm is 0.3, then 0.5 if `rewards` has no
    other.
    """
    draw = np.random.default_rng(seed)
    of_session = {name: shift * draw.standard_normal() for name in dict.fromkeys(sessions)}
    rows = []
    for copy, session in enumerate(sessions, 43):
        for arm in ARMS:
            late = 0.6 + of_session[session] + (effects or {}).get(arm, 0.0) + error * draw.standard_normal()
            greedy = late + 0.05
            answered = dict.fromkeys(PAGE.ASKED, late)
            row = {"arm": arm, "copy": copy, "session": session, "late": late, "greedy": greedy, "first": 0.3}
            row |= {"before": 0.4, "gain": late - 0.4}
            last = (rewards or {}).get(arm, 0.5) + 0.001 * (copy % 2)
            rows.append({**row, **answered, "last": last, "answering": 0.0, "entropy": -1.0, "collapsed": 0.0})
    return pd.DataFrame(rows)


def first_two(rows: Any) -> list[Any]:
    return [*FOUND.tested(rows, FOUND.primary(rows)).values()][:2]


# --- least squares ---------------------------------------------------------------------------------------------------


def test_without_an_effect_one_contrast_in_twenty_is_found() -> None:
    """Though sessions differ by as much as runs do; and of three contrasts after Holm, in one study of twenty any."""
    studies = [FOUND.tested(rows := table(seed, shift=RUN), FOUND.primary(rows)) for seed in range(400)]
    single = np.mean([[one.p < 0.05 for one in study.values()] for study in studies], axis=0)
    assert np.all(single > 0.02) and np.all(single < 0.085), single
    words = [{one.word for one in study.values()} for study in studies]
    assert np.mean([bool(found & {"higher", "lower"}) for found in words]) < 0.075
    assert set.union(*words) <= {"higher", "lower", "not decided", "no difference beyond the margin"}


@pytest.mark.parametrize(("points", "word"), [(3, "higher"), (-3, "lower")])
def test_an_effect_of_three_points_is_found(points: float, word: str) -> None:
    effects = {"four-six-2e-4": points / 100}
    found = [first_two(table(seed, effects, shift=RUN))[0] for seed in range(100)]
    assert np.mean([one.word == word for one in found]) > 0.9
    assert np.mean([one.found.value for one in found]) == pytest.approx(points / 100, abs=0.002)
    assert np.mean([one.found.low < points / 100 < one.found.high for one in found]) > 0.9


def test_least_squares_by_hand() -> None:
    """Sessions have as many runs of either arm: what is left of a run is free of both means."""
    rows = table(3, {"nvfp4-4e-4": 0.02}, shift=0.03)
    treated, control = (rows[rows["arm"] == arm]["late"].to_numpy() for arm in ("nvfp4-4e-4", "bf16-2e-4"))
    session = np.array(SESSIONS)
    gap, left = (treated - control).mean(), []
    for name in "abc":
        both = np.concatenate([treated[session == name], control[session == name]])
        left += [
            *(treated[session == name] - both.mean() - gap / 2),
            *(control[session == name] - both.mean() + gap / 2),
        ]
    freedom = 16 - 2 - 2
    error = np.sqrt(np.sum(np.square(left)) / freedom * 2 / 8)
    found = FOUND.effect(rows, FOUND.minus("nvfp4-4e-4", "bf16-2e-4"))
    assert [found.value, found.stderr] == pytest.approx([gap, error])
    assert (found.n, found.df) == (8, freedom)
    assert found.p_outside(0.0) == pytest.approx(2 * stats.t.sf(abs(gap / error), freedom))


def test_shifts_of_sessions_change_no_contrast() -> None:
    rows = table(1, {"four-six-2e-4": 0.01})
    shifted = rows.assign(late=rows["late"] + rows["session"].map({"a": 0.3, "b": -0.2, "c": 0.05}))
    for asked in (FOUND.primary(rows), FOUND.costs(rows)):
        for weights, _ in asked.values():
            if len(weights) > 1:
                before, after = (FOUND.effect(one, weights) for one in (rows, shifted))
                assert [after.value, after.stderr, after.df] == pytest.approx([before.value, before.stderr, before.df])


def test_a_difference_within_policies_is_the_mean_of_all_copies() -> None:
    rows = table(2)
    rows["answering"] = rows["copy"].map(dict(zip(range(43, 51), (1, 3, 5, 7, 9, 11, 13, 15), strict=True))) / 1000
    found = FOUND.effect(rows, {"nvfp4-2e-4": 1.0}, "answering")
    assert (found.value, found.df) == (pytest.approx(0.008), 8 - 1 - 2)
    within = (2 * 1 + 2 * 1 + 2 * (9 + 1)) / 1e6  # squares around the means of sessions, 0.002, 0.006 and 0.012
    assert found.stderr == pytest.approx(np.sqrt(within / 5 / 8))


def test_the_contrast_of_rates_is_a_difference_of_differences() -> None:
    rows = table(error=1e-6, effects={"nvfp4-4e-4": 0.03, "bf16-4e-4": 0.01, "nvfp4-2e-4": -0.01})
    found = [*FOUND.tested(rows, FOUND.primary(rows)).values()][2]
    assert found.found.value == pytest.approx(0.03, abs=1e-5) and found.word == "higher"  # (3 - 1) - (-1 - 0)
    assert found.found.df == 32 - 4 - 2


def test_one_session_is_the_t_test_of_two_samples() -> None:
    rows = table(5, sessions="aaaaaaaa")
    pair = ("nvfp4-2e-4", "bf16-2e-4")
    found = FOUND.effect(rows, FOUND.minus(*pair))
    expected: Any = stats.ttest_ind(*(rows[rows["arm"] == arm]["late"] for arm in pair))
    assert found.p_outside(0.0) == pytest.approx(expected.pvalue)


# --- words -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "stderr", "copies", "p", "trained", "word"),
    [
        (0.02, 0.004, 8, 0.01, True, "higher"),
        (-0.005, 0.001, 8, 0.01, True, "lower"),
        (0.001, 0.003, 8, 0.8, True, "no difference beyond the margin"),
        (0.001, 0.02, 8, 0.9, True, "not decided"),
        (0.02, 0.004, 8, float("nan"), False, "not tested"),
        (0.02, 0.004, 7, 0.01, True, "not decided"),
        (0.001, 0.003, 7, 0.8, True, "not decided"),
        (0.02, 0.004, 7, 0.01, False, "not decided"),
    ],
)
def test_words(value: float, stderr: float, copies: int, p: float, trained: bool, word: str) -> None:
    assert FOUND.word_of(Estimate(value, stderr, copies, 12), p, trained) == word


def test_holm_by_hand() -> None:
    rows = table(8, {"four-six-2e-4": 0.02, "nvfp4-2e-4": 0.013})
    found = [*FOUND.tested(rows, FOUND.primary(rows)).values()]
    p, adjusted = np.array([one.p for one in found]), [0.0] * 3
    order, largest = np.argsort(p), 0.0
    for tests, place in zip((3, 2, 1), order, strict=True):
        adjusted[place] = largest = max(largest, min(1.0, tests * p[place]))
    assert [one.adjusted for one in found] == pytest.approx(adjusted)
    assert len({*np.round(p, 6)}) == 3 and [one.adjusted for one in found] != pytest.approx(p)


def test_a_contrast_of_an_arm_that_did_not_train_is_not_tested_and_not_counted() -> None:
    rows = table(8, {"four-six-2e-4": 0.02}, rewards={"nvfp4-2e-4": 0.2, "nvfp4-4e-4": 0.1})
    assert not FOUND.has_trained(rows, "nvfp4-2e-4") and FOUND.has_trained(rows, "bf16-2e-4")
    first, second, third = FOUND.tested(rows, FOUND.primary(rows)).values()
    assert first.adjusted == first.p and first.word == "higher"
    assert second.word == third.word == "not tested" and np.isnan([second.p, third.adjusted]).all()


def test_fewer_than_eight_copies_decide_nothing() -> None:
    rows = table(error=1e-4, effects={"four-six-2e-4": 0.05}, sessions=SESSIONS[:7])
    found = first_two(rows)
    assert found[0].p < 1e-6 and {one.word for one in found} == {"not decided"}


# --- rates -----------------------------------------------------------------------------------------------------------


def test_the_own_best_rate_has_the_higher_reward_and_of_equals_is_the_lower() -> None:
    rows = table(rewards={"nvfp4-4e-4": 0.51, "bf16-4e-4": 0.49})
    best = [FOUND.own_best(rows, kind) for kind in FOUND.KINDS]
    assert best == ["bf16-2e-4", "nvfp4-4e-4", "four-six-2e-4"]
    (four_six, nvfp4), _ = zip(*[*FOUND.primary(rows).values()][:2], strict=True)
    assert four_six == {"four-six-2e-4": 1, "bf16-2e-4": -1} and nvfp4 == {"nvfp4-4e-4": 1, "bf16-2e-4": -1}
    assert next(iter(FOUND.costs(rows).values())) == ({"nvfp4-4e-4": 1.0}, "answering")


def test_rates_that_may_be_best_by_chance_are_both_shown() -> None:
    rows = table(rewards={"nvfp4-4e-4": 0.51, "bf16-4e-4": 0.49, "four-six-4e-4": 0.6})
    assert FOUND.at_other_rates(rows) == []
    noise = 0.1 * np.where(rows["copy"] % 2, 1.0, -1.0) * (rows["arm"] == "bf16-4e-4")
    close = rows.assign(last=rows["last"] + noise)
    assert [FOUND.by_chance(close, kind) for kind in FOUND.KINDS] == [True, False, False]
    expected = [FOUND.minus(arm, "bf16-4e-4") for arm in ("four-six-4e-4", "nvfp4-4e-4")]
    assert FOUND.at_other_rates(close) == expected


# --- page ------------------------------------------------------------------------------------------------------------


def page(rows: Any, left_out: Sequence[str] = (), ended: bool = False) -> str:
    return PAGE.words_page({"0.5B": PAGE.Size(rows, left_out, np.linspace(0.58, 0.62, 16))}, ended)


def test_the_page_says_the_sentence_of_its_word() -> None:
    told = [page(table(4, {"four-six-2e-4": effect})) for effect in (0.05, -0.05)]
    assert "| four-six-2e-4 - bf16-2e-4 | +" in told[0] and "and falls for this model" in told[0]
    assert "| **lower** |" in told[1] and "ends lower even where" in told[1]
    dull = page(table(4, rewards={"four-six-2e-4": 0.2, "four-six-4e-4": 0.2}))
    assert "| **not tested** |" in dull and "an arm did not train" in dull


def test_the_page_shows_the_third_rate_and_what_the_older_references_say() -> None:
    rows = table(6)
    third = rows[rows["arm"].str.endswith("2e-4") & (rows["copy"] < 49)]
    third = third.assign(arm=third["arm"].str.replace("2e-4", "6e-4"), late=third["late"] + 0.1, collapsed=1.0)
    told = page(pd.concat([rows, third]))
    assert "| nvfp4-6e-4 | 6 |" in told and "| nvfp4-6e-4 - bf16-6e-4 |" in told
    assert [line[-4:] for line in told.splitlines() if line.startswith("| bf16-6e-4 |")] == [" 6 |"] * 2
    pooled = [*rows[rows["arm"] == "bf16-2e-4"]["late"], *np.linspace(0.58, 0.62, 16)]
    treated = rows[rows["arm"] == "nvfp4-2e-4"]["late"]
    expected: Any = stats.ttest_ind(treated, pooled, equal_var=False)
    low, high = (100 * end for end in expected.confidence_interval())
    assert f"| {100 * (treated.mean() - np.mean(pooled)):+.2f} [{low:+.2f}, {high:+.2f}] |" in told


def test_no_contrast_is_computed_before_all_copies_are_whole() -> None:
    rows = table(sessions=SESSIONS[:7], error=1e-4, effects={"four-six-2e-4": 0.05})
    early, ended = (page(rows, ["50 of 05b"], ended) for ended in (False, True))
    assert "7 copies" in early and "50 of 05b" in early and "four-six" not in early
    assert "| **not decided** |" in ended and "**higher**" not in ended


def test_words_wait_for_two_rates_and_not_for_the_third() -> None:
    rows = table(4, {"four-six-2e-4": 0.05})
    told = page(rows, ["43 of 15b-high"])
    assert "not read: 43 of 15b-high." in told and "| **higher** |" in told
    assert "| **higher** |" not in page(rows, ["43 of 15b", "43 of 15b-high"])


# --- packed sessions -------------------------------------------------------------------------------------------------


def numbers(arm: str, copy: int) -> list[dict[str, Any]]:
    """The lines of a run: rewards rise by a hundredth a step, late evaluations are 0.50, 0.52 and 0.57."""
    train = [
        {"reward/mean": step / 100, "entropy": 0.2, "accuracy": 0.5 * (arm != "nvfp4-4e-4" or step < 30)}
        for step in range(1, 41)
    ]
    lines = [{"kind": "train", "step": at, "entropy_clean": 0.2} | one for at, one in enumerate(train, 1)]
    asked = ((0, 0.4), (32, 0.5), (36, 0.52))
    late = [{"kind": "eval", "step": at, "eval/lenient_sampled": right} for at, right in asked]
    last = {"eval/lenient_sampled": 0.57, "eval/lenient_greedy": copy / 100}
    others = {*PAGE.FORMATS.values()} - {PAGE.FORMATS[arm[:-5]]}
    also = {f"eval/in/{form}/lenient_{mode}": 0.6 for form in others for mode in ("sampled", "greedy")}
    return [*lines, *late, {"kind": "eval", "step": 40, **last, **also}]


def pack(data: Path, session: str, copies: Sequence[int], without: Sequence[str] = (), gpu: str = "H200") -> None:
    """What a session of the 0.5B packs: `without` are arms that did not finish on its last copy."""
    words = user_options.search_path([ROOT / "studies" / "fair-2026" / "conf"])
    design, composer = read_design(PART / "05b" / "study.yaml", words), Composer()
    runs = data.parent / f"runs-{session}"
    asked = pd.DataFrame({"mode": "sampled", "question": ["gsm8k/test/1", "gsm8k/test/7"], "step": 40})
    answers = asked.assign(correct=1, lenient=1, finished=1, tokens=9)
    for copy in copies:
        for arm in design.arms:
            if copy == copies[-1] and arm.name in without:
                continue
            tree = composer.tree(design.words(arm, copy, design.seeds[0], None))
            where = {"device": "cuda", "gpu": gpu, "gguf": {"digest": "sha256:a", "dither": copy}}
            write_run(runs / tree["name"], tree, numbers(arm.name, copy), DONE, where, answers)
    write_study(sorted(runs.iterdir()), data / "05b" / session, mixed_code=True, metrics=("study",))
    probes = [{"base": copy, "digest": f"of {copy}", "doses": {}} for copy in copies]
    (data / "05b" / session / "probes.json").write_text(json.dumps(probes))
    shutil.copy(PART / "05b" / "study.yaml", data / "05b" / session)


@pytest.fixture(autouse=True)
def own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_options, "_in_use", [])
    user_options.use([ROOT / "studies" / "fair-2026" / "conf"])


def test_packed_sessions_are_read_without_copies_that_lack_a_run(tmp_path: Path) -> None:
    pack(tmp_path / "data", "first", [43])
    pack(tmp_path / "data", "second", [44, 45], without=["four-six-4e-4"])
    size = PAGE.read_size("0.5B", tmp_path / "data")
    rows = size.rows
    assert sorted(rows["arm"].unique()) == sorted(ARMS) and len(rows) == 12
    assert dict(zip(rows["copy"], rows["session"], strict=True)) == {43: "first", 44: "second"}
    assert [*size.left_out] == [f"{copy} of 05b" for copy in range(45, 51)]
    assert len(size.older) == 16 and np.all((size.older >= 0) & (size.older <= 1))
    assert {round(6 * one) for one in size.older} == {round(6 * one, 9) for one in size.older}  # two questions, 3 steps
    for _, row in rows.iterrows():
        assert [row["late"], row["greedy"]] == pytest.approx([(0.5 + 0.52 + 0.57) / 3, row["copy"] / 100])
        assert [row["first"], row["last"]] == pytest.approx([0.025, 0.365])
        assert row["answering"] == pytest.approx(0.03 if not row["arm"].startswith("bf16") else 0)
        assert row["sampled in bf16"] == (0.57 if row["arm"].startswith("bf16") else 0.6)
        assert bool(row["collapsed"]) == (row["arm"] == "nvfp4-4e-4") and row["entropy"] == pytest.approx(np.log(0.2))


@pytest.mark.parametrize("words", ["several sessions", "several cards"])
def test_a_copy_in_two_sessions_and_a_session_of_two_cards_are_refused(tmp_path: Path, words: str) -> None:
    cards = words.endswith("cards")
    pack(tmp_path / "data", "first", [43], without=ARMS[3:], gpu="H100")
    pack(tmp_path / "data", "first" if cards else "second", [43], without=ARMS[:3])
    with pytest.raises(ConfigError, match=words):
        PAGE.read_size("0.5B", tmp_path / "data")
