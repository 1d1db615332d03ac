"""Primary contrasts: what study.yaml may say of them, when arms are compared, and what a look shows."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy import stats

from qerl_core.checks import ConfigError
from qerl_studies.claims import primary
from qerl_studies.claims.primary import look, together
from qerl_studies.design.design import read_design
from qerl_studies.design.looks import at_last_look, counted
from qerl_studies.design.primary import Primary
from qerl_studies.design.sessions import Sessions, read_study
from qerl_studies.effects.estimate import correlation, least_squares
from qerl_studies.report import sessions
from qerl_studies.report.primary import primary_page
from qerl_studies.report.secondary import secondary_page
from qerl_studies.report.sessions import contents, main, read_once, shown_on_page
from qerl_studies.runs.comparable import load_runs
from tests.scripts import ROOT

REAL = ROOT / "studies" / "real-2026"
QUESTIONS = 50
LOOKS = {4: 0.012, 6: 0.046}
CONTRASTS = {"noise": ("noisy", "plain"), "format": ("plain", "bf16")}


def run_with(late: pd.Series, block: str = "a card") -> Any:
    """A run of 40 steps whose answers were right so often at steps 32, 36 and 40."""
    answers = pd.DataFrame({0: late * 0, 20: late * 0, **{step: late for step in (32, 36, 40)}})
    return SimpleNamespace(
        name="run", block=block, code="c0de", option=lambda _key: 40, answers=lambda _mode, _column: answers
    )


def study_of(effects: dict[str, list[float]], **changed: Any) -> Any:
    """A study with a run of each arm on as many bases as it has effects, which are added to a base's own accuracy."""
    draw = np.random.default_rng(0)
    runs = {}
    for base in range(6):
        own = pd.Series(draw.uniform(0.3, 0.5, QUESTIONS), index=[f"q{i}" for i in range(QUESTIONS)])
        for arm, added in effects.items():
            if base < len(added):
                runs[arm, base, 0] = run_with(own + added[base])
    primary = Primary(contrasts=CONTRASTS, measure="late_lenient", margin=0.01, looks=LOOKS)
    design = SimpleNamespace(bases=tuple(range(6)), seeds=(0,), primary=primary, path=Path("none/of/study.yaml"))
    sessions = {"session_of": {base: "a session" for _, base, _ in runs}, **changed}
    return SimpleNamespace(design=design, runs=runs, **sessions)


