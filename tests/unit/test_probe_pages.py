"""Probes of several units: paired differences, ratios, extrapolation to no rounding error, and their page."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from qerl_core.checks import ConfigError
from qerl_core.statistics import mean_ci
from qerl_studies.probes.over_units import (
    by_scale,
    dose,
    entropy_at,
    groups,
    log_over,
    mean_accuracy,
    mean_of,
    minus,
    right_at,
    without_error,
)
from qerl_studies.probes.simex import extrapolated
from qerl_studies.report.model_page import model_page, shown
from qerl_studies.report.probe_page import figures, markdown


def test_a_trend_in_the_added_variance_is_prolonged_to_no_error_copy_by_copy() -> None:
    """Synthetic copies whose number is known without error: straight and curved in the variance of the error."""
    scales = [0.5, 1.0, 2.0, 4.0]
    truth = np.array([0.3, -0.1, 0.7])
    straight = truth[:, None] + 0.2 * (1 + np.array(scales))
    assert extrapolated(scales, straight, 1) == pytest.approx(truth)
    curved = straight - 0.03 * (1 + np.array(scales)) ** 2
    assert extrapolated(scales, curved, 2) == pytest.approx(truth)
    assert extrapolated(scales, curved, 1) != pytest.approx(truth, abs=0.05)
    noisy = curved + np.random.default_rng(0).normal(0, 1e-3, curved.shape)
    assert extrapolated(scales, noisy, 2) == pytest.approx(truth, abs=0.02)
    with pytest.raises(ConfigError, match=r"degree 2 needs 3 values of model.dither_scale, got 2"):
        extrapolated([1.0, 2.0, 2.0], straight[:, :3], 2)


def unit(words: list[str], right: dict[str, list[int]], entropy: dict[str, float]) -> dict[str, Any]:
    """The record of a unit: 2 samples a question, right ones and entropy by format."""
    formats = {}
    for quant, correct in right.items():
        asked = {
            "samples": 2, "correct": correct, "lenient": None, "found": 1.0, "finished": 0.75, "tokens": 9.0,
            "entropy": entropy[quant], "entropy_by_part": [entropy[quant]] * 9 + [None],
        }  # fmt: skip
        curve = [
            {"sigma": sigma, "entropy": entropy[quant] * (1 + sigma), "kl": sigma, "accuracy": 0.5 - sigma}
            for sigma in (0.0, 0.1, 0.2)
        ]
        kl = {"own": 0.01, "of_reference": 0.02}
        formats[quant] = {"temperatures": {"1": asked}, "kl": kl, "curve": curve, "entropy": entropy[quant]}
    return {"base": 0, "unit": words, "formats": formats}


def copies() -> list[dict[str, Any]]:
    return [
        unit(["model.dither=1"], {"bf16": [2, 0, 1], "nvfp4": [2, 0, 0]}, {"bf16": 0.5, "nvfp4": 0.6}),
        unit(["model.dither=2"], {"bf16": [1, 1, 1], "nvfp4": [1, 1, 0]}, {"bf16": 0.4, "nvfp4": 0.4}),
        unit(["model.dither=3"], {"bf16": [2, 2, 0], "nvfp4": [2, 2, 1]}, {"bf16": 0.5, "nvfp4": 0.5}),
    ]


def test_differences_are_paired_within_units_and_intervals_are_over_them() -> None:
    units = copies()
    assert mean_accuracy(units, "bf16", "1").value == pytest.approx((3 + 3 + 4) / 18)
    gap = mean_of(units, "nvfp4", minus("bf16", right_at("1")))
    expected = mean_ci([2 / 6 - 3 / 6, 2 / 6 - 3 / 6, 5 / 6 - 4 / 6])
    assert [gap.value, gap.low, gap.high, gap.n] == pytest.approx([expected.value, expected.low, expected.high, 3])
    assert math.isnan(mean_of(units, "nvfp4", minus("bf16", right_at("1", "lenient"))).value)
    ratio = mean_of(units, "nvfp4", log_over("bf16", entropy_at("1")))
    assert ratio.value == pytest.approx(math.log(1.2) / 3)
    assert mean_of(units, "nvfp4", dose(2, "entropy")).value == pytest.approx(math.log(1.2))
    assert mean_of(units, "bf16", dose(1, "accuracy")).value == pytest.approx(-0.1)
    one = mean_of(units[:1], "nvfp4", minus("bf16", right_at("1")))  # over questions: 0, 0, -1/2
    assert one.value == pytest.approx(-1 / 6) and one.n == 1 and one.stderr == pytest.approx(1 / 6)


def test_what_formats_are_worth_as_drafts_is_shown_over_units_where_it_was_measured() -> None:
    units = copies()
    plain = markdown(units)
    accepted = {"bf16": [[4, 6]] * 3, "nvfp4": [[3, 5], [4, 5], [3, 4]]}  # of 10 tokens
    for quant, each in accepted.items():
        for one, sums in zip(units, each, strict=True):
            one["formats"][quant]["draft"] = {"tokens": [4, 6], "accepted": sums, "verifications": [1, 3]}
    page = markdown(units)
    mean = mean_ci([0.8, 0.9, 0.7])
    assert page is not None and f"| {mean.text('{:.4f}'.format)} | 2.5000 |" in page and "| 1.0000 | 2.5000 |" in page
    assert plain is not None and "as a draft" in page and "as a draft" not in plain


def test_models_are_never_averaged_and_copies_only_with_those_of_their_size() -> None:
    models = [unit(["model=hub", f"model.id={name}"], {"bf16": [1]}, {"bf16": 0.5}) for name in ("a/b", "c/d")]
    assert [*groups(models)] == ["a/b", "c/d"]
    assert [len(one) for one in groups(copies()).values()] == [3]
    page = markdown(models)
    assert page is not None and "## a/b (1)" in page and "## c/d (1)" in page and figures(models) == {}


def test_copies_in_several_sizes_are_extrapolated_where_all_sizes_have_them() -> None:
    def copy(seed: int, scale: float) -> dict[str, Any]:
        rise = math.exp(0.1 * seed + 0.02 * (1 + scale))
        words = [f"model.dither={seed}", f"model.dither_scale={scale}"]
        return unit(words, {"bf16": [1, 2], "nvfp4": [1, 1]}, {"bf16": 0.5, "nvfp4": 0.5 * rise})

    probes = [copy(seed, scale) for scale in (4, 1, 2) for seed in (1, 2)] + [copy(3, 4)]
    scaled = by_scale(probes)
    assert [*scaled] == [1.0, 2.0, 4.0] and all([*one] == ["1", "2"] for one in scaled.values())
    found = without_error(scaled, "nvfp4", log_over("bf16", entropy_at("1")))
    assert found["linear"].value == pytest.approx(0.15) and found["quadratic"].value == pytest.approx(0.15)
    page = markdown(probes)
    assert page is not None and "extrapolated to -1" in page and f"x{math.exp(0.15):.3f}" in page
    level = next(line for line in page.splitlines() if line.startswith("| bf16 | entropy at 1 |"))
    assert level.count("| 0.500 ") == 3 + 2 and "[" not in level  # nothing varies
    assert by_scale(copies()) == {} and [*figures(probes)] == ["probes_dither"]


def test_the_page_has_every_format_and_the_figure_every_panel() -> None:
    page = markdown(copies())
    assert page is not None and page.count("| nvfp4 |") == 4 + 2 and "x1.063" in page
    (figure,) = (draw() for draw in figures(copies()).values())
    assert [ax.get_title(loc="left") for ax in figure.axes] == [
        "right answers", "entropy at temperature 1", "entropy with noise", "right answers with noise",
    ]  # fmt: skip
    assert markdown([{"base": 0, "formats": {"bf16": {"correct": [1], "samples": 2, "entropy": 0.5}}}]) is None


def test_a_copy_for_which_no_dose_was_found_has_a_row_without_numbers() -> None:
    units = copies()
    found = {"sigma": 0.1, "rise": 0.2, "kl": 0.03, "entropy": 0.6, "tried": [[0.1, 0.2]]}
    units[0]["doses"] = {"noisy": {"sigma": None, "tried": [[0.1, -0.2]]}}
    units[1]["doses"] = {"noisy": found}
    page = markdown(units)
    assert page is not None and "| model.dither=1 | noisy | none found | - | - |" in page
    assert "| model.dither=2 | noisy | 0.1 | x1.200 | 0.0300 |" in page


def test_a_format_is_compared_over_the_units_that_have_it() -> None:
    units = copies()
    for quant in ("nf4", "mxfp4"):
        units[1]["formats"][quant] = units[1]["formats"]["nvfp4"]
    del units[0]["formats"]["nvfp4"]
    gap, expected = mean_of(units, "nvfp4", minus("bf16", right_at("1"))), mean_ci([2 / 6 - 3 / 6, 5 / 6 - 4 / 6])
    assert [gap.value, gap.low, gap.n] == pytest.approx([expected.value, expected.low, 2])
    assert mean_of(units, "nf4", log_over("bf16", entropy_at("1"))).value == 0
    page, (figure,) = markdown(units), (draw() for draw in figures(units).values())
    assert page is not None and "| bf16 | 3 | 1 |" in page and "| nvfp4 | 2 | 1 |" in page and "| nf4 | 1 | 1 |" in page
    assert any("nf4 of 1" in text.get_text() for text in figure.texts)


def probed() -> dict[str, Any]:
    """What probe.json holds of one model, asked in two weight formats."""
    formats = unit([], {"bf16": [2, 0, 1], "nvfp4": [2, 0, 0]}, {"bf16": 0.5, "nvfp4": 0.6})["formats"]
    for one in formats.values():
        one |= {"tokens_per_s": 9.0, "weights_gib": 0.1, "memory_gib": 1.0, "norm_scale": 0.25}
    return {
        "model": "a/<b>", "task": "arithmetic", "words": [], "options": {"questions": 3, "split": "train"}, "group": 2,
        "max_completion_tokens": 8, "answer_format": "boxed", "answer_formats": {}, "formats": formats,
        "environment": {"gpu": None, "cpu": "x"}, "advice": ["task.answer_format=boxed"], "prompt": "<|user|>How?",
    }  # fmt: skip


def answered(quant: str, temperature: float, sample: int, text: str | None) -> dict[str, Any]:
    return {
        "quant": quant, "answer_format": "boxed", "temperature": temperature, "sample": sample, "completion": text,
        "question": "q", "correct": True, "lenient": False, "answer": "1", "finished": False, "tokens": 3,
    }  # fmt: skip


def test_the_page_of_a_model_has_advice_prompt_tables_a_drawing_and_answers() -> None:
    rows = [
        answered("bf16", 1.0, 0, "hot"),
        answered("bf16", 0.0, 0, "</div>greedy"),
        answered("bf16", 0.0, 1, "second"),
        answered("nvfp4", 0.0, 0, "other"),
        answered("bf16", 0.0, 0, None),
    ]
    assert [row["completion"] for row in shown(probed(), rows)] == ["</div>greedy"]
    page = model_page(probed(), rows)
    for part in (
        "Probe of a/&lt;b&gt;",
        "task.answer_format=boxed",
        "&lt;|user|&gt;How?",
        "<svg",
        "&lt;/div&gt;greedy",
    ):
        assert part in page
    assert "<td>0.2</td><td>0.8</td>" in page  # sigma, and its share of the median scale
    assert page.count("<td>nvfp4</td>") == 1 + 1 + 3 and "http-equiv" not in page and "cut off; 3 tokens" in page
    assert "<h2>Answers" not in model_page(probed(), []).replace(' id="answers"', "")
