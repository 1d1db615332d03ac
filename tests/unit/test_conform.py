"""Whether a format conforms: on committed copies, and on made-up runs by an independent test of equivalence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from qerl_bench.__main__ import main
from qerl_core.checks import ConfigError
from qerl_core.process.arguments import whole
from qerl_core.statistics import mean_ci
from qerl_studies.conform.equivalence import AskedMeasure, Conformity, _name, conformity, place_of_control
from qerl_studies.conform.reference import FILE, MEASURES, read_reference
from qerl_studies.design.looks import shown_runs
from qerl_studies.runs.load import Run, load_run
from qerl_studies.runs.reported import COLUMNS

ROOT = Path(__file__).parents[2]
NAMES = ("qwen2.5-coder-0.5b-gsm8k", "qwen2.5-coder-1.5b-gsm8k", "small-10m-countdown")


def runs_of(study: str) -> list[Run]:
    return [load_run(path) for path in shown_runs([ROOT / "studies" / study])]


def by_arm(found: list[Conformity]) -> dict[str, Conformity]:
    return {one.arm: one for one in found}


# --- committed data --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("study", "name", "difference", "low", "high", "levels"),
    [  # of studies/real-2026/*/results/primary.md, twelve copies, questions drawn
        ("real-2026/05b", "qwen2.5-coder-0.5b-gsm8k", -4.67, -5.85, -3.49, (26.76, 31.43)),
        ("real-2026/15b", "qwen2.5-coder-1.5b-gsm8k", -2.41, -3.50, -1.31, (63.54, 65.95)),
    ],
)
def test_nvfp4_rounded_to_nearest_does_not_conform_on_released_models(
    study: str, name: str, difference: float, low: float, high: float, levels: tuple[float, float]
) -> None:
    found = by_arm(conformity(read_reference(name), runs_of(study)))
    nearest = found["quant nvfp4"]
    assert {*found} == {"quant nvfp4", "aqn matched, quant nvfp4"} and nearest.word == "fail" and not nearest.setting
    one = nearest.asked[0]
    assert one.effect is not None and one.effect.n == 12 and one.decides
    ends = [100 * end for end in (one.effect.value, one.effect.low, one.effect.high)]
    assert ends == pytest.approx([difference, low, high], abs=0.006)
    assert [100 * level for level in one.levels] == pytest.approx(levels, abs=0.006)


def test_what_is_added_to_a_format_is_in_the_name_of_its_arm() -> None:
    fp8 = {"quant.name": "fp8", "quant.block": "row"}
    for first, name in ((fp8, "quant fp8"), ({**fp8, "quant.activations": "fp8"}, "quant fp8, quant.activations fp8")):
        stratum: Any = SimpleNamespace(variants=(first, {"quant.name": "bf16"}))
        assert _name(stratum) == name


def test_four_copies_are_too_few() -> None:
    (found,) = conformity(read_reference("qwen2.5-coder-1.5b-gsm8k"), runs_of("real-2026/15b-again"))
    assert found.word == "too few" and (found.asked[0].needed or 0) > 12


def test_each_reference_can_be_read_and_describes_one_setting() -> None:
    for name in NAMES:
        reference = read_reference(name)
        assert {*reference.asked} <= {*reference.tolerances}
        assert all(not MEASURES[measure].ratio for measure in reference.tolerances)
        assert {run.option("quant.name") for run in reference.runs} == {"bf16"}
    assert FILE.read_text().count("since:") == len(NAMES)


# --- made up ---------------------------------------------------------------------------------------------------------


def theirs(folder: Path, gaps: list[float], arms: tuple[str, str] = ("nvfp4", "bf16"), task: str = "gsm8k") -> Path:
    """A reported study of the 0.5B: late rewards of BF16 by seed, and those of the format that differ by `gaps`."""
    base = dict.fromkeys(COLUMNS, "") | {
        **{"study": "s", "model": "qwen2.5-coder-0.5b-instruct", "task": task, "step": "40", "metric": "reward/mean"},
        **{"definition": "mean reward", "source": "f"},
    }
    lines = [",".join(COLUMNS)]
    for seed, gap in enumerate(gaps):
        level = 0.3 + 0.05 * math.sin(seed)
        for arm, value in zip(arms, (level + gap, level), strict=True):
            row = base | {"arm": arm, "seed": str(seed), "value": repr(value)}
            lines.append(",".join(row[key] for key in COLUMNS))
    folder.mkdir(parents=True)
    (folder / "theirs.csv").write_text("\n".join(lines) + "\n")
    assert main(["import", "csv", str(folder / "theirs.csv"), f"out={folder / 'study'}"]) == 0
    return folder / "study"


def asked(folder: Path) -> Conformity:
    runs = [load_run(path) for path in shown_runs([folder])]
    (found,) = conformity(read_reference(NAMES[0]), runs, ["late_reward"], "bf16")
    return found


def tost(gaps: list[float], tolerance: float) -> float:
    """SciPy's two one-sided t tests; the larger p."""
    found: list[Any] = [
        stats.ttest_1samp(gaps, -tolerance, alternative="greater"),
        stats.ttest_1samp(gaps, tolerance, alternative="less"),
    ]
    return max(float(one.pvalue) for one in found)


