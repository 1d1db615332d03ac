"""Verdicts on studies whose truth is known: composed configs with made-up numbers, effects of a given size."""

from __future__ import annotations

import math
import re
import shlex
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from omegaconf import OmegaConf

from qerl_bench.config import build, compose
from qerl_core.checks import ConfigError
from qerl_core.options.fingerprint import as_dict, flat
from qerl_core.statistics import holm
from qerl_studies.claims.claim import ClaimResult, ContrastResult
from qerl_studies.claims.evaluate import evaluate_claims
from qerl_studies.claims.match import all_accept, match
from qerl_studies.claims.preconditions import diverged
from qerl_studies.claims.registry import QERL, claims_of
from qerl_studies.commands import claims as command
from qerl_studies.figures.forest import all_claims, svg
from qerl_studies.report.claims_page import markdown, summary_text
from qerl_studies.report.study_page import evaluated, study_page
from qerl_studies.runs.comparable import load_runs
from qerl_studies.runs.load import Run
from tests.run_folders import write_run

ROOT = Path(__file__).parents[2]
CLAIMS = claims_of(QERL)
STEPS, QUESTIONS = 40, 60
TITLES = {claim.title: claim for claim in CLAIMS}
ENTROPY, GROWTH, ACCURACY, AQN, DECAY, RANK, RATE, NF4, SFT, ROLLOUT, STEP, MEMORY, FULL = TITLES
SEEDS = (0, 1, 2, 3, 4)
PACKAGES = {"torch": "2.13.0"}

Study = Callable[..., list[Run]]


def numbers(seed: int, n: dict[str, float]) -> list[dict[str, Any]]:
    """Reward climbs to 0.5 + `reward`; what seeds have in common, and what they do not, is the same in every arm.

    `late` moves the reward of the last fifth alone; `fall` takes accuracy down again from its best in the middle;
    `noisy` multiplies the entropy from the second tenth on.
    """
    jitter = np.random.default_rng(seed).normal(size=STEPS + 1)
    lines = []
    for step in range(1, STEPS + 1):
        fell = n["fall"] * max(0.0, step / STEPS - 0.5) * 2
        lines.append(
            {
                "kind": "train", "step": step,
                "reward/mean": 0.5 * (step / STEPS) ** 0.5 + n["reward"] + n["late"] * (step > 0.8 * STEPS)
                + 0.05 * jitter[step],
                "accuracy": n["start"] + n["rise"] * step / STEPS - fell,
                "entropy": 0.2 * n["entropy"] * (n["noisy"] if step > 0.1 * STEPS else 1.0)
                * math.exp(0.1 * jitter[0] - step / STEPS),
                "time/step_s": 2.0 / n["speed"], "speed/rollout_tok_s": 1000.0 * n["speed"],
                "memory/peak_gib": 10.0 * n["memory"] + step / 100, "train/taught_frac": n["taught"],
            }
        )  # fmt: skip
    return lines


@cache
def composed(make_config: Callable[..., Any], *overrides: str) -> tuple[str, str]:
    """Name and YAML of a setting."""
    config = make_config("eval=task", "steps=40", "lora.rank=32", "lora.alpha=32", *overrides)
    return config["name"], OmegaConf.to_yaml(config)


@pytest.fixture
def study(tmp_path: Path, make_config: Callable[..., Any]) -> Study:
    """study(("quant=nvfp4",), entropy=1.05, ...) adds five runs of one setting and returns all runs written so far.

    Numbers differ between seeds by much and, for equal effects, between arms by `spread` alone.
    """
    place = tmp_path / "runs"
    written: list[Run] = []

    def add(
        overrides: Iterable[str] = (), seeds: Iterable[int] = SEEDS, spread: float = 0.002, accuracy: float = 0.0,
        device: str = "cpu", finished: bool = True, asked: str = "q", packages: dict[str, str] = PACKAGES,
        drop: Iterable[str] = (), greedy: float | None = None, **effects: float,
    ) -> list[Run]:  # fmt: skip
        name, text = composed(make_config, *overrides)
        own = np.random.default_rng(zlib.crc32(" ".join([*overrides]).encode()))
        folders = {seed: place / f"{name.replace('-s0-', f'-s{seed}-')}-{device}" for seed in seeds}
        for seed, folder in folders.items():
            changed = text.replace(f"\nname: {name}\n", f"\nname: {folder.name}\n")
            changed = changed.replace("\nseed: 0\n", f"\nseed: {seed}\n")
            noise = own.normal(size=3)
            sizes = {"entropy": 1.0, "reward": 0.0, "late": 0.0, "speed": 1.0, "memory": 1.0, "noisy": 1.0}
            sizes |= {"start": 0.3, "rise": 0.4, "fall": 0.0, "taught": 1.0} | effects
            sizes["entropy"] *= math.exp(spread * noise[0])
            sizes["reward"] += spread * noise[1]
            sizes["speed"] *= math.exp(spread * noise[0])
            sizes["memory"] *= math.exp(spread * noise[0])
            lines = [{k: v for k, v in line.items() if k not in drop} for line in numbers(seed, sizes)]
            lines += [{"kind": "eval", "step": 0, "eval/accuracy_sampled": 0.3}]
            also = {} if greedy is None else {"eval/accuracy_greedy": 0.7}
            lines += [{"kind": "eval", "step": STEPS, "eval/accuracy_sampled": 0.7, **also}]
            environment = {"code": "1f", "device": device, "gpu": device, "packages": packages}
            common = np.random.default_rng(seed).uniform(size=(QUESTIONS, 4))
            right = common < 0.5 + accuracy + 0.2 * spread * noise[2]
            questions = [f"{asked}{question:02d}" for question in range(QUESTIONS) for _ in range(4)]
            rows = {"mode": "sampled", "question": questions, "step": STEPS, "correct": right.ravel()}
            answers = [pd.DataFrame(rows)]
            if greedy is not None:
                best = common < 0.5 + greedy + 0.2 * spread * noise[0]
                answers.append(answers[0].assign(mode="greedy", correct=best.ravel()))
            write_run(folder, changed, lines, {"wall_s": 60.0} if finished else None, environment, pd.concat(answers))
        written.extend(load_runs(folders.values()))
        return sorted(written, key=lambda run: run.path)

    return add


