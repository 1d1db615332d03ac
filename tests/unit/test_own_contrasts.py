"""A folder's own contrasts: which arms are compared, their numbers, and curves by step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qerl_core.options.fingerprint import canonical
from qerl_core.statistics import Estimate
from qerl_studies.commands import compare
from qerl_studies.commands import report as command
from qerl_studies.effects.state import of_interval
from qerl_studies.figures.headline import OF_TRAINING, POINTS, Headline, by_step
from qerl_studies.figures.style import color
from qerl_studies.report.curve_drawing import Frame, round_ticks
from qerl_studies.report.own_runs import CURVES, drawn_arms, own_content
from qerl_studies.runs.comparable import load_runs
from qerl_studies.runs.own_contrasts import Levels, own_contrasts
from qerl_studies.runs.settings import Setting, group_by_setting

ASSETS = Path(__file__).parents[1] / "assets" / "runs"


def setting(**items: Any) -> Setting:
    """A setting of one run whose config has these keys, with __ for dots."""
    dotted: Mapping[str, Any] = {key.replace("__", "."): value for key, value in items.items()}
    pairs = frozenset((key, repr(canonical(value))) for key, value in dotted.items())
    run: Any = SimpleNamespace(config_items=dotted, setting_items=pairs)
    return Setting((run,))


def found(*settings: Setting) -> list[tuple[str, str, str]]:
    return [(one.factor, one.label, one.where) for one in own_contrasts(settings)]


def test_each_factor_is_a_contrast_within_each_level_of_the_others() -> None:
    grid = [setting(aqn__name=noise, lora__rank=rank, optim__lr=1e-5) for noise in ("exp", "none") for rank in (16, 8)]
    assert sorted(found(*grid)) == [
        ("aqn", "exp - none", "rank 16"),
        ("aqn", "exp - none", "rank 8"),
        ("lora", "rank 16 - rank 8", "exp"),
        ("lora", "rank 16 - rank 8", "none"),
    ]


def test_levels_are_told_apart_by_name_and_value_and_the_plainest_is_the_control() -> None:
    arms = [
        setting(aqn__name="constant", aqn__level=0.02, noise__where="norms"),
        setting(aqn__name="none", noise__where="norms"),
        setting(aqn__name="constant", aqn__level=0.01, noise__where="norms"),
        setting(aqn__name="exp", aqn__sigma_start=0.01, noise__where="norms"),
    ]
    labels = [label for _, label, _ in found(*arms)]
    assert labels == ["constant, level 0.01 - none", "constant, level 0.02 - none", "exp - none"]
    assert found(setting(steps=100), setting(steps=20)) == [("steps", "steps 100 - steps 20", "")]
    three = [setting(optim__lr=rate, lora__rank=rank) for rate, rank in ((1e-5, 8), (1e-5, 16), (3e-5, 16))]
    assert [label for _, label, _ in found(*three)] == ["rank 8 - rank 16", "lr 3e-05 - lr 1e-05"]


def test_what_differs_in_several_factors_is_compared_with_the_plainest_arm() -> None:
    arms = [setting(quant__name="nvfp4", lora__rank=32), setting(quant__name="bf16", lora__rank=64)]
    assert found(*arms) == [("lora and quant", "rank 64 bf16 - rank 32 nvfp4", "")]
    assert found(arms[0]) == [] and Levels(arms[:1]).by_factor == {}


def test_the_numbers_of_a_contrast_are_those_of_its_runs() -> None:
    runs = load_runs([ASSETS])
    content = own_content(runs)
    (scope,) = content["own"]
    rows = {(row["factor"], row["label"], row["where"]): row for row in scope["contrasts"]}
    assert {*rows} == {
        ("quant", "nvfp4 - bf16", "exp"), ("quant", "nvfp4 - bf16", "none"),
        ("aqn", "exp - none", "bf16"), ("aqn", "exp - none", "nvfp4"),
    }  # fmt: skip
    row = rows["quant", "nvfp4 - bf16", "none"]
    place = [one.metric for one in content["headlines"]].index("entropy")
    values = {
        (run.option("quant.name"), run.option("seed")): OF_TRAINING[1].of(run) for run in runs if run.noise == "none"
    }
    gap = sum(values["nvfp4", seed] - values["bf16", seed] for seed in (0, 1)) / 2
    text, word = row["cells"][place]
    assert row["pairs"] == 2 and float(text.split()[0]) == pytest.approx(gap, abs=6e-4) and word == "not decided"
    shades = {one.name: one.shade for one in drawn_arms(group_by_setting(runs))}
    assert [*shades] == sorted(f"{noise} {quant}" for noise in ("exp", "none") for quant in ("bf16", "nvfp4"))
    assert shades["none bf16"] == "var(--text)" and shades["none nvfp4"] == color("nvfp4")
    assert len({*shades.values()}) == len(shades)


@pytest.mark.parametrize(
    ("value", "error", "margin", "word"),
    [(0.5, 0.01, 0.1, "higher"), (-0.5, 0.01, 0.1, "lower"), (0.01, 0.01, 0.1, "no difference beyond the margin"),
     (0.01, 0.1, 0.1, "not decided"), (0.5, 0.01, 0.0, "higher"), (0.5, math.nan, 0.1, "not tested")],
)  # fmt: skip
def test_a_word_follows_from_the_interval(value: float, error: float, margin: float, word: str) -> None:
    assert of_interval(Estimate(value, error, 9, 8), margin).of_pair == word


def test_a_curve_has_the_mean_of_its_runs_at_each_step() -> None:
    runs = [run for run in load_runs([ASSETS]) if run.noise == "none" and run.option("quant.name") == "bf16"]
    curve = by_step(runs, OF_TRAINING[1])
    series = [run.series("train", "entropy") for run in runs]
    assert [step for step, _ in curve] == [*series[0].index]
    assert [one.value for _, one in curve] == pytest.approx(((series[0] + series[1]) / 2).tolist())
    assert by_step(runs, Headline("none", "train", "no such metric")) == [] and len(curve) <= POINTS


def test_a_frame_keeps_what_is_beyond_it_at_its_edge() -> None:
    frame = Frame(0.0, 1.0, 10)
    (left, top), (right, bottom) = (map(float, one.split(",")) for one in frame.points([(0, 5), (10, -5)]).split())
    assert left < right and top < bottom and frame.points([(0, 1)]) == frame.points([(0, 5)])


def test_the_page_begins_with_them_and_folds_claims_without_runs(
    tmp_path: Path, show_claims: Callable[[int], None]
) -> None:
    show_claims(2)
    command.main([str(ASSETS), f"out={tmp_path}/report"])  # runs of ten steps, which no claim takes
    text = (tmp_path / "report" / "index.html").read_text()
    assert text.index('id="own"') < text.index("<polyline") < text.index('id="verdicts"')
    assert text.count("<polyline") == 4 * len(CURVES) - 4  # nothing here was graded leniently
    assert "lenient" not in text.partition('id="verdicts"')[0].partition('id="own"')[2]
    assert 'id="matrix"' not in text and "say nothing: 2<" in text


def test_compare_leads_with_them_even_where_they_are_equal(capsys: pytest.CaptureFixture[str]) -> None:
    compare.main([f"{ASSETS}/nvfp4-none-*", f"{ASSETS}/bf16-none-*"])
    said = capsys.readouterr().out
    order = [
        "eval/accuracy_greedy",
        "reward/mean  ",
        "entropy  ",
        "reward/mean at step",
        "entropy at step",
        "grad_norm",
    ]
    places = [said.index(f"\n{one}") for one in order]
    assert places == sorted(places)
    (first,) = re.findall(r"^eval/accuracy_greedy +(\S+) +(\S+) +\+0 ", said, re.M)
    assert first[0] == first[1]
    assert "compute_dtype" not in said


@pytest.mark.parametrize(
    ("low", "high", "integer", "ticks"),
    [
        (0.23, 0.47, False, [0.25, 0.3, 0.35, 0.4, 0.45]),
        (0.17, 0.65, False, [0.2, 0.3, 0.4, 0.5, 0.6]),
        (0, 3, True, [0, 1, 2, 3]),
        (0, 150, True, [0, 50, 100, 150]),
        (0, 1, True, [0, 1]),
        (-0.5, 0.5, False, [-0.4, -0.2, 0.0, 0.2, 0.4]),
    ],
)
def test_ticks_are_round(low: float, high: float, integer: bool, ticks: list[float]) -> None:
    assert round_ticks(low, high, integer) == pytest.approx(ticks)
