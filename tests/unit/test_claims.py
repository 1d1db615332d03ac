"""Verdicts on studies whose truth is known: composed configs with made-up numbers, effects of a given size."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import shlex
import zlib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf

from qerl_bench.config import build, compose
from qerl_bench.errors import BadInput
from qerl_bench.results.contrasts import METHODS, QUANTIZERS, RATES
from qerl_bench.results.judge import Judgement, Result, judge
from qerl_bench.results.load import Run, load_runs
from qerl_bench.results.match import match
from qerl_bench.results.paper import CLAIMS
from qerl_bench.results.report import Heading, markdown, page, report, summary
from qerl_bench.results.stats import holm

STEPS, QUESTIONS = 40, 60
TITLES = {claim.title: claim for claim in CLAIMS}
ENTROPY, GROWTH, ACCURACY, AQN, DECAY, RANK, RATE, NF4, SFT, ROLLOUT, STEP, MEMORY = TITLES
SEEDS = (0, 1, 2, 3, 4)

Study = Callable[..., list[Run]]


def numbers(seed: int, entropy: float, reward: float, speed: float, memory: float) -> list[dict[str, Any]]:
    """Reward climbs to 0.5 + `reward`; what seeds have in common, and what they do not, is the same in every arm."""
    jitter = np.random.default_rng(seed).normal(size=STEPS + 1)
    return [
        {
            "kind": "train", "step": step, "reward/mean": 0.5 * (step / STEPS) ** 0.5 + reward + 0.05 * jitter[step],
            "entropy": 0.2 * entropy * math.exp(0.1 * jitter[0] - step / STEPS), "time/step_s": 2.0 / speed,
            "speed/rollout_tok_s": 1000.0 * speed, "memory/peak_gib": 10.0 * memory + step / 100,
        }
        for step in range(1, STEPS + 1)
    ]  # fmt: skip


@cache
def composed(make_config: Callable[..., Any], *overrides: str) -> tuple[str, str]:
    """Name and YAML of a setting."""
    config = make_config("eval=task", "steps=40", *overrides)
    return config["name"], OmegaConf.to_yaml(config)


@pytest.fixture
def study(tmp_path: Path, make_config: Callable[..., Any]) -> Study:
    """study(("quant=nvfp4",), entropy=1.05, ...) adds five runs of one setting and returns all runs written so far.

    Numbers differ between seeds by much and, for equal effects, between arms by `spread` alone.
    """
    place = tmp_path / "runs"

    def add(
        overrides: Iterable[str] = (), seeds: Iterable[int] = SEEDS, spread: float = 0.002, accuracy: float = 0.0,
        device: str = "cpu", finished: bool = True, asked: str = "q", **effects: float,
    ) -> list[Run]:  # fmt: skip
        name, text = composed(make_config, *overrides)
        own = np.random.default_rng(zlib.crc32(" ".join([*overrides]).encode()))
        for seed in seeds:
            folder = place / f"{name.replace('-s0-', f'-s{seed}-')}-{device}"
            folder.mkdir(parents=True)
            changed = text.replace(f"\nname: {name}\n", f"\nname: {folder.name}\n")
            (folder / "config.yaml").write_text(changed.replace("\nseed: 0\n", f"\nseed: {seed}\n"))
            noise = own.normal(size=3)
            sizes = {"entropy": 1.0, "reward": 0.0, "speed": 1.0, "memory": 1.0} | effects
            sizes["entropy"] *= math.exp(spread * noise[0])
            sizes["reward"] += spread * noise[1]
            sizes["speed"] *= math.exp(spread * noise[0])
            sizes["memory"] *= math.exp(spread * noise[0])
            lines = numbers(seed, **sizes)
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            (folder / "env.json").write_text(json.dumps({"code": "1f", "device": device, "gpu": device}))
            common = np.random.default_rng(seed).uniform(size=(QUESTIONS, 4))
            right = common < 0.5 + accuracy + 0.2 * spread * noise[2]
            questions = [f"{asked}{question:02d}" for question in range(QUESTIONS) for _ in range(4)]
            rows = {"mode": "sampled", "question": questions, "step": STEPS, "correct": right.ravel()}
            pd.DataFrame(rows).to_parquet(folder / "samples.parquet")
            if finished:
                (folder / "done.json").write_text("{}")
        return load_runs([place])

    return add


def verdicts(runs: list[Run]) -> dict[str, Judgement]:
    return {judgement.claim.title: judgement for judgement in judge(CLAIMS, runs)}


def only(judgement: Judgement) -> Result:
    """The result of the matched contrast."""
    (result,) = [result for result in judgement.results if not result.contrast.confounded]
    return result


def test_a_claim_is_supported_by_all_its_contrasts_and_contradicted_by_any(study: Study) -> None:
    study(["quant=bf16"])
    study(["quant=nvfp4"], entropy=1.06)
    found = verdicts(study(["quant=mxfp4"], entropy=1.06))[ENTROPY]
    assert [(r.verdict, r.reason) for r in found.results] == [
        ("supported", ""), ("supported", ""), ("undecided", "no runs"),
    ]  # fmt: skip
    assert found.verdict == "undecided"
    assert found.results[0].effect is not None
    assert math.exp(found.results[0].effect.mean) == pytest.approx(1.06, abs=0.004)
    found = verdicts(study(["quant=nf4", "model.hidden_size=64"], entropy=1.06))[ENTROPY]
    assert found.results[2].reason == "no runs"  # a model of another width has no counterpart
    assert verdicts(study(["quant=nf4"], entropy=1.0))[ENTROPY].verdict == "contradicted"


@pytest.mark.parametrize(
    ("effect", "spread", "verdict", "reason"),
    [
        (0.05, 0.002, "supported", ""),
        (0.01, 0.002, "supported", "there, but smaller than what would matter"),
        (0.0, 0.002, "contradicted", "no effect that would matter"),
        (-0.05, 0.002, "contradicted", "the reverse"),
        (0.02, 0.2, "undecided", "too few seeds for this spread"),
    ],
)
def test_faster_growth(study: Study, effect: float, spread: float, verdict: str, reason: str) -> None:
    study(["quant=bf16"], spread=spread)
    result = only(verdicts(study(["quant=nvfp4"], reward=effect, spread=spread))[GROWTH])
    assert (result.verdict, result.reason) == (verdict, reason)


def test_accuracy_is_paired_by_seed_and_question(study: Study) -> None:
    """The same uniform numbers decide both arms, so the gain of ten points is seen although questions differ a lot."""
    study(["quant=nvfp4"])
    found = verdicts(study(["quant=nvfp4", "aqn=exp"], accuracy=0.1))
    result = only(found[AQN])
    assert result.verdict == "supported" and result.questions == QUESTIONS
    assert result.effect is not None and result.effect.mean == pytest.approx(0.1, abs=0.02)
    assert only(found[ACCURACY]).reason == "no runs"


def test_what_differs_in_more_than_the_factor_is_not_compared(study: Study) -> None:
    study(["quant=bf16", "rollout.temperature=1.1"])
    runs = study(["quant=nvfp4"], entropy=2.0)
    assert verdicts(runs)[ENTROPY].results[0].reason == "no runs"
    contrast, where = TITLES[ENTROPY].contrasts[0], TITLES[ENTROPY].where
    (stratum,) = match(contrast, where, study(["quant=bf16"]))
    treated, control = (arm[3].config for arm in stratum.arms)
    assert {key for key in treated if treated[key] != control[key]} == {"quant", "name"}
    assert all(sorted(arm) == list(SEEDS) for arm in stratum.arms)


def test_an_incomplete_grid_is_not_compared_and_its_missing_runs_are_listed(study: Study) -> None:
    """A run that is not finished is missing too."""
    study(["quant=bf16"], seeds=(0, 1, 2, 3))
    study(["quant=nvfp4"], seeds=(0, 1, 2, 4))
    runs = study(["quant=nvfp4"], seeds=(3,), finished=False)
    result = verdicts(runs)[ENTROPY].results[0]
    assert result.effect is None and result.verdict == "undecided"
    assert result.reason == "incomplete grid, not compared; missing: nvfp4 seed=3; bf16 seed=4"
    assert "nvfp4-none-grpo-r4-s3" in markdown(report({"": judge(CLAIMS, runs)}, runs)).split("left out (1): ")[1][:40]


def test_a_single_seed_wins_nothing(study: Study) -> None:
    study(["quant=bf16"], seeds=[0])
    runs = study(["quant=nvfp4"], seeds=[0], entropy=3.0, accuracy=0.4)
    found = verdicts(runs)
    for result in (found[ENTROPY].results[0], only(found[ACCURACY])):
        assert (result.verdict, result.reason) == ("undecided", "a single seed decides nothing")
        assert math.isnan(result.p_for) and math.isnan(result.p_against)  # nor does it count among the tests
    text = markdown([summary(list(found.values()))])
    assert re.search(r"×(2\.9|3\.0)", text) and text.count("(a single seed)") == 3  # entropy, growth, accuracy


def test_seeds_that_all_gave_the_same_decide_nothing(study: Study) -> None:
    """Runs that are copies of one run have no spread, which is no certainty."""
    for quant in ("bf16", "nvfp4"):
        runs = study([f"quant={quant}"])
        originals = {run.option("quant.name"): run for run in runs if run.option("seed") == 0}
        for run in runs:
            for name in ("metrics.jsonl", "samples.parquet"):
                (run.path / name).write_bytes((originals[run.option("quant.name")].path / name).read_bytes())
    found = verdicts(load_runs([runs[0].path.parent]))
    for result in (found[ENTROPY].results[0], only(found[GROWTH]), only(found[ACCURACY])):
        assert result.effect is not None and result.effect.n == 5 and math.isnan(result.p_for)
        assert (result.verdict, result.reason) == (
            "undecided", "no spread over seeds: copies of a run, or a number that no seed moves?",
        )  # fmt: skip
    assert "(the same in all 5 seeds)" in markdown([summary(list(found.values()))])


def test_what_the_number_of_contrasts_takes_away_is_said(study: Study) -> None:
    study(["quant=bf16"], spread=0.01)
    result = verdicts(study(["quant=nvfp4"], spread=0.01, entropy=1.026))[ENTROPY].results[0]
    assert result.effect is not None and result.effect.p_above(0) < 0.025 < result.p_for
    assert result.reason == "supported if it were the only contrast, not after Holm's correction"


def test_methods_of_the_paper_are_shown_and_decide_nothing(study: Study) -> None:
    """The paper's LoRA has half the rate of its QeRL: what is seen may be the rate's."""
    paper = ["model.lr=1e-5", "steps=40"]
    study([*paper, "recipe=method/lora"])
    runs = study([*paper, "recipe=method/qerl"], reward=0.1, accuracy=0.1)
    found = verdicts(runs)[GROWTH]
    matched, nvfp4, qerl = found.results
    assert (matched.reason, nvfp4.reason, found.verdict) == ("no runs", "no runs", "undecided")
    assert qerl.verdict == "supported" and qerl.strata
    assert qerl.confounders == ["aqn.name (exp_paper / none)", "optim.lr (1e-05 / 5e-06)"]
    text = markdown(report({"qwen on gsm8k": judge(CLAIMS, runs)}, runs))
    assert "QeRL - LoRA, as published" in text and "NVFP4-LoRA - LoRA, as published" not in text
    assert "The arms also differ in aqn.name (exp_paper / none), optim.lr (1e-05 / 5e-06)" in text
    assert "run `python src/run.py experiment=paper/table1 recipe=method/lora,method/nvfp4 optim.lr=1e-5 -m`" in text
    runs = study([*paper, "recipe=method/lora", "optim.lr=1e-5"])
    runs = study([*paper, "recipe=method/nvfp4"], reward=-0.1)
    found = verdicts(runs)[GROWTH]
    assert [r.verdict for r in found.results] == ["contradicted", "contradicted", "supported"]
    assert found.verdict == "contradicted" and found.results[0].confounders == []
    assert [found.results[1].p_for, found.results[0].p_for] == pytest.approx([1.0, 1.0])


def test_the_methods_are_those_of_the_recipes() -> None:
    for name, recipe in (("QeRL", "qerl"), ("NVFP4-LoRA", "nvfp4"), ("QLoRA", "qlora"), ("LoRA", "lora")):
        config = compose(["experiment=paper/table1", f"recipe=method/{recipe}"])
        facts = {"quant.name": config.quant.name, "aqn.name": config.aqn.name}
        assert [other for other, where in METHODS.items() if all(w.holds(facts) for w in where)] == [name]
        assert config.optim.lr == RATES[name]
        assert name == "LoRA" or config.quantizer.name == QUANTIZERS[name]


def test_formats_packed_in_two_ways_are_not_the_methods_of_the_paper(study: Study) -> None:
    """A study of quantizers has matched pairs; any other pair of its arms was never published."""
    for quant in ("nf4", "nvfp4"):
        for quantizer in ("rtn", "mse"):
            runs = study([f"quant={quant}", f"quantizer={quantizer}"])
    matched, published = verdicts(runs)[NF4].results
    assert len(matched.parts) == 2 and published.reason == "no runs"
    published = verdicts(study(["quant=nvfp4", "quantizer=awq"]))[NF4].results[1]
    assert published.confounders == ["quantizer.name (rtn / awq)"]


def test_each_variant_meets_the_control_that_is_most_like_it(study: Study) -> None:
    """Before any update the rate is free to differ, but need not."""
    for lr in (3e-4, 1e-3):
        for quant in ("bf16", "nvfp4"):
            study([f"quant={quant}", f"optim.lr={lr}"])
    runs = study(["quant=nvfp4", "optim.lr=2e-4"])
    result = verdicts(runs)[ENTROPY].results[0]
    rates = [tuple(variant["optim.lr"] for variant in stratum.variants) for stratum in result.strata]
    assert sorted(rates) == [(2e-4, 3e-4), (2e-4, 1e-3), (3e-4, 3e-4), (1e-3, 1e-3)]


def test_the_setting_that_drives_an_average_is_named(study: Study) -> None:
    for rank, effect in ((4, 0.01), (8, 0.02), (16, 0.3)):
        for quant, reward in (("bf16", 0.0), ("nvfp4", effect)):
            runs = study([f"quant={quant}", f"lora.rank={rank}"], reward=reward, spread=0.0002)
    judged = judge(CLAIMS, runs)
    text = markdown(report({"tiny on arithmetic": judged}, runs))
    assert re.search(r"of the 3 settings, lora.rank=16 moves the average most; the others average to \+0\.01\d+", text)
    assert re.search(r"\| nvfp4 - bf16 \| lora.rank=16 \| 0\.6\d+ / 0\.3\d+ \| \+0\.(29|30)\d+ \[", text)
    assert "moves the average" not in text.split("### 3.")[1]  # nothing to say where settings agree within the margin
    assert re.search(r"\| \+0\.1[01]\d+ \[.*\] reward \| 5 \| 3 \(\+0\.0[01]\d+ to \+0\.[23]\d+\) \|", text)


def test_a_cpu_cannot_speak_for_a_gpu(study: Study) -> None:
    study(["quant=bf16"])
    found = verdicts(study(["quant=nvfp4"], speed=2.0, memory=0.5))
    for title in (ROLLOUT, STEP, MEMORY):
        assert found[title].results[0].reason == "10 matched runs, but on a CPU: they cannot speak for a GPU"
    study(["quant=bf16"], device="cuda", reward=0.1)
    runs = study(["quant=nvfp4"], speed=1.3, memory=0.5, device="cuda", reward=0.1)
    found = verdicts(runs)
    assert (only(found[STEP]).verdict, only(found[MEMORY]).verdict) == ("supported", "supported")
    effect = found[ROLLOUT].results[0].effect
    assert effect is not None and math.exp(effect.mean) == pytest.approx(1.3, abs=0.004)
    assert len(verdicts(runs)[GROWTH].results[0].strata) == 2  # one for each device, never across


@pytest.mark.parametrize(("memory", "verdict"), [(0.5, "supported"), (0.99, "supported"), (1.2, "contradicted")])
def test_peak_memory_that_no_seed_moves_is_known(study: Study, memory: float, verdict: str) -> None:
    """Speeds without spread are copies; bytes without spread are what an allocator counts."""
    study(["quant=bf16"], device="cuda", spread=0.0)
    found = verdicts(study(["quant=nvfp4"], speed=1.3, memory=memory, device="cuda", spread=0.0))
    known = only(found[MEMORY])
    assert known.effect is not None and known.effect.identical
    assert (known.verdict, known.p_for) == (verdict, 0.0 if verdict == "supported" else 1.0)
    assert (known.reason == "there, but smaller than what would matter") == (memory == 0.99)
    assert only(found[STEP]).verdict == "undecided"


@pytest.mark.parametrize(
    ("override", "excuse"),
    [
        ("steps=30", "of fewer than 40 steps, for speed alone: run longer ones"),
        ("eval=none", "without evaluation: run them with eval=task"),
    ],
)
def test_runs_that_cannot_speak_are_not_called_missing(study: Study, override: str, excuse: str) -> None:
    for quant in ("bf16", "nvfp4"):
        runs = study([f"quant={quant}", override], seeds=(0, 1))
    found = verdicts(runs)
    assert only(found[ACCURACY]).reason == f"4 matched runs, but {excuse}"
    assert only(found[AQN]).reason == "no runs"
    assert (only(found[GROWTH]).effect is not None) == (override == "eval=none")


def test_rank_matters_little_within_the_margin_and_much_outside_of_it(study: Study) -> None:
    study(["quant=nvfp4", "lora.rank=32"])
    study(["quant=nvfp4", "lora.rank=8"], reward=0.005)
    found = verdicts(study(["quant=nvfp4", "lora.rank=128"], reward=0.1))[RANK]
    assert [result.verdict for result in found.results] == ["supported", "contradicted"]
    assert found.verdict == "contradicted"
    assert [result.labels for result in found.results] == [("lora.rank=8 / 32",), ("lora.rank=128 / 32",)]


def test_a_higher_rate_is_judged_by_a_difference_of_differences(study: Study) -> None:
    """From ten times the rate NVFP4 gains 0.1 and BF16 loses 0.2; what three times does is not mixed in.

    Six times is a setting of its own: never one format at six times against the other at ten.
    """
    for quant, high in (("nvfp4", 0.1), ("bf16", -0.2)):
        for factor, reward in ((1, 0.0), (3, 0.7), (6, high), (10, high)):
            runs = study([f"quant={quant}", f"optim.lr={3e-4 * factor}"], reward=reward + 0.2 * (quant == "bf16"))
    result = only(verdicts(runs)[RATE])
    assert result.labels == ("optim.lr=0.0018", "optim.lr=0.003")
    assert result.effect is not None
    assert result.effect.mean == pytest.approx(0.3, abs=0.01) and result.verdict == "supported"


def test_a_format_is_never_packed_otherwise_at_the_high_rate_than_at_the_usual(study: Study) -> None:
    """Two quantizers are two settings, and not four: one at the high rate less the other at the usual is no rate."""
    for packed, reward in ((("quant=nvfp4",), 0.0), (("quant=nvfp4", "quantizer=mse"), 0.5), (("quant=bf16",), 0.0)):
        for factor, change in ((1, 0.0), (10, 0.1)):
            runs = study([*packed, f"optim.lr={3e-4 * factor}"], reward=reward + change)
    result = only(verdicts(runs)[RATE])
    assert len(result.parts) == 2
    assert [part.mean for part in result.parts] == pytest.approx([0.0, 0.0], abs=0.01)


def test_noise_of_two_strengths_is_two_settings_with_one_control(study: Study) -> None:
    study(["quant=nvfp4"])
    study(["quant=nvfp4", "aqn=exp"], accuracy=0.1)
    result = only(verdicts(study(["quant=nvfp4", "aqn=exp", "aqn.sigma_start=0.05"], accuracy=-0.1))[AQN])
    assert sorted(result.labels) == ["aqn.sigma_start=0.01", "aqn.sigma_start=0.05"]
    by_label = {label: part.mean for label, part in zip(result.labels, result.parts, strict=True)}
    assert by_label["aqn.sigma_start=0.01"] > 0.05 and by_label["aqn.sigma_start=0.05"] < -0.05
    assert result.effect is not None and abs(result.effect.mean) < 0.03


def test_schedules_differ_in_their_shape_alone(study: Study) -> None:
    for aqn, reward in (("exp", 0.1), ("linear", 0.0), ("cosine", 0.0), ("log", 0.1)):
        runs = study(["quant=nvfp4", f"aqn={aqn}"], reward=reward)
    found = verdicts(runs)[DECAY]
    assert [result.verdict for result in found.results] == ["supported", "supported", "contradicted"]
    changed = study(["quant=nvfp4", "aqn=linear", "aqn.sigma_end=0.001"], reward=9.0)
    assert verdicts(changed)[DECAY].results[0].effect == found.results[0].effect


def test_settings_with_the_same_numbers_are_one(study: Study) -> None:
    """Neither rank nor rate moves the policy before its first update: 6 % counts once, and not thrice against 2 %."""
    for quant, entropy in (("bf16", 1.0), ("nvfp4", 1.06)):
        for change in ("lora.rank=8", "lora.rank=32", "optim.lr=1e-3"):
            study([f"quant={quant}", change], entropy=entropy, spread=0.0)
    study(["quant=bf16", "algo=dapo"])
    found = verdicts(study(["quant=nvfp4", "algo=dapo"], entropy=1.02))
    result = found[ENTROPY].results[0]
    assert sorted(math.exp(part.mean) for part in result.parts) == pytest.approx([1.02, 1.06], abs=0.004)
    assert result.effect is not None and math.exp(result.effect.mean) == pytest.approx(1.04, abs=0.003)
    assert len(result.strata) == len(result.labels) == len(result.levels) == 2
    assert sorted(label.partition(" and ")[2] for label in result.labels) == ["", "2 more with the same numbers"]


def test_claims_of_less(study: Study) -> None:
    study(["quant=nvfp4"])
    study(["quant=nf4"], accuracy=-0.1)
    study(["quant=bf16", "algo=sft"])
    study(["quant=nvfp4", "algo=sft"], accuracy=-0.1)
    found = verdicts(study(["quant=nf4", "algo=sft"], accuracy=0.1))
    assert only(found[NF4]).verdict == "supported"
    assert [(r.verdict, r.reason) for r in found[SFT].results] == [("supported", ""), ("contradicted", "the reverse")]


def test_p_values_are_adjusted_over_the_whole_report(study: Study) -> None:
    study(["quant=bf16"])
    study(["quant=nf4"])
    found = judge(CLAIMS, study(["quant=nvfp4"], entropy=1.003, reward=0.002, accuracy=0.05))
    tested = [r for judgement in found for r in judgement.results if r.effect]
    assert len(tested) == 5  # entropy twice, growth, accuracy, NF4
    signs = [
        -1 if judgement.claim.expected == "less" else 1 for judgement in found for r in judgement.results if r.effect
    ]
    raw = [r.effect.p_above(0) if sign > 0 else r.effect.p_below(0) for r, sign in zip(tested, signs, strict=True)]
    assert [r.p_for for r in tested] == pytest.approx(holm(raw).tolist())


def test_runs_without_a_number_are_named(study: Study, tmp_path: Path) -> None:
    study(["quant=bf16"])
    runs = study(["quant=nvfp4"])
    for run in runs[:2]:
        file = run.path / "metrics.jsonl"
        file.write_text(file.read_text().replace('"entropy"', '"entropi"'))
    with pytest.raises(BadInput) as error:
        judge(CLAIMS, load_runs([tmp_path / "runs"]))
    assert "in 2 of these runs" in str(error.value)
    assert all(f"{run.name} has no number of the metric entropy" in str(error.value) for run in runs[:2])


def test_different_questions_are_not_paired(study: Study) -> None:
    study(["quant=bf16"])
    with pytest.raises(BadInput, match=r"different questions: bf16-none.*nvfp4-none"):
        judge(CLAIMS, study(["quant=nvfp4"], asked="other"))


def test_settings_with_different_questions_are_not_averaged(study: Study) -> None:
    for rate, asked in ((3e-4, "q"), (1e-3, "other")):
        for quant in ("bf16", "nvfp4"):
            runs = study([f"quant={quant}", f"optim.lr={rate}"], asked=asked)
    with pytest.raises(BadInput, match=r"Higher final accuracy.*different questions"):
        judge(CLAIMS, runs)


def test_two_runs_of_one_setting_and_seed_are_refused(study: Study) -> None:
    study(["quant=nvfp4"])
    with pytest.raises(BadInput, match="two runs of one setting and seed"):
        judge(CLAIMS, study(["quant=nvfp4", "name=again-s0-x"]))


def test_the_report_says_what_was_compared_and_what_to_run(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    study(["quant=bf16"])
    runs = study(["quant=nvfp4"], entropy=1.06)
    root = runs[0].path.parent
    spec = importlib.util.spec_from_file_location(
        "analysis_claims", Path(__file__).parents[2] / "analysis" / "claims.py"
    )
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main([str(root), "--out", str(root.parent / "out")])
    assert "tiny on arithmetic" in capsys.readouterr().out
    text, html = ((root.parent / "out" / f"claims.{kind}").read_text() for kind in ("md", "html"))
    assert re.search(r"\| nvfp4 - bf16 \| ×1\.0[56]\d \[.*\] \| 5 seeds \|.*\*\*supported\*\*", text)
    assert "nvfp4-none-grpo-r4-s{0,1,2,3,4}-" in text and "run `python src/run.py experiment=tiny/ranks -m`" in text
    for claim in CLAIMS:
        assert claim.title in text and claim.paper in text and claim.source[1:] in text
    assert not re.search(r"""(src|href)=["'](?!data:)|@import|<link|<script""", html)  # nothing beside it
    assert "| < 0.001 |" in text and "<td>&lt; 0.001</td>" in html
    assert html.count("<img") == 3 and "**" not in re.sub(r'src="[^"]*"', "", html)
    blocks = report({"tiny on arithmetic": judge(CLAIMS, runs)}, runs)
    assert (markdown(blocks), page(blocks)) == (text, html)
    assert sum(isinstance(block, Heading) and block.level == 3 for block in blocks) == len(CLAIMS)


@pytest.mark.parametrize("command", sorted({claim.command for claim in CLAIMS} | {claim.at_scale for claim in CLAIMS}))
def test_what_to_run_can_be_run(command: str) -> None:
    python, script, *words = shlex.split(command)
    assert (python, script) == ("python", "src/run.py") and "-m" in words
    build(compose([word.split(",")[0] for word in words if word != "-m"]))