def verdicts(runs: list[Run]) -> dict[str, ClaimResult]:
    return {result.claim.title: result for result in evaluate_claims(CLAIMS, runs)}


def only(result: ClaimResult) -> ContrastResult:
    """The result of the first contrast that votes."""
    return result.voting[0]


def effect(result: ContrastResult) -> float:
    assert result.primary is not None and result.primary.effect is not None
    return result.primary.effect.whole.value


# --- words -----------------------------------------------------------------------------------------------------------


def test_a_claim_is_supported_by_all_its_contrasts_and_reversed_by_any(study: Study) -> None:
    study(["quant=bf16"])
    study(["quant=nvfp4"], entropy=1.06)
    found = verdicts(study(["quant=mxfp4"], entropy=1.06))[ENTROPY]
    assert [result.status for result in found.voting] == [None, None, "incomplete"]
    assert (found.verdict, found.reason) == ("incomplete", "no runs of nf4")
    assert math.exp(effect(found.contrasts[0])) == pytest.approx(1.06, abs=0.004)
    runs = study(["quant=nf4", "model.hidden_size=64"], entropy=1.06)
    assert verdicts(runs)[ENTROPY].verdict == "incomplete"  # a model of another width has no counterpart
    wide = ["model.hidden_size=64", "model.intermediate_size=64"]
    study([*wide, "quant=bf16", "model.layers=1"])
    for quant, size in (("nvfp4", 1.06), ("mxfp4", 1.06), ("nf4", 0.94)):
        runs = study([*wide, f"quant={quant}", "model.layers=1"], entropy=size)
    runs = [run for run in runs if run.option("model.layers") == 1]
    assert verdicts(runs)[ENTROPY].verdict == "reversed"


@pytest.mark.parametrize(
    ("size", "spread", "verdict", "reason"),
    [
        (0.05, 0.002, "supported", ""),
        (0.02, 0.002, "supported", "whether by as much as the margin is open"),
        (0.01, 0.002, "supported but negligible", ""),
        (0.0, 0.002, "negligible", ""),
        (-0.01, 0.002, "reversed but negligible", ""),
        (-0.05, 0.002, "reversed", ""),
        (0.02, 0.2, "undecided", ""),
    ],
)
def test_faster_growth(study: Study, size: float, spread: float, verdict: str, reason: str) -> None:
    study(["quant=bf16"], spread=spread)
    found = verdicts(study(["quant=nvfp4"], reward=size, spread=spread))[GROWTH]
    assert (found.verdict, found.reason) == (verdict, reason)
    assert found.detectable > 0 and (found.detectable > TITLES[GROWTH].measure.margin) == (spread == 0.2)


def test_undecided_says_what_could_have_been_found_and_how_many_seeds_would_find_the_margin(study: Study) -> None:
    study(["quant=bf16"], spread=0.05)
    runs = study(["quant=nvfp4"], spread=0.05)
    found = verdicts(runs)[GROWTH]
    setting = only(found).primary
    assert found.verdict == "undecided" and found.needed is not None and setting is not None and setting.effect
    mean, level = setting.effect.whole, 0.025 / sum(not math.isnan(one.p_direction) for one in verdicts(runs).values())
    enough, fewer = mean.with_repetitions(found.needed), mean.with_repetitions(found.needed - 1)
    assert enough.detectable(level) <= TITLES[GROWTH].measure.margin < fewer.detectable(level)
    text = markdown({"tiny on arithmetic": evaluate_claims(CLAIMS, runs)}, runs)
    assert f"one of 0.0200 reward would need {found.needed} seeds" in text


def test_accuracy_is_paired_by_seed_and_question(study: Study) -> None:
    """The same uniform numbers decide both arms, so the gain of ten points is seen although questions differ a lot."""
    study(["quant=bf16"])
    found = verdicts(study(["quant=nvfp4"], accuracy=0.1))[ACCURACY]
    setting = only(found).primary
    assert setting is not None and setting.effect is not None
    assert (found.verdict, setting.effect.questions) == ("supported", QUESTIONS)
    assert effect(only(found)) == pytest.approx(0.1, abs=0.02)