@pytest.mark.parametrize(
    ("gaps", "word"),
    [
        ([0.001, -0.002, 0.003, 0.000, 0.002, -0.001], "pass"),
        ([-0.05, -0.06, -0.055, -0.05, -0.052, -0.058], "fail"),
        ([0.05, 0.06, 0.055, 0.05, 0.052, 0.058], "fail"),  # better than BF16 does not conform either
        ([0.03, -0.03, 0.01, -0.04, 0.02, 0.005], "too few"),
        ([-0.02, -0.021, -0.019, -0.022, -0.018, -0.02], "too few"),  # at the tolerance nothing is shown
    ],
)
def test_a_word_is_that_of_two_one_sided_tests(gaps: list[float], word: str, tmp_path: Path) -> None:
    found = asked(theirs(tmp_path / "x", gaps))
    assert found.word == word
    assert (tost(gaps, 0.02) <= 0.025) == (word == "pass")
    one = next(part for part in found.asked if part.decides)
    assert one.effect is not None and one.effect.p_within(0.02) == pytest.approx(tost(gaps, 0.02))


def test_the_runs_that_are_needed_pass_four_times_of_five() -> None:
    """By simulation: with so many pairs, and no difference, 80 % of studies pass; with a quarter of them far fewer."""
    draw = np.random.default_rng(0)
    tolerance, spread = 0.01, 0.018
    pilot = draw.normal(0, 1, 12)
    pilot = (pilot - pilot.mean()) / pilot.std(ddof=1) * spread
    needed = AskedMeasure(MEASURES["final"], tolerance, True, mean_ci(pilot)).needed
    assert needed is not None and 20 < needed < 60

    def passed(n: int) -> float:
        return float(np.mean([tost([*draw.normal(0, spread, n)], tolerance) <= 0.025 for _ in range(1000)]))

    assert 0.77 < passed(needed) < 0.88
    assert passed(needed // 4) < 0.2


def test_a_format_at_the_tolerance_rarely_passes_and_rarely_fails() -> None:
    """What would make a word false: 2.5 % of formats whose true difference is the tolerance pass."""
    draw = np.random.default_rng(1)
    words = []
    for _ in range(1000):
        effect = mean_ci(draw.normal(0.01, 0.01, 12))
        words.append(Conformity("x", (AskedMeasure(MEASURES["final"], 0.01, True, effect),), "", ()).word)
    assert 0.01 < words.count("pass") / 1000 < 0.045 and words.count("fail") / 1000 < 0.045


def test_several_measures_must_all_pass_and_any_may_fail() -> None:
    def part(mean: float, decides: bool = True) -> AskedMeasure:
        return AskedMeasure(MEASURES["final"], 0.02, decides, mean_ci(np.array([0.001, -0.001, 0.002, -0.002]) + mean))

    def word(*parts: AskedMeasure) -> str:
        return Conformity("x", parts, "", ()).word

    assert word(part(0.0), part(0.0)) == "pass" and word(part(0.0), part(0.019)) == "too few"
    assert word(part(0.0), part(0.05)) == "fail" and word(part(0.0), part(0.05, decides=False)) == "pass"
    barely = mean_ci([0.030, 0.034, 0.023, 0.027])
    alone = AskedMeasure(MEASURES["final"], 0.02, True, barely)
    assert 0.025 < barely.p_outside(0.02) <= 0.05
    assert word(alone) == "fail" and word(alone, part(0.0)) == "too few", "corrected for two measures"


def test_what_is_missing_is_not_tested(tmp_path: Path) -> None:
    found = asked(theirs(tmp_path / "one", [0.001]))
    assert found.word == "not tested" and "single pair" in found.reason
    same = asked(theirs(tmp_path / "same", [0.0, 0.0, 0.0]))
    assert same.word == "not tested" and "copies" in same.reason
    runs = [load_run(path) for path in shown_runs([tmp_path / "one" / "study"])]
    (found,) = conformity(read_reference(NAMES[0]), runs, (), "bf16")
    assert found.word == "not tested" and "answers" in found.reason
    file = tmp_path / "one/study/reported.csv"
    file.write_text(text := file.read_text().replace(",40,", ",0,"))
    assert "no number" in asked(file.parent).reason
    file.write_text(text.replace("reward/mean", "eval/accuracy_sampled"))
    with pytest.raises(ConfigError, match="0 is before"):
        MEASURES["final"].metric(load_run(shown_runs([file.parent])[0]))


def test_bf16_of_another_setting_is_not_judged() -> None:
    """A study of fewer steps cannot borrow a tolerance that was set for forty."""
    reference = read_reference(NAMES[0])
    runs = runs_of("real-2026/05b")
    assert not {one.setting for one in conformity(reference, runs)} - {()}
    other = replace(reference, study=ROOT / "studies" / "real-2026" / "15b")
    for run in other.runs:
        run.config["model"]["name"] = "qwen2.5-coder-0.5b-instruct"
        run.config["steps"] = 20
        run.__dict__.pop("config_items", None)
    found = conformity(other, runs)
    assert {one.word for one in found} == {"not tested"} and "steps 40 (20)" in found[0].reason


def test_where_bf16_is_expected_is_said() -> None:
    reference = read_reference(NAMES[0])
    assert "inside of 29.08 to 33.78" in place_of_control(reference, "late_lenient", 0.3143)
    assert "OUTSIDE" in place_of_control(reference, "late_lenient", 0.2)


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command_says_and_returns_the_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = theirs(tmp_path / "good", [0.001, -0.002, 0.003, 0.000, 0.002, -0.001])
    words = [f"reference={NAMES[0]}", "control=bf16", "measures=late_reward"]
    capsys.readouterr()
    assert main(["conform", str(good), *words]) == 0
    said = capsys.readouterr().out
    assert "**pass**" in said and "2026-11-29" in said and "within" in said
    bad = theirs(tmp_path / "bad", [-0.05, -0.06, -0.055, -0.05, -0.052, -0.058])
    with pytest.raises(SystemExit) as end:
        main(["conform", str(bad), *words])
    assert end.value.code == 1 and "**fail**" in capsys.readouterr().out


def test_wrong_words_are_refused_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = theirs(tmp_path / "x", [0.001, 0.002])
    capsys.readouterr()

    def refused(*words: str) -> str:
        with pytest.raises(SystemExit) as end:
            main(["conform", *words])
        assert end.value.code == 2
        return whole(capsys.readouterr().err)

    assert NAMES[1] in refused(str(study), "reference=none")
    assert "control=ARM" in refused(str(study), f"reference={NAMES[0]}")
    assert "which qwen" in refused(str(study), f"reference={NAMES[1]}", "control=bf16")
    other = theirs(tmp_path / "y", [0.1, 0.2], task="else")
    assert "on gsm8k" in refused(str(other), f"reference={NAMES[0]}", "control=bf16")
    assert "no arm" in refused(str(study), f"reference={NAMES[0]}", "control=none")
    assert "no tolerance of late" in refused(str(study), f"reference={NAMES[2]}", "control=bf16", "measures=late")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace("0.01", "0"), "sizes above 0"),
        (lambda text: text.replace("asked: [final]", "asked: []"), "asked"),
        (lambda text: text.replace("2026-11-29", "soon"), "since"),
        (lambda text: text.replace("study: s", "study: none"), "no folder"),
        (lambda text: text + "  more: 1\n", "keys"),
        (lambda text: text.replace("final: 0.01", "entropy: 0.01"), "late_reward"),
    ],
)
def test_a_reference_of_ones_own_is_checked(change: Callable[[str], str], said: str, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    text = (
        "mine:\n  study: s\n  arm: {quant.name: bf16}\n  asked: [final]\n  tolerances: {final: 0.01}\n"
        "  since: 2026-11-29\n"
    )
    (tmp_path / "own.yaml").write_text(text)
    assert read_reference(f"{tmp_path / 'own.yaml'}:mine").tolerances == {"final": 0.01}
    (tmp_path / "own.yaml").write_text(change(text))
    with pytest.raises(ConfigError, match=said):
        read_reference(f"{tmp_path / 'own.yaml'}:mine")