@pytest.fixture(autouse=True)
def no_gates_of_made_up_studies(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = primary.failed_gates

    def none_of_made_up(study: Any, contrasts: Any, bases: Any) -> dict[str, tuple[str, ...]]:
        return dict.fromkeys(contrasts, ()) if isinstance(study, SimpleNamespace) else asked(study, contrasts, bases)

    monkeypatch.setattr(primary, "failed_gates", none_of_made_up)


NOISY = [0.05, 0.06, 0.04, 0.055, 0.2, 0.2]
PLAIN = [-0.02, 0.01, -0.03, 0.02, 0.0, 0.01]


def of(bases: int, **changed: Any) -> Any:
    return study_of({"bf16": [0.0] * bases, "plain": PLAIN[:bases], "noisy": NOISY[:bases]}, **changed)


def test_a_look_is_a_paired_t_test_over_its_bases_adjusted_by_holm() -> None:
    study = of(6)
    (noise, form) = look(study, study.design.primary, 4)
    deltas = np.array(NOISY[:4]) - PLAIN[:4], np.array(PLAIN[:4])
    p = [float(stats.ttest_1samp(one, 0.0).pvalue) for one in deltas]
    assert noise.over_bases.value == pytest.approx(deltas[0].mean())
    low, high = stats.t.interval(0.95, 3, deltas[1].mean(), stats.sem(deltas[1]))
    assert (form.over_bases.low, form.over_bases.high) == pytest.approx((low, high))
    ends = stats.t.interval(1 - LOOKS[4], 3, deltas[1].mean(), stats.sem(deltas[1]))
    assert form.over_bases.ends(LOOKS[4]) == pytest.approx(ends)
    assert [noise.p, form.p] == pytest.approx([2 * p[0], p[1]])  # the smaller p counts twice
    assert min(noise.p, form.p) > LOOKS[4]
    assert [noise.verdict, form.verdict] == ["open", "open"]


def test_the_level_of_a_look_decides_and_the_sign_gives_the_word() -> None:
    even = np.array([0.05, 0.051, 0.049, 0.05])
    for sign, word in ((1, "higher"), (-1, "lower")):
        noisy = (PLAIN[:4] + sign * even).tolist()
        study = study_of({"bf16": [0.0] * 4, "plain": PLAIN[:4], "noisy": noisy})
        assert [one.verdict for one in look(study, study.design.primary, 4)] == [word, "open"]


@pytest.mark.parametrize(("bases", "verdict"), [(4, "open"), (6, "negligible")])
def test_only_the_last_look_may_say_negligible(bases: int, verdict: str) -> None:
    small = [0.002, -0.002, 0.001, -0.001, 0.003, -0.003]
    study = study_of({"bf16": [0.0] * 6, "plain": small, "noisy": [0.0] * 6})
    assert [one.verdict for one in look(study, study.design.primary, bases)] == [verdict, verdict]


def test_before_the_first_look_no_number_of_an_arm_is_shown() -> None:
    study = of(3)
    page = primary_page(study)
    assert contents(study) == {"primary.md": page}
    assert not any(arm in page for arm in ("noisy", "plain", "bf16"))


def test_a_look_reads_the_first_bases_that_count_whatever_came_later() -> None:
    study = of(6)
    del study.runs["noisy", 1, 0]
    study.runs["plain", 2, 0].block = "another card"
    have = counted(study, study.design.primary)
    assert have.bases == (0, 3, 4, 5)
    assert "noisy" in have.left_out[1] and "another card" in have.left_out[2]
    noise = look(study, study.design.primary, 4)[0]
    assert noise.over_bases.value == pytest.approx(np.mean([NOISY[i] - PLAIN[i] for i in (0, 3, 4, 5)]))
    page = primary_page(study)
    assert "## 4 bases" in page and "## 6 bases" not in page and "Base 2 does not count" in page


def test_a_base_that_comes_later_changes_no_look_that_was_made() -> None:
    late = {0: "second", **dict.fromkeys(range(1, 6), "first")}
    study = of(6, session_of=late)
    assert counted(study, study.design.primary).bases == (1, 2, 3, 4, 5, 0)
    assert "Bases 1, 2, 3, 4." in primary_page(study)


def test_the_first_look_of_the_larger_model_is_as_it_was_made() -> None:
    """At copies 1 to 7 and 9; copy 8 came with the last four (protocol, amendment 9)."""
    real = read_once(REAL / "15b")
    assert real.design.primary is not None
    assert sorted(counted(real, real.design.primary).bases[:8]) == [1, 2, 3, 4, 5, 6, 7, 9]
    noise, format_ = look(real, real.design.primary, 8)
    assert f"{100 * noise.over_bases.value:+.2f} {100 * format_.over_bases.value:+.2f}" == "+0.14 -2.85"


def test_a_gate_that_the_protocol_did_not_ask_stands_beside_its_word() -> None:
    """Noise that was not shown to raise the entropy of the 0.5B tests nothing; that of the 1.5B does."""
    noise, format_ = look(small := read_once(REAL / "05b"), small.design.primary, 12)
    assert (noise.verdict, noise.state.word, format_.exploratory) == ("open", "not decided", "")
    assert re.match(r"exploratory.* not tested, acts \(entropy .* ×1\.045 \[×0\.982, ×1\.112\]\)", noise.exploratory)
    large = look(study := read_once(REAL / "15b"), study.design.primary, 12)
    assert [one.failed for one in large] == [("end above half time",)] * 2  # overridden, so that its arms could begin
    assert [one.state.word for one in large] == ["not decided", "opposite"]


def test_least_squares_takes_an_effect_for_each_session_in_place_of_pairs() -> None:
    """In one session it is the t test of two samples, and with a base each the one of pairs."""
    alone = dict(zip(range(6), "abcdef", strict=True))
    treated, control = pd.Series(NOISY), pd.Series(PLAIN)
    of_two = stats.ttest_ind(NOISY, PLAIN)
    one = least_squares(treated, control, dict.fromkeys(range(6), "a session"))
    low, high = of_two.confidence_interval()
    assert (one.low, one.high, one.df, one.n) == pytest.approx((low, high, 10, 12))
    assert one.p_outside(0.0) == pytest.approx(of_two.pvalue)
    pairs, of_pairs = least_squares(treated, control, alone), stats.ttest_rel(NOISY, PLAIN)
    assert (pairs.p_outside(0.0), pairs.df) == pytest.approx((of_pairs.pvalue, 5))
    assert correlation(treated, control) == pytest.approx(stats.pearsonr(NOISY, PLAIN).statistic)
    assert np.isnan(least_squares(treated[:1], control[:1], alone).stderr)
    more = least_squares(pd.Series([*NOISY, 0.4]), control, alone | {6: "g"})  # alone it says nothing
    assert (more.value, more.df) == pytest.approx((pairs.value, 5))


def test_arms_of_one_copy_do_not_go_together_and_pairs_gain_nothing() -> None:
    """Correlations as a referee's own code has them; least squares has more degrees of freedom."""
    for size, gap, r in (("05b", "-4.67 [-5.59, -3.75]", -0.45), ("15b", "-2.41 [-3.45, -1.36]", -0.16)):
        format_ = look(study := read_once(REAL / size), study.design.primary, 12)[1]
        found = format_.by_runs
        assert f"{100 * found.value:+.2f} [{100 * found.low:+.2f}, {100 * found.high:+.2f}]" == gap
        assert round(format_.effect.correlation, 2) == r and found.half_width < format_.over_bases.half_width
        assert format_.state_by_runs == format_.state


def test_a_word_about_two_sizes_asks_the_tests_of_both() -> None:
    noise, format_ = together(read_once(REAL / "05b"))
    assert {*noise.each} == {"05b", "15b"} and (noise.state.word, format_.state.word) == ("not decided", "opposite")
    assert format_.p == max(one.p for one in format_.each.values() if one)
    assert format_.by_gates_of_today.word == "not tested"  # one gate of one size is open
    (full,) = together(read_once(REAL / "05b-more"))
    assert full.each["15b-more"] is None and full.state.word == "not tested" and np.isnan(full.p)
    (lower,) = (one for one in format_.each.values() if one and one.failed)
    higher = replace(lower, state=replace(lower.state, direction=1))
    assert replace(format_, each={**format_.each, "15b": higher}).state.word == "not decided"


def test_all_pages_see_the_bases_of_the_last_look_alone() -> None:
    real = read_once(REAL / "05b")
    assert real.design.primary is not None and counted(real, real.design.primary).bases[:8] == (1, 2, 3, 4, 5, 6, 7, 8)
    seen = at_last_look(real)
    assert seen is not None and {base for _, base, _ in seen.runs} == {*seen.probes}
    assert len(seen.probes) in real.design.primary.looks
    fewer = replace(real, runs={cell: run for cell, run in real.runs.items() if cell[1] < 8})
    assert len(counted(fewer, real.design.primary).bases) == 7 and at_last_look(fewer) is None


def test_the_report_of_a_study_with_a_page_draws_the_figures_that_the_page_shows_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for drawing in ("dot_plot", "pass_at_k_curves", "entropy_and_accuracy"):
        monkeypatch.setattr(sessions, drawing, lambda *_: pytest.fail("drawn for no page"))
    looked: list[Sessions] = []
    monkeypatch.setattr(sessions, "at_last_look", lambda study: (looked.append(study), at_last_look(study))[1])
    study, page = tmp_path / "05b", tmp_path / "README.md"
    shutil.copytree(REAL / "05b", study, ignore=shutil.ignore_patterns("*.svg"))
    assert shown_on_page(study) is None
    page.write_text("# A study\n![Entropy by step](05b/results/curves.svg)\n")
    main([str(study)])
    assert {file.name for file in study.rglob("*.svg")} == {"curves.svg"}
    assert (study / "results/curves.svg").read_text() == (REAL / "05b/results/curves.svg").read_text()
    assert len(looked) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert "arms.svg" in last and "probes.svg" in last and "curves.svg" not in last


def test_what_stands_beside_primary_contrasts_is_a_mean_of_pairs_and_no_verdict() -> None:
    study = read_once(REAL / "05b")
    page = secondary_page(study, [("nvfp4", "bf16")])
    row = next(line for line in page.splitlines() if line.startswith("| right, greedy, after training"))
    found = [
        float((run.answers("greedy")[40] - study.runs["bf16", base, seed].answers("greedy")[40]).mean())
        for (arm, base, seed), run in study.runs.items()
        if arm == "nvfp4"
    ]
    low, high = stats.t.interval(0.95, len(found) - 1, np.mean(found), stats.sem(found))
    assert f"{100 * np.mean(found):+.2f} [{100 * low:+.2f}, {100 * high:+.2f}]" in row
    (pair,) = (line for line in page.partition("## Any two arms")[2].splitlines() if line.startswith("| nvfp4 - bf16 "))
    bases, sampled = pair.split(" | ")[1:3]
    assert bases == "12" and f"| {sampled.replace(' ', ' | ', 1)} |" in primary_page(study)
    assert not any(word in page for word in ("higher", "lower", "negligible", "open", "supported", "reversed"))


def test_two_arms_that_share_no_base_are_not_compared() -> None:
    study = read_once(REAL / "05b-more")
    apart = {"bf16-noise": 1, "bf16-on-nvfp4": 2}
    runs = {cell: run for cell, run in study.runs.items() if apart.get(cell[0], cell[1]) == cell[1]}
    pairs = [(arm, "bf16") for arm in apart]
    table = secondary_page(replace(study, runs=runs), pairs).partition("## Any two arms")[2]
    assert "| bf16-noise - bf16 | 1 |" in table and "bf16-on-nvfp4 - bf16-noise" not in table


@pytest.mark.parametrize("more", ["", "-more"])
def test_both_sizes_are_studied_alike(more: str) -> None:
    """But for the model, and the rate that the pilot's rule takes for it."""
    large, small = (yaml.safe_load((REAL / f"{size}{more}" / "study.yaml").read_text()) for size in ("15b", "05b"))
    own = ("model.id=", "optim.lr=")
    for one in (large, small):
        for words in (one["common"], *(arm["words"] for arm in one["arms"].values())):
            words[:] = [word for word in words if not word.startswith(own)]
    assert large == small
    designs = [read_design(REAL / f"{size}{more}" / "study.yaml") for size in ("15b", "05b")]
    assert designs[0].primary == designs[1].primary


@pytest.mark.parametrize("folder", sorted(REAL.glob("[01]5b/data/*/")), ids=lambda folder: folder.name)
def test_all_runs_have_the_code_of_the_protocol(folder: Path) -> None:
    (code,) = re.findall(r"All runs have the code (\w+)", (REAL / "protocol.md").read_text())
    assert {run.code for run in load_runs([folder])} == {code}


def written(tmp_path: Path, primary: object) -> Path:
    content = yaml.safe_load((ROOT / "studies/real-2026/15b/study.yaml").read_text()) | {"primary": primary}
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    return file


GOOD = {
    "contrasts": {"noise": ["nvfp4-noise", "nvfp4"]},
    "measure": "late_lenient",
    "margin": 0.01,
    "looks": {8: 0.012, 12: 0.046},
}


def test_a_design_without_primary_contrasts_has_none(tmp_path: Path) -> None:
    assert read_design(written(tmp_path, None)).primary is None
    primary = read_design(written(tmp_path, GOOD)).primary
    assert primary is not None and primary.arms == ["nvfp4-noise", "nvfp4"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"measure": "best"}, r"primary\.measure must be one of late_lenient.*got 'best'"),
        ({"margin": 0}, r"primary\.margin"),
        ({"contrasts": {"noise": ["nvfp4"]}}, r"primary\.contrasts must have two arms"),
        ({"contrasts": {"noise": ["nvfp4-loud", "nvfp4"]}}, r"does not have: nvfp4-loud"),
        ({"looks": {8: 0.012, 13: 0.046}}, r"primary\.looks .* from 2 to 12"),
        ({"looks": {8: 1.2}}, r"primary\.looks"),
        ({"looks": {12: 0.046, 8: 0.012}}, r"primary\.looks must have, in order"),
        ({"alpha": 0.05}, r"primary must have exactly the keys contrasts, looks, margin, measure"),
    ],
)
def test_wrong_entries_are_refused_by_name(changed: dict[str, object], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        read_design(written(tmp_path, GOOD | changed))


def test_a_session_that_measured_bases_by_another_design_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    shutil.copytree(REAL / "05b", folder, ignore=shutil.ignore_patterns("results"))
    assert read_study(folder).otherwise == {}
    design = yaml.safe_load((folder / "study.yaml").read_text())
    (folder / "study.yaml").write_text(yaml.safe_dump(design | {"dose": design["dose"] | {"draws": 3}}))
    study = read_study(folder)
    assert study.runs and len(study.otherwise) == len([*(folder / "data").iterdir()])
    assert {*study.otherwise.values()} == {"dose.draws was 8 (study.yaml: 3)"}
    assert f"\nBases of {next(iter(study.otherwise))}: dose.draws was 8" in str(contents(study)["gates.md"])


def test_runs_of_other_words_are_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "study"
    shutil.copytree(REAL / "05b", folder, ignore=shutil.ignore_patterns("results", "2026-11-27*"))
    runs = read_study(folder).runs
    assert not caplog.messages
    design = yaml.safe_load((folder / "study.yaml").read_text())
    design["arms"]["nvfp4"]["words"].append("optim.beta2=0.5")
    (folder / "study.yaml").write_text(yaml.safe_dump(design))
    assert {key[0] for key in read_study(folder).runs} == {"bf16", "nvfp4-noise"}
    (said,) = caplog.messages
    assert all((run.path.name in said) is (arm == "nvfp4") for (arm, _, _), run in runs.items())