def test_holm_runs_over_claims_and_not_over_the_contrasts_of_one(study: Study) -> None:
    """All formats must show it: the largest of three p-values, which needs no correction. Any may reverse it: three."""
    study(["quant=bf16", "model.hidden_size=64"])
    for quant in ("nf4", "mxfp4"):
        study([f"quant={quant}", "model.hidden_size=64"], entropy=1.003)
    found = evaluate_claims(
        CLAIMS, study(["quant=nvfp4", "model.hidden_size=64"], entropy=1.003, reward=0.002, accuracy=0.05)
    )
    raw = []
    for one in found:
        means = [result.primary.effect.whole for result in one.voting if result.primary and result.primary.effect]
        if len(means) < len(one.voting):
            raw.append(math.nan)
            continue
        sides = [(mean.p_above(0), mean.p_below(0))[:: -1 if one.claim.expected == "less" else 1] for mean in means]
        forward, back = max(side[0] for side in sides), min(1.0, len(means) * min(side[1] for side in sides))
        raw.append(min(1.0, 2 * min(forward, back)))
    assert sum(not math.isnan(p) for p in raw) == 4  # entropy, growth, accuracy, NF4
    assert [one.p_direction for one in found] == pytest.approx(holm(raw).tolist(), nan_ok=True)


def test_a_claim_without_a_primary_contrast_is_refused() -> None:
    for change in ({"primary": ()}, {"contrasts": TITLES[GROWTH].contrasts[1:]}):
        with pytest.raises(ConfigError, match=rf"{GROWTH}.*primary"):
            replace(TITLES[GROWTH], **change)


def test_claims_of_less(study: Study) -> None:
    wide = ["model.hidden_size=64"]
    study([*wide, "quant=nvfp4"])
    study([*wide, "quant=nf4"], accuracy=-0.1)
    study([*wide, "quant=bf16", "algo=sft"])
    study([*wide, "quant=nvfp4", "algo=sft"], accuracy=-0.1)
    found = verdicts(study([*wide, "quant=nf4", "algo=sft"], accuracy=0.1))
    assert (found[NF4].verdict, found[SFT].verdict) == ("supported", "reversed")


def test_rank_matters_little_within_the_margin_and_much_outside_of_it(study: Study) -> None:
    wide = ["quant=nvfp4", "model.hidden_size=64", "model.intermediate_size=64"]
    study([*wide, "lora.rank=32"])
    study([*wide, "lora.rank=16"], reward=0.005)
    study([*wide, "lora.rank=64", "lora.alpha=64"], reward=0.1)
    found = verdicts(study([*wide, "lora.rank=8"], reward=0.1))[RANK]
    lacking = "no runs in the primary setting, which lacks rank 64 with lora.alpha=32 (there: 64)"
    assert (found.verdict, found.voting[1].reason) == ("incomplete", lacking)
    assert verdicts(study([*wide, "lora.rank=64"], reward=0.004))[RANK].verdict == "supported"  # 8 has no vote
    study([*wide, "lora.rank=32", "model.layers=1"])
    study([*wide, "lora.rank=16", "model.layers=1"])
    runs = study([*wide, "lora.rank=64", "model.layers=1"], reward=0.1)
    assert verdicts([run for run in runs if run.option("model.layers") == 1])[RANK].verdict == "reversed"


# --- the primary setting ---------------------------------------------------------------------------------------------


def test_only_the_primary_setting_votes(study: Study) -> None:
    """Whatever another rank, rate or algorithm does: it is shown, and moves nothing."""
    study(["quant=bf16"])
    study(["quant=nvfp4"])
    for change in ("lora.rank=8", "optim.lr=1e-3", "algo=dapo"):
        study(["quant=bf16", change])
        runs = study(["quant=nvfp4", change], reward=9.0)
    found = verdicts(runs)[GROWTH]
    assert found.verdict == "negligible" and effect(only(found)) == pytest.approx(0.0, abs=0.01)
    assert [setting.effect.whole.value for setting in only(found).others if setting.effect] == pytest.approx(
        [9.0, 9.0, 9.0], abs=0.01
    )
    text = markdown({"tiny on arithmetic": list(verdicts(runs).values())}, runs)
    rows = re.findall(r"\| nvfp4 - bf16 \|[^|]*lora.rank=8[^|]*\| robustness \|", text)
    assert len(rows) == 3  # entropy, growth, accuracy


def test_two_settings_that_fit_a_primary_contrast_are_named_and_not_averaged(study: Study, tmp_path: Path) -> None:
    for heat in (1.0, 1.1):
        study(["quant=bf16", f"rollout.temperature={heat}"])
        runs = study(["quant=nvfp4", f"rollout.temperature={heat}"], reward=heat)
    found = verdicts(runs)[GROWTH]
    assert found.verdict == "incomplete"
    assert "rollout.temperature=1.1" in found.reason and "--where KEY=VALUE" in found.reason
    command.main([str(tmp_path / "runs"), "--out", str(tmp_path / "out"), "--where", "rollout.temperature=1.1"])
    assert "Faster reward growth than 16-bit LoRA: **supported**" in (tmp_path / "out" / "claims.md").read_text()
    with pytest.raises(ConfigError, match=r"temperature=2.*1\.0, 1\.1"):
        command.with_values(runs, ["rollout.temperature=2"])
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        command.with_values(runs, ["temperature"])


def test_what_differs_in_more_than_the_factor_is_not_compared(study: Study) -> None:
    study(["quant=bf16", "rollout.temperature=1.1"])
    runs = study(["quant=nvfp4"], entropy=2.0)
    assert verdicts(runs)[ENTROPY].contrasts[0].reason == "no runs"
    contrast, where = TITLES[ENTROPY].contrasts[0], TITLES[ENTROPY].where
    (stratum,) = match(contrast, where, study(["quant=bf16"]))
    for cell in stratum.cells:
        treated, control = (arm[cell].config for arm in stratum.arms)
        assert {key for key in treated if treated[key] != control[key]} == {"quant", "name"}
    assert [seed for _, seed in stratum.cells] == list(SEEDS)


def test_an_incomplete_grid_is_not_compared_and_its_missing_runs_are_listed(study: Study) -> None:
    """A run that is not finished is missing too."""
    study(["quant=bf16"], seeds=(0, 1, 2, 3))
    study(["quant=nvfp4"], seeds=(0, 1, 2, 4))
    runs = study(["quant=nvfp4"], seeds=(3,), finished=False)
    found = verdicts(runs)[GROWTH]
    assert (found.verdict, found.reason) == ("incomplete", "incomplete grid, missing: nvfp4 seed=3; bf16 seed=4")
    text = markdown({"": evaluate_claims(CLAIMS, runs)}, runs)
    assert "tiny-nvfp4-none-grpo-r32-s3" in text.split("left out (1): ")[1][:40]


def test_a_single_seed_wins_nothing(study: Study) -> None:
    study(["quant=bf16"], seeds=[0])
    found = verdicts(study(["quant=nvfp4"], seeds=[0], entropy=3.0, accuracy=0.4))
    for title in (GROWTH, ACCURACY):
        assert (found[title].verdict, found[title].reason) == ("not testable here", "a single seed decides nothing")
        assert math.isnan(found[title].p_direction)  # nor does it count among the tests
    assert summary_text(list(found.values())).count("(a single seed)") == 3  # entropy, growth, accuracy


def test_seeds_that_all_gave_the_same_decide_nothing(study: Study) -> None:
    """Runs that are copies of one run have no spread, which is no certainty."""
    for quant in ("bf16", "nvfp4"):
        runs = study([f"quant={quant}"])
        originals = {run.option("quant.name"): run for run in runs if run.option("seed") == 0}
        for run in runs:
            for name in ("metrics.jsonl", "samples.parquet"):
                (run.path / name).write_bytes((originals[run.option("quant.name")].path / name).read_bytes())
    found = verdicts(load_runs([runs[0].path.parent]))
    for title in (GROWTH, ACCURACY):
        assert found[title].verdict == "not testable here" and "copies of a run" in found[title].reason
    assert "(the same in all 5 repetitions)" in summary_text(list(found.values()))


# --- bases, machines -------------------------------------------------------------------------------------------------


def test_several_bases_are_the_unit(study: Study) -> None:
    """Two seeds agree on their base's effect and bases do not: three numbers, not six."""
    for base, size in enumerate((0.01, 0.05, 0.09)):
        study(["quant=bf16", f"model.seed={base}"], seeds=(0, 1))
        runs = study(["quant=nvfp4", f"model.seed={base}"], seeds=(0, 1), reward=size)
    setting = only(verdicts(runs)[GROWTH]).primary
    assert setting is not None and setting.effect is not None
    effect, whole = setting.effect, setting.effect.whole
    assert (effect.unit, whole.n, whole.df, effect.seeds) == ("base", 3, 2, 2)
    assert [base.value for base in effect.by_base] == pytest.approx([0.01, 0.05, 0.09], abs=0.004)
    assert whole.stderr == pytest.approx(0.04 / 3**0.5, rel=0.1) and effect.between == pytest.approx(0.04, rel=0.1)
    text = markdown({"tiny on arithmetic": evaluate_claims(CLAIMS, runs)}, runs)
    assert "3 bases × 2 seeds, 2 df" in text and "one more base of as many seeds: [" in text
    runs = study(["quant=bf16", "model.seed=3"], seeds=(0, 1))
    runs = study(["quant=nvfp4", "model.seed=3"], seeds=(0,))
    assert re.search(r"missing: nvfp4 of base .*seed=3.* seed=1$", verdicts(runs)[GROWTH].reason)


def test_arms_of_two_machines_or_library_versions_are_not_compared(study: Study) -> None:
    study(["quant=bf16"])
    found = verdicts(study(["quant=nvfp4"], reward=0.1, packages={"torch": "2.11.0"}))[GROWTH]
    assert found.verdict == "not testable here" and "torch 2.11.0" in found.reason and "torch 2.13.0" in found.reason


def test_pairs_of_several_machines_are_compared_within_each(study: Study) -> None:
    for packages, seeds in (({"torch": "2.11.0"}, (0, 1, 2)), ({"torch": "2.13.0"}, (3, 4, 5))):
        study(["quant=bf16"], seeds=seeds, packages=packages)
        runs = study(["quant=nvfp4"], seeds=seeds, packages=packages, reward=0.1)
    assert verdicts(runs)[GROWTH].verdict == "supported"


@pytest.mark.parametrize(
    ("greedy", "verdict"),
    [
        (0.1, "supported"),
        (-0.1, "supported at temperature 1, reversed greedy"),
        (0.0, "supported at temperature 1, open greedy"),
        (None, "supported"),
    ],
)
def test_an_accuracy_is_judged_by_greedy_answers_too(study: Study, greedy: float | None, verdict: str) -> None:
    """Without greedy answers in one of the arms the table says so, and the verdict is that of sampled ones."""
    study(["quant=bf16"], greedy=0.0, spread=0.05)
    runs = study(["quant=nvfp4"], accuracy=0.1, greedy=greedy, spread=0.05)
    found = evaluate_claims(CLAIMS, runs)[2]
    assert (found.claim.title, found.verdict) == (ACCURACY, verdict)
    assert found.greedy is not None and evaluate_claims(CLAIMS, runs)[1].greedy is None
    (row,) = [row for row in summary_text([found]).splitlines() if ACCURACY in row]
    if greedy is None:
        assert "| 5 matched runs, but they have no greedy answers |" in row.replace("10 matched", "5 matched")
    else:
        assert effect(only(found.greedy)) == pytest.approx(greedy, abs=0.03)
        assert f"{100 * effect(only(found.greedy)):+.2f} [" in row


def test_the_way_of_sampling_is_in_the_word(study: Study) -> None:
    usual = ["eval.temperature=0.6", "eval.top_p=0.95"]
    study(["quant=bf16", *usual], greedy=0.0)
    found = verdicts(study(["quant=nvfp4", *usual], accuracy=0.1, greedy=-0.1))[ACCURACY]
    assert found.verdict == "supported at temperature 0.6 and top-p 0.95, reversed greedy"


HOT, BONUS = "rollout.temperature=1.2", "train.entropy_coef=0.01"


@pytest.mark.parametrize(
    ("control", "gain", "size", "verdict", "says"),
    [
        (None, 0.0, -0.1, "harms", "no control of exploration was run"),
        (None, 0.0, 0.0, "not testable here", "no control of exploration was run"),
        (None, 0.0, 0.1, "supported", ""),
        (HOT, 0.0, -0.1, "harms", "no control of exploration passed (a hotter sampler - none"),
        (HOT, -0.1, 0.0, "not testable here", "no control of exploration passed"),
        (HOT, 0.1, 0.0, "negligible", ""),
        (BONUS, 0.1, -0.1, "reversed", ""),
    ],
)
def test_noise_only_harms_where_no_control_shows_that_exploration_pays(
    study: Study, control: str | None, gain: float, size: float, verdict: str, says: str
) -> None:
    if control:
        study(["quant=bf16"])
        study(["quant=bf16", control], accuracy=gain)
    study(["quant=nvfp4"])
    found = verdicts(study(["quant=nvfp4", "aqn=exp"], accuracy=size, noisy=1.1))[AQN]
    assert found.verdict == verdict and says in found.reason and bool(says) == bool(found.reason)


@pytest.mark.parametrize(("late", "verdict"), [(-0.01, "harms but negligible"), (0.01, "supported")])
def test_where_no_control_passed_a_harm_may_be_called_small_and_a_help_not(
    study: Study, late: float, verdict: str
) -> None:
    study(["quant=nvfp4"])
    study(["quant=nvfp4", "aqn=exp"], late=late, noisy=1.1)
    for aqn in ("linear", "cosine", "log"):
        runs = study(["quant=nvfp4", f"aqn={aqn}"], noisy=1.1)
    assert verdicts(runs)[DECAY].verdict == verdict


# --- gates -----------------------------------------------------------------------------------------------------------


def test_noise_that_does_not_move_entropy_cannot_be_judged(study: Study) -> None:
    """What four shapes of a treatment without effect have in common says nothing about shapes."""
    study(["quant=nvfp4"])
    for aqn in ("exp", "linear", "cosine", "log"):
        runs = study(["quant=nvfp4", f"aqn={aqn}"], accuracy=0.1)
    found = verdicts(runs)
    for title in (AQN, DECAY):
        assert found[title].verdict == "not testable here"
        assert "was not shown to act on its own target: exp - none" in found[title].reason


def test_noise_that_acts_is_judged_at_the_dose_that_was_named(study: Study) -> None:
    study(["quant=nvfp4"])
    study(["quant=nvfp4", "aqn=exp", "aqn.sigma_start=0.05"], accuracy=-0.1, noisy=1.1)
    for aqn, late in (("exp", 0.1), ("linear", 0.0), ("cosine", 0.0), ("log", 0.05)):
        runs = study(["quant=nvfp4", f"aqn={aqn}"], late=late, accuracy=0.1, noisy=1.1)
    found = verdicts(runs)
    assert (found[AQN].verdict, found[DECAY].verdict) == ("supported", "supported")
    assert effect(only(found[AQN])) == pytest.approx(0.1, abs=0.02)
    assert [setting.label for setting in only(found[AQN]).others] == ["aqn.sigma_start=0.05"]
    for run in runs:
        if run.option("aqn.name") == "log":
            rows = run.metrics["metric"] == "entropy"
            run.metrics.loc[rows, "value"] /= 1.1
    again = verdicts([replace(run) for run in runs])[DECAY]  # without what a run has cached
    assert again.verdict == "not testable here" and "log - none" in again.reason


@pytest.mark.parametrize(
    ("curves", "why"),
    [
        ({"rise": 0.02}, "at the floor"),
        ({"start": 0.9, "rise": 0.09}, "at the ceiling"),
        ({"rise": 0.6, "fall": 0.5}, "diverged"),
    ],
)
def test_arms_that_cannot_differ_are_not_compared(study: Study, curves: dict[str, float], why: str) -> None:
    study(["quant=bf16"], **curves)
    found = verdicts(study(["quant=nvfp4"], reward=0.1, **curves))
    assert found[GROWTH].verdict == "not testable here" and found[GROWTH].reason.startswith(why)
    assert effect(only(found[GROWTH])) == pytest.approx(0.1, abs=0.01)  # shown all the same
    assert math.isnan(found[GROWTH].p_direction)


def test_a_run_diverged_if_it_ends_ten_points_below_its_best(study: Study) -> None:
    # best: the mean of steps 16 to 25 or so; end: that of steps 31 to 40
    study(["quant=bf16"], rise=0.0, fall=0.1, seeds=[0])
    runs = study(["quant=nvfp4"], rise=0.0, fall=0.2, seeds=[0])
    smooth = [run.series("train", "accuracy").rolling(10).mean().dropna() for run in runs]
    assert [diverged(run) for run in runs] == [bool(c.max() - c.iloc[-1] > 0.1) for c in smooth] == [False, True]


def test_a_diverged_robustness_row_is_marked(study: Study) -> None:
    for change in ((), ("lora.rank=8",)):
        for quant in ("bf16", "nvfp4"):
            runs = study([f"quant={quant}", *change], rise=0.6, fall=0.5 if change and quant == "bf16" else 0.0)
    text = markdown({"tiny on arithmetic": evaluate_claims(CLAIMS, runs)}, runs)
    assert "(diverged: bf16 in 5 of 5 runs)" in text


def test_a_higher_rate_is_judged_by_a_difference_of_differences(study: Study) -> None:
    """At three times the rate NVFP4 gains 0.1 and BF16 loses 0.2; what ten times does is not mixed in."""
    for quant, high in (("nvfp4", 0.1), ("bf16", -0.2)):
        for factor, reward in ((1, 0.0), (3, high), (10, 0.7 * (quant == "nvfp4"))):
            runs = study([f"quant={quant}", f"optim.lr={3e-4 * factor}"], reward=reward + 0.2 * (quant == "bf16"))
    found = verdicts(runs)[RATE]
    assert found.verdict == "supported" and effect(only(found)) == pytest.approx(0.3, abs=0.01)
    (other,) = found.contrasts[1].others
    assert other.effect is not None and other.effect.whole.value == pytest.approx(0.7, abs=0.01)


def test_a_rate_that_ruins_both_formats_says_nothing(study: Study) -> None:
    for quant in ("nvfp4", "bf16"):
        for factor, rise in ((1, 0.4), (3, -0.2)):
            runs = study([f"quant={quant}", f"optim.lr={3e-4 * factor}"], rise=rise, reward=0.1 * (quant == "nvfp4"))
    found = verdicts(runs)[RATE]
    assert found.verdict == "not testable here" and "NVFP4-LoRA at 3x rate and LoRA at 3x rate" in found.reason


def test_a_format_is_never_packed_otherwise_at_the_high_rate_than_at_the_usual(study: Study) -> None:
    """Two quantizers are two settings, and not four: one at the high rate less the other at the usual is no rate."""
    for packed, reward in ((("quant=nvfp4",), 0.0), (("quant=nvfp4", "quantizer=mse"), 0.5), (("quant=bf16",), 0.0)):
        for factor, change in ((1, 0.0), (3, 0.1)):
            runs = study([*packed, f"optim.lr={3e-4 * factor}"], reward=reward + change)
    result = only(verdicts(runs)[RATE])
    assert [s.effect.whole.value for s in result.comparisons if s.effect] == pytest.approx([0.0, 0.0], abs=0.01)


# --- speed and memory ------------------------------------------------------------------------------------------------

EIGHT = ("rollout.prompts_per_step=2",)  # x 4 completions


def test_a_cpu_cannot_speak_for_a_gpu(study: Study) -> None:
    study(["quant=bf16", *EIGHT])
    found = verdicts(study(["quant=nvfp4", *EIGHT], speed=2.0, memory=0.5))
    for title in (ROLLOUT, STEP, MEMORY):
        assert found[title].verdict == "not testable here"
        assert found[title].contrasts[0].reason.startswith("10 matched runs, but they ran on a CPU")
    study(["quant=bf16", *EIGHT], device="cuda", reward=0.1)
    found = verdicts(study(["quant=nvfp4", *EIGHT], speed=1.3, memory=0.5, device="cuda", reward=0.1))
    assert (found[STEP].verdict, found[MEMORY].verdict) == ("supported", "supported")
    assert math.exp(effect(found[ROLLOUT].contrasts[0])) == pytest.approx(1.3, abs=0.004)
    assert found[GROWTH].verdict == "incomplete" and "device=" in found[GROWTH].reason  # never across devices


def test_runs_that_trained_nothing_are_refused_by_name(study: Study) -> None:
    """All rewards of each group were equal: no step had a gradient, and its time is that of no training."""
    study(["quant=bf16", *EIGHT], device="cuda")
    runs = study(["quant=nvfp4", *EIGHT], speed=1.3, device="cuda", taught=0.0)
    with pytest.raises(ConfigError) as error:
        evaluate_claims(CLAIMS, runs)
    for run in runs:
        assert (run.name in str(error.value)) == (run.option("quant.name") == "nvfp4")
    assert "train/taught_frac is 0" in str(error.value)
    for run in runs:
        file = run.path / "metrics.jsonl"
        file.write_text(file.read_text().replace('"train/taught_frac"', '"x"'))
    with pytest.raises(ConfigError, match=r"does not record train/taught_frac"):
        evaluate_claims(CLAIMS, load_runs([runs[0].path.parent]))


def test_steps_that_trained_nothing_do_not_count_for_speed(study: Study) -> None:
    study(["quant=bf16", *EIGHT], device="cuda")
    runs = study(["quant=nvfp4", *EIGHT], speed=1.25, device="cuda")
    for run in runs:
        if run.option("quant.name") == "nvfp4":
            metrics = run.metrics
            idle = metrics["step"] % 3 == 0
            metrics.loc[idle & (metrics["metric"] == "train/taught_frac"), "value"] = 0.0
            metrics.loc[idle & (metrics["metric"] == "time/step_s"), "value"] = 1e-3
    found = verdicts([replace(run) for run in runs])[STEP]
    assert math.exp(effect(only(found))) == pytest.approx(1 / 1.25, abs=0.004)


@pytest.mark.parametrize(
    ("memory", "verdict"), [(0.5, "supported"), (0.99, "supported but negligible"), (1.2, "reversed")]
)
def test_peak_memory_that_no_seed_moves_is_known(study: Study, memory: float, verdict: str) -> None:
    """Speeds without spread are copies; bytes without spread are what an allocator counts."""
    study(["quant=bf16", *EIGHT], device="cuda", spread=0.0)
    found = verdicts(study(["quant=nvfp4", *EIGHT], speed=1.3, memory=memory, device="cuda", spread=0.0))
    assert (found[MEMORY].verdict, found[MEMORY].p_direction) == (verdict, 0.0)
    assert found[STEP].verdict == "not testable here"


# --- what is matched -------------------------------------------------------------------------------------------------


def test_methods_of_the_paper_are_shown_and_decide_nothing(study: Study) -> None:
    """The paper's LoRA has half the rate of its QeRL: what is seen may be the rate's."""
    paper = ["model.lr=1e-5", "steps=40"]
    study([*paper, "recipe=method/lora"])
    runs = study([*paper, "recipe=method/qerl"], reward=0.1, accuracy=0.1)
    found = verdicts(runs)[GROWTH]
    matched, nvfp4, qerl = found.contrasts
    assert (matched.reason, nvfp4.reason, found.verdict) == ("no runs of nvfp4", "no runs", "incomplete")
    assert qerl.others[0].effect is not None and qerl.others[0].effect.whole.value == pytest.approx(0.1, abs=0.01)
    assert qerl.confounders == ["aqn.name (exp_paper / none)", "optim.lr (1e-05 / 5e-06)"]
    text = markdown({"qwen on gsm8k": evaluate_claims(CLAIMS, runs)}, runs)
    assert "QeRL - LoRA, as published" in text and "NVFP4-LoRA - LoRA, as published" not in text
    assert "QeRL - LoRA, as published: aqn.name (exp_paper / none), optim.lr (1e-05 / 5e-06)" in text
    assert "`python src/run.py experiment=paper/table1 recipe=method/lora,method/nvfp4 optim.lr=1e-5 -m`" in text


def test_the_methods_are_those_of_the_recipes() -> None:
    recipes = {"QeRL": "qerl", "NVFP4-LoRA": "nvfp4", "QLoRA": "qlora", "LoRA": "lora"}
    configs = {
        name: flat(as_dict(compose(["experiment=paper/table1", f"recipe=method/{recipe}"])))
        for name, recipe in recipes.items()
    }
    published = [one for claim in CLAIMS for one in claim.contrasts if one.confounded and "high" not in one.label]
    assert {arm.label for one in published for arm in one.arms} == recipes.keys()
    for arm in (arm for one in published for arm in one.arms):
        assert all_accept(arm.where, configs[arm.label]), arm


def test_formats_packed_in_two_ways_are_not_the_methods_of_the_paper(study: Study) -> None:
    """A study of quantizers has matched pairs; any other pair of its arms was never published."""
    wide = "model.hidden_size=64"
    for quant in ("nf4", "nvfp4"):
        for quantizer in ("rtn", "mse"):
            runs = study([f"quant={quant}", f"quantizer={quantizer}", wide])
    matched, published = verdicts(runs)[NF4].contrasts
    assert len(matched.comparisons) == 2 and published.reason == "no runs"
    published = verdicts(study(["quant=nvfp4", "quantizer=awq", wide]))[NF4].contrasts[1]
    assert published.confounders == ["quantizer.name (rtn / awq)"]


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
    assert (found[ACCURACY].verdict, found[ACCURACY].reason) == ("not testable here", f"4 matched runs, but {excuse}")
    assert found[AQN].reason == "no runs"
    assert (only(found[GROWTH]).primary is not None) == (override == "eval=none")


def test_runs_without_a_number_are_named(study: Study, tmp_path: Path) -> None:
    study(["quant=bf16"])
    runs = study(["quant=nvfp4"])
    for run in runs[:2]:
        file = run.path / "metrics.jsonl"
        file.write_text(file.read_text().replace('"entropy"', '"entropi"'))
    with pytest.raises(ConfigError) as error:
        evaluate_claims(CLAIMS, load_runs([tmp_path / "runs"]))
    assert "in 2 of these runs" in str(error.value)
    assert all(f"{run.name} has no number of the metric entropy" in str(error.value) for run in runs[:2])


def test_runs_without_answers_are_named(study: Study, tmp_path: Path) -> None:
    study(["quant=bf16"])
    runs = study(["quant=nvfp4"])
    for run in runs[:2]:
        (run.path / "samples.parquet").unlink()
    with pytest.raises(ConfigError) as error:
        evaluate_claims(CLAIMS, load_runs([tmp_path / "runs"]))
    assert all(run.name in str(error.value) for run in runs[:2]) and "eval=task" in str(error.value)


def test_different_questions_are_not_paired(study: Study) -> None:
    study(["quant=bf16"])
    with pytest.raises(ConfigError, match=r"different questions: tiny-bf16-none.*tiny-nvfp4-none"):
        evaluate_claims(CLAIMS, study(["quant=nvfp4"], asked="other"))


def test_two_runs_of_one_setting_and_seed_are_refused(study: Study) -> None:
    study(["quant=nvfp4"])
    with pytest.raises(ConfigError, match="two runs of one setting"):
        evaluate_claims(CLAIMS, study(["quant=nvfp4", "name=again-s0-x"]))


# --- the report ------------------------------------------------------------------------------------------------------


def test_the_report_says_what_was_compared_and_what_to_run(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    study(["quant=bf16"])
    runs = study(["quant=nvfp4"], reward=0.05)
    root = runs[0].path.parent
    command.main([str(root), "--out", str(root.parent / "out")])
    assert "tiny on arithmetic" in capsys.readouterr().out
    text = (root.parent / "out" / "claims.md").read_text()
    html = study_page("runs", runs, evaluated("runs", runs), {})
    assert "Faster reward growth than 16-bit LoRA: **supported**" in text
    origin = r"5 seeds, 4 df, correlation [+-]\d\.\d\d"
    row = rf"\| nvfp4 - bf16 \| all \| primary \| [^|]* \| \+0\.0[45]\d+ \[[^|]* reward \| {origin} \|"
    assert "tiny-nvfp4-none-grpo-r32-s{0,1,2,3,4}-" in text and "`python src/run.py experiment=tiny/ranks -m`" in text
    for claim in CLAIMS:
        assert claim.title in text and claim.reported in text and claim.source[1:] in text
    assert '<strong class="supported">' in html and "Smallest effect that would be found" in html
    assert text.count("\n### ") == html.count("<h3>") == len(CLAIMS)
    found = re.search(row, text)
    assert found is not None and f"<td>{escape(found[0].split(' | ')[4])}</td>" in html
    picture = (root.parent / "out" / "claims.svg").read_text()
    assert (
        picture.startswith("<?xml") and svg(all_claims(evaluate_claims(CLAIMS, runs), "tiny on arithmetic")) == picture
    )


def test_the_picture_leaves_out_claims_without_an_effect_but_not_all(study: Study) -> None:
    def rows(runs: list[Run]) -> list[str]:
        axis = all_claims(evaluate_claims(CLAIMS, runs), "").axes[0]
        return [label.get_text() for label in axis.get_yticklabels()]

    everything = rows(study(["quant=bf16"]))  # one arm: no claim has an effect
    assert {row.split(". ")[0] for row in everything if row[0].isdigit()} == {str(claim.number) for claim in CLAIMS}
    some = rows(study(["quant=nvfp4"]))
    assert {row.split(". ")[0] for row in some if row[0].isdigit()} == {"1", "2", "3"}
    assert set(some) < set(everything)


@pytest.mark.parametrize("command", sorted({claim.command for claim in CLAIMS} | {claim.at_scale for claim in CLAIMS}))
def test_what_to_run_can_be_run(command: str) -> None:
    python, path, *words = shlex.split(command)
    assert (python, path) == ("python", "src/run.py") and "-m" in words
    build(compose([word.split(",")[0] for word in words if word != "-m"]))
